"""The answers: the attributes of an object as a view shows them, and how long the kernel may keep them."""

import stat
import time

import pyfuse3
from pyfuse3 import EntryAttributes, InodeT, ModeT

from .. import linux
from ..exportmode import ExportMode
from ..kernelcache.cache import KernelCache
from ..tree.nodes import OBJECT_BITS, Nodes
from ..tree.objects import ALL_VIEWERS, Object, Stale
from ..tree.request import SET_ID, Request
from ..tree.visibility import attrs_of
from ..view import KernelCheckedCaller, View
from .lastshown import LastShown


def _limit_timeouts(entry: EntryAttributes, info: linux.Stat) -> None:
    """Have the kernel cache nothing that changes unreported when it writes a file by itself.

    That is its mtime, if it writes through a mapping, and who sees it, if it drops set-id bits.
    """
    entry.attr_timeout = 0
    if info.st_mode & SET_ID:
        entry.entry_timeout = 0


class Replies:
    """Makes the answers that describe objects.

    Args:
        nodes: the objects.
        cache: says how long the kernel may keep an answer.
        mode: how the mount is exported.
    """

    def __init__(self, nodes: Nodes, cache: KernelCache, mode: ExportMode) -> None:
        self._nodes = nodes
        self._cache = cache
        self._kernel_gate = mode.kernel_gate
        self._no_client_cache = mode.no_client_cache
        self._last_change = 0
        self._last_shown = LastShown()

    def attributes(
        self,
        number: int,
        view: View,
        obj: Object,
        name: bytes,
        fd: int,
        info: linux.Stat,
        checked_caller: KernelCheckedCaller | None = None,
    ) -> EntryAttributes:
        """Return the attributes of `obj` as `view` shows them; the kernel may not cache them yet.

        A `checked_caller` is shown its own objects under its own ids, by which the kernel checks its permissions. What
        the kernel or this daemon asks for itself must not change the ids by which the kernel is checking a caller.

        Raises:
            Stale: the policy failed.
        """
        if view.shows_by_mapping:
            uid, gid = view.client_ids(info.st_uid, info.st_gid)
            mode, nlink = info.st_mode, info.st_nlink
            if mode & SET_ID:
                mode = view.shown_mode(mode, info.st_uid, info.st_gid, uid, gid)
            if view.hides and stat.S_ISDIR(mode):
                nlink = 1
        else:
            shown = view.show(attrs_of(name, info, fd))
            if shown is None:
                raise Stale
            mode, uid, gid, nlink = shown
        nodeid = number << OBJECT_BITS | obj.number  # `Nodes.nodeid`, without a call
        if checked_caller is not None or self._last_shown.callers:
            uid, gid = self._last_shown.ids(nodeid, checked_caller, info, (uid, gid))
        if self._kernel_gate and obj is self._nodes.root and view.fixed is not None:
            mode = stat.S_IFDIR | stat.S_IRWXU
            uid, gid = view.client_id("uid", view.fixed.uid), view.client_id("gid", view.fixed.gid)
        entry = EntryAttributes()
        entry.st_ino = InodeT(nodeid)
        entry.generation = self._nodes.generation(nodeid, obj)
        entry.entry_timeout = entry.attr_timeout = 0  # until it is proved that the kernel may cache it
        entry.st_mode, entry.st_uid, entry.st_gid, entry.st_nlink = mode, uid, gid, nlink
        entry.st_rdev = info.st_rdev
        entry.st_size = info.st_size
        if number:
            obj.report_size(number, info.st_size)
        else:  # the same, without a call
            obj.reported_size = info.st_size
        entry.st_blksize = info.st_blksize
        entry.st_blocks = info.st_blocks
        entry.st_atime_ns = info.st_atime_ns
        if self._no_client_cache and stat.S_ISDIR(info.st_mode):
            entry.st_mtime_ns = entry.st_ctime_ns = self._change()
        else:
            entry.st_mtime_ns = info.st_mtime_ns
            entry.st_ctime_ns = info.st_ctime_ns
            if obj.rare is not None:
                entry.st_ctime_ns += obj.rare.ctime_ahead
        return entry

    def _change(self) -> int:
        """Return a time of change that no client was answered before, for no_client_cache."""
        self._last_change = max(self._last_change + 1, time.time_ns())
        return self._last_change

    def named(self, at: Request, name: bytes, obj: Object, info: linux.Stat) -> EntryAttributes:
        """Return the answer to a request by name, and count the reference to `obj` that the kernel gets with it.

        Raises:
            Stale: it is a directory in which the kernel caches names for another caller.
        """
        if stat.S_ISDIR(info.st_mode):
            viewer = at.viewer if obj.audience >= ALL_VIEWERS else self._cache.viewer_of(obj, at.viewer, at.who)
            if self._cache.admit(at.number, obj, viewer) is not None:
                raise Stale  # what was just made has been replaced; a LOOKUP waits until it is ready
        entry = self.entry(at, name, obj, info)
        obj.lookups += 1
        return entry

    def entry(self, at: Request, name: bytes, obj: Object, info: linux.Stat) -> EntryAttributes:
        """Return the attributes of `obj`, the entry `name` of the directory, with the timeouts of both."""
        fd = obj.descriptor.fd if obj.descriptor is not None else self._nodes.descriptors.fd(obj)
        entry = self.attributes(at.number, at.view, obj, name, fd, info, at.checked_caller)
        entry.entry_timeout, entry.attr_timeout = self._cache.entry(at, name, obj, fd, info)
        if obj.rare is not None and obj.rare.backing:
            _limit_timeouts(entry, info)
        return entry

    def of_object(self, at: Request, info: linux.Stat) -> EntryAttributes:
        """Return the attributes of the object that the request names by its nodeid, with their timeout."""
        entry = self.attributes(at.number, at.view, at.obj, at.obj.name, at.fd, info, at.checked_caller)
        entry.attr_timeout = self._cache.attributes(at, info)
        if at.obj.rare is not None and at.obj.rare.backing:
            _limit_timeouts(entry, info)
        return entry

    def top(self) -> EntryAttributes:
        """Return the attributes of the list of views at the root of the mount."""
        root = self._nodes.root
        info = root.filesystem.stat(self._nodes.descriptors.fd(root))
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.ROOT_INODE
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = 0
        entry.st_mode = ModeT(stat.S_IFDIR | 0o555)
        entry.st_nlink = 1
        entry.st_atime_ns = info.st_ctime_ns
        entry.st_mtime_ns = entry.st_ctime_ns = self._change() if self._no_client_cache else info.st_ctime_ns
        return entry
