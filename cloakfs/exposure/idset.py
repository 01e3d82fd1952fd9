"""Sets of server ids, as large as all of them. Pure."""

from bisect import bisect_right
from collections.abc import Container, Iterable

from ..ids import ServerId
from ..mapping import MAX_ID


class IdSet:
    """An immutable set of server ids, given as pairs of a first and a last one, which may overlap."""

    __slots__ = ("_lows", "ranges")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        joined: list[tuple[int, int]] = []
        for low, high in sorted(ranges):
            if joined and low <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(high, joined[-1][1])
            else:
                joined.append((low, high))
        self.ranges = tuple(joined)
        """The set as disjoint ranges that do not touch, in order."""
        self._lows = [low for low, _ in joined]

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, int):
            return False
        at = bisect_right(self._lows, id_) - 1
        return at >= 0 and id_ <= self.ranges[at][1]

    def __len__(self) -> int:
        return sum(high - low + 1 for low, high in self.ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdSet) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        return f"IdSet({list(self.ranges)})"

    def other_than(self, avoided: Container[int]) -> ServerId | None:
        """Return the smallest id of the set that is not in `avoided`; None if there is none."""
        return next(
            (ServerId(id_) for low, high in self.ranges for id_ in range(low, high + 1) if id_ not in avoided), None
        )


def single(id_: ServerId) -> IdSet:
    """Return the set of one id."""
    return IdSet([(id_, id_)])


ALL = IdSet([(0, MAX_ID)])
"""All ids."""
