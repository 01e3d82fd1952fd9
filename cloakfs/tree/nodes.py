"""Nodeids: which (view, object) the kernel means by a number, even after FORGET and after a restart.

    nodeid (63 bits)  =  view number (15 bits)  |  object number (48 bits)
    generation (32)   =  keyed hash of (nodeid, file handle, name of the view), with a secret of the mount

The object number is computed from the file handle (`computed`), or comes from the index. The root of the tree is object
1 and a caller view has the number 0, so that nodeid 1 is the root of a plain mount, as FUSE requires. An object is
identified by the file handle that its file system gives it (name_to_handle_at(2)), prefixed with the number of the
mount it lies on: the same inode below two bind mounts is two objects, because a directory can have only one place in
the kernel's dentry cache.

Deleted objects leave the index. The deletion of one that is not in use goes unnoticed, so the index is swept for them.
"""

import errno
import hashlib
import logging
from collections.abc import Callable

from ..tuning import STANDARD, Tuning
from . import calls, filesystems
from .descriptors import Descriptors
from .index import Index
from .locate import Locator
from .mounts import TreeMounts
from .numbers import Numbers
from .objects import ROOT, Object
from .positions import Positions
from .prefault import Prefaulter
from .registry import Registry

log = logging.getLogger(__name__)

OBJECT_BITS = 48
OBJECT_MASK = (1 << OBJECT_BITS) - 1

# How many objects of the index are checked in one go, which takes some milliseconds in a thread.
_SWEEP = 200


class Nodes:
    """All objects of one tree that requests may be about.

    Args:
        source: the root of the real tree.
        index: stores the numbers.
        max_fds: how many descriptors to cache at most.
        covered: the tree is going to lie below the daemon's own mount. Then a detached copy of its mounts is served, in
            which ".." never leads to the daemon's own mount.
        tuning: times and bounds.

    Attributes:
        mounts: which mounts names may lead to.
        descriptors: the cached descriptors.
        registry: the objects, their numbers and names.
        locator: where they are.
        prefaulter: has threads read from slow file systems what a request needs.
        numbers: gives objects their numbers.
        index: the numbers that are stored.
        positions: translates positions in directories.
        sweeper: removes deleted objects from the index.
        root: the root of the tree.

    Raises:
        OSError: `source` cannot be opened.
    """

    def __init__(
        self, source: str, index: Index, max_fds: int = 1024, *, covered: bool = False, tuning: Tuning = STANDARD
    ) -> None:
        self.index = index
        self.mounts = mounts = TreeMounts(source, index, covered=covered, tuning=tuning)
        self.descriptors = descriptors = Descriptors(mounts, max_fds)
        self.numbers = numbers = Numbers(index, mounts, descriptors)
        self.registry = registry = Registry(numbers, mounts, descriptors, tuning.most_levels)
        if numbers.is_replaced:
            log.warning("%s is not the directory that it was before: old file handles are stale", source)
        self.locator = locator = Locator(source, mounts, descriptors, registry, tuning.most_levels)
        self.sweeper = Sweeper(index, mounts, registry, numbers)
        self.prefaulter = Prefaulter(mounts, descriptors, registry, locator)
        self.positions = Positions(index.secret)
        self.root = registry.root
        self._by_number = registry.by_number

    @staticmethod
    def nodeid(view: int, obj: Object) -> int:
        """Return the number by which the kernel knows `obj` in the view with number `view`."""
        return view << OBJECT_BITS | obj.number

    @staticmethod
    def is_of(obj: Object, nodeid: int) -> bool:
        """Whether a nodeid, in whatever view, is that of `obj`."""
        return nodeid & OBJECT_MASK == obj.number

    @staticmethod
    def view_of(nodeid: int) -> int:
        """Return the number of the view that a nodeid belongs to."""
        return nodeid >> OBJECT_BITS

    def generation(self, nodeid: int, obj: Object) -> int:
        """Return the 32 bits that make a file handle unguessable and distinguish the object from a later one."""
        if nodeid == ROOT:
            return 0  # the kernel's own choice for the root of a mount
        view = nodeid >> OBJECT_BITS
        cached = obj.descriptor
        if cached is None or cached.generation >> 32 != view:
            identity = obj.handle if self.numbers.computed is None else self.numbers.identity(obj, view)
            whole = nodeid.to_bytes(8, "little") + identity
            digest = hashlib.blake2b(whole, key=self.index.secret, digest_size=4).digest()
            generation = int.from_bytes(digest, "little")
            if cached is None:
                return generation
            cached.generation = view << 32 | generation
        return cached.generation & 0xFFFFFFFF

    def get(self, nodeid: int) -> Object:
        """Return the object that a nodeid names.

        Raises:
            Stale: the number was never given, or names an object that only an earlier run could reach.
        """
        number = nodeid & OBJECT_MASK
        return self._by_number.get(number) or self.registry.restore(number)

    def was_given(self, nodeid: int) -> bool:
        """Whether some object ever had this nodeid; True when in doubt."""
        view, number = nodeid >> OBJECT_BITS, nodeid & OBJECT_MASK
        return self.numbers.was_given(number) and (not view or self.index.view_label(view) is not None)

    def known_as(self, nodeid: int) -> Object | None:
        """Return the object that a nodeid names, if it need not be restored from the index."""
        return self._by_number.get(nodeid & OBJECT_MASK)

    def forget(self, nodeid: int, count: int) -> bool:
        """Note that the kernel dropped `count` references; return whether something is left for `drop_unused`."""
        return self.registry.forget(nodeid & OBJECT_MASK, count)

    def close(self) -> None:
        """Close every descriptor, and write what has yet to be written."""
        self.numbers.close()
        self.descriptors.close_all()
        self.mounts.close()


