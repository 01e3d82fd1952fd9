"""File-cloaking: which caller sees which file [SZ §2.2].

[SZ] is Spadavecchia & Zadok, "Enhancing NFS Cross-Administrative Domain Access", 2002. All ids here are
server ids: those of the file as they are on disk, and those of the caller after forward mapping. Cloaking only
hides: whether a visible file may be read is decided by the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from .columns import Columns
from .identity import ServerId
from .mapping import DEFAULT_NOBODY, KINDS, NOBODY, FirstMatch, Kind, check_range, format_range

# Trees have few combinations of mode, owner and group, but the number of cached ones must be bounded nevertheless.
_MOST_CONDITIONS = 4096

_MASK = re.compile(r"([+-])([0-7])([0-7])([0-7])")


@dataclass(frozen=True, slots=True)
class Mask:
    """A cloaking mask: the SHOW bit and nine permission bits [SZ Figure 2].

    With show (``+``), files are hidden unless they meet the mask; without it (``-``), they are shown unless they do.
    special (4 setuid, 2 setgid, 1 sticky), group and other (4 r, 2 w, 1 x) are 0 to 7; otherwise, the constructor
    raises ValueError. The owner's permission bits play no part.
    """

    show: bool
    special: int
    group: int
    other: int

    def __post_init__(self) -> None:
        for digit in (self.special, self.group, self.other):
            if not 0 <= digit <= 7:
                raise ValueError(f"{digit} is not an octal digit")

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Return the mask written as text, such as ``+007``; raise ValueError for anything else."""
        match = _MASK.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a mask: + or - and three octal digits, such as +007")
        sign, special, group, other = match.groups()
        return cls(sign == "+", int(special), int(group), int(other))

    def __str__(self) -> str:
        return f"{'+' if self.show else '-'}{self.special}{self.group}{self.other}"

    def hit(self, mode: int, in_group: bool) -> bool:
        """Return whether a file of this st_mode meets the mask.

        in_group says that the caller belongs to the file's group; otherwise, the group bits do not count.
        """
        bits = self.special << 9 | self.other
        if in_group:
            bits |= self.group << 3
        return mode & bits != 0


@dataclass(frozen=True, slots=True)
class CloakDef:
    """One definition of a ``cloak_list`` [SZ §2.2.1].

    The mask judges the files whose owner (``uid``) or group (``gid``) is one of the server ids lc_low to
    lc_high (inclusive). If both are NOBODY (-2), it selects only the export's nobody. The constructor raises
    ValueError for ids outside 0 to MAX_ID, and for an lc_high that is below lc_low or is combined with a -2.
    """

    kind: Kind
    mask: Mask
    lc_low: ServerId
    lc_high: ServerId

    def __post_init__(self) -> None:
        if self.lc_low != NOBODY:
            check_range(self.lc_low, self.lc_high)
        elif self.lc_high != NOBODY:
            raise ValueError(f"{NOBODY} is a single id; no range can begin with it")

    def server_range(self, nobody: ServerId) -> tuple[ServerId, ServerId]:
        """Return the first and last server id that this definition selects; nobody is the id that -2 stands for."""
        return _server_range(self.lc_low, self.lc_high, nobody)

    def __str__(self) -> str:
        return f"{self.kind} {self.mask} {format_range(self.lc_low, self.lc_high)}"


def _server_range(lc_low: int, lc_high: int, nobody: ServerId) -> tuple[ServerId, ServerId]:
    return (nobody, nobody) if lc_low == NOBODY else (ServerId(lc_low), ServerId(lc_high))


