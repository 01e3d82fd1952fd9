"""The daemons of cloakfs mounts that lie over this one. (What they have of it is in `below`.)

A daemon does everything for its callers as its callers, and the mount below shows them, maps and squashes what it
would without anybody in between. But to find its way, a daemon also has to see what a caller does not: whether a name
is taken by something hidden, or where an object is now. So it tells the daemon below that it lies over it, and is let
in: when it acts as `INSIDE`, it sees all there is, and attributes it is told whoever it acts as. In return it shows
nobody anything before it has asked, as that caller, whether the mount below shows it, too.
"""

import contextlib
import os
from collections.abc import Iterator

from . import linux
from .ids import ClientId, ServerId
from .linux import process
from .mapping import MAX_ID

INSIDE = linux.Credentials(ServerId(0), ServerId(MAX_ID), ())
"""As whom a daemon above acts when it acts for nobody; a caller of such ids is not served by it."""

_IDS_BELOW = ClientId(INSIDE.uid), ClientId(INSIDE.gid)  # to the mount below, who acts is a client

QUESTION = "security.cloakfs"
"""An extended attribute of whatever its reader may see: `UID GID`, as what the reader makes here would be shown.

(What begins otherwise, the kernel answers without asking, or not to everybody: xattr(7).)
"""


class Above:
    """Who is let in."""

    def __init__(self) -> None:
        self._threads: set[int] = set()  # as from `process.open_threads`

    @contextlib.contextmanager
    def let_in(self, pid: int) -> Iterator[None]:
        """This process is one of them.

        Raises:
            OSError: it has ended.
        """
        fd = process.open_threads(pid)
        self._threads.add(fd)
        try:
            yield
        finally:
            self._threads.remove(fd)
            os.close(fd)

    def asks(self, uid: ClientId, gid: ClientId, tid: int, *, for_attributes: bool) -> bool:
        """Is this a request that one of them makes for itself?"""
        if not self._threads or not (for_attributes or (uid, gid) == _IDS_BELOW):
            return False
        return any(process.has_thread(threads, tid) for threads in self._threads)
