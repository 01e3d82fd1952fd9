"""Which mounts of the tree a name may lead to: the administrator's, but neither those of users nor any cloakfs.

A mount becomes known when the daemon starts, or when a request first reaches it. From then on it is held open, so that
its id is not given to another mount. Other mounts are *excluded*: a name at which one is mounted leads nowhere.
"""

import contextlib
import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Set
from typing import NamedTuple

from .. import linux
from ..fuse.detach import KINDS
from ..linux import Stat
from ..linux import mountinfo as mounts
from ..tuning import STANDARD, Tuning
from . import calls, filesystems
from .filesystems import MountedFilesystem
from .index import Index
from .objects import Object, Stale, dev_ino

log = logging.getLogger(__name__)

# After the mount table was read for a request, this many times as long has to pass before it is read for another one.
_SHARE_OF_MOUNTS = 20


class TooSoon(PermissionError):
    """The name leads to a mount that is not known yet, and the mount table may not be read again just now.

    Attributes:
        seconds: how long to wait.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.EACCES, os.strerror(errno.EACCES))
        self.seconds = seconds


class MountsInside(NamedTuple):
    """What is mounted inside a tree.

    Attributes:
        below: the administrator's mounts: mount id -> mount point.
        excluded: the mount points of the excluded ones.
        of_cloakfs: how many mounts of cloakfs this machine has, anywhere.
    """

    below: dict[int, str]
    excluded: set[str]
    of_cloakfs: int


class TreeMounts:
    """The mounts of one tree.

    Args:
        source: the root of the real tree.
        index: stores the numbers.
        covered: whether the tree is going to lie below the daemon's own mount (`Nodes`).

    Attributes:
        top: a descriptor (O_PATH) of the root of the tree, which this class does not close.
        root: the mount that the root of the tree lies on.
        is_one: whether only one mount is known so far.
        by_mount: the same mounts as `filesystems`, by the ids of the mounts.
        by_number: the same mounts as `filesystems`, by the numbers with which handles begin.
        remote_mountpoints: the names at which a remote file system is mounted, by the `dev_ino` of their directory.
        on_new_filesystem: these are called with each mount that becomes known.

    Raises:
        OSError: `source` cannot be opened.
    """

    def __init__(self, source: str, index: Index, *, covered: bool, tuning: Tuning = STANDARD) -> None:
        self._source = source
        self._tuning = tuning
        self._index = index
        self.by_mount: dict[int, MountedFilesystem] = {}
        self.is_one = False
        self.by_number: dict[int, MountedFilesystem] = {}
        self.remote_mountpoints: dict[tuple[int, int], set[bytes]] = {}
        self.on_new_filesystem: list[Callable[[MountedFilesystem], None]] = []
        self._changes = mounts.MountTableChanges()
        self._not_before = 0.0  # until then, the mount table is not read for a request
        self._excluded: set[int] = set()  # ids of excluded mounts; cleared when the table changes
        self._own_device: str | None = None
        self._copied: dict[int, mounts.Place] | None = None
        if covered:
            self.top = calls.copy_top(source)
            self._copied = self._find_copies(self.top)
        else:
            self.top = calls.find_top(source)
        top = mounts.id_of(self.top)
        self.root = self._new_filesystem(top, self.top, self._table().get(top))
        for mount_id, path in self.inside().below.items():
            if mount_id not in self.by_mount:
                self._admit_mount_at(path)

    @property
    def filesystems(self) -> list[MountedFilesystem]:
        """The mounts known so far, the root's first."""
        return list(self.by_mount.values())

    def inside(self) -> MountsInside:
        """Return what is mounted inside the tree."""
        found, others = mounts.inside(self._source, KINDS)
        if self._copied is not None:
            beginning = self._source.rstrip("/") + "/"
            found = {number: place for number, place in self._copied.items() if place.path.startswith(beginning)}
        below = {number: place.path for number, place in found.items() if not (place.mounter or place.kind in KINDS)}
        return MountsInside(below, {place.path for place in found.values() if self._is_excluded(place)}, others)

    def _table(self) -> dict[int, mounts.Place]:
        """Return what is mounted, by mount id; for a copy, what was mounted when it was made."""
        return mounts.by_id() if self._copied is None else self._copied

    def _find_copies(self, top: int) -> dict[int, mounts.Place]:
        """Return the mounts of a copy of the tree, with the data of the mounts that they are copies of."""
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
                ):  # of several mounts at one place, the topmost
                    copies[copy] = number
        copy_of = {number: copy for copy, number in copies.items()}
        return {
            copy: table[number]._replace(parent=copy_of.get(table[number].parent, 0)) for copy, number in copies.items()
        }

    def served_at(self, device: str) -> None:
        """Note the device (`mountinfo.Place`) of the file system that serves the tree, which must always be excluded.

        Where it shows up inside the tree (a bind mount), the name leads nowhere: the daemon would wait for itself.
        """
        self._own_device = device

    def _is_excluded(self, place: mounts.Place) -> bool:
        """Whether this mount inside the tree is excluded.

        FUSE file systems of users are, because their daemons may answer late or never, and so is every cloakfs: this
        daemon would wait for itself; another cloakfs may hide from root what callers make there, and what is meant for
        a server alone would be open to them.
        """
        return place.mounter != 0 or place.kind in KINDS or place.device == self._own_device

    def stat(self, fd: int) -> Stat:
        """Return the stat of what was just found by its name, before anything else is done with it.

        `fd` (O_PATH) refers to it.

        Raises:
            PermissionError: the mount is excluded.
            TooSoon: it is not known yet whether the mount is excluded.
        """
        info, mount_id = calls.statx_fd(fd)
        if mount_id not in self.by_mount:
            self._admit(mount_id, fd)
        return info

    def _admit(self, mount_id: int, fd: int) -> MountedFilesystem:
        """Make the mount known that `fd` (O_PATH) was found on. Known mounts are held, so that ids stay theirs.

        Raises:
            PermissionError: it is excluded, or this is not the session loop.
            TooSoon: the mount table was read just now; a user who mounts again and again must not make others wait.
        """
        if not linux.in_main_thread():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if self._changes.seen():
            self._excluded.clear()
        if mount_id not in self._excluded:
            now = time.monotonic()
            if now < self._not_before:
                raise TooSoon(self._not_before - now)
            table = self._changes.table() if self._copied is None else self._copied
            self._not_before = time.monotonic() + _SHARE_OF_MOUNTS * (time.monotonic() - now)
            place = table.get(mount_id)
            if place is None:
                raise TooSoon(0.0)  # it has just been unmounted
            if not self._is_excluded(place):
                return self._new_filesystem(mount_id, fd, place)
            self._excluded.add(mount_id)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def waits(self, obj: Object) -> bool:
        """Whether a thread should prefault this object, or a name in it."""
        filesystem = obj.filesystem
        if filesystem.by_threads or (filesystem.slow_until > 0 and filesystem.waits):  # in one call if it is quick
            return True
        return len(self.remote_mountpoints) > 0 and len(self.remote_names(obj)) > 0

    def is_name_remote(self, parent: Object, name: bytes) -> bool:
        """Whether a lookup of this name may have to wait for another machine or process."""
        return parent.filesystem.remote or name in self.remote_names(parent)

    def remote_names(self, obj: Object) -> Set[bytes]:
        """Return the names in this directory at which a remote file system is mounted."""
        if not self.remote_mountpoints or obj.inode is None:
            return frozenset()
        return self.remote_mountpoints.get(obj.inode, frozenset())

    def _admit_mount_at(self, path: str) -> None:
        """Make the mount at `path` known before a request crosses it, so that old handles on it can be decoded."""
        try:
            inside = os.path.relpath(path, self._source)
            fd = calls.find(linux.ROOT, self.top, inside)
        except OSError as exc:
            log.warning("%s: %s; file handles below it cannot be decoded", path, exc.strerror)
            return
        try:
            mount_id = mounts.id_of(fd)
            place = self._table().get(mount_id)
            if mount_id not in self.by_mount and place is not None and not self._is_excluded(place):
                self._new_filesystem(mount_id, fd, place)
        finally:
            calls.close(fd)

    def _new_filesystem(self, mount_id: int, fd: int, place: mounts.Place | None) -> MountedFilesystem:
        path, kind = (place.path, place.kind) if place else (os.fsdecode(calls.path_of(fd)), "unknown")
        inside = os.path.relpath(path, self._source) if path.startswith(self._source.rstrip("/") + "/") else "."
        # A remote file system may never answer; that of the root is waited for.
        identity = 0 if kind == "ceph" and self.by_mount else filesystems.identity(fd, kind)
        key, former = filesystems.key(inside, kind, identity), filesystems.former_key(inside, kind, identity)
        number = self._index.filesystem(key, former)
        below_remote = False
        if self.by_mount and place is not None:
            # The mount under it may have been covered before it became known; then the root's stands in for it.
            above_it = self.by_mount.get(place.parent) or next(iter(self.by_mount.values()))
            below_remote = above_it.by_threads
        filesystem = MountedFilesystem(number, kind, path, -1, below_remote=below_remote, is_certain=identity != 0)
        if filesystem.remote:
            filesystem.describe_remote(fd, self._tuning.filesystem_seconds)
            with contextlib.suppress(OSError):
                above, name = os.path.split(os.fsencode(path))
                self.remote_mountpoints.setdefault(dev_ino(calls.stat_path(above)), set()).add(name)
        else:
            filesystem.describe(fd)
        if filesystem.fd < 0:
            filesystem.pin = calls.dup(fd)
        self.by_mount[mount_id] = filesystem
        self.is_one = len(self.by_mount) == 1
        self.by_number[filesystem.number] = filesystem
        for call in self.on_new_filesystem:
            call(filesystem)
        return filesystem

    def identify(self, fd: int, parent: Object | None) -> tuple[bytes, MountedFilesystem]:
        """Return the handle, prefixed with its mount's number, of what was found in `parent` as `fd`, and the mount.

        Raises:
            PermissionError: the mount is excluded.
        """
        near = parent.filesystem if parent is not None else self.root
        flags = near.flags
        try:
            handle, mount_id = calls.name_to_handle(fd, flags)
        except OSError:
            handle, mount_id = b"", mounts.id_of(fd)
        filesystem = self.by_mount.get(mount_id) or self._admit(mount_id, fd)
        if not filesystem.has_handles:
            # Valid while a descriptor is open, since the inode number is not reused until it is closed.
            info, _ = calls.statx_fd(fd)
            return struct.pack("<IQQ", filesystem.number, info.st_dev, info.st_ino), filesystem
        if not handle or filesystem.flags != flags:
            handle, _ = calls.name_to_handle(fd, filesystem.flags)
        return filesystem.number.to_bytes(4, "little") + handle, filesystem

    def open_above(self, fd: int) -> tuple[int, tuple[int, int]]:
        """Open (O_PATH) ".."; return the descriptor, and its st_dev and st_ino.

        Raises:
            Stale: it is on a mount that is not known: outside the tree, or on top of what was above.
        """
        above = calls.find_above(fd)
        info, mount_id = calls.statx_fd(above)
        if mount_id not in self.by_mount:
            calls.close(above)
            raise Stale
        return above, dev_ino(info)

    def is_remote(self, mount_id: int) -> bool:
        """Whether this is a known mount of a remote file system. (An unknown one may be excluded.)"""
        filesystem = self.by_mount.get(mount_id)
        return filesystem is not None and filesystem.remote

    def close(self) -> None:
        """Close every descriptor."""
        self._changes.close()
        for filesystem in {*self.by_mount.values(), *self.by_number.values()}:
            for fd in (filesystem.fd, filesystem.pin):
                if fd >= 0:
                    calls.close(fd)
