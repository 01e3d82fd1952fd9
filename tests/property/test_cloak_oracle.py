"""Compares cloaking with a transcription of the algorithm's text [SZ section 2.2, Figure 2]."""

import stat

from hypothesis import example, given
from hypothesis import strategies as st

from cloakfs.cloak import CloakDef, CloakList, Mask

IDS = st.integers(0, 6)
modes = st.builds(
    lambda kind, bits: kind | bits,
    st.sampled_from([0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFSOCK, stat.S_IFIFO]),
    st.integers(0, 0o7777),
)
masks = st.builds(Mask, st.booleans(), st.integers(0, 7), st.integers(0, 7), st.integers(0, 7))
definitions = st.builds(
    lambda kind, mask, ends: CloakDef(kind, mask, *sorted(ends)),
    st.sampled_from(["uid", "gid"]),
    masks,
    st.tuples(IDS, IDS),
)
files = st.tuples(modes, IDS, IDS)  # mode, owner, group
callers = st.tuples(IDS, st.frozensets(IDS))
EXEMPT = st.frozensets(IDS)
HIDDEN_FROM_THE_GROUP = [CloakDef("gid", Mask.parse("-020"), 0, 6)], (0o620, 1, 2)
"""Rarely found by chance: others see it, and only the group does not."""


def octal_digit(mode: int, place: int) -> int:
    """The digit of a mode in octal; 0 is the one for others, 3 the one with set-id and sticky bits."""
    return int(f"{mode:08o}"[-1 - place])


def by_the_text(mask: Mask, mode: int, in_group: bool) -> bool:
    # "The first check is done if the credentials have group ownership on the file. The group RWX bits of the
    # cloaking-mask are ANDed with the file's protection bits."
    first = (mask.group & octal_digit(mode, 1)) if in_group else 0
    # "The second check is done with an AND between all the bits in the cloaking-mask (excluding the group rwx
    # bits) and the file's protection bits (excluding the group and user bits)."
    second = (mask.special & octal_digit(mode, 3)) + (mask.other & octal_digit(mode, 0))
    # "If the result of either AND is non-zero and the SHOW bit of the cloaking-mask is set then the file is
    # visible; else if the SHOW bit is unset then the file is cloaked. The inverse behavior takes place if the
    # result of the AND is zero."
    if first != 0 or second != 0:
        return mask.show
    return not mask.show


def expected(
    defs: list[CloakDef],
    file: tuple[int, int, int],
    caller_and_groups: tuple[int, frozenset[int]],
    exempt: frozenset[int] = frozenset(),
) -> bool:
    mode, uid, gid = file
    caller, gids = caller_and_groups
    if caller == uid:  # "If the credentials match then the file is visible."
        return True
    if caller in exempt:  # not in the paper
        return True
    for kind, file_id in (("uid", uid), ("gid", gid)):
        for d in defs:
            if d.kind == kind and d.lc_low <= file_id <= d.lc_high:
                if not by_the_text(d.mask, mode, gid in gids):
                    return False
                break
    return True


@given(st.lists(definitions, max_size=6), files, callers)
def test_visible_is_what_the_paper_says(
    defs: list[CloakDef], file: tuple[int, int, int], caller: tuple[int, frozenset[int]]
) -> None:
    assert CloakList(defs).visible(*file, *caller) == expected(defs, file, caller)


@given(st.lists(definitions, max_size=6), files, callers)
def test_verdicts_add_up(defs: list[CloakDef], file: tuple[int, int, int], caller: tuple[int, frozenset[int]]) -> None:
    verdicts = CloakList(defs).judge(*file, *caller)
    assert len(verdicts) <= 2
    stranger = -1, caller[1]  # owns nothing
    assert all(v.visible for v in verdicts) == expected(defs, file, stranger)
    for v in verdicts:
        met = v.hit_group + v.hit_other + v.hit_special > 0
        assert v.visible == (met == v.definition.mask.show)


@given(st.lists(definitions, max_size=6), files, callers, EXEMPT)
def test_exempt_callers_see_everything_and_others_what_they_saw_before(
    defs: list[CloakDef],
    file: tuple[int, int, int],
    caller: tuple[int, frozenset[int]],
    exempt: frozenset[int],
) -> None:
    seen = CloakList(defs, exempt=exempt).visible(*file, *caller)
    assert seen == (caller[0] in exempt or CloakList(defs).visible(*file, *caller))


@given(st.lists(definitions, max_size=6), files, EXEMPT)
@example(*HIDDEN_FROM_THE_GROUP, frozenset())
def test_same_for_all_is_exact(defs: list[CloakDef], file: tuple[int, int, int], exempt: frozenset[int]) -> None:
    in_and_out = frozenset({file[2]}), frozenset[int]()
    stranger = 7  # it owns nothing, and is not exempt
    answers = {expected(defs, file, (caller, gids), exempt) for caller in (*range(7), stranger) for gids in in_and_out}
    assert CloakList(defs, exempt=exempt).same_for_all(*file) == (len(answers) == 1)


@given(st.lists(definitions, max_size=6), files, IDS, EXEMPT)
@example(*HIDDEN_FROM_THE_GROUP, 3, frozenset())
def test_surely_admits_is_exact(
    defs: list[CloakDef], file: tuple[int, int, int], caller: int, exempt: frozenset[int]
) -> None:
    """It says whether this uid sees the file with any groups."""
    in_and_out = frozenset({file[2]}), frozenset[int]()
    answers = {expected(defs, file, (caller, gids), exempt) for gids in in_and_out}
    assert CloakList(defs, exempt=exempt).condition(*file).surely_admits(caller) == (answers == {True})


@given(st.lists(definitions, max_size=6), files, IDS, EXEMPT)
@example(*HIDDEN_FROM_THE_GROUP, 3, frozenset())
def test_surely_admits_members_is_exact(
    defs: list[CloakDef], file: tuple[int, int, int], group: int, exempt: frozenset[int]
) -> None:
    """It says whether every uid with this group sees the file, with any other groups."""
    in_and_out = frozenset({group, file[2]}), frozenset({group})
    stranger = 7  # it owns nothing, and is not exempt
    answers = {expected(defs, file, (caller, gids), exempt) for caller in (*range(7), stranger) for gids in in_and_out}
    assert CloakList(defs, exempt=exempt).condition(*file).surely_admits_members(group) == (answers == {True})
