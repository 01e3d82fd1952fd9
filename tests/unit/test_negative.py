"""Nobody uses up the absences that others need."""

from cloakfs.kernelcache.negative import NegativeDentries

GREEDY, MODEST, LATE = 1, 2, 3


def full(most: int, *callers: int) -> NegativeDentries[str, int]:
    """As many as there may be; the directory is named after the caller, and one comes after the other."""
    absences: NegativeDentries[str, int] = NegativeDentries(most)
    for number in range(most):
        caller = callers[number % len(callers)]
        assert absences.admits(caller, f"of {caller}", number)
        assert absences.note(caller, f"of {caller}", number, number) is None
    return absences


def test_who_has_the_most_gets_no_more() -> None:
    absences = full(4, GREEDY)
    assert not absences.admits(GREEDY, "of 1", 9)
    assert absences.admits(GREEDY, "of 1", 2)  # the same once more
    assert absences.note(GREEDY, "of 1", 2, 9) is None
    assert absences.take("of 1") == [0, 1, 3, 2]
    assert absences.admits(GREEDY, "of 1", 9)


def test_who_has_less_than_its_share_gets_the_oldest_of_who_has_the_most() -> None:
    absences = full(6, GREEDY, GREEDY, MODEST)
    assert absences.admits(MODEST, "of 2", 9)
    assert absences.note(MODEST, "of 2", 9, 9) == ("of 1", 0)
    assert not absences.admits(MODEST, "of 2", 10)  # three for each
    assert not absences.admits(GREEDY, "of 1", 10)
    assert absences.admits(LATE, "of 3", 10)  # two for each
    assert absences.note(LATE, "of 3", 10, 10) in (("of 1", 1), ("of 2", 2))


def test_in_a_directory_that_all_know_each_name_counts_for_whoever_asked_last() -> None:
    absences: NegativeDentries[str, int] = NegativeDentries(2)
    for number in range(2):
        absences.note(GREEDY, "top", number, 0)
    assert absences.note(MODEST, "top", 0, 1) is None
    assert absences.note(MODEST, "top", 1, 1) is None
    assert not absences.admits(MODEST, "top", 2)
    assert absences.note(GREEDY, "top", 2, 2) == ("top", 0)


def test_what_is_old_makes_room() -> None:
    absences = full(4, GREEDY, MODEST)
    absences.note(GREEDY, "of 1", 0, 4)  # once more
    absences.drop_until(-1)
    assert sorted(absences.take("of 2")) == [1, 3]
    absences.note(MODEST, "of 2", 1, 1)
    absences.note(MODEST, "of 2", 3, 3)
    absences.drop_until(2)
    assert sorted(absences.directories()) == ["of 1", "of 2"]
    assert absences.take("of 1") == [0]
    absences.drop_until(9)
    assert absences.directories() == []
    assert absences.take("of 2") == []


def test_nothing_is_left_of_what_is_cleared() -> None:
    absences = full(2, GREEDY)
    absences.clear()
    assert absences.directories() == []
    assert absences.admits(GREEDY, "of 1", 0)


def test_there_may_be_more_callers_than_absences() -> None:
    absences = full(2, GREEDY, MODEST)
    assert not absences.admits(LATE, "of 3", 9)