class Verdict(NamedTuple):
    """The verdict of one definition on a file, with the bits of the mask that the file meets."""

    definition: CloakDef
    hit_group: int
    hit_other: int
    hit_special: int
    visible: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """Who sees a file: its owner, exempt uids, its group if in_group is set, and all others if outside is set.

    Attributes:
        admits_all: whether every possible caller sees the file. (There are always callers that are not exempt.)
    """

    owner: ServerId
    group: ServerId
    in_group: bool
    outside: bool
    exempt: frozenset[ServerId] = frozenset()
    admits_all: bool = field(init=False, compare=False)  # no property, since every request reads it

    def __post_init__(self) -> None:
        object.__setattr__(self, "admits_all", self.in_group and self.outside)

    def admits(self, uid: ServerId, has_group: Callable[[ServerId], bool]) -> bool:
        """Return whether a caller sees the file [SZ Figure 2]. No other code may decide that.

        has_group returns whether a gid is one of the caller's; it is only called where that matters.
        """
        if uid == self.owner or uid in self.exempt:
            return True
        if self.in_group is self.outside:
            return self.outside
        return self.in_group if has_group(self.group) else self.outside

    def surely_admits(self, uid: ServerId) -> bool:
        """Return whether every caller with this uid sees the file, whatever its groups."""
        return uid == self.owner or uid in self.exempt or self.admits_all

    def surely_admits_members(self, gid: ServerId) -> bool:
        """Return whether every caller with this group sees the file, whatever its uid and its other groups."""
        return self.admits_all or (self.in_group and gid == self.group)


class _Table:
    """The definitions of one kind, found by the id that they select."""

    __slots__ = ("defs", "match")

    def __init__(self, defs: CloakDefs, kind: Kind, nobody: ServerId) -> None:
        self.defs = defs.having(0, KINDS.index(kind))
        self.match = FirstMatch(
            [_server_range(low, high, nobody) for low, high in zip(*self.defs.columns[-2:], strict=True)]
        )

    def find(self, server_id: ServerId) -> tuple[CloakDef, ...]:
        at = self.match.find(server_id)
        return () if at < 0 else (self.defs[at],)


# In which column `CloakDefs` has the group bits of the masks.
_GROUP_BITS = 3


class CloakDefs(Columns[CloakDef]):
    """Definitions of a ``cloak_list`` in order, with the tables that were made of them."""

    __slots__ = ("_tables",)

    types = "BBBBBqq"

    def __init__(self, definitions: Iterable[CloakDef] = ()) -> None:
        super().__init__(definitions)
        self._tables: dict[tuple[Kind, ServerId], _Table] = {}

    @staticmethod
    def _packed(record: CloakDef) -> tuple[int, ...]:
        mask = record.mask
        return (
            KINDS.index(record.kind), mask.show, mask.special, mask.group, mask.other, record.lc_low, record.lc_high,
        )  # fmt: skip

    @staticmethod
    def _unpacked(numbers: Sequence[int]) -> CloakDef:
        kind, show, special, group, other, low, high = numbers
        return CloakDef(KINDS[kind], Mask(bool(show), special, group, other), ServerId(low), ServerId(high))

    def table(self, kind: Kind, nobody: ServerId) -> _Table:
        """Return the table of the definitions of one kind, which is made only once, by whichever process."""
        key = kind, nobody
        if key not in self._tables:
            self._tables[key] = _Table(self, kind, nobody)
        return self._tables[key]


def packed(definitions: Sequence[CloakDef]) -> CloakDefs:
    """Return the same definitions as columns."""
    return definitions if isinstance(definitions, CloakDefs) else CloakDefs(definitions)


def _selected(uids: _Table, gids: _Table, file_uid: ServerId, file_gid: ServerId) -> tuple[CloakDef, ...]:
    return uids.find(file_uid) + gids.find(file_gid)


def _condition(
    uids: _Table, gids: _Table, exempt: frozenset[ServerId], mode: int, file_uid: ServerId, file_gid: ServerId
) -> Condition:
    masks = [definition.mask for definition in _selected(uids, gids, file_uid, file_gid)]
    return Condition(
        file_uid,
        file_gid,
        in_group=all(mask.hit(mode, True) == mask.show for mask in masks),
        outside=all(mask.hit(mode, False) == mask.show for mask in masks),
        exempt=exempt,
    )


_NO_ID = ServerId(-1)  # of nobody


