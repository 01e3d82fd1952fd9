"""Numbers of objects that are computed from their file handles, and back: nothing is stored that could be lost.

A handle of the file system has the inode number and, on most, a generation, which is another one when the inode number
is used again. The number of an object is made of its inode number and what bits of the generation it has room for, and
is permuted (`permutation`). The way back is a handle without generation, which ext4 and btrfs accept. What is found by
it gives its whole handle, on which the generation depends that clients get: so no client is led to another object that
has the inode number by now. btrfs and CephFS use no inode number again; the handles of CephFS have no generation.

The handles of one tree are all alike but for these two fields. What has another handle (another file system in the
tree, a subvolume) has no such number, and gets one from the index.
"""

import sys
from typing import NamedTuple

from . import calls
from .filesystems import MountedFilesystem
from .objects import Stale
from .permutation import BITS, Permutation

COMPUTED = 1 << BITS
"""The bit that distinguishes a computed number from one that the index has given."""

_PREFIX = 4
"""How many bytes of an object's handle come before that of the file system: the number of the mount."""


class _Layout(NamedTuple):
    """Where in a handle, which begins with its type (`calls.name_to_handle`), the two fields are.

    Attributes:
        size: of the handle.
        inode: where the inode number is.
        generation: where the generation is.
        kept: how many bits of the generation are a part of the number.
    """

    size: int
    inode: slice
    generation: slice
    kept: int


_EXT4 = _Layout(12, slice(4, 8), slice(8, 12), BITS - 32)

# Kinds whose inode numbers are those of their handles, and which find what a handle without generation means.
_LAYOUTS = {
    "ext2": _EXT4,
    "ext3": _EXT4,
    "ext4": _EXT4,
    "btrfs": _Layout(24, slice(4, 12), slice(20, 24), 0),  # the subvolume is in between
    "ceph": _Layout(12, slice(4, 12), slice(12, 12), 0),  # no inode number is ever used again
}


KINDS = frozenset(_LAYOUTS)
"""The kinds of file systems on which numbers are computed, as a rule."""


def can_compute(filesystem: MountedFilesystem, handle: bytes) -> bool:
    """Whether numbers can be computed for a tree whose root, on this file system, has this handle (of `Object`)."""
    layout = _LAYOUTS.get(filesystem.kind)
    own = handle[_PREFIX:]
    if layout is None or len(own) != layout.size or not (filesystem.is_certain and filesystem.decodable):
        return False
    start, end = layout.generation.start, layout.generation.stop
    try:
        fd = calls.find_handle(filesystem.fd, own[:start] + bytes(end - start) + own[end:])
    except OSError:
        return False
    try:
        return calls.name_to_handle(fd, filesystem.flags)[0] == own
    finally:
        calls.close(fd)


class ComputedNumbers:
    """The numbers of the objects of one tree that are like its root.

    An object is known by its *packed identity*: the inode number, and below it the bits of the generation.

    Args:
        filesystem: on which the root lies.
        root: the root's handle.
        identity: of the file system (`filesystems.identity`).
        secret: of the mount.
    """

    def __init__(self, filesystem: MountedFilesystem, root: bytes, identity: str, secret: bytes) -> None:
        layout = _LAYOUTS[filesystem.kind]
        self._filesystem = filesystem
        self._kept = layout.kept
        self._inode = slice(layout.inode.start + _PREFIX, layout.inode.stop + _PREFIX)
        self._generation = slice(layout.generation.start + _PREFIX, layout.generation.stop + _PREFIX)
        self._is_whole = self._generation.start == self._generation.stop
        self._size = len(root)
        self._before, self._between = root[: self._inode.start], root[self._inode.stop : self._generation.start]
        self._identity = identity.encode() + b"\0"
        self._permutation = Permutation(secret)

    def packed(self, handle: bytes) -> int | None:
        """Return the packed identity of the object with this handle (of `Object`), if its number is computed."""
        if (
            len(handle) != self._size
            or not handle.startswith(self._before)
            or handle[self._inode.stop : self._generation.start] != self._between
        ):
            return None
        inode = int.from_bytes(handle[self._inode], sys.byteorder)
        if not self._kept:
            return inode if inode < COMPUTED else None
        generation = int.from_bytes(handle[self._generation], sys.byteorder)
        return inode << self._kept | generation & (1 << self._kept) - 1

    def number(self, packed: int) -> int:
        """Return the number of the object with this packed identity."""
        return COMPUTED | self._permutation.shown(packed)

    def packed_of(self, number: int) -> int:
        """Return the packed identity of the object with this number, which is a computed one."""
        return self._permutation.real(number & COMPUTED - 1)

    def is_plausible(self, number: int) -> bool:
        """Whether an object may ever have had this number, a computed one. What somebody guesses rarely is."""
        if self._is_whole:
            return True  # inode numbers are from a range that is too large
        most = calls.fstatvfs(self._filesystem.fd).f_files or 1 << 32  # btrfs does not say
        return 0 < self.packed_of(number) >> self._kept <= most

    def stable(self, handle: bytes) -> bytes:
        """Return what identifies the object with this handle, wherever the file system is mounted."""
        return self._identity + handle[_PREFIX:]

    def handle(self, packed: int) -> bytes:
        """Return the handle (of `Object`) of the object with this packed identity.

        Raises:
            Stale: there is none.
            OSError: there are too many descriptors, for example.
        """
        inode = (packed >> self._kept).to_bytes(self._inode.stop - self._inode.start, sys.byteorder)
        sought = self._before + inode + self._between + bytes(self._generation.stop - self._generation.start)
        if self._is_whole:  # whether there is such an object may take long to find out (`prefault`)
            return sought
        fd = calls.find_handle(self._filesystem.fd, sought[_PREFIX:])
        try:
            found = self._before[:_PREFIX] + calls.name_to_handle(fd, self._filesystem.flags)[0]
        finally:
            calls.close(fd)
        if self.packed(found) != packed:
            raise Stale
        return found
