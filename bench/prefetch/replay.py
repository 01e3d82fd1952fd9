"""What each heuristic makes of a stream, without any disk: a cache that is empty at first, and never full."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cloakfs.prefetch import Heuristic, Limits, Prefetcher

from .streams import Read, sizes

PAGE = 4096
"""What the cache holds is whole pages."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        requests: how many reads there were.
        misses: how many of them had to wait for the disk.
        asks: how often something was read ahead: few large pieces cost less than many small ones.
        asked: bytes read ahead.
        used: how many of these were read afterwards.
        peak: the most that was ahead at any time, in bytes.
        seq_count: the mean of the cursors of the file, over all reads.
    """

    requests: int
    misses: int
    asks: int
    asked: int
    used: int
    peak: int
    seq_count: float

    @property
    def wasted(self) -> int:
        """Bytes that were read ahead for nobody."""
        return self.asked - self.used


def replay(stream: Sequence[Read], heuristic: Heuristic, limits: Limits) -> Outcome:
    """Feed a stream to a heuristic. What it asks for is there at once.

    Args:
        stream: in the order of arrival; not empty.
        heuristic: what becomes of seqCount.
        limits: how much may be read ahead.
    """
    prefetcher = Prefetcher(heuristic, limits)
    size = sizes(stream)
    cached: dict[str, set[int]] = {file: set() for file in size}
    ahead: dict[str, set[int]] = {file: set() for file in size}
    misses = asks = asked = used = peak = 0
    counts = []
    for read in stream:
        pages = set(_pages(read.offset, read.offset + read.length))
        known, unread = cached[read.file], ahead[read.file]
        missed = not pages <= known
        misses += missed
        used += len(unread & pages)
        unread -= pages
        known |= pages
        ask = prefetcher.read(read.file, read.offset, read.length, size[read.file], missed=missed)
        if ask is not None:
            fetched = set(_pages(ask.start, ask.end)) - known
            asks += 1
            asked += len(fetched)
            known |= fetched
            unread |= fetched
        peak = max(peak, prefetcher.ahead)
        counts.append(fmean(prefetcher.seq_counts(read.file)))
    return Outcome(len(stream), misses, asks, asked * PAGE, used * PAGE, peak, fmean(counts))


def _pages(start: int, end: int) -> range:
    return range(start // PAGE, -(-end // PAGE))
