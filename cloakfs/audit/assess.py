"""What the clients of one entry, if compromised, could do to a tree: who they become, and what is open. Pure."""

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..identity import ClientId, ServerId
from ..mapping import Kind
from ..policy import Attrs
from ..view import View
from .entry import Entry
from .identities import ALL, Accounts, Claims, IdSet, MappedRange, single
from .reach import OWNS, SEES, Access, Reach
from .survey import EXECUTE, READ, WRITE, AccessAttrs, Bucket, BucketKey, Survey

_Key = TypeVar("_Key", str, ServerId)

MOST_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Example:
    """One of the worst objects that are open to a caller.

    Attributes:
        severity: the higher, the fewer users are meant to have access: 2 only its owner, 1 also its group, 0 others.
        path: where it is, from the root of the tree.
        likeness: its owner, group, mode and ACL.
        place: which objects it stands for.
        access: what can be done to it, and as whom.
    """

    severity: int
    path: str
    likeness: AccessAttrs
    place: BucketKey
    access: Access


@dataclass(slots=True)
class Tally:
    """How much a caller can do: numbers of names, and bytes of the regular files among them.

    Attributes:
        sees: names that can be known.
        lists: directories that can be listed.
        reads: regular files that can be read.
        read_bytes: the bytes in them.
        changes: regular files and directories that can be changed.
        changed_bytes: the bytes in these files.
        executes: regular files that can be executed.
        owns: files and directories whose owner the caller can become: an owner can give itself any permission.
        claimed: files and directories that can be read only by a caller who claims to be in a group.
        claimed_bytes: the bytes in these files.
    """

    sees: int = 0
    lists: int = 0
    reads: int = 0
    read_bytes: int = 0
    changes: int = 0
    changed_bytes: int = 0
    executes: int = 0
    owns: int = 0
    claimed: int = 0
    claimed_bytes: int = 0

    def add(self, found: Bucket, of: AccessAttrs, access: Access, by_database: Access, sign: int = 1) -> None:
        """Add (or, with -1, take away) objects to which something can be done.

        Args:
            found: the objects.
            of: what they are like.
            access: what can be done to them.
            honest: what could be done to them in the groups of the server's user database alone.
            sign: 1 or -1.
        """
        names, size = sign * found.names, sign * found.size
        bits = access.bits
        if bits & SEES:
            self.sees += names
        if not (of.is_file or of.is_directory):
            return
        if bits & READ:
            self.lists += names if of.is_directory else 0
            self.reads += names if of.is_file else 0
            self.read_bytes += size
            if not by_database.bits & READ:
                self.claimed += names
                self.claimed_bytes += size
        if bits & WRITE:
            self.changes += names
            self.changed_bytes += size
        if bits & EXECUTE and of.is_file:
            self.executes += names
        if bits & OWNS:
            self.owns += names

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(slots=True)
class IdentityExposure:
    """One identity that a client can take on, or what it can do as all of them together.

    Attributes:
        uid: the server uid; None for the many of whom the tree and the user database know nothing.
        claimed: the ranges of client uids that become it.
        total: what it can do in the whole tree.
        own_areas: what it can do otherwise than `others`, or all that it can do; by area of the tree.
        own_owners: the same by the owner of the objects.
        others: the row of all of whom nothing is known, if this one differs from it in only a part of the tree. There
            may be thousands of identities and of areas, but not of both at once.
        worst: the worst example of what it can read or change in each area.
        examples: the worst examples of what it can read or change.
        claimed_examples: the worst examples of what it can read only by claiming a group.
        plants: whether it can make files, and so set-user-ID programs of its own.
    """

    uid: ServerId | None
    claimed: list[tuple[ClientId, ClientId]]
    total: Tally = field(default_factory=Tally)
    own_areas: dict[str, Tally] = field(default_factory=dict)
    own_owners: dict[ServerId, Tally] = field(default_factory=dict)
    others: "IdentityExposure | None" = None
    worst: dict[str, Example] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    claimed_examples: list[Example] = field(default_factory=list)
    plants: bool = False

    @property
    def areas(self) -> dict[str, Tally]:
        """What it can do, by area of the tree."""
        return self.own_areas if self.others is None else _sums(self.own_areas, self.others.own_areas)

    @property
    def owners(self) -> dict[ServerId, Tally]:
        """What it can do, by the owner of the objects."""
        return self.own_owners if self.others is None else _sums(self.own_owners, self.others.own_owners)

    def add(self, survey: Survey, place: BucketKey, access: Access, by_database: Access, sign: int = 1) -> None:
        """Add (or take away) what it can do to the objects in a place."""
        found, of = survey.found[place], survey.kinds[place.kind]
        if not access.bits:
            return
        for tally in (
            self.total,
            self.own_areas.setdefault(place.area, Tally()),
            self.own_owners.setdefault(of.uid, Tally()),
        ):
            tally.add(found, of, access, by_database, sign)
        if sign < 0 or not (of.is_file or of.is_directory) or not access.bits & (READ | WRITE | OWNS):
            return
        example = Example(_severity(of), found.example, of, place, access)
        self.examples = _worst([*self.examples, example])
        before = self.worst.get(place.area)
        self.worst[place.area] = example if before is None else _worst([before, example])[0]
        if access.bits & READ and not by_database.bits & READ:
            self.claimed_examples = _worst([*self.claimed_examples, example])
        if access.bits & WRITE and (access.bits & EXECUTE if of.is_directory else access.bits & OWNS):
            self.plants = True

    def include(self, others: "IdentityExposure") -> None:
        """Add what all can do of whom nothing is known; without examples, which might not be open to this one."""
        self.others = others
        self.total += others.total
        self.plants = self.plants or others.plants


