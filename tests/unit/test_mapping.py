import time

import pytest

from cloakfs.mapping import DEFAULT_NOBODY, MAX_ID, NOBODY, Action, FirstMatch, IdMap, RangeDef, Squash, shadowed

FIGURE_1 = [
    RangeDef("uid", 100, 100, "map", 10),
    RangeDef("uid", 400, 500, "map", 200),
    RangeDef("uid", 800, 999, "squash", 517),
]


@pytest.mark.parametrize(
    ("client", "server"),
    [(100, 10), (400, 200), (450, 250), (500, 300), (800, 517), (999, 517)]
    + [(id_, DEFAULT_NOBODY) for id_ in (0, 99, 101, 501, 1000, MAX_ID, MAX_ID + 1, -1)],
)
def test_figure_1_forward(client: int, server: int) -> None:
    assert IdMap(FIGURE_1).forward(client) == server


@pytest.mark.parametrize(
    ("server", "client"),
    [(10, 100), (200, 400), (300, 500), (517, 800)]
    + [(id_, DEFAULT_NOBODY) for id_ in (0, 9, 11, 199, 301, 516, 518, 800, MAX_ID, MAX_ID + 1, -1)],
)
def test_figure_1_reverse(server: int, client: int) -> None:
    assert IdMap(FIGURE_1).reverse(server) == client


@pytest.mark.parametrize(
    ("squash", "client", "server"),
    [
        ("root", 0, 65534),
        ("root", 1, 1),
        ("root", MAX_ID, MAX_ID),
        ("none", 0, 0),
        ("none", 7, 7),
        ("all", 0, 65534),
        ("all", 7, 65534),
    ],
)
def test_without_definitions_only_squash_counts(squash: Squash, client: int, server: int) -> None:
    table = IdMap([], squash=squash)
    assert table.forward(client) == server
    assert table.reverse(client) == client
    assert not table.closed


def test_what_is_no_id_is_nobody_in_an_identity_table() -> None:
    table = IdMap([], nobody=99, squash="none")
    assert [table.forward(-1), table.forward(MAX_ID + 1)] == [99, 99]
    assert [table.reverse(-1), table.reverse(MAX_ID + 1)] == [99, 99]


@pytest.mark.parametrize("squash", ["root", "none", "all"])
def test_definitions_leave_no_part_to_squash(squash: Squash) -> None:
    table = IdMap([RangeDef("uid", 0, 9, "map", 0)], squash=squash)
    assert [table.forward(0), table.forward(9), table.forward(10)] == [0, 9, 65534]
    assert table.closed


def test_the_largest_id_can_be_mapped() -> None:
    table = IdMap([RangeDef("gid", 5, MAX_ID, "map", 5)])
    assert table.forward(MAX_ID) == MAX_ID
    assert table.reverse(MAX_ID) == MAX_ID
    assert table.forward(MAX_ID + 1) == DEFAULT_NOBODY


def test_minus_two_is_the_nobody_of_the_export() -> None:
    table = IdMap([RangeDef("uid", 7, 9, "squash", NOBODY), RangeDef("uid", 3, 3, "map", 3)], nobody=42)
    assert [table.forward(8), table.forward(3), table.forward(100)] == [42, 3, 42]
    # Nobody is nobody: there is no way back.
    assert table.reverse(42) == 42
    assert table.counterpart(42, "reverse") is None
    assert table.nobody == 42


@pytest.mark.parametrize(
    ("client", "server"),
    [(100, 10), (900, 517), (0, None), (101, None), (65534, None), (MAX_ID + 1, None)],
)
def test_what_becomes_nobody_has_no_counterpart(client: int, server: int | None) -> None:
    assert IdMap(FIGURE_1).counterpart(client, "forward") == server


def test_a_definition_that_leads_to_nobody_gives_no_counterpart() -> None:
    table = IdMap(
        [
            RangeDef("uid", 0, 9, "squash", NOBODY),
            RangeDef("uid", 10, 10, "map", NOBODY),
            RangeDef("uid", 11, 12, "squash", 65534),
            RangeDef("uid", 20, 30, "map", 65530),
        ]
    )
    assert [table.counterpart(client, "forward") for client in (5, 10, 12)] == [None, None, None]
    assert table.counterpart(25, "forward") == 65535


def test_nobody_has_a_counterpart_where_a_map_names_its_number() -> None:
    assert IdMap([RangeDef("uid", 20, 30, "map", 65530)]).counterpart(24, "forward") == 65534


@pytest.mark.parametrize(
    ("squash", "client", "server"),
    [
        ("root", 0, None),
        ("root", 5, 5),
        ("root", 65534, 65534),
        ("none", 0, 0),
        ("none", 65534, 65534),
        ("none", MAX_ID + 1, None),
        ("all", 5, None),
        ("all", 65534, None),
    ],
)
def test_counterparts_without_definitions(squash: Squash, client: int, server: int | None) -> None:
    assert IdMap([], squash=squash).counterpart(client, "forward") == server


