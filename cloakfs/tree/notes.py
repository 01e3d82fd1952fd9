"""What is noted of a request while it is served and the mount is traced: who it is served as, and what was hidden."""

from contextvars import ContextVar
from typing import NamedTuple

from ..identity import Caller
from ..policy import Attrs
from ..reasons import lower_rule, reason_of
from ..view import View
from .objects import Object

MOST_HIDDEN = 20
"""Of how many hidden objects a request notes the reason. A listing may leave out any number, which are only counted."""


class Hidden(NamedTuple):
    """An object that was hidden from the caller of a request.

    Attributes:
        name: its name in the directory that the request is about.
        obj: the object, if it is not known by such a name: what the request is about, or a directory above that.
        reason: the reason, in the words of `cloakfs explain`.
    """

    name: bytes
    obj: Object | None
    reason: str


class Notes:
    """The notes on one request.

    Attributes:
        caller: the identity that it is served as, if that took more than mapping each id.
        hidden: what was hidden from its caller.
        more: how many further objects were hidden.
    """

    __slots__ = ("caller", "hidden", "more")

    def __init__(self) -> None:
        self.caller: Caller | None = None
        self.hidden: list[Hidden] = []
        self.more = 0

    def add_hidden(self, view: View, caller: Caller, name: bytes, attrs: Attrs, obj: Object | None = None) -> None:
        """Note that the view's policy hides an object from `caller`."""
        if self._has_room(name, obj):
            policy = view.policy
            verdicts = policy.cloak.judge(attrs.mode, attrs.uid, attrs.gid, caller.uid, caller.groups)
            is_shown = view.shows_by_mapping or view.show(attrs) is not None
            reason = reason_of(policy, caller, attrs, verdicts, is_root=False, is_shown=is_shown)
            self.hidden.append(Hidden(name, obj, reason))

    def add_hidden_by_lower(self, mount: str, name: bytes, obj: Object | None = None) -> None:
        """Note that the lower mount, which is at `mount`, hides an object."""
        if self._has_room(name, obj):
            self.hidden.append(Hidden(name, obj, lower_rule(mount)))

    def _has_room(self, name: bytes, obj: Object | None) -> bool:
        """Whether to note this object, too: it is not noted yet, and there are not too many already."""
        if any(noted.name == name and noted.obj is obj for noted in self.hidden):
            return False
        self.more += len(self.hidden) >= MOST_HIDDEN
        return len(self.hidden) < MOST_HIDDEN


# Not handed on with the caller, because several requests may share what stands for a caller (`actor.actor`).
noting: ContextVar[Notes | None] = ContextVar("noting", default=None)
"""The notes on the request that this task, or this thread of it, serves; None while the mount is not traced."""
