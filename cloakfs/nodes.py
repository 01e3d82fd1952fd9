"""Nodeids: which (view, object) the kernel means by a number, also after FORGET and after a restart.

    nodeid (63 bits)  =  view number (15 bits)  |  object number (48 bits)
    generation (32)   =  keyed hash of (nodeid, file handle), with a secret of the mount

The object number comes from the index; the root of the tree is object 1, a caller view has the number 0, so that
nodeid 1 is the root of a plain mount, as FUSE wants it. An object is known by the file handle that its file system
gives it (name_to_handle_at(2)), prefixed with the number of the mount it lies on: the same inode below two
bind mounts is two objects, because a directory can have but one place in the kernel's cache.

File descriptors are a cache. What falls out is opened again by handle, or, where the file system cannot decode
handles (overlayfs without nfs_export, for example), by its last known name, if that is still the same object.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from . import linux, mounts
from .index import Index

log = logging.getLogger(__name__)

ROOT = 1
_OBJECT_BITS = 48
_OBJECT_MASK = (1 << _OBJECT_BITS) - 1
MAX_VIEWS = (1 << 15) - 1

# Objects without any handle get numbers from here on, anew each time they are met, and never stored.
_TRANSIENT = 1 << 47

# Names of a hard link to remember; a file with more may have to be looked up again to be used by handle.
_MAX_OTHER_NAMES = 16

# So many of the descriptors used last may be in use by the request that is being served.
_IN_USE = 8

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

# More levels than a path can have.
_MAX_DEPTH = 4096

_NamedIn = tuple[tuple[int, int], bytes]  # st_dev and st_ino of a directory, and a name in it

_NO_VIEWS: frozenset[int] = frozenset()

# How long a directory that was below the root counts as being there, in seconds.
_MOMENT = 0.02

# A change within the clock tick (at most 10 ms) in which a place was checked would not show in the ctime.
_TICK_NS = 20_000_000
_SECOND_NS = 1_000_000_000

# No ctime, whereas 0 is what file systems without one may say.
_NEVER = -(1 << 80)


# Their id is their own, and stays.
_KNOWN_BY_ID = ("ext2", "ext3", "ext4", "btrfs")

# So many objects of the index are looked at at a time: some milliseconds in a thread.
_SWEEP = 200

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
_PLAIN_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", *_MEMORY_KINDS})


# Kinds that begin so: networks, and daemons such as FUSE's. (autofs mounts something when it is looked at.)
_FAR_KINDS = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "ceph",
    "afs",
    "virtiofs",
    "lustre",
    "gfs",
    "ocfs",
    "autofs",
    "beegfs",
)


class Stale(OSError):
    """The object is gone, or is no longer below the root of the tree."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))


# A local file system that kept the session loop waiting so long is asked from threads for a while.
_SLOW_SECONDS = 0.005
_SLOW_FOR_SECONDS = 10.0

# After looking at what is mounted, so many times as long it is not looked at.
_SHARE_OF_MOUNTS = 20

# So long a file system may take to tell about itself when it is met.
_MEET_SECONDS = 2.0


@dataclass(eq=False)
class Filesystem:
    """One mount of the tree: where handles of its objects are decoded."""

    number: int
    kind: str
    path: str
    fd: int
    flags: int = 0
    has_handles: bool = True
    decodable: bool = True
    told: bool = False  # are changes behind the mount told?
    device: int = 0  # st_dev
    slow_until: float = 0.0  # by time.monotonic()

    @property
    def plain(self) -> bool:
        """Do mode bits and POSIX ACLs alone decide, on this machine, and does every change show in the ctime?"""
        return self.kind in _PLAIN_KINDS

    @property
    def in_memory(self) -> bool:
        """Does nobody ever have to wait for what is there?"""
        return self.kind in _MEMORY_KINDS

    @cached_property
    def far(self) -> bool:
        """May any call wait for another machine or process, perhaps for ever?"""
        return self.kind.startswith(_FAR_KINDS)

    @property
    def waits(self) -> bool:
        """Is it better asked from a thread?"""
        return self.far or (self.slow_until > 0 and time.monotonic() < self.slow_until)

    def took(self, seconds: float) -> None:
        """It was asked from the session loop, and answered after so long."""
        if seconds > _SLOW_SECONDS:
            self.slow_until = time.monotonic() + _SLOW_FOR_SECONDS


def _is_gone(mount_fd: int, handle: bytes) -> bool:
    try:
        os.close(linux.open_by_handle(mount_fd, handle, os.O_PATH | os.O_NOFOLLOW))
    except OSError as exc:
        return exc.errno == errno.ESTALE
    return False


