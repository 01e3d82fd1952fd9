"""Hide files by their names: what matches a pattern is seen by one group and by owners only.

policy=name_pattern.py:NamePattern
"""

from fnmatch import fnmatchcase

from cloakfs.plugin import Attrs, Caller, Policy

GROUP_OF = {"*.key": 1001, "draft-*": 1002}
"""Pattern, as in fnmatch(3), and the gid on the server that sees such names."""


class NamePattern(Policy):
    """The export's own range_map and cloak_list, and a pattern more that hides."""

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """See Policy.visible."""
        permitted = caller.uid == attrs.uid or all(
            gid in caller.groups for pattern, gid in GROUP_OF.items() if fnmatchcase(attrs.name, pattern)
        )
        return permitted and super().visible(caller, attrs)
