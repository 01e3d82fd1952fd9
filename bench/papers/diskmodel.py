"""A model of a disk of 2003, of its schedulers, and of readers: simulated time, no I/O.

It has what the arguments of Ellard & Seltzer [ES §5] rest on, and nothing else: zones of different speed, seeks that
take longer the farther they go, half a rotation on average before the data comes by, requests that go on where the last
one ended at no cost, and a queue in which a scheduler chooses. It has no cache on the disk.
"""

import heapq
import itertools
import math
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from cloakfs.prefetch import Heuristic, Limits, Prefetcher

from ..prefetch.streams import Read

CAPACITY = 20_000_000_000
OUTER, INNER = 42e6, 28e6
"""Bytes per second at both ends: the paper says that the innermost tracks have two thirds of the sectors, typically."""
ROTATION = 60 / 7200
SEEK, SEEK_FAR = 0.0015, 0.014
"""Seconds of a seek to the next cylinder, and what a seek over the whole disk adds."""

BLOCK = 8 << 10
"""Bytes of a READ."""

CLUSTER = 64 << 10
"""Bytes of a request: what FFS puts into one."""


class DiskRequest(NamedTuple):
    """A request to the disk: from `start` (bytes) so many bytes; `done` is called with the time when it is complete."""

    start: int
    length: int
    number: int
    done: Callable[[float], None]


class Queue(Protocol):
    """A scheduler: requests are added as they come, and taken in the order in which they are served."""

    def add(self, request: DiskRequest) -> None:
        """Add a request."""

    def take(self, head: int) -> DiskRequest:
        """Remove the request that is served next, with the head at this byte."""

    def __len__(self) -> int: ...


class Elevator:
    """One way over the disk: the next request that is not behind the head, from the beginning when there is none."""

    def __init__(self) -> None:
        self._sorted: list[DiskRequest] = []

    def add(self, request: DiskRequest) -> None:
        """Add a request, also in front of the head, so that a fast sequential reader is always served next."""
        insort(self._sorted, request, key=lambda one: (one.start, one.number))

    def take(self, head: int) -> DiskRequest:
        """Return the next one on the way."""
        at = bisect_left(self._sorted, head, key=lambda one: one.start)
        return self._sorted.pop(at if at < len(self._sorted) else 0)

    def __len__(self) -> int:
        return len(self._sorted)


class FairElevator:
    """N-step CSCAN: what comes during a way over the disk is served on the next one."""

    def __init__(self) -> None:
        self._now: deque[DiskRequest] = deque()
        self._next: list[DiskRequest] = []

    def add(self, request: DiskRequest) -> None:
        """Add a request to the next way."""
        self._next.append(request)

    def take(self, head: int) -> DiskRequest:
        """Return the next one on this way."""
        if not self._now:
            self._now = deque(sorted(self._next, key=lambda one: (one.start, one.number)))
            self._next = []
        return self._now.popleft()

    def __len__(self) -> int:
        return len(self._now) + len(self._next)


class TaggedQueue:
    """The disk's own queue, whose order is not published: here, those that came first are served first."""

    def __init__(self) -> None:
        self._requests: deque[DiskRequest] = deque()

    def add(self, request: DiskRequest) -> None:
        """Add a request at the end."""
        self._requests.append(request)

    def take(self, head: int) -> DiskRequest:
        """Return the oldest."""
        return self._requests.popleft()

    def __len__(self) -> int:
        return len(self._requests)


class Simulation:
    """Simulated time, and a disk in it.

    Args:
        queue: its scheduler.
        seed: of the positions of the disk when a seek ends.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self, queue: Queue, seed: int) -> None:
        self.now = 0.0
        self._queue = queue
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._head = 0
        self._busy = False

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self) -> None:
        """Let everything happen."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def read(self, start: int, length: int, done: Callable[[float], None]) -> None:
        """Ask the disk for data; `done` is called with the time when it is there."""
        self._queue.add(DiskRequest(start, length, next(self._numbers), done))
        if not self._busy:
            self._serve()

    def _serve(self) -> None:
        self._busy = bool(len(self._queue))
        if not self._busy:
            return
        request = self._queue.take(self._head)
        took = self._access(request.start) + request.length / rate(request.start)
        self._head = request.start + request.length

        def complete() -> None:
            request.done(self.now)
            self._serve()

        self.at(self.now + took, complete)

    def _access(self, start: int) -> float:
        if start == self._head:
            return 0.0
        far = abs(start - self._head) / CAPACITY
        return SEEK + SEEK_FAR * math.sqrt(far) + self._chance.random() * ROTATION


def rate(at: int) -> float:
    """Return the bytes per second at this byte of the disk, which begins outside."""
    return OUTER + (INNER - OUTER) * at / CAPACITY


@dataclass(frozen=True, slots=True)
class File:
    """Where a file lies on the disk, in bytes."""

    start: int
    size: int


