"""One object of the real tree: what is known about it for as long as the kernel refers to it."""

import errno
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NewType

from .. import linux
from ..cloak import Condition
from ..identity import ServerId
from . import calls
from .accesspath import AccessPath
from .filesystems import MountedFilesystem

ROOT = 1
"""The number of the root of the tree."""

TRANSIENT = 1 << 47
"""Objects without a file handle get numbers from here on: a new one each time they are found, which is never stored."""

NEVER = -(1 << 80)
"""A value that no ctime has; 0 will not do, since file systems without a ctime may report it."""

Viewer = NewType("Viewer", int)
"""Who learns of an object, and the audience that those who have learned of it make up.

From 0 on, it is a client uid: this caller alone. Below `ALL_VIEWERS`, it is a group (`members_of`). So `viewer >= 0`
asks whether it is one caller, and `viewer < ALL_VIEWERS` whether it is the members of one group.
"""

NO_VIEWER = Viewer(-1)
"""No caller: the daemon itself learns of the object, or no caller has learned of it so far."""

ALL_VIEWERS = Viewer(-2)
"""More than one caller, or it is not known which: an upper daemon asks, or several callers know of the object."""


def members_of(gid: ServerId, policy: int) -> Viewer:
    """Return the audience that all callers with this group make up, by the policy with this number.

    Another policy may map the groups of callers to other ones.
    """
    return Viewer(ALL_VIEWERS - 1 - (policy << 32 | gid))


def group_of(audience: Viewer) -> ServerId:
    """Return the group whose members an audience is (`members_of`)."""
    return ServerId(ALL_VIEWERS - 1 - audience & 0xFFFFFFFF)


def is_limited(audience: Viewer) -> bool:
    """Whether an audience is one caller, or the members of one group."""
    return audience >= 0 or audience < ALL_VIEWERS


_NO_VIEWS: frozenset[int] = frozenset()
_NO_FILES: Mapping[int, int] = {}