def _storable(text: str) -> str:
    """The text as a database takes it, and unlike any other's, also if it has bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()
    return text


class Object:
    """One object of the real tree, as long as the kernel knows it or something below it."""

    __slots__ = (
        "checked", "children", "content", "era", "ever_kept", "fd", "filesystem", "generation", "handle", "inode",
        "kept", "lookups", "name", "number", "open_files", "others", "parent", "pins", "plain_at", "told_size",
        "told_sizes", "used",
    )  # fmt: skip

    def __init__(self, number: int, handle: bytes, filesystem: Filesystem) -> None:
        self.number = number
        self.handle = handle
        self.filesystem = filesystem
        self.lookups = 0
        self.pins = 0  # children that are known, and open files
        self.children: dict[bytes, Object] | None = None  # those whose place this is
        self.parent: Object | None = None
        self.name = b""
        self.others: list[tuple[Object, bytes]] | None = None  # further names of a hard link
        self.checked = _NEVER  # the ctime at which `parent` and `name` were true
        self.plain_at = _NEVER  # the ctime at which it had no ACL
        self.kept = _NO_VIEWS  # numbers of the views in which the kernel remembers more than it asked for
        self.era = 0  # of the kernel's cache, to which `kept` belongs
        self.ever_kept = _NO_VIEWS  # the same, but never forgotten: of names that lead nowhere, nobody knows which
        self.content: tuple[int, ...] | None = None  # what it looked like when it was opened last
        self.fd = -1
        self.inode: tuple[int, int] | None = None  # st_dev and st_ino, as long as `fd` holds them
        self.generation = -1  # the last that was asked for, above it the number of the view
        self.used = 0  # when `fd` was used last, by the count of such uses
        self.open_files: list[int] | None = None
        # Where the kernel believes that a file ends: in the view with number 0, and in others.
        self.told_size = 0
        self.told_sizes: dict[int, int] | None = None

    def tell_size(self, view: int, size: int) -> None:
        """The kernel is told, or found by writing, that the file ends there."""
        if not view:
            self.told_size = size
        elif self.told_sizes is None:
            self.told_sizes = {view: size}
        else:
            self.told_sizes[view] = size

    def believed_size(self, view: int) -> int:
        """Where the kernel believes that the file ends, unless two answers have just crossed."""
        if not view:
            return self.told_size
        return self.told_sizes.get(view, 0) if self.told_sizes else 0


class Nodes:
    """All objects of one tree that the kernel may ask about.

    Args:
        source: the root of the real tree.
        index: where numbers are kept.
        max_fds: how many descriptors to keep open at most.
        covered: the tree is going to lie below the daemon's own mount. Then a copy of its mounts is served, which hangs
            nowhere: ".." leads to the own mount from nowhere in it.

    Raises:
        OSError: `source` cannot be opened.
    """

    def __init__(self, source: str, index: Index, max_fds: int = 1024, *, covered: bool = False) -> None:
        self._source = source
        self._index = index
        self._max_fds = max_fds
        self._objects: dict[int, Object] = {}
        self._by_handle: dict[bytes, Object] = {}
        self._by_mount: dict[int, Filesystem] = {}
        self._by_number: dict[int, Filesystem] = {}
        self._beside: dict[tuple[int, int], set[bytes]] = {}  # where something far is mounted, and what it is called
        self.on_new_filesystem: Callable[[Filesystem], None] | None = None
        self.on_shunned: Callable[[Object, bytes], None] | None = None
        self._open: dict[int, Object] = {}
        self._uses = 0  # of descriptors
        self._uses_before = 0  # when the idle ones were closed last
        self._by_inode: dict[tuple[int, int], Object] = {}  # of those in `_open`
        self._mount_changes = mounts.Changes()
        self._mounts_outdated = True
        self._mounts_again = 0.0  # before that, it is not looked at what is mounted
        self._shunned_at: dict[tuple[int, str], _NamedIn | None] = {}  # by mount id and path
        self._shunned: dict[tuple[int, int], set[bytes]] = {}
        self._inside: set[tuple[int, int]] = set()  # directories seen below the root, good for a moment
        self._inside_until = 0.0
        self._swept = 0  # the last object that `sweep` has looked at
        self._transient = _TRANSIENT | int.from_bytes(os.urandom(5), "little")
        self._own_device: str | None = None
        self._leads_back = False
        self._copied: dict[int, mounts.Place] | None = None
        linux.assume(linux.ROOT)
        if covered:
            fd = linux.clone_tree(source)
            self._copied = self._find_copies(fd)
        else:
            fd = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        filesystem = self._new_filesystem(mounts.id_of(fd), fd)
        handle, _ = self._identify(fd, None)
        if not index.claim(ROOT, handle):
            log.warning("%s is another directory than it was: old file handles are stale", source)
        self.root = Object(ROOT, handle, filesystem)
        self._remember(self.root)
        self._keep(self.root, fd)
        for mount_id, path in self.mounts_below().items():
            if mount_id not in self._by_mount:
                self._meet_mount_at(path)

    # -- file systems ------------------------------------------------------------------------------

    @property
    def filesystems(self) -> list[Filesystem]:
        """The mounts met so far, the root's first."""
        return list(self._by_mount.values())

    def mounts_below(self) -> dict[int, str]:
        """What the administrator mounted inside of the tree: mount id -> mount point."""
        linux.assume(linux.ROOT)
        return {number: place.path for number, place in self._mounted_inside() if not place.mounter}

    def _mounted_inside(self) -> list[tuple[int, mounts.Place]]:
        inside = self._source.rstrip("/") + "/"
        return [(number, place) for number, place in self._table().items() if place.path.startswith(inside)]

    def _table(self) -> dict[int, mounts.Place]:
        """What is mounted, by mount id; of a copy, what was when it was made."""
        return mounts.by_id() if self._copied is None else self._copied

    def _find_copies(self, top: int) -> dict[int, mounts.Place]:
        """The mounts of a copy of the tree, told as the ones that they are copies of."""
        fd = os.open(self._source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            original = mounts.id_of(fd)
        finally:
            os.close(fd)
        table = mounts.by_id()
        numbers = {original: mounts.id_of(top)}
        inside = self._source.rstrip("/") + "/"
        not_to_pass: list[str] = []
        for number, place in table.items():
            if not place.path.startswith(inside) or place.path.startswith(tuple(not_to_pass)):
                continue
            if place.mounter:
                not_to_pass.append(place.path + "/")
            with contextlib.suppress(OSError):
                fd = os.open(place.path.removeprefix(inside), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
                try:
                    copy = mounts.id_of(fd)
                finally:
                    os.close(fd)
                if copy not in numbers.values():
                    numbers[number] = copy
        return {
            copy: table[number]._replace(parent=numbers.get(table[number].parent, 0))
            for number, copy in numbers.items()
        }

    def served_at(self, device: str) -> None:
        """The tree is served by the file system with this device (`mounts.Place`): that must never be looked into.

        Where it shows up inside of the tree (a bind mount), the name leads nowhere: the daemon would wait for itself.
        """
        self._own_device = device
        self._mounts_outdated = True
        self.heed_mounts()

    def shunned(self, directory: os.stat_result) -> Set[bytes]:
        """The names in this directory at which a user has mounted a FUSE file system, or this one is seen itself.

        It is not looked into, and the name leads nowhere: whoever serves it may answer late, or never.
        """
        self.heed_mounts()
        return self._shunned.get(self._id(directory), frozenset()) if self._shunned else frozenset()

    def heed_mounts(self) -> None:
        """If anything was mounted or unmounted, see what is to be shunned."""
        if self._mount_changes.seen():
            self._mounts_outdated = True
        if self._mounts_outdated and time.monotonic() >= self._mounts_again:
            self._find_shunned()

    def _find_shunned(self) -> None:
        began = time.monotonic()
        linux.assume(linux.ROOT)
        table = self._mount_changes.table() if self._copied is None else self._copied
        inside = self._source.rstrip("/") + "/"
        own = [place.path for place in table.values() if place.device == self._own_device]
        self._leads_back = any(path == self._source or path.startswith(inside) for path in own)
        places: dict[tuple[int, str], _NamedIn | None] = {}
        for number, place in table.items():
            if (place.mounter or place.device == self._own_device) and place.path.startswith(inside):
                key = number, place.path
                places[key] = self._shunned_at[key] if key in self._shunned_at else self._shunned_place(table, place)
        new = [at for key, at in places.items() if at is not None and key not in self._shunned_at]
        self._shunned_at = places
        self._shunned = {}
        for at in places.values():
            if at is not None:
                self._shunned.setdefault(at[0], set()).add(at[1])
        for directory, name in new:
            above = self._by_inode.get(directory)
            if above is not None and self.on_shunned is not None:
                self.on_shunned(above, name)
        # The number of a mount that is gone is soon another's.
        for number, filesystem in list(self._by_mount.items())[1:]:
            now = table.get(number)
            if now is not None and (now.path, now.kind) != (filesystem.path, filesystem.kind):
                del self._by_mount[number]
        self._mounts_outdated = False
        # Whoever mounts and unmounts all the time is not to keep others waiting.
        self._mounts_again = time.monotonic() + _SHARE_OF_MOUNTS * (time.monotonic() - began)

    def _shunned_place(
        self, table: dict[int, mounts.Place], place: mounts.Place
    ) -> tuple[tuple[int, int], bytes] | None:
        """Directory and name of a mount point, unless one has to pass something far to get there."""
        above = table.get(place.parent)
        while above is not None:
            if above.mounter or above.device == self._own_device:
                return None
            if above.kind.startswith(_FAR_KINDS) and place.device != self._own_device:
                return None
            above = table.get(above.parent) if above is not table.get(above.parent) else None
        directory, name = os.path.split(place.path)
        try:
            # Not from "/": the source may be covered.
            return self._id(os.stat(os.path.relpath(directory, self._source), dir_fd=self.root.fd)), os.fsencode(name)
        except OSError:
            return None  # it is covered by something else

    def waits(self, obj: Object) -> bool:
        """Is it better to ask about this object, or a name in it, from a thread?"""
        return obj.filesystem.waits or bool(self.far_names(obj))

    def far_names(self, obj: Object) -> Set[bytes]:
        """The names in this directory at which something far is mounted."""
        if not self._beside or obj.inode is None:
            return frozenset()
        return self._beside.get(obj.inode, frozenset())

    def _meet_mount_at(self, path: str) -> None:
        """Know the mount at `path` before anybody crosses it, so that old handles on it can be decoded."""
        try:
            inside = os.path.relpath(path, self._source)
            fd = os.open(inside, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.root.fd)
        except OSError as exc:
            log.warning("%s: %s; handles below it are not decoded", path, exc.strerror)
            return
        try:
            mount_id = mounts.id_of(fd)
            if mount_id not in self._by_mount:
                self._new_filesystem(mount_id, fd)
        finally:
            os.close(fd)

    def _new_filesystem(self, mount_id: int, fd: int) -> Filesystem:
        place = self._table().get(mount_id)
        if place is not None and (place.mounter or place.device == self._own_device):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # see `shunned`
        path, kind = (place.path, place.kind) if place else (os.readlink(f"/proc/self/fd/{fd}"), "unknown")
        inside = os.path.relpath(path, self._source) if path.startswith(self._source.rstrip("/") + "/") else "."
        # What tells a file system from another mounted at the same place later, where it is stable.
        fsid = os.fstatvfs(fd).f_fsid if kind in _KNOWN_BY_ID else 0
        filesystem = Filesystem(self._index.filesystem(_storable(f"{inside}\0{kind}\0{fsid}")), kind, path, -1)
        if filesystem.far:
            self._ask_far(filesystem, fd)
            with contextlib.suppress(OSError):
                above, name = os.path.split(os.fsencode(path))
                self._beside.setdefault(self._id(os.stat(above)), set()).add(name)
        else:
            self._describe(filesystem, fd)
        self._by_mount[mount_id] = filesystem
        self._by_number[filesystem.number] = filesystem
        if self.on_new_filesystem is not None:
            self.on_new_filesystem(filesystem)
        return filesystem

    @staticmethod
    def _describe(filesystem: Filesystem, fd: int) -> None:
        """Find out what file handles it has. `fd` refers to where it is mounted."""
        filesystem.device = os.fstat(fd).st_dev
        try:
            filesystem.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            filesystem.decodable = False  # a device or socket that is a mount point itself
        for flags in (0, linux.AT_HANDLE_FID):
            try:
                handle, _ = linux.name_to_handle(fd, flags)
            except OSError:
                continue
            filesystem.flags = flags
            try:
                os.close(linux.open_by_handle(filesystem.fd, handle, os.O_PATH))
            except OSError:
                filesystem.decodable = False
            break
        else:
            filesystem.has_handles = filesystem.decodable = False

    def _ask_far(self, filesystem: Filesystem, fd: int) -> None:
        """The same, of what may never answer: for a moment everything waits for it, but no longer."""
        answer = Filesystem(filesystem.number, filesystem.kind, filesystem.path, -1)
        own = os.dup(fd)

        def ask() -> None:
            linux.assume(linux.ROOT)
            with contextlib.suppress(OSError):
                self._describe(answer, own)
                done.set()

        done = threading.Event()
        threading.Thread(target=ask, daemon=True).start()
        if done.wait(_MEET_SECONDS):
            os.close(own)
            for name in ("device", "fd", "flags", "has_handles", "decodable"):
                setattr(filesystem, name, getattr(answer, name))
        else:
            filesystem.has_handles = filesystem.decodable = False
            log.warning("%s (%s) does not answer", filesystem.path, filesystem.kind)

    # -- numbers -----------------------------------------------------------------------------------

    @staticmethod
    def nodeid(view: int, obj: Object) -> int:
        """The number by which the kernel knows `obj` in the view with number `view`."""
        return view << _OBJECT_BITS | obj.number

    @staticmethod
    def view_of(nodeid: int) -> int:
        """The number of the view that a nodeid belongs to."""
        return nodeid >> _OBJECT_BITS

    def generation(self, nodeid: int, obj: Object) -> int:
        """The 32 bits that make a file handle unguessable and tell the object from a later one."""
        if nodeid == ROOT:
            return 0  # the kernel's own choice for the root of a mount
        view = nodeid >> _OBJECT_BITS
        if obj.generation >> 32 != view:
            digest = hashlib.blake2b(
                nodeid.to_bytes(8, "little") + obj.handle, key=self._index.secret, digest_size=4
            ).digest()
            obj.generation = view << 32 | int.from_bytes(digest, "little")
        return obj.generation & 0xFFFFFFFF

    def get(self, nodeid: int) -> Object:
        """The object that a nodeid names.

        Raises:
            Stale: the number was never given, or names what only an earlier run could reach.
        """
        number = nodeid & _OBJECT_MASK
        return self._objects.get(number) or self._restore(number)

    def _restore(self, number: int) -> Object:
        """Take an object, and what is above it, from the index."""
        linux.assume(linux.ROOT)
        rows: dict[int, tuple[bytes, bytes, Filesystem]] = {}
        # No recursion: a path may have more levels than Python allows.
        while number and number not in self._objects and number not in rows:
            row = self._index.find(number)
            if row is None:
                if not rows:
                    raise Stale
                break  # the directory that it was in is gone: it may be somewhere else
            handle, above, name = row
            filesystem = self._by_number.get(int.from_bytes(handle[:4], "little"))
            if filesystem is None:
                raise Stale
            rows[number] = handle, name, filesystem
            number = above
        parent = self._objects.get(number)  # none if that is gone
        for number, (handle, name, filesystem) in reversed(rows.items()):
            obj = Object(number, handle, filesystem)
            if parent is not None:
                self._place(obj, parent, name)
            self._remember(obj)
            parent = obj
        assert parent is not None
        return parent

    def resolve(self, fd: int, parent: Object | None, name: bytes) -> Object:
        """The object that `fd` (O_PATH) refers to, which was just found as `name` in `parent`.

        Takes `fd` over, also when it raises.
        """
        try:
            handle, filesystem = self._identify(fd, parent)
            obj = self._by_handle.get(handle)
            if obj is None:
                linux.assume(linux.ROOT)
                if filesystem.has_handles:
                    number = self._index.object(handle, parent.number if parent is not None else 0, name)
                else:
                    number = self._transient = self._transient + 1
                obj = Object(number, handle, filesystem)
                self._remember(obj)
                if parent is not None:
                    self._place(obj, parent, name)
            elif parent is not None and (obj.parent is not parent or obj.name != name):
                self._found_again(obj, parent, name, fd)
        except BaseException:
            os.close(fd)
            raise
        if obj.fd < 0:
            self._keep(obj, fd)
        else:
            os.close(fd)
        return obj

    def at_place(self, parent: Object, name: bytes, info: os.stat_result) -> Object | None:
        """The object with this stat, if it is known to be what is called `name` in `parent`.

        Its descriptor tells: as long as that is open, no other object gets the inode number.
        """
        obj = self._by_inode.get((info.st_dev, info.st_ino))
        if obj is None or obj.parent is not parent or obj.name != name:
            return None
        return obj

    def _identify(self, fd: int, parent: Object | None) -> tuple[bytes, Filesystem]:
        near = parent.filesystem if parent is not None else next(iter(self._by_mount.values()))
        flags = near.flags
        try:
            handle, mount_id = linux.name_to_handle(fd, flags)
        except OSError:
            handle, mount_id = b"", mounts.id_of(fd)
        filesystem = self._by_mount.get(mount_id) or self._new_filesystem(mount_id, fd)
        if not filesystem.has_handles:
            # Good as long as a descriptor is kept open: until then the inode number is not used again.
            info = os.fstat(fd)
            return struct.pack("<IQQ", filesystem.number, info.st_dev, info.st_ino), filesystem
        if not handle or filesystem.flags != flags:
            handle, _ = linux.name_to_handle(fd, filesystem.flags)
        return filesystem.number.to_bytes(4, "little") + handle, filesystem

    def _remember(self, obj: Object) -> None:
        self._objects[obj.number] = obj
        self._by_handle[obj.handle] = obj

    def forget(self, nodeid: int, count: int) -> None:
        """The kernel dropped `count` references."""
        obj = self._objects.get(nodeid & _OBJECT_MASK)
        if obj is not None and obj is not self.root:
            obj.lookups -= count
            self._drop_if_unused(obj)

    def _drop_if_unused(self, obj: Object | None) -> None:
        while obj is not None and obj is not self.root and obj.lookups <= 0 and not obj.pins:
            if self._objects.pop(obj.number, None) is None:
                return
            self._by_handle.pop(obj.handle, None)
            if obj.fd >= 0 and obj.number < _TRANSIENT and not obj.filesystem.far and os.fstat(obj.fd).st_nlink == 0:
                self._index.remove(obj.number)
            self._close(obj)
            for parent, _ in obj.others or ():
                parent.pins -= 1
                self._drop_if_unused(parent)
            parent_ = self._leave(obj)
            if parent_ is not None:
                parent_.pins -= 1
            obj = parent_

    def __len__(self) -> int:
        return len(self._objects)

    def objects(self) -> list[Object]:
        """All that are known."""
        return list(self._objects.values())

    def by_handle(self, filesystem: Filesystem, handle: bytes) -> Object | None:
        """The object that a file system knows by this handle, if the kernel knows it."""
        return self._by_handle.get(filesystem.number.to_bytes(4, "little") + handle)

    # -- places ------------------------------------------------------------------------------------

    def _place(self, obj: Object, parent: Object, name: bytes) -> None:
        """`obj` is (now) `name` in `parent`."""
        if obj.pins:
            self._part(obj, parent)
        before = self._leave(obj)
        parent.pins += 1
        obj.parent, obj.name, obj.checked = parent, name, _NEVER
        if parent.children is None:
            parent.children = {}
        parent.children[name] = obj
        if before is not None:
            before.pins -= 1
            if before is not parent:
                self._drop_if_unused(before)

    @staticmethod
    def _leave(obj: Object) -> Object | None:
        """`obj` has no place now; returns where it was."""
        parent, obj.parent = obj.parent, None
        if parent is not None and parent.children is not None and parent.children.get(obj.name) is obj:
            del parent.children[obj.name]
        return parent

    def _part(self, obj: Object, parent: Object) -> None:
        """Where `parent` was thought to be below `obj`, that is outdated: nothing may be below itself."""
        at: Object | None = parent
        while at is not None:
            if at.parent is obj:
                self._leave(at)
                obj.pins -= 1
            at = at.parent

    def _found_again(self, obj: Object, parent: Object, name: bytes, fd: int) -> None:
        """A known object turned up under another name: moved, or one more hard link."""
        info = os.fstat(fd)
        if not stat.S_ISDIR(info.st_mode) and info.st_nlink > 1 and obj.parent is not None:
            others = obj.others = obj.others or []
            others.append((obj.parent, obj.name))
            obj.parent.pins += 1
            outdated = others.index((parent, name)) if (parent, name) in others else 0
            if (parent, name) in others or len(others) > _MAX_OTHER_NAMES:
                others.pop(outdated)[0].pins -= 1
        self._place(obj, parent, name)
        if obj.number < _TRANSIENT:
            self._index.moved(obj.number, parent.number, name)

    def known(self, fd: int, parent: Object) -> Object | None:
        """The object that `fd` (O_PATH) refers to, if the kernel knows it already."""
        linux.assume(linux.ROOT)
        return self._by_handle.get(self._identify(fd, parent)[0])

    def moved(self, parent: Object, name: bytes) -> Object | None:
        """Something was renamed to `name` in `parent`: remember where it is now. None if it is not there any more."""
        linux.assume(linux.ROOT)
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd(parent))
            obj = self.resolve(fd, parent, name)
        except OSError:
            return None  # already somewhere else; looked for when it is asked about
        self._drop_if_unused(obj)
        return obj

    def places(self, obj: Object, info: os.stat_result) -> Iterator[tuple[Object, bytes]]:
        """Where in the tree `obj` is at this moment, as (directory, name): at least once for each hard link known.

        Nothing for what is not below the root any more. `info` is its present stat.
        """
        if obj.parent is not None and (info.st_ctime_ns == obj.checked or info.st_nlink == 0):
            yield obj.parent, obj.name
        elif stat.S_ISDIR(info.st_mode):
            self._find_directory(obj, info)
            if obj.parent is not None:
                yield obj.parent, obj.name
        elif obj.parent is not None and self.is_at(info, obj.parent, obj.name):
            self._checked(obj, info)
            yield obj.parent, obj.name
        for parent, name in list(obj.others or ()):
            if self.is_at(info, parent, name):
                yield parent, name

    @staticmethod
    def is_settled(info: os.stat_result) -> bool:
        """Would any further change show in another ctime?

        Some file systems keep whole seconds: ext2, ext3, and ext4 with inodes of 128 bytes.
        """
        tick = _TICK_NS if info.st_ctime_ns % _SECOND_NS else _SECOND_NS + _TICK_NS
        return time.time_ns() - info.st_ctime_ns > tick

    def _checked(self, obj: Object, info: os.stat_result) -> None:
        if self.is_settled(info):
            obj.checked = info.st_ctime_ns

    def is_at(self, info: os.stat_result, parent: Object, name: bytes) -> bool:
        """Does `name` in the directory lead to what has this stat?"""
        linux.assume(linux.ROOT)
        try:
            fd = self.fd(parent)
            if self._shunned and name in self.shunned(os.fstat(fd)):
                return False
            there = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (info.st_dev, info.st_ino)

    def is_child(self, obj: Object, parent: Object) -> bool:
        """Is this directory (still) in that one?"""
        fd = self.fd(obj)
        if self._leads_back:
            linux.assume(linux.ROOT)
            try:
                up = self._open_above(fd)
            except Stale:
                return False
            above = os.fstat(up)
            os.close(up)
            return self._id(above) == (parent.inode or self._id(os.fstat(self.fd(parent))))
        try:
            above = os.stat("..", dir_fd=fd)
        except PermissionError:  # for whoever was served last
            linux.assume(linux.ROOT)
            above = os.stat("..", dir_fd=fd)
        return self._id(above) == (parent.inode or self._id(os.fstat(self.fd(parent))))

    def _find_directory(self, obj: Object, info: os.stat_result) -> None:
        """Directories know where they are: follow "..", and ask the kernel for the name.

        Never by looking at what else is there: outside the tree, that may be the daemon's own mount.
        """
        name = os.path.basename(os.readlink(f"/proc/self/fd/{self.fd(obj)}".encode()))
        parent = self._above(obj) if self._was_inside(obj) else None
        if parent is None or not self.is_at(info, parent, name):
            self._displace(obj)
            return
        if parent is not obj.parent or name != obj.name:
            self._place(obj, parent, name)
            if obj.number < _TRANSIENT:
                self._index.moved(obj.number, parent.number, name)
        self._checked(obj, info)

    def _displace(self, obj: Object) -> None:
        """`obj` is nowhere in the tree."""
        parent = self._leave(obj)
        if parent is not None:
            parent.pins -= 1
            self._drop_if_unused(parent)

    def parent_directory(self, obj: Object) -> Object | None:
        """What ".." of a directory is; the root is its own, and None is for what is no longer below the root."""
        if obj is self.root:
            return obj
        return self._above(obj) if self._is_inside(obj) else None

    def _above(self, obj: Object) -> Object:
        linux.assume(linux.ROOT)
        fd = self._open_above(self.fd(obj))
        known = self.known(fd, obj)
        if known is not None:
            os.close(fd)
            return known
        return self.resolve(fd, None, b"")

    def _open_above(self, fd: int) -> int:
        """Open (O_PATH) what ".." is.

        Raises:
            Stale: the daemon's own mount is on top of it.
        """
        above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        if self._leads_back and linux.device_of(above) == self._own_device:
            os.close(above)
            raise Stale
        return above

    def _was_inside(self, obj: Object) -> bool:
        """Was this directory below the root a moment ago?

        For who goes on to the top anyway, level by level: to walk all the way at each would take a deep path's
        requests minutes, and everybody else with them.
        """
        now = time.monotonic()
        if now > self._inside_until:
            self._inside.clear()
            self._inside_until = now + _MOMENT
        return self._id(os.fstat(self.fd(obj))) in self._inside or self._is_inside(obj)

    @staticmethod
    def _id(info: os.stat_result) -> tuple[int, int]:
        return info.st_dev, info.st_ino

    def _is_inside(self, obj: Object) -> bool:
        """Is this directory still below the root of the tree?"""
        linux.assume(linux.ROOT)
        root = self._id(os.fstat(self.fd(self.root)))
        passed: list[tuple[int, int]] = []
        fd = os.dup(self.fd(obj))
        try:
            here = self._id(os.fstat(fd))
            for _ in range(_MAX_DEPTH):
                if here == root:
                    self._inside.update(passed)
                    return True
                passed.append(here)
                try:
                    above = self._open_above(fd)
                except Stale:
                    return False
                os.close(fd)
                fd = above
                here = self._id(os.fstat(fd))
                if here == passed[-1]:
                    return False  # "/"
        finally:
            os.close(fd)
        return False

    # -- what has to be waited for -----------------------------------------------------------------

    def look(self, obj: Object, name: bytes | None) -> Callable[[], list[tuple[Object, int]]]:
        """What a thread has to do so that looking at `obj`, and at `name` in it, takes no time afterwards.

        Returns:
            to be called in a thread; its result is for `looked`.

        Raises:
            OSError: there are too many descriptors.
        """
        linux.assume(linux.ROOT)
        chain: list[tuple[Object, int, int, bytes]] = []
        at: Object | None = obj
        try:
            while at is not None and self.waits(at):
                # What is not open has to be opened by its handle first.
                fd = os.dup(at.fd) if at.fd >= 0 else -1
                chain.append((at, fd, at.filesystem.fd if at.filesystem.decodable else -1, at.handle[4:]))
                at = at.parent
        except OSError:
            for _, fd, _, _ in chain:
                if fd >= 0:
                    os.close(fd)
            raise

        def work() -> list[tuple[Object, int]]:
            linux.assume(linux.ROOT)
            found = []
            for known, duplicate, mount_fd, handle in chain:
                with contextlib.suppress(OSError):
                    fd = duplicate
                    if fd < 0 <= mount_fd:
                        fd = linux.open_by_handle(mount_fd, handle, os.O_PATH | os.O_NOFOLLOW)
                    if fd >= 0:
                        found.append((known, fd))
                        os.fstat(fd)
                        if known is obj and name is not None:
                            os.stat(name, dir_fd=fd, follow_symlinks=False)
            return found

        return work

    def looked(self, found: list[tuple[Object, int]]) -> None:
        """Keep what a thread had to open."""
        for obj, fd in found:
            if obj.fd < 0 and self._objects.get(obj.number) is obj:
                self._keep(obj, fd)
            else:
                os.close(fd)

    # -- descriptors -------------------------------------------------------------------------------

    def fd(self, obj: Object) -> int:
        """A descriptor (O_PATH, or one that a client has open) for `obj`, good until the next await.

        Raises:
            Stale: the object is gone.
        """
        if obj.fd >= 0:
            obj.used = self._uses = self._uses + 1
            return obj.fd
        if obj.open_files:
            return obj.open_files[-1]
        linux.assume(linux.ROOT)
        try:
            if obj.filesystem.decodable:
                fd = linux.open_by_handle(obj.filesystem.fd, obj.handle[4:], os.O_PATH | os.O_NOFOLLOW)
            else:
                fd = self._open_by_name(obj)
        except OSError as exc:
            if exc.errno not in _NO_ROOM:
                raise Stale from None
            if not self.shed():
                raise
            return self.fd(obj)
        self._keep(obj, fd)
        return fd

    def _open_by_name(self, obj: Object) -> int:
        # From above, so that there is no recursion through many levels.
        closed = []
        above = obj.parent
        while above is not None and above.fd < 0 and not above.filesystem.decodable:
            closed.append(above)
            above = above.parent
        for above in reversed(closed):
            with contextlib.suppress(Stale):
                self.fd(above)
        for parent, name in [*([(obj.parent, obj.name)] if obj.parent else []), *(obj.others or [])]:
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd(parent))
            except OSError as exc:
                if exc.errno in _NO_ROOM:
                    raise
                continue
            if self._identify(fd, parent)[0] == obj.handle:
                return fd
            os.close(fd)
        raise Stale

    def _keep(self, obj: Object, fd: int) -> None:
        obj.fd = fd
        obj.used = self._uses = self._uses + 1
        self._open[obj.number] = obj
        obj.inode = self._id(os.fstat(fd))
        self._by_inode[obj.inode] = obj
        if len(self._open) > self._max_fds:
            self._close_oldest(self._max_fds // 8)

    def _close_oldest(self, count: int) -> int:
        """Close up to `count` descriptors, least recently used first; those a request works with stay."""
        old = sorted(self._open.values(), key=lambda obj: obj.used)[:-_IN_USE]
        closable = (obj for obj in old if self._reopenable(obj))
        oldest = list(itertools.islice(closable, count))
        for obj in oldest:
            self._close(obj)
        return len(oldest)

    def shed(self) -> int:
        """There are too many descriptors: close half of those kept.

        Returns:
            how many were closed.
        """
        return self._close_oldest(len(self._open) // 2)

    def _reopenable(self, obj: Object) -> bool:
        return obj is not self.root and obj.filesystem.has_handles

    def _close(self, obj: Object) -> None:
        if obj.fd >= 0:
            os.close(obj.fd)
            obj.fd = -1
            self._open.pop(obj.number, None)
            if obj.inode is not None and self._by_inode.get(obj.inode) is obj:  # a bind mount may show it twice
                del self._by_inode[obj.inode]
            obj.inode = None

    def close_idle(self) -> None:
        """Close descriptors not used since the last call: a deleted file's space is free only then.

        Only between requests.
        """
        for obj in [obj for obj in self._open.values() if self._reopenable(obj)]:
            if obj.used <= self._uses_before:
                self._close(obj)
        self._uses_before = self._uses

    def sweep(self) -> Callable[[], list[int]]:
        """Look whether the next objects of the index still exist; who was idle when it was deleted is not missed.

        Returns:
            to be called in a thread; its result, the numbers of those that are gone, is for `swept`.
        """
        # Only where what is asked is for certain the file system that the handle is of.
        sure = {
            filesystem.number: filesystem.fd
            for filesystem in self._by_number.values()
            if filesystem.decodable and not filesystem.far and filesystem.kind in _KNOWN_BY_ID
        }
        rows = self._index.after(self._swept, _SWEEP)
        self._swept = rows[-1][0] if rows else 0
        chosen = [
            (number, sure[of], handle[4:])
            for number, handle in rows
            if number not in self._objects and (of := int.from_bytes(handle[:4], "little")) in sure
        ]

        def look() -> list[int]:
            linux.assume(linux.ROOT)
            return [number for number, fd, handle in chosen if _is_gone(fd, handle)]

        return look

    def swept(self, gone: list[int]) -> None:
        """Take these out of the index."""
        for number in gone:
            if number not in self._objects:
                self._index.remove(number)

    def batch(self) -> AbstractContextManager[None]:
        """Many numbers at the price of one; must not be held across an await."""
        return self._index.batch()

    def opened(self, obj: Object, fd: int) -> None:
        """A client opened the object: while it has it open, it stays reachable through `fd`."""
        if obj.open_files is None:
            obj.open_files = []
        obj.open_files.append(fd)
        obj.pins += 1

    def closed(self, obj: Object, fd: int) -> None:
        """The counterpart of `opened`; `fd` is the caller's to close."""
        assert obj.open_files is not None
        obj.open_files.remove(fd)
        obj.pins -= 1
        self._drop_if_unused(obj)

    def close(self) -> None:
        """Close every descriptor."""
        self._mount_changes.close()
        for obj in list(self._open.values()):
            self._close(obj)
        for filesystem in {*self._by_mount.values(), *self._by_number.values()}:
            if filesystem.fd >= 0:
                os.close(filesystem.fd)
