"""Range-mapping: client ids to server ids and back [SZ §2.1].

[SZ] is Spadavecchia & Zadok, "Enhancing NFS Cross-Administrative Domain Access", 2002. Ids are 32-bit
unsigned; 4294967295 (the kernel's "no id") is not one of them. The paper scans the list of definitions for
every request; here the list is flattened once into disjoint segments, so that a lookup is one binary search.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_ID = 2**32 - 2
"""The largest id; configuration writes it as an upper bound of -1."""

DEFAULT_NOBODY = 65534
"""What nobody is unless anonuid= / anongid= say otherwise, as in exports(5)."""

NOBODY = -2
"""How a definition writes "the export's nobody" [SZ §2.1.1]."""

Kind = Literal["uid", "gid"]
Action = Literal["map", "squash"]
Squash = Literal["root", "none", "all"]
Direction = Literal["forward", "reverse"]


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
    become lc_low (``squash``). An lc_low of NOBODY (-2) stands for the export's nobody. Raises ValueError
    for ids outside 0 to MAX_ID, an rm_high below rm_low, a server range that runs past MAX_ID, and a ``map``
    of several ids onto -2.
    """

    kind: Kind
    rm_low: int
    rm_high: int
    action: Action
    lc_low: int

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

    def server_range(self, nobody: int) -> tuple[int, int]:
        """Return the first and last server id this definition yields; nobody is what -2 stands for."""
        low = nobody if self.lc_low == NOBODY else self.lc_low
        return low, low + self.rm_high - self.rm_low if self.action == "map" else low

    def __str__(self) -> str:
        return f"{self.kind} {format_range(self.rm_low, self.rm_high)} {self.action} {self.lc_low}"


