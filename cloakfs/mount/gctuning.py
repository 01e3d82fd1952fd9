"""Keeps collections by Python's garbage collector short, since all callers wait while one runs.

Python frees nearly everything by counting references. Only what refers to itself in a circle is found by the collector,
which stops the process and examines everything that lives: 40 ms for 100,000 files that the kernel knows. Files are
never in such circles. So what has survived a full collection is set aside (gc.freeze), and the next one examines newer
objects alone. Full collections are frequent, so that each examines little: by default, one begins after 70,000 new
objects at the earliest, and takes some 20 ms. Circles that were set aside before they became garbage are found at a
time when no request waits.
"""

import gc
import math
import time

_EVERY_SECONDS = 3600.0

# gc.set_threshold: how many new objects make a collection of those alone, how many of these make one that examines the
# survivors as well, and how many of those may come before a full one.
_OFTEN = (700, 5, 0)

_last = -math.inf


def freeze_survivors() -> None:
    """Exempt what there is from collections, and from now on what survives a full one."""
    gc.set_threshold(*_OFTEN)
    gc.freeze()
    if _set_aside not in gc.callbacks:
        gc.callbacks.append(_set_aside)


def _set_aside(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def collect_if_due() -> None:
    """Collect among all objects if that was an hour ago or more; to be called only while no request waits."""
    global _last  # noqa: PLW0603 (as the collector, there is one for the process)
    now = time.monotonic()
    if now - _last < _EVERY_SECONDS:
        return
    _last = now
    gc.unfreeze()
    gc.collect()