def _sums(own: dict[_Key, Tally], others: dict[_Key, Tally]) -> dict[_Key, Tally]:
    return {key: own.get(key, Tally()) + others.get(key, Tally()) for key in own.keys() | others.keys()}


def _severity(of: AccessAttrs) -> int:
    return 0 if of.mode & 0o007 else 1 if of.mode & 0o070 else 2


def _worst(examples: list[Example]) -> list[Example]:
    return sorted(examples, key=lambda one: (-one.severity, not one.likeness.is_file, one.path))[:MOST_EXAMPLES]


@dataclass(frozen=True, slots=True)
class Shown:
    """Where a set-id program means something: the clients of an entry start it as the client id that it shows."""

    entry: str
    client_id: ClientId


@dataclass(frozen=True, slots=True)
class Planted:
    """A set-id program that a client can plant.

    Attributes:
        kind: "uid" for a set-user-ID program, "gid" for a set-group-ID program.
        server_id: whose it is.
        claimed: the ranges of client ids that become it.
        shown: where clients run it as its owner.
        is_shared: whether clients of this very entry run it as one client id, although other client ids can plant it.
    """

    kind: Kind
    server_id: ServerId
    claimed: tuple[tuple[ClientId, ClientId], ...]
    shown: tuple[Shown, ...]
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Runs:
    """Set-id programs in the tree that a client can execute, and as which client id it then runs (None: as the caller).

    Attributes:
        names: how many there are.
        example: the path of one, from the root of the tree.
        likeness: their owner, group and mode.
        as_uid: the client uid as which a client runs them.
        as_gid: the client gid as which a client runs them.
    """

    names: int
    example: str
    likeness: AccessAttrs
    as_uid: ClientId | None
    as_gid: ClientId | None


@dataclass(slots=True)
class Assessment:
    """What is open to the clients of an entry.

    Attributes:
        entry: the entry.
        survey: its tree.
        reach: answers what single identities can do.
        whole: what a client can do as all identities together.
        rows: what it can do as each that makes a difference, the most harmful first.
        planted: the set-id programs that it can plant.
        runs: those that it can run.
    """

    entry: Entry
    survey: Survey
    reach: Reach
    whole: IdentityExposure
    rows: list[IdentityExposure]
    planted: list[Planted] = field(default_factory=list)
    runs: list[Runs] = field(default_factory=list)

    @property
    def root(self) -> list[tuple[ClientId, ClientId]]:
        """The ranges of client uids that become root on the server."""
        return self.entry.claims.claims_of(ServerId(0))


def assess(entry: Entry, survey: Survey, accounts: Accounts, entries: Iterable[Entry]) -> Assessment:
    """Return what is open to the clients of an entry.

    Args:
        entry: the entry.
        survey: its tree.
        accounts: the server's user database, with all accounts that make a difference.
        entries: all entries of the same tree, whose clients may run what is planted.
    """
    claims = entry.claims
    reach = Reach(survey, entry.view, claims, accounts.groups, read_only=entry.read_only)
    by_database = _reach_by_database(entry, survey, accounts, reach)

    def add(row: IdentityExposure, place: BucketKey, uids: IdSet, sign: int = 1) -> None:
        access, by_account = (of.at(place.ancestry, place.kind, uids) for of in (reach, by_database))
        row.add(survey, place, access, by_account, sign)

    others = _others(claims, reach.known)
    whole, common = IdentityExposure(None, []), IdentityExposure(None, others)
    rows = {uid: IdentityExposure(uid, claims.claims_of(uid)) for uid in _targets(claims.uids)}
    for place in survey.found:
        add(whole, place, claims.uid_set)
        add(common, place, single(reach.other))
        for uid in reach.special(place.ancestry, place.kind):
            if uid in claims.uid_set:
                row = rows.setdefault(uid, IdentityExposure(uid, claims.claims_of(uid)))
                add(row, place, single(uid))
                add(row, place, single(reach.other), sign=-1)
    for row in rows.values():
        row.include(common)
    found = [*rows.values(), *([common] if others else [])]
    found.sort(key=lambda row: (-row.total.read_bytes, -row.total.reads, row.uid is None, row.uid or 0))
    return Assessment(
        entry, survey, reach, whole, found, _planted(entry, survey, found, list(entries)), _runs(entry, survey, reach)
    )


