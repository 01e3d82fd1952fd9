"""The daemon is killed while a program writes: what was acknowledged is in the real file.

The program gets an error, or goes on if the kernel writes its file by itself. Nothing is buffered in the daemon, and
nothing in the kernel but what was written to a mapping.
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
from tests.mount.test_passthrough import NEEDS_PASSTHROUGH
from tests.waiting import wait_until

UID = 3001
BLOCK = 4096
SECONDS = 30

PASSING = ("write", "append", "in sync")
"""The kinds for which the kernel needs no daemon; a lock, and the size that a mapping needs, are requests."""

GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}


def block(number: int) -> bytes:
    return b"%-*d" % (BLOCK, number)


def write_at(fd: int, number: int) -> None:
    os.pwrite(fd, block(number), number * BLOCK)


def append(fd: int, number: int) -> None:
    os.write(fd, block(number))


def write_under_a_lock(fd: int, number: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX)
    write_at(fd, number)
    fcntl.flock(fd, fcntl.LOCK_UN)


def write_to_a_mapping(fd: int, number: int) -> None:
    """Each block is written to a mapping of its own, and synchronized (msync(2))."""
    os.ftruncate(fd, (number + 1) * BLOCK)
    with mmap.mmap(fd, BLOCK, offset=number * BLOCK) as mapping:
        mapping[:] = block(number)
        mapping.flush()


KINDS: dict[str, tuple[Callable[[int, int], None], int]] = {
    "write": (write_at, os.O_WRONLY),
    "append": (append, os.O_WRONLY | os.O_APPEND),
    "in sync": (write_at, os.O_WRONLY | os.O_SYNC),
    "under a lock": (write_under_a_lock, os.O_RDWR),
    "mapping": (write_to_a_mapping, os.O_RDWR),
}


def write_until_an_error(path: str, kind: str, acknowledged: str, end: str) -> int:
    """Write blocks, and how many were acknowledged to another file, until there is a file `end` or an error.

    Returns:
        the errno of the error; 0 without.
    """
    work, flags = KINDS[kind]
    fd, count = os.open(path, flags), os.open(acknowledged, os.O_WRONLY)
    try:
        number = 0
        while not os.path.exists(end):
            work(fd, number)
            number += 1
            os.pwrite(count, b"%d" % number, 0)
    except OSError as exc:
        return exc.errno or -1
    return 0


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, base: str) -> Iterator[str]:
    """A tree on this kind of file system, with a file of the user."""
    with filesystem(request.param, base) as path:
        Path(path, "file").touch()
        os.chown(Path(path, "file"), UID, UID)
        yield path


@pytest.mark.parametrize("passthrough", ["off", pytest.param("auto", marks=NEEDS_PASSTHROUGH)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_acknowledged_is_in_the_file(kind: str, passthrough: str, disk: str, base: str) -> None:
    m, count, end = Mount(disk, f"{base}/views/mount"), Path(base, "count"), Path(base, "end")
    os.makedirs(m.path)
    count.touch()

    def written() -> int:
        return int(count.read_text() or "0")

    os.chown(count, UID, UID)
    with nobody_waits_for_ever(f"{base}/views"), User(UID) as writer:
        run("mount", m.source, m.path, "-o", f"passthrough={passthrough}")
        writer.start(write_until_an_error, m.at("file"), kind, str(count), str(end))
        wait_until(lambda: written() >= 100, SECONDS)
        os.kill(m.pid, signal.SIGKILL)
        if passthrough == "auto" and kind in PASSING:
            wait_until(lambda: not is_mounted(m.path), SECONDS)
            before = written()
            wait_until(lambda: written() >= before + 100, SECONDS)
            end.touch()
            assert writer.answer_within(SECONDS) == 0
        else:
            try:
                assert writer.answer_within(SECONDS) in GONE
            except EOFError:
                # A page of a file that is gone cannot be read: the program gets SIGBUS, as when a disk fails.
                assert kind == "mapping"
        acknowledged, content = int(count.read_text()), Path(disk, "file").read_bytes()
        assert [content[at * BLOCK : (at + 1) * BLOCK] for at in range(acknowledged)] == list(
            map(block, range(acknowledged))
        )
        wait_until(lambda: not is_mounted(m.path), SECONDS)
