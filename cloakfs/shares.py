"""Shares a bounded resource among callers, none of whom can be made to give back what it holds.

A caller may hold as much as is left for others: one that is alone half of all, two that want as much as they get a
third each, and so on (the dynamic thresholds of Choudhury & Hahne, "Dynamic queue length thresholds for shared-memory
packet switches", 1998). So something is always left for callers that hold less,
and what no other caller wants is not wasted.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Shares(Generic[C]):
    """What the callers hold of one resource.

    Args:
        most: how much there is.
        most_of_one: how much one caller may hold, even if more is left; by default, there is no such limit.

    Attributes:
        most: see above.
        total: how much is held.
        held: how much of it, by caller.
        refused: how often a caller was refused more, since the start.
    """

    __slots__ = ("held", "most", "most_of_one", "refused", "total")

    def __init__(self, most: int, most_of_one: int | None = None) -> None:
        self.most = most
        self.most_of_one = most if most_of_one is None else most_of_one
        self.total = 0
        self.held: dict[C, int] = {}
        self.refused = 0

    def __bool__(self) -> bool:
        """Whether anything is held, as of a collection."""
        return self.total > 0

    def has_share_left(self, caller: C) -> bool:
        """Whether the caller may take more."""
        held = self.held.get(caller, 0)
        return held < self.most_of_one and held < self.most - self.total

    def take(self, caller: C, amount: int = 1) -> None:
        """Note that the caller holds more now, whether or not that was its share."""
        self.held[caller] = self.held.get(caller, 0) + amount
        self.total += amount

    @contextmanager
    def taken(self, caller: C) -> Iterator[None]:
        """Take one for the duration of a with block."""
        self.take(caller)
        try:
            yield
        finally:
            self.give_back(caller)

    def give_back(self, caller: C, amount: int = 1) -> None:
        """Note that the caller holds less now."""
        self.total -= amount
        left = self.held[caller] - amount
        if left:
            self.held[caller] = left
        else:
            del self.held[caller]
