"""One object of the real tree: what is known of it for as long as the kernel refers to it."""

import errno
import os
from typing import TYPE_CHECKING

from .filesystems import Filesystem

if TYPE_CHECKING:
    from ..cloak import Condition
    from .passages import Passage

ROOT = 1
"""The number of the root of the tree."""

TRANSIENT = 1 << 47
"""Objects without any handle get numbers from here on, anew each time they are met, and never stored."""

NEVER = -(1 << 80)
"""No ctime, whereas 0 is what file systems without one may say."""

_NO_VIEWS: frozenset[int] = frozenset()


class Stale(OSError):
    """The object is gone, or is no longer below the root of the tree."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))


def dev_ino(info: os.stat_result) -> tuple[int, int]:
    """What tells an inode from all others for as long as somebody holds it."""
    return info.st_dev, info.st_ino


class Object:
    """One object of the real tree, as long as the kernel knows it or something below it."""

    __slots__ = (
        "barrier", "checked", "children", "condition", "content", "era", "ever_kept", "fd", "filesystem", "generation",
        "handle", "inode", "kept", "lookups", "name", "no_acl_at", "number", "open_files", "others", "parent",
        "passage", "pins", "public", "reported_size", "reported_sizes", "strays", "trusted", "used",
    )  # fmt: skip

    def __init__(self, number: int, handle: bytes, filesystem: Filesystem) -> None:
        # Which one it is.
        self.number = number
        self.handle = handle  # the number of its mount (4 bytes), and what its file system knows it by
        self.filesystem = filesystem
        self.generation = -1  # the last that was asked for, above it the number of the view

        # Who refers to it: see `registry`.
        self.lookups = 0
        self.pins = 0  # children that are known, and open files
        self.open_files: list[int] | None = None

        # Where it was last, and what is there: see `links` and `locate`.
        self.parent: Object | None = None
        self.name = b""
        self.others: list[tuple[Object, bytes]] | None = None  # further names of a hard link
        self.checked = NEVER  # the ctime at which `parent` and `name` were true
        self.children: dict[bytes, Object] | None = None  # those whose place this is
        self.strays: set[Object] | None = None  # those with a name here that `children` does not lead to

        # The descriptor kept of it: see `descriptors`.
        self.fd = -1
        self.inode: tuple[int, int] | None = None  # st_dev and st_ino, as long as `fd` holds them
        self.used = 0  # when `fd` was used last, by the count of such uses

        # Who may know of it: see `passages` and `door`.
        self.trusted = -1  # of a directory, whether it is known to be in its place, and who sees it
        self.condition: Condition | None = None
        self.passage: Passage | None = None  # who gets there
        self.no_acl_at = NEVER  # the ctime at which it had no ACL

        # What the kernel remembers of it: see `filesystem.remember`.
        self.kept = _NO_VIEWS  # numbers of the views in which the kernel remembers more than it asked for
        self.public = _NO_VIEWS  # of these, those in which everybody may search it, and all directories above
        self.barrier: Object | None = None  # the directory, perhaps above, at which not everybody got through last
        self.era = 0  # of the kernel's cache, to which `kept` and `public` belong
        # As `kept`, but never forgotten, and of what is below as well: see `Registry.hold`.
        self.ever_kept = _NO_VIEWS
        self.content: tuple[int, ...] | None = None  # what it looked like when it was opened last
        # Where the kernel believes that a file ends: in the view with number 0, and in others.
        self.reported_size = 0
        self.reported_sizes: dict[int, int] | None = None

    def report_size(self, view: int, size: int) -> None:
        """The kernel is told, or found by writing, that the file ends there."""
        if not view:
            self.reported_size = size
        elif self.reported_sizes is None:
            self.reported_sizes = {view: size}
        else:
            self.reported_sizes[view] = size

    def size_in_kernel(self, view: int) -> int:
        """Where the kernel believes that the file ends, unless two answers have just crossed."""
        if not view:
            return self.reported_size
        return self.reported_sizes.get(view, 0) if self.reported_sizes else 0
