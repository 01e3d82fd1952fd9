"""The daemons of cloakfs mounts that lie over this one. (Their side of this is in `below`.)

A daemon does everything for its callers with their credentials, so the mount below shows, maps and squashes for them
as it would without a daemon in between. But to find its way, a daemon also has to see what a caller does not: whether a
name is taken by something hidden, or where an object is now. So it tells the daemon below that it lies over that mount,
and is let in: when it acts as `INSIDE`, it sees everything, and it gets attributes whatever credentials it uses. In
return it shows nobody anything before it has asked, as that caller, whether the mount below shows it, too.
"""

import contextlib
import os
from collections.abc import Iterator

from .. import linux
from ..identity import ClientId, ServerId
from ..linux import process
from ..mapping import MAX_ID

INSIDE = linux.Credentials(ServerId(0), ServerId(MAX_ID), ())
"""The credentials with which a daemon above acts on its own behalf; it does not serve a caller with these ids."""

_IDS_BELOW = ClientId(INSIDE.uid), ClientId(INSIDE.gid)  # to the mount below, the daemon above is a client

QUESTION = "security.cloakfs"
"""An extended attribute of every object that its reader may see. Its value is `UID GID`, the owner and group with which
a file that the reader made here would be shown.

(With another prefix, the kernel would answer without asking the daemon, or not answer everybody: xattr(7).)
"""


class Above:
    """The daemons that are let in.

    Attributes:
        threads: a descriptor for each, from `process.open_threads`.
        pids: their process ids.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.pids: set[int] = set()

    @contextlib.contextmanager
    def let_in(self, pid: int) -> Iterator[None]:
        """Let this process in, until the context ends.

        Raises:
            OSError: the process has ended.
        """
        fd = process.open_threads(pid)
        self.threads.add(fd)
        self.pids.add(pid)
        try:
            yield
        finally:
            self.threads.remove(fd)
            self.pids.discard(pid)
            os.close(fd)

    def asks(self, uid: ClientId, gid: ClientId, tid: int, *, for_attributes: bool) -> bool:
        """Whether this is a request that one of these daemons makes on its own behalf."""
        if not for_attributes and (uid, gid) != _IDS_BELOW:
            return False
        return any(process.has_thread(threads, tid) for threads in self.threads)
