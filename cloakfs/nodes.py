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
import resource
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from . import linux
from .index import Index
from .linux import mountinfo as mounts
from .tree import calls
from .unmount import KINDS

if TYPE_CHECKING:
    from .cloak import Condition
    from .passages import Passage

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

_NO_VIEWS: frozenset[int] = frozenset()

# How long a directory that was below the root counts as being there, in seconds.
_MOMENT = 0.02

# A change within the clock tick (at most 10 ms) in which a place was checked would not show in the ctime.
_TICK_NS = 20_000_000
_SECOND_NS = 1_000_000_000

# No ctime, whereas 0 is what file systems without one may say.
_NEVER = -(1 << 80)


# Their id (f_fsid) is their own, and stays.
_KNOWN_BY_ID = ("ext2", "ext3", "ext4", "btrfs")

# The id of a tmpfs (from Linux 5.13 on) is its own, too, but nothing of it is left when the machine was started again.
_LOST_WITH_THE_BOOT = "tmpfs"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

# So many objects of the index are looked at at a time: some milliseconds in a thread.
_SWEEP = 200

# A rename leaves the ctime of what is renamed alone. (Of what is far, nobody knows: with sshfs it is the mtime.)
_SILENT_KINDS = frozenset({"vfat", "msdos", "exfat"})

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


class TooSoon(PermissionError):
    """What is called so is on a mount that was not met yet, and just now the table of mounts may not be read again.

    Attributes:
        seconds: how long to wait.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.EACCES, os.strerror(errno.EACCES))
        self.seconds = seconds


# A local file system that kept the session loop waiting so long, twice in a while, is asked from threads for a while.
_SLOW_SECONDS = 0.005
_SLOW_FOR_SECONDS = 10.0

# After the table of mounts was read for a request, so many times as long it is not read again for one.
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
    suspect_until: float = 0.0  # the same
    below_far: bool = False  # is it mounted inside of what is far?
    pin: int = -1  # refers to the mount where `fd` does not, so that no other one is given its id
    is_certain: bool = False  # is its number that of no other one that is mounted at the same place later?

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
    def by_threads(self) -> bool:
        """Is what is above an object found out by threads alone (`Nodes.look`)?"""
        return self.far or self.below_far

    @property
    def tells_moves(self) -> bool:
        """Does the ctime of an object show that it was renamed?"""
        return not self.far and self.kind not in _SILENT_KINDS

    @property
    def waits(self) -> bool:
        """Is it better asked from a thread?"""
        return self.far or self.below_far or (self.slow_until > 0 and time.monotonic() < self.slow_until)

    def stat(self, fd: int) -> linux.Stat:
        """The stat of a descriptor on it. Of what is far, as the kernel remembers it: a thread has asked just now."""
        return calls.statx_fd(fd)[0] if self.far else calls.fstat(fd)

    def begin(self) -> tuple[float, int]:
        """Call before it is asked from the session loop; the result is for `took`."""
        now = time.monotonic()
        return now, _waits_of_this_thread() if now < self.suspect_until else -1

    def took(self, began: tuple[float, int]) -> None:
        """It has answered, or failed. If it made the loop wait for long, threads are to ask it for a while.

        On a busy machine a call may take long for want of a processor, and threads would make that worse. To find out
        costs as much as a fast call: so only after a first one that took long it is asked of the next ones.
        """
        since, waits = began
        now = time.monotonic()
        if now - since <= _SLOW_SECONDS or self.in_memory:
            return
        if waits < 0:
            self.suspect_until = now + _SLOW_FOR_SECONDS
        elif _waits_of_this_thread() > waits:
            self.slow_until = now + _SLOW_FOR_SECONDS
            self.suspect_until = self.slow_until + _SLOW_FOR_SECONDS


def _waits_of_this_thread() -> int:
    """How often it has given up the processor to wait for something (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _is_gone(mount_fd: int, handle: bytes) -> bool:
    try:
        calls.close(calls.find_handle(mount_fd, handle))
    except OSError as exc:
        return exc.errno == errno.ESTALE
    return False


def _identity(fd: int, kind: str) -> int | str:
    """What tells the file system that `fd` (O_PATH) is on from another one mounted there later; 0 if nothing does."""
    if kind in _KNOWN_BY_ID:
        return calls.fstatvfs(fd).f_fsid
    if kind == _LOST_WITH_THE_BOOT:
        number, boot = calls.fstatvfs(fd).f_fsid, _boot_id()
        return f"{number}@{boot}" if number and boot else 0
    if kind == "xfs":  # of which f_fsid is the number of the device
        with contextlib.suppress(OSError):
            opened = calls.open(linux.ROOT, fd, os.O_RDONLY | os.O_NONBLOCK)
            try:
                return calls.xfs_uuid(opened).hex()
            finally:
                calls.close(opened)
    return 0


def _boot_id() -> str:
    """What names the time since the machine was started; "" if the kernel does not tell."""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
    return ""


def _is_lost(key: str, boot: str) -> bool:
    """Is a file system that the index knows by this key (`Nodes._new_filesystem`) gone for good?"""
    _, _, known = key.partition("\0")
    kind, _, identity = known.partition("\0")
    _, at, its_boot = identity.partition("@")
    return kind == _LOST_WITH_THE_BOOT and bool(at) and bool(boot) and its_boot != boot


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
        "barrier", "checked", "children", "condition", "content", "era", "ever_kept", "fd", "filesystem", "generation",
        "handle", "inode", "kept", "lookups", "name", "number", "open_files", "others", "parent", "passage", "pins",
        "plain_at", "public", "strays", "told_size", "told_sizes", "trusted", "used",
    )  # fmt: skip

    def __init__(self, number: int, handle: bytes, filesystem: Filesystem) -> None:
        self.number = number
        self.handle = handle
        self.filesystem = filesystem
        self.lookups = 0
        self.pins = 0  # children that are known, and open files
        self.children: dict[bytes, Object] | None = None  # those whose place this is
        self.strays: set[Object] | None = None  # those with a name here that `children` does not lead to
        self.parent: Object | None = None
        self.name = b""
        self.others: list[tuple[Object, bytes]] | None = None  # further names of a hard link
        self.checked = _NEVER  # the ctime at which `parent` and `name` were true
        self.plain_at = _NEVER  # the ctime at which it had no ACL
        # Of a directory, what `passages` remembers: that it is in its place, who sees it, and who gets there.
        self.trusted = -1
        self.condition: Condition | None = None
        self.passage: Passage | None = None
        self.kept = _NO_VIEWS  # numbers of the views in which the kernel remembers more than it asked for
        self.public = _NO_VIEWS  # of these, those in which everybody may search it, and all directories above
        self.barrier: Object | None = None  # the directory, perhaps above, at which not everybody got through last
        self.era = 0  # of the kernel's cache, to which `kept` and `public` belong
        # The same, but never forgotten, and of what is below as well: see `Nodes.hold`.
        self.ever_kept = _NO_VIEWS
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


