"""Requests that take long are answered in slices, and others are served in between.

Between two slices, everybody else who waits gets to run. The slices of one caller take turns: however many of its
requests take long, only one of them works each time that others have been served.
"""

import time

import trio

SLICE_SECONDS = 0.001
"""How long a request may keep the session loop to itself."""


class Turns:
    """The turns of all callers whose requests take long."""

    def __init__(self) -> None:
        self._waiting: dict[int, trio.Lock] = {}  # by caller: whose turn it is

    async def pause(self, caller: int) -> float:
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
