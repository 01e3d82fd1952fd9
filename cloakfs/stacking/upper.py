"""The daemons of upper mounts: cloakfs mounts whose source lies in this one. (`lower` is their side of it.)

The daemon of an upper mount makes all system calls for its callers with their credentials, so the lower mount shows,
maps and squashes for them as it would without a daemon in between. But an upper daemon also has to see what a caller
does not: whether a name is taken by something hidden, or where an object is now. So it reports itself to the lower
daemon, and is admitted: with the credentials `UPPER` it sees all objects, and it gets attributes with any credentials.
In return it shows no caller anything before it has queried, as that caller, whether the lower mount shows it, too.
"""

import contextlib
import os
from collections.abc import Iterator

from .. import linux
from ..identity import ClientId, ServerId
from ..linux import process
from ..mapping import MAX_ID

UPPER = linux.Credentials(ServerId(0), ServerId(MAX_ID), ())
"""The credentials with which an upper daemon acts on its own behalf; it does not serve a caller with these ids."""

_CLIENT_IDS = ClientId(UPPER.uid), ClientId(UPPER.gid)  # to the lower mount, the upper daemon is a client

QUERY_XATTR = "security.cloakfs"
"""An extended attribute of every object that its reader may see. Its value is `UID GID`, the owner and group with which
a file that the reader made here would be shown.

(With another prefix, the kernel would answer without the daemon, or refuse some callers: xattr(7).)
"""


class UpperDaemons:
    """The daemons of upper mounts that were admitted.

    Attributes:
        threads: a descriptor for each, from `process.open_threads`.
        pids: their process ids.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.pids: set[int] = set()

    @contextlib.contextmanager
    def admit(self, pid: int) -> Iterator[None]:
        """Admit the daemon with this process id, until the context ends.

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

    def is_request_of(self, uid: ClientId, gid: ClientId, tid: int, *, for_attributes: bool) -> bool:
        """Whether this is a request that one of these daemons makes on its own behalf."""
        if not for_attributes and (uid, gid) != _CLIENT_IDS:
            return False
        return any(process.has_thread(threads, tid) for threads in self.threads)
