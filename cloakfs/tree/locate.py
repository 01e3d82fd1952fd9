"""Where an object is at this moment: its last known place is verified before it is used."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping

from .. import linux
from ..linux import Credentials, Stat
from . import calls
from .descriptors import Descriptors
from .filesystems import MountedFilesystem
from .mounts import TreeMounts
from .objects import Object, Stale, dev_ino
from .registry import Registry, ReportedPlace, drop_name, known_entry

# How many entries of a directory are searched for a name that the kernel cannot report (in a millisecond).
_MOST_ENTRIES = 2048

# For how many seconds a directory that was found below the root is assumed to stay below it.
_MOMENT = 0.02

# For how many seconds an object is assumed to be in its place still where the kernel reports no changes.
_UNREPORTED_SECONDS = 1.0

# A change within the clock tick (at most 10 ms) in which a place was checked would not show in the ctime.
_TICK_NS = 20_000_000
_SECOND_NS = 1_000_000_000


def is_settled(info: linux.Stat) -> bool:
    """Whether any further change would result in a different ctime.

    Some file systems store whole seconds: ext2, ext3, and ext4 with inodes of 128 bytes.
    """
    tick = _TICK_NS if info.st_ctime_ns % _SECOND_NS else _SECOND_NS + _TICK_NS
    return time.time_ns() - info.st_ctime_ns > tick


class Locator:
    """Finds out where the objects of one tree are.

    Args:
        source: the path of the tree.
        mounts: which mounts names may lead to.
        descriptors: the cached descriptors.
        registry: the objects.
        most_levels: how deep the tree may be (`Tuning.most_levels`).
    """

    def __init__(
        self, source: str, mounts: TreeMounts, descriptors: Descriptors, registry: Registry, most_levels: int
    ) -> None:
        self._most_levels = most_levels
        self._source = source
        self._mounts = mounts
        self._descriptors = descriptors
        self._registry = registry
        self._prefaulted: Mapping[tuple[int, bytes], tuple[int, int]] = {}
        self._below_root: set[tuple[int, int]] = set()  # directories seen below the root, valid for a moment
        self._below_root_until = 0.0
        self._certain: set[Object] = set()  # objects found in their places where no changes are reported
        self._certain_until = 0.0

    def at_path(self, path: str) -> tuple[Object, bytes] | None:
        """Return the directory and the name in it that a path in the tree leads to, if known; nothing is looked up."""
        return self._known_at(os.fsencode(os.path.relpath(path, self._source)))

    def _known_at(self, inside: bytes) -> tuple[Object, bytes] | None:
        *above, name = inside.split(b"/")
        at = self._registry.root
        for level in above:
            below = known_entry(at, level)
            if below is None:
                return None
            at = below
        return at, name

    def place_of(self, filesystem: MountedFilesystem, handle: bytes) -> tuple[Object, bytes] | None:
        """Return where the directory with this handle on a local file system is, if the kernel knows its parent."""
        try:
            fd = calls.find_handle(filesystem.fd, handle, os.O_DIRECTORY)
        except OSError:
            return None
        try:
            above, _ = self._mounts.open_above(fd)
            try:
                parent = self._registry.known(above, None)
                return (parent, self._name_of(fd, above, b".")) if parent else None
            finally:
                calls.close(above)
        except OSError:
            return None
        finally:
            calls.close(fd)

    def places(self, obj: Object, info: Stat) -> Iterator[tuple[Object, bytes]]:
        """Yield where in the tree `obj` is at this moment, as (directory, name): once or more for each known hard link.

        Yields nothing for an object that is no longer below the root. `info` is its present stat.
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
        for parent, name in list(obj.others):
            if self.is_at(info, parent, name):
                yield parent, name

    @staticmethod
    def _checked(obj: Object, info: Stat) -> None:
        # An unmount does not show in any ctime.
        is_mounted_there = obj.parent is not None and obj.parent.filesystem is not obj.filesystem
        if obj.filesystem.ctime_shows_renames and is_settled(info) and not is_mounted_there:
            obj.checked = info.st_ctime_ns

    def is_at(self, info: Stat, parent: Object, name: bytes, credentials: Credentials = linux.ROOT) -> bool:
        """Whether `name` in the directory leads to the object with this stat, as far as `credentials` may find out.

        For a remote name, the answer is what a thread has just found (`prefault`).
        """
        if self._mounts.is_name_remote(parent, name):
            return self._prefaulted.get((parent.number, name)) == dev_ino(info)
        try:
            found, _ = calls.statx(credentials, self._descriptors.fd(parent), name)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (info.st_dev, info.st_ino)

    # -- whether it is in the tree at all ----------------------------------------------------------

    def is_in_tree(self, obj: Object) -> bool:
        """Whether an object is below the root, by at least one of its known names, as far as changes were reported.

        Where they are not reported, it was so less than a second ago. The check is needed only if some objects are
        disconnected (`Registry.disconnected`), or changes are not reported. On a file system by threads, the answer is
        what a thread has just found (`prefault`).

        Raises:
            OSError: it cannot be found out.
        """
        now = time.monotonic()
        if now >= self._certain_until:
            self._certain.clear()
            self._certain_until = now + _UNREPORTED_SECONDS
        if self._leads_to_root(obj):
            return True
        if not obj.others:
            return False
        info = obj.filesystem.stat(self._descriptors.fd(obj))
        return any(self.is_at(info, parent, name) and self._leads_to_root(parent) for parent, name in [*obj.others])

    def _leads_to_root(self, obj: Object) -> bool:
        disconnected, root = self._registry.disconnected, self._registry.root
        are_reports_complete = root not in disconnected
        at: Object | None = obj
        while at is not root:
            if at is None:
                return False
            if (
                at.parent is None
                or at in disconnected
                or not (
                    (are_reports_complete and at.filesystem.watched)
                    or (at in self._certain and not at.filesystem.by_threads)
                )
            ) and not self.settle(at):
                return False
            at = at.parent
        return True

    def settle(self, obj: Object) -> bool:
        """Find out in which directory an object is; False if in none, as far as can be known. That may be outside."""
        try:
            fd = self._descriptors.fd(obj)
        except Stale:
            return False
        info = obj.filesystem.stat(fd)
        if info.st_nlink == 0:
            pass  # it will never be anywhere else
        elif stat.S_ISDIR(info.st_mode) and not obj.filesystem.by_threads:
            self._find_directory(obj, info)
        elif not self._find_by_name(obj, info):
            return False
        if obj.parent is None:
            return False
        self._registry.disconnected.pop(obj, None)
        if not obj.filesystem.watched or self._registry.root in self._registry.disconnected:
            self._certain.add(obj)
        return True

    def _find_by_name(self, obj: Object, info: Stat) -> bool:
        """Find the place of a file: where it was, by another name, where reported, or by a new name beside it."""
        if obj.parent is not None and self.is_at(info, obj.parent, obj.name):
            return True
        place: tuple[Object, bytes] | None = None
        for directory, name in obj.others:
            if self.is_at(info, directory, name):
                drop_name(obj, directory, name)
                place = directory, name
                break
        if place is None and not obj.filesystem.by_threads:
            place = (
                self._find_where_reported(obj, info) or self._find_nearby(obj, info) or self._find_in_memory(obj, info)
            )
        if place is None:
            if obj not in self._registry.disconnected:
                self._registry.disconnected[obj] = None
                self._registry.on_moved(obj)
            if self._registry.disconnected[obj] is None:
                # It is not searched for again.
                self._registry.disconnected[obj] = ReportedPlace(obj.filesystem, b"", b"")
            return False
        self._registry.move(obj, *place)
        return True

    def _find_where_reported(self, obj: Object, info: Stat) -> tuple[Object, bytes] | None:
        reported = self._registry.disconnected.get(obj)
        if reported is None or not reported.directory:
            return None
        parent = self.directory_below_root(reported.filesystem, reported.directory)
        if parent is None or self.is_at(info, parent, reported.name):
            return (parent, reported.name) if parent is not None else None
        self._registry.drop_if_unused(parent)
        return None

    def directory_below_root(self, filesystem: MountedFilesystem, handle: bytes) -> Object | None:
        """Return the directory that a file system knows by this handle; None if it is gone, or not below the root."""
        known = self._registry.by_handle(filesystem, handle)
        if known is not None:
            return known
        try:
            fd = calls.find_handle(filesystem.fd, handle, os.O_DIRECTORY)
        except OSError:
            return None
        try:
            is_below = self._is_below_root(calls.dup(fd))
        except BaseException:
            calls.close(fd)
            raise
        if not is_below:
            calls.close(fd)
            return None
        return self._registry.resolve(fd, None, b"")

    def _find_nearby(self, obj: Object, info: Stat) -> tuple[Object, bytes] | None:
        if obj.parent is None or self._registry.disconnected.get(obj) is not None:
            return None
        try:
            name = calls.name_in(linux.ROOT, self._descriptors.fd(obj.parent), info.st_ino, _MOST_ENTRIES)
        except OSError:
            return None
        return (obj.parent, name) if name is not None and self.is_at(info, obj.parent, name) else None

    def _find_in_memory(self, obj: Object, info: Stat) -> tuple[Object, bytes] | None:
        """Return where the kernel says that a file is, which it knows of names in its memory (on tmpfs: of all).

        Only a directory that is known already is searched.
        """
        try:
            top = calls.path_of(self._descriptors.fd(self._registry.root)).rstrip(b"/") + b"/"
            path = calls.path_of(self._descriptors.fd(obj))
        except OSError:
            return None
        place = self._known_at(path.removeprefix(top)) if path.startswith(top) else None
        return place if place is not None and self.is_at(info, *place) else None

    def lose_reports(self) -> None:
        """Note that reports were lost, so that any object may have been moved."""
        self._certain.clear()
        self._registry.disconnected[self._registry.root] = None

    def renamed_away(self, obj: Object) -> None:
        """Note a report that the object was renamed; where it is now has yet to be found out, or reported."""
        if obj is not self._registry.root:
            self._registry.disconnected.setdefault(obj)

    def renamed_to(self, obj: Object, reported: ReportedPlace) -> None:
        """Note a report that the object was renamed, and to where, which may be outdated by now."""
        if obj is self._registry.root:
            return
        parent = self._registry.by_handle(reported.filesystem, reported.directory)
        try:
            info = obj.filesystem.stat(self._descriptors.fd(obj))
        except OSError:
            return
        if parent is not None and self.is_at(info, parent, reported.name):
            self._registry.found_again(obj, parent, reported.name, info)
        else:
            self._registry.disconnected[obj] = reported

    def is_deepest(self, directory: Object) -> bool:
        """Whether nothing may be made below this directory that would be a directory itself (`Tuning.most_levels`)."""
        at: Object | None = directory
        for _ in range(self._most_levels):
            if at is None or at is self._registry.root:
                return False
            at = at.parent
        return True

    def is_child(self, obj: Object, parent: Object) -> bool:
        """Whether the directory `obj` is (still) in the directory `parent`."""
        fd = self._descriptors.fd(obj)
        if obj.filesystem.remote or parent.filesystem.remote:
            return self._prefaulted.get((parent.number, obj.name)) == self._descriptors.inode_of(obj)
        above, _ = calls.statx(linux.ROOT, fd, b"..")
        return dev_ino(above) == self._descriptors.inode_of(parent)

    def use_prefaulted(self, inodes: Mapping[tuple[int, bytes], tuple[int, int]]) -> None:
        """Rely on `Prefaulted.inodes` for the request that is being served."""
        self._prefaulted = inodes

    def _find_directory(self, obj: Object, info: Stat) -> None:
        """Find a directory's place by following "..", and asking the kernel for the name.

        Other entries are never opened: outside the tree, one may be the daemon's own mount.
        """
        parent: Object | None = obj.parent
        if parent is None or not self.is_child(obj, parent):
            parent = self._above(obj) if self._was_below_root_just_now(obj) else None
        if parent is None:
            self._registry.displace(obj)
            return
        name = self._name_of(self._descriptors.fd(obj), self._descriptors.fd(parent), obj.name)
        if not self.is_at(info, parent, name):
            self._registry.displace(obj)
            return
        if parent is not obj.parent or name != obj.name:
            self._registry.move(obj, parent, name)
        self._checked(obj, info)

    @staticmethod
    def _name_of(fd: int, above: int, before: bytes) -> bytes:
        """Return the name of the directory `fd` in the directory `above`, which has to be verified.

        The kernel reports no path that is longer than PATH_MAX. Then it is the name that it had before, or one that is
        found among the first entries: otherwise, the directory is found again at the next LOOKUP of its name.
        """
        try:
            return os.path.basename(calls.path_of(fd))
        except OSError as exc:
            if exc.errno != errno.ENAMETOOLONG:
                raise
        info = calls.fstat(fd)
        with contextlib.suppress(OSError):
            if dev_ino(calls.statx(linux.ROOT, above, before)[0]) == dev_ino(info):
                return before
        return calls.name_in(linux.ROOT, above, info.st_ino, _MOST_ENTRIES) or before

    def parent_directory(self, obj: Object) -> Object | None:
        """Return ".." of a directory: for the root, the root itself; None if it was not below the root just now."""
        if obj is self._registry.root:
            return obj
        if obj.filesystem.by_threads:
            return obj.parent if obj.parent is not None and self.is_child(obj, obj.parent) else None
        return self._above(obj) if self._was_below_root_just_now(obj) else None

    def _above(self, obj: Object) -> Object:
        fd, _ = self._mounts.open_above(self._descriptors.fd(obj))
        known = self._registry.known(fd, obj)
        if known is not None:
            calls.close(fd)
            return known
        return self._registry.resolve(fd, None, b"")

    def _was_below_root_just_now(self, obj: Object) -> bool:
        """Whether this directory was below the root a moment ago.

        For callers that go on to the top anyway, level by level (so does the kernel when it makes sense of a handle):
        walking all the way at each level would make requests for a deep path take minutes, and block all others
        meanwhile.
        """
        now = time.monotonic()
        if now > self._below_root_until:
            self._below_root.clear()
            self._below_root_until = now + _MOMENT
        return self._descriptors.inode_of(obj) in self._below_root or self._is_still_below_root(obj)

    def _is_still_below_root(self, obj: Object) -> bool:
        """Whether this directory is still below the root of the tree."""
        return self._is_below_root(calls.dup(self._descriptors.fd(obj)))

    def _is_below_root(self, fd: int) -> bool:
        """Whether the directory `fd` (O_PATH), which is closed, is the root of the tree, or below it."""
        root = self._descriptors.inode_of(self._registry.root)
        passed: list[tuple[int, int]] = []
        try:
            inode = dev_ino(calls.statx_fd(fd)[0])
            for _ in range(self._most_levels):
                if inode == root:
                    self._below_root.update(passed)
                    return True
                passed.append(inode)
                try:
                    above, inode = self._mounts.open_above(fd)
                except Stale:
                    return False
                calls.close(fd)
                fd = above
                if inode == passed[-1]:
                    return False  # "/"
        finally:
            calls.close(fd)
        return False