def files(number: int, total: int, quarter: int) -> list[File]:
    """Return files of equal size, evenly spread over a quarter (0 to 3) of the disk.

    Args:
        number: how many.
        total: bytes of all together.
        quarter: which quarter of the disk; 0 is the outermost.
    """
    size = total // number // CLUSTER * CLUSTER
    step = CAPACITY // 4 // number
    return [File(quarter * CAPACITY // 4 + at * step, size) for at in range(number)]


def local_readers(read: list[File], queue: Queue, *, window: int, seed: int) -> list[float]:
    """Return when each of some processes has read its file; each always has some requests outstanding [ES §5.3].

    Args:
        read: the files; they are begun in an order that the seed decides.
        queue: the scheduler.
        window: for how many clusters a process has requests outstanding.
        seed: of everything random.
    """
    simulation = Simulation(queue, seed)
    ends = [0.0] * len(read)

    def begin(number: int) -> Callable[[], None]:
        file = read[number]
        offsets = iter(range(file.start, file.start + file.size, CLUSTER))

        def ask() -> None:
            offset = next(offsets, None)
            if offset is not None:
                simulation.read(offset, CLUSTER, done)

        def done(time: float) -> None:
            ends[number] = time
            ask()

        def first() -> None:
            for _ in range(window):
                ask()

        return first

    order = list(range(len(read)))
    random.Random(seed).shuffle(order)
    for at, number in enumerate(order):
        simulation.at(at * 1e-6, begin(number))
    simulation.run()
    return ends


# -- through a server ----------------------------------------------------------------------------------

NETWORK = 49e6
"""Bytes per second that the paper's network carried by TCP."""
ROUND_TRIP = 0.0003
"""Seconds of a call beside its data."""


def remote_readers(
    read: list[File],
    queue: Queue,
    streams: list[list[Read]],
    heuristic: Heuristic,
    limits: Limits,
    *,
    seed: int,
) -> list[float]:
    """Return when each of some clients has read its file from a server, one request after the other.

    The server reads ahead as `cloakfs.prefetch` says; the network is shared, and carries one answer at a time.

    Args:
        read: the files.
        queue: the scheduler of the server's disk.
        streams: the reads of each file, in the order in which the server gets them.
        heuristic: that of the server.
        limits: of the heuristic.
        seed: of everything random.
    """
    server = _Server(Simulation(queue, seed), Prefetcher(heuristic, limits))
    readers = [_RemoteReader(server, number, file, streams[number]) for number, file in enumerate(read)]
    for number, reader in enumerate(readers):
        server.simulation.at(number * 1e-6, reader.ask)
    server.simulation.run()
    return [reader.end for reader in readers]


@dataclass(slots=True)
class _Server:
    """What the readers share.

    Attributes:
        simulation: the disk, and the clock.
        prefetcher: what the server reads ahead by.
        network_free: when the network can carry the next answer.
    """

    simulation: Simulation
    prefetcher: Prefetcher
    network_free: float = 0.0


class _RemoteReader:
    """A client that reads one file from the server, one request after the other.

    Attributes:
        end: when it has read everything.
    """

    def __init__(self, server: _Server, number: int, file: File, stream: list[Read]) -> None:
        self.end = 0.0
        self._server = server
        self._number = number
        self._file = file
        self._requests = iter(stream)
        self._there: set[int] = set()  # blocks in the server's memory
        # Blocks that were requested from the disk, and the readers that wait for them.
        self._coming: dict[int, list[Callable[[], None]]] = {}

    def ask(self) -> None:
        """Send the next request."""
        simulation = self._server.simulation
        request = next(self._requests, None)
        if request is None:
            self.end = simulation.now
            return
        simulation.at(simulation.now + ROUND_TRIP, partial(self._serve, request))

    def _serve(self, request: Read) -> None:
        """Answer a request when its block is there, and read ahead."""
        block = request.offset // BLOCK
        missed = block not in self._there
        ahead = self._server.prefetcher.read(
            self._number, request.offset, request.length, self._file.size, missed=missed
        )
        if missed and block not in self._coming:
            self._fetch(block, block + 1)
        if ahead is not None:
            self._read_ahead(ahead.start // BLOCK, -(-ahead.end // BLOCK))
        if missed:
            self._coming[block].append(self._answer)
        else:
            self._answer()

    def _read_ahead(self, start: int, end: int) -> None:
        """Ask the disk for these blocks, in clusters, but for those that are coming already."""
        wanted = [block for block in range(start, end) if block not in self._coming]
        for _, group in itertools.groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            run = [block for _, block in group]
            for first in range(run[0], run[-1] + 1, CLUSTER // BLOCK):
                self._fetch(first, min(first + CLUSTER // BLOCK, run[-1] + 1))

    def _fetch(self, first: int, end: int) -> None:
        """Ask the disk for these blocks."""
        blocks = range(first, end)

        def done(_: float) -> None:
            self._there.update(blocks)
            for waiting in [waiter for block in blocks for waiter in self._coming.pop(block, [])]:
                waiting()

        for block in blocks:
            self._coming.setdefault(block, [])
        self._server.simulation.read(self._file.start + first * BLOCK, (end - first) * BLOCK, done)

    def _answer(self) -> None:
        """Send a block over the network; the client sends its next request when it is there."""
        server = self._server
        server.network_free = max(server.network_free, server.simulation.now) + BLOCK / NETWORK
        server.simulation.at(server.network_free, self.ask)
