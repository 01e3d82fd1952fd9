"""The path from the root to a directory, and who may see all directories on it; no system call is made for that."""

from ..cloak import Condition
from .actor import Actor

# A condition that is among this many last ones of a path is not added again.
_NEAR = 32


class _Conditions:
    """The conditions to be met on a path, the last one first."""

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


class AccessPath:
    """The path from the root to a directory, with the conditions to see it and each directory above it.

    Attributes:
        parent: the path to the directory above; None for the root.
        is_void: whether the directory itself has changed since, or another path has replaced this one.
        is_used: whether this is the parent of other paths.
        seen: `AccessPaths.changes` when the whole path was last found unchanged.
    """

    __slots__ = ("_condition", "_conditions", "is_used", "is_void", "parent", "seen")

    _conditions: _Conditions | None

    def __init__(self, parent: "AccessPath | None", condition: Condition | None) -> None:
        self.parent = parent
        self.is_void = self.is_used = False
        self.seen = -1
        self._condition = condition
        conditions = None if parent is None else parent._conditions
        self._conditions = conditions if condition is None else _also(conditions, condition)
        if parent is not None:
            parent.is_used = True

    def is_like(self, parent: "AccessPath", condition: Condition | None) -> bool:
        """Whether `AccessPath(parent, condition)` would be the same."""
        return self.parent is parent and (self._condition is condition or self._condition == condition)

    def admits(self, who: Actor) -> bool:
        """Whether `who` may see each directory on it."""
        at = self._conditions
        while at is not None:
            if not at.last.admits(who.uid, who.has_group):
                return False
            at = at.before
        return True

    def holds(self, changes: int) -> bool:
        """Whether no directory on it has changed; `changes` is the present `AccessPaths.changes`."""
        at: AccessPath | None = self
        while at is not None and at.seen != changes:
            if at.is_void:
                return False
            at = at.parent
        end, at = at, self
        while at is not end:
            assert at is not None
            at.seen = changes
            at = at.parent
        return True
