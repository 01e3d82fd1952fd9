"""Measures whether a file system that never answers delays sixteen clients that do not use it."""

import contextlib
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from cloakfs import linux

from ..peers import mounting
from ..workers import end, fork, undisturbed

CLIENTS = 16
WAITING = 4
"""The number of clients that wait for the file system that hangs, in different ways."""

_FILES = 16
_CONTENT = bytes(4096)
_PATIENCE = 60.0
_BATCH = 20


@dataclass(frozen=True, slots=True)
class Latencies:
    """Medians, in microseconds, of stat(2), open(2), read(2) and close(2) of a file, by 16 clients at once.

    Attributes:
        before: in each round, while no process waits for the file system that hangs.
        while_waiting: in each round, when some clients do.
    """

    before: list[float]
    while_waiting: list[float]

    @property
    def ratios(self) -> list[float]:
        """The ratio of `while_waiting` to `before` in each round."""
        return [more / less for more, less in zip(self.while_waiting, self.before, strict=True)]

    def summary(self) -> str:
        """Return the result in one line."""
        ratios = self.ratios
        return (
            f"{CLIENTS} clients: median latency {statistics.median(self.before):.0f} us; while {WAITING} others wait "
            f"for ever {statistics.median(self.while_waiting):.0f} us; ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f}) in {len(ratios)} rounds"
        )

    def as_json(self) -> dict[str, object]:
        """Return the result for programs."""
        return {**asdict(self), "ratios": self.ratios, "clients": CLIENTS, "waiting": WAITING}


def measure(rounds: int, seconds: float, advance: Callable[[str], None]) -> Latencies:
    """Mount a tree with a file system in it that never answers, and measure clients beside it.

    Args:
        rounds: how often to measure, each time without and with clients that wait.
        seconds: the duration of each measurement.
        advance: called with what is next, `rounds` + 1 times.

    Raises:
        OSError, RuntimeError: it cannot be mounted.
    """
    found = Latencies([], [])
    with contextlib.ExitStack() as stack:
        try:
            advance("mounting")
            site = _set_up(stack)
            for number in range(rounds):
                advance(f"round {number + 1}")
                # The order changes with each round.
                for waits in ((False, True), (True, False))[number % 2]:
                    with _some_wait(site) if waits else contextlib.nullcontext():
                        (found.while_waiting if waits else found.before).append(_latency(site, seconds))
        finally:
            with undisturbed():
                stack.close()
    return found


@dataclass(frozen=True, slots=True)
class _Site:
    """A mount at `path`, with files in `near` and, at `far`, the file system that never answers.

    Attributes:
        path: the mount point.
        session: its descriptor; once no process has it open, requests fail instead of waiting.
        waiting: the processes that wait, which end with the session.
    """

    path: str
    session: int
    waiting: list[int]

    def fork(self) -> int:
        """Fork a client, which does not hold the session open (`workers.fork`)."""
        pid = fork()
        if pid == 0:
            os.close(self.session)
        return pid


def _set_up(stack: contextlib.ExitStack) -> _Site:
    with undisturbed():
        base = os.path.realpath(tempfile.mkdtemp(prefix="cloakfs-hung-"))
        stack.callback(shutil.rmtree, base)
        tree, at = (os.path.join(base, name) for name in ("tree", "mnt"))
        for path in (tree, at, f"{tree}/near", f"{tree}/far"):
            os.mkdir(path)
        for number in range(_FILES):
            with open(f"{tree}/near/{number}", "wb") as file:
                file.write(_CONTENT)
        session = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        linux.mount("hung", f"{tree}/far", "fuse", linux.MS_NOSUID | linux.MS_NODEV,
                    f"fd={session},rootmode=40000,user_id=0,group_id=0,allow_other")  # fmt: skip
        stack.callback(linux.umount, f"{tree}/far", linux.MNT_DETACH)
        wait = mounting("no_root_squash", uid=0)(stack, "hung", tree, at)
        waiting: list[int] = []
        stack.callback(lambda: [os.waitpid(pid, 0) for pid in waiting])
        stack.callback(os.close, session)  # requests that wait then fail
        wait()
    return _Site(at, session, waiting)


@contextlib.contextmanager
def _some_wait(site: _Site) -> Iterator[None]:
    ways: tuple[Callable[[str], object], ...] = (os.stat, os.listdir, _open_below, os.statvfs)
    first = len(site.waiting)
    try:
        for number in range(WAITING):
            if (pid := site.fork()) == 0:
                with contextlib.suppress(OSError):
                    ways[number % len(ways)](f"{site.path}/far")
                os._exit(0)
            site.waiting.append(pid)
        time.sleep(0.1)  # until they wait, which is the state to measure
        yield
    finally:
        for pid in site.waiting[first:]:
            os.kill(pid, signal.SIGKILL)  # they end once the session has ended


def _open_below(far: str) -> None:
    os.close(os.open(f"{far}/file", os.O_RDONLY))


def _latency(site: _Site, seconds: float) -> float:
    """Return the median time of all that the clients did, in microseconds."""
    pipes: list[Connection] = []
    pids: list[int] = []
    try:
        for number in range(CLIENTS):
            ours, theirs = Pipe()
            if (pid := site.fork()) == 0:
                _work(theirs, f"{site.path}/near/{number % _FILES}", seconds)
            pids.append(pid)
            pipes.append(ours)
            theirs.close()
        times: list[float] = []
        for pipe in pipes:
            if not pipe.poll(_PATIENCE + seconds):
                raise RuntimeError(f"a client got no answer within {_PATIENCE:g} s")
            times += pipe.recv()
    finally:
        for pipe in pipes:
            pipe.close()
        for pid in pids:
            end(pid)
    return statistics.median(times) * 1e6


def _work(pipe: Connection, path: str, seconds: float) -> None:
    times = []
    stop = time.perf_counter() + seconds
    while (began := time.perf_counter()) < stop:
        for _ in range(_BATCH):
            os.stat(path)
            fd = os.open(path, os.O_RDONLY)
            assert os.pread(fd, len(_CONTENT), 0) == _CONTENT
            os.close(fd)
            now = time.perf_counter()
            times.append(now - began)
            began = now
    pipe.send(times)
    os._exit(0)
