"""A view: one identity, or each caller by its own, looking through one policy. All visibility is decided through it.

Incoming names are checked with `visible`, and outgoing attributes pass through `show`. If the policy raises, the object
is hidden; the failure is logged once per cause.
"""

import logging
import stat
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from . import acl
from .identity import Caller, ClientCaller, ClientId, ServerId
from .mapping import MAX_ID, Kind
from .policy import Attrs, Policy, is_built_in


class LowerMount(Protocol):
    """The cloakfs mount in which the tree lies, as a view carries it; a view itself never queries it.

    It is a `stacking.lower.LowerMountClient`. Types of what system calls take and return are left out, because nothing
    pure may know them.
    """

    path: str

    def contains(self, info: Any) -> bool:
        """Whether the object with this stat is in it."""

    def is_visible_to(self, who: Any, fd: int, info: Any) -> bool:
        """Whether the actor `who` may know of the object that `fd` refers to."""

    def owner_of_new(self, credentials: Any, fd: int) -> tuple[ServerId, ServerId]:
        """Return owner and group, as it shows them, of what would be made in the directory `fd`."""

    def query(self, credentials: Any, fd: int) -> bytes:
        """Return its answer to `who` about the object that `fd` refers to."""


log = logging.getLogger(__name__)

_T = TypeVar("_T")
# Pairs of a uid and a gid.
_ClientIds = tuple[ClientId, ClientId]
_ServerIds = tuple[ServerId, ServerId]
_Key = TypeVar("_Key", _ClientIds, _ServerIds)
_Ids = TypeVar("_Ids", _ClientIds, _ServerIds)
_Id = TypeVar("_Id", ClientId, ServerId)


class KernelCheckedCaller(NamedTuple):
    """The caller that attributes are shown to, by its ids on both sides, where the kernel checks permissions."""

    client_uid: ClientId
    client_gid: ClientId
    server_uid: ServerId
    server_gid: ServerId

    def recognise(self, stored_uid: ServerId, stored_gid: ServerId, uid: ClientId, gid: ClientId) -> _ClientIds:
        """Return the owner and group to show instead of `uid` and `gid`, so that the kernel knows the owner as we do.

        Several client ids may stand for one server id (squash), and one, nobody, for many. Objects of the caller are
        shown under its own id, and other objects never are. (The kernel lets root in by other means.)
        """
        if stored_uid == self.server_uid:
            uid = self.client_uid
        elif uid == self.client_uid and self.client_uid:
            uid = _other_than(uid)
        if stored_gid == self.server_gid:
            gid = self.client_gid
        elif gid == self.client_gid and self.client_uid:
            gid = _other_than(gid)
        return uid, gid

    def named(self, kind: Kind, stored: ServerId, shown: ClientId | None) -> ClientId | None:
        """Return the id to show instead of `shown` for a user or group that an ACL names; None if it is nobody's.

        What names the caller on the server names it to the kernel, too, and nothing else does.
        """
        own, server = (self.client_uid, self.server_uid) if kind == "uid" else (self.client_gid, self.server_gid)
        if stored == server:
            return own
        return None if shown == own else shown


def _other_than(client_id: ClientId) -> ClientId:
    return STRANGER if client_id != STRANGER else _NEXT_STRANGER


STRANGER = ClientId(MAX_ID)
"""Shown for an id without a counterpart where the kernel checks the shown ids: on a client, 65534 is an account."""
_NEXT_STRANGER = ClientId(MAX_ID - 1)

# Views must not hold state per failure for ever; after this many distinct causes they stop logging new ones.
_MAX_CAUSES = 1000
# Clients choose their ids, so the number of cached ids must be bounded.
_MOST_KNOWN = 10_000
# The same bound for the groups of all cached callers: one caller may be in 65,536 groups (some 10 MB).
_MOST_GROUPS = 200_000


