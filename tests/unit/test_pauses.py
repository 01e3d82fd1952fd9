"""Pauses before something is tried again."""

from cloakfs.background.backoff import pause


def test_the_first_attempt_comes_at_once_and_no_pause_exceeds_half_a_minute() -> None:
    pauses = [pause(failures) for failures in range(20)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert pauses[1] > 0
    assert pause(10**9) == max(pauses) == 30
