"""Show a project's files during office hours only.

policy=office_hours.py:OfficeHours
"""

import time

from cloakfs.plugin import Attrs, Caller

PROJECT = 1001
"""The project's gid on the server."""

DAYS = range(0, 5)  # Monday is 0
HOURS = range(8, 18)  # from 8:00 to 17:59, the server's local time


class OfficeHours:
    """Files of the project's group are hidden after hours, from all but their owners.

    The class need not derive from anything: ids are mapped by the range_map of the export all the same. But with
    `visible` it takes over all of the hiding, and a cloak_list is not heeded.
    """

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        """See cloakfs.policy.Policy.visible."""
        now = time.localtime()
        is_open = now.tm_wday in DAYS and now.tm_hour in HOURS
        return is_open or attrs.gid != PROJECT or caller.uid == attrs.uid
