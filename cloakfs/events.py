"""What happened on a mount that its administrator may want to know: the last events, for `cloakfs events`."""

from collections import deque
from typing import Any

Event = dict[str, Any]

MOST_EVENTS = 1000
"""How many events are kept. Clients can cause any number of them."""


class Events:
    """The events of one mount, numbered from 1 since the mount began; only the last ones are kept."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._last = 0

    def tell(self, event: Event) -> None:
        """Add an event (values for JSON)."""
        self._last += 1
        self._kept.append({"number": self._last, **event})

    def after(self, number: int) -> list[Event]:
        """Return the events with larger numbers that are still kept, in order."""
        newer = min(self._last - number, len(self._kept))
        return [self._kept[at] for at in range(len(self._kept) - newer, len(self._kept))]
