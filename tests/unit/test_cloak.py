import csv
from pathlib import Path
from typing import Any, cast

import pytest

from cloakfs import cloak as cloak_module
from cloakfs.cloak import CloakDef, CloakList, Mask, shadowed
from cloakfs.mapping import MAX_ID, NOBODY, Kind

DATA = Path(__file__).parent.parent / "data"
UIDS = {"joe": 501, "ezk": 502}
GIDS = {"src": 601, "fac": 602}
GROUPS = {"joe": {GIDS["src"]}, "ezk": {GIDS["src"], GIDS["fac"]}}


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


FILES = {row["file"]: row for row in rows("table1.csv")}
CELLS = rows("table2.csv")

# Where the scan of the paper contradicts its own algorithm and legend, (mask, caller, file).
KNOWN_DIFFERENCES = {
    *(("+070", "joe", "E8"), ("-007", "ezk", "J2"), ("-007", "joe", "E5"), ("-007", "joe", "E9")),
    *(("-070", "joe", "E6"), ("-070", "joe", "E8"), ("-070", "joe", "E9")),
    *(("-077", "joe", "E6"), ("-077", "joe", "E9"), ("-077", "joe", "E10")),
    *(("-004", "joe", "E7"), ("-004", "joe", "E8")),
}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell['mask']}-{cell['caller']}-{cell['file']}")
@pytest.mark.parametrize("kind", ["uid", "gid"])
def test_table_2(cell: dict[str, str], kind: Kind) -> None:
    file = FILES[cell["file"]]
    cloaks = CloakList([CloakDef(kind, Mask.parse(cell["mask"]), 0, MAX_ID)])
    visible = cloaks.visible(
        int(file["mode"], 8),
        UIDS[file["user"]],
        GIDS[file["group"]],
        UIDS[cell["caller"]],
        GROUPS[cell["caller"]],
    )
    assert visible == (cell["algorithm"] in ("A", "v"))


def test_the_scan_differs_from_the_algorithm_in_known_cells_only() -> None:
    differing = {(cell["mask"], cell["caller"], cell["file"]) for cell in CELLS if cell["algorithm"] != cell["scanned"]}
    assert len(CELLS) == 110
    assert differing == KNOWN_DIFFERENCES


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("+007", Mask(True, 0, 0, 7)),
        ("-420", Mask(False, 4, 2, 0)),
        ("+000", Mask(True, 0, 0, 0)),
        ("-777", Mask(False, 7, 7, 7)),
    ],
)
def test_masks_parse_and_print(text: str, mask: Mask) -> None:
    assert Mask.parse(text) == mask
    assert str(mask) == text


@pytest.mark.parametrize("text", ["", "007", "+07", "+0077", "+008", "−007", "+007 ", "+٠٠٧", "+007\n"])
def test_what_is_no_mask(text: str) -> None:
    with pytest.raises(ValueError, match="is not a mask"):
        Mask.parse(text)


@pytest.mark.parametrize("digits", [(8, 0, 0), (0, -1, 0), (0, 0, 8)])
def test_mask_digits_are_octal(digits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not an octal digit"):
        Mask(True, *digits)


@pytest.mark.parametrize(
    ("low", "high", "problem"),
    [
        (5, 4, "ends before it begins"),
        (-1, 4, "-1 is not an id"),
        (0, MAX_ID + 1, "runs past the largest id"),
        (NOBODY, 5, "single id"),
    ],
)
def test_impossible_definitions(low: int, high: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CloakDef("uid", Mask.parse("+000"), low, high)


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        (CloakDef("uid", Mask.parse("+000"), 500, 1000), "uid +000 500 1000"),
        (CloakDef("gid", Mask.parse("-077"), 100, 100), "gid -077 100"),
        (CloakDef("uid", Mask.parse("+007"), 0, MAX_ID), "uid +007 0 -1"),
        (CloakDef("uid", Mask.parse("+007"), NOBODY, NOBODY), "uid +007 -2"),
    ],
)
def test_definitions_print_as_configuration(definition: CloakDef, text: str) -> None:
    assert str(definition) == text


OWN = CloakDef("uid", Mask.parse("+000"), 500, 1000)
SHARED = CloakDef("gid", Mask.parse("+077"), 100, 200)
PAPER = CloakList([OWN, SHARED])


def test_the_papers_example() -> None:
    # Owned by 500-1000: for owners only, whatever the mode.
    assert PAPER.visible(0o777, 500, 50, 500, {50})
    assert not PAPER.visible(0o777, 500, 50, 1001, {50})
    # In groups 100-200: for others or the group, if they have some access.
    assert PAPER.visible(0o640, 5, 150, 6, {150})
    assert not PAPER.visible(0o640, 5, 150, 6, {151})
    assert PAPER.visible(0o604, 5, 150, 6, set())
    # Selected by both: both must say so.
    assert not PAPER.visible(0o777, 700, 150, 6, {150})
    # Selected by none.
    assert PAPER.visible(0, 5, 5, 6, set())


