"""Range-mapping: translates client ids to server ids and back [SZ §2.1].

[SZ] is Spadavecchia & Zadok, "Enhancing NFS Cross-Administrative Domain Access", 2002. Ids are 32-bit
unsigned; 4294967295 (the kernel's "no id") is not one of them. The paper scans the list of definitions for
every request. Here, the list is flattened once into disjoint segments, so that a lookup is one binary search.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, cast, overload

from .columns import Columns
from .identity import ClientId, ServerId

MAX_ID = 2**32 - 2
"""The largest id; configuration writes it as an upper bound of -1."""

DEFAULT_NOBODY = ServerId(65534)
"""The id of nobody unless anonuid= / anongid= set another one, as in exports(5)."""

NOBODY = ServerId(-2)
"""How a definition writes "the export's nobody" [SZ §2.1.1]."""

Kind = Literal["uid", "gid"]
Action = Literal["map", "squash"]
Squash = Literal["root", "none", "all"]
Direction = Literal["forward", "reverse"]

KINDS: tuple[Kind, ...] = ("uid", "gid")
_ACTIONS: tuple[Action, ...] = ("map", "squash")
_MAP = _ACTIONS.index("map")


def format_range(low: int, high: int) -> str:
    """Return the ids low to high as configuration writes them: ``5``, ``5 9`` or ``5 -1``."""
    if low == high:
        return str(low)
    return f"{low} -1" if high == MAX_ID else f"{low} {high}"


def check_range(low: int, high: int) -> None:
    """Raise ValueError unless low to high is a non-empty range of ids."""
    if not 0 <= low <= MAX_ID:
        raise ValueError(f"{low} is not an id (0 to {MAX_ID})")
    if high > MAX_ID:
        raise ValueError(f"the range {low} {high} runs past the largest id, {MAX_ID}")
    if high < low:
        raise ValueError(f"the range {low} {high} ends before it begins")


@dataclass(frozen=True, slots=True)
class RangeDef:
    """One definition of a ``range_map`` [SZ §2.1.1].

    The client ids rm_low to rm_high (inclusive) become lc_low, lc_low + 1, … on the server (``map``) or all
    become lc_low (``squash``). An lc_low of NOBODY (-2) stands for the export's nobody. The constructor raises
    ValueError for ids outside 0 to MAX_ID, an rm_high below rm_low, a server range that runs past MAX_ID, and a
    ``map`` of several ids onto -2.
    """

    kind: Kind
    rm_low: ClientId
    rm_high: ClientId
    action: Action
    lc_low: ServerId

    def __post_init__(self) -> None:
        check_range(self.rm_low, self.rm_high)
        if self.lc_low == NOBODY:
            if self.action == "map" and self.rm_high > self.rm_low:
                raise ValueError(f"several ids cannot be mapped onto {NOBODY}, only squashed")
            return
        if not 0 <= self.lc_low <= MAX_ID:
            raise ValueError(f"{self.lc_low} is not a server id (0 to {MAX_ID}, or {NOBODY} for nobody)")
        low, high = self.server_range(DEFAULT_NOBODY)
        if high > MAX_ID:
            raise ValueError(f"the server's range {low} {high} runs past the largest id, {MAX_ID}")

    def server_range(self, nobody: ServerId) -> tuple[ServerId, ServerId]:
        """Return the first and last server id that this definition yields; nobody is the id that -2 stands for."""
        return _server_range(self.rm_low, self.rm_high, self.action == "map", self.lc_low, nobody)

    def makes_nobody(self, nobody: ServerId) -> bool:
        """Whether its client ids become nobody. Then it has no reverse mapping: what nobody owns remains nobody's."""
        return _makes_nobody(self.action == "map", self.lc_low, nobody)

    def __str__(self) -> str:
        return f"{self.kind} {format_range(self.rm_low, self.rm_high)} {self.action} {self.lc_low}"


# The same for the numbers of definitions of which no records are made (`IdMap`).


def _server_range(rm_low: int, rm_high: int, maps: bool, lc_low: int, nobody: ServerId) -> tuple[ServerId, ServerId]:
    low = nobody if lc_low == NOBODY else ServerId(lc_low)
    return low, ServerId(low + rm_high - rm_low) if maps else low


def _makes_nobody(maps: bool, lc_low: int, nobody: ServerId) -> bool:
    return lc_low == NOBODY or (not maps and lc_low == nobody)


# A list of so many numbers is searched faster than an array, and made fast enough from one that another process sends.
_FEW = 4096


