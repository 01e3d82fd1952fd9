"""Options that are being read, with the places to which a warning may refer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..cloak import CloakDef, CloakDefs
from ..mapping import RangeDef, RangeDefs
from .errors import Location
from .options import Options


@dataclass
class Draft:
    """Options that are being read.

    Attributes:
        options: what was read so far of all options but the following; these have their defaults in it.
        root_squash: whether root is squashed, unless all callers are.
        all_squash: whether all callers are squashed.
        range_map: its definitions, and where each one is.
        cloak_list: its definitions, and where each one is.
        other: the remaining options by family, in the order in which they were given last: name and value.
        places: where the squash options, and the values of `exempt`, `probe_delay` and `refer`, are, by name.
    """

    options: Options = field(default_factory=Options)
    root_squash: bool = True
    all_squash: bool = False
    range_map: list[tuple[RangeDef, Location]] = field(default_factory=list)
    cloak_list: list[tuple[CloakDef, Location]] = field(default_factory=list)
    other: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    places: dict[str, Location] = field(default_factory=dict)

    def copy(self) -> Draft:
        """Return a copy that can be changed independently."""
        return replace(self, other=dict(self.other), places=dict(self.places))

    def finish(self) -> Options:
        """Return the options."""
        return replace(
            self.options,
            # all_squash overrides no_root_squash, as in the kernel's server.
            squash="all" if self.all_squash else "root" if self.root_squash else "none",
            range_map=RangeDefs(definition for definition, _ in self.range_map),
            cloak_list=CloakDefs(definition for definition, _ in self.cloak_list),
            other=tuple(self.other.values()),
        )
