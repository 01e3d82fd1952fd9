"""Ids inside POSIX ACLs."""

import struct
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloakfs.acl import translate
from cloakfs.mapping import MAX_ID

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
NO_ID = 0xFFFFFFFF

Entry = tuple[int, int, int]

perms = st.integers(0, 7)
ids = st.integers(0, MAX_ID)


def acl(*entries: Entry) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def entries_of(value: bytes) -> list[Entry]:
    assert value[:4] == struct.pack("<I", 2)
    return list(struct.iter_unpack("<HHI", value[4:]))


@st.composite
def acls(draw: st.DrawFn) -> list[Entry]:
    """The entries of a valid ACL, in the kernel's order."""
    users = sorted(draw(st.sets(ids, max_size=6)))
    groups = sorted(draw(st.sets(ids, max_size=6)))
    return [
        (USER_OBJ, draw(perms), NO_ID),
        *((USER, draw(perms), uid) for uid in users),
        (GROUP_OBJ, draw(perms), NO_ID),
        *((GROUP, draw(perms), gid) for gid in groups),
        (MASK, draw(perms), NO_ID),
        (OTHER, draw(perms), NO_ID),
    ]


@given(acls(), st.booleans())
def test_the_identity_changes_nothing(entries: list[Entry], distinct: bool) -> None:
    assert translate(acl(*entries), lambda i: i, lambda i: i, distinct=distinct) == acl(*entries)


@given(acls())
def test_there_and_back_is_where_it_began(entries: list[Entry]) -> None:
    def mirror(i: int) -> int:
        return MAX_ID - i

    there = translate(acl(*entries), mirror, mirror, distinct=True)
    assert translate(there, mirror, mirror, distinct=True) == acl(*entries)


@given(acls())
def test_only_ids_of_named_entries_change_each_by_the_map_of_its_kind(entries: list[Entry]) -> None:
    def half(uid: int) -> int:
        return uid // 2

    def third(gid: int) -> int:
        return gid // 3

    value = translate(acl(*entries), half, third)
    halves = {USER: 2, GROUP: 3}
    expected = [(tag, perm, i // halves[tag] if tag in halves else i) for tag, perm, i in entries]
    assert Counter(entries_of(value)) == Counter(expected)
    keys = [(tag, i) for tag, _, i in entries_of(value)]
    assert keys == sorted(keys)


@given(acls())
def test_an_id_without_counterpart_is_refused(entries: list[Entry]) -> None:
    kinds = {tag for tag, _, _ in entries}
    for tag, word in ((USER, "user"), (GROUP, "group")):

        def missing(i: int) -> None:
            return None

        uid, gid = (missing, lambda i: i) if tag == USER else (lambda i: i, missing)
        if tag in kinds:
            first = next(i for t, _, i in entries if t == tag)
            with pytest.raises(ValueError, match=f"^{word} {first} has no counterpart$"):
                translate(acl(*entries), uid, gid)
        else:
            assert translate(acl(*entries), uid, gid) == acl(*entries)


def test_two_entries_that_become_one_are_refused_on_the_way_in_only() -> None:
    value = acl((USER_OBJ, 7, NO_ID), (USER, 7, 1), (USER, 0, 2), (GROUP_OBJ, 0, NO_ID), (OTHER, 0, NO_ID))
    squashed = acl((USER_OBJ, 7, NO_ID), (USER, 7, 9), (USER, 0, 9), (GROUP_OBJ, 0, NO_ID), (OTHER, 0, NO_ID))
    assert translate(value, lambda i: 9, lambda i: i) == squashed
    with pytest.raises(ValueError, match="same id"):
        translate(value, lambda i: 9, lambda i: i, distinct=True)


def test_a_user_and_a_group_may_have_one_number() -> None:
    value = acl((USER_OBJ, 7, NO_ID), (USER, 7, 1), (GROUP_OBJ, 0, NO_ID), (GROUP, 1, 2), (OTHER, 0, NO_ID))
    both = acl((USER_OBJ, 7, NO_ID), (USER, 7, 9), (GROUP_OBJ, 0, NO_ID), (GROUP, 1, 9), (OTHER, 0, NO_ID))
    assert translate(value, lambda i: 9, lambda i: 9, distinct=True) == both


@pytest.mark.parametrize(
    "value", [b"", b"\2\0\0", struct.pack("<I", 1), struct.pack("<I", 3), acl((USER, 7, 1))[:-1], acl() + b"\0"]
)
def test_what_is_no_acl_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="not a POSIX ACL of version 2"):
        translate(value, lambda i: i, lambda i: i)


@given(st.binary(max_size=40))
def test_garbage_is_refused_or_keeps_its_length(value: bytes) -> None:
    try:
        result = translate(value, lambda i: i, lambda i: i)
    except ValueError:
        return
    assert len(result) == len(value)
