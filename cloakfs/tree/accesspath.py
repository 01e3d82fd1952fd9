"""The way from the root to a directory, and who gets through. Pure."""

from ..cloak import Condition
from .actor import Actor

# A condition that is among this many last ones of a way is not added again.
_NEAR = 32


class _Conditions:
    """The conditions to be met on a way, the last one first."""

    __slots__ = ("before", "last")

    def __init__(self, before: "_Conditions | None", last: Condition) -> None:
        self.before = before
        self.last = last


def _also(conditions: _Conditions | None, condition: Condition) -> _Conditions:
    """Return the conditions, and this one, which need not be met twice."""
    at = conditions
    for _ in range(_NEAR):
        if at is None:
            break
        if at.last == condition:
            assert conditions is not None
            return conditions
        at = at.before
    return _Conditions(conditions, condition)


class Passage:
    """The way from the root to a directory, with the conditions to be met on it: on this directory and those above.

    Attributes:
        above: the way to the directory above; None for the root.
        is_void: whether this very directory has changed since, or another way has taken the place of this one.
        is_used: whether there are ways on from here.
        seen: `Passages.changes` when the whole way was last found to be as it was.
    """

    __slots__ = ("_condition", "_conditions", "above", "is_used", "is_void", "seen")

    _conditions: _Conditions | None

    def __init__(self, above: "Passage | None", condition: Condition | None) -> None:
        self.above = above
        self.is_void = self.is_used = False
        self.seen = -1
        self._condition = condition
        conditions = None if above is None else above._conditions
        self._conditions = conditions if condition is None else _also(conditions, condition)
        if above is not None:
            above.is_used = True

    def is_like(self, above: "Passage", condition: Condition | None) -> bool:
        """Whether `Passage(above, condition)` would be the same."""
        return self.above is above and self._condition == condition

    def admits(self, who: "Actor") -> bool:
        """Whether `who` may see each directory on it."""
        at = self._conditions
        while at is not None:
            if not at.last.admits(who.uid, who.has_group):
                return False
            at = at.before
        return True

    def holds(self, changes: int) -> bool:
        """Whether no directory on it has changed, now that there were so many changes."""
        at: Passage | None = self
        while at is not None and at.seen != changes:
            if at.is_void:
                return False
            at = at.above
        end, at = at, self
        while at is not end:
            assert at is not None
            at.seen = changes
            at = at.above
        return True
