"""One pool of cursors for all files, recycled fairly [ES §7]: who asks for many cannot take those of others."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_AT_ONCE = 16
"""So many streams of a file can begin at the same time, also where the streams of others fill the pool."""


class _Held(Generic[C]):
    """What one owner has of the pool, the least recently used first."""

    __slots__ = ("streams", "trials")

    def __init__(self) -> None:
        self.trials: OrderedDict[C, None] = OrderedDict()
        self.streams: OrderedDict[C, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.trials) + len(self.streams)

    @property
    def oldest(self) -> C:
        return next(iter(self.trials or self.streams))


class _Ranks:
    """Owners by a number that each of them has; tells who has the most, without looking at all of them.

    Attributes:
        most: the highest number.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._owners: defaultdict[int, dict[Hashable, None]] = defaultdict(dict)
        self.most = 0

    def put(self, owner: Hashable, number: int) -> None:
        before = self._numbers.pop(owner, 0)
        if before == number != 0:
            self._numbers[owner] = number
            return
        if before:
            del self._owners[before][owner]
            if not self._owners[before]:
                del self._owners[before]
        if number:
            self._numbers[owner] = number
            self._owners[number][owner] = None
        self.most = max(self.most, number)
        while self.most and self.most not in self._owners:
            self.most -= 1

    @property
    def first(self) -> Hashable:
        """One of those who have the most; somebody must have something."""
        return next(iter(self._owners[self.most]))


class CursorPool(Generic[C]):
    """So many cursors as there are, and whose they are.

    A cursor is *on trial* until it has proven to follow a stream. Whoever has no cursor can always get one. What is on
    trial is shared evenly: who has the most of it gives way. Streams give way only to an owner who has less than an
    equal part of the pool, and only those of whoever has the most. So however many cursors a file is read at random
    with, the streams of others, up to their part of the pool, remain.

    Args:
        size: how many cursors there may be; at least one for each owner.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._all: OrderedDict[C, Hashable] = OrderedDict()
        self._streams: OrderedDict[C, Hashable] = OrderedDict()
        self._held: dict[Hashable, _Held[C]] = {}
        self._trials, self._cursors = _Ranks(), _Ranks()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[C]:
        """The least recently used first."""
        return iter(self._all)

    def of(self, owner: Hashable) -> set[C]:
        """The owner's cursors."""
        held = self._held.get(owner)
        return {*held.trials, *held.streams} if held is not None else set()

    def use(self, owner: Hashable, cursor: C, *, is_stream: bool) -> None:
        """This cursor was used just now; a new one is added, for which there must be room."""
        held = self._held.setdefault(owner, _Held())
        kind, other = (held.streams, held.trials) if is_stream else (held.trials, held.streams)
        other.pop(cursor, None)
        kind[cursor] = None
        kind.move_to_end(cursor)
        self._all[cursor] = owner
        self._all.move_to_end(cursor)
        self._streams.pop(cursor, None)
        if is_stream:
            self._streams[cursor] = owner
        self._count(owner, held)

    def make_room(self, owner: Hashable, is_idle: Callable[[C], bool]) -> C | None:
        """Let a cursor give way so that the owner may have one more.

        Args:
            owner: who wants it.
            is_idle: a stream has been left alone, and is as good as none.

        Returns:
            the cursor, which is nobody's any more; None: there is room.
        """
        if len(self._all) < self.size:
            return None
        cursor = self._idle_stream(is_idle) or self._victim(owner)
        self._take(cursor)
        return cursor

    def drop(self, owner: Hashable) -> None:
        """Whatever the owner has is free."""
        for cursor in self.of(owner):
            self._take(cursor)

    def _victim(self, owner: Hashable) -> C:
        own = self._held.get(owner) or _Held()
        if self._trials.most > max(len(own.trials), 1):
            return self._held[self._trials.first].oldest
        owners = len(self._held) + (owner not in self._held)
        if len(own) < self.size // owners and len(own.trials) < _AT_ONCE:
            return self._held[self._cursors.first].oldest  # whose part is more than equal: the pool is full
        return own.oldest

    def _take(self, cursor: C) -> None:
        owner = self._all.pop(cursor)
        self._streams.pop(cursor, None)
        held = self._held[owner]
        held.trials.pop(cursor, None)
        held.streams.pop(cursor, None)
        self._count(owner, held)
        if not held:
            del self._held[owner]

    def _idle_stream(self, is_idle: Callable[[C], bool]) -> C | None:
        while self._streams and is_idle(cursor := next(iter(self._streams))):
            owner = self._streams.pop(cursor)
            held = self._held[owner]
            if len(held) > 1:
                return cursor
            held.trials[cursor] = held.streams.pop(cursor)  # its only one
            self._count(owner, held)
        return None

    def _count(self, owner: Hashable, held: _Held[C]) -> None:
        self._trials.put(owner, len(held.trials))
        self._cursors.put(owner, len(held))