def test_groups_that_become_nobody_are_dropped() -> None:
    assert IdMap(FIGURE_1).groups([100, 0, 450, 801, 802, 65534]) == {10, 250, 517}
    # Where ids stay as they are, a group that really has nobody's number is one like any other.
    assert IdMap([]).groups([0, 5, 65534]) == {5, 65534}
    assert IdMap([], squash="all").groups([0, 5, 65534]) == frozenset()
    assert IdMap([RangeDef("gid", 5, 5, "squash", NOBODY)]).groups([0, 5, 6, 65534]) == {6, 65534}
    assert IdMap([]).groups(iter([])) == frozenset()
    # What is no id becomes nobody.
    assert IdMap([]).groups([-1, 0, 5]) == IdMap([]).groups([0, 5, MAX_ID + 1]) == {5}
    assert IdMap([], squash="none").groups([-1, 0, 5]) == {0, 5}


@pytest.mark.parametrize("squash", ["root", "none", "all"])
def test_a_table_that_makes_nobody_of_some_leaves_the_others_as_they_are(squash: Squash) -> None:
    table = IdMap([RangeDef("uid", 5, 9, "squash", NOBODY), RangeDef("uid", 20, 20, "map", NOBODY)], squash=squash)
    plain = IdMap([], squash=squash)
    assert not table.closed
    assert {table.forward(id_) for id_ in (5, 9, 20)} == {65534}
    for id_ in (0, 1, 4, 10, 19, 21, 65534, MAX_ID, MAX_ID + 1, -1):
        assert table.forward(id_) == plain.forward(id_)
        assert table.counterpart(id_, "forward") == plain.counterpart(id_, "forward")
    for id_ in (-1, 0, 5, 20, 65534, MAX_ID, MAX_ID + 1):
        assert table.reverse(id_) == plain.reverse(id_)
    # What is shown as 5 is not that of the client's 5, who is nobody.
    assert [table.counterpart(id_, "reverse") for id_ in (5, 9, 20)] == [None] * 3


def test_the_first_of_a_squashed_range_is_a_counterpart_but_not_the_only_one() -> None:
    table = IdMap(FIGURE_1)
    assert [table.counterpart(id_, "reverse") for id_ in (10, 250, 517, 518, 65534)] == [100, 450, 800, None, None]
    assert [table.is_sole(id_) for id_ in (10, 250, 517, 518, 65534)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("squash", "server", "sole"),
    [("root", 0, False), ("root", 5, True), ("root", 65534, False), ("none", 0, True), ("none", 65534, True),
     ("all", 5, False), ("all", 65534, False)],
)  # fmt: skip
def test_sole_ids_where_ids_stay_as_they_are(squash: Squash, server: int, sole: bool) -> None:
    assert IdMap([], squash=squash).is_sole(server) is sole


def test_nobodys_number_is_like_any_other_where_everybody_is_mapped() -> None:
    assert IdMap([RangeDef("gid", 0, MAX_ID, "map", 0)]).is_sole(65534)
    assert not IdMap([RangeDef("gid", 0, MAX_ID - 1, "map", 0)]).is_sole(65534)
    assert not IdMap([RangeDef("gid", 1, MAX_ID, "map", 1)]).is_sole(65534)
    assert not IdMap([RangeDef("gid", 7, 7, "squash", -2), RangeDef("gid", 0, MAX_ID, "map", 0)]).is_sole(65534)


def test_an_id_that_no_definition_names_makes_nobody() -> None:
    """Wherever it is: below, between or above those that are named."""
    for gap in (0, 11, MAX_ID):
        ranges = [(low, high) for low, high in ((0, gap - 1), (gap + 1, MAX_ID)) if low <= high]
        table = IdMap([RangeDef("gid", low, high, "map", low) for low, high in ranges])
        assert table.forward(gap) == 65534
        assert table.counterpart(65534, "reverse") == 65534
        assert not table.is_sole(65534)


def test_an_id_is_sole_whatever_its_definition_could_have_given_to_others() -> None:
    # A squash of one id, and one that an earlier definition leads elsewhere.
    assert IdMap([RangeDef("uid", 5, 5, "squash", 9)]).is_sole(9)
    taken = [RangeDef("uid", 5, 5, "map", 10), RangeDef("uid", 7, 7, "map", 30), RangeDef("uid", 7, 7, "map", 10)]
    assert IdMap(taken).is_sole(10)
    assert not IdMap([taken[0], taken[2]]).is_sole(10)


def test_what_overlapping_definitions_show_is_not_taken_for_what_it_is() -> None:
    # Server id 0 is shown as the client's 1, who is 3 here.
    table = IdMap([RangeDef("uid", 0, 1, "map", 2), RangeDef("uid", 1, 3, "map", 0)])
    assert table.reverse(0) == 1
    assert table.counterpart(0, "reverse") is None
    assert table.counterpart(1, "forward") == 3


