"""The work that is timed. Each function does one unit in the current directory and is repeated."""

import contextlib
import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

_BLOCK = b"x" * 4096


def prepare(source: str, files: int, worker: int, owner: int) -> None:
    """The tree that all of it works on: the worker's own directory, with files that somebody else shows to all."""
    directory = os.path.join(source, "listed")
    os.mkdir(directory)
    for path in [os.path.join(source, "file"), *(os.path.join(directory, f"file-{i:04}") for i in range(files))]:
        with open(path, "wb") as file:
            file.write(_BLOCK)
        os.chown(path, owner, owner)
        os.chmod(path, 0o644)
    for path, uid in ((source, worker), (directory, owner)):
        os.chown(path, uid, uid)
        os.chmod(path, 0o755)


def _stat() -> Callable[[], int]:
    def unit() -> int:
        os.stat("file")
        return 1

    return unit


def _lookup() -> Callable[[], int]:
    os.chdir("listed")
    names = itertools.cycle(sorted(os.listdir()))

    def unit() -> int:
        os.close(os.open(next(names), os.O_PATH))
        return 1

    return unit


def _listing() -> Callable[[], int]:
    def unit() -> int:
        with os.scandir("listed") as entries:
            return sum(entry.stat().st_size == len(_BLOCK) for entry in entries)

    return unit


def _open_read_close() -> Callable[[], int]:
    def unit() -> int:
        fd = os.open("file", os.O_RDONLY)
        os.read(fd, len(_BLOCK))
        os.close(fd)
        return 1

    return unit


def _create_write_unlink() -> Callable[[], int]:
    def unit() -> int:
        fd = os.open("new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, _BLOCK)
        os.close(fd)
        os.unlink("new")
        return 1

    return unit


WORK: dict[str, Callable[[], Callable[[], int]]] = {
    "stat": _stat,
    "lookup": _lookup,
    "list+stat": _listing,
    "open+read+close": _open_read_close,
    "create+write+unlink": _create_write_unlink,
}
"""Each makes, in the directory to work in, the function that does one unit and returns what it counts as."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put off being interrupted: what is begun in here is finished."""
    caught: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: caught.append(got)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


def rate(work: str, path: str, uid: int, seconds: float, cpus: set[int]) -> float:
    """Units per second that a process of `uid` does in `path`, after one unit to warm up.

    Raises:
        RuntimeError: the work failed; why stands on standard error.
    """
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            os.sched_setaffinity(0, cpus)
            os.chdir(path)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            unit = WORK[work]()
            unit()
            done = 0
            start = now = time.perf_counter()
            while now - start < seconds:
                done += unit()
                now = time.perf_counter()
            sender.send(done / (now - start))
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        raise RuntimeError(f"{work} failed in {path}") from None
    finally:
        receiver.close()
        os.kill(pid, signal.SIGKILL)  # it has nothing left to do
        os.waitpid(pid, 0)
