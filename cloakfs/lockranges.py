"""Byte-range locks that are held and waited for: which ranges an owner has, and whose locks are in its way.

The kernel decides who gets a lock (`filesystem.locks`). This is what it does not tell about the locks of one process,
which all owners of a mount have in common: whose lock is in the way, and whether owners wait for each other in a circle
(EDEADLK of fcntl(2)).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

END = 1 << 63
"""The end of a range that has none."""

# A circle of more owners than this is not found: as in Linux (MAX_DEADLK_ITERATIONS in fs/locks.c).
_MOST_IN_CIRCLE = 10

# The process that has a lock is looked for among so many owners.
_MOST_OWNERS = 1000

_start, _end = attrgetter("start"), attrgetter("end")

O = TypeVar("O", bound=Hashable)  # noqa: E741  (an owner)
F = TypeVar("F", bound=Hashable)  # a file


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock of fcntl(2).

    Attributes:
        start: its first byte.
        end: the byte after its last one; `END` if it has no end.
        exclusive: whether it is for writing.
    """

    start: int
    end: int
    exclusive: bool

    def conflicts(self, other: "Lock") -> bool:
        """Whether two owners cannot have both."""
        return (self.exclusive or other.exclusive) and self.start < other.end and other.start < self.end


class Ranges:
    """What one owner has locked of one file: disjoint locks, in order, each with another kind or a gap beside it."""

    __slots__ = ("locks",)

    def __init__(self) -> None:
        self.locks: list[Lock] = []

    def lock(self, wanted: Lock) -> None:
        """Add a lock, which replaces what is locked in its range."""
        self.unlock(wanted.start, wanted.end)
        at = bisect_left(self.locks, wanted.start, key=_start)
        first = last = at
        start, end = wanted.start, wanted.end
        if at and self.locks[at - 1].end == start and self.locks[at - 1].exclusive == wanted.exclusive:
            first, start = at - 1, self.locks[at - 1].start
        if at < len(self.locks) and self.locks[at].start == end and self.locks[at].exclusive == wanted.exclusive:
            last, end = at + 1, self.locks[at].end
        self.locks[first:last] = [Lock(start, end, wanted.exclusive)]

    def unlock(self, start: int, end: int) -> None:
        """Remove what is locked from `start` to `end`."""
        first, last = self._overlap(start, end)
        left: list[Lock] = []
        if first < last:
            before, after = self.locks[first], self.locks[last - 1]
            if before.start < start:
                left.append(Lock(before.start, start, before.exclusive))
            if end < after.end:
                left.append(Lock(end, after.end, after.exclusive))
        self.locks[first:last] = left

    def conflict(self, wanted: Lock) -> Lock | None:
        """Return the first lock that is in the way of `wanted` by another owner."""
        first, last = self._overlap(wanted.start, wanted.end)
        return next((lock for lock in islice(self.locks, first, last) if lock.conflicts(wanted)), None)

    def _overlap(self, start: int, end: int) -> tuple[int, int]:
        """Return where the locks are that have a byte in this range."""
        return bisect_right(self.locks, start, key=_end), bisect_left(self.locks, end, key=_start)


class LockTable(Generic[F, O]):
    """The locks of all owners, by file.

    Attributes:
        held: what each owner has, by file.
        waiting: what each owner waits for, and in which file. (Several threads of one process may wait at a time.)
    """

    def __init__(self) -> None:
        self.held: dict[F, dict[O, Ranges]] = {}
        self.waiting: dict[O, list[tuple[F, Lock]]] = {}

    def ranges(self, file: F, owner: O) -> Ranges:
        """Return what the owner has locked of the file, to be changed."""
        return self.held.setdefault(file, {}).setdefault(owner, Ranges())

    def drop(self, file: F, owner: O) -> None:
        """Note that the owner has nothing locked of the file any more."""
        owners = self.held[file]
        del owners[owner]
        if not owners:
            del self.held[file]

    def in_the_way(self, file: F, owner: O, wanted: Lock) -> Iterator[O]:
        """Yield other owners that have conflicting locks; if very many have locked the file, of some of them."""
        for other, ranges in islice(self.held.get(file, {}).items(), _MOST_OWNERS):
            if other != owner and ranges.conflict(wanted) is not None:
                yield other

    def _waiting_in_the_way(self, file: F, owner: O, wanted: Lock) -> Iterator[O]:
        held = self.held.get(file, {})
        few, many = (held, self.waiting) if len(held) < len(self.waiting) else (self.waiting, held)
        for other in few:
            if other != owner and other in many and held[other].conflict(wanted) is not None:
                yield other

    def is_circular(self, file: F, owner: O, wanted: Lock) -> bool:
        """Whether the owner would wait for itself: whoever has what it wants waits for what this owner has."""
        seen: set[O] = set()
        todo = list(self._waiting_in_the_way(file, owner, wanted))
        while todo and len(seen) < _MOST_IN_CIRCLE:
            other = todo.pop()
            if other in seen:
                continue
            seen.add(other)
            for where, lock in self.waiting[other]:
                if where in self.held and owner in self.held[where] and self.held[where][owner].conflict(lock):
                    return True
                todo += self._waiting_in_the_way(where, other, lock)
        return False
