"""The ground behind the kernel's NFS server and client, in the laboratory's guest."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from itertools import count

from cloakfs.nfs.plan import mount_name

from ..cli import OWN_COMMAND
from ..lab.delayeddisk import delayed_disk
from ..lab.nfshost import sh
from ..peers import unmount
from .configurations import BARE, BINDFS
from .experiment import Unavailable
from .ground import VERSIONS, Ground, image, new_tree

_BASE = "/papers"
_EXPORTS = f"{_BASE}/exports.d"
_SERVICE = "papers"
_ROOT = "/srv/cloakfs"
_PATIENCE = 20.0


class Nfs:
    """The server, which has to run, exports the tree itself or cloakfs over it; the client mounts for each run."""

    def __init__(self, tree: str) -> None:
        self.tree = tree
        self._numbers = count()
        self._up = False

    @contextlib.contextmanager
    def serve(self, options: str) -> Iterator[str]:
        """See Ground."""
        if options == BINDFS:
            raise Unavailable("the kernel's server needs an fsid of bindfs")
        # Each export has a path of its own.
        number = next(self._numbers)
        at = f"{_BASE}/tree-{number}"
        os.mkdir(at)
        sh("mount", "--bind", self.tree, at)
        try:
            if options == BARE:
                sh("exportfs", "-o", f"rw,insecure,no_subtree_check,fsid={4000 + number}", f"*:{at}")
                try:
                    yield at
                finally:
                    sh("exportfs", "-u", f"*:{at}")
                    sh("exportfs", "-f")
            else:
                entry = f"{_EXPORTS}/tree-{number}.exports"
                with open(entry, "w", encoding="utf-8") as file:
                    file.write(f"{at} *(insecure,rw,{options})\n")
                try:
                    self._take_over()
                    yield os.path.join(_ROOT, mount_name(at, "*"))
                finally:
                    os.unlink(entry)
                    self._take_over()
        finally:
            sh("umount", "-l", at)  # the server may hold on to it for a moment
            os.rmdir(at)

    def _take_over(self) -> None:
        """Serve what the folder says now."""
        if not os.listdir(_EXPORTS):
            self.close()
        elif self._up:
            sh(*OWN_COMMAND, "export", "reload", "--name", _SERVICE)
        else:
            sh(*OWN_COMMAND, "export", "up", "--name", _SERVICE, _EXPORTS)
            self._up = True

    @contextlib.contextmanager
    def reach(self, served: str, setting: str) -> Iterator[str]:
        """See Ground."""
        at = f"{_BASE}/client"
        os.makedirs(at, exist_ok=True)
        sh("mount", "-t", "nfs", "-o", f"vers={VERSIONS[setting]},hard,nolock", f"127.0.0.1:{served}", at)
        try:
            yield at
        finally:
            deadline = time.monotonic() + _PATIENCE
            while subprocess.run(["umount", "-i", at], check=False, capture_output=True).returncode:
                if time.monotonic() > deadline:
                    sh("umount", "-l", at)
                    raise RuntimeError(f"{at} was still in use")
                time.sleep(0.1)

    def close(self) -> None:
        """End the service."""
        if self._up:
            sh(*OWN_COMMAND, "export", "down", "--name", _SERVICE)
            self._up = False


@contextlib.contextmanager
def nfs(mib: int, microseconds: int = 0) -> Iterator[Ground]:
    """Make a tree behind the server, which has to run. The guest's end may save the removing.

    Args:
        mib: how large the file system is.
        microseconds: how long its disk takes for each command; 0: it is a file in memory.
    """
    os.makedirs(_EXPORTS, exist_ok=True)
    disk = delayed_disk(mib, microseconds) if microseconds else image(_BASE, mib)
    with disk as device, new_tree(_BASE, device) as tree:
        made = Nfs(tree)
        try:
            yield made
        finally:
            made.close()
            unmount(f"{_BASE}/client")