class Sweeper:
    """Goes through what is stored about the objects of one tree, a few at a time."""

    def __init__(self, index: Index, mounts: TreeMounts, registry: Registry, numbers: Numbers) -> None:
        self._index = index
        self._mounts = mounts
        self._registry = registry
        self._numbers = numbers
        self._last = 0  # the number of the object that was checked last
        boot = filesystems.boot_id()
        self._lost = {number for number, key in index.filesystems() if filesystems.is_lost(key, boot)}

    def sweep(self) -> Callable[[], list[int]]:
        """Prepare to check whether the next objects of the index, as far as they are not in use, still exist.

        Returns:
            to be called in a thread; its result, the numbers of those that are gone, is for `swept`.
        """
        # Only mounts that are certain to be the file system that the handle comes from.
        sure = {
            filesystem.number: filesystem.fd
            for filesystem in self._mounts.by_number.values()
            if filesystem.decodable and not filesystem.remote and filesystem.is_certain
        }
        rows = self._index.after(self._last, _SWEEP)
        self._last = rows[-1][0] if rows else 0
        unused = [
            (number, int.from_bytes(handle[:4], "little"), handle[4:])
            for number, handle in rows
            if number not in self._registry.by_number
        ]
        lost = [number for number, of, _ in unused if of in self._lost]
        chosen = [(number, sure[of], handle) for number, of, handle in unused if of in sure]
        noted = [one for one in self._numbers.next_places(_SWEEP) if one[0] not in self._registry.by_number]

        def check() -> list[int]:
            gone = [number for number, fd, handle in chosen if _is_gone(fd, handle)]
            return lost + gone + [number for number, identity in noted if self._numbers.is_gone(identity)]

        return check

    def swept(self, gone: list[int]) -> None:
        """Forget these objects, unless they have come into use."""
        for number in gone:
            if number not in self._registry.by_number:
                self._numbers.remove(number)


def _is_gone(mount_fd: int, handle: bytes) -> bool:
    try:
        calls.close(calls.find_handle(mount_fd, handle))
    except OSError as exc:
        return exc.errno == errno.ESTALE
    return False
