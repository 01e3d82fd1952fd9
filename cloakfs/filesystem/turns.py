"""Requests that take long are answered in slices, and others are served in between.

Between two slices, all other tasks that wait get to run. The slices of one caller take turns: however many of its
requests take long, only one of them works each time that others have been served.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

SLICE_SECONDS = 0.001
"""How long a request may keep the session loop to itself."""


class Turns:
    """The turns of all callers whose requests take long."""

    def __init__(self) -> None:
        self._waiting: dict[int, trio.Lock] = {}  # by caller: whose turn it is
        self._alone: dict[int, trio.Lock] = {}  # by caller: which request needs much at a time

    @asynccontextmanager
    async def alone(self, caller: int) -> AsyncIterator[None]:
        """Wait until no other request of this caller is in here."""
        lock = self._alone.setdefault(caller, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._alone.pop(caller, None)

    async def wait_for_turn(self, caller: int) -> float:
        """Let others run, and wait for the caller's turn.

        Returns:
            when the next slice is over (`time.monotonic`).
        """
        turn = self._waiting.setdefault(caller, trio.Lock())
        try:
            async with turn:
                await trio.lowlevel.checkpoint()
        finally:
            if not turn.locked():
                self._waiting.pop(caller, None)
        return time.monotonic() + SLICE_SECONDS
