"""Shares a bounded number of negative dentries (names that the kernel caches as absent) among callers.

No caller can use up what others need. When the bound is reached, a caller that has its share gets no more, and for one
that has less, the caller with the most gives up its oldest.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

D = TypeVar("D", bound=Hashable)  # a directory
N = TypeVar("N", bound=Hashable)  # a name in it


class NegativeDentries(Generic[D, N]):
    """The negative dentries that have been noted, by directory, and by the caller for whom they are cached.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._of: dict[int, dict[tuple[D, N], float]] = {}  # by caller: since when, the oldest first
        self._in: dict[D, dict[N, int]] = {}  # by directory: for which caller

    def admits(self, caller: int, directory: D, name: N) -> bool:
        """Whether one more may be noted for the caller."""
        if self._count < self._most or name in self._in.get(directory, ()):
            return True
        own = self._of.get(caller)
        callers = len(self._of) + (own is None)
        return len(own or ()) < self._most // callers

    def note(self, caller: int, directory: D, name: N, now: float) -> tuple[D, N] | None:
        """Note one that is admitted; return another one that is to be invalidated for it, if any."""
        given_up = None
        if name in self._in.get(directory, ()):
            self._drop(directory, name)
        elif self._count >= self._most:
            greediest = max(self._of.values(), key=len)
            given_up = next(iter(greediest))
            self._drop(*given_up)
        self._of.setdefault(caller, {})[directory, name] = now
        self._in.setdefault(directory, {})[name] = caller
        self._count += 1
        return given_up

    def _drop(self, directory: D, name: N) -> None:
        names = self._in[directory]
        caller = names.pop(name)
        if not names:
            del self._in[directory]
        del self._of[caller][directory, name]
        if not self._of[caller]:
            del self._of[caller]
        self._count -= 1

    def take(self, directory: D) -> list[N]:
        """Drop all of a directory, and return their names."""
        names = list(self._in.get(directory, ()))
        for name in names:
            self._drop(directory, name)
        return names

    def directories(self) -> Iterable[D]:
        """Return the directories in which there are any."""
        return list(self._in)

    def drop_until(self, then: float) -> None:
        """Drop those that were noted until then."""
        for noted in list(self._of.values()):
            old = []
            for key, since in noted.items():
                if since > then:
                    break
                old.append(key)
            for key in old:
                self._drop(*key)

    def clear(self) -> None:
        """Drop all."""
        self._count = 0
        self._of.clear()
        self._in.clear()
