"""The work that is timed. Each function does one unit and is repeated."""

import os
import time
from collections.abc import Callable
from multiprocessing import Pipe

LISTED = 1000
"""Files in the directory that is listed."""

_BLOCK = b"x" * 4096


def prepare(source: str, uid: int) -> None:
    """The tree that all of it works on."""
    directory = os.path.join(source, "listed")
    os.mkdir(directory)
    for path in [os.path.join(source, "file"), *(os.path.join(directory, f"file-{i:04}") for i in range(LISTED))]:
        with open(path, "wb") as file:
            file.write(_BLOCK)
        os.chown(path, uid, uid)
    for path in (source, directory):
        os.chown(path, uid, uid)
        os.chmod(path, 0o755)


def stat() -> int:
    os.stat("file")
    return 1


def lookup() -> int:
    os.close(os.open("file", os.O_PATH))
    return 1


def listing() -> int:
    with os.scandir("listed") as entries:
        return sum(entry.stat().st_size == len(_BLOCK) for entry in entries)


def open_read_close() -> int:
    fd = os.open("file", os.O_RDONLY)
    os.read(fd, 4096)
    os.close(fd)
    return 1


def create_write_unlink() -> int:
    fd = os.open("new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, _BLOCK)
    os.close(fd)
    os.unlink("new")
    return 1


WORK: dict[str, Callable[[], int]] = {
    "stat": stat,
    "lookup": lookup,
    "list 1,000 files": listing,
    "open+read 4K+close": open_read_close,
    "create+write+unlink": create_write_unlink,
}


def rate(work: Callable[[], int], path: str, uid: int, seconds: float, cpus: set[int]) -> float:
    """Units per second that a process of `uid` does in `path`, after one unit to warm up."""
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            os.sched_setaffinity(0, cpus)
            os.chdir(path)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
            done = 0
            start = now = time.perf_counter()
            while now - start < seconds:
                done += work()
                now = time.perf_counter()
            sender.send(done / (now - start))
        finally:
            os._exit(0)
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        os.waitpid(pid, 0)
