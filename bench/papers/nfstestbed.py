"""The testbed behind the kernel's NFS server and client, in the laboratory's guest."""

import contextlib
import os
from collections.abc import Iterator

from ..lab.delayeddisk import delayed_disk
from ..lab.nfsexports import NfsExports
from ..peers import unmount
from .configurations import BARE, BINDFS
from .experiment import Unavailable
from .testbed import VERSIONS, Testbed, image, new_tree

_BASE = "/papers"


class Nfs:
    """The server, which has to run, exports the tree itself or cloakfs over it; the client mounts for each run."""

    def __init__(self, tree: str, exports: NfsExports) -> None:
        self.tree = tree
        self._exports = exports

    @contextlib.contextmanager
    def serve(self, options: str) -> Iterator[str]:
        """Serve the tree, or the tree itself (BARE); there is no bindfs here."""
        if options == BINDFS:
            raise Unavailable("the kernel's server needs an fsid of bindfs")
        with self._exports.serve(self.tree, [None if options == BARE else options]) as (served,):
            yield served

    def reach(self, served: str, setting: str) -> contextlib.AbstractContextManager[str]:
        """Mount it by the NFS version that the setting names."""
        return self._exports.reach(served, VERSIONS[setting])


@contextlib.contextmanager
def nfs(mib: int, microseconds: int = 0) -> Iterator[Testbed]:
    """Make a tree behind the server, which has to run. The guest's end may save the removing.

    Args:
        mib: how large the file system is.
        microseconds: how long its disk takes for each command; 0: it is a file in memory.
    """
    os.makedirs(_BASE, exist_ok=True)
    disk = delayed_disk(mib, microseconds) if microseconds else image(_BASE, mib)
    with disk as device, new_tree(_BASE, device) as tree:
        exports = NfsExports(_BASE, "papers")
        try:
            yield Nfs(tree, exports)
        finally:
            exports.close()
            unmount(f"{_BASE}/client")
