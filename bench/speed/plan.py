"""What a run is to measure, in which order."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..job import Work
from ..over_nfs import NfsListing
from ..tree import QUICK, Sizes

REQUESTS, IDLE, GROWTH = "requests", "memory idle", "memory growth"
"""What is measured beside the works; names to choose by."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to measure.

    Attributes:
        peers: names of peers.
        works: what they are to do.
        extras: of REQUESTS, IDLE and GROWTH.
        settings: PINNED, UNPINNED, or both.
        rounds: how often.
        seconds: how long each time.
        sizes: of the tree.
        package: a source package to build.
        exports: names of exports.
        listings: what is listed through them.
        disk: on which kind of file system the trees are.
    """

    peers: list[str]
    works: list[Work]
    extras: list[str]
    settings: list[str]
    rounds: int
    seconds: float
    sizes: Sizes
    package: bytes | None
    exports: list[str]
    listings: list[NfsListing]
    disk: str = "tmpfs"

    def steps(self) -> Iterator[tuple[str, int, Work]]:
        """Setting, round and work, in order."""
        for setting in self.settings:
            for at in range(self.rounds):
                for work in self.works:
                    if setting in work.settings and at < (work.rounds or self.rounds):
                        yield setting, at, work

    def listing_steps(self) -> Iterator[tuple[int, NfsListing]]:
        """Round and listing, in order: one kind of files after the other, of each first what is warm."""
        for kind in dict.fromkeys(listing.kind for listing in self.listings):
            for cold in (False, True):
                for at in range(self.rounds):
                    for listing in self.listings:
                        wanted = (listing.kind, listing.cold) == (kind, cold)
                        if wanted and at < (listing.rounds or self.rounds):
                            yield at, listing

    def is_local(self) -> bool:
        """Whether anything is done without NFS."""
        return bool(self.peers and (self.works or self.extras))

    def length(self) -> int:
        """How many times `advance` is called."""
        listed = sum(1 for _ in self.listing_steps()) * len(self.exports)
        if not self.is_local():
            return listed
        each = sum(1 for _ in self.steps()) + 1
        return each * len(self.peers) + len(self.counted()) + len(self.extras) + listed

    def counted(self) -> list[Work]:
        """The works whose requests are counted."""
        works = [work for work in self.works if REQUESTS in self.extras and work.counted]
        return works[:1] if self.sizes == QUICK else works  # each takes seconds