def test_explanations_name_the_definition() -> None:
    table = IdMap(FIGURE_1)
    assert table.definition_of(450) == FIGURE_1[1]
    assert table.definition_of(101) is None
    assert table.reverse_definition_of(10) == FIGURE_1[0]
    assert table.reverse_definition_of(517) == FIGURE_1[2]
    assert table.reverse_definition_of(450) is None
    assert IdMap([]).definition_of(1) is None
    assert IdMap([]).reverse_definition_of(1) is None


@pytest.mark.parametrize(
    ("rm_low", "rm_high", "action", "lc_low", "problem"),
    [
        (5, 4, "map", 1, "ends before it begins"),
        (-1, 4, "map", 1, "-1 is not an id"),
        (MAX_ID + 1, MAX_ID + 1, "map", 1, "4294967295 is not an id"),
        (0, MAX_ID + 1, "squash", 1, "the range 0 4294967295 runs past the largest id"),
        (0, 1, "squash", MAX_ID + 1, "4294967295 is not a server id"),
        (0, 1, "squash", -1, "-1 is not a server id"),
        (0, 1, "squash", -3, "-3 is not a server id"),
        (0, 1, "map", MAX_ID, "the server's range 4294967294 4294967295 runs past"),
        (0, MAX_ID, "map", 1, "the server's range 1 4294967295 runs past"),
        (0, 1, "map", NOBODY, "only squashed"),
    ],
)
def test_impossible_definitions(rm_low: int, rm_high: int, action: Action, lc_low: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RangeDef("uid", rm_low, rm_high, action, lc_low)


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        (RangeDef("uid", 400, 500, "map", 200), "uid 400 500 map 200"),
        (RangeDef("gid", 100, 100, "map", 10), "gid 100 map 10"),
        (RangeDef("uid", 0, MAX_ID, "squash", NOBODY), "uid 0 -1 squash -2"),
        (RangeDef("uid", MAX_ID, MAX_ID, "map", 7), "uid 4294967294 map 7"),
        (RangeDef("uid", 0, 0, "map", NOBODY), "uid 0 map -2"),
        (RangeDef("uid", 0, MAX_ID, "squash", MAX_ID), "uid 0 -1 squash 4294967294"),
    ],
)
def test_definitions_print_as_configuration(definition: RangeDef, text: str) -> None:
    assert str(definition) == text


def test_shadowed_names_both_definitions_and_the_direction() -> None:
    first = RangeDef("uid", 0, 99, "map", 1000)
    partly = RangeDef("uid", 50, 149, "map", 2000)
    wholly = RangeDef("uid", 60, 60, "map", 3000)
    backwards = RangeDef("uid", 500, 600, "squash", 1010)
    apart = RangeDef("uid", 700, 700, "map", 9)
    assert shadowed([first, partly, wholly, backwards, apart]) == [
        (partly, first, "forward", False),
        (wholly, first, "forward", True),
        (backwards, first, "reverse", True),
    ]


def test_shadowed_by_a_later_part_of_the_range() -> None:
    island = RangeDef("uid", 50, 50, "map", 5000)
    around = RangeDef("uid", 0, 99, "map", 0)
    assert shadowed([island, around]) == [(around, island, "forward", False)]


def test_shadowed_knows_nobody() -> None:
    one, two = RangeDef("gid", 0, 0, "squash", NOBODY), RangeDef("gid", 5, 5, "map", 77)
    assert shadowed([one, two], 77) == []  # what is nobody's does not come back as anybody's
    assert shadowed([two, RangeDef("gid", 6, 6, "squash", 77)], 77) == []
    assert shadowed([two, RangeDef("gid", 6, 6, "squash", 77)], 78) == [
        (RangeDef("gid", 6, 6, "squash", 77), two, "reverse", True)
    ]
    assert shadowed([one, RangeDef("gid", 0, 5, "map", 7)], 77) == [
        (RangeDef("gid", 0, 5, "map", 7), one, "forward", False)
    ]


def test_first_match_of_nothing() -> None:
    assert FirstMatch([]).find(0) == -1
    assert FirstMatch([]).shadowed([]) == []


@pytest.mark.no_cover  # tracing takes time that it has not got
def test_ten_thousand_overlapping_definitions_build_at_once() -> None:
    # All overlap all others: anything quadratic would take minutes.
    count = 10_000
    defs = [RangeDef("uid", i, 4 * count - i, "squash", 3 * i) for i in range(count, 0, -1)]
    began = time.perf_counter()
    table = IdMap(defs)
    taken = shadowed(defs)
    assert time.perf_counter() - began < 30
    assert table.definition_of(1) == defs[-1]
    assert table.definition_of(count) == defs[0]
    assert len(taken) == count - 1
