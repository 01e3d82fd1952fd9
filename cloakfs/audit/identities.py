"""Which identities a compromised client can take on: it may claim any uid, and any groups that are believed. Pure.

The tables of ids consist of finitely many ranges, so the answer is exact, although there are 2^64 pairs of a uid and a
gid to claim. `IdSet` is a set of server ids, as large as all of them.
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from ..config.options import Options
from ..identity import Caller, ClientId, ServerId
from ..mapping import MAX_ID, Kind
from ..nfs import root
from ..policy import Policy
from ..reasons import forward_rule


class IdSet:
    """An immutable set of server ids, given as pairs of a first and a last one, which may overlap."""

    __slots__ = ("_lows", "ranges")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        joined: list[tuple[int, int]] = []
        for low, high in sorted(ranges):
            if joined and low <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(high, joined[-1][1])
            else:
                joined.append((low, high))
        self.ranges = tuple(joined)
        """The set as disjoint ranges that do not touch, in order."""
        self._lows = [low for low, _ in joined]

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, int):
            return False
        at = bisect_right(self._lows, id_) - 1
        return at >= 0 and id_ <= self.ranges[at][1]

    def __len__(self) -> int:
        return sum(high - low + 1 for low, high in self.ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdSet) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        return f"IdSet({list(self.ranges)})"

    def other_than(self, avoided: Container[int]) -> ServerId | None:
        """Return the smallest id of the set that is not in `avoided`; None if there is none."""
        return next(
            (ServerId(id_) for low, high in self.ranges for id_ in range(low, high + 1) if id_ not in avoided), None
        )


def single(id_: ServerId) -> IdSet:
    """Return the set of one id."""
    return IdSet([(id_, id_)])


ALL = IdSet([(0, MAX_ID)])
"""All ids."""


@dataclass(frozen=True, slots=True)
class MappedRange:
    """A range of client ids that one rule maps.

    Attributes:
        low: the first client id.
        high: the last client id.
        server: what the first one becomes.
        shifts: whether each further one becomes the next server id; otherwise all of them become the same.
        rule: the definition or option that decides this.
        counts: whether they have a counterpart. A client id that becomes nobody has none, so that a supplementary group
            of this number is dropped.
    """

    low: ClientId
    high: ClientId
    server: ServerId
    shifts: bool
    rule: str
    counts: bool

    @property
    def servers(self) -> tuple[int, int]:
        """The first and last server id."""
        return self.server, self.server + (self.high - self.low if self.shifts else 0)

    @property
    def is_unchanged(self) -> bool:
        """Whether client ids count as the server's own."""
        return self.server - self.low == 0 and (self.shifts or self.low == self.high)

    def server_of(self, client_id: ClientId) -> ServerId:
        """Return what one of its client ids becomes."""
        return ServerId(self.server + (client_id - self.low if self.shifts else 0))

    def claims(self, server_id: ServerId) -> tuple[ClientId, ClientId] | None:
        """Return the first and last client id that become this server id; None if there is none."""
        low, high = self.servers
        if not low <= server_id <= high:
            return None
        if not self.shifts:
            return self.low, self.high
        one = ClientId(self.low + server_id - low)
        return one, one


@dataclass(frozen=True, slots=True)
class Claims:
    """What the callers of one entry can become.

    Attributes:
        uids: what becomes of every client uid.
        gids: what becomes of every primary gid.
        uid_set: the server uids that a caller can become.
        primary: the server gids of which a caller has exactly one, as it chooses.
        optional: the server gids of which a caller may have any number in addition (`groups=proc`).
        given: server gids that every caller has.
        by_account: whether the server's user database gives a caller further groups (`groups=database`).
    """

    uids: tuple[MappedRange, ...]
    gids: tuple[MappedRange, ...]
    uid_set: IdSet
    primary: IdSet
    optional: IdSet
    given: frozenset[ServerId]
    by_account: bool

    def claims_of(self, uid: ServerId) -> list[tuple[ClientId, ClientId]]:
        """Return the ranges of client uids that become this server uid."""
        return [found for mapped in self.uids if (found := mapped.claims(uid)) is not None]


