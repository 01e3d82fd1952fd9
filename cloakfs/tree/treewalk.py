"""A walk through one file system of the tree, which finds the names of files by their inode numbers.

It is made in steps, in threads, and does not cross into what is mounted inside: another file system may never answer.
A directory is opened by its handle, so that a path may be of any length, and only one is open at a time.
"""

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Set
from typing import NamedTuple

from .. import linux
from . import calls
from .filesystems import MountedFilesystem

# How many entries are read before the time is looked at.
_AT_ONCE = 256

# How many directories are walked through at most, beyond the number of objects on the file system. A user may make them
# as fast as the walk goes on.
_MOST_MORE = 100_000


class FoundName(NamedTuple):
    """A name of a file that is sought: its inode number, and the directory's handle as the file system gives it."""

    inode: int
    directory: bytes
    name: bytes


class TreeWalk:
    """One walk.

    Args:
        filesystem: the file system, at the place where it is mounted in the tree.
        top: a descriptor (O_PATH) of the directory at which to begin, which may be closed afterwards.
    """

    def __init__(self, filesystem: MountedFilesystem, top: int) -> None:
        self._filesystem = filesystem
        info, self._mount_id = calls.statx_fd(top)
        self._device = info.st_dev  # a subvolume has another one
        # First in, first out: what a user makes meanwhile does not come before what was there.
        self._todo = deque([calls.name_to_handle(top, filesystem.flags)[0]])
        statistics = calls.fstatvfs(top)
        self._left = (statistics.f_files - statistics.f_ffree or 1 << 32) + _MOST_MORE
        self._directory, self._fd = b"", -1  # that is being read
        self._entries: calls.Entries | None = None

    def step(self, sought: Set[int], seconds: float) -> tuple[list[FoundName], bool]:
        """In a thread: go on for about so long; return what was found, and whether there is more to walk through."""
        until = time.monotonic() + seconds
        found: list[FoundName] = []
        while time.monotonic() < until:
            some: list[os.DirEntry[str]] = []
            with contextlib.suppress(OSError):  # a directory that cannot be read ends here
                some += itertools.islice(self._entries or (), _AT_ONCE)
            for entry in some:
                name = os.fsencode(entry.name)
                if entry.inode() in sought:
                    found.append(FoundName(entry.inode(), self._directory, name))
                with contextlib.suppress(OSError):  # it is gone
                    if entry.is_dir(follow_symlinks=False):
                        self._note_directory(name)
            if len(some) < _AT_ONCE:
                self.close()
                if not self._todo or not self._left:
                    return found, False
                self._left -= 1
                self._directory = self._todo.popleft()
                with contextlib.suppress(OSError):
                    self._open_directory()
        return found, True

    def _open_directory(self) -> None:
        found = calls.find_handle(self._filesystem.fd, self._directory, os.O_DIRECTORY)
        try:
            self._fd = calls.open(linux.ROOT, found, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            calls.close(found)
        self._entries = calls.entries(linux.ROOT, self._fd)

    def _note_directory(self, name: bytes) -> None:
        info, mount_id = calls.statx(linux.ROOT, self._fd, name)
        if mount_id != self._mount_id or info.st_dev != self._device:
            return
        fd = calls.find(linux.ROOT, self._fd, name, os.O_DIRECTORY)
        try:
            handle, mount_id = calls.name_to_handle(fd, self._filesystem.flags)
        finally:
            calls.close(fd)
        if mount_id == self._mount_id:
            self._todo.append(handle)

    def close(self) -> None:
        """Close the directory that is being read. The walk may go on with the next one."""
        if self._entries is not None:
            self._entries.close()
            self._entries = None
        if self._fd >= 0:
            calls.close(self._fd)
            self._fd = -1
