"""To whom an object was shown last, where callers are shown different owners and the kernel checks by them.

The kernel keeps one owner for each object: the one in the last answer. Before it checks a caller, it asks as that
caller. If an answer to somebody else came in between, the check would go by that one. So requests that are no caller's
(of this daemon to its own mount, `recall`; of the kernel for itself, `reconnect`) get the owner that the kernel has
already. No caller is shown anything by it, and nothing is decided by it but what the kernel would have decided without
the request.
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
        """Return the owner and group to answer with.

        Args:
            nodeid: of the object.
            caller: for whom the kernel checks permissions; None if the request is no caller's.
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
