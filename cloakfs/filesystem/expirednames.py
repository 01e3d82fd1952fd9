"""The files whose names a listing has to renew, because the kernel's NFS server has used their handles.

The kernel finds what a handle refers to without any name, and then lets the name that it knows expire
(fuse_get_dentry in fs/fuse/inode.c). A listing that gives that name alone, without attributes, leaves it so. The next
NFS client that looks at the file costs a LOOKUP, for each file of a directory.
"""

from pyfuse3 import InodeT

MOST = 20_000
"""How many are noted; if there are more, those that were noted first are left to a LOOKUP."""


class ExpiredNames:
    """Notes them.

    Attributes:
        nodeids: of the files, in the order in which they were noted.
    """

    def __init__(self) -> None:
        self.nodeids: dict[InodeT, None] = {}

    def used_by_handle(self, nodeid: InodeT) -> None:
        """Note that the server has a request for this file, for which it needs no name."""
        if nodeid not in self.nodeids:
            if len(self.nodeids) >= MOST:
                del self.nodeids[next(iter(self.nodeids))]
            self.nodeids[nodeid] = None

    def renewed(self, nodeid: InodeT) -> None:
        """Note that the kernel has got the name with attributes."""
        self.nodeids.pop(nodeid, None)
