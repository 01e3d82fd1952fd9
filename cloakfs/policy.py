"""What a policy decides, the built-in policy (range-mapping and cloaking), and plug-ins.

A plug-in is a small class. It may define any of the methods of `Policy`; for the others, the built-in policy does
what the export's options say. The class may also derive from `Policy`, which gives it `super()`.
"""

import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .cloak import CloakList
from .config.options import Hides, Options
from .identity import Caller, ClientCaller, ClientId, ServerId
from .mapping import IdMap, Kind, packed


def _mode_bits(caller: Caller, attrs: "Attrs", mode: int) -> bool:
    """Whether the mode bits alone grant access, with root's privileges as in capabilities(7), CAP_DAC_OVERRIDE."""
    if caller.uid == 0:
        granted = 7 if attrs.mode & 0o111 or stat.S_ISDIR(attrs.mode) else 6
    elif caller.uid == attrs.uid:
        granted = attrs.mode >> 6
    else:
        granted = attrs.mode >> 3 if attrs.gid in caller.groups else attrs.mode
    return mode & ~granted == 0


# It is not frozen, because that would triple the cost of an instance, and every name of every listing needs one.
@dataclass(slots=True)
class Attrs:
    """What a policy may know of one object of the real tree. Ids are server ids, except in the result of `Policy.show`.

    Attributes:
        name: the last component of the path by which it was reached ("" for the root of the export); bytes that
            are not UTF-8 are surrogate-escaped.
        mode: type and permission bits, as in stat(2).
        uid: the owner.
        gid: the group.
        size: the size in bytes.
        nlink: the number of hard links.
        mtime_ns: the time of the last modification, in nanoseconds since the epoch.
    """

    name: str
    mode: int
    uid: ServerId
    gid: ServerId
    size: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    _access: Callable[[Caller, int], bool] | None = field(default=None, repr=False, compare=False)

    def accessible(self, caller: Caller, mode: int) -> bool:
        """Whether the kernel would let `caller` (server ids) access the object (4 read, 2 write, 1 execute).

        The answer follows the mode bits and ACLs of the real tree, as faccessat2(2) with AT_EACCESS sees them. For an
        object that is about to be created, it follows the mode bits that the object will have.
        """
        if self._access is None:
            return _mode_bits(caller, self, mode)
        return self._access(caller, mode)


class Policy:
    """The built-in policy: `range_map` and `cloak_list` of an export [SZ §2], and `exempt`.

    Args:
        options: the export's options; by default those of an export that specifies none.

    Attributes:
        hides: False promises that `visible` is always True, so that it need not be called.
        cloak: the cloak_list; it is all that `visible` asks if `by_ids_and_mode` holds.
    """

    def __init__(self, options: Options | None = None) -> None:
        options = options or Options()
        self.options = options
        self._hides_by_more = bool(options.hiding(Hides.MORE))  # once, and not for each entry of a listing
        range_map = packed(options.range_map)
        self.ids: dict[Kind, IdMap] = {
            "uid": range_map.table("uid", options.anonuid, options.squash),
            "gid": range_map.table("gid", options.anongid, options.squash),
        }
        self.cloak = CloakList(
            options.cloak_list, nobody_uid=options.anonuid, nobody_gid=options.anongid, exempt=options.exempt
        )
        self.hides = may_hide(self)

    def forward(self, caller: ClientCaller) -> Caller:
        """Return the identity on the server for a caller."""
        gids = self.ids["gid"]
        gid = gids.forward(caller.gid)
        return Caller(self.ids["uid"].forward(caller.uid), gid, gids.groups(caller.groups - {caller.gid}) | {gid})

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """Whether `caller` (server ids) may know that this object exists. Never called for the root of an export."""
        return self.cloak.visible(attrs.mode, attrs.uid, attrs.gid, caller.uid, caller.groups)

    def show(self, attrs: Attrs) -> Attrs:
        """Return the attributes as clients see them; only mode, uid and gid are used, and the ids are client ids."""
        shown: dict[str, Any] = {"uid": self.client_id("uid", attrs.uid), "gid": self.client_id("gid", attrs.gid)}
        return replace(attrs, **shown)

    def same_for_all(self, attrs: Attrs) -> bool:
        """Whether `visible` gives every caller the same answer; False when in doubt."""
        return self.by_ids_and_mode and self.cloak.same_for_all(attrs.mode, attrs.uid, attrs.gid)

    def server_id(self, kind: Kind, client_id: ClientId) -> ServerId | None:
        """Return the server id for chown and ACL entries; with None, the request is refused with EINVAL."""
        return self.ids[kind].counterpart(client_id, "forward")

    def client_id(self, kind: Kind, server_id: ServerId) -> ClientId:
        """Return the client id shown for a server id in attributes and ACL entries; nobody's if there is none."""
        return self.ids[kind].reverse(server_id)

    @property
    def is_plugin(self) -> bool:
        """Whether the code of a plug-in decides anything at all."""
        return type(self) is not Policy or not vars(self).keys().isdisjoint(METHODS)

    @property
    def by_ids_and_mode(self) -> bool:
        """Whether `visible` goes by mode, owner and group of an object and ids of the caller alone: `cloak` decides."""
        return is_built_in(self, "visible") and not self._hides_by_more

    @property
    def forwards_by_mapping(self) -> bool:
        """Whether the identity of a caller results from mapping each of its ids by `ids`, each by itself."""
        return is_built_in(self, "forward")

    @property
    def shows_by_mapping(self) -> bool:
        """Whether `show` only maps owner and group by `ids`."""
        return is_built_in(self, "show") and is_built_in(self, "client_id")

    @property
    def says_same_for_all(self) -> bool:
        """Whether a plug-in says of which objects `visible` always gives every caller the same answer."""
        return not is_built_in(self, "same_for_all")


METHODS = ("forward", "visible", "show", "same_for_all", "server_id", "client_id")
"""The methods that a plug-in may define."""


def may_hide(policy: Policy) -> bool:
    """Whether an option hides anything, or a plug-in has a `visible` of its own."""
    return policy.options.hides or not is_built_in(policy, "visible")


def is_built_in(policy: Policy, method: str) -> bool:
    """Whether `policy` leaves this method to the built-in policy."""
    return getattr(type(policy), method) is getattr(Policy, method) and method not in vars(policy)