class View:
    """What one identity, or every caller by its own, sees of the tree.

    Args:
        policy: decides what is visible, and how it is shown.
        fixed: the identity (server ids) of a fixed view; None for a caller view.
        entrants: client uids that may enter a fixed view, apart from root and the identity itself.
        for_all: whether all callers may enter a fixed view.
        checked: whether the kernel checks permissions against the attributes that are shown.
        lower: the cloakfs mount in which the tree lies, if any; `tree.visibility` queries it as well.
        not_its_failure: exceptions that do not mean a failure of the policy; they are passed on.
        act_as_daemon: called before the code of a plug-in, which must never run with a caller's credentials.
    """

    def __init__(
        self,
        policy: Policy,
        fixed: Caller | None = None,
        entrants: frozenset[ClientId] = frozenset(),
        *,
        for_all: bool = False,
        checked: bool = False,
        lower: LowerMount | None = None,
        not_its_failure: type[Exception] | tuple[()] = (),
        act_as_daemon: Callable[[], None] | None = None,
    ) -> None:
        self.policy = policy
        self._before_plugin = act_as_daemon if policy.is_plugin else None
        self._not_its_failure = not_its_failure
        self.fixed = fixed
        self.entrants = entrants
        self._shared = fixed if for_all or entrants else None  # the identity that several callers have
        self.checked = checked
        self.lower = lower
        self._logged: set[tuple[str, type[BaseException], int]] = set()
        self._no_answers: set[str] = set()  # methods that returned something that is no valid answer
        # The built-in show() only maps ids; knowing this saves an object per answer. The show() of a plug-in may fail.
        self.shows_by_mapping = policy.shows_by_mapping
        self.forwards_by_mapping = policy.forwards_by_mapping
        """Whether the identity of a caller results from mapping each of its ids separately."""
        self.policy_hides = policy.hides or not self.shows_by_mapping
        """Whether the policy may hide something; with a lower mount, this is not all that may be hidden (`hides`)."""
        self.hides = self.policy_hides or lower is not None
        """Whether anything may be hidden in this view, by the policy or by a lower mount."""
        self.cloak = policy.cloak if policy.by_ids_and_mode and self.shows_by_mapping else None
        """The cloak_list if it is all by which the policy hides anything: ids and modes decide. Otherwise None."""
        self.sole_cloak = self.cloak if lower is None else None
        """The same if no lower mount has a say, so that the cloak_list alone decides who sees what."""
        self.cloak_by_ids = self.sole_cloak if self.forwards_by_mapping else None
        """The same if each id of a caller is mapped by itself, so that ids and modes alone decide who sees what.

        Only then does it follow from an object, and the uid of a caller, what the kernel may cache for others.
        """
        self.says_same_for_all = lower is None and policy.says_same_for_all
        """Whether a plug-in says what it shows to all callers alike (`same_for_all`)."""
        self.maps_by_tables = self.forwards_by_mapping and self.shows_by_mapping and is_built_in(policy, "server_id")
        """Whether ids are mapped by the tables of the policy in each direction, and no plug-in has a say in it."""
        self.is_steady = lower is None and self.shows_by_mapping and (self.cloak is not None or not self.hides)
        """Whether what one identity is shown changes only when the tree, or this identity, does."""
        self._plain_ids = is_built_in(policy, "client_id")
        self._shown: dict[_ServerIds, _ClientIds] = {}
        self._alike: dict[_ServerIds, bool] = {}
        self._forwarded: dict[_ClientIds, _ServerIds] = {}
        self._identified: dict[ClientCaller, Caller] = {}
        self._groups = 0  # in all of these

    def admits(self, client_uid: ClientId) -> bool:
        """Whether a process with this (client) uid may enter. All callers may enter a caller view."""
        return self.fixed is None or client_uid == 0 or client_uid in self.entrants or client_uid == self._own_uid()

    def _own_uid(self) -> ClientId | None:
        """Return the client uid for the identity of a fixed view, if it has one."""
        assert self.fixed is not None
        uid = self.counterpart("uid", self.fixed.uid)
        if uid is None or self.forwards_by_mapping:
            return uid
        caller = self._forward(ClientCaller(uid, uid, frozenset({uid})))
        return uid if caller is not None and caller.uid == self.fixed.uid else None

    def identify(self, caller: ClientCaller) -> Caller | None:
        """Return the identity, in server ids, that a request by `caller` is served as.

        The result is None if the policy failed; such a caller sees nothing.
        """
        if self.fixed is not None:
            return self.fixed
        if not self.forwards_by_mapping:
            return self._forward(caller)
        server_caller = self._identified.get(caller)
        if server_caller is None:
            server_caller = self._forward(caller)
            if server_caller is not None:
                self._groups += len(caller.groups)
                if len(self._identified) >= _MOST_KNOWN or self._groups > _MOST_GROUPS:
                    self._identified.clear()
                    self._groups = len(caller.groups)
                self._identified[caller] = server_caller
        return server_caller

    def _forward(self, caller: ClientCaller) -> Caller | None:
        def forward() -> Caller:
            server_caller = self.policy.forward(caller)
            return (
                server_caller if self.forwards_by_mapping else _checked_caller(server_caller)
            )  # each of perhaps 65,536 groups

        return self._call_policy("forward", None, forward, caller)

    def server_ids(self, uid: ClientId, gid: ClientId) -> _ServerIds:
        """Return what `identify` makes of a caller's uid and primary gid, where `forwards_by_mapping` holds."""
        key = (uid, gid)
        ids = self._forwarded.get(key)
        if ids is None:
            server_caller = self.policy.forward(ClientCaller(uid, gid, frozenset({gid})))
            ids = _cache(self._forwarded, key, (server_caller.uid, server_caller.gid))
        return ids

    def server_uid(self, uid: ClientId) -> ServerId:
        """Return the uid that `identify` makes of a caller's, where `forwards_by_mapping` holds."""
        return self.policy.ids["uid"].forward(uid)

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """Whether `caller` (server ids) may know of this object. (Its directories are checked separately.)

        An object that cannot be shown, because the policy fails to say how, is not visible.
        """
        if not self.policy_hides:
            return True
        answer: object = self._call_policy("visible", False, lambda: self.policy.visible(caller, attrs), caller, attrs)
        if answer is not True:
            if answer is not False and "visible" not in self._no_answers:
                # It may have forgotten to return something. The object may have been meant to be hidden, so hide it.
                self._no_answers.add("visible")
                log.error("policy %s: visible answered %r, neither True nor False: hidden", self._policy_name, answer)
            return False
        return self.shows_by_mapping or self.show(attrs) is not None

    def same_for_all(self, attrs: Attrs) -> bool:
        """Whether a plug-in promises that `visible` always gives every caller the same answer for this object."""
        if not self.says_same_for_all:
            return False
        return self._call_policy("same_for_all", False, lambda: self.policy.same_for_all(attrs) is True, attrs)

    def is_shown_alike(self, uid: ServerId, gid: ServerId) -> bool:
        """Whether all callers are shown the same owner and group even after `KernelCheckedCaller.recognise`."""
        alike = self._alike.get((uid, gid))
        if alike is None:
            alike = (
                self.forwards_by_mapping
                and self.shows_by_mapping
                and (self.policy.ids["uid"].is_sole(uid) or self._is_squashed_root("uid", uid))
                and (self.policy.ids["gid"].is_sole(gid) or self._is_squashed_root("gid", gid))
            )
            if len(self._alike) >= _MOST_KNOWN:
                self._alike.clear()
            self._alike[uid, gid] = alike
        return alike

    def _is_squashed_root(self, kind: Kind, server_id: ServerId) -> bool:
        """Whether this is root, which is shown as 0 where no client id becomes it.

        Client 0 is no caller's id then: the kernel's NFS server has replaced it (`nfs.root`).
        """
        ids = self.policy.ids
        is_root_here = ids["uid"].forward(ClientId(0)) == 0
        return server_id == 0 and not (is_root_here or ids[kind].closed or ids[kind].forward(ClientId(0)) == 0)

    def show(self, attrs: Attrs) -> tuple[int, ClientId, ClientId, int] | None:
        """Return (mode, uid, gid, nlink) as shown to clients; None if the policy failed, so that it must be hidden.

        Directories have one link where files may be hidden, because a real count would reveal hidden subdirectories.
        The policy cannot change the type of an object.
        """
        nlink = 1 if self.hides and stat.S_ISDIR(attrs.mode) else attrs.nlink
        if self.shows_by_mapping:
            uid, gid = self.client_ids(attrs.uid, attrs.gid)
            return self.shown_mode(attrs.mode, attrs.uid, attrs.gid, uid, gid), uid, gid, nlink
        shown = self._call_policy("show", None, lambda: _checked_show(self.policy.show(attrs)), attrs)
        if shown is None:
            return None
        mode, uid, gid = shown
        mode = stat.S_IFMT(attrs.mode) | stat.S_IMODE(mode)
        mode = self.shown_mode(mode, attrs.uid, attrs.gid, uid, gid)
        if self.checked:
            uid = STRANGER if self._is_nobody("uid", attrs.uid, uid) else uid
            gid = STRANGER if self._is_nobody("gid", attrs.gid, gid) else gid
        return mode, uid, gid, nlink

    def shown_mode(self, mode: int, uid: ServerId, gid: ServerId, shown_uid: ClientId, shown_gid: ClientId) -> int:
        """Return `mode` without the set-id bits that would mean something else on a client than here.

        On a client, a set-id program runs as its shown owner. If that is not the only client id that becomes the owner
        here, others could plant the program; so could each caller that may enter a fixed view. (On a directory, S_ISGID
        runs nothing.)
        """
        if mode & stat.S_ISUID and not self._is_only("uid", uid, shown_uid):
            mode &= ~stat.S_ISUID
        if mode & stat.S_ISGID and not stat.S_ISDIR(mode) and not self._is_only("gid", gid, shown_gid):
            mode &= ~stat.S_ISGID
        return mode

    def _is_only(self, kind: Kind, server_id: ServerId, shown: ClientId) -> bool:
        if not (self.forwards_by_mapping and self._plain_ids):
            return False
        shared = self._shared
        if shared is not None and (server_id == shared.uid if kind == "uid" else server_id in shared.groups):
            return False
        ids = self.policy.ids[kind]
        return shown == ids.counterpart(server_id, "reverse") and ids.is_sole(server_id)

    def client_ids(self, uid: ServerId, gid: ServerId) -> _ClientIds:
        """Return owner and group as `show` shows them, where `shows_by_mapping` holds."""
        key = (uid, gid)
        ids = self._shown.get(key)
        if ids is None:
            ids = _cache(self._shown, key, (self.client_id("uid", uid), self.client_id("gid", gid)))
        return ids

    def server_id(self, kind: Kind, client_id: ClientId) -> ServerId | None:
        """Return the server id to store for a client id; None if the request is to be refused with EINVAL."""

        def call() -> ServerId | None:
            answer = self.policy.server_id(kind, client_id)
            return None if answer is None else _checked(answer)

        return self._call_policy("server_id", None, call, kind, client_id)

    def client_id(self, kind: Kind, server_id: ServerId) -> ClientId:
        """Return the client id to show for a stored server id; nobody's if it has none, or the policy failed.

        Where the kernel checks permissions with it, it is in that case an id that belongs to no user.
        """
        client_id = self._client_id(kind, server_id)
        if client_id is None:
            return STRANGER if self.checked else ClientId(self._nobody(kind))
        if not self.checked or self.counterpart(kind, server_id) is not None:
            return client_id
        # root_squash does not change what root owns. Whether root itself may enter is decided elsewhere. Where it is
        # not root here, the kernel's NFS server has removed root's group from all callers (`nfs.root`).
        is_root_here = self.policy.ids["uid"].forward(ClientId(0)) == 0
        is_roots = client_id == 0 and server_id == 0 and (kind == "uid" or not is_root_here)
        return client_id if is_roots else STRANGER

    def counterpart(self, kind: Kind, server_id: ServerId) -> ClientId | None:
        """Return the client id that *is* a server id; None, which must match no id at all, if there is none."""
        if self._plain_ids:
            return self.policy.ids[kind].counterpart(server_id, "reverse")
        client_id = self._client_id(kind, server_id)
        return None if client_id is None or self._is_nobody(kind, server_id, client_id) else client_id

    def _is_nobody(self, kind: Kind, server_id: ServerId, shown: ClientId) -> bool:
        """Whether `shown`, a plug-in's answer, is nobody's number because there is no counterpart."""
        nobody = self._nobody(kind)
        return shown == ClientId(nobody) and server_id != nobody

    def is_squashed_caller(self, client_uid: ClientId) -> bool:
        """Whether the kernel's NFS server gives this uid to every caller of an all_squash export (`nfs.root`)."""
        return client_uid == ClientId(self.policy.options.anonuid)

    def _nobody(self, kind: Kind) -> ServerId:
        return self.policy.options.anonuid if kind == "uid" else self.policy.options.anongid

    def _client_id(self, kind: Kind, server_id: ServerId) -> ClientId | None:
        return self._call_policy(
            "client_id", None, lambda: _checked(self.policy.client_id(kind, server_id)), kind, server_id
        )

    def acl_in(self, value: bytes) -> bytes:
        """Translate a POSIX ACL that is to be stored into server ids.

        Raises:
            ValueError: an entry cannot be mapped.
        """
        return acl.translate(value, partial(self.server_id, "uid"), partial(self.server_id, "gid"), distinct=True)

    def acl_out(self, value: bytes, checked_caller: KernelCheckedCaller | None = None) -> bytes:
        """Translate a stored POSIX ACL into client ids.

        Where the kernel checks permissions with it, an entry without a counterpart grants nothing, because a client
        can claim any id. An entry that names the caller on the server is shown under the caller's own id.
        """
        if not self.checked:
            return acl.translate(value, partial(self.client_id, "uid"), partial(self.client_id, "gid"))

        def shown(kind: Kind, server_id: ServerId) -> ClientId | None:
            client_id = self.counterpart(kind, server_id)
            return client_id if checked_caller is None else checked_caller.named(kind, server_id, client_id)

        return acl.translate(value, partial(shown, "uid"), partial(shown, "gid"), stranger=STRANGER)

    def shows_acl_alike(self, value: bytes) -> bool:
        """Whether every caller is shown the same of a stored POSIX ACL: no more than one client id is whom it names."""
        if not (self.forwards_by_mapping and self._plain_ids):
            return False
        users, groups = acl.named(value)
        ids = self.policy.ids
        return all(
            table.is_sole(id_) or not table.may_become(id_)
            for table, named in ((ids["uid"], users), (ids["gid"], groups))
            for id_ in map(ServerId, named)
        )

    def _call_policy(self, what: str, otherwise: _T, question: Callable[[], _T], *args: object) -> _T:
        """Return the policy's answer, or `otherwise` if it raises anything at all, even SystemExit."""
        if self._before_plugin is not None:
            self._before_plugin()
        try:
            return question()
        except self._not_its_failure:
            raise
        except BaseException as exc:
            # The text of the exception plays no part, because it may name a different file every time.
            where = [line for _, line in traceback.walk_tb(exc.__traceback__)]
            cause = (what, type(exc), where[-1])
            if cause not in self._logged and len(self._logged) < _MAX_CAUSES:
                self._logged.add(cause)
                log.exception("policy %s: %s%r failed: hidden", self._policy_name, what, args)
            return otherwise

    @property
    def _policy_name(self) -> str:
        return self.policy.options.policy or type(self.policy).__name__


def _cache(known: dict[_Key, _Ids], key: _Key, ids: _Ids) -> _Ids:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = ids
    return ids


def _checked(answer: _Id) -> _Id:
    """Return what a plug-in answered if it is an id; a plug-in may answer anything."""
    if isinstance(answer, int) and 0 <= answer <= MAX_ID:
        return answer
    raise ValueError(f"{answer!r} is not an id (0 to {MAX_ID})")


def _checked_caller(answer: Caller) -> Caller:
    uid, gid, groups = answer
    return Caller(_checked(uid), _checked(gid), frozenset(map(_checked, {gid, *groups})))


def _checked_show(answer: Attrs) -> tuple[int, ClientId, ClientId]:
    return int(answer.mode), ClientId(_checked(answer.uid)), ClientId(_checked(answer.gid))
