"""A file system of the tree that never answers delays only callers that use it [TK §3.1, SFS §5.2]."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cloakfs import linux
from tests.agents import User, read
from tests.mount.conftest import Mount, is_mounted
from tests.waiting import wait_until, wait_until_settled

ANN = 4001
NULL = "no_root_squash"
CLOAKED = "rw,range_map = uid 5000 5010 map 7000,cloak_list = uid +077 7000 7010"

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


class Far:
    """A FUSE file system at `path`, which can be made to hang."""

    def __init__(self, path: str, base: str) -> None:
        self.path = path
        os.mkdir(path)
        self._daemon = subprocess.Popen([sys.executable, "-m", "tests.mount.slowfs", path, os.path.join(base, "flag")])
        wait_until(lambda: is_mounted(path))

    def hang(self) -> None:
        os.kill(self._daemon.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._daemon.pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        with contextlib.suppress(OSError):
            linux.umount(self.path, linux.MNT_DETACH)
        self._daemon.terminate()
        self._daemon.wait()


@pytest.fixture
def far(tree: str, base: str) -> Iterator[Far]:
    """Mounted inside of the tree."""
    place = Far(os.path.join(tree, "far"), base)
    yield place
    place.close()


def make(tree: str) -> None:
    os.mkdir(f"{tree}/near")
    os.chmod(f"{tree}/near", 0o777)
    for number in range(20):
        with open(f"{tree}/near/{number}", "w") as file:
            file.write("content")
        os.chmod(f"{tree}/near/{number}", 0o640 if number % 2 else 0o644)
        os.chown(f"{tree}/near/{number}", 4001, 4001)


def work_near(near: str) -> None:
    """A bit of everything beside the file system that hangs."""
    assert len(os.listdir(near)) == 20
    for number in range(20):
        assert read(f"{near}/{number}") == b"content"
    with open(f"{near}/new", "wb") as file:
        file.write(bytes(100_000))
        os.fsync(file.fileno())
    os.rename(f"{near}/new", f"{near}/newer")
    os.unlink(f"{near}/newer")


def rename(here: str) -> None:
    os.rename(f"{here}/5", f"{here}/6")


def make_file(here: str) -> None:
    os.close(os.open(f"{here}/new", os.O_CREAT | os.O_WRONLY, 0o644))


# All sorts of ways to wait for it.
WAYS: dict[str, Callable[[str], object]] = {
    "stat": lambda here: os.stat(f"{here}/1"),
    "stat of what was never looked at": lambda here: os.stat(f"{here}/77"),
    "absent": lambda here: os.path.exists(f"{here}/nothing"),
    "read": lambda here: read(f"{here}/2"),
    "list": os.listdir,
    "list what it is in": lambda here: list(os.scandir(os.path.dirname(here))),
    "stat of its top": os.stat,
    "create": make_file,
    "remove": lambda here: os.unlink(f"{here}/3"),
    "rename": rename,
    "chmod": lambda here: os.chmod(f"{here}/4", 0o600),
    "xattr": lambda here: os.listxattr(f"{here}/1"),
    "statvfs": os.statvfs,
}


def go(way: str, here: str) -> None:
    WAYS[way](here)


@pytest.mark.parametrize("words", [NULL, CLOAKED], ids=["null", "cloaked"])
def test_what_hangs_keeps_nobody_else_waiting(
    mount: MakeMount, user: MakeUser, tree: str, far: Far, words: str
) -> None:
    make(tree)
    there = mount("-o", f"{words},rw" if words == NULL else words)
    here, near = there.at("far"), there.at("near")
    ann = user(ANN)
    waiting = [user(ANN) for _ in WAYS]
    for number in range(7):
        assert ann.do(os.stat, f"{here}/{number}").st_size == 1 << 20
    ann.do(work_near, near)
    far.hang()
    try:
        for one, way in zip(waiting, WAYS, strict=True):
            one.start(go, way, here)
            # Each of these would never end if the daemon waited for the other one.
            ann.do_within(60, work_near, near)
        # What the kernel remembers needs nobody, and a request that is not about it at all is answered.
        late = [name for one, name in zip(waiting, WAYS, strict=True) if not one.has_answered()]
        assert len(late) >= 6, f"did it hang at all? only {late}"
    finally:
        far.go_on()
    for one in waiting:
        one.finish_within(60)


def test_a_file_system_that_hangs_when_it_is_met(mount: MakeMount, user: MakeUser, tree: str, far: Far) -> None:
    make(tree)
    far.hang()
    try:
        there = mount("-o", f"{NULL},rw")
        user(ANN).do_within(60, work_near, there.at("near"))
        assert "does not answer" in there.log
    finally:
        far.go_on()


@pytest.fixture
def other_far(tree: str, base: str) -> Iterator[str]:
    """Mounted inside of the tree, with a directory in it; it never hangs."""
    place = os.path.join(tree, "other-far")
    os.mkdir(place)
    os.makedirs(os.path.join(base, "other", "directory"))
    subprocess.run(["bindfs", os.path.join(base, "other"), place], check=True, timeout=60)
    yield place
    with contextlib.suppress(OSError):
        linux.umount(place, linux.MNT_DETACH)


def fails_within(seconds: float, one: User, call: Callable[..., object], *args: object) -> bool:
    one.start(call, *args)
    return not one.finish_within(seconds)


@pytest.mark.parametrize("kind", ["far", "below what is far", "local"])
def test_what_is_taken_off_lies_nowhere(kind: str, tree: str, other_far: str, mount: MakeMount, user: MakeUser) -> None:
    """With umount --lazy, and somebody stays in it: what was its top is in itself then."""
    make(tree)
    place = other_far
    if kind != "far":
        place = os.path.join(other_far if kind == "below what is far" else tree, "directory")
        os.makedirs(place, exist_ok=True)
        linux.mount("none", place, "tmpfs", 0, "size=4m,mode=777")
        wait_until_settled(place)
    m = mount("-o", CLOAKED)
    somebody, somebody_else = user(ANN), user(ANN)
    try:
        somebody.do_within(60, os.chdir, m.at(os.path.relpath(place, tree)))
        somebody.do_within(60, os.stat, ".")
        linux.umount(place, linux.MNT_DETACH)
        # The table of mounts is not read again all the time while others mount and unmount (`follow_mounts`).
        for path in (".", "new"):
            wait_until(partial(fails_within, 60, somebody, os.stat, path))
        somebody_else.do_within(60, work_near, m.at("near"))
    finally:
        somebody.close()
        with contextlib.suppress(OSError):
            linux.umount(place, linux.MNT_DETACH)
