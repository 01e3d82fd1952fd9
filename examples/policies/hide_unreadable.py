"""Hide what a caller cannot read, as Samba's "hide unreadable" does.

policy=hide_unreadable.py:HideUnreadable
"""

import stat

from cloakfs.plugin import Attrs, Caller, Policy

READ, SEARCH = 4, 1


class HideUnreadable(Policy):
    """The export's own range_map and cloak_list, and whatever is neither readable nor one's own is hidden.

    The kernel is asked, so that ACLs count. Unlike Samba, a directory stays visible to those who may only pass
    through it: such as /home with mode 0711.
    """

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """See Policy.visible."""
        usable = (
            caller.uid == attrs.uid
            or attrs.accessible(caller, READ)
            or (stat.S_ISDIR(attrs.mode) and attrs.accessible(caller, SEARCH))
        )
        return usable and super().visible(caller, attrs)
