"""The ranges of locks, compared with locks on bytes one by one; and circles of those who wait."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.lockranges import END, Lock, LockTable, Ranges

_BYTES = 12

extents = st.tuples(st.integers(0, _BYTES - 1), st.integers(1, _BYTES)).map(lambda it: (it[0], it[0] + it[1]))
steps = st.lists(st.tuples(extents, st.sampled_from((None, False, True))), max_size=12)


@given(steps)
def test_ranges_are_what_their_bytes_are(done: list[tuple[tuple[int, int], bool | None]]) -> None:
    ranges, by_byte = Ranges(), dict[int, bool]()
    for (start, end), exclusive in done:
        for byte in range(start, end):
            by_byte.pop(byte, None)
        if exclusive is None:
            ranges.unlock(start, end)
        else:
            ranges.lock(Lock(start, end, exclusive))
            by_byte |= dict.fromkeys(range(start, end), exclusive)
    assert {byte: lock.exclusive for lock in ranges.locks for byte in range(lock.start, lock.end)} == by_byte
    for one, other in itertools.pairwise(ranges.locks):
        assert one.end < other.start or (one.end == other.start and one.exclusive != other.exclusive)
    for byte, exclusive in itertools.product(range(2 * _BYTES), (False, True)):
        found = ranges.conflict(Lock(byte, byte + 1, exclusive))
        assert (found is not None) == (byte in by_byte and (exclusive or by_byte[byte]))


def test_a_range_without_an_end() -> None:
    ranges = Ranges()
    ranges.lock(Lock(10, END, exclusive=True))
    ranges.unlock(20, 30)
    assert ranges.locks == [Lock(10, 20, exclusive=True), Lock(30, END, exclusive=True)]
    assert ranges.conflict(Lock(1 << 62, END, exclusive=False)) is not None


def table(*held: tuple[str, str], waiting: tuple[tuple[str, str], ...] = ()) -> LockTable[str, str]:
    """A table of owners that have, or wait for, all of a file."""
    made: LockTable[str, str] = LockTable()
    for owner, file in held:
        made.ranges(file, owner).lock(ALL)
    for owner, file in waiting:
        made.waiting.setdefault(owner, []).append((file, ALL))
    return made


ALL = Lock(0, END, exclusive=True)


def test_two_owners_that_wait_for_each_other() -> None:
    assert table(("a", "1"), ("b", "2"), waiting=(("b", "1"),)).is_circular("2", "a", ALL)


def test_a_circle_of_three() -> None:
    held = (("a", "1"), ("b", "2"), ("c", "3"))
    assert table(*held, waiting=(("b", "3"), ("c", "1"))).is_circular("2", "a", ALL)
    assert not table(*held, waiting=(("b", "3"),)).is_circular("2", "a", ALL)


def test_others_that_wait_for_each_other_are_no_circle_of_ones_own() -> None:
    made = table(("b", "2"), ("c", "3"), waiting=(("b", "3"), ("c", "2")))
    assert not made.is_circular("2", "a", ALL)


def test_an_owner_that_has_closed_the_file_is_in_nobodys_way() -> None:
    made = table(("a", "1"), ("b", "1"))
    assert list(made.in_the_way("1", "a", ALL)) == ["b"]
    made.drop("1", "b")
    assert not list(made.in_the_way("1", "a", ALL))
    made.drop("1", "a")
    assert not made.held


def test_a_circle_of_very_many_is_not_looked_for() -> None:
    """As in Linux: who waits for whom is followed over ten processes."""
    count = 30
    held = [(str(number), str(number)) for number in range(count)]
    waiting = tuple((str(number), str(number + 1)) for number in range(1, count - 1))
    made = table(*held, waiting=(*waiting, (str(count - 1), "0")))
    assert not made.is_circular("1", "0", ALL)
    assert made.is_circular(str(count - 10), "0", ALL)
    assert not made.is_circular(str(count - 11), "0", ALL)


def test_many_threads_of_a_process_wait() -> None:
    made = table(("a", "1"), ("b", "2"), waiting=(("b", "3"), ("b", "1")))
    assert made.is_circular("2", "a", ALL)
