"""No fault in a background task ends the daemon, or keeps it from serving; the task goes on afterwards."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from cloakfs import linux
from cloakfs.state import client
from cloakfs.state.runtime import mounted
from cloakfs.tuning import Tuning
from tests.agents import User, names, read
from tests.mount.conftest import Mount, daemons_with, is_mounted, told
from tests.mount.faults import FAULTS, arm
from tests.mount.guards import Faulty, fail_to_watch, guarding
from tests.mount.loopfs import require_disk
from tests.mount.usersmounts import as_users_mount
from tests.waiting import wait_until

ANN, BOB = 4001, 4002

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


class Fail(Protocol):
    """Have faults (all of them) happen at a point, one after the other, provoked by `trigger`."""

    def __call__(self, point: str, trigger: Callable[[], object], *some: str) -> None: ...


@pytest.fixture
def faults(base: str) -> Iterator[str]:
    """The file that arms faults; mounts made from now on heed it."""
    path = os.path.join(base, "faults")
    for name in (path, f"{path}.done"):
        Path(name).touch()
        os.chmod(name, 0o666)
    # What is done now and then is done all the time.
    with daemons_with(partial(arm, path), tuning=Tuning(housekeeping_seconds=0.05, view_seconds=0.05)):
        yield path


def was_done_after(trigger: Callable[[], object], done: str, line: str) -> bool:
    """Whether a fault is in the list of those that happened; if not, do what brings it about."""
    if line in Path(done).read_text(encoding="ascii").splitlines():
        return True
    trigger()
    return False


@pytest.fixture
def fail(faults: str) -> Fail:
    def go(point: str, trigger: Callable[[], object], *some: str) -> None:
        for fault in some or FAULTS:
            with open(faults, "a", encoding="ascii") as file:
                file.write(f"{point} {fault}\n")
            line = f"{point} {fault}"
            wait_until(partial(was_done_after, trigger, f"{faults}.done", line))

    return go


POLICY = ("--policy", f"{Path(__file__).parent}/faults.py:Plain")
CLOAKED = "no_root_squash,groups=database,prefetch=always,cloak_list=uid +077 4001"


@pytest.fixture
def served(tree: str, mount: MakeMount, fail: Fail) -> Mount:
    os.mkdir(f"{tree}/open")
    os.mkdir(f"{tree}/hidden")
    os.chown(f"{tree}/hidden", ANN, ANN)
    os.chmod(f"{tree}/hidden", 0o700)
    Path(f"{tree}/open/file").write_bytes(bytes(1 << 20))
    made = mount("-o", f"{CLOAKED},passthrough=off", *POLICY)  # the daemon is to read ahead
    made.expect_errors = True
    return made


def test_each_task_with_each_fault(
    tree: str, base: str, served: Mount, user: MakeUser, fail: Fail
) -> None:  # about 10 seconds
    require_disk(tree, "nothing is read ahead of what is in memory")
    pid = served.pid
    ann, bob = user(ANN), user(BOB)
    count = itertools.count()

    def change_behind() -> None:
        ann.do(os.stat, served.at("open", "file"))
        os.utime(f"{tree}/open/file", (next(count), 1))

    def change_or_be_refused() -> None:
        # A request may be what fails: it reads what is reported if it comes before the task that does, and has a
        # thread look at a disk that was slow just now.
        with contextlib.suppress(OSError):
            change_behind()

    def write_behind() -> None:
        opened = ann.do(os.open, served.at("open", "file"), os.O_RDONLY)
        ann.do(os.read, opened, 100)
        with open(f"{tree}/open/file", "r+b") as file:
            file.write(str(next(count)).encode())
        told()  # while it is open, its pages are invalidated
        ann.do(os.close, opened)

    def take_behind() -> None:
        ann.do(os.stat, served.at("open", "file"))
        os.chmod(f"{tree}/open", 0o700)
        told()
        os.chmod(f"{tree}/open", 0o755)

    def reload() -> None:
        ann.do(os.stat, served.at("open", "file"))
        os.kill(pid, signal.SIGHUP)

    def mount_something() -> None:
        linux.mount("none", f"{base}/beside", "tmpfs", 0, "size=4k")
        linux.umount(f"{base}/beside", linux.MNT_DETACH)

    def refuse() -> None:
        ann.do(os.stat, served.at("hidden"))
        assert not bob.do(os.path.exists, served.at("hidden"))

    def read_all() -> None:
        with open(f"{tree}/ahead", "wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert len(ann.do(read, served.at("ahead"))) == 1 << 20
        os.unlink(f"{tree}/ahead")

    def come_anew() -> None:
        with User(5000 + next(count)) as somebody:
            assert somebody.do(os.listdir, served.at("open")) == ["file"]

    def ask() -> None:
        with contextlib.suppress(client.DaemonError), client.Daemon(mounted()[served.path]):
            pass

    os.mkdir(f"{base}/beside")
    for point, trigger in {
        "house": lambda: None,
        "nodeids": lambda: None,
        "changes": change_or_be_refused,
        "invalidate": change_behind,
        "invalidate names": change_behind,
        "invalidate pages": write_behind,
        "invalidate everything": reload,
        "invalidate subtrees": take_behind,
        "mounts": mount_something,
        "signals": lambda: os.kill(pid, signal.SIGHUP),
        "look up again": refuse,
        "ahead": read_all,
        "groups": come_anew,
        "connection": ask,
        "question": ask,
    }.items():
        fail(point, trigger)
        assert ann.do(os.listdir, served.at("open")) == ["file"], point
        assert bob.error(os.stat, served.at("hidden")), point
    # They all go on.
    with open(f"{tree}/open/new", "w") as file:
        file.write("new")
    wait_until(lambda: ann.do(os.stat, served.at("open", "file")).st_size == 1 << 20)
    os.truncate(f"{tree}/open/file", 5)
    wait_until(lambda: ann.do(os.stat, served.at("open", "file")).st_size == 5)
    before = served.log.count(": reloaded")
    os.kill(pid, signal.SIGHUP)
    wait_until(lambda: served.log.count(": reloaded") > before)
    assert served.pid == pid
    with client.Daemon(mounted()[served.path]) as daemon:
        assert daemon.options.prefetch == "always"
    # Also where the thread is to begin.
    fail("start of a thread", change_or_be_refused, "thread")
    # The last of its tasks: it ends all the same.
    to_send = [signal.SIGTERM]

    def ask_to_end() -> None:
        if to_send:  # a second one would end it at once
            os.kill(pid, to_send.pop())

    fail("stop", ask_to_end, "EMFILE")
    wait_until(lambda: not is_mounted(served.path))
    # A fault that met a request instead of a task is logged with a traceback; nothing else is.
    unexpected = [trace for trace in served.log.split("Traceback")[1:] if "in failing" not in trace]
    assert not unexpected, unexpected[0]


def test_a_fixed_view_with_each_fault(mount: MakeMount, fail: Fail) -> None:
    made = mount("--view", "daemon", *POLICY)
    made.expect_errors = True
    pid = made.pid
    fail("user database", lambda: None)
    assert os.listdir(made.path) == []
    assert made.pid == pid


# -- what users mount in the tree ------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("words", [b"", b",allow_other"], ids=["own", "allow_other"])
def test_users_mount_what_they_like(tree: str, mount: MakeMount, user: MakeUser, when: str, words: bytes) -> None:
    """A type and a name that are no UTF-8, and nobody who answers: it costs others nothing."""
    place = os.fsencode(tree) + b"/bob/m\xff\x0c"
    os.makedirs(place)
    Path(f"{tree}/bob/file").write_text("text")
    with contextlib.ExitStack() as stack:
        if when == "before":
            stack.enter_context(as_users_mount(place, BOB, subtype=b"x\xff", words=words))
        with daemons_with(tuning=Tuning(filesystem_seconds=1000.0)):
            made = mount("-o", "no_root_squash")
        ann = user(ANN)
        there = os.fsencode(made.path) + b"/bob/"
        if when == "meanwhile":
            assert ann.do(os.listdir, there + b"m\xff\x0c") == []
            stack.enter_context(as_users_mount(place, BOB, subtype=b"x\xff", words=words))
            # What the kernel remembers of the directory below is soon forgotten.
            wait_until(lambda: b"m\xff\x0c" not in ann.do(names, there))
        open_before = len(os.listdir(f"/proc/{made.pid}/fd"))
        for _ in range(20):
            ann.start(look_around, there, b"m\xff\x0c")
            # Each would have waited until somebody answers.
            assert ann.finish_within(60)
        assert len(os.listdir(f"/proc/{made.pid}/fd")) < open_before + 5
        assert not ann.do(os.path.exists, there + b"m\xff\x0c/anything")


def look_around(there: bytes, name: bytes) -> None:
    with contextlib.suppress(OSError):
        os.stat(there + name)
    assert os.listdir(there) == [b"file"]
    assert read(there + b"file") == b"text"
    with contextlib.suppress(OSError):
        os.rmdir(there + name)
    assert b"file" in os.listdir(there)


# -- the guard ---------------------------------------------------------------------------------------


def test_the_guard_with_each_fault(base: str, tree: str) -> None:
    root, run_dir = os.path.join(base, "root"), os.path.join(base, "run")
    path = f"{root}/one"
    os.mkdir(root)
    made = Mount(tree, path)
    server, watch = partial(Faulty, run_dir), partial(fail_to_watch, run_dir)
    with guarding(tree, path, run_dir, server, [watch], Tuning(guard_seconds=0.05)) as guard:
        pid = made.pid
        for fault in FAULTS:
            put(f"{run_dir}/check", fault)
            wait_until(lambda: not os.path.exists(f"{run_dir}/check"))
        # A daemon that nobody can wait for is not taken for dead.
        for fault in ("EMFILE", "arbitrary"):
            before = made.pid
            put(f"{run_dir}/pidfd", fault)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda before=before: has_another_daemon(made, before))  # type: ignore[misc]
            wait_until(lambda: not os.path.exists(f"{run_dir}/pidfd"))
        assert made.pid != pid
        assert guard.poll() is None
        assert is_mounted(path)
        guard.terminate()
        guard.wait(60)
        assert not is_mounted(path)
        assert guard.returncode == 0


def put(path: str, text: str) -> None:
    Path(f"{path}.new").write_text(text)
    os.rename(f"{path}.new", path)


def has_another_daemon(mount: Mount, before: int) -> bool:
    try:
        return mount.pid != before and os.listdir(mount.path) == []
    except (OSError, ValueError):
        return False
