"""No caller, and no number of them, can take all of a resource."""

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.shares import Shares


def take_all(shares: Shares[int], caller: int) -> int:
    count = 0
    while shares.has_share_left(caller):
        shares.take(caller)
        count += 1
    return count


def test_one_caller_gets_half() -> None:
    shares: Shares[int] = Shares(1000)
    assert take_all(shares, 1) == 500
    assert take_all(shares, 2) == 250
    assert take_all(shares, 3) == 125
    shares.give_back(1, 500)
    assert 1 not in shares.held
    assert take_all(shares, 4) == 313


def test_a_limit_of_its_own() -> None:
    shares: Shares[int] = Shares(1000, 100)
    assert take_all(shares, 1) == 100
    assert take_all(shares, 2) == 100


@given(st.lists(st.integers(0, 5), max_size=400), st.integers(8, 60))
def test_whoever_holds_nothing_gets_something(callers: list[int], most: int) -> None:
    """However few callers take and give back, a new one is admitted; what is noted adds up."""
    shares: Shares[int] = Shares(most)
    for number, caller in enumerate(callers):
        if number % 5 == 4 and caller in shares.held:
            shares.give_back(caller)
        elif shares.has_share_left(caller):
            shares.take(caller)
        assert shares.total == sum(shares.held.values()) < most
        assert shares.has_share_left(99)
        assert all(shares.held.values())


def test_shares_are_true_while_something_is_held() -> None:
    shares: Shares[str] = Shares(10)
    assert not shares
    shares.take("ann")
    assert shares
    shares.give_back("ann")
    assert not shares


def test_one_is_taken_for_a_while() -> None:
    shares: Shares[int] = Shares(2)
    with shares.taken(1):
        assert shares.held == {1: 1}
    assert not shares
