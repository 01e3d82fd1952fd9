"""Locks of fcntl(2), of open file descriptions, and of flock(2): across places they do what they do on the bare tree.

A scene is played by two or three processes, each in a place of its own, and says what happened. It is played on the
bare tree first; in any other places, the same has to happen.
"""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyfuse3
import pytest

from cloakfs.filesystem.lockholders import MOST_OF_ONE
from cloakfs.tuning import Tuning
from tests.agents import User, read
from tests.campaign import locks as campaign
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, is_mounted, mounted, run, unmount
from tests.mount.loopfs import filesystem
from tests.mount.test_caching import CLOAKED, requests
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

UID = 3001
SECONDS = 5  # within which what has to happen does
SOON = 0.1  # what has not happened by then does not happen

with_locks = pytest.mark.skipif(
    not hasattr(pyfuse3, "FileLock"), reason="this pyfuse3 is not patched (scripts/setup --patched-pyfuse3)"
)
pytestmark = with_locks

# -- what a process does ---------------------------------------------------------------------------

_FLOCK = struct.Struct("hhqqi4x")
READ, WRITE, NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
_OF_FLOCK = {READ: fcntl.LOCK_SH, WRITE: fcntl.LOCK_EX, NONE: fcntl.LOCK_UN}

KINDS = ("fcntl", "ofd", "flock")


def lock(fd: int, how: str, kind: int, extent: tuple[int, int] = (0, 0), *, wait: bool = False) -> None:
    if how == "flock":
        fcntl.flock(fd, _OF_FLOCK[kind] | (0 if wait else fcntl.LOCK_NB))
        return
    commands = (fcntl.F_SETLK, fcntl.F_SETLKW) if how == "fcntl" else (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)
    fcntl.fcntl(fd, commands[wait], _FLOCK.pack(kind, os.SEEK_SET, *extent, 0))


def wait_for(fd: int, how: str, kind: int, extent: tuple[int, int] = (0, 0)) -> None:
    lock(fd, how, kind, extent, wait=True)


def conflict(fd: int, how: str, kind: int, extent: tuple[int, int]) -> tuple[int, int, int]:
    command = fcntl.F_GETLK if how == "fcntl" else fcntl.F_OFD_GETLK
    answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, *extent, 0))
    found, _, start, length, _ = _FLOCK.unpack(answer)
    return (found, start, length) if found != NONE else (NONE, 0, 0)


def in_child(fd: int, how: str, kind: int, extent: tuple[int, int] = (0, 0)) -> int:
    """Lock in a child process by the same open file; return the errno."""
    child = os.fork()
    if child == 0:
        try:
            lock(fd, how, kind, extent)
        except OSError as exc:
            os._exit(exc.errno or 255)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Actor:
    """A process that has a file open."""

    def __init__(self, user: User, path: str, flags: int = os.O_RDWR) -> None:
        self.user, self.path = user, path
        self.fd = user.do(os.open, path, flags)

    def try_lock(self, how: str, kind: int, extent: tuple[int, int] = (0, 0)) -> str:
        return errno.errorcode.get(self.user.error(lock, self.fd, how, kind, extent), "done")

    def wait(self, how: str, kind: int, extent: tuple[int, int] = (0, 0)) -> None:
        self.user.start(wait_for, self.fd, how, kind, extent)

    def has_waited(self) -> str:
        """Whether it still waits after a while."""
        return "has returned" if self.user.has_answered(SOON) else "waits"


# -- scenes ----------------------------------------------------------------------------------------

Scene = Callable[[str, Actor, Actor], list[object]]


