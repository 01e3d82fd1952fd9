"""How long to wait before something that failed is tried again."""

from cloakfs.background.backoff import backoff_seconds


def test_the_first_attempt_comes_at_once_and_no_backoff_exceeds_half_a_minute() -> None:
    backoffs = [backoff_seconds(failures) for failures in range(20)]
    assert backoffs[0] == 0
    assert backoffs == sorted(backoffs)
    assert backoffs[1] > 0
    assert backoff_seconds(10**9) == max(backoffs) == 30
    assert [backoff_seconds(failures, 2.0) for failures in range(6)] == [0, 0.5, 1, 2, 2, 2]
