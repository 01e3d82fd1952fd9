"""The counters of a mount, as they are told to who asks."""

import errno

from cloakfs.monitoring import SUM, Counters


def test_what_was_not_counted_is_zero_or_left_out() -> None:
    assert Counters().plain() == {
        "durations": {},
        "errors": [],
        "names": [0, 0],
        "attributes": [0, 0],
        "hidden": {"name": 0, "handle": 0, "listing": 0},
    }


def test_each_counter_is_told_under_its_name() -> None:
    counters = Counters()
    for took in (0, 1, 5, 7, 1 << 40):
        counters.durations["lookup"][took.bit_length()] += 1
        counters.durations["lookup"][SUM] += took
    counters.errors["lookup", errno.ENOENT] += 2
    counters.names[True] += 3
    counters.attributes[False] += 4
    counters.hidden_names, counters.hidden_handles, counters.hidden_entries = 5, 6, 7
    assert counters.plain() == {
        "durations": {"lookup": [13 + (1 << 40), [[0, 1], [1, 1], [3, 2], [41, 1]]]},
        "errors": [["lookup", errno.ENOENT, 2]],
        "names": [0, 3],
        "attributes": [4, 0],
        "hidden": {"name": 5, "handle": 6, "listing": 7},
    }