def which_kinds_conflict(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = []
    for mine, yours in itertools.product((READ, WRITE), repeat=2):
        seen += [one.try_lock(how, mine), two.try_lock(how, yours), one.try_lock(how, NONE), two.try_lock(how, NONE)]
    return seen


def ranges_are_split_and_merged(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = []
    for kind, extent in ((WRITE, (0, 100)), (READ, (40, 20)), (NONE, (10, 5)), (WRITE, (200, 0)), (NONE, (300, 0))):
        seen.append(one.try_lock(how, kind, extent))
    if how == "flock":
        return seen
    for start in (0, 10, 14, 15, 39, 40, 59, 60, 99, 100, 199, 200, 299, 300, 1 << 40):
        for kind in (READ, WRITE):
            seen.append(two.user.do(conflict, two.fd, how, kind, (start, 1)))
            seen.append(two.try_lock(how, kind, (start, 1)))
            two.try_lock(how, NONE, (start, 1))
    return seen


def who_waits_gets_it(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = [one.try_lock(how, WRITE, (10, 10))]
    two.wait(how, READ, (15, 1))
    seen += [two.has_waited(), one.try_lock(how, NONE, (10, 10)), two.user.finish_within(SECONDS)]
    return [*seen, one.try_lock(how, WRITE, (15, 1))]


def who_is_killed_while_it_waits_leaves_nothing(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = [one.try_lock(how, WRITE)]
    two.wait(how, WRITE)
    seen.append(two.has_waited())
    two.user.close()
    return [*seen, one.try_lock(how, NONE), one.try_lock(how, WRITE), in_other(how, one)]


def who_is_interrupted_leaves_nothing(how: str, one: Actor, two: Actor) -> list[object]:
    two.user.do(signal.signal, signal.SIGUSR1, interrupt)
    seen: list[object] = [one.try_lock(how, WRITE)]
    two.wait(how, WRITE)
    seen.append(two.has_waited())
    os.kill(two.user.pid, signal.SIGUSR1)
    seen += [two.user.finish_within(SECONDS), one.try_lock(how, NONE), one.try_lock(how, READ), in_other(how, one)]
    return seen


def interrupt(*_: object) -> None:
    raise InterruptedError


def in_other(how: str, one: Actor) -> str:
    """What a third process gets, which has the file open at the first one's place."""
    with User(UID) as third:
        return Actor(third, one.path).try_lock(how, READ)


def who_dies_has_no_lock(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = [one.try_lock(how, WRITE), two.try_lock(how, READ)]
    two.wait(how, WRITE)
    seen.append(two.has_waited())
    one.user.close()
    return [*seen, two.user.finish_within(SECONDS)]


def closing_another_descriptor(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = [one.try_lock(how, WRITE), two.try_lock(how, READ)]
    other = one.user.do(os.open, one.path, os.O_RDONLY)
    one.user.do(os.close, other)
    seen += [two.try_lock(how, READ), two.try_lock(how, NONE), one.try_lock(how, WRITE)]
    copy = one.user.do(os.dup, one.fd)
    one.user.do(os.close, copy)
    seen += [two.try_lock(how, READ), two.try_lock(how, NONE), one.try_lock(how, WRITE)]
    one.user.do(os.close, one.fd)
    return [*seen, within(SECONDS, lambda: two.try_lock(how, WRITE) == "done")]


def within(seconds: float, ask: Callable[[], bool]) -> bool:
    """Whether it becomes true in time: the last close of a file is reported to a file system after close(2)."""
    with contextlib.suppress(AssertionError):
        wait_until(ask, seconds)
        return True
    return False


def a_child_has_the_same_file_open(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = [one.try_lock(how, WRITE, (0, 10))]
    seen.append(one.user.do(in_child, one.fd, how, READ, (5, 1)))
    seen += [two.try_lock(how, WRITE, (5, 1)), two.try_lock(how, WRITE, (0, 1))]
    seen += [one.user.do(in_child, one.fd, how, NONE, (0, 0)), two.try_lock(how, WRITE, (7, 1))]
    return seen


def from_reading_to_writing_and_back(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = []
    for kind, other in ((READ, READ), (WRITE, READ), (READ, NONE), (WRITE, READ), (READ, READ), (NONE, WRITE)):
        seen += [one.try_lock(how, kind), two.try_lock(how, other)]
    return seen


def by_two_open_files(how: str, one: Actor, two: Actor) -> list[object]:
    """The first process has the file open twice: for reading, and for writing."""
    reads, writes = one.user.do(os.open, one.path, os.O_RDONLY), one.user.do(os.open, one.path, os.O_WRONLY)
    seen: list[object] = []
    for fd, kind, extent in ((reads, READ, (0, 10)), (writes, WRITE, (5, 10)), (reads, READ, (12, 1))):
        seen.append(one.user.error(lock, fd, how, kind, extent))
        for start in (0, 4, 5, 12, 14, 15):
            for wanted in (READ, WRITE):
                seen.append(two.try_lock(how, wanted, (start, 1)))
                two.try_lock(how, NONE, (start, 1))
    for fd, kind in ((reads, WRITE), (writes, READ)):
        seen.append(one.user.error(lock, fd, how, kind, (30, 1)))
    one.user.do(os.close, reads)
    one.user.do(os.close, writes)
    return [*seen, within(SECONDS, lambda: two.try_lock(how, WRITE) == "done")]


_results: dict[int, str] = {}  # of threads that waited, in the process that did, by descriptor


def wait_in_thread(fd: int, how: str, kind: int, extent: tuple[int, int]) -> None:
    def wait() -> None:
        try:
            lock(fd, how, kind, extent, wait=True)
        except OSError as exc:
            _results[fd] = errno.errorcode.get(exc.errno or 0, str(exc.errno))
        else:
            _results[fd] = "done"

    _results.pop(fd, None)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(SOON)


def result_of_thread(fd: int) -> str | None:
    return _results.get(fd)


def a_thread_waits_while_another_one_closes(how: str, one: Actor, two: Actor) -> list[object]:
    """What closing releases, what is locked after it, and whether the thread goes on waiting."""
    seen: list[object] = []
    for close in (_a_duplicate, _another_open_file):
        seen += [one.try_lock(how, WRITE, (100, 10)), two.try_lock(how, WRITE, (0, 10))]
        one.user.do(wait_in_thread, one.fd, how, WRITE, (0, 10))
        one.user.do(close, one.fd, one.path)
        seen += [two.try_lock(how, WRITE, (100, 10)), two.try_lock(how, NONE, (100, 10))]
        seen += [one.try_lock(how, WRITE, (100, 10)), one.user.do(result_of_thread, one.fd)]
        seen.append(two.try_lock(how, NONE, (0, 10)))
        seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, one.fd) == "done"))
        seen += [two.try_lock(how, WRITE, (0, 10)), two.try_lock(how, WRITE, (100, 10)), one.try_lock(how, NONE)]
    return seen


def _a_duplicate(fd: int, _: str) -> None:
    os.close(os.dup(fd))


def _another_open_file(_: int, path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def a_thread_waits_while_another_one_closes_its_descriptor(how: str, one: Actor, two: Actor) -> list[object]:
    seen: list[object] = [two.try_lock(how, WRITE, (0, 10))]
    one.user.do(wait_in_thread, one.fd, how, WRITE, (0, 10))
    one.user.do(os.close, one.fd)
    seen += [one.user.do(result_of_thread, one.fd), two.try_lock(how, NONE, (0, 10))]
    seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, one.fd) is not None))
    return [*seen, one.user.do(result_of_thread, one.fd), within(SECONDS, lambda: two.try_lock(how, WRITE) == "done")]


def a_thread_waits_while_the_file_locked_first_is_closed(how: str, one: Actor, two: Actor) -> list[object]:
    """What belongs to that open file is gone, and the thread goes on waiting by another one."""
    seen: list[object] = [one.try_lock("flock", WRITE), one.try_lock(how, WRITE, (100, 10))]
    other = one.user.do(os.open, one.path, os.O_RDWR)
    seen.append(two.try_lock("fcntl", WRITE, (0, 10)))
    one.user.do(wait_in_thread, other, "fcntl", WRITE, (0, 10))
    one.user.do(os.close, one.fd)
    seen.append(within(SECONDS, lambda: two.try_lock("flock", WRITE) == "done"))
    seen += [two.try_lock(how, WRITE, (100, 10)), one.user.do(result_of_thread, other)]
    seen.append(two.try_lock("fcntl", NONE, (0, 10)))
    seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, other) == "done"))
    with User(UID) as third:
        return [*seen, Actor(third, one.path).try_lock("fcntl", READ, (0, 10))]


