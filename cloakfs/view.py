"""A view: one identity, or each caller's own, looking through one policy. The only door.

Names that come in are asked about with `visible`, attributes that go out pass `show`. A policy that raises hides the
object; the failure is logged once per cause.
"""

import logging
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from . import acl
from .caller import Caller
from .mapping import Kind
from .policy import Attrs, Policy

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Views must not keep state per failure for ever; after this many distinct causes they stop telling new ones.
_MAX_CAUSES = 1000


class View:
    """What one identity, or every caller by its own, sees of the tree.

    Args:
        policy: decides what is seen and how.
        fixed: the identity (server ids) of a fixed view; None for a caller view.
        entrants: client uids that may enter a fixed view, apart from root and the identity itself.
    """

    def __init__(self, policy: Policy, fixed: Caller | None = None, entrants: frozenset[int] = frozenset()) -> None:
        self.policy = policy
        self.fixed = fixed
        self.hides = policy.hides
        self._entrants = entrants
        self._told: set[tuple[str, str]] = set()
        # The built-in show() only maps ids; saying so saves an object per answer.
        self._plain_show = type(policy).show is Policy.show and "show" not in vars(policy)

    def admits(self, client_uid: int) -> bool:
        """May a process with this (client) uid enter? Anybody may enter a caller view (their own)."""
        return (
            self.fixed is None
            or client_uid == 0
            or client_uid in self._entrants
            or client_uid == self.client_id("uid", self.fixed.uid)
        )

    def identify(self, caller: Caller) -> Caller | None:
        """The identity, in server ids, that a request by `caller` (client ids) is served as.

        None when the policy failed: such a caller sees nothing.
        """
        if self.fixed is not None:
            return self.fixed
        return self._ask("forward", None, self.policy.forward, caller)

    def visible(self, who: Caller, attrs: Attrs) -> bool:
        """May `who` (server ids) know of this object? (Of its directories, the door asks separately.)"""
        if not self.hides:
            return True
        return bool(self._ask("visible", False, self.policy.visible, who, attrs))

    def show(self, attrs: Attrs) -> tuple[int, int, int, int] | None:
        """(mode, uid, gid, nlink) as the client's world sees them; None when the policy failed: hide it.

        Directories have one link where files may be hidden: a real count tells of hidden subdirectories.
        """
        nlink = 1 if self.hides and stat.S_ISDIR(attrs.mode) else attrs.nlink
        if self._plain_show:
            return attrs.mode, self.client_id("uid", attrs.uid), self.client_id("gid", attrs.gid), nlink
        shown = self._ask("show", None, self.policy.show, attrs)
        return None if shown is None else (shown.mode, shown.uid, shown.gid, nlink)

    def server_id(self, kind: Kind, client_id: int) -> int | None:
        """The server id for a client id that is to be stored; None: refuse with EINVAL."""
        return self._ask("server_id", None, self.policy.server_id, kind, client_id)

    def client_id(self, kind: Kind, server_id: int) -> int:
        """The client id that stands for a stored server id."""
        nobody = self.policy.options.anonuid if kind == "uid" else self.policy.options.anongid
        return self._ask("client_id", nobody, self.policy.client_id, kind, server_id)

    def acl_in(self, value: bytes) -> bytes:
        """A POSIX ACL to store, with server ids.

        Raises:
            ValueError: an entry cannot be mapped.
        """
        return acl.translate(
            value, lambda i: self.server_id("uid", i), lambda i: self.server_id("gid", i), distinct=True
        )

    def acl_out(self, value: bytes) -> bytes:
        """A stored POSIX ACL, with client ids."""
        return acl.translate(value, lambda i: self.client_id("uid", i), lambda i: self.client_id("gid", i))

    def _ask(self, what: str, otherwise: _T, method: Callable[..., _T], *args: Any) -> _T:
        try:
            return method(*args)
        except Exception as exc:
            cause = (what, repr(exc))
            if cause not in self._told and len(self._told) < _MAX_CAUSES:
                self._told.add(cause)
                log.exception("policy %s.%s%r failed: hidden", type(self.policy).__name__, what, args)
            return otherwise
