"""Whom an object was last shown to, where callers are shown different owners and the kernel checks by them.

The kernel keeps one owner for each object: the one in the last answer. It asks before each check, as the caller. An
answer to somebody else that comes in between would decide about that caller. So what this daemon asks of its own mount
(`recall`), and what the kernel asks for itself (`reconnect`), is answered with what the kernel was told last.
"""

from collections import OrderedDict

from .. import linux
from ..identity import ClientId
from ..view import KernelCheckedCaller

_MOST = 10_000
"""For how many objects this is known: callers choose which they look at."""


class LastShown:
    """The callers to whom objects, by nodeid, were last shown with other ids than those of the mapping."""

    def __init__(self) -> None:
        self.callers: OrderedDict[int, KernelCheckedCaller] = OrderedDict()

    def ids(
        self, nodeid: int, caller: KernelCheckedCaller | None, info: linux.Stat, mapped: tuple[ClientId, ClientId]
    ) -> tuple[ClientId, ClientId]:
        """Return the owner and group to show to `caller`; None is whoever must not change what the kernel knows.

        Args:
            nodeid: of the object.
            caller: for whom the kernel checks permissions.
            info: the attributes of the real object.
            mapped: what the mapping alone would show.
        """
        if caller is None:
            caller = self.callers.get(nodeid)
            return mapped if caller is None else caller.recognise(info.st_uid, info.st_gid, *mapped)
        ids = caller.recognise(info.st_uid, info.st_gid, *mapped)
        if ids == mapped:
            self.callers.pop(nodeid, None)
        else:
            self.callers[nodeid] = caller
            self.callers.move_to_end(nodeid)
            if len(self.callers) > _MOST:
                self.callers.popitem(last=False)
        return ids
