"""Options that are being read, with the places to which a warning may refer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cloak import CloakDef, CloakDefs
from ..identity import ServerId
from ..mapping import RangeDef, RangeDefs
from ..prefetch import Limits
from .errors import Location
from .options import Options


@dataclass
class Draft:
    """Options that are being read.

    Attributes:
        options: what was read of those whose value is all there is to know; the others have their defaults.
        root_squash: whether root is squashed, unless all callers are.
        all_squash: whether all callers are squashed.
        range_map: its definitions, and where each one is.
        cloak_list: the same.
        exempt: its uids, and where each one is.
        limits: the limits of reading ahead that were given.
        probe_delay_at: where `probe_delay` is.
        other: the remaining options by family, in the order in which they were given last: name and value.
        squash_options: where each option about squashing is.
        refer_at: where `refer` is.
    """

    options: Options = field(default_factory=Options)
    root_squash: bool = True
    all_squash: bool = False
    range_map: list[tuple[RangeDef, Location]] = field(default_factory=list)
    cloak_list: list[tuple[CloakDef, Location]] = field(default_factory=list)
    exempt: list[tuple[ServerId, Location]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    probe_delay_at: Location | None = None
    other: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    squash_options: dict[str, Location] = field(default_factory=dict)
    refer_at: Location | None = None

    def copy(self) -> Draft:
        """Return a copy that can be changed independently."""
        return replace(self, limits=dict(self.limits), other=dict(self.other), squash_options=dict(self.squash_options))

    def finish(self) -> Options:
        """Return the options."""
        return replace(
            self.options,
            # all_squash overrides no_root_squash, as in the kernel's server.
            squash="all" if self.all_squash else "root" if self.root_squash else "none",
            range_map=RangeDefs(definition for definition, _ in self.range_map),
            cloak_list=CloakDefs(definition for definition, _ in self.cloak_list),
            exempt=tuple(uid for uid, _ in self.exempt),
            prefetch_limits=Limits(**self.limits),
            other=tuple(self.other.values()),
        )
