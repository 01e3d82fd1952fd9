"""Background tasks, none of which may end the process, whatever happens to it.

There may be no descriptor to be had, no memory, no thread (pids.max), or something in /proc that nobody thought of;
whoever serves others goes on all the same. So every task that runs beside the answering of requests is started here
and nowhere else (tests/unit/test_tasks.py sees to it): what it raises is logged in one line, and it begins anew.
"""

import logging
import os
import traceback
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import trio

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
"""How long a task that failed waits before it begins anew; twice as long after each further time."""

LONGEST_PAUSE_SECONDS = 5.0

# Who went on for so long before it failed again, is new at failing.
_WELL_SECONDS = 30.0

# A failure that was told is told again after so long.
_TELL_AGAIN_SECONDS = 60.0

_P = ParamSpec("_P")


async def keep(what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Do `work` until it returns, again and again if it fails; never raises anything but Cancelled.

    Args:
        what: the name of the task, for the log.
        work: has to be fit to begin anew.
        args: its arguments.
        kwargs: likewise.
    """
    pause = FIRST_PAUSE_SECONDS
    told: dict[str, float] = {}  # cause -> when
    while True:
        began = trio.current_time()
        try:
            await work(*args, **kwargs)
        except Exception as exc:
            now = trio.current_time()
            if now - began > _WELL_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            why = cause(exc)
            if now >= told.get(why, now):
                told = {why: now + _TELL_AGAIN_SECONDS}
                log.error("%s failed, and begins anew: %s", what, why)  # noqa: TRY400  (one line)
        else:
            return
        await trio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def attempt(what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Do `work` once, for what is not worth doing again; never raises anything but Cancelled."""
    try:
        await work(*args, **kwargs)
    except Exception as exc:
        log.error("%s failed: %s", what, cause(exc))  # noqa: TRY400  (one line)


class Tasks:
    """Those that end with one nursery.

    Args:
        nursery: where they run.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def keep(self, what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Start a task that `keep` keeps up."""

        async def run() -> None:
            await keep(what, work, *args, **kwargs)

        self._nursery.start_soon(run, name=what)

    def once(self, what: str, work: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Start a task that may fail."""

        async def run() -> None:
            await attempt(what, work, *args, **kwargs)

        self._nursery.start_soon(run, name=what)


def cause(exc: BaseException) -> str:
    """What was raised where, in one line."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    # The source is not looked at: it takes a descriptor, and the thread acts as whoever was served last.
    frames = list(traceback.walk_tb(exc.__traceback__))
    where = f" ({os.path.basename(frames[-1][0].f_code.co_filename)}:{frames[-1][1]})" if frames else ""
    try:
        what = f"{type(exc).__name__}: {exc}"
    except Exception:
        what = type(exc).__name__
    return " ".join(what.split()) + where