def fork_idle() -> int:
    """Make a child process that has the same files open, and does nothing; return its pid."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def a_child_closes_last_what_the_parent_locked_by(how: str, one: Actor, two: Actor) -> list[object]:
    """What the parent has locked by another open file meanwhile stays."""
    reads = one.user.do(os.open, one.path, os.O_RDONLY)
    seen: list[object] = [one.user.error(lock, reads, how, READ, (0, 10))]
    child = one.user.do(fork_idle)
    one.user.do(os.close, reads)
    seen.append(one.try_lock(how, READ, (50, 1)))
    one.user.do(end_child, child)
    seen.append(within(SOON, lambda: two.try_lock(how, WRITE, (50, 1)) == "done"))
    one.user.do(os.close, one.fd)
    return [*seen, within(SECONDS, lambda: two.try_lock(how, WRITE) == "done")]


def a_child_closes_last_while_a_thread_waits(how: str, one: Actor, two: Actor) -> list[object]:
    other = one.user.do(os.open, one.path, os.O_RDWR)
    seen: list[object] = [one.try_lock(how, WRITE, (100, 1)), two.try_lock("fcntl", WRITE, (0, 10))]
    child = one.user.do(fork_idle)
    one.user.do(wait_in_thread, other, "fcntl", WRITE, (0, 10))
    one.user.do(os.close, one.fd)
    seen.append(one.user.error(lock, other, "fcntl", WRITE, (50, 1)))
    one.user.do(end_child, child)
    seen.append(within(SOON, lambda: two.try_lock("fcntl", WRITE, (50, 1)) == "done"))
    seen.append(two.try_lock("fcntl", NONE, (0, 10)))
    seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, other) == "done"))
    return [*seen, two.try_lock("fcntl", WRITE, (50, 1)), two.try_lock("fcntl", WRITE, (0, 10))]


def a_thread_waits_while_another_one_locks_by_another_open_file(how: str, one: Actor, two: Actor) -> list[object]:
    """From reading to writing: what the thread waits for does not collide with it."""
    reads = one.user.do(os.open, one.path, os.O_RDONLY)
    seen: list[object] = [one.user.error(lock, reads, how, READ, (20, 1)), two.try_lock(how, WRITE, (0, 10))]
    one.user.do(wait_in_thread, reads, how, READ, (0, 10))
    seen += [one.try_lock(how, WRITE, (30, 5)), two.try_lock(how, NONE, (0, 10))]
    seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, reads) == "done"))
    seen += [two.try_lock(how, WRITE, (20, 1)), two.try_lock(how, WRITE, (0, 10)), two.try_lock(how, READ, (30, 1))]
    return seen


def a_thread_waits_for_a_range_of_which_another_one_locks_a_part(how: str, one: Actor, two: Actor) -> list[object]:
    reads = one.user.do(os.open, one.path, os.O_RDONLY)
    seen: list[object] = [one.user.error(lock, reads, "fcntl", READ, (20, 1)), two.try_lock("fcntl", WRITE, (0, 3))]
    one.user.do(wait_in_thread, reads, "fcntl", READ, (0, 10))
    seen += [one.user.error(lock, one.fd, "fcntl", WRITE, (5, 1)), two.try_lock("fcntl", NONE, (0, 3))]
    seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, reads) == "done"))
    return [*seen, two.try_lock("fcntl", WRITE, (0, 3))]


def a_thread_waits_to_read_while_another_one_locks_to_write(how: str, one: Actor, two: Actor) -> list[object]:
    reads = one.user.do(os.open, one.path, os.O_RDONLY)
    seen: list[object] = [one.user.error(lock, reads, how, READ, (0, 10)), two.try_lock(how, WRITE, (20, 10))]
    one.user.do(wait_in_thread, reads, how, READ, (20, 10))
    seen += [one.try_lock(how, WRITE, (0, 10)), two.try_lock(how, NONE, (20, 10))]
    seen.append(within(SECONDS, lambda: one.user.do(result_of_thread, reads) == "done"))
    return [*seen, two.try_lock(how, WRITE, (20, 10)), two.try_lock(how, READ, (0, 10)), one.try_lock(how, WRITE)]


SCENES: tuple[Scene, ...] = (
    which_kinds_conflict,
    ranges_are_split_and_merged,
    who_waits_gets_it,
    who_is_killed_while_it_waits_leaves_nothing,
    who_is_interrupted_leaves_nothing,
    who_dies_has_no_lock,
    closing_another_descriptor,
    a_child_has_the_same_file_open,
    from_reading_to_writing_and_back,
    by_two_open_files,
    a_thread_waits_while_another_one_closes,
    a_thread_waits_while_another_one_closes_its_descriptor,
    a_thread_waits_while_the_file_locked_first_is_closed,
    a_child_closes_last_what_the_parent_locked_by,
    a_child_closes_last_while_a_thread_waits,
    a_thread_waits_while_another_one_locks_by_another_open_file,
    a_thread_waits_for_a_range_of_which_another_one_locks_a_part,
    a_thread_waits_to_read_while_another_one_locks_to_write,
)


def play(scene: Scene, how: str, one: str, two: str) -> list[object]:
    with User(UID) as first, User(UID) as second:
        return scene(how, Actor(first, one), Actor(second, two))


# -- places ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """Where one file can be used: by two mounts, by fixed views of a third, and on the real tree.

    Another one, on a file system that no other mount shows, passes where files do (`filesystem.passthrough`).
    """
    with tempfile.TemporaryDirectory(prefix="cloakfs-test-", ignore_cleanup_errors=True) as base:
        os.chmod(base, 0o755)
        for name in ("several", "single"):
            Path(base, name).mkdir()
        with filesystem("ext4", f"{base}/several") as top, filesystem("ext4", f"{base}/single") as alone:
            yield from _places(Path(top), Path(alone))


def _places(base: Path, alone: Path) -> Iterator[dict[str, str]]:
    tree = base / "tree"
    for directory in (tree / "team", alone / "tree/team"):
        directory.mkdir(parents=True)
        for name in ("bare", "file"):
            (directory / name).write_text("")
            os.chown(directory / name, UID, UID)
    points = [*(base / name for name in ("one", "two", "views")), alone / "mnt"]
    for point in points:
        point.mkdir()
    with (
        mounted(str(tree), str(points[0]), "-o", CLOAKED),
        mounted(str(tree), str(points[1])),
        mounted(str(tree), str(points[2]), "-o", f"views={UID}:{UID} 3002:3002"),
        mounted(str(alone / "tree"), str(points[3]), "-o", CLOAKED),
        User(UID) as keeper,
    ):
        keeper.do(os.open, f"{points[3]}/team/file", os.O_WRONLY)  # so that those who open it later pass, too
        yield {
            "the tree": f"{tree}/team/file",
            "a mount": f"{points[0]}/team/file",
            "another mount": f"{points[1]}/team/file",
            "a fixed view": f"{points[2]}/@{UID}/team/file",
            "the only mount": f"{points[3]}/team/file",
            "the tree of the only mount": f"{alone}/tree/team/file",
            "bare": f"{tree}/team/bare",
        }


PAIRS = [
    ("a mount", "a mount"),
    ("a mount", "another mount"),
    ("another mount", "a fixed view"),
    ("the tree", "a mount"),
    ("a mount", "the tree"),
    ("the only mount", "the only mount"),
    ("the only mount", "the tree of the only mount"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_as_on_the_bare_tree(scene: Scene, how: str, pair: tuple[str, str], places: dict[str, str]) -> None:
    expected = play(scene, how, places["bare"], places["bare"])
    assert play(scene, how, places[pair[0]], places[pair[1]]) == expected
    with User(UID) as last:  # nothing is left
        for tree in ("the tree", "the tree of the only mount"):
            assert within(SECONDS, lambda: Actor(last, places[tree]).try_lock(how, WRITE) == "done")  # noqa: B023


# -- what the bare tree has not ---------------------------------------------------------------------


@pytest.fixture
def file(tree: str) -> str:
    Path(tree, "file").write_text("old")
    os.chown(Path(tree, "file"), UID, UID)
    return "file"


@pytest.mark.parametrize("how", KINDS)
def test_local_locks_hold_within_the_mount_alone(how: str, file: str, mount: MakeMount) -> None:
    m = mount("-o", "local_locks")
    assert play(which_kinds_conflict, how, m.at(file), m.at(file)) == play(
        which_kinds_conflict, how, m.real(file), m.real(file)
    )
    with User(UID) as one, User(UID) as two:
        assert Actor(one, m.at(file)).try_lock(how, WRITE) == "done"
        assert Actor(two, m.real(file)).try_lock(how, WRITE) == "done"
    assert locks_of_status(m.path).startswith("within this mount alone (local_locks)")


def locks_of_status(path: str) -> str:
    (line,) = [line for line in run("status", "-v", path).stdout.splitlines() if line.startswith(" locks ")]
    return line.removeprefix(" locks ").strip()


def test_status_says_where_locks_hold(file: str, mount: MakeMount) -> None:
    assert locks_of_status(mount().path).startswith("on the real tree")


@pytest.mark.parametrize("how", KINDS)
def test_whoever_gets_a_lock_sees_what_was_written_under_it(how: str, file: str, mount: MakeMount) -> None:
    """Pages are cached until a change is reported: to read them is right only until the next lock."""
    m, other = mount(), mount()
    increase_in_turns(how, [(UID, m.at(file)), (UID, other.at(file)), (UID, m.real(file))])


@pytest.mark.parametrize("how", KINDS)
def test_whoever_gets_a_lock_sees_what_was_written_in_another_view(how: str, file: str, mount: MakeMount) -> None:
    """The change is the daemon's own, and its kernel has pages of the file for the other view."""
    m = mount("-o", f"views={UID}:{UID} 3002:{UID}")
    os.chmod(m.real(file), 0o660)
    increase_in_turns(how, [(uid, m.at(f"@{uid}", file)) for uid in (UID, 3002)])


