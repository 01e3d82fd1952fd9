"""The references that the kernel has dropped (FORGET). A request may name thousands, so objects go little by little.

When a directory with many known files is moved, the kernel drops everything below it at once, in
a few requests of up to 65,000 nodeids each. To drop an object takes some ten microseconds.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import trio
from pyfuse3 import InodeT

log = logging.getLogger(__name__)

AT_ONCE = 64
"""How many are dropped without giving time to others, which takes less than a millisecond."""


class References:
    """The references that the kernel has dropped, until they are deducted from their objects.

    Args:
        forget: deducts so many references to a nodeid, and drops a few of the objects that are unused then; returns
            whether there are more.
        is_news: whether this failure is to be logged.
        go_on: drops a few more of them; returns whether there are more.
    """

    def __init__(
        self,
        forget: Callable[[int, int], bool | None],
        is_news: Callable[[str, Exception], bool],
        go_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self._forget = forget
        self._go_on = go_on
        self._is_news = is_news
        self._left: deque[tuple[InodeT, int]] = deque()
        self._has_unused = False
        self._wanted = trio.Event()

    def dropped(self, references: Sequence[tuple[InodeT, int]]) -> None:
        """Note that the kernel dropped these references, which are nodeids with numbers; a few are dealt with at once.

        The others may wait: the kernel looks up by name what it has dropped, and refers to it once more then.
        """
        for inode, count in references[:AT_ONCE]:
            self._drop(inode, count)
        self._left.extend(references[AT_ONCE:])
        if self._left or self._has_unused:
            self._wanted.set()

    async def run(self) -> None:
        """Deal with what is left, for ever."""
        while True:
            if not (self._left or self._has_unused):
                self._wanted = trio.Event()
                await self._wanted.wait()
            for _ in range(min(AT_ONCE, len(self._left))):
                self._drop(*self._left.popleft())
            self._has_unused = self._go_on()
            await trio.sleep(0)

    def _drop(self, inode: InodeT, count: int) -> None:
        try:
            self._has_unused |= bool(self._forget(inode, count))
        except Exception as exc:
            if self._is_news("forget", exc):
                log.exception("forget(%r, %r) failed", inode, count)