class CloakList:
    """The ``cloak_list`` of an export [SZ §2.2].

    A file is judged by the first ``uid`` and by the first ``gid`` definition that selects it. It is visible
    if all of these (at most two) say so. Its owner always sees it, and so do callers whose uid is exempt.
    """

    __slots__ = ("_gids", "_uids", "condition", "condition_of_absent", "depends_on_groups", "exempt")

    def __init__(
        self,
        defs: Sequence[CloakDef],
        *,
        nobody_uid: ServerId = DEFAULT_NOBODY,
        nobody_gid: ServerId = DEFAULT_NOBODY,
        exempt: Iterable[ServerId] = (),
    ) -> None:
        self.exempt = frozenset(exempt)
        """The uids of callers from whom nothing is hidden."""
        columns = packed(defs)
        self.depends_on_groups = any(columns.columns[_GROUP_BITS])
        """Whether there may be files of which it takes a caller's groups to say whether that caller sees them."""
        self._uids = columns.table("uid", nobody_uid)
        self._gids = columns.table("gid", nobody_gid)
        self.condition_of_absent = Condition(_NO_ID, _NO_ID, in_group=self.depends_on_groups, outside=False)
        """The condition of an absent file, which no caller sees. Judging it takes as long as for a hidden file."""
        # The cache refers to the tables and not to this object: in a circle, both would live until the garbage
        # collector runs.
        self.condition: Callable[[int, ServerId, ServerId], Condition] = lru_cache(_MOST_CONDITIONS)(
            partial(_condition, self._uids, self._gids, self.exempt)
        )
        """Returns who sees a file with this st_mode, owner and group."""

    def selected(self, file_uid: ServerId, file_gid: ServerId) -> tuple[CloakDef, ...]:
        """Return the definitions, at most one of each kind, that judge a file of this owner and group."""
        return _selected(self._uids, self._gids, file_uid, file_gid)

    def visible(
        self, mode: int, file_uid: ServerId, file_gid: ServerId, caller_uid: ServerId, caller_gids: Container[ServerId]
    ) -> bool:
        """Return whether the caller sees a file with this st_mode, owner and group [SZ Figure 2].

        caller_gids are the caller's primary and supplementary groups.
        """
        return self.condition(mode, file_uid, file_gid).admits(caller_uid, caller_gids.__contains__)

    def judge(
        self, mode: int, file_uid: ServerId, file_gid: ServerId, caller_uid: ServerId, caller_gids: Container[ServerId]
    ) -> list[Verdict]:
        """Return the verdict of each selecting definition, as if the caller neither owned the file nor were exempt.

        This is for explanations: visible() is True if caller_uid owns the file or is exempt, or all verdicts are
        visible.
        """
        verdicts = []
        for definition in self.selected(file_uid, file_gid):
            mask = definition.mask
            in_group = file_gid in caller_gids
            verdicts.append(
                Verdict(
                    definition,
                    hit_group=mask.group & mode >> 3 if in_group else 0,
                    hit_other=mask.other & mode,
                    hit_special=mask.special & mode >> 9,
                    visible=mask.hit(mode, in_group) == mask.show,
                )
            )
        return verdicts

    def same_for_all(self, mode: int, file_uid: ServerId, file_gid: ServerId) -> bool:
        """Return whether every possible caller gets the same answer from visible().

        As the owner and exempt callers always see it, this means that it is visible both in its group and outside.
        """
        return self.condition(mode, file_uid, file_gid).admits_all


def shadowed(
    defs: Sequence[CloakDef], *, nobody_uid: ServerId = DEFAULT_NOBODY, nobody_gid: ServerId = DEFAULT_NOBODY
) -> list[tuple[CloakDef, CloakDef]]:
    """Return (later, earlier), for warnings, for each definition to which earlier ones leave nothing to select.

    Where several earlier definitions are responsible, the one at the lowest id is named.
    """
    found = []
    nobodies: dict[Kind, ServerId] = {"uid": nobody_uid, "gid": nobody_gid}
    for kind, nobody in nobodies.items():
        among = [definition for definition in defs if definition.kind == kind]
        ranges = [definition.server_range(nobody) for definition in among]
        found += [
            (among[later], among[earlier])
            for later, earlier, completely in FirstMatch(ranges).shadowed(ranges)
            if completely
        ]
    return found
