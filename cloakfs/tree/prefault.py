"""Prefaults what may take long: a thread stats it first, so that the session loop then finds it in memory.

This applies to remote file systems, and to disks that were slow lately. Only the session loop's thread touches objects:
the other thread gets descriptors of its own, and returns what it found.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import linux
from ..linux import Credentials
from . import calls
from .descriptors import Descriptors
from .locate import Locator
from .mounts import TreeMounts
from .objects import ROOT, Object, Stale, dev_ino
from .registry import Registry

AT_ONCE = 128
"""How many objects a thread prefaults in one go. Each takes a descriptor meanwhile."""


class _Link(NamedTuple):
    """An object to prefault: its descriptor, or -1, and where it may be, as (number of the directory, name in it)."""

    obj: Object
    fd: int
    places: list[tuple[int, bytes]]


class Prefaulted(NamedTuple):
    """What a thread found.

    Attributes:
        opened: objects and their descriptors, by number.
        moved: directories that are no longer where they were, each with a descriptor of its parent and its name.
        inodes: st_dev and st_ino of what was found, by number of the directory, and name.
    """

    opened: dict[int, tuple[Object, int]]
    moved: list[tuple[Object, int, bytes]]
    inodes: dict[tuple[int, bytes], tuple[int, int]]


class Prefaulter:
    """Prefaults objects of one tree in threads."""

    def __init__(self, mounts: TreeMounts, descriptors: Descriptors, registry: Registry, locator: Locator) -> None:
        self._mounts = mounts
        self._descriptors = descriptors
        self._registry = registry
        self._locator = locator

    def parts(self, obj: Object) -> list[list[Object]]:
        """Return what to prefault before `obj` can be checked, in parts for `prefault`; the last one has `obj`.

        Each takes no more than some hundred descriptors.
        """
        found: dict[Object, None] = {}
        todo = [obj]
        while todo:
            at = todo.pop()
            # A verified directory need not be prefaulted, nor, mostly, what is above it (`visibility.AccessPaths`).
            is_verified = at is not obj and at.verified_epoch == self._registry.epoch and not at.filesystem.by_threads
            if at in found or is_verified or not self._mounts.waits(at):
                continue
            found[at] = None
            if at.parent is not None:
                todo.append(at.parent)
            todo += [parent for parent, _ in at.others]
        objects = list(found)
        if len(objects) <= AT_ONCE:
            return [objects]
        parts = [objects[first : first + AT_ONCE] for first in range(0, len(objects), AT_ONCE)][::-1]
        # What is opened by its name, or looked up by it, needs the directory that the name is in.
        return [
            list(dict.fromkeys([*part, *(at.parent for at in part if at.parent is not None and at.parent in found)]))
            for part in parts
        ]

    def prefault(
        self, obj: Object, name: bytes | None = None, part: Sequence[Object] | None = None
    ) -> Callable[[], Prefaulted]:
        """Prepare the work of a thread, after which a stat of `obj`, its places, and `name` in it takes no time.

        `part` is one of `parts`; they are prefaulted one after the other.

        Returns:
            a function to be called in a thread; its result is for `prefaulted`.

        Raises:
            OSError: there are too many descriptors.
        """
        links: dict[int, _Link] = {}
        try:
            for at in self.parts(obj)[-1] if part is None else part:
                # An object that is not open has to be opened by its handle, or its name, first.
                fd = calls.dup(at.fd) if at.fd >= 0 else -1
                places = [*([(at.parent, at.name)] if at.parent is not None else []), *at.others]
                links[at.number] = _Link(at, fd, [(parent.number, name) for parent, name in places])
        except OSError:
            for link in links.values():
                if link.fd >= 0:
                    calls.close(link.fd)
            raise

        def work() -> Prefaulted:
            found = Prefaulted({}, [], {})
            for link in reversed(links.values()):
                with contextlib.suppress(OSError):
                    self._prefault_link(link, found)
            if name is not None and obj.number in found.opened:
                with contextlib.suppress(OSError):
                    self.prefault_name(linux.ROOT, found.opened[obj.number][1], name)
            return found

        return work

    def _prefault_link(self, link: _Link, found: Prefaulted) -> None:
        """In a thread: stat an object, and look up its names in the directories above."""
        obj = link.obj
        fd = link.fd if link.fd >= 0 else self._open(link, found)
        found.opened[obj.number] = obj, fd
        info = calls.fstat_as(linux.ROOT, fd)
        for number, name in link.places:
            if number in found.opened:
                with contextlib.suppress(OSError):
                    found.inodes[number, name] = dev_ino(calls.statx(linux.ROOT, found.opened[number][1], name)[0])
        if obj.number == ROOT or not stat.S_ISDIR(info.st_mode) or not obj.filesystem.by_threads:
            return
        if any(found.inodes.get(place) == dev_ino(info) for place in link.places):
            return
        inode, name = dev_ino(info), os.path.basename(calls.path_of(fd))
        above, above_inode = self._mounts.open_above(fd)
        try:
            # The top of a mount that was detached is its own parent, and has no name.
            is_there = above_inode != inode and dev_ino(calls.statx(linux.ROOT, above, name)[0]) == inode
        except OSError:
            is_there = False
        if is_there:
            found.moved.append((obj, above, name))
        else:
            calls.close(above)

    @staticmethod
    def _open(link: _Link, found: Prefaulted) -> int:
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

    def prefaulted(self, found: Prefaulted) -> bool:
        """Keep the descriptors that a thread had to open, and what it found (`Locator.use_prefaulted`).

        Returns:
            True if a directory has moved: then what is above it now has to be prefaulted, too.
        """
        for obj, fd in found.opened.values():
            if obj.fd < 0 and self._registry.by_number.get(obj.number) is obj:
                with contextlib.suppress(Stale):
                    self._descriptors.cache(obj, fd)
            else:
                calls.close(fd)
        for obj, above, name in found.moved:
            try:
                parent = self._registry.resolve(above, None, b"")
            except OSError:
                continue
            if self._registry.by_number.get(obj.number) is not obj:
                self._registry.drop_if_unused(parent)
                continue
            self._registry.move(obj, parent, name)
        self._locator.use_prefaulted(found.inodes)
        return bool(found.moved)

    def prefault_name(self, credentials: Credentials, directory: int, name: bytes) -> None:
        """In a thread: have the kernel look up `name`, unless that leads to an excluded mount.

        Raises:
            OSError: for example, there is no such entry.
        """
        if self._mounts.is_remote(calls.statx(credentials, directory, name)[1]):
            fd = calls.find(credentials, directory, name)
            try:
                self.fetch_attributes(credentials, fd)
            finally:
                calls.close(fd)

    def fetch_attributes(self, credentials: Credentials, fd: int) -> None:
        """In a thread: have the kernel fetch the attributes of what was found as `fd`.

        Nothing is done in the session loop, nor if the object is local, or on an excluded mount.
        """
        if not linux.in_main_thread() and self._mounts.is_remote(calls.statx_fd(fd)[1]):
            calls.fstat_as(credentials, fd)
