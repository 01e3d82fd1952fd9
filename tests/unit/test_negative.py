"""No caller uses up the negative dentries that others need."""

from cloakfs.kernelcache.negative import NegativeDentries

GREEDY, MODEST, LATE = 1, 2, 3


def full(most: int, *callers: int) -> NegativeDentries[str, int]:
    """As many as there may be; the directory is named after the caller, and one comes after the other."""
    noted: NegativeDentries[str, int] = NegativeDentries(most)
    for number in range(most):
        caller = callers[number % len(callers)]
        assert noted.admits(caller, f"of {caller}", number)
        assert noted.note(caller, f"of {caller}", number, number) is None
    return noted


def test_who_has_the_most_gets_no_more() -> None:
    noted = full(4, GREEDY)
    assert not noted.admits(GREEDY, "of 1", 9)
    assert noted.admits(GREEDY, "of 1", 2)  # the same once more
    assert noted.note(GREEDY, "of 1", 2, 9) is None
    assert noted.take("of 1") == [0, 1, 3, 2]
    assert noted.admits(GREEDY, "of 1", 9)


def test_who_has_less_than_its_share_gets_the_oldest_of_who_has_the_most() -> None:
    noted = full(6, GREEDY, GREEDY, MODEST)
    assert noted.admits(MODEST, "of 2", 9)
    assert noted.note(MODEST, "of 2", 9, 9) == ("of 1", 0)
    assert not noted.admits(MODEST, "of 2", 10)  # three for each
    assert not noted.admits(GREEDY, "of 1", 10)
    assert noted.admits(LATE, "of 3", 10)  # two for each
    assert noted.note(LATE, "of 3", 10, 10) in (("of 1", 1), ("of 2", 2))


def test_in_a_directory_that_all_know_each_name_counts_for_whoever_asked_last() -> None:
    noted: NegativeDentries[str, int] = NegativeDentries(2)
    for number in range(2):
        noted.note(GREEDY, "top", number, 0)
    assert noted.note(MODEST, "top", 0, 1) is None
    assert noted.note(MODEST, "top", 1, 1) is None
    assert not noted.admits(MODEST, "top", 2)
    assert noted.note(GREEDY, "top", 2, 2) == ("top", 0)


def test_what_is_old_makes_room() -> None:
    noted = full(4, GREEDY, MODEST)
    noted.note(GREEDY, "of 1", 0, 4)  # once more
    noted.drop_until(-1)
    assert sorted(noted.take("of 2")) == [1, 3]
    noted.note(MODEST, "of 2", 1, 1)
    noted.note(MODEST, "of 2", 3, 3)
    noted.drop_until(2)
    assert sorted(noted.directories()) == ["of 1", "of 2"]
    assert noted.take("of 1") == [0]
    noted.drop_until(9)
    assert noted.directories() == []
    assert noted.take("of 2") == []


def test_nothing_is_left_of_what_is_cleared() -> None:
    noted = full(2, GREEDY)
    noted.clear()
    assert noted.directories() == []
    assert noted.admits(GREEDY, "of 1", 0)


def test_there_may_be_more_callers_than_negative_dentries() -> None:
    noted = full(2, GREEDY, MODEST)
    assert not noted.admits(LATE, "of 3", 9)
