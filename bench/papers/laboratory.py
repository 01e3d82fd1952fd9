"""The slow disk of `python -m bench prefetch figures` with its mounts, for experiments: cold, and shown to be cold."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from ..figures import Run
from ..prefetch import content
from ..prefetch.experiments import SLOW, MountedPlace, ReadWorkload, Scale, files_of, rate, set_up
from ..prefetch.slowdisk import Disk, SlowDiskError
from ..workers import end, fork, running_on
from .experiment import Unavailable

IOPS = 200
BPS = 60_000_000
"""The slow disk delivers as much in the time of one seek as the disks of Ellard & Seltzer did: about 300 KB. Both its
seeks and its transfers are about twice as fast as theirs."""

_PATIENCE = 60.0


class Laboratory:
    """A disk with its mounts.

    Args:
        site: the mounts.
        disk: their disk.
        about: what the disk is.
    """

    def __init__(self, site: MountedPlace, disk: Disk, about: str) -> None:
        self.site = site
        self.disk = disk
        self.about = about
        self._numbers = itertools.count()
        self._pages: object = 0 if content.can_count_pages() else "the kernel cannot tell (before Linux 6.5)"

    def rates(
        self,
        case: ReadWorkload,
        run: int,
        beside: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> tuple[dict[str, float], dict[str, object]]:
        """Read what the case says by each of its peers, cold, and return the rates in MB/s, and the proof.

        Args:
            case: what is read.
            run: seeds what is random, and says which peer is first.
            beside: what goes on meanwhile in the directory of a peer.

        Raises:
            WorkError, OSError: something could not be read, or not be dropped from memory.
        """
        streams = case.streams(run, f"{next(self._numbers)}-")
        wanted = sum(read.length for stream in streams for read in stream)
        found, fetched = {}, []
        first = run % len(case.peers)
        with files_of(self.site.tree, streams) as names:
            for name in (*case.peers[first:], *case.peers[:first]):
                before = self.disk.bytes_read()
                with beside(self.site.peers[name].path):
                    found[name] = rate(case, self.site, name, streams, names)
                fetched.append((self.disk.bytes_read() - before) / wanted)
        proof: dict[str, object] = {
            "pages in memory before": self._pages,  # otherwise rate() would have failed
            "bytes from the disk / bytes read, least": round(min(fetched), 3),
            "the same, most": round(max(fetched), 3),
            "disk": self.about,
        }
        return {name: found[name] for name in case.peers}, proof


@contextlib.contextmanager
def laboratory(cases: Sequence[ReadWorkload], scale: Scale) -> Iterator[Laboratory]:
    """Make a slow disk, and mount what the cases need.

    Raises:
        Unavailable: this machine cannot have a slow disk.
        RuntimeError, OSError: something cannot be mounted.
    """
    run = Run()
    with contextlib.ExitStack() as stack:
        try:
            site = set_up(stack, list(cases), scale, run, lambda _: None)[SLOW]
        except SlowDiskError as exc:
            raise Unavailable(str(exc)) from exc
        assert site.disk is not None
        yield Laboratory(site, site.disk, str(run.about[SLOW]))


# -- a busy client -------------------------------------------------------------------------------------


def pin(site: MountedPlace) -> contextlib.AbstractContextManager[None]:
    """Give the clients (this process, and those that it starts) one processor, and the daemons the others.

    Where there is only one, nothing is pinned.
    """
    every = sorted(os.sched_getaffinity(0))
    if len(every) == 1:
        return contextlib.nullcontext()
    for peer in site.peers.values():
        if peer.daemon is not None:
            for thread in os.listdir(f"/proc/{peer.daemon}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), every[1:])
    return running_on({every[0]})


@contextlib.contextmanager
def infinite_loops(number: int) -> Iterator[None]:
    """Keep the client busy with processes that do nothing but loop [ES §6.1]."""
    pids: list[int] = []
    try:
        for _ in range(number):
            if (pid := fork()) == 0:
                while True:
                    pass
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            end(pid)


# -- clients that change and look ----------------------------------------------------------------------


class Meddlers:
    """Clients that make files, write, look at them, list and remove them, as long as a block lasts.

    Args:
        number: how many there are.

    Attributes:
        rates: how many operations they did per second, in each block.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rates: list[float] = []

    @contextlib.contextmanager
    def __call__(self, path: str) -> Iterator[None]:
        """Let them work in a directory of their own in `path`.

        Raises:
            OSError: one of them failed.
        """
        place = os.path.join(path, "meddlers")
        os.makedirs(place, exist_ok=True)
        pipes: list[Connection] = []
        pids: list[int] = []
        try:
            for number in range(self.number):
                ours, theirs = Pipe()
                if (pid := fork()) == 0:
                    ours.close()
                    _meddle(theirs, os.path.join(place, str(number)))
                pids.append(pid)
                pipes.append(ours)
                theirs.close()
            began = time.monotonic()
            yield
            for pipe in pipes:
                pipe.send(None)
            done = 0
            for pipe in pipes:
                if not pipe.poll(_PATIENCE):
                    raise OSError("a client that makes and removes files hangs")
                done += _received(pipe)
            self.rates.append(done / (time.monotonic() - began))
        finally:
            for pipe in pipes:
                pipe.close()
            for pid in pids:
                end(pid)


def _received(pipe: Connection) -> int:
    try:
        return int(pipe.recv())
    except EOFError:
        raise OSError("a client that makes and removes files failed; see above") from None


def _meddle(pipe: Connection, place: str) -> None:
    """Do the client's operations, in a process of its own, until it gets a message; then send how many it did."""
    try:
        os.makedirs(place, exist_ok=True)
        done = 0
        while not pipe.poll():
            path = os.path.join(place, f"file-{done % 64}")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, bytes(4096))
            os.close(fd)
            os.stat(path)
            os.listdir(place)
            os.unlink(path)
            done += 6
        pipe.send(done)
        os.rmdir(place)
        os._exit(0)
    except BaseException as exc:
        os.write(2, f"{place}: {exc}\n".encode())
        os._exit(1)
