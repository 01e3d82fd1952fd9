"""A table that is too small by one serves all files but two."""

import pytest

from cloakfs.streams import FileTable

NOBODY_LEFT_OUT = 32


def in_turn(table: FileTable[int], files: int, rounds: int, *, active: bool) -> list[list[bool]]:
    """Use so many files in turn; whether each was found, in each round."""
    found: list[list[bool]] = []
    for _ in range(rounds):
        found.append([])
        for key in range(files):
            known = table.use(key) is not None
            found[-1].append(known)
            if not known:
                table.add(key, key, lambda _: active)
    return found


def test_what_fits_stays() -> None:
    table: FileTable[int] = FileTable(4)
    assert in_turn(table, 4, 3, active=True)[1:] == [[True] * 4] * 2
    assert [table.peek(key) for key in range(5)] == [0, 1, 2, 3, None]
    assert len(table) == 4


def test_the_least_recently_used_is_forgotten() -> None:
    table: FileTable[int] = FileTable(2)
    assert table.add(0, 10, lambda _: True) is None
    assert table.add(1, 11, lambda _: True) is None
    table.use(0)
    assert table.peek(1) == 11  # this does not count
    assert table.add(2, 12, lambda _: True) == 11
    assert (table.peek(0), table.peek(1), table.peek(2)) == (10, None, 12)


@pytest.mark.parametrize("files", [17, 20, 32, 64])
def test_files_that_are_read_in_turn_do_not_all_make_each_other_forgotten(files: int) -> None:
    last = in_turn(FileTable(16), files, 20, active=True)[-1]
    assert sum(last) >= 16 * 2 // 3  # the rest shares a place, and takes over one now and then


def test_files_that_are_idle_give_way() -> None:
    assert not any(any(found) for found in in_turn(FileTable(16), 17, 20, active=False))


def test_nobody_is_left_out_for_ever() -> None:
    found = in_turn(FileTable(4), 6, 8 * NOBODY_LEFT_OUT, active=True)
    assert all(any(one[key] for one in found) for key in range(6))


def test_what_is_remembered_of_those_that_are_forgotten_is_bounded() -> None:
    table: FileTable[int] = FileTable(2)
    in_turn(table, 1000, 2, active=True)
    assert len(table._gone) == 8
    assert len(table) == 2
