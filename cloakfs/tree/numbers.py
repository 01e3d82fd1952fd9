"""The numbers of the objects of one tree: computed from what the file system identifies them by, or given by the index.

Which of the two a mount has is decided when it is first mounted, and kept, because clients hold the numbers. Where they
are computed, the index still gives those of objects that have no computed one.
"""

import errno
import os
from typing import NamedTuple

from ..state.persistent import PLACES
from . import filesystems
from .computed import COMPUTED, ComputedNumbers, can_compute
from .descriptors import NO_DESCRIPTORS, Descriptors
from .filesystems import MountedFilesystem
from .index import MEMORY, Index
from .mounts import TreeMounts
from .objects import ROOT, TRANSIENT, Object, Stale
from .places import Places


class Restored(NamedTuple):
    """What is known of an object that the kernel knows by its number alone.

    Attributes:
        handle: of the object.
        filesystem: on which it lies.
        parent: the number of the directory in which it was last seen; 0 if that is not known.
        name: its name there.
    """

    handle: bytes
    filesystem: MountedFilesystem
    parent: int
    name: bytes


class Numbers:
    """The numbers of the objects of one tree.

    Args:
        index: gives those that are not computed.
        mounts: the mounts of the tree.
        descriptors: the cached descriptors, which make room for others.

    Attributes:
        is_replaced: whether the tree had another root when the index was last used.
        root: the handle of the root, as `Object` has it.
        computed: computes numbers; None if the index gives all.
        places: where objects with computed numbers were last seen; None if the index gives all.
    """

    def __init__(self, index: Index, mounts: TreeMounts, descriptors: Descriptors) -> None:
        self._index = index
        self._mounts = mounts
        self._descriptors = descriptors
        self.root, filesystem = mounts.identify(mounts.top, None)
        can = can_compute(filesystem, self.root)
        self.is_replaced = not index.claim(ROOT, self.root, computed=can)
        self.computed: ComputedNumbers | None = None
        self.places: Places | None = None
        self._last_place = 0
        self._labels: dict[int, bytes] = {}  # of views, by number
        if index.is_computed and can:
            identity = filesystems.identity(mounts.top, filesystem.kind)
            self.computed = ComputedNumbers(filesystem, self.root, str(identity), index.secret)
            folder = os.path.dirname(index.path)
            self.places = Places(MEMORY if index.path == MEMORY else os.path.join(folder, PLACES))
            if self.is_replaced:
                self.places.clear()

    def given(self, handle: bytes, parent: Object | None, name: bytes, *, is_new: bool) -> int:
        """Return the number of the object with this handle, which was just seen as `name` in `parent`.

        `is_new` says that it was just made, and that no caller can have seen it.

        Raises:
            Unstored: it has none, and cannot get one.
        """
        if self.computed is not None and self.places is not None:
            packed = self.computed.packed(handle)
            if packed is not None:
                if parent is not None:
                    self.places.note(packed, self._noted(parent), name)
                return self.computed.number(packed)
        above = 0 if parent is None else parent.number
        number = self._index.made(handle, above, name) if is_new else None
        return self._index.object(handle, above, name) if number is None else number

    def _noted(self, parent: Object) -> int:
        """Return how `Places` knows a directory: as its packed identity, or as another number, below 0."""
        packed = self.computed.packed(parent.handle) if self.computed and parent.number & COMPUTED else None
        return packed or -parent.number

    def number_of(self, root: Object, handle: bytes) -> int:
        """Return the number of the object that the file system of the root knows by this handle; 0 if none is computed.

        Nobody is asked whether there is one.
        """
        whole = root.handle[:4] + handle
        packed = None if self.computed is None else self.computed.packed(whole)
        return ROOT if whole == root.handle else self.computed.number(packed) if self.computed and packed else 0

    def moved(self, obj: Object, parent: Object, name: bytes) -> None:
        """Note that the object is now called `name` in `parent`."""
        if obj.number & COMPUTED and self.computed is not None and self.places is not None:
            packed = self.computed.packed(obj.handle)
            assert packed is not None
            self.places.note(packed, self._noted(parent), name)
        elif obj.number < TRANSIENT:
            self._index.moved(obj.number, parent.number, name)

    def remove(self, number: int) -> None:
        """Note that the object with this number was deleted."""
        if number & COMPUTED and self.computed is not None and self.places is not None:
            self.places.forget(self.computed.packed_of(number))
        elif number < TRANSIENT:
            self._index.remove(number)

    def restored(self, number: int) -> Restored | None:
        """Return what is known of the object with this number; None if there is none.

        Raises:
            Stale: it lies on a file system that is not in the tree any more.
            Unstored: the index does not answer.
            OSError: there are too many descriptors.
        """
        if number & COMPUTED and number < TRANSIENT:
            return self._computed(number)
        row = self._index.find(number)
        if row is None:
            return None
        handle, parent, name = row
        filesystem = self._mounts.by_number.get(int.from_bytes(handle[:4], "little"))
        if filesystem is None:
            raise Stale
        return Restored(handle, filesystem, parent, name)

    def _computed(self, number: int) -> Restored | None:
        if self.computed is None or self.places is None:
            return None
        packed = self.computed.packed_of(number)
        try:
            handle = self._descriptors.with_descriptor(self.computed.handle, packed)
        except OSError as exc:
            if exc.errno in NO_DESCRIPTORS:
                raise
            return None
        if handle == self.root:
            return None
        parent, name = self.places.find(packed) or (0, b"")
        parent = -parent if parent <= 0 else self.computed.number(parent) if parent < COMPUTED else 0
        return Restored(handle, self._mounts.root, parent, name)

    def next_places(self, count: int) -> list[tuple[int, int]]:
        """Return (number, packed identity) of the next objects whose places are noted, again and again from the first.

        `is_gone` says whether one still exists.
        """
        if self.computed is None or self.places is None:
            return []
        found = self.places.after(self._last_place, count)
        self._last_place = found[-1] if found else 0
        return [(self.computed.number(packed), packed) for packed in found if 0 < packed < COMPUTED]

    def is_gone(self, packed: int) -> bool:
        """Whether there is no object with this packed identity any more. Any thread may ask."""
        try:
            if self.computed is not None:
                self.computed.handle(packed)
        except OSError as exc:
            return exc.errno == errno.ESTALE
        return False

    def was_given(self, number: int) -> bool:
        """Whether some object ever had this number; True in doubt."""
        if number >= TRANSIENT:
            return not all(filesystem.has_handles for filesystem in self._mounts.filesystems)
        if number & COMPUTED:
            return self.computed is not None and self.computed.is_plausible(number)
        return 0 < number <= self._index.last

    def identity(self, obj: Object, view: int) -> bytes:
        """Return what identifies an object in a view, where numbers are computed, on any machine.

        It names the view, whose number may be that of another one elsewhere.
        """
        assert self.computed is not None
        whole = self.computed.stable(obj.handle) if obj.number & COMPUTED or obj.number == ROOT else obj.handle
        if view:
            label = self._labels.get(view)
            if label is None:
                label = self._labels[view] = os.fsencode(self._index.view_label(view) or "")
            whole += label
        return whole

    def commit(self) -> bool:
        """Write much of what was noted of places; return whether there is more."""
        return self.places is not None and self.places.commit()

    def size(self) -> int:
        """Return how many bytes all that is stored has on disk."""
        return self._index.size() + (0 if self.places is None else self.places.size())

    def close(self) -> None:
        """Write everything."""
        if self.places is not None:
            self.places.close()