def increase_in_turns(how: str, places: list[tuple[int, str]]) -> None:
    with contextlib.ExitStack() as stack:
        actors = [Actor(stack.enter_context(User(uid, UID)), path) for uid, path in places]
        for number in range(200):
            for actor in actors:
                assert actor.user.do(increase, actor.fd, how) == number * len(actors) + actors.index(actor)


@pytest.mark.parametrize("how", KINDS)
def test_whoever_only_reads_under_a_lock_sees_each_write(how: str, file: str, mount: MakeMount) -> None:
    """A write of one's own would make the kernel look at the file again."""
    m, other = mount(), mount()
    os.chmod(m.real(file), 0o660)
    with User(UID) as one, User(3002, UID) as two:
        for path, read_at in itertools.product((m.at(file), m.real(file)), (other.at(file), m.at(file))):
            writer, reader = Actor(one, path), Actor(two, read_at)
            for number in range(100):
                writer.user.do(write_number, writer.fd, how, number)
                assert reader.user.do(read_number, reader.fd, how) == number, (path, read_at)


@pytest.mark.parametrize("how", [*KINDS, "without a lock"])
def test_what_is_written_in_one_view_is_seen_in_another_that_has_the_file_open(
    how: str, file: str, mount: MakeMount
) -> None:
    """At once under a lock, and else when the kernel has dropped its pages. Fixed views cache what they have read."""
    m = mount("-o", f"views={UID}:{UID} 3002:{UID}")
    os.chmod(m.real(file), 0o660)
    with User(UID) as one, User(3002, UID) as two:
        writer, reader = Actor(one, m.at(f"@{UID}", file)), Actor(two, m.at("@3002", file))
        for number in range(30):
            if how in KINDS:
                writer.user.do(write_number, writer.fd, how, number)
                assert reader.user.do(read_number, reader.fd, how) == number
            else:
                writer.user.do(os.pwrite, writer.fd, b"%-20d" % number, 0)
                wait_until(lambda: int(reader.user.do(os.pread, reader.fd, 20, 0)) == number, 1)  # noqa: B023


