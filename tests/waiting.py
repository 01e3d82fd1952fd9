"""Waits for what happens in its own time, instead of sleeping for as long as it might take."""

import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import cast

import trio

from cloakfs.linux import Stat
from cloakfs.tree.locate import is_settled

_LOOK_SECONDS = 0.01


def wait_until(condition: Callable[[], object], seconds: float = 60, *, every: float = _LOOK_SECONDS) -> float:
    """Wait until a condition is met; return how many seconds that took.

    Args:
        condition: is called again and again; what it raises ends the wait.
        seconds: how long to wait at most.
        every: how many seconds after one call to make the next.

    Raises:
        AssertionError: the condition was not met in time; the message says which one.
    """
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, _late(condition, seconds)
        time.sleep(every)
    return time.monotonic() - start


def let_expire(seconds: float) -> None:
    """Let pass for how long the kernel keeps attributes or names: nothing can be asked whether it still does."""
    time.sleep(seconds)


def wait_until_settled(*paths: str | int) -> None:
    """Wait until any further change of these files would show in another ctime, so that the daemon relies on it."""
    wait_until(lambda: all(is_settled(cast(Stat, os.stat(path))) for path in paths))


async def wait_in_loop(condition: Callable[[], object], seconds: float = 60, *, every: float = 0.001) -> None:
    """Wait in a trio loop, by its clock, until a condition is met.

    Args:
        condition: is called again and again; what it raises ends the wait.
        seconds: how long to wait at most.
        every: how many seconds after one call to make the next; 0: as soon as other tasks had their turn.

    Raises:
        AssertionError: the condition was not met in time; the message says which one.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, _late(condition, seconds)
        await trio.sleep(every)


def _late(condition: Callable[[], object], seconds: float) -> str:
    return f"not within {seconds:g} s: {_text_of(condition)}"


def _text_of(condition: Callable[[], object]) -> str:
    """Return the source of a condition, which says what was waited for."""
    if isinstance(condition, functools.partial):
        return repr(condition)
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