class Stale(OSError):
    """The object is gone, or is no longer below the root of the tree."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))


def dev_ino(info: os.stat_result) -> tuple[int, int]:
    """Return what distinguishes an inode from all others for as long as something holds it."""
    return info.st_dev, info.st_ino


class AbsentXattrs(NamedTuple):
    """Extended attributes that objects were seen not to have, in an epoch of the kernel's cache.

    Objects share them, so that each needs no more than a reference.
    """

    epoch: int
    names: frozenset[bytes]


class CompletenessProof:
    """What is known of all entries of a directory: each is shown to its audience, whatever the caller's groups are.

    Attributes:
        audience: the client uid.
        is_proven: whether a listing has come from the first entry to the last.
        is_in_kernel: whether the kernel may have cached the entries.
    """

    __slots__ = ("audience", "is_in_kernel", "is_proven")

    def __init__(self, audience: Viewer) -> None:
        self.audience = audience
        self.is_proven = self.is_in_kernel = False


unused_descriptors: deque[int] = deque()
"""Descriptors that are to be closed by the session loop."""


class Descriptor:
    """A cached descriptor (O_PATH) of an object, and what is known only for as long as there is one (`descriptors`).

    It is closed when nothing refers to this any more: neither the object, nor a request that is being served.

    Attributes:
        fd: the descriptor.
        inode: st_dev and st_ino, which it holds.
        used: when it was last used, as a running count of such uses.
        generation: the last one that was computed, with the number of its view in the bits above.
        no_acl_at: the ctime at which the object had no ACL.
    """

    __slots__ = ("fd", "generation", "inode", "no_acl_at", "used")

    def __init__(self, fd: int, inode: tuple[int, int], used: int) -> None:
        self.fd = fd
        self.inode = inode
        self.used = used
        self.generation = -1
        self.no_acl_at = NEVER

    def __del__(self) -> None:
        if self.fd >= 0:
            # The garbage collector runs in any thread, also in one that has a table of its own (`linux.apart`).
            (calls.close if linux.in_main_thread() else unused_descriptors.append)(self.fd)


class RareFields:
    """What only few objects have.

    Attributes:
        backing, content, open_files, others, relocated: see the properties of `Object`.
        opens_left: for how many more opens for writing the kernel is not told to write by itself.
        ctime_ahead: by how many nanoseconds replies give a later ctime than it has (`filesystem.recall`).
        reported_sizes: like `Object.reported_size`, in the views with other numbers.
    """

    __slots__ = (
        "backing",
        "content",
        "ctime_ahead",
        "open_files",
        "opens_left",
        "others",
        "relocated",
        "reported_sizes",
    )

    def __init__(self) -> None:
        self.backing = self.opens_left = 0
        self.ctime_ahead = 0
        self.content: tuple[int, ...] | None = None
        self.open_files: dict[int, int] | None = None
        self.others: list[tuple[Directory, bytes]] | None = None
        self.reported_sizes: dict[int, int] | None = None
        self.relocated = False


class Object:
    """One object of the real tree, held as long as the kernel knows it or something below it.

    There may be very many files, so only a `Directory` has room for what directories alone need. For a file, reading
    such an attribute returns the default below, and setting it fails.
    """

    __slots__ = (
        "absent_xattrs", "audience", "cache_epoch", "cached_for_one", "cached_in", "checked", "descriptor",
        "ever_cached_in", "filesystem", "handle", "lookups", "name", "number", "parent", "rare", "reported_size",
    )  # fmt: skip

    pins = 0
    children: "dict[bytes, Object] | None" = None
    strays: "dict[bytes, dict[Object, None]] | None" = None
    further: "set[tuple[bytes, Object]] | None" = None
    verified_epoch = -1
    condition: Condition | None = None
    access_path: AccessPath | None = None
    no_acl_since = NEVER
    has_names_for_one = False
    proof: CompletenessProof | None = None
    public_in = _NO_VIEWS
    blocking_ancestor: "Directory | None" = None

    def __init__(self, number: int, handle: bytes, filesystem: MountedFilesystem) -> None:
        # Its identity.
        self.number = number
        self.handle = handle  # the number of its mount (4 bytes), then the handle that its file system gives it
        self.filesystem = filesystem

        # What refers to it (`registry`).
        self.lookups = 0  # beside these, the clients that have it open: `open_files`

        # Its last known place (`registry`, `locate`).
        self.parent: Directory | None = None
        self.name = b""
        self.checked = NEVER  # the ctime at which `parent` and `name` were true

        self.descriptor: Descriptor | None = None

        # Who knows of it (`kernelcache.audience`).
        self.audience = NO_VIEWER
        self.cached_for_one = False  # `cached_in` holds for the audience alone

        # What the kernel caches of it (`kernelcache.timeouts`).
        self.cached_in = _NO_VIEWS  # numbers of the views in which the kernel caches more than one answer
        self.absent_xattrs: AbsentXattrs | None = None  # `kernelcache.invalidation`
        self.cache_epoch = 0  # the epoch of the kernel's cache that `cached_in` and `public_in` belong to
        # Like `cached_in`, but never reset, and including what is below (`Registry.hold`).
        self.ever_cached_in = _NO_VIEWS
        self.reported_size = 0  # the size that the kernel believes a file to have in the view with number 0

        self.rare: RareFields | None = None  # most objects have none; read by the properties below

    @property
    def fd(self) -> int:
        """The cached descriptor, or -1."""
        return -1 if self.descriptor is None else self.descriptor.fd

    @property
    def inode(self) -> tuple[int, int] | None:
        """The st_dev and st_ino that the cached descriptor holds."""
        return None if self.descriptor is None else self.descriptor.inode

    def rarely(self) -> RareFields:
        """Return `rare`, which is made if there is none yet."""
        if self.rare is None:
            self.rare = RareFields()
        return self.rare

    @property
    def open_files(self) -> Mapping[int, int]:
        """The descriptors with which clients have it open, and the view of each; they refer to it (`registry`)."""
        return _NO_FILES if self.rare is None else self.rare.open_files or _NO_FILES

    @property
    def others(self) -> "Sequence[tuple[Directory, bytes]]":
        """Further names of a hard link, as (directory, name)."""
        return () if self.rare is None else self.rare.others or ()

    @others.setter
    def others(self, others: "list[tuple[Directory, bytes]]") -> None:
        if others or self.rare is not None:
            self.rarely().others = others or None

    @property
    def relocated(self) -> bool:
        """With subtree_check: whether it was moved, or may have been reached by others, while the kernel knew it.

        What is cached does not rest on its place until the kernel has forgotten it.
        """
        return self.rare is not None and self.rare.relocated

    @relocated.setter
    def relocated(self, relocated: bool) -> None:
        if relocated or self.rare is not None:
            self.rarely().relocated = relocated

    @property
    def content(self) -> tuple[int, ...] | None:
        """Its size and times when it was last opened (`kernelcache.timeouts`)."""
        return None if self.rare is None else self.rare.content

    @content.setter
    def content(self, content: tuple[int, ...] | None) -> None:
        if content is not None or self.rare is not None:
            self.rarely().content = content

    @property
    def backing(self) -> int:
        """The id by which the kernel reads and writes it by itself (`filesystem.passthrough`); 0 if it does not."""
        return 0 if self.rare is None else self.rare.backing

    def report_size(self, view: int, size: int) -> None:
        """Note that the kernel knows, from a reply or a write, that the file has this size."""
        if not view:
            self.reported_size = size
        else:
            rare = self.rarely()
            if rare.reported_sizes is None:
                rare.reported_sizes = {}
            rare.reported_sizes[view] = size

    def size_in_kernel(self, view: int) -> int:
        """Return the size that the kernel believes the file to have, unless two answers have just crossed."""
        if not view:
            return self.reported_size
        sizes = None if self.rare is None else self.rare.reported_sizes
        return sizes.get(view, 0) if sizes else 0


class Directory(Object):
    """A directory. An object that is restored from the index is one, too: the index does not say what it is."""

    __slots__ = (
        "__weakref__", "access_path", "blocking_ancestor", "children", "condition", "further", "has_names_for_one",
        "no_acl_since", "pins", "proof", "public_in", "strays", "verified_epoch",
    )  # fmt: skip

    def __init__(self, number: int, handle: bytes, filesystem: MountedFilesystem) -> None:
        super().__init__(number, handle, filesystem)

        # What is in it (`registry`).
        self.pins = 0  # the number of known names in it
        self.children = None  # the objects whose place this is, by name
        self.strays = None  # the objects whose place this is, too, but to which `children` does not lead
        self.further = None  # further names in it, of objects whose place is another

        # Who may see it (`accesspath`, `visibility`).
        self.verified_epoch = -1  # the `Registry.epoch` with which its place, and who sees it, were verified
        self.condition = None
        self.access_path = None  # who may see it and all directories above
        self.no_acl_since = NEVER  # `verified_epoch` when it had no ACL. It has none as long as both are the same.

        # What the kernel caches of it (`kernelcache.audience`, `kernelcache.complete`, `kernelcache.timeouts`).
        self.has_names_for_one = False  # the kernel may cache names in it that its audience alone may know
        self.proof = None
        self.public_in = _NO_VIEWS  # of `cached_in`, the views in which all may search it, and all directories above
        self.blocking_ancestor = None  # the directory, this one or above, that not all callers could search last time


def as_directory(obj: Object) -> Directory:
    """Return the object, which is a directory now, as one.

    Raises:
        Stale: it was something else. (A file system may use a handle again.)
    """
    if not isinstance(obj, Directory):
        raise Stale
    return obj
