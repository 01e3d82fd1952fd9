"""Which mounts of the tree a name may lead to: those of the administrator, but none of users, and no cloakfs.

A mount becomes known when the daemon starts, or when somebody first comes upon it. From then on it is held open, so
that its id stays its own.
"""

import contextlib
import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Set

from .. import linux
from ..linux import Stat
from ..linux import mountinfo as mounts
from ..unmount import KINDS
from . import calls, filesystems
from .filesystems import Filesystem
from .index import Index
from .objects import Object, Stale, dev_ino

log = logging.getLogger(__name__)

# After the table of mounts was read for a request, so many times as long it is not read again for one.
_SHARE_OF_MOUNTS = 20


class TooSoon(PermissionError):
    """What is called so is on a mount that was not met yet, and just now the table of mounts may not be read again.

    Attributes:
        seconds: how long to wait.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.EACCES, os.strerror(errno.EACCES))
        self.seconds = seconds


class KnownMounts:
    """The mounts of one tree.

    Args:
        source: the root of the real tree.
        index: where numbers are kept.
        covered: see `Nodes`.

    Attributes:
        top: a descriptor (O_PATH) of the root of the tree, which is not closed here.
        root: what the root of the tree lies on.
        by_number: the same mounts as `filesystems`, by the numbers that handles begin with.
        on_new_filesystem: told of each one that becomes known.

    Raises:
        OSError: `source` cannot be opened.
    """

    def __init__(self, source: str, index: Index, *, covered: bool) -> None:
        self._source = source
        self._index = index
        self._by_mount: dict[int, Filesystem] = {}
        self.by_number: dict[int, Filesystem] = {}
        self._beside: dict[tuple[int, int], set[bytes]] = {}  # where something remote is mounted, and what it is called
        self.on_new_filesystem: Callable[[Filesystem], None] | None = None
        self._changes = mounts.Changes()
        self._again = 0.0  # before that, the table of mounts is not read for a request
        self._shunned: set[int] = set()  # ids of mounts not to be looked into, until something is mounted or unmounted
        self._own_device: str | None = None
        self._copied: dict[int, mounts.Place] | None = None
        if covered:
            self.top = calls.copy_top(source)
            self._copied = self._find_copies(self.top)
        else:
            self.top = calls.find_top(source)
        top = mounts.id_of(self.top)
        self.root = self._new_filesystem(top, self.top, self._table().get(top))
        for mount_id, path in self.mounts_below().items():
            if mount_id not in self._by_mount:
                self._meet_mount_at(path)

    @property
    def filesystems(self) -> list[Filesystem]:
        """The mounts met so far, the root's first."""
        return list(self._by_mount.values())

    def mounts_below(self) -> dict[int, str]:
        """What the administrator mounted inside of the tree: mount id -> mount point."""
        there = self._mounted_inside()
        return {number: place.path for number, place in there if not (place.mounter or place.kind in KINDS)}

    def _mounted_inside(self) -> list[tuple[int, mounts.Place]]:
        linux.act_as_daemon()
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

    def stat(self, fd: int) -> Stat:
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
        if self._changes.seen():
            self._shunned.clear()
        if mount_id not in self._shunned:
            now = time.monotonic()
            if now < self._again:
                raise TooSoon(self._again - now)
            table = self._changes.table() if self._copied is None else self._copied
            self._again = time.monotonic() + _SHARE_OF_MOUNTS * (time.monotonic() - now)
            place = table.get(mount_id)
            if place is None:
                raise TooSoon(0.0)  # it has just been unmounted
            if not self._leads_nowhere(place):
                return self._new_filesystem(mount_id, fd, place)
            self._shunned.add(mount_id)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def waits(self, obj: Object) -> bool:
        """Is it better to ask about this object, or a name in it, from a thread?"""
        return obj.filesystem.waits or bool(self.remote_names(obj))

    def is_name_remote(self, parent: Object, name: bytes) -> bool:
        """May whoever follows this name have to wait for another machine or process?"""
        return parent.filesystem.remote or name in self.remote_names(parent)

    def remote_names(self, obj: Object) -> Set[bytes]:
        """The names in this directory at which something remote is mounted."""
        if not self._beside or obj.inode is None:
            return frozenset()
        return self._beside.get(obj.inode, frozenset())

    def _meet_mount_at(self, path: str) -> None:
        """Know the mount at `path` before anybody crosses it, so that old handles on it can be decoded."""
        try:
            inside = os.path.relpath(path, self._source)
            fd = calls.find(linux.ROOT, self.top, inside)
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
        linux.act_as_daemon()
        path, kind = (place.path, place.kind) if place else (os.fsdecode(calls.path_of(fd)), "unknown")
        inside = os.path.relpath(path, self._source) if path.startswith(self._source.rstrip("/") + "/") else "."
        identity = filesystems.identity(fd, kind)
        key, former = filesystems.key(inside, kind, identity), filesystems.former_key(inside, kind, identity)
        number = self._index.filesystem(key, former)
        filesystem = Filesystem(number, kind, path, -1, is_certain=identity != 0)
        if self._by_mount and place is not None:
            # What it is mounted on may have been covered before it was ever met; that is in the root's, or below.
            above_it = self._by_mount.get(place.parent) or next(iter(self._by_mount.values()))
            filesystem.below_remote = above_it.by_threads
        if filesystem.remote:
            filesystem.describe_remote(fd)
            with contextlib.suppress(OSError):
                above, name = os.path.split(os.fsencode(path))
                self._beside.setdefault(dev_ino(calls.stat_path(above)), set()).add(name)
        else:
            filesystem.describe(fd)
        if filesystem.fd < 0:
            filesystem.pin = calls.dup(fd)
        self._by_mount[mount_id] = filesystem
        self.by_number[filesystem.number] = filesystem
        if self.on_new_filesystem is not None:
            self.on_new_filesystem(filesystem)
        return filesystem

    def identify(self, fd: int, parent: Object | None) -> tuple[bytes, Filesystem]:
        """The handle, with the number of its mount before it, of what `fd` was found as in `parent`; and the mount.

        Raises:
            PermissionError: see `stat`.
        """
        near = parent.filesystem if parent is not None else self.root
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

    def open_above(self, fd: int) -> tuple[int, tuple[int, int]]:
        """Open (O_PATH) what ".." is; its st_dev and st_ino.

        Raises:
            Stale: it is on a mount that was not met: outside of the tree, or on top of what was above.
        """
        above = calls.find_above(fd)
        info, mount_id = calls.statx_fd(above)
        if mount_id not in self._by_mount:
            calls.close(above)
            raise Stale
        return above, dev_ino(info)

    def is_remote(self, mount_id: int) -> bool:
        """Is this a known mount of what is remote? (Nobody is to look into one that is not known.)"""
        filesystem = self._by_mount.get(mount_id)
        return filesystem is not None and filesystem.remote

    def close(self) -> None:
        """Close every descriptor."""
        self._changes.close()
        for filesystem in {*self._by_mount.values(), *self.by_number.values()}:
            for fd in (filesystem.fd, filesystem.pin):
                if fd >= 0:
                    calls.close(fd)
