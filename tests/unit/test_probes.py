"""Probes are counted for each caller, in bounded memory, and one that is over the rate is named once in a period."""

import sys

import pytest

from cloakfs import monitoring, probes
from cloakfs.identity import ClientId
from cloakfs.monitoring import Events
from cloakfs.probes import DEFAULT_ALARM, Identity, Probes, Rate

ANN, BEN = Identity(ClientId(1001), 0), Identity(ClientId(1002), 0)


def guess(counted: Probes, who: Identity, count: int, now: float = 0.0, first: int = 0) -> int:
    """Ask for so many different names; return the number of alarms."""
    return sum(
        counted.count(who, "lookups", (7, b"%d" % name), now) is not None for name in range(first, first + count)
    )


@pytest.mark.parametrize("text", ["60/min", "1/s", "9999/h"])
def test_rate(text: str) -> None:
    assert str(Rate.parse(text)) == text


@pytest.mark.parametrize("text", ["", "60", "0/min", "60/m", "10000/s", "-1/s", "60/min ", "6 0/min", "²/s"])
def test_no_rate(text: str) -> None:
    assert Rate.parse(text) is None


def test_only_who_exceeds_the_rate_is_named_and_once_in_a_period() -> None:
    counted = Probes(Rate(60, 60))
    assert guess(counted, ANN, 60) == 0
    assert guess(counted, BEN, 60) == 0
    alarm = counted.count(ANN, "lookups", (7, b"one more"), 59.0)
    assert alarm is not None
    assert (alarm.who, alarm.rate, alarm.counts) == (ANN, Rate(60, 60), {"lookups": 61})
    assert guess(counted, ANN, 1000, 59.9, 100) == 0
    assert guess(counted, ANN, 1000, 60.0) == 1
    assert guess(counted, ANN, 1000, 119.0) == 0
    assert counted.counts == {"lookups": 3121, "alarms": 2}


def test_a_slow_caller_is_never_named() -> None:
    counted = Probes(DEFAULT_ALARM)
    assert sum(guess(counted, ANN, 60, 60.0 * minute, minute * 60) for minute in range(100)) == 0


def test_the_same_name_counts_once_in_a_period() -> None:
    counted = Probes(Rate(1, 1))
    for _ in range(10):
        assert counted.count(ANN, "lookups", (7, b"name"), 0.0, times=100) is None
    assert counted.counts == {"lookups": 1000}
    assert counted.count(ANN, "lookups", (8, b"name"), 0.5) is not None


def test_views_are_told_apart() -> None:
    counted = Probes(Rate(1, 1))
    assert guess(counted, ANN, 1) + guess(counted, ANN._replace(view=1), 1, first=1) == 0


def test_what_is_made_counts_only_over_a_hidden_name() -> None:
    counted = Probes(Rate(2, 60))
    assert counted.count(ANN, "creations", (7, b"0"), 0.0) is None
    assert not counted.counts
    guess(counted, ANN, 2)
    counted.count(ANN, "creations", (7, b"0"), 0.0)
    counted.count(ANN, "creations", (7, b"visible"), 0.0)
    alarm = counted.count(ANN, "handles", 4711, 0.0)
    assert alarm is not None
    assert alarm.counts == {"lookups": 2, "creations": 1, "handles": 1}
    counted.count(ANN, "creations", (7, b"0"), 0.0)  # by now, nobody knows which ones there were
    assert counted.counts["creations"] == 2
    counted.count(ANN, "creations", (7, b"0"), 60.0)
    assert counted.counts["creations"] == 2


