"""Has the kernel's NFS server recall delegations of files that have changed behind the mount.

A client that holds an NFSv4 delegation of a file answers from its own cache, without asking (RFC 7530 §10.4). The
server has promised to tell it of changes, and learns of those that are made through the mount: a delegation is a lease
on the inode (fs/locks.c), which an open for writing breaks before it reaches the daemon. Of what changes behind the
mount the kernel knows nothing. So the daemon itself makes such an open, and refuses it if it arrives.
"""

import logging
import struct

import trio

from ..tree.nodes import Nodes
from ..tree.objects import Object
from .handles import OpenFiles
from .inside import Inside

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.1
"""How long to wait before the next files: some change all the time.

After a recall, knfsd grants no new delegation of the file for at least half a minute."""

# The type, the upper and the lower half of the nodeid, and the generation (fs/fuse/inode.c: fuse_encode_fh).
_FUSE_HANDLE = struct.Struct("=iIII")
_FILEID_FUSE_WITHOUT_PARENT = 0x81


def handle_of(nodeid: int, generation: int) -> bytes:
    """Return the file handle that the kernel gives an object, as `linux.name_to_handle` does."""
    return _FUSE_HANDLE.pack(_FILEID_FUSE_WITHOUT_PARENT, nodeid >> 32, nodeid & 0xFFFFFFFF, generation)


class Recalls:
    """Recalls delegations of files.

    Only a file that is open in the mount can have one, since the server keeps it open as long as there is a delegation.

    Args:
        nodes: the objects.
        files: knows which of them are open.
        inside: looks at the daemon's own mount.
    """

    def __init__(self, nodes: Nodes, files: OpenFiles, inside: Inside) -> None:
        self._nodes = nodes
        self._files = files
        self._inside = inside
        self._wanted: dict[Object, None] = {}
        self._is_wanted = trio.Event()
        self._has_failed = False

    def changed(self, obj: Object | None) -> None:
        """Have delegations of an object recalled soon; with None, those of all objects."""
        if obj is None:
            self._wanted.update((file.obj, None) for file in self._files.by_fd.values() if not file.is_directory)
        elif obj.open_files:
            self._wanted[obj] = None
        if self._wanted:
            self._is_wanted.set()

    async def keep_recalling(self) -> None:
        """Run for ever, doing that."""
        while True:
            await self._is_wanted.wait()
            wanted, self._wanted = self._wanted, {}
            self._is_wanted = trio.Event()
            handles = [handle for obj in wanted for handle in self._handles(obj)]
            if handles:
                try:
                    recalled = await trio.to_thread.run_sync(self._inside.recall, handles, abandon_on_cancel=True)
                    log.debug("%d of %d open files that have changed were delegated", recalled, len(handles))
                except OSError as exc:
                    self._cannot(exc)
                await trio.sleep(_PAUSE_SECONDS)

    def _cannot(self, exc: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "delegations cannot be recalled (%s), so that NFSv4 clients may go on with old content: turn "
                "delegations off (sysctl fs.leases-enable=0), or mount anew while they are on",
                exc.strerror,
            )

    def _handles(self, obj: Object) -> set[bytes]:
        """Return the handles of an object in the views in which it is open."""
        opened = (self._files.by_fd[fd] for fd in obj.open_files)
        nodeids = {self._nodes.nodeid(file.number, obj) for file in opened if not file.is_directory}
        return {handle_of(nodeid, self._nodes.generation(nodeid, obj)) for nodeid in nodeids}
