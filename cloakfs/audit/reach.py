"""What a caller who may claim many identities can do in a tree. Pure.

A compromised client need not keep to one identity. It can look up a name as one user and read the file as another,
because a file handle, once obtained, is good for all callers that the mount shows the object; and it can claim other
groups in each request. Each single request, however, is made by one identity, which must see the object and every
directory above it. Whether it does is asked of the `View`, as a mount does; what the kernel permits stands in the
survey.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..identity import Caller, ServerId
from ..policy import Attrs
from ..view import View
from .identities import ALL, Claims, IdSet
from .survey import EXECUTE, NO_ANCESTRY, READ, WRITE, Survey

SEES, OWNS = 16, 8
"""Further bits besides 4 read (a directory: list), 2 write and 1 execute (search).

OWNS means that the owner may give itself any permission, and so read and write it whatever its mode.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """What can be done to the objects of one kind in one place, and one identity for each thing that can be done."""

    bits: int
    witnesses: Mapping[int, Caller]


_NOTHING = Access(0, {})
_MOST_ACCESSES = 10_000  # that are remembered


class Reach:
    """What callers can do that may claim some identities.

    Args:
        survey: the tree.
        view: the view of a policy that decides by tables.
        claims: what callers can become.
        groups: the groups that each account has, by uid.
        read_only: whether the export is.
    """

    def __init__(
        self,
        survey: Survey,
        view: View,
        claims: Claims,
        groups: Mapping[ServerId, frozenset[ServerId]],
        *,
        read_only: bool,
    ) -> None:
        self._survey = survey
        self._view = view
        self._claims = claims
        self._groups = groups
        self._withheld = WRITE if read_only else 0
        self._chains: dict[int, tuple[int, ...]] = {NO_ANCESTRY: ()}
        self._special: dict[int, frozenset[ServerId]] = {}  # by ancestry
        self._passable: dict[tuple[int, tuple[ServerId, ...]], bool] = {}
        self._accesses: dict[tuple[int, int, tuple[ServerId, ...]], Access] = {}
        self._attrs = [Attrs("", kind.mode, kind.uid, kind.gid) for kind in survey.kinds]
        self._members: dict[ServerId, set[ServerId]] = {}
        for uid, gids in groups.items():
            for gid in gids:
                self._members.setdefault(gid, set()).add(uid)
        self._exempt = view.policy.cloak.exempt
        known = survey.uids() | groups.keys() | {mapped.server for mapped in claims.uids if not mapped.shifts}
        known |= self._exempt
        self.known = frozenset(known)
        """The uids that may make a difference somewhere; all others are alike."""
        other = claims.uid_set.other_than(known)
        if other is None:
            other = ALL.other_than(known)
        assert other is not None
        self.other = other
        """One that stands for all others, if possible one that can be claimed."""

    def special(self, ancestry: int, kind: int) -> frozenset[ServerId]:
        """Return the uids to which objects of this kind there may be open otherwise than to any other uid."""
        found = self._special.get(ancestry)
        if found is None:
            found = frozenset(uid for number in self._chain(ancestry) for uid in self._special_to(number))
            self._special[ancestry] = found
        return found | self._special_to(kind) | self._exempt

    def _special_to(self, kind: int) -> set[ServerId]:
        of, grants = self._survey.kinds[kind], self._survey.grants[kind]
        found = {of.uid, *grants.users}
        for gid in (of.gid, *grants.groups):
            found |= self._members.get(gid, set())
        return found

    def at(self, ancestry: int, kind: int, uids: IdSet) -> Access:
        """Return what callers who can become each of `uids` can do to objects of this kind in the directory there."""
        who = self._representatives(uids, self.special(ancestry, kind))
        key = (ancestry, kind, who)
        access = self._accesses.get(key)
        if access is None:
            if len(self._accesses) >= _MOST_ACCESSES:
                self._accesses.clear()
            access = self._accesses[key] = self._access(ancestry, kind, uids, who)
        return access

    def _access(self, ancestry: int, kind: int, uids: IdSet, who: tuple[ServerId, ...]) -> Access:
        if ancestry != NO_ANCESTRY and not self._passes(ancestry, uids):
            return _NOTHING
        of, grants = self._survey.kinds[kind], self._survey.grants[kind]
        chain = (*self._chain(ancestry), kind)
        directory = self._survey.grants[self._survey.ancestries[ancestry].kind] if ancestry != NO_ANCESTRY else None
        witnesses: dict[int, Caller] = {}
        has_name = has_handle = directory is None
        for caller in self._callers(chain, who):
            if directory is not None:
                granted = directory.to(caller.uid, caller.groups)
                has_name = has_name or bool(granted & (READ | EXECUTE))
                has_handle = has_handle or bool(granted & EXECUTE)
            witnesses.setdefault(SEES, caller)
            if caller.uid == of.uid and not self._withheld:
                witnesses.setdefault(OWNS, caller)
            for bit in _each(grants.to(caller.uid, caller.groups) & ~self._withheld):
                witnesses.setdefault(bit, caller)
        if not (has_name and witnesses):
            return _NOTHING
        if not has_handle:
            return Access(SEES, {SEES: witnesses[SEES]})
        return Access(sum(witnesses), witnesses)

    def _passes(self, ancestry: int, uids: IdSet) -> bool:
        """Whether they get a handle of the directory."""
        parent, kind = self._survey.ancestries[ancestry]
        if parent == NO_ANCESTRY:
            return True
        who = self._representatives(uids, self.special(parent, kind))
        key = (ancestry, who)
        passes = self._passable.get(key)
        if passes is None:
            searched = self._survey.grants[self._survey.ancestries[parent].kind]
            passes = self._passable[key] = self._passes(parent, uids) and any(
                searched.to(caller.uid, caller.groups) & EXECUTE for caller in self._callers(self._chain(ancestry), who)
            )
        return passes

    def _chain(self, ancestry: int) -> tuple[int, ...]:
        """Return the kinds of a directory and of all above it, from the root down."""
        chain = self._chains.get(ancestry)
        if chain is None:
            parent, kind = self._survey.ancestries[ancestry]
            chain = self._chains[ancestry] = (*self._chain(parent), kind)
        return chain

    def _representatives(self, uids: IdSet, special: frozenset[ServerId]) -> tuple[ServerId, ...]:
        """Return those of `uids` that can make a difference, and one that stands for all others."""
        found = sorted(uid for uid in special if uid in uids)
        if uids.other_than(special) is not None:
            found.append(self.other)
        return tuple(found)

    def _callers(self, chain: tuple[int, ...], who: tuple[ServerId, ...]) -> Iterator[Caller]:
        """Yield identities that see everything on the chain: for whatever can be done there, one that can do it.

        Groups can take away as well as give: the bits of the group count instead of those of all others, and a mask
        can hide what members of the group may do. Hence each identity is tried with as few groups as possible, and with
        each of those that the object, or the directory that it is in, mentions.
        """
        kinds = self._survey.kinds
        last = {gid for number in chain[-2:] for gid in (kinds[number].gid, *self._survey.grants[number].groups)}
        claimable = [gid for gid in sorted(last) if gid in self._claims.optional]
        choices = [frozenset[ServerId](), *(frozenset({gid}) for gid in claimable)]
        for uid, gid in itertools.product(who, self._primary_groups(chain, last)):
            needed = self._needed_groups(chain, uid, gid)
            for choice in choices:
                caller = Caller(uid, gid, needed | choice)
                if all(self._sees(number, caller) for number in chain[1:]):
                    yield caller

    def _primary_groups(self, chain: tuple[int, ...], last: set[ServerId]) -> list[ServerId]:
        """Return the primary groups to try: one that nothing mentions, and those of which something else can be gained.

        Args:
            chain: the objects on the way.
            last: the groups that the object, or the directory that it is in, mentions.
        """
        claims = self._claims
        mentioned = last.union(self._survey.kinds[number].gid for number in chain)
        neutral = claims.primary.other_than(mentioned)
        useful = sorted(gid for gid in mentioned if gid in claims.primary)
        if neutral is None:
            return useful
        # Where a group may be claimed as a supplementary one, nothing is gained by claiming it as the primary one.
        return [neutral, *(gid for gid in useful if gid not in claims.optional)]

    def _needed_groups(self, chain: tuple[int, ...], uid: ServerId, gid: ServerId) -> frozenset[ServerId]:
        """Return the groups that this user has anyway, and those without which it does not see all of the chain."""
        claims = self._claims
        given = claims.given | (self._groups.get(uid, frozenset()) if claims.by_account else frozenset())
        least = Caller(uid, gid, given | {gid})
        unseen = {self._survey.kinds[number].gid for number in chain[1:] if not self._sees(number, least)}
        return least.groups | {group for group in unseen if group in claims.optional}

    def _sees(self, kind: int, caller: Caller) -> bool:
        return self._view.visible(caller, self._attrs[kind])


def _each(bits: int) -> Iterator[int]:
    return (bit for bit in (READ, WRITE, EXECUTE) if bits & bit)