def test_groups_are_asked_for_only_where_they_matter() -> None:
    """Looking them up may take long."""

    def is_asked(mode: int, gid: int, caller_uid: int) -> bool:
        asked: list[int] = []

        def has_group(gid: int) -> bool:
            asked.append(gid)
            return False

        PAPER.condition(mode, 5, gid).admits(caller_uid, has_group)
        return asked == [gid]

    assert is_asked(0o640, 150, 6)
    assert not is_asked(0o640, 150, 5)  # the owner
    assert not is_asked(0o600, 150, 6)  # hidden from all others
    assert not is_asked(0o644, 150, 6)  # shown to all
    assert not is_asked(0o640, 50, 6)  # selected by no definition


def test_root_sees_no_more_than_others() -> None:
    assert not PAPER.visible(0o777, 500, 0, 0, {0})


def test_judge_explains_without_regard_to_ownership() -> None:
    first, second = PAPER.judge(0o4755, 700, 150, 700, {150})
    assert first == (OWN, 0, 0, 0, False)
    assert second == (SHARED, 5, 5, 0, True)
    assert PAPER.judge(0o4755, 5, 5, 6, {5}) == []


def test_judge_reports_the_bits_that_meet_the_mask() -> None:
    definition = CloakDef("uid", Mask.parse("-627"), 0, MAX_ID)
    (inside,) = CloakList([definition]).judge(0o106765, 1, 2, 3, {2})
    assert inside == (definition, 2, 5, 6, False)
    (outside,) = CloakList([definition]).judge(0o101660, 1, 2, 3, {4})
    assert outside == (definition, 0, 0, 0, True)


def test_selected() -> None:
    assert PAPER.selected(500, 100) == (OWN, SHARED)
    assert PAPER.selected(499, 200) == (SHARED,)
    assert PAPER.selected(1000, 201) == (OWN,)
    assert PAPER.selected(1001, 99) == ()


def test_the_first_definition_of_a_kind_counts() -> None:
    open_, closed = CloakDef("uid", Mask.parse("-000"), 5, 5), CloakDef("uid", Mask.parse("+000"), 0, MAX_ID)
    assert CloakList([open_, closed]).visible(0o600, 5, 0, 6, set())
    assert not CloakList([closed, open_]).visible(0o600, 5, 0, 6, set())


def test_minus_two_is_nobody_of_its_kind() -> None:
    mask = Mask.parse("+000")
    cloaks = CloakList(
        [CloakDef("uid", mask, NOBODY, NOBODY), CloakDef("gid", mask, NOBODY, NOBODY)],
        nobody_uid=7,
        nobody_gid=8,
    )
    assert [d.kind for d in cloaks.selected(7, 7)] == ["uid"]
    assert [d.kind for d in cloaks.selected(8, 8)] == ["gid"]


def test_an_empty_list_hides_nothing() -> None:
    assert CloakList([]).visible(0, 1, 2, 3, set())
    assert CloakList([]).same_for_all(0, 1, 2)


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "same"),
    [
        (0o640, 5, 5, True),  # selected by none
        (0o604, 5, 150, True),  # others have access
        (0o640, 5, 150, False),  # the group sees it, others do not
        (0o600, 5, 150, False),  # the owner sees it, nobody else does
        (0o777, 500, 150, False),
    ],
)
def test_same_for_all(mode: int, uid: int, gid: int, same: bool) -> None:
    assert PAPER.same_for_all(mode, uid, gid) is same


def test_what_is_hidden_from_the_group_alone_is_not_the_same_for_all() -> None:
    cloaks = CloakList([CloakDef("gid", Mask.parse("-020"), 150, 150)])
    assert not cloaks.same_for_all(0o620, 5, 150)
    assert not cloaks.condition(0o620, 5, 150).surely_admits(6)
    assert cloaks.visible(0o620, 5, 150, 6, {151})
    assert not cloaks.visible(0o620, 5, 150, 6, {150})
    assert cloaks.same_for_all(0o602, 5, 150)


def test_exempt_uids_may_come_from_any_iterable() -> None:
    cloaks = CloakList([OWN], exempt=iter([6, 7]))
    for caller in (7, 6, 7):
        assert cloaks.visible(0o600, 500, 50, caller, set())
    assert not cloaks.visible(0o600, 500, 50, 8, set())


def test_what_is_remembered_of_files_has_a_bound_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloak_module, "_MOST_CONDITIONS", 3)
    cloaks = CloakList([OWN, SHARED])
    files = [(mode, uid, gid) for mode in (0o600, 0o640, 0o604) for uid in (5, 700) for gid in (5, 150)]
    for file in (*files, *files):
        assert cloaks.condition(*file) == CloakList([OWN, SHARED]).condition(*file)
        assert cloaks.condition(*file) is cloaks.condition(*file)
        assert cast(Any, cloaks.condition).cache_info().currsize <= 3


def test_shadowed_reports_definitions_without_any_file() -> None:
    mask = Mask.parse("+000")
    first, partly, wholly = (CloakDef("uid", mask, *ends) for ends in ((0, 9), (5, 15), (6, 7)))
    other_kind = CloakDef("gid", mask, 6, 7)
    nobody = CloakDef("gid", mask, NOBODY, NOBODY)
    assert shadowed([first, partly, wholly, other_kind]) == [(wholly, first)]
    assert shadowed([other_kind, nobody], nobody_gid=6) == [(nobody, other_kind)]
    assert shadowed([CloakDef("uid", mask, 6, 7), nobody], nobody_uid=6) == []