def mapped_ranges(policy: Policy, kind: Kind, *, by_knfsd: bool) -> tuple[MappedRange, ...]:
    """Return what becomes of every client id of this kind.

    Args:
        policy: a policy that maps by tables.
        kind: of users or groups.
        by_knfsd: whether the kernel's NFS server is in between, which may replace a client's root (`nfs.root`).
    """
    ids = policy.ids[kind]
    found = []
    for low, high in ids.stretches():
        first, last = ids.forward(low), ids.forward(high)
        rule = forward_rule(policy, kind, low)
        counts = ids.counterpart(low, "forward") is not None
        begin = low
        if low == 0 and by_knfsd and not root.is_root(policy.options):
            stand_in = root.stand_in(policy.options, kind)
            becomes = ids.forward(stand_in)
            if becomes != first:
                root_rule = f"the kernel's server makes it client {kind} {stand_in}"
                has_counterpart = ids.counterpart(stand_in, "forward") is not None
                found.append(MappedRange(low, low, becomes, False, root_rule, has_counterpart))
                begin = ClientId(1)
        if begin <= high:
            first = ids.forward(begin)
            found.append(MappedRange(begin, high, first, first != last, rule, counts))
    return tuple(found)


def claims(policy: Policy, groups: str | None, *, by_knfsd: bool) -> Claims:
    """Return what callers with a view of their own can become.

    Args:
        policy: a policy that maps by tables.
        groups: the source of supplementary groups in force, as in the option `groups=`; None means `proc`.
        by_knfsd: whether the kernel's NFS server is in between.
    """
    uids, gids = (mapped_ranges(policy, kind, by_knfsd=by_knfsd) for kind in ("uid", "gid"))
    given = frozenset[ServerId]()
    believed = IdSet()
    if groups in (None, "proc"):
        believed = IdSet(mapped.servers for mapped in mapped_ranges(policy, "gid", by_knfsd=False) if mapped.counts)
    elif groups not in ("database", "none"):
        given = policy.ids["gid"].groups(ClientId(int(gid)) for gid in groups.split(":"))
    return Claims(
        uids,
        gids,
        IdSet(mapped.servers for mapped in uids),
        IdSet(mapped.servers for mapped in gids),
        believed,
        given,
        by_account=groups == "database",
    )


def fixed_claims(caller: Caller) -> Claims:
    """Return what callers of a fixed view become: its identity, whatever they claim."""
    every_user = MappedRange(ClientId(0), ClientId(MAX_ID), caller.uid, False, "fixed view", True)
    every_group = replace(every_user, server=caller.gid)
    return Claims(
        (every_user,), (every_group,), single(caller.uid), single(caller.gid), IdSet(), caller.groups, by_account=False
    )


def effective_groups(options: Options, *, by_knfsd: bool) -> str | None:
    """Return the source of supplementary groups in force, since the kernel's server shows none of its callers'."""
    return "database" if by_knfsd and options.groups is None else options.groups


@dataclass(frozen=True, slots=True)
class Accounts:
    """What the server's user database says.

    Attributes:
        groups: the groups of each account, including the primary one, by uid.
        user_names: names by uid.
        group_names: names by gid.
    """

    groups: Mapping[ServerId, frozenset[ServerId]]
    user_names: Mapping[ServerId, str]
    group_names: Mapping[ServerId, str]

    def user(self, uid: ServerId) -> str:
        """Return the name with the uid, or only the uid."""
        name = self.user_names.get(uid)
        return str(uid) if name is None else f"{name} ({uid})"

    def group(self, gid: ServerId) -> str:
        """Return the name with the gid, or only the gid."""
        name = self.group_names.get(gid)
        return str(gid) if name is None else f"{name} ({gid})"
