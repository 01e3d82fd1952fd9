"""The objects that the kernel knows: found by number, handle or name, and held for as long as anything refers to them.

The kernel refers to an object by lookups that it has not forgotten yet; known names in it, and open files, pin it.
An object that is dropped can be restored from the index.

An object's last known place is in the directory's `children`, or in its `strays` if something has happened to that name
since. Its further names are in `further` of their directories. So each is found at once, however many have changed.
`locate` verifies whether the names are still true. Each name pins the directory that it is in;
a directory that has lost a name may be unused, and is then dropped.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from ..linux import Credentials, Stat
from . import calls
from .descriptors import Descriptors
from .filesystems import MountedFilesystem
from .mounts import TreeMounts
from .numbers import Numbers, Restored
from .objects import ALL_VIEWERS, NEVER, NO_VIEWER, ROOT, TRANSIENT, Directory, Object, Stale, as_directory

# How many further names of a file to hold; one with more may have to be looked up again to be used by handle.
_MAX_OTHER_NAMES = 16


def place(obj: Object, parent: Directory, name: bytes) -> Directory | None:
    """Record that `obj` is now `name` in `parent`; return the directory it was in, which has one name less by that."""
    before = leave(obj) if obj.parent is not None or isinstance(obj, Directory) else None
    parent.pins += 1
    obj.parent, obj.name, obj.checked = parent, name, NEVER
    if parent.children is None:
        parent.children = {}
    replaced = parent.children.get(name)
    if replaced is not None:
        _stray(parent, name, replaced)  # until it is found elsewhere, or nowhere
    parent.children[name] = obj
    return before


def leave(obj: Object) -> Directory | None:
    """Record that `obj` has no place now; return the directory it was in, which has one name less by that."""
    if isinstance(obj, Directory):
        obj.verified_epoch = -1
        if obj.access_path is not None:
            obj.access_path.is_void = True
    parent, obj.parent = obj.parent, None
    if parent is not None:
        if parent.children is not None and parent.children.get(obj.name) is obj:
            del parent.children[obj.name]
        if parent.strays:
            same = parent.strays.get(obj.name, {})
            same.pop(obj, None)
            if not same:
                parent.strays.pop(obj.name, None)
        parent.pins -= 1
    return parent


def is_entry(obj: Object, parent: Object, name: bytes) -> bool:
    """Whether `obj` is the last object that was found as `name` in `parent`, and nothing has happened to that name."""
    return parent.children is not None and parent.children.get(name) is obj


def unlist(parent: Object, name: bytes) -> None:
    """Record that something happened to this name: it leads nowhere, or to an object that has yet to be found.

    The object that it led to retains this as its last known place, which is verified before it is used.
    """
    children = parent.children
    if children is not None and name in children:
        obj = children.pop(name)
        obj.checked = NEVER
        _stray(as_directory(parent), name, obj)


def known_entry(parent: Object, name: bytes) -> Object | None:
    """Return the last object whose last known place this is, also if something has happened to the name since."""
    obj = (parent.children or {}).get(name)
    if obj is None:
        obj = next(reversed((parent.strays or {}).get(name, {})), None)
    return obj


def break_cycle(obj: Object, parent: Directory) -> Directory | None:
    """Prepare to place `obj` in `parent`: if `parent` was recorded below `obj`, break that cycle as outdated.

    Return the directory that has no place any more by that, if any.
    """
    if not isinstance(obj, Directory) or not obj.pins:
        return None
    at: Directory | None = parent
    while at is not None and at.parent is not obj:
        at = at.parent
    if at is not None:
        leave(at)
    return at


def _stray(parent: Directory, name: bytes, obj: Object) -> None:
    if parent.strays is None:
        parent.strays = {}
    parent.strays.setdefault(name, {})[obj] = None


def end_name(obj: Object, parent: Directory, name: bytes) -> None:
    """Note that this is not among the further names of `obj` any more."""
    parent.pins -= 1
    if parent.further is not None and (parent, name) not in obj.others:
        parent.further.discard((name, obj))


def within(directory: Object) -> list[Object]:
    """Return the objects known to have, or to have had, a name in this directory: perhaps too many, never too few."""
    return [
        *(directory.children or {}).values(),
        *chain.from_iterable((directory.strays or {}).values()),
        *(obj for _, obj in directory.further or ()),
    ]


def add_name(obj: Object) -> None:
    """Make the present place of the file `obj`, which is about to get another one, one of its further names."""
    assert obj.parent is not None
    rare = obj.rarely()
    if rare.others is None:
        rare.others = []
    parent = obj.parent
    rare.others.append((parent, obj.name))
    parent.pins += 1
    if parent.further is None:
        parent.further = set()
    parent.further.add((obj.name, obj))


def drop_name(obj: Object, parent: Directory, name: bytes) -> None:
    """Remove this name, about to be its place, from the further names of `obj`, or the oldest if there are too many."""
    others = [*obj.others]
    outdated = others.index((parent, name)) if (parent, name) in others else 0
    if (parent, name) in others or len(others) > _MAX_OTHER_NAMES:
        ended = others.pop(outdated)
        obj.others = others
        end_name(obj, *ended)


# How many levels of unused directories are dropped at once.
_LEVELS_AT_ONCE = 64


def _ignore(_: object) -> None:
    pass


class ReportedPlace(NamedTuple):
    """Where the kernel has reported an object to be: the handle of the directory on a file system, and the name in it.

    An empty handle says that there was no such report, and that the object was searched for in vain.
    """

    filesystem: MountedFilesystem
    directory: bytes
    name: bytes


class Registry:
    """The objects of one tree.

    Args:
        numbers: gives their numbers, and restores what has one.
        mounts: which mounts names may lead to.
        descriptors: the cached descriptors.
        most_levels: how deep the tree may be (`Tuning.most_levels`).

    Attributes:
        by_number: all objects.
        root: the root of the tree, which is never dropped.
        epoch: increased when all that was verified is void; a `Directory.verified_epoch` with another value is void.
        audience_of_restored: who may know of an object that is restored because a request has its handle.
        disconnected: objects that may not be in their last known place, or that have none: most of them were moved out
            of the tree. What is below them is not noted. The value says, for a file, where a report places it, if one
            does. The root stands for all objects: reports were lost.
        on_moved: is called with each object that turns out to be in another directory, or nowhere, before any reply
            says so.
        on_known: is called with the handle of each object that becomes known, as its file system gives it; or None.
        on_found: is called with a file that becomes known, its descriptor, and the stat from which the reply is going
            to be made; or None.
    """

    def __init__(self, numbers: Numbers, mounts: TreeMounts, descriptors: Descriptors, most_levels: int) -> None:
        self._most_levels = most_levels
        self._numbers = numbers
        self._mounts = mounts
        self._descriptors = descriptors
        self.by_number: dict[int, Object] = {}
        self._by_handle: dict[bytes, Object] = {}
        self._held: dict[frozenset[int], frozenset[int]] = {}  # one set of each value, for `Object.ever_cached_in`
        self._unused: list[Object] = []
        self._transient = TRANSIENT | int.from_bytes(os.urandom(5), "little")
        self.epoch = 0
        self.audience_of_restored = ALL_VIEWERS  # any caller may have the handle
        self.disconnected: dict[Object, ReportedPlace | None] = {}
        self.on_moved: Callable[[Object], None] = _ignore
        self.on_known: Callable[[bytes], None] | None = None
        self.on_found: Callable[[Object, int, Stat], None] | None = None
        self.root: Object = Directory(ROOT, numbers.root, mounts.root)
        self.root.audience = ALL_VIEWERS
        self._add(self.root)
        descriptors.cache(self.root, mounts.top)

    def _add(self, obj: Object) -> None:
        self.by_number[obj.number] = obj
        self._by_handle[obj.handle] = obj
        if self.on_known is not None:
            self.on_known(obj.handle[4:])

    def handles(self) -> Iterator[bytes]:
        """Yield the handles of all objects that are known now, as their file systems give them."""
        for handle in list(self._by_handle):
            yield handle[4:]

    def restore(self, number: int) -> Object:
        """Restore an object, and what is above it, as far as that is remembered.

        Raises:
            Stale: its number was never given, or it is too deep in the tree (`Tuning.most_levels`).
            OSError: there are too many descriptors.
        """
        rows: dict[int, Restored] = {}
        # No recursion, since a path may have more levels than Python allows.
        while number and number not in self.by_number and number not in rows:
            if len(rows) > self._most_levels:
                raise Stale
            row = self._numbers.restored(number)
            if row is None:
                if not rows:
                    raise Stale
                break  # the directory that it was in is gone: it may be somewhere else
            rows[number] = row
            number = row.parent
        parent = self.by_number.get(number)  # none if that is gone
        for number, row in reversed(rows.items()):
            obj = Directory(number, row.handle, row.filesystem)
            obj.audience = self.audience_of_restored
            if parent is not None:
                self._place(obj, parent, row.name)
            self._add(obj)
            self.disconnected[obj] = None  # what became of it since was not noted
            parent = obj
        assert parent is not None
        return parent

    def resolve(
        self, fd: int, parent: Object | None, name: bytes, info: Stat | None = None, *, is_new: bool = False
    ) -> Object:
        """Return the object that `fd` (O_PATH) refers to, which was just found as `name` in `parent`.

        Takes ownership of `fd`, even when it raises. `info` is its stat, if the caller has it. `is_new` says that it
        was just made, and that no other request has been served since.

        Raises:
            Unstored: it cannot get a number.
        """
        try:
            handle, filesystem = self._mounts.identify(fd, parent)
            obj = self._by_handle.get(handle)
            if obj is None:
                if filesystem.has_handles:
                    number = self._numbers.given(handle, parent, name, is_new=is_new)
                # The kernel may still know a file that is gone by the number that is computed for this one.
                if not filesystem.has_handles or number in self.by_number:
                    number = self._transient = self._transient + 1
                is_file = info is not None and not stat.S_ISDIR(info.st_mode)
                obj = (Object if is_file else Directory)(number, handle, filesystem)
                self._add(obj)
                if self.on_found is not None and info is not None and is_file and not is_new:
                    self.on_found(obj, fd, info)
                if parent is not None:
                    self._place(obj, parent, name)
                else:
                    self.disconnected[obj] = None
            elif parent is not None and not is_entry(obj, parent, name):
                self.found_again(obj, parent, name, obj.filesystem.stat(fd))
        except BaseException:
            calls.close(fd)
            raise
        if obj.descriptor is None:
            self._descriptors.cache(obj, fd, info)
        else:
            calls.close(fd)
        return obj

    def known(self, fd: int, parent: Object | None) -> Object | None:
        """Return the object that `fd` (O_PATH) refers to, if the kernel knows it already."""
        return self._by_handle.get(self._mounts.identify(fd, parent)[0])

    def moved(self, fd: int, parent: Object, name: bytes) -> Object | None:
        """Record that what `fd` (O_PATH) refers to was renamed to `name` in `parent`. Takes ownership of `fd`.

        Returns None if the object cannot be identified.
        """
        try:
            obj = self.resolve(fd, parent, name)
        except OSError:
            return None  # it is searched for at the next request for it
        self.drop_if_unused(obj)
        return obj

    def moved_at_once(self, credentials: Credentials, parent: Object, name: bytes) -> Object | None:
        """Record that what `name` in `parent` leads to was renamed to it, if its descriptor says that it is known.

        `credentials` may search the directory.

        Raises:
            OSError: nothing has this name any more.
        """
        info, _ = calls.statx(credentials, self._descriptors.fd(parent), name)
        obj = self._descriptors.of_inode(info)
        if obj is None or obj.filesystem is not parent.filesystem:
            return None
        if not is_entry(obj, parent, name):
            self.found_again(obj, parent, name, info)
        self.drop_if_unused(obj)
        return obj

    def by_handle(self, filesystem: MountedFilesystem, handle: bytes) -> Object | None:
        """Return the object that a file system knows by this handle, if the kernel knows it."""
        return self._by_handle.get(filesystem.number.to_bytes(4, "little") + handle)

    def twins(self, obj: Object) -> list[Object]:
        """Return the objects of other mounts with the same handle: the same inode, mounted twice, or another one."""
        if self._mounts.is_one:
            return []
        handle = obj.handle[4:]
        near = (self.by_handle(filesystem, handle) for filesystem in self._mounts.filesystems if filesystem.has_handles)
        return [twin for twin in near if twin is not None and twin is not obj]

    def found_again(self, obj: Object, parent: Object, name: bytes, info: Stat) -> None:
        """Note that a known object turned up under another name: it was moved, or this is one more hard link."""
        if not stat.S_ISDIR(info.st_mode) and info.st_nlink > 1 and obj.parent is not None:
            add_name(obj)
            drop_name(obj, as_directory(parent), name)
        self.move(obj, parent, name)

    def move(self, obj: Object, parent: Object, name: bytes) -> None:
        """Record, also for after a restart, that `obj` is now `name` in `parent`."""
        self._place(obj, parent, name)
        self._numbers.moved(obj, parent, name)

    def _place(self, obj: Object, parent: Object, name: bytes) -> None:
        directory = as_directory(parent)
        if obj.pins:
            parted = break_cycle(obj, directory)
            if parted is not None:
                self.disconnected[parted] = None
                self.on_moved(parted)
        before = place(obj, directory, name)
        if self.disconnected:
            self.disconnected.pop(obj, None)
        if obj.ever_cached_in:
            self.hold(parent, obj.ever_cached_in)
        if before is not parent and (before is not None or obj.audience != NO_VIEWER):
            self.on_moved(obj)
        if before is not None and before is not parent:
            self.drop_if_unused(before)

    def displace(self, obj: Object) -> None:
        """Record that `obj` is nowhere in the tree."""
        self.disconnected.setdefault(obj)
        self.on_moved(obj)
        parent = leave(obj)
        if parent is not None:
            self.drop_if_unused(parent)

    def hold(self, obj: Object, numbers: frozenset[int]) -> None:
        """Note that the kernel may have something of `obj` in its cache, in the views with these numbers.

        That is noted for everything above, too (`Object.ever_cached_in`): where nothing is noted, nothing below
        needs to be invalidated.
        """
        at: Object | None = obj
        while at is not None and not numbers <= at.ever_cached_in:
            ever = at.ever_cached_in | numbers
            at.ever_cached_in = self._held.setdefault(ever, ever)
            at = at.parent

    def forget(self, number: int, count: int) -> bool:
        """Note that the kernel dropped `count` references; return whether something is left for `drop_unused`."""
        obj = self.by_number.get(number)
        if obj is not None and obj is not self.root:
            obj.lookups -= count
            self.drop_if_unused(obj)
        return bool(self._unused)

    def opened(self, obj: Object, fd: int, number: int) -> None:
        """Note that a client opened the object in this view. It stays reachable through `fd` while it is open."""
        rare = obj.rare or obj.rarely()
        if rare.open_files is None:
            rare.open_files = {}
        rare.open_files[fd] = number

    def closed(self, obj: Object, fd: int) -> None:
        """Undo `opened`; closing `fd` is left to the caller."""
        rare = obj.rare or obj.rarely()
        assert rare.open_files is not None
        del rare.open_files[fd]
        if not rare.open_files:
            rare.open_files = None
        self.drop_if_unused(obj)

    def drop_if_unused(self, obj: Object | None) -> None:
        """Drop `obj`, and then what is above it, unless something refers to it. Nothing else drops objects.

        Of a deep tree, what is further above is left for `drop_unused`.
        """
        levels = 0
        while obj is not None and obj is not self.root and obj.lookups <= 0 and not obj.pins and not obj.open_files:
            levels += 1
            if levels > _LEVELS_AT_ONCE:
                self._unused.append(obj)
                return
            if self.by_number.pop(obj.number, None) is None:
                return
            self._by_handle.pop(obj.handle, None)
            self.disconnected.pop(obj, None)
            if (
                obj.fd >= 0
                and obj.number < TRANSIENT
                and not obj.filesystem.remote
                and calls.fstat(obj.fd).st_nlink == 0
            ):
                self._numbers.remove(obj.number)
            self._descriptors.close(obj)
            if isinstance(obj, Directory):
                obj.blocking_ancestor = None  # it may be this object: then only the garbage collector would free it
            others, obj.others = obj.others, []
            for parent, name in others:
                end_name(obj, parent, name)
                self.drop_if_unused(parent)
            obj = leave(obj)

    def discard(self, numbers: Iterable[int]) -> None:
        """Drop objects whose numbers are void (`Unstored`), and that were not in a reply to the kernel after all."""
        for number in numbers:
            obj = self.by_number.get(number)
            if obj is not None:
                obj.lookups = 0
                self.drop_if_unused(obj)

    def drop_unused(self) -> bool:
        """Go on with what `drop_if_unused` has left; return whether there is more. This takes a millisecond."""
        if self._unused:
            self.drop_if_unused(self._unused.pop())
        return bool(self._unused)

    def objects(self) -> list[Object]:
        """Return all objects that are known."""
        return list(self.by_number.values())