class RangeDefs(Columns[RangeDef]):
    """Definitions of a ``range_map`` in order, with the tables that were made of them."""

    __slots__ = ("_tables",)

    types = "BIIBq"

    def __init__(self, definitions: Iterable[RangeDef] = ()) -> None:
        super().__init__(definitions)
        self._tables: dict[tuple[Kind, ServerId, Squash], IdMap] = {}

    @staticmethod
    def _packed(record: RangeDef) -> tuple[int, ...]:
        return KINDS.index(record.kind), record.rm_low, record.rm_high, _ACTIONS.index(record.action), record.lc_low

    @staticmethod
    def _unpacked(numbers: Sequence[int]) -> RangeDef:
        kind, low, high, action, server = numbers
        return RangeDef(KINDS[kind], ClientId(low), ClientId(high), _ACTIONS[action], ServerId(server))

    def table(self, kind: Kind, nobody: ServerId, squash: Squash) -> IdMap:
        """Return the table of the definitions of one kind, which is made only once, by whichever process."""
        key = kind, nobody, squash
        if key not in self._tables:
            self._tables[key] = IdMap(self.having(0, KINDS.index(kind)), nobody=nobody, squash=squash)
        return self._tables[key]


def packed(definitions: Sequence[RangeDef]) -> RangeDefs:
    """Return the same definitions as columns."""
    return definitions if isinstance(definitions, RangeDefs) else RangeDefs(definitions)


class FirstMatch:
    """Finds the first of many id ranges, in the order given, that contains an id.

    The ranges are pairs of first and last id, and may overlap. Building takes O(n log n), finding O(log n).
    """

    __slots__ = ("owners", "starts")

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        # Segment i begins at starts[i], ends before starts[i + 1] and belongs to range owners[i] (-1: none).
        # The last segment lies behind every range and belongs to none. This makes find() correct below 0, too:
        # bisect then yields index -1.
        starts, owners = [0], [-1]
        self.starts: Sequence[int] = starts
        self.owners: Sequence[int] = owners
        if not ranges:
            return
        by_start = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
        ends = {high + 1 for _, high in ranges}
        open_ranges: list[int] = []  # a heap: its smallest is the first in the caller's order
        begun = 0
        for at in sorted(ends | {low for low, _ in ranges}):
            while begun < len(by_start) and ranges[by_start[begun]][0] == at:
                heapq.heappush(open_ranges, by_start[begun])
                begun += 1
            while open_ranges and ranges[open_ranges[0]][1] < at:
                heapq.heappop(open_ranges)
            owner = open_ranges[0] if open_ranges else -1
            if at == 0:
                owners[0] = owner
            elif owner != owners[-1]:
                starts.append(at)
                owners.append(owner)
        if len(starts) > _FEW:
            self.starts, self.owners = array("I", starts), array("i", owners)

    def find(self, id_: int) -> int:
        """Return the position of the first range that contains id_, or -1."""
        return self.owners[bisect_right(self.starts, id_) - 1]

    def shadowed(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int, bool]]:
        """Return (later, earlier, completely) for every range, of those this was made of, that loses ids to another.

        ``earlier`` is the range that wins at the lowest id lost; ``completely`` says that the later range wins
        nowhere, whichever earlier ranges are responsible.
        """
        winners = set(self.owners)
        result = []
        for later, (low, high) in enumerate(ranges):
            at = bisect_right(self.starts, low) - 1
            if self.owners[at] == later:
                at += 1  # neighbours have different owners, and another segment follows: the last belongs to none
                if self.starts[at] > high:
                    continue
            result.append((later, self.owners[at], later not in winners))
        return result


