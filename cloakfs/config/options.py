"""The content of an entry of exports.d: typed values, with the defaults of exports(5)."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any

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


class Hides(Enum):
    """By what an option decides that an object is hidden from a caller, once the option is given."""

    NOTHING = "nothing"
    IDS_AND_MODE = "mode, owner and group of the object, and the ids of the caller"
    MORE = "anything else of an object or a caller, such as the name"
    PLUG_IN = "what a plug-in says, if it has methods for it"


def option(default: Any, *, hides: Hides, reloads: bool) -> Any:
    """Return a field of `Options`, with what the rest of cloakfs has to know of it.

    Args:
        default: the value that means that the option is not given; a class is called to get it.
        hides: by what it decides that an object is hidden. `Options.hides` and the like are derived from this.
        reloads: whether a running daemon applies another value on a reload; otherwise it takes a new mount.
    """
    metadata = {"hides": hides, "reloads": reloads}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


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

    read_only: bool = option(True, hides=Hides.NOTHING, reloads=False)
    squash: Squash = option("root", hides=Hides.NOTHING, reloads=True)
    anonuid: ServerId = option(DEFAULT_NOBODY, hides=Hides.NOTHING, reloads=True)
    anongid: ServerId = option(DEFAULT_NOBODY, hides=Hides.NOTHING, reloads=True)
    range_map: Sequence[RangeDef] = option((), hides=Hides.NOTHING, reloads=True)
    cloak_list: Sequence[CloakDef] = option((), hides=Hides.IDS_AND_MODE, reloads=True)
    exempt: tuple[ServerId, ...] = option((), hides=Hides.NOTHING, reloads=True)
    no_client_cache: bool = option(False, hides=Hides.NOTHING, reloads=False)
    groups: str | None = option(None, hides=Hides.NOTHING, reloads=False)
    policy: str | None = option(None, hides=Hides.PLUG_IN, reloads=True)
    views: tuple[ViewItem, ...] = option((), hides=Hides.NOTHING, reloads=False)
    view_access: tuple[ClientId, ...] = option((), hides=Hides.NOTHING, reloads=False)
    prefetch: str = option(DEFAULT_PREFETCH, hides=Hides.NOTHING, reloads=True)
    prefetch_limits: Limits = option(Limits, hides=Hides.NOTHING, reloads=True)
    probe_alarm: Rate | None = option(DEFAULT_ALARM, hides=Hides.NOTHING, reloads=True)
    probe_delay: int = option(0, hides=Hides.NOTHING, reloads=True)
    other: tuple[tuple[str, str | None], ...] = option((), hides=Hides.NOTHING, reloads=True)

    def hiding(self, *by: Hides) -> list[str]:
        """Return the names of the options that are given and hide objects in one of these ways."""
        return [
            it.name
            for it in fields(self)
            if it.metadata["hides"] in by
            and getattr(self, it.name) != (it.default if it.default_factory is MISSING else it.default_factory())
        ]

    @property
    def hides(self) -> bool:
        """Whether an option hides anything from any caller. What a plug-in does, only its `Policy` knows."""
        return bool(self.hiding(Hides.IDS_AND_MODE, Hides.MORE))

    @property
    def may_hide(self) -> bool:
        """Whether anything may be hidden from any caller, by an option or by a plug-in; True when in doubt."""
        return self.hides or self.has_plugin

    @property
    def by_ids_and_mode(self) -> bool:
        """Whether ids and modes alone decide who sees what, by `cloak_list` and `exempt`; False when in doubt."""
        return not self.hiding(Hides.MORE, Hides.PLUG_IN)

    @property
    def has_plugin(self) -> bool:
        """Whether a plug-in may decide anything. Which of its methods are its own, only its `Policy` knows."""
        return self.policy is not None

    def condition(self, source: str) -> str | None:
        """Return where something must be mounted for this to be served (`mp`: on `source`, the tree itself).

        Otherwise the directory below an unmounted disk would be. It is None if there is no such option.
        """
        given = [value for name, value in self.other if name in CONDITIONS]
        return (given[0] or source) if given else None


RELOADABLE = tuple(it.name for it in fields(Options) if it.metadata["reloads"])
"""The fields that a daemon applies on a reload; a change of any other one needs a new mount."""


@dataclass(frozen=True, slots=True)
class Export:
    """One directory exported to one client specification; location is the place where the client is named."""

    path: str
    client: str
    options: Options
    location: Location = field(compare=False)
