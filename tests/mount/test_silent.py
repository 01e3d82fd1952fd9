"""A remote file system may stop responding at any moment, even one that may not be cached: nobody else waits."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cloakfs import linux
from tests.agents import User, read, write
from tests.mount.conftest import Mount, is_mounted
from tests.mount.test_hung import ANN, CLOAKED, NULL, make
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

SECONDS = 60.0
AFTER = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
"""After so many requests it falls silent; the last is more than any system call here makes of it."""


class Stalling:
    """A file system at `path` that answers as many requests as it is told to."""

    def __init__(self, path: str, *words: str) -> None:
        self.path = path
        os.mkdir(path)
        self._daemon = subprocess.Popen(
            [sys.executable, "-m", "tests.mount.stallfs", path, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        wait_until(lambda: is_mounted(path))

    def tell(self, word: str) -> int:
        """What it has to say: how many requests wait."""
        assert self._daemon.stdin is not None
        assert self._daemon.stdout is not None
        self._daemon.stdin.write(f"{word}\n".encode())
        self._daemon.stdin.flush()
        return int(self._daemon.stdout.readline())

    def close(self) -> None:
        self.tell("go")
        linux.umount(self.path, linux.MNT_DETACH)
        self._daemon.terminate()
        self._daemon.communicate()


@pytest.fixture
def far(tree: str) -> Iterator[Callable[..., Stalling]]:
    """Makes one inside of the tree."""
    with contextlib.ExitStack() as stack:

        def make_far(*words: str) -> Stalling:
            place = Stalling(os.path.join(tree, "far"), *words)
            stack.callback(place.close)
            return place

        yield make_far


def prepare() -> None:
    """In the working directory, what the system calls below want; as it was before each of them."""
    for name in os.listdir("."):
        (os.rmdir if os.path.isdir(name) and not os.path.islink(name) else os.unlink)(name)
    for name in ("file", "other"):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o666))
    os.mkdir("sub")
    os.symlink("file", "symlink")


def make_file() -> None:
    os.close(os.open("new", os.O_CREAT | os.O_WRONLY, 0o666))


def read_file() -> None:
    with open("file", "rb") as file:
        file.read()


def write_file() -> None:
    with open("file", "wb") as file:
        file.write(b"content")


def list_all() -> None:
    for entry in os.scandir("."):
        entry.stat(follow_symlinks=False)


WAYS: dict[str, Callable[[], object]] = {
    "stat": lambda: os.stat("file"),
    "stat of what is above": lambda: os.stat("sub/.."),
    "stat of nothing": lambda: os.path.exists("nothing"),
    "create": make_file,
    "unlink": lambda: os.unlink("file"),
    "rename": lambda: os.rename("file", "renamed"),
    "rename onto": lambda: os.rename("file", "other"),
    "link": lambda: os.link("file", "linked"),
    "mkdir": lambda: os.mkdir("new"),
    "symlink": lambda: os.symlink("file", "new"),
    "rmdir": lambda: os.rmdir("sub"),
    "readdir": list_all,
    "readlink": lambda: os.readlink("symlink"),
    "read": read_file,
    "write": write_file,
    "truncate": lambda: os.truncate("file", 5),
    "getxattr": lambda: os.listxattr("file"),
    "setxattr": lambda: os.setxattr("file", "user.x", b"1"),
    "chmod": lambda: os.chmod("file", 0o640),
    "statvfs": lambda: os.statvfs("file"),
}

CHANGE_NOTHING = {
    "stat", "stat of what is above", "stat of nothing", "readdir", "readlink", "read", "getxattr", "chmod", "statvfs",
    "setxattr", "truncate", "write",
}  # fmt: skip


def work(near: str) -> None:
    """A bit of everything in another place."""
    assert read(f"{near}/1") == b"content"
    write(f"{near}/new", b"x")
    os.rename(f"{near}/new", f"{near}/newer")
    os.unlink(f"{near}/newer")
    assert len(os.listdir(near)) == 20


def go(way: str) -> None:
    WAYS[way]()


@pytest.mark.parametrize(("words", "more"), [(f"rw,{NULL}", ["default_permissions"]), (CLOAKED, [])])
def test_whatever_request_it_falls_silent_at(
    mount: MakeMount, user: MakeUser, tree: str, far: Callable[..., Stalling], words: str, more: list[str]
) -> None:
    make(tree)
    silent = far(*more)
    there = mount("-o", words)
    ann, bob = user(ANN), user(5002 if words == CLOAKED else 4002)
    bob.do(os.chdir, there.at("far"))
    for way in WAYS:
        stalled = 0
        for answered in AFTER:
            if not (answered and way in CHANGE_NOTHING):
                bob.do_within(SECONDS, prepare)
            silent.tell(str(answered))
            bob.start(go, way)
            wait_until(lambda: bob.has_answered() or silent.tell("silent"), every=0.002)
            ann.start(work, there.at("near"))
            if not ann.answers_within(SECONDS):
                silent.tell("go")
                pytest.fail(f"{way}: everybody waits if there is no answer after {answered} requests")
            was_stalled = silent.tell("silent") > 0 and not bob.has_answered()
            silent.tell("go")
            bob.finish_within(SECONDS)
            stalled += was_stalled
            if not was_stalled:
                break
        assert 0 < stalled < len(AFTER), way
