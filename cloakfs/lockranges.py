"""Byte-range locks that are held and waited for: which ranges an owner has, and whose locks are in its way.

The kernel decides who gets a lock (`filesystem.locks`). This is what it does not tell about the locks of one process,
which all owners of a mount have in common: whose lock is in the way, and whether owners wait for each other in a circle
(EDEADLK of fcntl(2)).
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

END = 1 << 63
"""The end of a range that has none."""

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
    """What one owner has locked of one file, in order."""

    __slots__ = ("locks",)

    def __init__(self) -> None:
        self.locks: list[Lock] = []

    def lock(self, wanted: Lock) -> None:
        """Add a lock, which replaces what is locked in its range."""
        self.unlock(wanted.start, wanted.end)
        self.locks.append(wanted)
        self.locks.sort(key=lambda lock: lock.start)
        merged: list[Lock] = []
        for lock in self.locks:
            if merged and merged[-1].end == lock.start and merged[-1].exclusive == lock.exclusive:
                merged[-1] = Lock(merged[-1].start, lock.end, lock.exclusive)
            else:
                merged.append(lock)
        self.locks = merged

    def unlock(self, start: int, end: int) -> None:
        """Remove what is locked from `start` to `end`."""
        left: list[Lock] = []
        for lock in self.locks:
            if lock.end <= start or end <= lock.start:
                left.append(lock)
                continue
            if lock.start < start:
                left.append(Lock(lock.start, start, lock.exclusive))
            if end < lock.end:
                left.append(Lock(end, lock.end, lock.exclusive))
        self.locks = left

    def conflict(self, wanted: Lock) -> Lock | None:
        """Return the first lock that is in the way of `wanted` by another owner."""
        return next((lock for lock in self.locks if lock.conflicts(wanted)), None)


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

    def in_the_way(self, file: F, owner: O, wanted: Lock) -> Iterator[tuple[O, Lock]]:
        """Yield the other owners that have conflicting locks, each with the first of them."""
        for other, ranges in self.held.get(file, {}).items():
            if other != owner and (lock := ranges.conflict(wanted)) is not None:
                yield other, lock

    def is_circular(self, file: F, owner: O, wanted: Lock) -> bool:
        """Whether the owner would wait for itself: whoever has what it wants waits for what this owner has."""
        seen: set[O] = set()
        todo = [other for other, _ in self.in_the_way(file, owner, wanted)]
        while todo:
            other = todo.pop()
            if other == owner:
                return True
            if other in seen:
                continue
            seen.add(other)
            for where, lock in self.waiting.get(other, ()):
                todo += [blocking for blocking, _ in self.in_the_way(where, other, lock)]
        return False
