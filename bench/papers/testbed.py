"""Where trials work: one file system, what serves it, and how clients reach that."""

import contextlib
import ctypes
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from cloakfs.linux.libc import libc

from ..peers import BINDFS as BINDFS_PEER
from ..peers import PEERS, Skipped, mounting, unmount
from ..workers import undisturbed
from .configurations import BARE, BINDFS
from .experiment import Unavailable

LOCAL = "local"
VERSIONS = {"NFSv3": "3", "NFSv4.2": "4.2"}
"""Settings behind NFS, and what mount(8) calls them."""


class Testbed(Protocol):
    """A tree, and ways to it."""

    tree: str

    def serve(self, options: str) -> contextlib.AbstractContextManager[str]:
        """Serve the tree with these options (or BARE, BINDFS); give what `reach` wants."""
        ...

    def reach(self, served: str, setting: str) -> contextlib.AbstractContextManager[str]:
        """Reach it in this setting; give the directory in which a client works."""
        ...


def drop_caches(tree: str) -> None:
    """Write back a tree's device, and drop all pages, inodes and dentries that the kernel can drop."""
    fd = os.open(tree, os.O_RDONLY)
    try:
        if libc.syncfs(fd) < 0:
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3\n")


def kib_read(tree: str) -> float:
    """Return how much has been read from the device that a tree is on, in KiB."""
    number = os.stat(tree).st_dev
    with open(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat", encoding="ascii") as file:
        return int(file.read().split()[2]) / 2


@contextlib.contextmanager
def image(base: str, mib: int) -> Iterator[str]:
    """Make a file that is to be a disk, for as long as it is needed."""
    path = os.path.join(base, "image")
    with open(path, "xb") as file:
        file.truncate(mib << 20)
    try:
        yield path
    finally:
        os.unlink(path)


@contextlib.contextmanager
def new_tree(base: str, disk: str) -> Iterator[str]:
    """Make an ext4 on a disk, or on a loop device for a file; give a directory in it, which is empty.

    Raises:
        Unavailable: there is no ext4 or loop device.
    """
    at = os.path.join(base, "disk")
    os.mkdir(at)
    loop = "" if stat.S_ISBLK(os.stat(disk).st_mode) else "loop,"
    with contextlib.ExitStack() as stack:
        stack.callback(os.rmdir, at)
        stack.callback(unmount, at)  # this also removes the loop device
        for command in (
            [
                "mkfs.ext4",
                "-q",
                "-F",
                "-m",
                "0",
                "-O",
                "^has_journal",
                "-E",
                "lazy_itable_init=0",
                "-N",
                "40000",
                disk,
            ],
            ["mount", "-t", "ext4", "-o", f"{loop}noatime", disk, at],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                raise Unavailable(f"{command[0]} is not installed (apt install e2fsprogs mount)") from None
            if done.returncode:
                raise Unavailable(f"{command[0]}: {' '.join(done.stderr.split())}")
        tree = os.path.join(at, "tree")
        os.mkdir(tree)
        os.chmod(tree, 0o755)
        yield tree


class Local:
    """Clients work on the mounts themselves, and the bare tree is a bind mount."""

    def __init__(self, base: str, tree: str) -> None:
        self.tree = tree
        self._base = base
        self._numbers = count()

    @contextlib.contextmanager
    def serve(self, options: str) -> Iterator[str]:
        """Mount cloakfs with these options, a bind mount (BARE) or bindfs, on a directory of its own."""
        at = os.path.join(self._base, f"mount-{next(self._numbers)}")
        os.mkdir(at)
        peer = {BARE: PEERS["bind mount"], BINDFS: PEERS[BINDFS_PEER]}.get(options) or mounting(options)
        with contextlib.ExitStack() as stack:
            try:
                stack.callback(os.rmdir, at)
                try:
                    with undisturbed():
                        wait = peer(stack, options[:40], self.tree, at)
                    wait()
                except Skipped as exc:
                    raise Unavailable(str(exc)) from exc
                yield at
            finally:
                with undisturbed():
                    stack.close()

    @contextlib.contextmanager
    def reach(self, served: str, setting: str) -> Iterator[str]:
        """Work on the mount itself."""
        assert setting == LOCAL
        yield served


@contextlib.contextmanager
def local(mib: int) -> Iterator[Testbed]:
    """Make a tree below $TMPDIR, and remove it, and whatever serves it, at the end."""
    with contextlib.ExitStack() as stack:
        try:
            with undisturbed():
                base = os.path.realpath(tempfile.mkdtemp(prefix="cloakfs-papers-"))
                stack.callback(os.rmdir, base)
                os.chmod(base, 0o755)
                tree = stack.enter_context(new_tree(base, stack.enter_context(image(base, mib))))
            yield Local(base, tree)
        finally:
            with undisturbed():
                stack.close()
