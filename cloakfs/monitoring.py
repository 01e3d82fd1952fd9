"""What a mount counts while it answers requests, and the last events that its administrator may want to know.

The counters are plain integers, because each request pays for them.
"""

from collections import Counter, defaultdict, deque
from typing import Any

BITS = 64
"""Durations in nanoseconds have fewer bits: 64 of them are 584 years."""

SUM = BITS
"""The index of the sum among the durations of an operation."""


def _no_durations() -> list[int]:
    return [0] * (BITS + 1)


class Counters:
    """The counters of one mount, which only ever rise.

    Attributes:
        durations: how long answers took, by operation: how many nanoseconds of 0, 1, 2… bits there were, and `SUM`.
            `answers` adds to both without a call, which would take as long again.
        errors: answers with an error, by operation and error number.
        names: replies about names, absent ones included, [that the kernel may not cache, that it may cache].
        attributes: the same for attributes.
        hidden_names: names that were reported as absent because the caller must not know what they lead to.
        hidden_handles: handles that were reported as stale for the same reason.
        hidden_entries: entries that were left out of listings for the same reason.
    """

    __slots__ = ("attributes", "durations", "errors", "hidden_entries", "hidden_handles", "hidden_names", "names")

    def __init__(self) -> None:
        self.durations: defaultdict[str, list[int]] = defaultdict(_no_durations)
        self.errors: Counter[tuple[str, int]] = Counter()
        self.names = [0, 0]
        self.attributes = [0, 0]
        self.hidden_names = self.hidden_handles = self.hidden_entries = 0

    def plain(self) -> dict[str, Any]:
        """Return all of them, ready for JSON.

        "durations" has, for each operation, the sum in nanoseconds and how many durations have how many bits (in
        pairs); "errors" has an operation, a number and a count each.
        """
        return {
            "durations": {
                operation: [row[SUM], [[bits, count] for bits, count in enumerate(row[:SUM]) if count]]
                for operation, row in self.durations.items()
            },
            "errors": [[operation, code, count] for (operation, code), count in self.errors.items()],
            "names": list(self.names),
            "attributes": list(self.attributes),
            "hidden": {"name": self.hidden_names, "handle": self.hidden_handles, "listing": self.hidden_entries},
        }


Event = dict[str, Any]

MAX_EVENTS = 1000
"""How many events are stored. Clients can cause any number of them."""


class Events:
    """The events of one mount, numbered from 1 since the mount began; only the last ones are stored."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._last = 0

    def add(self, event: Event) -> None:
        """Add an event (values for JSON)."""
        self._last += 1
        self._events.append({"number": self._last, **event})

    def after(self, number: int) -> list[Event]:
        """Return the events with larger numbers that are still stored, in order."""
        newer = min(self._last - number, len(self._events))
        return [self._events[at] for at in range(len(self._events) - newer, len(self._events))]
