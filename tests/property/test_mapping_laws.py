"""Compares the map with the paper's linear scan, for a few ids at both ends of their range."""

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.mapping import MAX_ID, NOBODY, Action, FirstMatch, IdMap, RangeDef, Squash, shadowed

IDS = [*range(24), *range(MAX_ID - 12, MAX_ID + 1)]
NOT_IDS = [-1, MAX_ID + 1]
ids = st.sampled_from(IDS)


@st.composite
def definitions(draw: st.DrawFn) -> RangeDef:
    low, high = sorted((draw(ids), draw(ids)))
    action: Action = draw(st.sampled_from(["map", "squash"]))
    if action == "map":
        server = draw(ids.map(lambda id_: min(id_, MAX_ID - (high - low))))
        if low == high and draw(st.booleans()):
            server = NOBODY
    else:
        server = draw(st.one_of(ids, st.just(NOBODY)))
    return RangeDef("uid", low, high, action, server)


lists = st.lists(definitions(), max_size=8)
squashes: st.SearchStrategy[Squash] = st.sampled_from(["root", "none", "all"])


def scan_forward(defs: list[RangeDef], nobody: int, client: int, squash: Squash) -> int:
    for d in defs:
        if d.rm_low <= client <= d.rm_high:
            start = nobody if d.lc_low == -2 else d.lc_low
            return start + (client - d.rm_low) if d.action == "map" else start
    if any(d.lc_low != -2 for d in defs) or squash == "all" or (squash == "root" and client == 0):
        return nobody
    return client if 0 <= client <= MAX_ID else nobody


def scan_reverse(defs: list[RangeDef], nobody: int, server: int) -> int:
    if all(d.lc_low == -2 for d in defs):
        return server if 0 <= server <= MAX_ID else nobody
    for d in defs:
        start = d.lc_low
        if start == -2 or (d.action == "squash" and start == nobody):
            continue
        if d.action == "squash" and server == start:
            return d.rm_low
        if d.action == "map" and start <= server <= start + (d.rm_high - d.rm_low):
            return d.rm_low + (server - start)
    return nobody


@given(lists, ids, squashes)
def test_lookup_is_the_linear_scan(defs: list[RangeDef], nobody: int, squash: Squash) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    for id_ in IDS + NOT_IDS:
        assert table.forward(id_) == scan_forward(defs, nobody, id_, squash)
        assert table.reverse(id_) == scan_reverse(defs, nobody, id_)


@given(lists, ids, squashes)
def test_nothing_is_granted_that_becomes_nobody(defs: list[RangeDef], nobody: int, squash: Squash) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    granted = set()
    for id_ in IDS:
        server = scan_forward(defs, nobody, id_, squash)
        first = next((d for d in defs if d.rm_low <= id_ <= d.rm_high), None)
        if first is not None:
            named = first.action == "map" and first.lc_low != -2
        else:
            named = id_ == nobody and squash != "all" and all(d.lc_low == -2 for d in defs)
        counterpart = server if server != nobody or named else None
        assert table.counterpart(id_, "forward") == counterpart
        if counterpart is not None:
            granted.add(counterpart)
    assert table.groups(IDS) == granted
    assert table.groups([*IDS, *NOT_IDS]) == granted


@given(lists, ids, squashes)
def test_a_counterpart_is_the_same_id_seen_from_the_other_side(
    defs: list[RangeDef], nobody: int, squash: Squash
) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    for server in IDS:
        client = table.counterpart(server, "reverse")
        if client is None:
            assert table.counterpart(table.reverse(server), "forward") != server
        else:
            assert table.counterpart(client, "forward") == server == table.forward(client)
            assert client == table.reverse(server)
    for id_ in NOT_IDS:
        assert table.counterpart(id_, "forward") is table.counterpart(id_, "reverse") is None


@given(lists.filter(bool), ids)
def test_ids_come_back_where_both_directions_follow_the_same_map(defs: list[RangeDef], nobody: int) -> None:
    table = IdMap(defs, nobody=nobody)
    for id_ in IDS:
        definition = table.definition_of(id_)
        server = table.forward(id_)
        if definition and definition == table.reverse_definition_of(server):
            back = id_ if definition.action == "map" else definition.rm_low
            assert table.reverse(server) == back


def taken_ids(ranges: list[tuple[int, int]], later: int) -> dict[int, int]:
    """The ids of a range that an earlier one wins, and which: by scan over the ids at hand."""
    low, high = ranges[later]
    winners = {}
    for id_ in IDS:
        if low <= id_ <= high:
            winners[id_] = next(i for i, (a, b) in enumerate(ranges) if a <= id_ <= b)
    return {id_: winner for id_, winner in winners.items() if winner != later}


@given(st.lists(st.tuples(st.sampled_from(IDS[:24]), st.sampled_from(IDS[:24])).map(sorted), max_size=10))
def test_shadowed_is_what_a_scan_finds(pairs: list[list[int]]) -> None:
    ranges = [(low, high) for low, high in pairs]
    expected = []
    for later, (low, high) in enumerate(ranges):
        taken = taken_ids(ranges, later)
        if taken:
            expected.append((later, taken[min(taken)], len(taken) == high - low + 1))
    assert FirstMatch(ranges).shadowed(ranges) == expected


@given(lists, ids)
def test_a_definition_that_is_reported_lost_is_never_followed(defs: list[RangeDef], nobody: int) -> None:
    table = IdMap(defs, nobody=nobody)
    followed = {
        "forward": [table.definition_of(id_) for id_ in IDS],
        "reverse": [table.reverse_definition_of(id_) for id_ in IDS],
    }
    for later, earlier, direction, completely in shadowed(defs, nobody):
        assert defs.index(earlier) <= defs.index(later)
        if completely:
            assert not any(definition is later for definition in followed[direction])


@given(lists, ids, squashes, ids)
def test_a_sole_id_stands_for_no_other(defs: list[RangeDef], nobody: int, squash: Squash, server: int) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    if table.is_sole(server):
        shown = table.reverse(server)
        assert table.forward(shown) == server
        assert {id_ for id_ in IDS if table.forward(id_) == server} <= {shown}
