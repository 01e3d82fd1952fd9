"""Background tasks, none of which may end the process when it fails.

The machine may run out of descriptors, memory or threads (pids.max), or /proc may contain something unforeseen; a
daemon that serves others must go on nevertheless. Therefore, every task that runs beside the answering of requests is
started here and nowhere else (tests/unit/test_tasks.py checks this): its exceptions are logged in one line, and it is
started again.
"""

import logging
import os
import traceback
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import trio

from .backoff import backoff_seconds

log = logging.getLogger(__name__)

LONGEST_BACKOFF_SECONDS = 5.0
"""How long a task that fails again and again waits before it starts anew."""

# Of a task that ran for longer than this, earlier failures do not count.
_WELL_SECONDS = 30.0

# The same failure is logged again only after this time.
_LOG_AGAIN_SECONDS = 60.0

_P = ParamSpec("_P")


async def supervise(what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Run `work` until it returns, repeatedly if it fails; never raises anything but Cancelled.

    Args:
        what: the name of the task, for the log.
        work: the function to run; it must be possible to start it again.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    failures = 0
    logged: dict[str, float] = {}  # cause -> when
    while True:
        began = trio.current_time()
        try:
            await work(*args, **kwargs)
        except Exception as exc:
            now = trio.current_time()
            if now - began > _WELL_SECONDS:
                failures = 0
            why = cause(exc)
            if now >= logged.get(why, now):
                logged = {why: now + _LOG_AGAIN_SECONDS}
                log.error("%s failed and is started again: %s", what, why)  # noqa: TRY400  (one line)
        else:
            return
        await trio.sleep(backoff_seconds(failures, LONGEST_BACKOFF_SECONDS))
        failures += 1


async def attempt(what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Run `work` once, when it is not worth repeating; never raises anything but Cancelled."""
    try:
        await work(*args, **kwargs)
    except Exception as exc:
        log.error("%s failed: %s", what, cause(exc))  # noqa: TRY400  (one line)


class Tasks:
    """The background tasks that end with one nursery.

    Args:
        nursery: runs the tasks.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def supervise(self, what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Start a task that is started again whenever it fails."""

        async def run() -> None:
            await supervise(what, work, *args, **kwargs)

        self._nursery.start_soon(run, name=what)

    def once(self, what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Start a task that may fail, and is not repeated."""

        async def run() -> None:
            await attempt(what, work, *args, **kwargs)

        self._nursery.start_soon(run, name=what)


def cause(exc: BaseException) -> str:
    """Describe in one line what was raised, and where."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    # The source is not read: that takes a descriptor, and the thread still acts as the caller that was served last.
    frames = list(traceback.walk_tb(exc.__traceback__))
    where = f" ({os.path.basename(frames[-1][0].f_code.co_filename)}:{frames[-1][1]})" if frames else ""
    try:
        what = f"{type(exc).__name__}: {exc}"
    except Exception:
        what = type(exc).__name__
    return " ".join(what.split()) + where