def write_number(fd: int, how: str, number: int) -> None:
    lock(fd, how, WRITE, wait=True)
    os.pwrite(fd, b"%-20d" % number, 0)
    lock(fd, how, NONE)


def read_number(fd: int, how: str) -> int:
    lock(fd, how, READ, wait=True)
    number = int(os.pread(fd, 20, 0))
    lock(fd, how, NONE)
    return number


def increase(fd: int, how: str) -> int:
    """Add one to the number in the file, whose length never changes; return what it was."""
    lock(fd, how, WRITE, wait=True)
    number = int(os.pread(fd, 20, 0).strip(b"old\n ") or b"0")
    os.pwrite(fd, b"%-20d" % (number + 1), 0)
    lock(fd, how, NONE)
    return number


def test_processes_that_wait_for_each_other(file: str, mount: MakeMount) -> None:
    m = mount()
    with User(UID) as one, User(UID) as two:
        a, b = Actor(one, m.at(file)), Actor(two, m.at(file))
        assert a.try_lock("fcntl", WRITE, (0, 1)) == b.try_lock("fcntl", WRITE, (1, 1)) == "done"
        a.wait("fcntl", WRITE, (1, 1))
        assert a.has_waited() == "waits"
        assert two.error(wait_for, b.fd, "fcntl", WRITE, (0, 1)) == errno.EDEADLK
        assert b.try_lock("fcntl", NONE, (1, 1)) == "done"
        assert one.finish_within(SECONDS)