def test_who_exceeds_the_rate_is_told_of_one_name_in_a_pause() -> None:
    counted = Probes(Rate(1, 60))
    assert counted.may_answer(ANN, b"a", 0.0, 5.0)
    assert guess(counted, ANN, 2, 1.0) == 1
    assert counted.may_answer(ANN, b"a", 2.0, 5.0)
    assert not counted.may_answer(ANN, b"b", 2.0, 5.0)
    assert counted.may_answer(BEN, b"b", 2.0, 5.0)
    assert counted.may_answer(ANN, b"a", 6.9, 5.0)  # the kernel asks twice
    assert not counted.may_answer(ANN, b"b", 6.9, 5.0)
    assert counted.may_answer(ANN, b"b", 7.0, 5.0)
    assert not counted.may_answer(ANN, b"a", 7.0, 5.0)
    # It ends a period after the alarm, whatever was asked meanwhile.
    guess(counted, ANN, 100, 60.0)
    assert not counted.may_answer(ANN, b"a", 60.9, 60.0)
    assert counted.may_answer(ANN, b"a", 61.0, 60.0)
    assert counted.may_answer(ANN, b"b", 61.0, 60.0)


def is_slow(counted: Probes, who: Identity, now: float = 1.0) -> bool:
    return not all(counted.may_answer(who, name, now, 1.0) for name in (b"a", b"b"))


def test_off() -> None:
    counted = Probes(None)
    assert guess(counted, ANN, 1000) == 0
    assert not counted.counts


def test_another_rate() -> None:
    counted = Probes(Rate(2, 60))
    guess(counted, ANN, 3)
    guess(counted, BEN, 2)
    counted.use(Rate(2, 60))
    assert is_slow(counted, ANN)
    assert guess(counted, BEN, 1, first=2) == 1
    counted.use(Rate(3, 60))
    assert not is_slow(counted, ANN)
    assert guess(counted, BEN, 3) == 0
    counted.use(None)
    assert guess(counted, BEN, 100) == 0


def test_any_number_of_identities_takes_bounded_memory_and_hides_no_loud_one() -> None:
    counted = Probes(Rate(60, 60))
    guess(counted, ANN, 50)
    assert guess(counted, BEN, 61) == 1
    for uid in range(100_000):
        guess(counted, Identity(ClientId(5000 + uid), 0), 1 + uid % 3)
    assert len(counted._periods) <= probes.MOST_IDENTITIES
    assert counted._names == sum(len(period.names) for period in counted._periods.values()) <= 51 + 3 * 1024
    assert counted.counts["evicted"] > 90_000
    assert guess(counted, BEN, 100) == 0  # it is known that it was named
    assert guess(counted, ANN, 11, 59.0, first=50) == 1


def test_names_are_bounded_as_well() -> None:
    counted = Probes(Rate(9999, 3600))
    for uid in range(30):
        guess(counted, Identity(ClientId(uid), 0), 9999)
        assert counted._names <= probes.MOST_NAMES + 9999
    assert sum(sys.getsizeof(period.names) for period in counted._periods.values()) < 8 << 20


def test_the_period_of_the_evicted_has_ended_if_there_are_such() -> None:
    counted = Probes(Rate(60, 60))
    for uid in range(probes.MOST_IDENTITIES):
        guess(counted, Identity(ClientId(uid), 0), 5, 0.0 if uid % 2 else 50.0)
    guess(counted, Identity(ClientId(5000), 0), 1, 70.0)
    assert counted.counts["evicted"] == 0
    assert len(counted._periods) == probes.MOST_IDENTITIES // 2 + 1


def test_slow_ones_are_bounded_too() -> None:
    counted = Probes(Rate(1, 60))
    for uid in range(5000):
        assert guess(counted, Identity(ClientId(uid), 0), 2) == 1
    assert len(counted._slow) <= probes.MOST_IDENTITIES
    assert is_slow(counted, Identity(ClientId(4999), 0))


def test_events_are_numbered_and_the_last_ones_kept() -> None:
    told = Events()
    assert told.after(0) == []
    for number in range(3):
        told.add({"what": number})
    assert told.after(0) == [{"number": number + 1, "what": number} for number in range(3)]
    assert told.after(2) == [{"number": 3, "what": 2}]
    assert told.after(3) == told.after(100) == []
    for number in range(monitoring.MAX_EVENTS):
        told.add({"what": number})
    assert [event["number"] for event in told.after(0)] == list(range(4, monitoring.MAX_EVENTS + 4))
    assert len(told.after(-5)) == monitoring.MAX_EVENTS
