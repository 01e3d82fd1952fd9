"""How long to wait before something that failed is tried again: a task, a mount, its daemon."""

_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def backoff_seconds(failures: int, most: float = _SECONDS[-1]) -> float:
    """Return the seconds to wait after this many failures in a row: nothing at first, then longer, at most `most`."""
    return min(_SECONDS[min(failures, len(_SECONDS) - 1)], most)
