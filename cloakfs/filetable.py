"""A table of the files that are being read, in which one file too many does not make all others forgotten [ES §6.3]."""

import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView
from typing import Generic, TypeVar

F = TypeVar("F")

_REMEMBERED = 4
"""How many files that were forgotten are known by name, for each that there is room for."""

_STAYS = 32
"""Of the files that come back to a table full of active ones, one in so many stays, by chance."""


class FileTable(Generic[F]):
    """What is remembered of a limited number of files; the one used least recently is forgotten first.

    By that rule alone, readers of one file more than there is room for, in turn, would find none of them: each is
    forgotten just before its turn. That such a thing goes on shows when a file comes back soon after it was forgotten,
    while the one that has to give way to it is still being read. The file that came back is then the next to be
    forgotten, so that the others stay. By chance, one in 32 stays for good, so that nobody is left out for ever.

    Args:
        size: how many files there may be, at least 1.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._files: OrderedDict[Hashable, F] = OrderedDict()  # the one that gives way next is the first
        self._gone: OrderedDict[Hashable, None] = OrderedDict()  # forgotten lately
        self._chance = random.Random(0)  # by count, the same file could be the one that stays, each time

    def __len__(self) -> int:
        return len(self._files)

    def items(self) -> ItemsView[Hashable, F]:
        """Return all files, the one that gives way next first."""
        return self._files.items()

    def peek(self, key: Hashable) -> F | None:
        """Return what is remembered of a file, without using it."""
        return self._files.get(key)

    def use(self, key: Hashable) -> F | None:
        """Return what is remembered of a file, which is then the last to be forgotten."""
        file = self._files.get(key)
        if file is not None:
            self._files.move_to_end(key)
        return file

    def add(self, key: Hashable, file: F, is_active: Callable[[F], bool]) -> F | None:
        """Remember a file that is not in the table.

        Args:
            key: identifies the file.
            file: what is to be remembered of it.
            is_active: whether a file is being read.

        Returns:
            what was forgotten for it.
        """
        came_back = key in self._gone
        self._gone.pop(key, None)
        if len(self._files) < self.size:
            self._files[key] = file
            return None
        old_key, old = self._files.popitem(last=False)
        self._gone[old_key] = None
        if len(self._gone) > _REMEMBERED * self.size:
            self._gone.popitem(last=False)
        self._files[key] = file
        if came_back and is_active(old):
            self._files.move_to_end(key, last=self._chance.randrange(_STAYS) == 0)
        return old