def test_who_waits_has_a_share(file: str, mount: MakeMount, user: MakeUser) -> None:
    """One user waits for many locks: the others' requests, and their waits, are answered as before."""
    m = mount()
    os.chmod(m.real(file), 0o666)
    with User(UID) as one, User(3002) as two, User(3003) as three:
        a, c = Actor(one, m.at(file)), Actor(three, m.at(file))
        assert a.try_lock("fcntl", WRITE, (0, 1)) == "done"
        two.start(wait_in_many_threads, m.at(file), MOST_OF_ONE + 10)
        wait_until(lambda: "requests for locks waiting" in m.log)
        c.wait("ofd", READ)
        assert c.has_waited() == "waits"
        assert a.try_lock("fcntl", NONE) == "done"
        assert three.finish_within(SECONDS)
        answers = two.answer_within(60)
        assert sorted(set(answers)) == [0, errno.ENOLCK]
        assert answers.count(errno.ENOLCK) == 10


def wait_in_many_threads(path: str, count: int) -> list[int]:
    answers: list[int] = []

    def run() -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            wait_for(fd, "ofd", READ)
        except OSError as exc:
            answers.append(exc.errno or -1)
        else:
            answers.append(0)
        os.close(fd)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_mount_with_a_lock_that_is_waited_for_can_be_unmounted(file: str, mount: MakeMount) -> None:
    m = mount()
    with User(UID) as one, User(UID) as two:
        a, b = Actor(one, m.real(file)), Actor(two, m.at(file))
        assert a.try_lock("flock", WRITE) == "done"
        b.wait("flock", WRITE)
        assert b.has_waited() == "waits"
        two.close()
        unmount(m.path)
        assert not is_mounted(m.path)


