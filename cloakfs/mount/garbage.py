"""Keeps the garbage collector from looking at all known objects again and again, while everybody waits.

Python frees nearly everything by counting references. What refers to itself in a circle is found by a collector, which
stops the process and looks at everything that lives: 40 ms for 100,000 files that the kernel knows. Files are never in
such circles, so that what has survived a full collection is set aside, and the next one looks at newer objects alone.
Full collections are frequent, so that each looks at little: by default, one begins after 70,000 new objects at the
earliest, and everybody would wait some 20 ms for it. Circles that were set aside before they became garbage are found
when nobody waits.
"""

import gc
import math
import time

_EVERY_SECONDS = 3600.0

# gc.set_threshold: how many new objects make a collection of those alone, how many of these make one that looks at the
# survivors as well, and how many of those may come before a full one.
_OFTEN = (700, 5, 0)

_last = -math.inf


def spare_survivors() -> None:
    """Set aside what there is, and from now on what survives a full collection."""
    gc.set_threshold(*_OFTEN)
    gc.freeze()
    if _set_aside not in gc.callbacks:
        gc.callbacks.append(_set_aside)


def _set_aside(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def collect_now_and_then() -> None:
    """Look at everything, if that was long ago; to be called only when nobody waits."""
    global _last  # noqa: PLW0603 (as the collector, there is one for the process)
    now = time.monotonic()
    if now - _last < _EVERY_SECONDS:
        return
    _last = now
    gc.unfreeze()
    gc.collect()
