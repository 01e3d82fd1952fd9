"""A cache of descriptors of objects. An evicted one is opened again by its handle, or else by its last known name."""

import contextlib
import errno
import itertools
import stat
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .. import linux
from ..linux import Stat
from . import calls
from .mounts import TreeMounts
from .objects import ROOT, Descriptor, Directory, Object, Stale, dev_ino, unused_descriptors

_T = TypeVar("_T")

# The request that is being served may use up to this many of the most recently used descriptors.
_IN_USE = 8

# How many idle descriptors are checked in one step.
_AT_ONCE = 256

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The errors that say that an object may well exist, but cannot be opened now."""


class Descriptors:
    """The cached descriptors (O_PATH) of the objects of one tree.

    Args:
        mounts: identifies objects, where a name may by now lead to another one.
        max_fds: how many to cache at most.

    Attributes:
        max_fds: how many to cache at most.
    """

    def __init__(self, mounts: TreeMounts, max_fds: int) -> None:
        self._mounts = mounts
        self.max_fds = max_fds
        self._open: dict[int, Object] = {}
        self._by_inode: dict[tuple[int, int], Object] = {}  # the objects in `_open`
        self._uses = 0
        self._uses_before = 0  # `_uses` when the idle ones were last closed

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def fd(self, obj: Object) -> int:
        """Return a descriptor (O_PATH) for `obj`, valid until the next await, or as long as `obj.descriptor` is held.

        Raises:
            Stale: the object is gone.
        """
        cached = obj.descriptor
        if cached is not None:
            cached.used = self._uses = self._uses + 1
            return cached.fd
        try:
            if obj.open_files:
                # By its handle, a removed file is not found.
                fd = calls.find_again(linux.ROOT, next(iter(obj.open_files)))
            elif obj.filesystem.decodable:
                fd = calls.find_handle(obj.filesystem.fd, obj.handle[4:])
            else:
                fd = self._open_by_name(obj)
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTORS:
                raise Stale from None
            if not self.shed():
                raise
            return self.fd(obj)
        self.cache(obj, fd)
        return fd

    def _open_by_name(self, obj: Object) -> int:
        # Top-down, to avoid recursion through many levels.
        closed = []
        above = obj.parent
        while above is not None and above.fd < 0 and not above.filesystem.decodable:
            closed.append(above)
            above = above.parent
        for above in reversed(closed):
            with contextlib.suppress(Stale):
                self.fd(above)
        for parent, name in [*([(obj.parent, obj.name)] if obj.parent else []), *obj.others]:
            try:
                fd = calls.find(linux.ROOT, self.fd(parent), name)
            except OSError as exc:
                if exc.errno in NO_DESCRIPTORS:
                    raise
                continue
            try:
                if self._mounts.identify(fd, parent)[0] == obj.handle:
                    return fd
            except PermissionError:
                pass  # it is on an excluded mount
            calls.close(fd)
        raise Stale

    def cache(self, obj: Object, fd: int, info: Stat | None = None) -> None:
        """Cache this descriptor (O_PATH) for `obj`, which has none, and own it from now on.

        Args:
            obj: the object.
            fd: the descriptor.
            info: its stat, if known.

        Raises:
            Stale: it is a directory, but the object is not. (A file system may use a handle again.)
            OSError: its stat fails. The descriptor is closed in either case.
        """
        try:
            info = info or obj.filesystem.stat(fd)
            if stat.S_ISDIR(info.st_mode) and not isinstance(obj, Directory):
                raise Stale
        except BaseException:
            calls.close(fd)
            raise
        while unused_descriptors:
            calls.close(unused_descriptors.popleft())
        self._uses += 1
        inode = info.st_dev, info.st_ino
        obj.descriptor = Descriptor(fd, inode, self._uses)
        self._open[obj.number] = obj
        self._by_inode[inode] = obj
        if len(self._open) > self.max_fds:
            self._close_oldest(self.max_fds // 8)

    def of_inode(self, info: Stat) -> Object | None:
        """Return an object with this stat whose descriptor is cached. (Until it is closed, the inode is not reused.)"""
        return self._by_inode.get((info.st_dev, info.st_ino))

    def inode_of(self, obj: Object) -> tuple[int, int]:
        """Return `dev_ino` of the object."""
        fd = self.fd(obj)
        return obj.inode or dev_ino(obj.filesystem.stat(fd))

    def at_place(self, parent: Object, name: bytes, info: Stat) -> Object | None:
        """Return the object with this stat, which `name` in `parent` has just been found to lead to, if that is known.

        Its open descriptor proves the identity: while it is open, the inode number is not given to another object.
        """
        obj = self._by_inode.get((info.st_dev, info.st_ino))
        # `registry.is_entry`, without a call
        if obj is None or parent.children is None or parent.children.get(name) is not obj:
            return None
        if obj.descriptor is not None:  # it always is
            obj.descriptor.used = self._uses = self._uses + 1
        return obj

    def _close_oldest(self, count: int) -> int:
        """Close up to `count` descriptors, least recently used first, but none that a request may be using."""
        old = sorted(self._open.values(), key=self._used)[:-_IN_USE]
        closable = (obj for obj in old if self._reopenable(obj))
        oldest = list(itertools.islice(closable, count))
        for obj in oldest:
            self.close(obj)
        return len(oldest)

    @staticmethod
    def _used(obj: Object) -> int:
        return 0 if obj.descriptor is None else obj.descriptor.used

    def shed(self) -> int:
        """Close half of the cached descriptors, because the process has too many open.

        Returns:
            how many were closed.
        """
        return self._close_oldest(len(self._open) // 2)

    def with_descriptor(self, call: Callable[..., _T], *args: Any) -> _T:
        """Make a call that needs a descriptor. If there are too many, close some and try once more."""
        try:
            return call(*args)
        except OSError as exc:
            # Only the session loop knows which descriptors are in use.
            if not linux.in_main_thread() or not self.makes_room(exc):
                raise
            return call(*args)

    def makes_room(self, exc: OSError) -> bool:
        """Whether a call is worth another try: it failed for too many descriptors, and some have now been closed."""
        return exc.errno in (errno.EMFILE, errno.ENFILE) and self.shed() > 0

    def _reopenable(self, obj: Object) -> bool:
        return obj.number != ROOT and obj.filesystem.has_handles

    def close(self, obj: Object) -> None:
        """Close the cached descriptor of `obj`, if there is one."""
        cached = obj.descriptor
        if cached is not None:
            obj.descriptor = None
            self._open.pop(obj.number, None)
            if self._by_inode.get(cached.inode) is obj:  # bind mounts may share it
                del self._by_inode[cached.inode]

    def close_idle(self) -> Iterator[None]:
        """Close descriptors that were not used since the last time, because an open one holds a deleted file's space.

        To be iterated only between requests. Between two steps, which take less than a millisecond, others may go on.
        """
        before, self._uses_before = self._uses_before, self._uses
        for number, obj in enumerate(list(self._open.values()), 1):
            if self._used(obj) <= before and self._reopenable(obj):
                self.close(obj)
            if number % _AT_ONCE == 0:
                yield

    def close_all(self) -> None:
        """Close every cached descriptor, including the root's."""
        for obj in list(self._open.values()):
            self.close(obj)
