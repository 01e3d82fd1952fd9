"""Processes that do the work, with the worker's uid, on chosen CPUs, and warmed up before the time is taken."""

import contextlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self, TypeVar, cast

from .homes import groups_of, place_of
from .job import JobInputs, Work
from .peers import Peer
from .tree import WORKER, Sizes

T = TypeVar("T")

_PATIENCE = 600.0

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which nothing must be left behind."""


class WorkError(Exception):
    """Work failed, or took too long; standard error has more."""


class ClientProcesses:
    """The clients of one piece of work with one peer; as a context manager, ends them on exit.

    Args:
        work: what to do.
        peer: where to do it, and as whom.
        sizes: the sizes of the tree.
        data: the name of the large file, if the work needs one.
        seconds: the least duration; None for a single batch.
        cpus: the CPUs on which they may run.
    """

    def __init__(self, work: Work, peer: Peer, sizes: Sizes, data: str, seconds: float | None, cpus: set[int]) -> None:
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        try:
            for client in range(work.clients if seconds is not None else 1):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                if (pid := fork()) == 0:
                    for pipe in self._pipes:
                        pipe.close()
                    _live(theirs, work, peer, sizes, data, seconds, cpus, client)
                self._pids.append(pid)
                theirs.close()
            for pipe in self._pipes:
                self._receive(pipe)  # warm
        except BaseException:
            self.close()
            raise

    def go(self) -> tuple[float, float]:
        """Make them all work now; return how much was done, and how much per second.

        Raises:
            WorkError: one of them failed.
        """
        for pipe in self._pipes:
            pipe.send(None)
        done = [self._receive(pipe) for pipe in self._pipes]
        return sum(units for units, _ in done), sum(units / seconds for units, seconds in done)

    def _receive(self, pipe: Connection) -> tuple[float, float]:
        if not pipe.poll(_PATIENCE):
            raise WorkError(f"not done after {_PATIENCE:.0f} s")
        try:
            units, seconds = pipe.recv()
        except EOFError:
            raise WorkError("the worker failed; see above") from None
        return units, seconds

    def close(self) -> None:
        """End the workers, and whatever they run."""
        for pipe in self._pipes:
            pipe.close()
        for pid in self._pids:
            end(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def fork() -> int:
    """Call os.fork; the child never cleans up as the parent does, whatever signal arrives."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # Ctrl-C is for the benchmark
            for number in ENDING:
                signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(pid: int) -> None:
    """End the forked process, and whatever it runs."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # if it has no group of its own yet
    os.waitpid(pid, 0)


def become(uid: int, groups: Sequence[int] = ()) -> None:
    """Become this user, with the group of the same number, and with no others than these, permanently."""
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def done_as(uid: int, directory: str, do: Callable[[], T], groups: Sequence[int] = ()) -> T:
    """Call a function in a process of its own, as this user, in a directory; return what it returns.

    Raises:
        WorkError: it failed.
    """
    reader, writer = os.pipe()
    if (pid := fork()) == 0:
        try:
            os.close(reader)
            try:
                os.umask(0o022)
                become(uid, groups)
                os.chdir(directory)
                result: tuple[bool, object] = True, do()
            except Exception as exc:
                *_, last = traceback.extract_tb(exc.__traceback__)
                result = False, f"{type(exc).__name__}: {exc} ({os.path.basename(last.filename)}:{last.lineno})"
            with open(writer, "wb") as file:
                pickle.dump(result, file)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as file:
            said = file.read()
        os.waitpid(pid, 0)
    except BaseException:
        end(pid)
        raise
    if not said:
        raise WorkError("the process was killed")
    succeeded, result = pickle.loads(said)
    if not succeeded:
        raise WorkError(str(result))
    return cast(T, result)


def _live(
    pipe: Connection,
    work: Work,
    peer: Peer,
    sizes: Sizes,
    data: str,
    seconds: float | None,
    cpus: set[int],
    client: int,
) -> None:
    try:
        os.sched_setaffinity(0, cpus)
        user = client if work.users else 0
        become(peer.uid + user, [gid + peer.uid - WORKER for gid in groups_of(work.kind)])
        os.chdir(os.path.join(peer.path, place_of(work.kind, user)))
        batch, before, after, warm = work.make(JobInputs(sizes, work.kind, data, client))
        if warm:
            batch()
            after()
        pipe.send((0, 0))
        pipe.recv()
        done, elapsed = 0, 0.0
        while elapsed == 0 or elapsed < (seconds or 0):
            before()
            start = time.perf_counter()
            done += batch()
            elapsed += time.perf_counter() - start
            after()
        pipe.send((done, elapsed))
        pipe.recv()  # its descriptors are closed only after requests have been counted
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay interruptions until the block is finished."""
    caught: list[int] = []
    before = {number: signal.signal(number, lambda got, _: caught.append(got)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


@contextlib.contextmanager
def running_on(processors: set[int]) -> Iterator[None]:
    """Keep this process, and those that it starts within the block, on these processors; the latter stay there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
