"""Marks on file systems, by which the kernel reports what is changed on them (fanotify(7)); `watch` says what exactly.

The process that reads for several mounts uses this module, so it imports next to nothing.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from .. import linux
from ..linux import fanotify, ownfiles
from ..tree import calls

_EVENTS = (
    fanotify.FAN_ATTRIB
    | fanotify.FAN_MODIFY
    | fanotify.FAN_CLOSE_WRITE
    | fanotify.FAN_CREATE
    | fanotify.FAN_DELETE
    | fanotify.FAN_MOVED_FROM
    | fanotify.FAN_MOVED_TO
    | fanotify.FAN_ONDIR
)

# Magic numbers of statfs(2). All changes to these file systems go through this kernel. Others may accept a mark, too,
# but do not report what other machines do (ceph, cifs).
_BTRFS = 0x9123683E
_LOCAL = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        _BTRFS,
        0x01021994,  # tmpfs
        0x794C7630,  # overlayfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
    }
)


def event_fsid(fd: int) -> int:
    """Return the id that the events of the file system carry which `fd` (O_PATH suffices) is on.

    It is `os.fstatvfs(fd).f_fsid`, except for btrfs, where each subvolume has an id of its own (and different handles),
    and events carry the top's.

    Raises:
        OSError: the file system does not report its changes, or not all of them (EOPNOTSUPP).
    """
    magic, fsid = fanotify.filesystem(fd)
    if magic not in _LOCAL:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if magic == _BTRFS:
        with _btrfs_top(fd) as top:
            return fanotify.filesystem(top)[1]
    return fsid


@contextlib.contextmanager
def _btrfs_top(fd: int) -> Iterator[int]:
    """A descriptor of the top of a btrfs, which need not be mounted."""
    with contextlib.ExitStack() as stack:
        here = calls.open(linux.ROOT, fd, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(calls.close, here)
        top = calls.find_handle(here, calls.btrfs_top(here))
        stack.callback(calls.close, top)
        yield top


class FilesystemMarks:
    """The file systems that are watched by one group of fanotify(7).

    Args:
        needs_targets: whether it is of no use if the kernel leaves the target out of some events, as before Linux 5.17.

    Attributes:
        fd: the descriptor from which events are read.

    Raises:
        OSError: no fanotify, or too old a kernel (EINVAL before Linux 5.9), no CAP_SYS_ADMIN (EPERM), or more groups
            than fs.fanotify.max_user_groups (EMFILE).
    """

    def __init__(self, *, needs_targets: bool = False) -> None:
        flags = fanotify.FAN_CLASS_NOTIF | fanotify.FAN_CLOEXEC | fanotify.FAN_NONBLOCK
        with ownfiles.raised(linux.CAP_SYS_ADMIN):
            try:
                self.fd = fanotify.init(flags | fanotify.FAN_REPORT_DFID_NAME_TARGET)
            except OSError as exc:
                if exc.errno != errno.EINVAL or needs_targets:
                    raise
                self.fd = fanotify.init(flags | fanotify.FAN_REPORT_DFID_NAME_FID)

    def add(self, fd: int) -> int:
        """Watch the whole file system that `fd` (O_PATH suffices) is on, for as long as it stays mounted.

        Returns:
            the id that its events carry (`event_fsid`).

        Raises:
            OSError: the file system does not report its changes, or not all of them (EOPNOTSUPP, ENODEV).
        """
        fsid = event_fsid(fd)
        self._mark(fd, fanotify.FAN_MARK_ADD)
        return fsid

    def remove(self, fd: int) -> None:
        """Watch the file system that `fd` is on no more.

        Raises:
            OSError: it was not watched.
        """
        self._mark(fd, fanotify.FAN_MARK_REMOVE)

    def _mark(self, fd: int, what: int) -> None:
        flags = what | fanotify.FAN_MARK_FILESYSTEM
        with ownfiles.raised(linux.CAP_SYS_ADMIN):
            try:
                fanotify.mark(self.fd, flags, _EVENTS, fd)
            except OSError as exc:
                if exc.errno != errno.EXDEV or fanotify.filesystem(fd)[0] != _BTRFS:
                    raise
                # From within a subvolume of btrfs, the kernel wants a mark on the top.
                with _btrfs_top(fd) as top:
                    fanotify.mark(self.fd, flags, _EVENTS, top)

    def close(self) -> None:
        """Watch nothing any more."""
        os.close(self.fd)
