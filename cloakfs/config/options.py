"""The content of an entry of exports.d: typed values, with the defaults of exports(5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cloak import CloakDef
from ..identity import ClientId, ServerId
from ..mapping import DEFAULT_NOBODY, RangeDef, Squash
from ..prefetch import Limits
from ..probes import DEFAULT_ALARM, Rate
from .errors import Location
from .viewitems import ViewItem

DEFAULT_PREFETCH = "cursors"

CONDITIONS = frozenset({"mountpoint", "mp"})
"""Options with which an entry is served only while something is mounted at a place."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one export; the defaults are those of exports(5).

    anonuid and anongid are the server ids of "nobody" in this export. exempt holds the server uids from
    which cloak_list hides nothing. groups says where a caller's supplementary groups come from (``proc``,
    ``database``, ``none`` or gids joined by colons; None if it is not given). policy names a plug-in
    (``FILE.py:Class`` or ``package.module:Class``), views the identities that get a fixed view, and
    view_access the client uids that may enter any of them. prefetch is the name of a heuristic, or ``off``,
    and prefetch_limits are its limits. probe_alarm is the rate of probes above which a caller is reported, None
    for ``off``, and probe_delay is how many milliseconds a reported caller then waits for each "no such file"
    (0 for ``off``). other holds the remaining options of exports(5) in the order given,
    with their values.
    """

    read_only: bool = True
    squash: Squash = "root"
    anonuid: ServerId = DEFAULT_NOBODY
    anongid: ServerId = DEFAULT_NOBODY
    range_map: Sequence[RangeDef] = ()
    cloak_list: Sequence[CloakDef] = ()
    exempt: tuple[ServerId, ...] = ()
    no_client_cache: bool = False
    groups: str | None = None
    policy: str | None = None
    views: tuple[ViewItem, ...] = ()
    view_access: tuple[ClientId, ...] = ()
    prefetch: str = DEFAULT_PREFETCH
    prefetch_limits: Limits = field(default_factory=Limits)
    probe_alarm: Rate | None = DEFAULT_ALARM
    probe_delay: int = 0
    other: tuple[tuple[str, str | None], ...] = ()

    def condition(self, source: str) -> str | None:
        """Return where something must be mounted for this to be served (`mp`: on `source`, the tree itself).

        Otherwise the directory below an unmounted disk would be. It is None if there is no such option.
        """
        given = [value for name, value in self.other if name in CONDITIONS]
        return (given[0] or source) if given else None


@dataclass(frozen=True, slots=True)
class Export:
    """One directory exported to one client specification; location is the place where the client is named."""

    path: str
    client: str
    options: Options
    location: Location = field(compare=False)
