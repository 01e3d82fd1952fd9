"""Sending a stream to real files, as the threads of an NFS server do."""

import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from . import content
from .streams import Read


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it: bytes that were read, the seconds until the last of them, and those that each read took."""

    bytes: int
    seconds: float
    waits: list[float]

    @property
    def rate(self) -> float:
        """MB/s."""
        return self.bytes / self.seconds / 1e6

    def percentile(self, share: float) -> float:
        """So many reads (from 0 to 1) took no longer, in seconds."""
        waits = sorted(self.waits)
        return waits[min(int(share * len(waits)), len(waits) - 1)]


class Files:
    """Open files; a context manager.

    Args:
        directory: where they are.
        names: which ones.
        direct: past the page cache of the file system, if it can do that: on FUSE, each read then reaches the daemon as
            it is.

    Raises:
        OSError: one cannot be opened.
    """

    def __init__(self, directory: str, names: Iterable[str], *, direct: bool) -> None:
        self.fds: dict[str, int] = {}
        self.direct = direct
        try:
            for name in names:
                path = os.path.join(directory, name)
                try:
                    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
                except OSError:
                    if not self.direct:
                        raise
                    fd = os.open(path, os.O_RDONLY)
                    self.direct = False
                self.fds[name] = fd
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close them all."""
        for fd in self.fds.values():
            os.close(fd)

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_all(
    queues: Sequence[Iterable[Read]], files: Files, *, outstanding: int = 1, verified: bool = False, paced: bool = False
) -> Measured:
    """Read everything.

    Args:
        queues: streams that are read at the same time.
        files: all that are in them.
        outstanding: so many reads of each stream are on their way at once.
        verified: look whether the content is what `content.create` wrote.
        paced: none begins before its time.

    Raises:
        OSError: a read failed, or gave other content.
    """
    largest = max(read.length for queue in queues for read in queue)
    waits: list[float] = []
    total: list[int] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def work(queue: Iterator[Read]) -> None:
        got = 0
        mine: list[float] = []
        try:
            # Aligned, as O_DIRECT has it.
            with mmap.mmap(-1, largest) as memory, memoryview(memory) as whole:
                for read in queue:
                    if stop.is_set():
                        break
                    if paced:
                        stop.wait(max(0.0, began + read.time - time.perf_counter()))
                    with whole[: read.length] as buffer:
                        start = time.perf_counter()
                        count = os.preadv(files.fds[read.file], [buffer], read.offset)
                        mine.append(time.perf_counter() - start)
                        if verified:
                            with buffer[:count] as data:
                                content.verify(read.file, read.offset, data)
                    got += count
        except BaseException as exc:
            failed.append(exc)
            stop.set()
        waits.extend(mine)
        total.append(got)

    # A list's iterator gives each read to one thread only.
    shared = [iter(list(queue)) for queue in queues]
    threads = [
        threading.Thread(target=partial(work, queue), daemon=True) for queue in shared for _ in range(outstanding)
    ]
    began = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    seconds = time.perf_counter() - began
    if failed:
        raise failed[0]
    return Measured(sum(total), seconds, waits)