def _targets(mapped_ranges: Iterable[MappedRange]) -> set[ServerId]:
    """Return the server ids that several client ids may become."""
    return {mapped.server for mapped in mapped_ranges if not mapped.shifts}


def _others(claims: Claims, known: frozenset[ServerId]) -> list[tuple[ClientId, ClientId]]:
    """Return the ranges of client uids among which some become a uid of which nothing is known."""
    return [
        (mapped.low, mapped.high) for mapped in claims.uids if IdSet([mapped.servers]).other_than(known) is not None
    ]


def _reach_by_database(entry: Entry, survey: Survey, accounts: Accounts, reach: Reach) -> Reach:
    """Return what the same callers could do if each had only the groups that the server's user database says."""
    if entry.view.fixed is not None:
        return reach
    strange = ALL.other_than(survey.gids() | set[ServerId]().union(*accounts.groups.values()))
    assert strange is not None
    claims = replace(entry.claims, primary=single(strange), optional=IdSet(), by_account=True)
    return Reach(survey, entry.view, claims, accounts.groups, read_only=entry.read_only)


def _planted(entry: Entry, survey: Survey, rows: list[IdentityExposure], entries: list[Entry]) -> list[Planted]:
    """Return the set-id programs that a client can plant."""
    planting = [row for row in rows if row.plants and row.uid is not None]
    found = [_one_planted("uid", row.uid, entry, entries) for row in planting if row.uid is not None]
    if any(row.plants for row in rows):
        gids = _targets(entry.claims.gids) | survey.gids()
        programs = [_one_planted("gid", gid, entry, entries) for gid in sorted(gids) if gid in entry.claims.primary]
        found += [program for program in programs if program.is_shared]
    return found


def _one_planted(kind: Kind, server_id: ServerId, entry: Entry, entries: list[Entry]) -> Planted:
    mapped_ranges = entry.claims.uids if kind == "uid" else entry.claims.gids
    claimed = tuple(of for mapped in mapped_ranges if (of := mapped.claims(server_id)) is not None)
    shown = tuple(
        Shown(other.name, as_id)
        for other in entries
        if other.source == entry.source and (as_id := _runs_as(kind, server_id, other.view)) is not None
    )
    own = _runs_as(kind, server_id, entry.view)
    if entry.view.fixed is not None:
        others = entry.entrants - {_runs_as("uid", entry.view.fixed.uid, entry.view)}
        is_shared = own is not None and (entry.for_all or bool(others))
    else:
        is_shared = own is not None and any((own, own) != of for of in claimed)
    return Planted(kind, server_id, claimed, shown, is_shared)


def _runs_as(kind: Kind, server_id: ServerId, view: View) -> ClientId | None:
    """Return the client id as which clients run a set-id program of this owner or group; None for that of its user."""
    bit = stat.S_ISUID if kind == "uid" else stat.S_ISGID
    shown = view.show(Attrs("", stat.S_IFREG | bit | 0o755, server_id, server_id))
    if shown is None or not shown[0] & bit:
        return None
    return shown[1] if kind == "uid" else shown[2]


def _runs(entry: Entry, survey: Survey, reach: Reach) -> list[Runs]:
    """Return the set-id programs in the tree that a client can execute."""
    found: dict[AccessAttrs, Runs] = {}
    for place, what in survey.found.items():
        of = survey.kinds[place.kind]
        if not of.is_file or not of.mode & (stat.S_ISUID | stat.S_ISGID):
            continue
        if not reach.at(place.ancestry, place.kind, entry.claims.uid_set).bits & EXECUTE:
            continue
        if of not in found:
            as_uid = _runs_as("uid", of.uid, entry.view) if of.mode & stat.S_ISUID else None
            as_gid = _runs_as("gid", of.gid, entry.view) if of.mode & stat.S_ISGID else None
            found[of] = Runs(0, what.example, of, as_uid, as_gid)
        found[of] = replace(found[of], names=found[of].names + what.names)
    return list(found.values())
