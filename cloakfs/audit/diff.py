"""What a change of the configuration opens and closes, and for whom. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..identity import ClientId, ServerId
from .assess import MOST_EXAMPLES, Assessment, Tally
from .identities import MappedRange, single
from .reach import Access, Reach
from .survey import BucketKey, Survey

_NOTHING = Access(0, {})


@dataclass(slots=True)
class ExposureChange:
    """What a change opens and closes to callers who claim one of some client uids.

    Attributes:
        low: the first client uid.
        high: the last one.
        before: the first and last server uid that they become by the old configuration; None if the entry is new.
        after: the same by the new configuration; None if the entry is gone.
        opens: what they could not do before.
        closes: what they can no longer do.
        opened: the paths of some of what is opened, from the root of the tree.
        closed: the paths of some of what is closed.
    """

    low: ClientId
    high: ClientId
    before: tuple[ServerId, ServerId] | None
    after: tuple[ServerId, ServerId] | None
    opens: Tally = field(default_factory=Tally)
    closes: Tally = field(default_factory=Tally)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a comparison: who is reached as what."""

    reach: Reach
    mapped: MappedRange

    def specials(self, place: BucketKey, low: ClientId, high: ClientId) -> Iterator[ClientId]:
        """Yield the client uids from low to high that become a uid that makes a difference in a place."""
        if not self.mapped.shifts:
            return
        for uid in self.reach.special(place.ancestry, place.kind):
            claimed = self.mapped.claims(uid)
            if claimed is not None and low <= claimed[0] <= high:
                yield claimed[0]

    def access(self, place: BucketKey, client_id: ClientId) -> Access:
        """Return what a caller who claims a client uid can do in a place."""
        return self.reach.at(place.ancestry, place.kind, single(self.mapped.server_of(client_id)))


def exposure_changes(old: Assessment | None, new: Assessment | None) -> list[ExposureChange]:
    """Return what opens and what closes if an entry changes, for each kind of caller to whom something does.

    Callers are compared by the uid that they claim: if a user of a client becomes another user of the server, then what
    only the latter may do is opened, even if others could do it before.

    Args:
        old: what is open by the old configuration; None if it has no such entry.
        new: what is open by the new configuration; None if it has no such entry. The tree is the same.
    """
    one_of_them = new or old
    if one_of_them is None:
        return []
    survey = one_of_them.survey
    found: dict[tuple[ClientId, ClientId], ExposureChange] = {}
    for low, high, sides in _common_ranges(old, new):
        before, after = sides
        for place in survey.found:
            singles = {one for side in sides if side is not None for one in side.specials(place, low, high)}
            rest = next((ClientId(one) for one in range(low, high + 1) if one not in singles), None)
            for one in [*sorted(singles), *([rest] if rest is not None else [])]:
                was = _NOTHING if before is None else before.access(place, one)
                becomes = _NOTHING if after is None else after.access(place, one)
                opened, closed = becomes.bits & ~was.bits, was.bits & ~becomes.bits
                if not opened and not closed:
                    continue
                ends = (low, high) if one == rest else (one, one)
                difference = found.get(ends)
                if difference is None:
                    difference = found[ends] = ExposureChange(*ends, _become(before, ends), _become(after, ends))
                _add(difference.opens, difference.opened, survey, place, opened)
                _add(difference.closes, difference.closed, survey, place, closed)
    return [found[ends] for ends in sorted(found)]


def _become(side: _Side | None, ends: tuple[ClientId, ClientId]) -> tuple[ServerId, ServerId] | None:
    return None if side is None else (side.mapped.server_of(ends[0]), side.mapped.server_of(ends[1]))


def _add(tally: Tally, examples: list[str], survey: Survey, place: BucketKey, bits: int) -> None:
    if not bits:
        return
    access = Access(bits, {})
    tally.add(survey.found[place], survey.kinds[place.kind], access, access)
    if len(examples) < MOST_EXAMPLES:
        examples.append(survey.found[place].example)


def _common_ranges(
    old: Assessment | None, new: Assessment | None
) -> Iterator[tuple[ClientId, ClientId, tuple[_Side | None, _Side | None]]]:
    """Yield ranges of client uids that one rule maps in both configurations."""
    both = (old, new)
    tables = [() if of is None else of.entry.claims.uids for of in both]
    starts = sorted({mapped.low for table in tables for mapped in table})
    ends = [*(ClientId(start - 1) for start in starts[1:]), max(mapped.high for table in tables for mapped in table)]
    for low, high in zip(starts, ends, strict=True):
        sides = [
            None if of is None else _Side(of.reach, next(one for one in table if one.low <= low <= one.high))
            for of, table in zip(both, tables, strict=True)
        ]
        yield low, high, (sides[0], sides[1])
