"""Those who trace the requests of a mount, and the records (`tracerecords`) that each has not fetched yet."""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator

import trio

from ..messages import UserError
from ..tracerecords import Record, Wanted


class TooManyTracers(UserError):
    """As many as possible trace the mount already; the text is one line that says so."""


MOST_TRACERS = 8
"""How many may trace one mount at a time."""

# An idle tracer gets an empty answer after this time, so that the daemon notices if the tracer has gone.
_IDLE_SECONDS = 0.5
# Records are handed over in batches: a tracer that fetched each one by itself would keep the loop busy.
_BATCH_SECONDS = 0.01


class Tracer:
    """The records that one tracer has not fetched yet. Their number is bounded, so that it may be as slow as it likes.

    Args:
        wanted: which records it wants.
        most: how many bytes of records are kept until they are fetched; further records are dropped and counted.
    """

    def __init__(self, wanted: Wanted, most: int) -> None:
        self.wanted = wanted
        self._most = most
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._news = trio.Event()

    def put(self, record: bytes) -> None:
        """Add a record (JSON), or drop it if there is no room."""
        if self._bytes + len(record) > self._most:
            self._dropped += 1
            return
        self._records.append(record)
        self._bytes += len(record)
        self._news.set()

    async def fetch(self) -> bytes:
        """Wait for records; return `{"records": […], "dropped": COUNT}`: what was dropped came after these records."""
        with trio.move_on_after(_IDLE_SECONDS):
            await self._news.wait()
            await trio.sleep(_BATCH_SECONDS)
        answer = b'{"records": [%s], "dropped": %d}' % (b", ".join(self._records), self._dropped)
        self._records.clear()
        self._bytes = self._dropped = 0
        self._news = trio.Event()
        return answer


class Tracers:
    """All who trace one mount.

    Args:
        switch: called with True before the first one begins, and with False after the last one has ended.
        most_bytes: how many bytes of records are kept for each until they are fetched.
    """

    def __init__(self, switch: Callable[[bool], None], most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._switch = switch
        self._tracers: set[Tracer] = set()

    @contextlib.contextmanager
    def attach(self, wanted: Wanted) -> Iterator[Tracer]:
        """Add a tracer, until the context ends.

        Raises:
            TooManyTracers: too many do already.
        """
        if len(self._tracers) >= MOST_TRACERS:
            raise TooManyTracers(f"{MOST_TRACERS} others trace this mount already")
        tracer = Tracer(wanted, self._most_bytes)
        if not self._tracers:
            self._switch(True)
        self._tracers.add(tracer)
        try:
            yield tracer
        finally:
            self._tracers.remove(tracer)
            if not self._tracers:
                self._switch(False)

    def publish(self, record: Record) -> None:
        """Hand a record to all tracers that want it."""
        text = None
        for tracer in self._tracers:
            if tracer.wanted.includes(record):
                text = text or json.dumps(record).encode()
                tracer.put(text)
