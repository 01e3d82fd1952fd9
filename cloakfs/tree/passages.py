"""Who gets through to a directory, remembered for as long as nobody changes a directory above it.

To find out whether a caller may see an object deep in the tree, every directory above it has to be looked at. Where the
kernel reports each change before the system call that makes it returns (fanotify(7)), once is enough: while nothing is
reported, everything is as it was.

Two things are remembered. Neither depends on who asks, so nobody can displace what others need by asking as many
callers. For a directory, it is who sees it and that it is in its place, until a change of this very directory is
reported. For the whole way to it, it is who gets through, until a change of any directory is reported: putting that
together again takes no system call.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..cloak import CloakList, Condition
from . import calls
from .nodes import Nodes
from .objects import NEVER, Directory, Object

if TYPE_CHECKING:
    from .door import Subject

# A condition that is among this many last ones of a passage is not added again.
_NEAR = 4


class Passage:
    """The way from the root to a directory, as the conditions to be met on it: this one and those above."""

    __slots__ = ("above", "beginning", "condition")

    def __init__(self, above: "Passage | None", condition: Condition | None) -> None:
        self.above = above
        self.condition = condition
        self.beginning: Passage = self if above is None else above.beginning

    def below(self, condition: Condition | None) -> "Passage":
        """Return the way on to a directory with this condition."""
        at: Passage | None = self
        for _ in range(_NEAR):
            if condition is None or at is None or at.condition == condition:
                break
            at = at.above
        else:
            at = None
        return self if condition is None or at is not None else Passage(self, condition)

    def admits(self, who: "Subject") -> bool:
        """Whether `who` may see each directory on it."""
        at = self
        while at.condition is not None:
            if not at.condition.admits(who.uid, who.has_group):
                return False
            assert at.above is not None
            at = at.above
        return True


class Passages:
    """The passages of one tree.

    Attributes:
        is_up_to_date: returns whether every change made until now has been reported here (`changed`, `forget`). It is
            called only where the answer is needed.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._registry = nodes.registry
        self._cloak: CloakList | None = None
        self._beginning = Passage(None, None)
        self.is_up_to_date: Callable[[], bool] = lambda: False

    def changed(self, directory: Object) -> None:
        """Note that the directory's place, or who may see it, has changed, or its ACL."""
        if isinstance(directory, Directory):
            directory.trusted = -1
            directory.no_acl_since = NEVER
        self._beginning = Passage(None, None)

    def forget(self) -> None:
        """Forget everything, since it is not known what has changed."""
        self._registry.trust += 1
        self._beginning = Passage(None, None)

    def to(self, cloak: CloakList, directory: Directory) -> Passage | None:
        """Return the way to `directory`; None if it has to be looked at each time, or a place on it found first."""
        if not directory.filesystem.watched or not self.is_up_to_date():
            return None
        if cloak is not self._cloak:
            self._cloak = cloak
            self.forget()
        beginning, root, trust = self._beginning, self._nodes.root, self._registry.trust
        passage = beginning
        not_yet: list[Directory] = []
        at: Directory | None = directory
        while at is not root:
            if at is None or (at.trusted != trust and not self._look(cloak, at)):
                return None
            if at.passage is not None and at.passage.beginning is beginning:
                passage = at.passage
                break
            not_yet.append(at)
            at = at.parent
        for at in reversed(not_yet):
            passage = at.passage = passage.below(at.condition)
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
        directory.passage = None
        return True
