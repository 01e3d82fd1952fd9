"""Who acts on the real tree: a caller, with the credentials for its system calls, or the daemon."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .. import linux
from ..identity import Caller, ClientId, ServerId

MOST_IDENTITIES = 1024
"""How many identities are cached. There must be a limit, because clients choose theirs."""


def credentials(caller: Caller, lacks: int = 0) -> linux.Credentials:
    """Return the credentials with which system calls for `caller` (server ids) run.

    If it is root, `lacks` is a bit mask of the capabilities that it does not have.
    """
    made = _credentials(caller) if len(caller.groups) <= linux.FEW_GROUPS else _long_credentials(caller)
    return made._replace(lacks=lacks) if lacks and caller.uid == 0 else made


def _make_credentials(caller: Caller) -> linux.Credentials:
    return linux.Credentials(caller.uid, caller.gid, tuple(sorted(caller.groups - {caller.gid})))


_credentials = lru_cache(MOST_IDENTITIES)(_make_credentials)
_long_credentials = lru_cache(linux.MOST_LONG)(_make_credentials)


def with_group(groups: frozenset[ClientId], gid: ClientId) -> frozenset[ClientId]:
    """Return `groups` with `gid` added. Long sets are cached, since copying and hashing them takes long."""
    if gid in groups:
        return groups
    return groups | {gid} if len(groups) <= linux.FEW_GROUPS else _with_group(groups, gid)


@lru_cache(linux.MOST_LONG)
def _with_group(groups: frozenset[ClientId], gid: ClientId) -> frozenset[ClientId]:
    return groups | {gid}


class Actor:
    """The caller that a request is served as, in server ids. Its groups, which are not cheap, are looked up on demand.

    Args:
        uid: the caller's uid.
        gid: its primary group.
        find: returns the whole caller; called at most once, while the request is being served.
        args: what `find` is called with.

    Attributes:
        known: the caller with all its groups, once they have been looked up.
    """

    __slots__ = ("_args", "_find", "gid", "known", "uid")

    lacks = 0
    """If it is root: the capabilities that it does not have, as a bit mask."""

    def __init__(self, uid: ServerId, gid: ServerId, find: Callable[..., Caller], *args: Any) -> None:
        self.uid = uid
        self.gid = gid
        self._find = find
        self._args = args
        self.known: Caller | None = None

    @property
    def caller(self) -> Caller:
        """The caller with all its groups, as policies need it."""
        if self.known is None:
            self.known = self._find(*self._args)
        return self.known

    def has_group(self, gid: ServerId) -> bool:
        """Whether this is one of the caller's groups."""
        return gid == self.gid or gid in self.caller.groups

    @property
    def credentials(self) -> linux.Credentials:
        """The credentials with which system calls for this caller are made."""
        return credentials(self.caller, self.lacks)

    def found(self) -> "Actor":
        """Return an equal actor with groups and capabilities looked up, which only the session loop may do."""
        who, lacks = self.caller, self.lacks
        return RootActor(who.uid, who.gid, lambda: lacks, lambda: who) if lacks else actor(who)


class RootActor(Actor):
    """A caller that is served as uid 0, with the capabilities that it has, and no more. They are looked up on demand.

    Args:
        uid, gid, find, args: as for any `Actor`.
        find_lacks: returns the capabilities that it does not have.
    """

    __slots__ = ("_find_lacks", "_lacks")

    def __init__(
        self, uid: ServerId, gid: ServerId, find_lacks: Callable[[], int], find: Callable[..., Caller], *args: Any
    ) -> None:
        super().__init__(uid, gid, find, *args)
        self._find_lacks = find_lacks
        self._lacks = -1

    @property
    def lacks(self) -> int:  # type: ignore[override]
        """The capabilities that it does not have, as a bit mask."""
        if self._lacks < 0:
            self._lacks = self._find_lacks()
        return self._lacks


def actor(caller: Caller) -> Actor:
    """Return the actor for a caller that is already known. If it is root, it has all capabilities."""
    return _actor(caller) if len(caller.groups) <= linux.FEW_GROUPS else _make_actor(caller)


def _make_actor(caller: Caller) -> Actor:
    return Actor(caller.uid, caller.gid, lambda: caller)


_actor = lru_cache(MOST_IDENTITIES)(_make_actor)


class _DaemonActor(Actor):
    __slots__ = ()

    @property
    def credentials(self) -> linux.Credentials:
        return linux.ROOT  # in a lower mount, this is more than a caller's root (`stacking.upper`)

    def found(self) -> Actor:
        return self


_ROOT = Caller(ServerId(0), ServerId(0), frozenset({ServerId(0)}))

DAEMON = _DaemonActor(_ROOT.uid, _ROOT.gid, lambda: _ROOT)
"""The daemon itself, or that of an upper mount, as a caller. It is recognized by identity (`is`), not by ids."""