class _Link(NamedTuple):
    """An object to look at: its descriptor, or -1, and where it may be, by number of a directory and name in it."""

    obj: Object
    fd: int
    places: list[tuple[int, bytes]]


class Looked(NamedTuple):
    """What a thread found.

    Attributes:
        opened: objects and their descriptors, by number.
        moved: directories that are not where they were; what is above now, and what they are called there.
        there: st_dev and st_ino of what was found, by number of the directory, and name.
    """

    opened: dict[int, tuple[Object, int]]
    moved: list[tuple[Object, int, bytes]]
    there: dict[tuple[int, bytes], tuple[int, int]]


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
        self._held: dict[frozenset[int], frozenset[int]] = {}  # one of each, for `Object.ever_kept`
        self._beside: dict[tuple[int, int], set[bytes]] = {}  # where something far is mounted, and what it is called
        self.on_new_filesystem: Callable[[Filesystem], None] | None = None
        self._there: Mapping[tuple[int, bytes], tuple[int, int]] = {}
        self._open: dict[int, Object] = {}
        self._uses = 0  # of descriptors
        self._uses_before = 0  # when the idle ones were closed last
        self._by_inode: dict[tuple[int, int], Object] = {}  # of those in `_open`
        self._mount_changes = mounts.Changes()
        self._mounts_again = 0.0  # before that, the table of mounts is not read for a request
        self._shunned: set[int] = set()  # ids of mounts not to be looked into, until something is mounted or unmounted
        self._inside: set[tuple[int, int]] = set()  # directories seen below the root, good for a moment
        self._inside_until = 0.0
        self.trust = 0  # an `Object.trusted` that is not this is worth nothing
        boot = _boot_id()
        self._lost = {number for number, key in index.filesystems() if _is_lost(key, boot)}  # file systems
        self._swept = 0  # the last object that `sweep` has looked at
        self._transient = _TRANSIENT | int.from_bytes(os.urandom(5), "little")
        self._own_device: str | None = None
        self._copied: dict[int, mounts.Place] | None = None
        if covered:
            fd = calls.copy_top(source)
            self._copied = self._find_copies(fd)
        else:
            fd = calls.find_top(source)
        top = mounts.id_of(fd)
        filesystem = self._new_filesystem(top, fd, self._table().get(top))
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
        there = self._mounted_inside()
        return {number: place.path for number, place in there if not (place.mounter or place.kind in KINDS)}

    def _mounted_inside(self) -> list[tuple[int, mounts.Place]]:
        linux.assume(linux.ROOT)
        inside = self._source.rstrip("/") + "/"
        return [(number, place) for number, place in self._table().items() if place.path.startswith(inside)]

    def _table(self) -> dict[int, mounts.Place]:
        """What is mounted, by mount id; of a copy, what was when it was made."""
        return mounts.by_id() if self._copied is None else self._copied

    def _find_copies(self, top: int) -> dict[int, mounts.Place]:
        """The mounts of a copy of the tree, told as the ones that they are copies of."""
        fd = calls.find_top(self._source)
        try:
            original = mounts.id_of(fd)
        finally:
            calls.close(fd)
        table = mounts.by_id()
        copies = {mounts.id_of(top): original}
        inside = self._source.rstrip("/") + "/"
        not_to_pass: list[str] = []
        for number, place in table.items():
            if not place.path.startswith(inside) or place.path.startswith(tuple(not_to_pass)):
                continue
            if place.mounter:
                not_to_pass.append(place.path + "/")
            with contextlib.suppress(OSError):
                fd = calls.find(linux.ROOT, top, place.path.removeprefix(inside))
                try:
                    copy = mounts.id_of(fd)
                finally:
                    calls.close(fd)
                if (
                    copy not in copies or table[copies[copy]].path == place.path
                ):  # of several at a place, the one on top
                    copies[copy] = number
        copy_of = {number: copy for copy, number in copies.items()}
        return {
            copy: table[number]._replace(parent=copy_of.get(table[number].parent, 0)) for copy, number in copies.items()
        }

    def served_at(self, device: str) -> None:
        """The tree is served by the file system with this device (`mounts.Place`): that must never be looked into.

        Where it shows up inside of the tree (a bind mount), the name leads nowhere: the daemon would wait for itself.
        """
        self._own_device = device

    def shunned_places(self) -> set[tuple[int, str]]:
        """Ids and mount points of what must not be looked into, inside of the tree."""
        return {(number, place.path) for number, place in self._mounted_inside() if self._leads_nowhere(place)}

    def _leads_nowhere(self, place: mounts.Place) -> bool:
        """Is this, inside of the tree, not to be looked into?

        So it is with FUSE file systems of users: whoever serves one may answer late, or never. And with any cloakfs:
        this one would wait for itself, another one may hide from root what callers make there, and what is for a server
        alone would be open to them.
        """
        return place.mounter != 0 or place.kind in KINDS or place.device == self._own_device

    def stat(self, fd: int) -> linux.Stat:
        """The stat of what was just found by its name, before anything else is done with it.

        `fd` (O_PATH) refers to it. A name leads nowhere if the mount that was found there must not be looked into.

        Raises:
            PermissionError: it must not.
            TooSoon: perhaps it must not.
        """
        info, mount_id = calls.statx_fd(fd)
        if mount_id not in self._by_mount:
            self._meet(mount_id, fd)
        return info

    def _meet(self, mount_id: int, fd: int) -> Filesystem:
        """Know the mount that `fd` (O_PATH) was found on. Mounts that are known are held, so that ids stay theirs.

        Raises:
            PermissionError: it must not be looked into, or this is not the session loop.
            TooSoon: whoever mounts and unmounts all the time is not to keep others waiting.
        """
        if not linux.in_main_thread():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if self._mount_changes.seen():
            self._shunned.clear()
        if mount_id not in self._shunned:
            now = time.monotonic()
            if now < self._mounts_again:
                raise TooSoon(self._mounts_again - now)
            table = self._mount_changes.table() if self._copied is None else self._copied
            self._mounts_again = time.monotonic() + _SHARE_OF_MOUNTS * (time.monotonic() - now)
            place = table.get(mount_id)
            if place is None:
                raise TooSoon(0.0)  # it has just been unmounted
            if not self._leads_nowhere(place):
                return self._new_filesystem(mount_id, fd, place)
            self._shunned.add(mount_id)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def at_path(self, path: str) -> tuple[Object, bytes] | None:
        """The directory, and the name in it, that a path in the tree leads to, if that is known; nobody is asked."""
        inside = os.path.relpath(path, self._source)
        *above, name = os.fsencode(inside).split(b"/")
        at = self.root
        for level in above:
            below = (at.children or {}).get(level)
            if below is None:
                return None
            at = below
        return at, name

    def waits(self, obj: Object) -> bool:
        """Is it better to ask about this object, or a name in it, from a thread?"""
        return obj.filesystem.waits or bool(self.far_names(obj))

    def is_name_far(self, parent: Object, name: bytes) -> bool:
        """May whoever follows this name have to wait for another machine or process?"""
        return parent.filesystem.far or name in self.far_names(parent)

    def far_names(self, obj: Object) -> Set[bytes]:
        """The names in this directory at which something far is mounted."""
        if not self._beside or obj.inode is None:
            return frozenset()
        return self._beside.get(obj.inode, frozenset())

    def _meet_mount_at(self, path: str) -> None:
        """Know the mount at `path` before anybody crosses it, so that old handles on it can be decoded."""
        try:
            inside = os.path.relpath(path, self._source)
            fd = calls.find(linux.ROOT, self.root.fd, inside)
        except OSError as exc:
            log.warning("%s: %s; handles below it are not decoded", path, exc.strerror)
            return
        try:
            mount_id = mounts.id_of(fd)
            place = self._table().get(mount_id)
            if mount_id not in self._by_mount and place is not None and not self._leads_nowhere(place):
                self._new_filesystem(mount_id, fd, place)
        finally:
            calls.close(fd)

    def _new_filesystem(self, mount_id: int, fd: int, place: mounts.Place | None) -> Filesystem:
        linux.assume(linux.ROOT)
        path, kind = (place.path, place.kind) if place else (os.fsdecode(calls.path_of(fd)), "unknown")
        inside = os.path.relpath(path, self._source) if path.startswith(self._source.rstrip("/") + "/") else "."
        identity = _identity(fd, kind)
        key = partial("{}\0{}\0{}".format, inside, kind)
        # In 0.1.0 these had none: what is known from then is taken to be of the one that is there now.
        former = _storable(key(0)) if kind in ("xfs", _LOST_WITH_THE_BOOT) and identity else None
        number = self._index.filesystem(_storable(key(identity)), former)
        filesystem = Filesystem(number, kind, path, -1, is_certain=identity != 0)
        if self._by_mount and place is not None:
            above_it = self._by_mount.get(place.parent)
            filesystem.below_far = above_it is not None and above_it.by_threads
        if filesystem.far:
            self._ask_far(filesystem, fd)
            with contextlib.suppress(OSError):
                above, name = os.path.split(os.fsencode(path))
                self._beside.setdefault(self._id(calls.stat_path(above)), set()).add(name)
        else:
            self._describe(filesystem, fd)
        if filesystem.fd < 0:
            filesystem.pin = calls.dup(fd)
        self._by_mount[mount_id] = filesystem
        self._by_number[filesystem.number] = filesystem
        if self.on_new_filesystem is not None:
            self.on_new_filesystem(filesystem)
        return filesystem

    @staticmethod
    def _describe(filesystem: Filesystem, fd: int) -> None:
        """Find out what file handles it has. `fd` refers to where it is mounted."""
        filesystem.device = calls.fstat(fd).st_dev
        try:
            filesystem.fd = calls.open(linux.ROOT, fd, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            filesystem.decodable = False  # a device or socket that is a mount point itself
        for flags in (0, linux.AT_HANDLE_FID):
            try:
                handle, _ = calls.name_to_handle(fd, flags)
            except OSError:
                continue
            filesystem.flags = flags
            try:
                calls.close(calls.find_handle(filesystem.fd, handle))
            except OSError:
                filesystem.decodable = False
            break
        else:
            filesystem.has_handles = filesystem.decodable = False

    def _ask_far(self, filesystem: Filesystem, fd: int) -> None:
        """The same, of what may never answer: for a moment everything waits for it, but no longer."""
        answer = Filesystem(filesystem.number, filesystem.kind, filesystem.path, -1)
        own = calls.dup(fd)

        def ask() -> None:
            with contextlib.suppress(OSError):
                self._describe(answer, own)
                done.set()

        done = threading.Event()
        threading.Thread(target=ask, daemon=True).start()
        if done.wait(_MEET_SECONDS):
            calls.close(own)
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
            calls.close(fd)
            raise
        if obj.fd < 0:
            self._keep(obj, fd)
        else:
            calls.close(fd)
        return obj

    def at_place(self, parent: Object, name: bytes, info: linux.Stat) -> Object | None:
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
            handle, mount_id = calls.name_to_handle(fd, flags)
        except OSError:
            handle, mount_id = b"", mounts.id_of(fd)
        filesystem = self._by_mount.get(mount_id) or self._meet(mount_id, fd)
        if not filesystem.has_handles:
            # Good as long as a descriptor is kept open: until then the inode number is not used again.
            info, _ = calls.statx_fd(fd)
            return struct.pack("<IQQ", filesystem.number, info.st_dev, info.st_ino), filesystem
        if not handle or filesystem.flags != flags:
            handle, _ = calls.name_to_handle(fd, filesystem.flags)
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
            if obj.fd >= 0 and obj.number < _TRANSIENT and not obj.filesystem.far and calls.fstat(obj.fd).st_nlink == 0:
                self._index.remove(obj.number)
            self._close(obj)
            obj.barrier = None  # which may be this object: nothing but the garbage collector would free it
            others, obj.others = obj.others, None
            for parent, _ in others or ():
                self._unpin(parent, obj)
                self._drop_if_unused(parent)
            parent_ = self._leave(obj)
            if parent_ is not None:
                self._unpin(parent_, obj)
            obj = parent_

    def __len__(self) -> int:
        return len(self._objects)

    def objects(self) -> list[Object]:
        """All that are known."""
        return list(self._objects.values())

    def by_handle(self, filesystem: Filesystem, handle: bytes) -> Object | None:
        """The object that a file system knows by this handle, if the kernel knows it."""
        return self._by_handle.get(filesystem.number.to_bytes(4, "little") + handle)

    def place_of(self, filesystem: Filesystem, handle: bytes) -> tuple[Object, bytes] | None:
        """Where a directory is that a local file system knows by this handle, if the kernel knows what is above it."""
        try:
            fd = calls.find_handle(filesystem.fd, handle, os.O_DIRECTORY)
        except OSError:
            return None
        try:
            above, _ = self._open_above(fd)
            try:
                parent = self._by_handle.get(self._identify(above, None)[0])
            finally:
                calls.close(above)
            return (parent, os.path.basename(calls.path_of(fd))) if parent else None
        except OSError:
            return None
        finally:
            calls.close(fd)

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
        replaced = parent.children.get(name)
        if replaced is not None:
            self._stray(parent, replaced)  # until it is found elsewhere, or nowhere
        parent.children[name] = obj
        if obj.ever_kept:
            self.hold(parent, obj.ever_kept)
        if before is not None:
            self._unpin(before, obj)
            if before is not parent:
                self._drop_if_unused(before)

    @staticmethod
    def _leave(obj: Object) -> Object | None:
        """`obj` has no place now; returns where it was."""
        obj.trusted = -1
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
                self._unpin(obj, at)
            at = at.parent

    @staticmethod
    def _stray(parent: Object, obj: Object) -> None:
        if parent.strays is None:
            parent.strays = set()
        parent.strays.add(obj)

    @staticmethod
    def _unpin(parent: Object, obj: Object) -> None:
        """`obj` has one name less in this directory."""
        parent.pins -= 1
        if parent.strays and obj.parent is not parent and all(above is not parent for above, _ in obj.others or ()):
            parent.strays.discard(obj)

    def hold(self, obj: Object, numbers: frozenset[int]) -> None:
        """The kernel may remember something of `obj` in the views with these numbers.

        That is noted for everything above, too (`Object.ever_kept`): where nothing is noted, nothing below has to be
        forgotten.
        """
        at: Object | None = obj
        while at is not None and not numbers <= at.ever_kept:
            ever = at.ever_kept | numbers
            at.ever_kept = self._held.setdefault(ever, ever)
            at = at.parent

    @staticmethod
    def within(directory: Object) -> list[Object]:
        """What is known to have, or to have had, a name in this directory: more than there is, never less."""
        return [*(directory.children or {}).values(), *(directory.strays or ())]

    def twins(self, obj: Object) -> list[Object]:
        """The same inode, where its file system is mounted more than once; it may be another one with this handle."""
        handle = obj.handle[4:]
        near = (self.by_handle(filesystem, handle) for filesystem in self.filesystems if filesystem.has_handles)
        return [twin for twin in near if twin is not None and twin is not obj]

    def _found_again(self, obj: Object, parent: Object, name: bytes, fd: int) -> None:
        """A known object turned up under another name: moved, or one more hard link."""
        info = obj.filesystem.stat(fd)
        if not stat.S_ISDIR(info.st_mode) and info.st_nlink > 1 and obj.parent is not None:
            others = obj.others = obj.others or []
            others.append((obj.parent, obj.name))
            obj.parent.pins += 1
            self._stray(obj.parent, obj)
            outdated = others.index((parent, name)) if (parent, name) in others else 0
            if (parent, name) in others or len(others) > _MAX_OTHER_NAMES:
                self._unpin(others.pop(outdated)[0], obj)
        self._place(obj, parent, name)
        if obj.number < _TRANSIENT:
            self._index.moved(obj.number, parent.number, name)

    def known(self, fd: int, parent: Object) -> Object | None:
        """The object that `fd` (O_PATH) refers to, if the kernel knows it already."""
        return self._by_handle.get(self._identify(fd, parent)[0])

    def moved(self, fd: int, parent: Object, name: bytes) -> Object | None:
        """What `fd` (O_PATH) refers to was renamed to `name` in `parent`: remember where it is now. Takes `fd` over.

        None if it cannot be known.
        """
        try:
            obj = self.resolve(fd, parent, name)
        except OSError:
            return None  # looked for when it is asked about
        self._drop_if_unused(obj)
        return obj

    def places(self, obj: Object, info: linux.Stat) -> Iterator[tuple[Object, bytes]]:
        """Where in the tree `obj` is at this moment, as (directory, name): at least once for each hard link known.

        Nothing for what is not below the root any more. `info` is its present stat.
        """
        if obj.parent is not None and (info.st_ctime_ns == obj.checked or info.st_nlink == 0):
            yield obj.parent, obj.name
        elif stat.S_ISDIR(info.st_mode) and not obj.filesystem.by_threads:
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
    def is_settled(info: linux.Stat) -> bool:
        """Would any further change show in another ctime?

        Some file systems keep whole seconds: ext2, ext3, and ext4 with inodes of 128 bytes.
        """
        tick = _TICK_NS if info.st_ctime_ns % _SECOND_NS else _SECOND_NS + _TICK_NS
        return time.time_ns() - info.st_ctime_ns > tick

    def _checked(self, obj: Object, info: linux.Stat) -> None:
        if obj.filesystem.tells_moves and self.is_settled(info):
            obj.checked = info.st_ctime_ns

    def is_at(self, info: linux.Stat, parent: Object, name: bytes) -> bool:
        """Does `name` in the directory lead to what has this stat?

        Where something is far, that is so if a thread has just found it so: see `look`.
        """
        if self.is_name_far(parent, name):
            return self._there.get((parent.number, name)) == self._id(info)
        try:
            there, _ = calls.statx(linux.ROOT, self.fd(parent), name)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (info.st_dev, info.st_ino)

    def is_child(self, obj: Object, parent: Object) -> bool:
        """Is this directory (still) in that one?"""
        fd = self.fd(obj)
        if obj.filesystem.far or parent.filesystem.far:
            return self._there.get((parent.number, obj.name)) == self._inode_of(obj)
        above, _ = calls.statx(linux.ROOT, fd, b"..")
        return self._id(above) == self._inode_of(parent)

    def _inode_of(self, obj: Object) -> tuple[int, int]:
        fd = self.fd(obj)
        return obj.inode or self._id(obj.filesystem.stat(fd))

    def _find_directory(self, obj: Object, info: linux.Stat) -> None:
        """Directories know where they are: follow "..", and ask the kernel for the name.

        Never by looking at what else is there: outside the tree, that may be the daemon's own mount.
        """
        name = os.path.basename(calls.path_of(self.fd(obj)))
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
            self._unpin(parent, obj)
            self._drop_if_unused(parent)

    def parent_directory(self, obj: Object) -> Object | None:
        """What ".." of a directory is; the root is its own, and None is for what is no longer below the root."""
        if obj is self.root:
            return obj
        if obj.filesystem.by_threads:
            return obj.parent if obj.parent is not None and self.is_child(obj, obj.parent) else None
        return self._above(obj) if self._is_inside(obj) else None

    def _above(self, obj: Object) -> Object:
        fd, _ = self._open_above(self.fd(obj))
        known = self.known(fd, obj)
        if known is not None:
            calls.close(fd)
            return known
        return self.resolve(fd, None, b"")

    def _open_above(self, fd: int) -> tuple[int, tuple[int, int]]:
        """Open (O_PATH) what ".." is; its st_dev and st_ino.

        Raises:
            Stale: it is on a mount that was not met: outside of the tree, or on top of what was above.
        """
        above = calls.find_above(fd)
        info, mount_id = calls.statx_fd(above)
        if mount_id not in self._by_mount:
            calls.close(above)
            raise Stale
        return above, self._id(info)

    def _was_inside(self, obj: Object) -> bool:
        """Was this directory below the root a moment ago?

        For who goes on to the top anyway, level by level: to walk all the way at each would take a deep path's
        requests minutes, and everybody else with them.
        """
        now = time.monotonic()
        if now > self._inside_until:
            self._inside.clear()
            self._inside_until = now + _MOMENT
        return self._inode_of(obj) in self._inside or self._is_inside(obj)

    @staticmethod
    def _id(info: os.stat_result) -> tuple[int, int]:
        return info.st_dev, info.st_ino

    def _is_inside(self, obj: Object) -> bool:
        """Is this directory still below the root of the tree?"""
        root = self._inode_of(self.root)
        passed: list[tuple[int, int]] = []
        fd = calls.dup(self.fd(obj))
        try:
            here = self._inode_of(obj)
            for _ in range(_MAX_DEPTH):
                if here == root:
                    self._inside.update(passed)
                    return True
                passed.append(here)
                try:
                    above, here = self._open_above(fd)
                except Stale:
                    return False
                calls.close(fd)
                fd = above
                if here == passed[-1]:
                    return False  # "/"
        finally:
            calls.close(fd)
        return False

    # -- what has to be waited for -----------------------------------------------------------------

    def look(self, obj: Object, name: bytes | None = None) -> Callable[[], Looked]:
        """What a thread has to do so that looking at `obj`, its places, and `name` in it, takes no time afterwards.

        Returns:
            to be called in a thread; its result is for `looked`.

        Raises:
            OSError: there are too many descriptors.
        """
        links: dict[int, _Link] = {}
        todo = [obj]
        try:
            while todo:
                at = todo.pop()
                # What is known of a directory need not be looked at, nor, mostly, what is above (see `passages`).
                is_trusted = at is not obj and at.trusted == self.trust and not at.filesystem.by_threads
                if at.number in links or is_trusted or not self.waits(at):
                    continue
                # What is not open has to be opened by its handle, or its name, first.
                fd = calls.dup(at.fd) if at.fd >= 0 else -1
                places = [*([(at.parent, at.name)] if at.parent is not None else []), *(at.others or [])]
                links[at.number] = _Link(at, fd, [(parent.number, name) for parent, name in places])
                todo += [parent for parent, _ in places]
        except OSError:
            for link in links.values():
                if link.fd >= 0:
                    calls.close(link.fd)
            raise

        def work() -> Looked:
            found = Looked({}, [], {})
            for link in reversed(links.values()):
                with contextlib.suppress(OSError):
                    self._look_at_link(link, found)
            if name is not None and obj.number in found.opened:
                with contextlib.suppress(OSError):
                    self.look_at(linux.ROOT, found.opened[obj.number][1], name)
            return found

        return work

    def _look_at_link(self, link: _Link, found: Looked) -> None:
        """In a thread: look at an object and, by its names, in the directories above."""
        obj = link.obj
        fd = link.fd if link.fd >= 0 else self._open_late(link, found)
        found.opened[obj.number] = obj, fd
        info = calls.fstat(fd)
        for number, name in link.places:
            if number in found.opened:
                with contextlib.suppress(OSError):
                    found.there[number, name] = self._id(calls.statx(linux.ROOT, found.opened[number][1], name)[0])
        if obj is self.root or not stat.S_ISDIR(info.st_mode) or not obj.filesystem.by_threads:
            return
        if any(found.there.get(place) == self._id(info) for place in link.places):
            return
        name = os.path.basename(calls.path_of(fd))
        above, here = self._open_above(fd)
        try:
            # What is at the top of a mount that was taken off lies in itself, and has no name.
            is_there = here != self._id(info) and self._id(calls.statx(linux.ROOT, above, name)[0]) == self._id(info)
        except OSError:
            is_there = False
        if is_there:
            found.moved.append((obj, above, name))
        else:
            calls.close(above)

    @staticmethod
    def _open_late(link: _Link, found: Looked) -> int:
        obj = link.obj
        if obj.filesystem.decodable:
            return calls.find_handle(obj.filesystem.fd, obj.handle[4:])
        for number, name in link.places:
            if number in found.opened:
                above = found.opened[number][1]
                fd = calls.find(linux.ROOT, above, name)
                with contextlib.suppress(OSError):
                    if calls.name_to_handle(fd, obj.filesystem.flags)[0] == obj.handle[4:]:
                        return fd
                calls.close(fd)
        raise Stale

    def looked(self, found: Looked) -> bool:
        """Keep what a thread had to open, and what it found (see `recall`).

        Returns:
            True if a directory is somewhere else than it was: then it has to be looked at what is above it now.
        """
        for obj, fd in found.opened.values():
            if obj.fd < 0 and self._objects.get(obj.number) is obj:
                self._keep(obj, fd)
            else:
                calls.close(fd)
        for obj, above, name in found.moved:
            try:
                parent = self.resolve(above, None, b"")
            except OSError:
                continue
            if self._objects.get(obj.number) is not obj:
                self._drop_if_unused(parent)
                continue
            self._place(obj, parent, name)
            if obj.number < _TRANSIENT:
                self._index.moved(obj.number, parent.number, name)
        self.recall(found.there)
        return bool(found.moved)

    def recall(self, there: Mapping[tuple[int, bytes], tuple[int, int]]) -> None:
        """What `Looked.there` says is so, for the request that is being served."""
        self._there = there

    def look_at(self, who: linux.Credentials, directory: int, name: bytes) -> None:
        """In a thread: have the kernel find out what is called `name`, unless that must not be looked into.

        Raises:
            OSError: there is nothing, for example.
        """
        if self._is_far(calls.statx(who, directory, name)[1]):
            fd = calls.find(who, directory, name)
            try:
                self.ask(who, fd)
            finally:
                calls.close(fd)

    def ask(self, who: linux.Credentials, fd: int) -> None:
        """If this is a thread, have the kernel ask what there is to know of what was found, and `fd` refers to.

        Not if it is local; nor if it must not be looked into.
        """
        if not linux.in_main_thread() and self._is_far(calls.statx_fd(fd)[1]):
            calls.ask(who, fd)

    def _is_far(self, mount_id: int) -> bool:
        filesystem = self._by_mount.get(mount_id)
        return filesystem is not None and filesystem.far

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
        try:
            if obj.filesystem.decodable:
                fd = calls.find_handle(obj.filesystem.fd, obj.handle[4:])
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
                fd = calls.find(linux.ROOT, self.fd(parent), name)
            except OSError as exc:
                if exc.errno in _NO_ROOM:
                    raise
                continue
            try:
                if self._identify(fd, parent)[0] == obj.handle:
                    return fd
            except PermissionError:
                pass  # see `stat`
            calls.close(fd)
        raise Stale

    def _keep(self, obj: Object, fd: int) -> None:
        obj.fd = fd
        obj.used = self._uses = self._uses + 1
        self._open[obj.number] = obj
        obj.inode = self._id(obj.filesystem.stat(fd))
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
            calls.close(obj.fd)
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
            if filesystem.decodable and not filesystem.far and filesystem.is_certain
        }
        rows = self._index.after(self._swept, _SWEEP)
        self._swept = rows[-1][0] if rows else 0
        unused = [
            (number, int.from_bytes(handle[:4], "little"), handle[4:])
            for number, handle in rows
            if number not in self._objects
        ]
        lost = [number for number, of, _ in unused if of in self._lost]
        chosen = [(number, sure[of], handle) for number, of, handle in unused if of in sure]

        def look() -> list[int]:
            return lost + [number for number, fd, handle in chosen if _is_gone(fd, handle)]

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
            for fd in (filesystem.fd, filesystem.pin):
                if fd >= 0:
                    calls.close(fd)
