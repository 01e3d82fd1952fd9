"""The daemon is killed while a program writes: what was acknowledged is in the real file; the program gets an error.

Nothing is buffered in the daemon, and nothing in the kernel but what was written to a mapping.
"""

import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents import User
from tests.mount.conftest import Mount, is_mounted, run
from tests.mount.fuseconnections import nobody_waits_for_ever
from tests.mount.loopfs import filesystem
from tests.waiting import wait_until

UID = 3001
BLOCK = 4096
SECONDS = 30

GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}


def block(number: int) -> bytes:
    return b"%-*d" % (BLOCK, number)


def append(path: str) -> tuple[int, int]:
    return _until_an_error(path, os.O_APPEND, lambda fd, number: os.write(fd, block(number)))


def write_at(path: str) -> tuple[int, int]:
    return _until_an_error(path, 0, lambda fd, number: os.pwrite(fd, block(number), number * BLOCK))


def write_in_sync(path: str) -> tuple[int, int]:
    return _until_an_error(path, os.O_SYNC, lambda fd, number: os.pwrite(fd, block(number), number * BLOCK))


def write_under_a_lock(path: str) -> tuple[int, int]:
    def locked(fd: int, number: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.pwrite(fd, block(number), number * BLOCK)
        fcntl.flock(fd, fcntl.LOCK_UN)

    return _until_an_error(path, 0, locked)


def write_to_a_mapping(path: str) -> tuple[int, int]:
    """Each block is written to a mapping of its own, and synchronized (msync(2))."""

    def mapped(fd: int, number: int) -> None:
        os.ftruncate(fd, (number + 1) * BLOCK)
        with mmap.mmap(fd, BLOCK, offset=number * BLOCK) as mapping:
            mapping[:] = block(number)
            mapping.flush()

    return _until_an_error(path, 0, mapped)


def _until_an_error(path: str, flags: int, work: Callable[[int, int], object]) -> tuple[int, int]:
    """Return how many blocks were acknowledged, and the errno that ended it."""
    fd = os.open(path, os.O_RDWR | flags)
    number = 0
    try:
        while True:
            work(fd, number)
            number += 1
    except OSError as exc:
        return number, exc.errno or -1


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, base: str) -> Iterator[str]:
    """A tree on this kind of file system."""
    with filesystem(request.param, base) as path:
        os.chmod(path, 0o777)
        yield path


@pytest.mark.parametrize("how", [append, write_at, write_in_sync, write_under_a_lock, write_to_a_mapping])
def test_what_was_acknowledged_is_in_the_file(how: Callable[[str], tuple[int, int]], disk: str, base: str) -> None:
    place = Path(base, "view")
    place.mkdir()
    Path(disk, "file").touch()
    os.chown(Path(disk, "file"), UID, UID)
    with nobody_waits_for_ever(base), User(UID) as writer:
        run("mount", disk, str(place))
        m = Mount(disk, str(place))
        writer.start(how, m.at("file"))
        wait_until(lambda: os.path.getsize(m.real("file")) > 100 * BLOCK, SECONDS)
        os.kill(m.pid, signal.SIGKILL)
        count, code = writer.answer_within(SECONDS)
        assert code in GONE, errno.errorcode.get(code)
        content = Path(disk, "file").read_bytes()
        assert [content[at * BLOCK : (at + 1) * BLOCK] == block(at) for at in range(count)] == [True] * count
        assert count >= 100
        wait_until(lambda: not is_mounted(m.path), SECONDS)
