"""How long to wait before something that failed is tried again."""

_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def backoff_seconds(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row: nothing at first, then longer, at most 30."""
    return _SECONDS[min(failures, len(_SECONDS) - 1)]
