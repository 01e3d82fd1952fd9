"""Feeds a stream to a heuristic without any disk: the cache is empty at first, and never full."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cloakfs.prefetch import Heuristic, Limits, Prefetcher

from .streams import Read, sizes

PAGE = 4096
"""The cache holds whole pages."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        requests: how many reads there were.
        misses: how many of them had to wait for the disk.
        asks: how many pieces were read ahead; few large ones cost less than many small ones.
        asked: bytes read ahead.
        used: how many of these bytes were read afterwards.
        peak: the most bytes that were ahead at any time.
        seq_count: the mean seqCount of the cursors of the file, over all reads.
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
        """The bytes that were read ahead and not used."""
        return self.asked - self.used


def replay(stream: Sequence[Read], heuristic: Heuristic, limits: Limits) -> ReplayResult:
    """Feed a stream to a heuristic. Whatever it requests is in the cache at once.

    Args:
        stream: the reads in the order of arrival; not empty.
        heuristic: computes seqCount.
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
        piece = prefetcher.read(read.file, read.offset, read.length, size[read.file], missed=missed)
        if piece is not None:
            fetched = set(_pages(piece.start, piece.end)) - known
            asks += 1
            asked += len(fetched)
            known |= fetched
            unread |= fetched
        peak = max(peak, prefetcher.ahead)
        counts.append(fmean(prefetcher.seq_counts(read.file)))
    return ReplayResult(len(stream), misses, asks, asked * PAGE, used * PAGE, peak, fmean(counts))


def _pages(start: int, end: int) -> range:
    return range(start // PAGE, -(-end // PAGE))