class FirstMatch:
    """Finds the first of many id ranges, in the order given, that contains an id.

    The ranges, pairs of first and last id, may overlap. Building takes O(n log n), finding O(log n).
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges
        # Segment i begins at starts[i], ends before starts[i + 1] and belongs to range owners[i] (-1: none).
        # The last one lies behind every range and belongs to none, which makes find() right below 0 too:
        # bisect then yields index -1.
        self.starts: list[int] = [0]
        self.owners: list[int] = [-1]
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
                self.owners[0] = owner
            elif owner != self.owners[-1]:
                self.starts.append(at)
                self.owners.append(owner)

    def find(self, id_: int) -> int:
        """Return the position of the first range that contains id_, or -1."""
        return self.owners[bisect_right(self.starts, id_) - 1]

    def shadowed(self) -> list[tuple[int, int, bool]]:
        """Return (later, earlier, completely) for every range that an earlier one takes ids from.

        ``earlier`` is the range that wins at the lowest id so taken; ``completely`` says that the later
        range, whichever ones are in its way, wins nowhere.
        """
        winners = set(self.owners)
        result = []
        for later, (low, high) in enumerate(self.ranges):
            at = bisect_right(self.starts, low) - 1
            if self.owners[at] == later:
                at += 1  # neighbours have different owners, and one follows: the last belongs to none
                if self.starts[at] > high:
                    continue
            result.append((later, self.owners[at], later not in winners))
        return result


class IdMap:
    """The translation of one kind of id between client and server, for one export [SZ §2.1].

    With definitions it is closed: an id in no range is nobody, both ways, and squash plays no part. Without
    any it is the identity, subject to squash as in exports(5): "root" sends client id 0 to nobody, "all"
    sends every client id there, and the reverse is the identity. Something that is no id is nobody.

    All definitions must be of one kind; the first that matches wins, forward and reverse. nobody is the
    export's anonuid or anongid, 0 to MAX_ID.
    """

    __slots__ = ("_defs", "_forward", "_open", "_reverse", "_server_lows", "_squash", "identity", "nobody")

    def __init__(self, defs: Sequence[RangeDef], *, nobody: int = DEFAULT_NOBODY, squash: Squash = "root") -> None:
        self._defs = tuple(defs)
        self._squash = squash
        self._open = not self._defs
        self.nobody = nobody
        self.identity = self._open and squash == "none"
        """True if forward and reverse give every id back unchanged."""
        servers = [d.server_range(nobody) for d in self._defs]
        self._forward = FirstMatch([(d.rm_low, d.rm_high) for d in self._defs])
        self._reverse = FirstMatch(servers)
        self._server_lows = [low for low, _ in servers]

    def forward(self, client_id: int) -> int:
        """Return the server id a request from client_id is made with; nobody if there is none."""
        if self._open:
            if self._squash == "all" or (client_id == 0 and self._squash == "root"):
                return self.nobody
            return client_id if 0 <= client_id <= MAX_ID else self.nobody
        at = self._forward.find(client_id)
        if at < 0:
            return self.nobody
        definition = self._defs[at]
        offset = client_id - definition.rm_low if definition.action == "map" else 0
        return self._server_lows[at] + offset

    def reverse(self, server_id: int) -> int:
        """Return the id the client is shown for server_id; nobody if there is none.

        A squash shows the first client id of its range [SZ Figure 1].
        """
        if self._open:
            return server_id if 0 <= server_id <= MAX_ID else self.nobody
        at = self._reverse.find(server_id)
        if at < 0:
            return self.nobody
        # A squash yields a single server id, so its offset here is 0.
        return self._defs[at].rm_low + server_id - self._server_lows[at]

    def is_sole(self, server_id: int) -> bool:
        """Return whether the client id that is shown for server_id, and no other, becomes server_id.

        False when that is not easily told.
        """
        if server_id == self.nobody or self.forward(self.reverse(server_id)) != server_id:
            return False
        sources = set()
        for definition in self._defs:
            low, high = definition.server_range(self.nobody)
            if low <= server_id <= high:
                if definition.action == "squash" and definition.rm_high > definition.rm_low:
                    return False
                sources.add(definition.rm_low + server_id - low)
        return all(source == self.reverse(server_id) or self.forward(source) != server_id for source in sources)

    def strict(self, client_id: int) -> int | None:
        """Return the server id that chown or an ACL entry may name for client_id, or None to refuse.

        Nothing ever becomes nobody silently: None if client_id maps there, unless a ``map`` that names the
        number says so, or there are no definitions and client_id is nobody itself, not squashed.
        """
        server_id = self.forward(client_id)
        if server_id != self.nobody:
            return server_id
        if self._open:
            return server_id if self._squash != "all" and client_id == self.nobody else None
        definition = self.definition_of(client_id)
        named = definition is not None and definition.action == "map" and definition.lc_low != NOBODY
        return server_id if named else None

    def groups(self, ids: Iterable[int]) -> frozenset[int]:
        """Return the server groups for a client's supplementary groups; what maps to nobody is dropped."""
        return frozenset(map(self.forward, ids)) - {self.nobody}

    def definition_of(self, client_id: int) -> RangeDef | None:
        """Return the definition that forward follows for client_id, None if there is none."""
        at = self._forward.find(client_id)
        return None if at < 0 else self._defs[at]

    def reverse_definition_of(self, server_id: int) -> RangeDef | None:
        """Return the definition that reverse follows for server_id, None if there is none."""
        at = self._reverse.find(server_id)
        return None if at < 0 else self._defs[at]


def shadowed(
    defs: Sequence[RangeDef], nobody: int = DEFAULT_NOBODY
) -> list[tuple[RangeDef, RangeDef, Direction, bool]]:
    """Return the definitions that earlier ones make (partly) unreachable, for warnings.

    Each item is (later, earlier, direction, completely). Where several earlier definitions are in the way,
    the one at the lowest id is named; completely says whether nothing of the later one is left. All
    definitions must be of one kind; nobody is what -2 stands for.
    """
    ranges: tuple[tuple[Direction, list[tuple[int, int]]], ...] = (
        ("forward", [(d.rm_low, d.rm_high) for d in defs]),
        ("reverse", [d.server_range(nobody) for d in defs]),
    )
    return [
        (defs[later], defs[earlier], direction, completely)
        for direction, pairs in ranges
        for later, earlier, completely in FirstMatch(pairs).shadowed()
    ]
