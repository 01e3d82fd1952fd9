"""Reads real files as a stream says, with several threads, as an NFS server does."""

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
class ReadTimes:
    """The bytes that were read, the seconds until the last of them, and the seconds that each read took."""

    bytes: int
    seconds: float
    waits: list[float]

    @property
    def rate(self) -> float:
        """The rate in MB/s."""
        return self.bytes / self.seconds / 1e6

    def percentile(self, share: float) -> float:
        """Return the time, in seconds, that this share of the reads (from 0 to 1) did not exceed."""
        waits = sorted(self.waits)
        return waits[min(int(share * len(waits)), len(waits) - 1)]


class Files:
    """Open files; as a context manager, closes them on exit.

    Args:
        directory: the directory that contains them.
        names: their paths below it.
        direct: whether to bypass the page cache of the file system, if it supports that: on FUSE, each read then
            reaches the daemon unchanged.

    Raises:
        OSError: one of them cannot be opened.
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
        """Close all files."""
        for fd in self.fds.values():
            os.close(fd)

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_all(
    queues: Sequence[Iterable[Read]], files: Files, *, outstanding: int = 1, verified: bool = False, paced: bool = False
) -> ReadTimes:
    """Read everything in the streams.

    Args:
        queues: streams that are read at the same time.
        files: all files in them.
        outstanding: the number of concurrent reads of each stream.
        verified: whether to check that the content is what `content.create` wrote.
        paced: whether no read begins before its time in the stream.

    Raises:
        OSError: a read failed, or returned the wrong content.
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
            # This memory is aligned, as O_DIRECT requires.
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
    return ReadTimes(sum(total), seconds, waits)
