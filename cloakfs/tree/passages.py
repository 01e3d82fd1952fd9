"""Who gets through to a directory, remembered for as long as nobody changes a directory above it.

To find out whether a caller may see an object deep in the tree, every directory above it has to be looked at. Where the
kernel reports each change before the system call that makes it returns (fanotify(7)), once is enough: while nothing is
reported, everything is as it was.

Two things are remembered. Neither depends on who asks, so nobody can displace what others need by asking as many
callers. For a directory, it is who sees it and that it is in its place, until a change of this very directory is
reported. For the whole way to it, it is who gets through, until a change of a directory on the way is reported. Whether
one was takes no system call to find out.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..cloak import CloakList, Condition
from . import calls
from .nodes import Nodes
from .objects import NEVER, Directory, Object

if TYPE_CHECKING:
    from .door import Actor

AT_ONCE = 128
"""How many directories are looked at without giving time to others, which takes about a millisecond."""

# Putting a way together takes as long as this part of a look at a directory.
_WAYS_PER_LOOK = 16

# A condition that is among this many last ones of a way is not added again.
_NEAR = 32


class Far(Exception):
    """There are too many directories above to look at all of them at once."""


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


class Passages:
    """The passages of one tree.

    Args:
        nodes: the objects.
        at_once: how many directories may be looked at without giving time to others.

    Attributes:
        is_up_to_date: returns whether every change made until now has been reported here (`changed`, `forget`). It is
            called only where the answer is needed.
    """

    def __init__(self, nodes: Nodes, at_once: int = sys.maxsize) -> None:
        self._nodes = nodes
        self._at_once = at_once
        self._registry = nodes.registry
        self._cloak: CloakList | None = None
        self._beginning = Passage(None, None)
        self._changes = 0  # how many changes of directories on a way to others were reported
        self.is_up_to_date: Callable[[], bool] = lambda: False

    def changed(self, directory: Object) -> None:
        """Note that the directory's place, or who may see it, has changed, or its ACL."""
        if isinstance(directory, Directory):
            directory.trusted = -1
            directory.no_acl_since = NEVER
            passage = directory.passage
            if passage is not None:
                passage.is_void = True
                self._changes += passage.is_used

    def forget(self) -> None:
        """Forget everything, since it is not known what has changed."""
        self._registry.trust += 1
        self._beginning.is_void = True
        self._beginning = Passage(None, None)
        self._changes += 1

    def to(self, cloak: CloakList, directory: Directory) -> Passage | None:
        """Return the way to `directory`; None if it has to be looked at each time, or a place on it found first.

        Raises:
            Far: there is much to look at. Some of it has been looked at now, and need not be again.
        """
        if not directory.filesystem.watched or not self.is_up_to_date():
            return None
        if cloak is not self._cloak:
            self._cloak = cloak
            self.forget()
        passage = directory.passage
        if (
            passage is not None
            and directory.trusted == self._registry.trust
            and not passage.is_void
            and (passage.seen == self._changes or passage.holds(self._changes))
        ):
            return passage
        return self._find(cloak, directory)

    def _find(self, cloak: CloakList, directory: Directory) -> Passage | None:
        root, trust, changes = self._nodes.root, self._registry.trust, self._changes
        passage = self._beginning
        not_yet: list[Directory] = []
        at: Directory | None = directory
        while at is not root:
            if at is None:
                return None
            known = at.passage
            if known is not None and known.seen == changes and not known.is_void and at.trusted == trust:
                passage = known
                break
            not_yet.append(at)
            at = at.parent
        looks = ways = 0
        for at in reversed(not_yet):
            if looks + ways // _WAYS_PER_LOOK >= self._at_once:
                raise Far
            if at.trusted != trust:
                looks += 1
                if not self._look(cloak, at):
                    return None
            known = at.passage
            if known is None or not known.is_like(passage, at.condition):
                if known is not None:
                    known.is_void = True
                    self._changes += known.is_used
                at.passage = known = Passage(passage, at.condition)
                ways += 1
            known.is_void = False
            known.seen = changes
            passage = known
        return passage

    def _look(self, cloak: CloakList, directory: Directory) -> bool:
        """Find out who sees this directory; False if that must not be remembered, or its place is not known."""
        nodes, parent = self._nodes, directory.parent
        if parent is None or not (directory.filesystem.watched and directory.filesystem.has_posix_rules):
            return False
        info = calls.fstat(nodes.fd(directory))
        if directory.checked != info.st_ctime_ns and not nodes.is_child(directory, parent):
            return False
        condition = cloak.condition(info.st_mode, info.st_uid, info.st_gid)
        directory.condition = None if condition.admits_all else condition
        directory.trusted = self._registry.trust
        return True
