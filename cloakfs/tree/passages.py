"""Who gets through to a directory, remembered for as long as nobody changes a directory above it.

To ask whether somebody may see what lies deep down, every directory above has to be looked at. Where each change is
told before the system call that makes it returns (fanotify(7)), once is enough: while nothing is told, all is as it
was.

Two things are remembered, and neither depends on who asks: nobody makes others lose it by asking as many. Of a
directory, who sees it and that it is where it is thought to be, until a change of this very directory is told. Of the
whole way to it, who gets through, until a change of any directory is told: it takes no system call to put that together
again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..cloak import CloakList, Condition
from . import calls
from .nodes import Nodes
from .objects import Object

if TYPE_CHECKING:
    from .door import Subject

# Of the last few conditions, none is put there twice.
_NEAR = 4


class Passage:
    """The way from the root to a directory, as the conditions to be met on it: this one and those further above."""

    __slots__ = ("above", "beginning", "condition")

    def __init__(self, above: "Passage | None", condition: Condition | None) -> None:
        self.above = above
        self.condition = condition
        self.beginning: Passage = self if above is None else above.beginning

    def below(self, condition: Condition | None) -> "Passage":
        """The way on to a directory with this condition."""
        at: Passage | None = self
        for _ in range(_NEAR):
            if condition is None or at is None or at.condition == condition:
                break
            at = at.above
        else:
            at = None
        return self if condition is None or at is not None else Passage(self, condition)

    def admits(self, who: "Subject") -> bool:
        """May `who` see each directory on it?"""
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
        is_up_to_date: has everything been told here (`changed`, `forget`) that was changed until now? Only asked where
            there is a use for the answer.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._registry = nodes.registry
        self._cloak: CloakList | None = None
        self._beginning = Passage(None, None)
        self.is_up_to_date: Callable[[], bool] = lambda: False

    def changed(self, directory: Object) -> None:
        """Who may see it has changed, or where it is."""
        directory.trusted = -1
        self._beginning = Passage(None, None)

    def forget(self) -> None:
        """Nobody knows what has changed."""
        self._registry.trust += 1
        self._beginning = Passage(None, None)

    def to(self, cloak: CloakList, directory: Object) -> Passage | None:
        """The way to `directory`; None: it has to be looked at each time, or something on it has to be found first."""
        if not directory.filesystem.watched or not self.is_up_to_date():
            return None
        if cloak is not self._cloak:
            self._cloak = cloak
            self.forget()
        beginning, root, trust = self._beginning, self._nodes.root, self._registry.trust
        passage = beginning
        not_yet: list[Object] = []
        at: Object | None = directory
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

    def _look(self, cloak: CloakList, directory: Object) -> bool:
        """Look who sees this directory; False if it must not be remembered, or is not known to be in its place."""
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
