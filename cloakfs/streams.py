"""The files that are being read, and the cursors in them, of which one file or reader too many displaces few others.

`FileTable` holds the files [ES §6.3]. `CursorPool` is one pool of cursors for all files, recycled fairly [ES §7]: a
file that needs many cursors cannot take those of others.
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, ItemsView, Iterator
from typing import Generic, TypeVar

F = TypeVar("F")

_DROPPED = 4
"""How many files that were dropped are known by name, for each that there is room for."""

_STAYS = 32
"""Of the files that come back to a table full of active ones, one in so many stays, by chance."""


class FileTable(Generic[F]):
    """A table of a limited number of files; the one used least recently is dropped first.

    By that rule alone, readers of one file more than there is room for, in turn, would find none of them: each is
    dropped just before its turn. The table notices this when a file comes back soon after it was dropped, while the one
    that has to give way to it is still being read. The file that came back is then the next to be dropped, so that the
    others stay. By chance, one in 32 stays for good, so that no file is left out for ever.

    Args:
        size: how many files there may be, at least 1.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._files: OrderedDict[Hashable, F] = OrderedDict()  # the one that gives way next is the first
        self._gone: OrderedDict[Hashable, None] = OrderedDict()  # dropped lately
        self._chance = random.Random(0)  # by count, the same file could be the one that stays, each time

    def __len__(self) -> int:
        return len(self._files)

    def items(self) -> ItemsView[Hashable, F]:
        """Return all files, the one that gives way next first."""
        return self._files.items()

    def peek(self, key: Hashable) -> F | None:
        """Return the entry of a file, without using it."""
        return self._files.get(key)

    def use(self, key: Hashable) -> F | None:
        """Return the entry of a file, which is then the last to be dropped."""
        file = self._files.get(key)
        if file is not None:
            self._files.move_to_end(key)
        return file

    def add(self, key: Hashable, file: F, is_active: Callable[[F], bool]) -> F | None:
        """Add a file that is not in the table.

        Args:
            key: identifies the file.
            file: its entry.
            is_active: whether a file is being read.

        Returns:
            the entry that was dropped for it.
        """
        came_back = key in self._gone
        self._gone.pop(key, None)
        if len(self._files) < self.size:
            self._files[key] = file
            return None
        old_key, old = self._files.popitem(last=False)
        self._gone[old_key] = None
        if len(self._gone) > _DROPPED * self.size:
            self._gone.popitem(last=False)
        self._files[key] = file
        if came_back and is_active(old):
            self._files.move_to_end(key, last=self._chance.randrange(_STAYS) == 0)
        return old


C = TypeVar("C", bound=Hashable)

_AT_ONCE = 16
"""How many streams of a file can begin at the same time even if the streams of others fill the pool."""


class _Held(Generic[C]):
    """The cursors of one owner, the least recently used first."""

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
    """Owners ranked by a number that each of them has; finds one with the highest, without looking at all of them.

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
        """One of the owners with the highest number; there must be an owner."""
        return next(iter(self._owners[self.most]))


class CursorPool(Generic[C]):
    """A limited number of cursors and their owners.

    A cursor is *on trial* until it has proven to follow a stream. An owner without a cursor can always get one.
    Cursors on trial are shared evenly: the owner with the most of them has to give one up. A stream gives way only to
    an owner that has less than an equal part of the pool, and only if its own owner has the most cursors. However many
    cursors the random reads of one file need, the streams of others, up to their part of the pool, remain.

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
        """Iterate over all cursors, the least recently used first."""
        return iter(self._all)

    def of(self, owner: Hashable) -> set[C]:
        """Return the owner's cursors."""
        held = self._held.get(owner)
        return {*held.trials, *held.streams} if held is not None else set()

    def use(self, owner: Hashable, cursor: C, *, is_stream: bool) -> None:
        """Note that this cursor was just used; a new cursor is added, for which there must be room."""
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
        """Remove a cursor if necessary, so that the owner may have one more.

        Args:
            owner: the owner that needs a cursor.
            is_idle: whether a stream has not been read for so long that it may be given up.

        Returns:
            the removed cursor, which has no owner any more; None if there is room.
        """
        if len(self._all) < self.size:
            return None
        cursor = self._idle_stream(is_idle) or self._victim(owner)
        self._take(cursor)
        return cursor

    def drop(self, owner: Hashable) -> None:
        """Free all cursors of the owner."""
        for cursor in self.of(owner):
            self._take(cursor)

    def _victim(self, owner: Hashable) -> C:
        own = self._held.get(owner) or _Held()
        if self._trials.most > max(len(own.trials), 1):
            return self._held[self._trials.first].oldest
        owners = len(self._held) + (owner not in self._held)
        if len(own) < self.size // owners and len(own.trials) < _AT_ONCE:
            return self._held[self._cursors.first].oldest  # which has more than an equal part, as the pool is full
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
            held.trials[cursor] = held.streams.pop(cursor)  # its owner has only this one
            self._count(owner, held)
        return None

    def _count(self, owner: Hashable, held: _Held[C]) -> None:
        self._trials.put(owner, len(held.trials))
        self._cursors.put(owner, len(held))