def test_a_database_and_a_log_in_several_places() -> None:
    """`scripts/campaign locks` does it for longer, and with more programs."""
    assert {problem for _, problem in campaign.run(["sqlite", "log"], 2).values()} == {""}


def test_the_end_of_a_file_under_a_lock() -> None:
    """lseek(2) with SEEK_END asks for the size; invalidated meanwhile, the kernel would go on with the old one.

    Not even by others who close the file.
    """
    assert campaign.run(["records"], 6)["records"][1] == ""


def test_a_file_that_is_replaced_under_a_lock_of_another_one() -> None:
    assert campaign.run(["replaced"], 4)["replaced"][1] == ""


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("attribute", ["a", "i"])
def test_files_that_not_even_root_may_open_to_write(attribute: str, how: str, base: str) -> None:
    """An append-only file is opened once more with O_APPEND, and an immutable one was open before."""
    flags = os.O_WRONLY | (os.O_APPEND if attribute == "a" else 0)

    def play(path: str) -> list[object]:
        with User(UID) as one, User(UID) as two:
            if attribute == "a":
                subprocess.run(["chattr", "+a", real], check=True)
            fd, other = one.do(os.open, path, flags), two.do(os.open, path, flags)
            subprocess.run(["chattr", f"+{attribute}", real], check=True)
            try:
                said: list[object] = [one.error(lock, fd, how, WRITE), two.error(lock, other, how, WRITE)]
                said += [one.error(lock, fd, how, NONE), two.error(lock, other, how, WRITE)]
                return said
            finally:
                subprocess.run(["chattr", f"-{attribute}", real], check=True)

    with filesystem("ext4", base) as tree:
        real = f"{tree}/file"
        Path(real).write_bytes(b"x")
        os.chown(real, UID, UID)
        expected = play(real)
        os.mkdir(f"{base}/mount")
        with mounted(tree, f"{base}/mount") as m:
            assert play(m.at("file")) == expected == [0, errno.EAGAIN, 0, 0]


