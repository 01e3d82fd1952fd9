"""Options that are being read, with the places to which a warning may refer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cloak import CloakDef, CloakDefs
from ..ids import ClientId, ServerId
from ..mapping import DEFAULT_NOBODY, RangeDef, RangeDefs
from ..prefetch import Limits
from ..probes import DEFAULT_ALARM, Rate
from .errors import Location
from .options import DEFAULT_PREFETCH, Options
from .views import ViewItem


@dataclass
class Draft:
    """Options that are being read."""

    read_only: bool = True
    root_squash: bool = True
    all_squash: bool = False
    ids: dict[str, ServerId] = field(default_factory=dict)
    range_map: list[tuple[RangeDef, Location]] = field(default_factory=list)
    cloak_list: list[tuple[CloakDef, Location]] = field(default_factory=list)
    exempt: list[tuple[ServerId, Location]] = field(default_factory=list)
    no_client_cache: bool = False
    groups: str | None = None
    policy: str | None = None
    views: tuple[ViewItem, ...] = ()
    view_access: tuple[ClientId, ...] = ()
    prefetch: str = DEFAULT_PREFETCH
    limits: dict[str, int] = field(default_factory=dict)
    probe_alarm: Rate | None = DEFAULT_ALARM
    probe_delay: int = 0
    probe_delay_at: Location | None = None
    other: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    squash_options: dict[str, Location] = field(default_factory=dict)
    refer_at: Location | None = None

    def copy(self) -> Draft:
        """Return a copy that can be changed independently."""
        return replace(
            self,
            ids=dict(self.ids),
            limits=dict(self.limits),
            other=dict(self.other),
            squash_options=dict(self.squash_options),
        )

    def finish(self) -> Options:
        """Return the options."""
        return Options(
            read_only=self.read_only,
            # all_squash overrides no_root_squash, as in the kernel's server.
            squash="all" if self.all_squash else "root" if self.root_squash else "none",
            anonuid=self.ids.get("anonuid", DEFAULT_NOBODY),
            anongid=self.ids.get("anongid", DEFAULT_NOBODY),
            range_map=RangeDefs(definition for definition, _ in self.range_map),
            cloak_list=CloakDefs(definition for definition, _ in self.cloak_list),
            exempt=tuple(uid for uid, _ in self.exempt),
            no_client_cache=self.no_client_cache,
            groups=self.groups,
            policy=self.policy,
            views=self.views,
            view_access=self.view_access,
            prefetch=self.prefetch,
            prefetch_limits=Limits(**self.limits),
            probe_alarm=self.probe_alarm,
            probe_delay=self.probe_delay,
            other=tuple(self.other.values()),
        )
