"""Probing: counts each caller's requests for what is hidden from it, and raises an alarm above a rate.

A *probe* is a name that a caller looks up although it is hidden from it, or a file handle that no caller
ever got. The same name counts once in a period: programs look a name up again and again, and a guesser learns nothing
by that. This module does not read the clock.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from .identity import ClientId

MOST_IDENTITIES = 1024
"""How many identities are counted at most. Clients choose their uids, so the quietest make room for others."""

MOST_NAMES = 65_536
"""How many names are held at most, of all identities together."""

_PERIODS = {"s": 1, "min": 60, "h": 3600}
_RATE = re.compile(rf"([1-9][0-9]{{0,3}})/({'|'.join(_PERIODS)})")

Kind = Literal["lookups", "creations", "handles"]
"""Hidden names that were looked up; attempts to make something of such a name; handles that never existed."""


class Rate(NamedTuple):
    """How many probes of one identity (`most`) within `seconds` (a second, a minute or an hour) are no alarm."""

    most: int
    seconds: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the rate with this text, such as `60/min`; None if the text is no rate (1 to 9999 per s, min or h)."""
        match = _RATE.fullmatch(text)
        return cls(int(match[1]), _PERIODS[match[2]]) if match else None

    def __str__(self) -> str:
        return f"{self.most}/{next(word for word, seconds in _PERIODS.items() if seconds == self.seconds)}"


DEFAULT_ALARM = Rate(60, 60)


class Identity(NamedTuple):
    """Who makes requests: the client uid, None if that is unknown, and the number of the view."""

    uid: ClientId | None
    view: int


class Alarm(NamedTuple):
    """An identity has exceeded the rate.

    Attributes:
        who: the identity.
        rate: the rate that it exceeded.
        counts: its probes in this period so far, by kind; a name that it repeats counts each time.
    """

    who: Identity
    rate: Rate
    counts: dict[Kind, int]


@dataclass(slots=True)
class _Period:
    """The probes of one identity in a period, which begins with its first probe.

    Attributes:
        until: when the period ends.
        names: the probes; none once there were too many.
        is_over: whether there were too many.
        counts: the number of probes by kind; a name that is repeated counts each time.
    """

    until: float
    names: set[int] = field(default_factory=set)
    is_over: bool = False
    counts: Counter[Kind] = field(default_factory=Counter)


@dataclass(slots=True)
class _Slow:
    """An identity above the rate: until when it is slowed down, the name last answered about, and when that was."""

    until: float
    answered: int = 0
    at: float = -math.inf


class Probes:
    """Counts the probes of all callers of a mount.

    Args:
        rate: what is no alarm; None turns everything off.

    Attributes:
        rate: the rate in force.
        counts: the number of probes since the mount began, by kind, and of `alarms`, of identities `evicted`, of
            probes `dropped` uncounted, and of lookups `refused`, hidden or not (`may_answer`).
    """

    def __init__(self, rate: Rate | None = DEFAULT_ALARM) -> None:
        self.rate = rate
        self.counts: Counter[str] = Counter()
        self._periods: dict[Identity, _Period] = {}
        self._names = 0
        self._slow: dict[Identity, _Slow] = {}  # who exceeded the rate last comes last

    def use(self, rate: Rate | None) -> None:
        """Apply another rate from now on; what was counted so far does not count."""
        if rate != self.rate:
            self.rate = rate
            self._periods.clear()
            self._slow.clear()
            self._names = 0

    def count(self, who: Identity, kind: Kind, what: Hashable, now: float, times: int = 1) -> Alarm | None:
        """Count so many probes of `what` by `who`; return an alarm if that exceeds the rate, once in a period.

        Something made counts only if its name was looked up before, and was hidden, in the same period.

        Args:
            who: the identity.
            kind: the kind of the probes.
            what: the directory and the name, or the handle.
            now: the time, in seconds.
            times: how many times.
        """
        rate = self.rate
        if rate is None:
            return None
        period = self._periods.get(who)
        if period is not None and now >= period.until:
            self._drop(who)
            period = None
        name = hash(what)
        if kind == "creations" and (period is None or not (period.is_over or name in period.names)):
            return None
        if period is None:
            self._make_room(now)
            period = self._periods[who] = _Period(now + rate.seconds)
        self.counts[kind] += times
        period.counts[kind] += times
        if period.is_over or name in period.names:
            return None
        period.names.add(name)
        self._names += 1
        if len(period.names) <= rate.most:
            return None
        self._names -= len(period.names)
        period.names.clear()
        period.is_over = True
        self.counts["alarms"] += 1
        # This ends at a time that no further probe changes: otherwise, it would show which ones those are.
        self._slow.pop(who, None)
        self._slow[who] = _Slow(now + rate.seconds)
        return Alarm(who, rate, dict(period.counts))

    def may_answer(self, who: Identity, what: Hashable, now: float, pause: float) -> bool:
        """Whether to answer `who` that a name is absent. Above the rate, it gets one such answer per pause, for a
        period.

        The kernel may send two LOOKUPs of a name for one system call: if it has a dentry, which is refused to this
        caller, it looks the name up anew. To refuse only that would show that the name exists.

        Args:
            who: the identity.
            what: the directory and the name.
            now: the time, in seconds.
            pause: how long it lasts, in seconds.
        """
        slow = self._slow.get(who)
        if slow is None or now >= slow.until:
            return True
        name = hash(what)
        if now < slow.at + pause:
            return name == slow.answered
        slow.answered, slow.at = name, now
        return True

    def _drop(self, who: Identity) -> None:
        self._names -= len(self._periods.pop(who).names)

    def _make_room(self, now: float) -> None:
        """Drop the quietest half if there are too many identities or names, those whose period has ended first."""
        if len(self._slow) >= MOST_IDENTITIES:
            self._slow = dict(list(self._slow.items())[MOST_IDENTITIES // 2 :])
        if len(self._periods) < MOST_IDENTITIES and self._names < MOST_NAMES:
            return

        def loudness(who: Identity) -> tuple[bool, bool, int]:
            period = self._periods[who]
            return now < period.until, period.is_over, len(period.names)

        loudest = sorted(self._periods, key=loudness, reverse=True)
        while len(self._periods) > MOST_IDENTITIES // 2 or self._names > MOST_NAMES // 2:
            who = loudest.pop()
            self.counts["evicted"] += now < self._periods[who].until
            self._drop(who)