@pytest.mark.parametrize("locks_again", [True, False])
def test_what_a_mapping_wrote_while_the_file_was_locked(*, locks_again: bool, file: str, mount: MakeMount) -> None:
    """That a file was closed is put off for who has a lock, but not for long."""
    m = mount()
    os.truncate(m.real(file), mmap.PAGESIZE)
    with User(UID) as one:
        holder = Actor(one, m.at(file))
        assert holder.try_lock("flock", WRITE) == "done"
        assert one.do(os.pread, holder.fd, 5, 0) != b"other"
        with open(m.real(file), "r+b") as real, mmap.mmap(real.fileno(), 0) as mapped:
            mapped[:5] = b"other"
        if locks_again:
            assert holder.try_lock("flock", NONE) == "done"
            assert holder.try_lock("flock", READ) == "done"
            assert one.do(os.pread, holder.fd, 5, 0) == b"other"
        else:
            wait_until(lambda: one.do(os.pread, holder.fd, 5, 0) == b"other")


@pytest.mark.usefixtures("figures_at_once")
def test_no_request_at_close_without_locks(file: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount(), user(UID)
    owner.do(read, m.at(file))
    before = requests(m)
    owner.do(read, m.at(file))
    assert "unlock" not in requests(m) - before


@pytest.mark.parametrize(("options", "of_reader"), [("no_root_squash", 0), ("no_root_squash,knfsd", 1)])
def test_reading_a_file_that_nobody_locks_takes_no_flush(
    options: str, of_reader: int, file: str, mount: MakeMount, tmp_path: Path
) -> None:
    """But in an export, the server has one open file for all clients, and FLUSH says whose locks are over."""
    flushes = tmp_path / "flushes"
    flushes.write_text("")
    with daemons_with(partial(alterations.count_flushes, str(flushes))):
        m = mount("-o", options)

    def count(flags: int) -> int:
        before = len(flushes.read_text().splitlines())
        os.close(os.open(m.at(file), flags))
        return len(flushes.read_text().splitlines()) - before

    assert [count(flags) for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY)] == [of_reader, 1, 1]
    fd = os.open(m.at(file), os.O_RDWR)
    lock(fd, "ofd", READ)
    assert count(os.O_RDONLY) == 1
    os.close(fd)


def test_a_file_that_is_only_read_is_unlocked_as_it_is_closed(file: str, mount: MakeMount) -> None:
    """Each time at once, though the kernel does not wait for the daemon when the file is closed."""
    m = mount()
    with User(UID) as one, User(UID) as two:
        writer = Actor(two, m.at(file))
        for _ in range(200):
            reader = Actor(one, m.at(file), os.O_RDONLY)
            assert reader.try_lock("fcntl", READ) == "done"
            assert writer.try_lock("fcntl", WRITE) == "EAGAIN"
            one.do(os.close, reader.fd)
            assert writer.try_lock("fcntl", WRITE) == "done"
            assert writer.try_lock("fcntl", NONE) == "done"


def test_locks_outlive_what_was_open_for_reading_before(file: str, mount: MakeMount) -> None:
    """Not so what was opened for writing, or when the lock was there: then it is as on the bare tree."""

    def is_locked(place: str, flags: int, *, before: bool) -> bool:
        with User(UID) as one, User(UID) as two:
            other = one.do(os.open, place, flags) if before else -1
            assert Actor(one, place).try_lock("fcntl", WRITE) == "done"
            one.do(os.close, other if before else one.do(os.open, place, flags))
            return Actor(two, place).try_lock("fcntl", WRITE) == "EAGAIN"

    m = mount()
    for flags, before in itertools.product((os.O_RDONLY, os.O_RDWR), (False, True)):
        assert not is_locked(m.real(file), flags, before=before)
        assert is_locked(m.at(file), flags, before=before) == (flags == os.O_RDONLY and before)


def test_who_locks_very_many_ranges_has_a_share(file: str, mount: MakeMount) -> None:
    """Another caller's locks are granted as before, and each takes as long."""
    with daemons_with(tuning=Tuning(most_locked_ranges=100)):
        m = mount()
    os.chmod(m.real(file), 0o666)
    with User(UID) as one, User(3002) as two:
        a, b = Actor(one, m.at(file)), Actor(two, m.at(file))
        answers = [a.try_lock("fcntl", WRITE, (2 * number, 1)) for number in range(60)]
        assert answers == ["done"] * 50 + ["ENOLCK"] * 10
        assert b.try_lock("fcntl", WRITE, (1001, 1)) == "done"
        assert a.try_lock("fcntl", NONE, (0, 40)) == "done"
        assert a.try_lock("fcntl", WRITE, (1, 1)) == "done"
