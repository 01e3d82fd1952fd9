"""Which mounts want to hear of which objects: a table in memory that the watcher and the daemons share.

An object is a row, by a hash of its file handle, and a mount is a column. A daemon marks its column in the rows of the
objects that its kernel may know, before the kernel is told of them. So nobody waits for the watcher. Several objects
share a row, and a daemon then hears of more than it asked for, never of less.

The watcher also counts here when it begins to read events, and when it has passed them on. While it is at work, the
count is odd, and a daemon cannot know yet whether something concerns it.
"""

import mmap
import os
from zlib import crc32

COLUMNS = 64
"""How many mounts share one table; for more there is another one."""

ANY_FILE = b"any file"
"""In the place of a handle: whoever notes this hears of each file that has changed by an event without a name."""

_ROWS = 1 << 15
_HEADER = mmap.PAGESIZE
_SIZE = _HEADER + _ROWS * COLUMNS
_NOBODY = bytes(COLUMNS)


def _row(handle: bytes) -> int:
    return _HEADER + (crc32(handle) & _ROWS - 1) * COLUMNS


class InterestTable:
    """The table.

    Args:
        fd: its descriptor, which is the table's from now on; None to make a new one.

    Attributes:
        fd: the same.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("cloakfs-interest")
            os.ftruncate(fd, _SIZE)  # noqa: TID251  (memory)
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        self._count = memoryview(self._memory)[:8].cast("Q")

    def close(self) -> None:
        """Give the memory back."""
        self._count.release()
        self._memory.close()
        os.close(self.fd)

    # -- of a daemon -------------------------------------------------------------------------------

    def note(self, column: int, handle: bytes) -> None:
        """Want to hear of an object."""
        self._memory[_row(handle) + column] = 1

    @property
    def count(self) -> int:
        """How often the watcher has begun to read, and has passed on what it has read; odd in between."""
        return self._count[0]

    # -- of the watcher ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that events are about to be read."""
        self._count[0] |= 1

    def end(self) -> None:
        """Note that all have been passed on."""
        self._count[0] += self._count[0] & 1

    def clear(self, column: int) -> None:
        """Have a column want to hear of nothing: it is about to be another mount's."""
        self._memory[_HEADER + column :: COLUMNS] = bytes(_ROWS)

    def wanted_by(self, handle: bytes) -> list[int]:
        """Return the columns of those who want to hear of an object."""
        at = _row(handle)
        row = self._memory[at : at + COLUMNS]
        return [] if row == _NOBODY else [column for column, wanted in enumerate(row) if wanted]
