"""Waits for the end of processes that are not children of this one, and ends them, without blocking."""

import contextlib
import math
import os
import signal
from collections.abc import Iterable

import trio

from ..linux import process


async def wait_for_end(pid: int) -> None:
    """Return when the process has ended; at once if there is none.

    Raises:
        OSError: the process cannot be waited for, and may still live.
    """
    await end(pid, ((0, math.inf),))


async def end(pid: int, steps: Iterable[tuple[int, float]]) -> None:
    """Send a process one signal after another until it ends.

    Args:
        pid: the pid of the process, which need not exist (any more).
        steps: signals (0: none), each with the seconds to wait for the end after it.

    Raises:
        OSError: the process cannot be waited for, and may still live.
    """
    held = process.held(pid)
    if held is None:
        return
    try:
        for number, seconds in steps:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, number)
            with trio.move_on_after(seconds):
                await trio.lowlevel.wait_readable(held)
                return
    finally:
        os.close(held)
