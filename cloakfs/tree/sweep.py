"""Removes deleted objects from the index: the deletion of an object that is not in use goes unnoticed otherwise."""

import errno
from collections.abc import Callable

from . import calls, filesystems
from .index import Index
from .knownmounts import KnownMounts
from .registry import Registry

# How many objects of the index are looked at in one go, which takes some milliseconds in a thread.
_SWEEP = 200


class Sweeper:
    """Goes through the index of one tree, a few objects at a time."""

    def __init__(self, index: Index, mounts: KnownMounts, registry: Registry) -> None:
        self._index = index
        self._mounts = mounts
        self._registry = registry
        self._last = 0  # the number of the object that was looked at last
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

        def look() -> list[int]:
            return lost + [number for number, fd, handle in chosen if _is_gone(fd, handle)]

        return look

    def swept(self, gone: list[int]) -> None:
        """Remove these objects from the index, unless they have come into use."""
        for number in gone:
            if number not in self._registry.by_number:
                self._index.remove(number)


def _is_gone(mount_fd: int, handle: bytes) -> bool:
    try:
        calls.close(calls.find_handle(mount_fd, handle))
    except OSError as exc:
        return exc.errno == errno.ESTALE
    return False