class IdMap:
    """The translation of one kind of id between client and server, for one export [SZ §2.1].

    It is *closed* if one of its definitions leads to an id other than NOBODY: an id in no range then becomes nobody in
    both directions, and squash plays no part. Otherwise it is *open*: the ids that its definitions name become nobody,
    and all others remain unchanged, subject to squash as in exports(5) ("root" maps client id 0 to nobody, "all" maps
    every client id); the reverse mapping is the identity. A number that is no id becomes nobody.

    All definitions must be of one kind; the first match wins, forward and reverse. nobody is the export's anonuid or
    anongid, 0 to MAX_ID.
    """

    __slots__ = (
        "_actions",
        "_by_low",
        "_client_lows",
        "_defs",
        "_forward",
        "_makes_nobody",
        "_of_reverse",
        "_reverse",
        "_server_lows",
        "_squash",
        "closed",
        "nobody",
    )  # fmt: skip

    def __init__(self, defs: Sequence[RangeDef], *, nobody: ServerId = DEFAULT_NOBODY, squash: Squash = "root") -> None:
        self._defs = packed(defs)
        self._squash = squash
        self.nobody = nobody
        _, self._client_lows, client_highs, self._actions, lc_lows = self._defs.columns
        self.closed = lc_lows.count(NOBODY) < len(lc_lows)
        self._forward = FirstMatch(list(zip(self._client_lows, client_highs, strict=True)))
        ranges = [
            _server_range(rm_low, rm_high, action == _MAP, lc_low, nobody)
            for _, rm_low, rm_high, action, lc_low in zip(*self._defs.columns, strict=True)
        ]
        self._server_lows = array("I", [low for low, _ in ranges])
        nobodies = [
            _makes_nobody(action == _MAP, lc_low, nobody) for action, lc_low in zip(self._actions, lc_lows, strict=True)
        ]
        reversible = [at for at, makes_nobody in enumerate(nobodies) if not makes_nobody]
        self._of_reverse = array("i", reversible)
        self._reverse = FirstMatch([ranges[at] for at in reversible])
        # The reversible ones by their first server id, with the last server id of any up to it, for `is_sole`.
        by_low = sorted(reversible, key=lambda at: ranges[at])
        self._by_low = (
            array("i", by_low),
            array("I", [ranges[at][0] for at in by_low]),
            array("I", accumulate([ranges[at][1] for at in by_low], max)),
        )
        if any(nobodies[at] for at in self._forward.owners if at >= 0):
            self._makes_nobody = True
        elif not self.closed:
            self._makes_nobody = squash != "none"
        else:
            self._makes_nobody = self._forward.starts[-1] <= MAX_ID or -1 in self._forward.owners[:-1]

    def forward(self, client_id: ClientId) -> ServerId:
        """Return the server id that a request from client_id is served with; nobody if there is none."""
        at = self._forward.find(client_id)
        if at >= 0:
            low = self._server_lows[at]
            return ServerId(low + client_id - self._client_lows[at] if self._actions[at] == _MAP else low)
        if self.closed or self._squash == "all" or (client_id == 0 and self._squash == "root"):
            return self.nobody
        return ServerId(client_id) if 0 <= client_id <= MAX_ID else self.nobody

    def reverse(self, server_id: ServerId) -> ClientId:
        """Return the client id that is shown for server_id; nobody's if there is none.

        A squash shows the first client id of its range [SZ Figure 1]. The user with this id on a client need not
        become server_id, for example in an open table, or where definitions overlap (`counterpart`).
        """
        if not self.closed:
            return ClientId(server_id) if 0 <= server_id <= MAX_ID else ClientId(self.nobody)
        found = self._reverse.find(server_id)
        if found < 0:
            return ClientId(self.nobody)
        at = self._of_reverse[found]
        # A squash yields a single server id, so its offset here is 0.
        return ClientId(self._client_lows[at] + server_id - self._server_lows[at])

    @overload
    def counterpart(self, id_: ClientId, direction: Literal["forward"]) -> ServerId | None: ...
    @overload
    def counterpart(self, id_: ServerId, direction: Literal["reverse"]) -> ClientId | None: ...
    def counterpart(self, id_: int, direction: Direction) -> int | None:
        """Return the one id that is id_ in the other realm, or None.

        All comparisons of ids of the two realms rely on this function. None matches no id: neither that of nobody, nor
        another None. For a client id ("forward"), the counterpart is the server id that chown, an ACL entry or a group
        may name: an id that *becomes* nobody has none, but nobody's number has one where a map names it, or where ids
        remain unchanged. For a server id ("reverse"), it is the client id that is shown for it, if the counterpart of
        that client id is server_id.
        """
        return self._client_of(ServerId(id_)) if direction == "reverse" else self._server_of(ClientId(id_))

    def _client_of(self, server_id: ServerId) -> ClientId | None:
        client_id = self.reverse(server_id)
        return client_id if self._server_of(client_id) == server_id else None

    def _server_of(self, client_id: ClientId) -> ServerId | None:
        server_id = self.forward(client_id)
        if server_id != self.nobody:
            return server_id
        definition = self.definition_of(client_id)
        if definition is not None:
            return None if definition.makes_nobody(self.nobody) else server_id
        stays = not self.closed and self._squash != "all" and client_id == ClientId(self.nobody)
        return server_id if stays else None

    def is_sole(self, server_id: ServerId) -> bool:
        """Return whether server_id has a counterpart, and no other client id becomes server_id.

        False if that is not easy to determine.
        """
        shown = self.counterpart(server_id, "reverse")
        if shown is None:
            return False
        if server_id == self.nobody and self._makes_nobody:
            return False
        positions, lows, farthest = self._by_low
        # Backwards from the last definition that begins at or before server_id, until none before reaches it.
        number = bisect_right(lows, server_id) - 1
        while number >= 0 and farthest[number] >= server_id:
            definition = self._defs[positions[number]]
            low, high = definition.server_range(self.nobody)
            if server_id <= high:
                if definition.action == "squash" and definition.rm_high > definition.rm_low:
                    return False
                source = ClientId(definition.rm_low + server_id - low)
                if source != shown and self.forward(source) == server_id:
                    return False
            number -= 1
        return True

    def may_become(self, server_id: ServerId) -> bool:
        """Return whether some client id may become server_id; if not, none does."""
        if server_id == self.nobody or not (self.closed or self._squash == "all"):
            return True
        return self.reverse_definition_of(server_id) is not None

    def stretches(self) -> list[tuple[ClientId, ClientId]]:
        """Return disjoint ranges (first and last, in order) of client ids that together are all client ids.

        Within each, one rule applies: either all ids become the same server id, or each the one after that of the id
        before it; and either all of them have a counterpart, or none.
        """
        starts = [start for start in self._forward.starts if start <= MAX_ID]
        if not self.closed and self._forward.owners[0] < 0 and starts[1:2] != [1]:
            starts.insert(1, 1)  # a client's root may be squashed
        ends = [*(start - 1 for start in starts[1:]), MAX_ID]
        return [(ClientId(low), ClientId(high)) for low, high in zip(starts, ends, strict=True)]

    def keeps_ids(self) -> bool:
        """Whether every id stays as it is, apart from that of a root who is squashed."""
        return not self._defs and self._squash != "all"

    def groups(self, ids: Iterable[ClientId]) -> frozenset[ServerId]:
        """Return the server groups for a client's supplementary groups; groups that become nobody are dropped."""
        ids = frozenset(ids)
        if self.keeps_ids() and ids and min(ids) >= 0 and max(ids) <= MAX_ID:
            # This gives the same result as below, but much faster: a caller may be in 65,536 groups.
            stay = cast(frozenset[ServerId], ids)
            return stay - {0} if self._squash == "root" and self.nobody else stay
        return frozenset(gid for id_ in ids if (gid := self._server_of(id_)) is not None)

    def definition_of(self, client_id: ClientId) -> RangeDef | None:
        """Return the definition that `forward` applies to client_id, or None."""
        at = self._forward.find(client_id)
        return None if at < 0 else self._defs[at]

    def reverse_definition_of(self, server_id: ServerId) -> RangeDef | None:
        """Return the definition that `reverse` applies to server_id, or None."""
        at = self._reverse.find(server_id)
        return None if at < 0 else self._defs[self._of_reverse[at]]


def is_closed(defs: Iterable[RangeDef]) -> bool:
    """Return whether these definitions, all of one kind, make nobody of the ids that they do not name (`IdMap`)."""
    return any(definition.lc_low != NOBODY for definition in defs)


def shadowed(
    defs: Sequence[RangeDef], nobody: ServerId = DEFAULT_NOBODY
) -> list[tuple[RangeDef, RangeDef, Direction, bool]]:
    """Return the definitions that earlier ones make (partly) unreachable, for warnings.

    Each item is (later, earlier, direction, completely). Where several earlier definitions are responsible,
    the one at the lowest id is named; completely says whether nothing of the later one is left. All
    definitions must be of one kind; nobody is the id that -2 stands for.
    """
    reversible = [d for d in defs if not d.makes_nobody(nobody)]
    tables: tuple[tuple[Direction, Sequence[RangeDef], list[tuple[int, int]]], ...] = (
        ("forward", defs, [(d.rm_low, d.rm_high) for d in defs]),
        ("reverse", reversible, [d.server_range(nobody) for d in reversible]),
    )
    return [
        (among[later], among[earlier], direction, completely)
        for direction, among, pairs in tables
        for later, earlier, completely in FirstMatch(pairs).shadowed(pairs)
    ]
