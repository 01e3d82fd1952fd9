"""Files that the kernel reads and writes by itself, on the real file system (FUSE passthrough, Linux 6.9).

The kernel does so for what programs open for writing alone, and for large files that they read: bytes then cost no
request. What is small and only read, it caches anyway.

It does so with the credentials of the thread that hands it the file, whoever has opened it. Those used here have no
rights to any file, so that what is written drops set-id bits and capabilities, as on the real tree, and quotas hold.
Blocks that are reserved for root or a group are out of reach, so that what root opens, and file systems with such a
group, are left to the daemon. docs/decisions/passthrough.md has all the rules.

While a file is open, either all who have it open pass through, or nobody does; the kernel fails any other open (EIO).
So the first open decides.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterable

import trio

from .. import linux
from ..fuse import compatibility
from ..linux import FMODE_EXEC, mountinfo
from ..state.presence import Presence
from ..tree import calls
from ..tree.filesystems import MountedFilesystem
from ..tree.objects import Object
from ..tree.request import SET_ID, Request

log = logging.getLogger(__name__)

# To hand a file over takes as long as some ten writes. A file that was written to for so short a time, and got little
# larger, is left to the daemon the next times, and then tried again.
_BRIEF_SECONDS = 0.02
_LITTLE = 64 << 10
_OPENS_BY_DAEMON = 64

# What is only read passes from this size on. Each read changes the atime, so that a stat(2) after it is a request.
_LARGE = 1 << 20

# There is not enough of something just now; all other errors are for good.
_FOR_NOW = frozenset({errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ENOSPC})


class Passthrough:
    """Hands files to the kernel when they are opened, and takes them back when they are closed.

    Args:
        forbidden: why it must not, in words; "" if it may.

    Attributes:
        presence: which file systems the mount shows, and whether it is the only one.
        passing: the files that the kernel reads and writes by itself now; since when, and the size then.
    """

    def __init__(self, forbidden: str) -> None:
        self._forbidden = forbidden
        self.presence = Presence()
        self._why_not: dict[MountedFilesystem, str] = {}  # "" where it has been found to work
        self.passing: dict[Object, tuple[float, int]] = {}

    @property
    def is_allowed(self) -> bool:
        """Whether to ask the kernel for it."""
        return not self._forbidden

    def why_not(self, filesystems: Iterable[MountedFilesystem]) -> str:
        """Return in words why no file is, or those of one of these file systems are not; "" if all may be.

        Known once the kernel has connected.
        """
        if self._forbidden:
            return self._forbidden
        if not compatibility.passes_through():
            return compatibility.why_no_passthrough()
        return next((f"{it.path}: {reason}" for it in filesystems if (reason := self._reason(it))), "")

    def open(self, at: Request, fd: int, flags: int, *, may_begin: bool) -> int:
        """Return the id by which the kernel reads and writes a file by itself; 0 if the daemon does, as in doubt.

        To be called before the file counts as open (`OpenFiles.opened`).

        Args:
            at: the request that opens it, with its object.
            fd: its descriptor.
            flags: the client's flags of open(2).
            may_begin: whether it may be the first open by which the kernel does.
        """
        if self._forbidden:
            return 0
        try:
            return self._open(at, fd, flags, may_begin=may_begin)
        except OSError:
            return 0

    def _open(self, at: Request, fd: int, flags: int, *, may_begin: bool) -> int:
        obj, filesystem = at.obj, at.obj.filesystem
        if obj.backing:
            # The kernel fails this open (EIO) rather than mix the two.
            return obj.backing if flags & os.O_ACCMODE == os.O_RDONLY or not calls.is_append_only(fd) else 0
        if not may_begin or obj.open_files or not _may_begin(flags, at):
            return 0
        rare = obj.rarely()
        if rare.opens_left:
            rare.opens_left -= 1
            return 0
        if at.number or not at.who.uid or self._reason(filesystem) or not _may_pass(fd) or obj.descriptor is None:
            return 0
        try:
            backing = _hand_over(obj.descriptor.fd)
        except OSError as exc:
            if exc.errno not in _FOR_NOW:
                self._why_not[filesystem] = str(exc.strerror)
                log.info("%s: the kernel does not write files by itself: %s", filesystem.path, exc.strerror)
            return 0
        rare.backing = backing
        self.passing[obj] = trio.current_time(), at.info.st_size
        return backing

    def closing(self, obj: Object, fd: int) -> None:
        """Take a file back that one client alone has open, with this descriptor, and is about to close."""
        if len(obj.open_files) == 1:
            size = calls.fstat(fd).st_size
            obj.report_size(0, size)  # which the kernel knows, unlike the daemon
            rare = obj.rarely()
            with contextlib.suppress(OSError):  # the session has ended
                calls.without_rights(compatibility.close_backing, rare.backing)
            rare.backing = 0
            since, before = self.passing.pop(obj)
            is_brief = trio.current_time() < since + _BRIEF_SECONDS and abs(size - before) < _LITTLE
            if is_brief and not calls.only_reads(fd):
                rare.opens_left = _OPENS_BY_DAEMON

    def _reason(self, filesystem: MountedFilesystem) -> str:
        """Return in words why files of this file system are left to the daemon; "" if they need not be."""
        known = self._why_not.get(filesystem)
        if known is None:
            known = self._why_not[filesystem] = _find_reason(filesystem)
        if known or self.presence.is_alone(filesystem.shared_key):
            return known
        # There, the file would be another object: what changes it would wait in the session loop for a client that
        # reads or writes it here, and need not end.
        return "another mount shows the same file system"


def _hand_over(fd: int) -> int:
    """Hand the file that `fd` (O_PATH) refers to over to the kernel, and return the id.

    The kernel keeps what it is handed until nobody has the file open, also after the daemon has died. So that is
    nothing to which a lock can belong: a descriptor with O_PATH, or one of its own where the kernel takes no other.
    """
    try:
        return calls.without_rights(compatibility.open_backing, fd)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
    own = calls.open(linux.ROOT, fd, os.O_RDONLY)
    try:
        return calls.without_rights(compatibility.open_backing, own)
    finally:
        calls.close(own)


def _may_begin(flags: int, at: Request) -> bool:
    """Whether the kernel may begin to read and write a file by an open with these flags, and that pays.

    A mapping outlives the open file, and goes on with the real one. So who might write through one is left to the
    daemon. Nor does a reader decide for those who write: only the owner does, of a file that nobody else may write to.
    """
    access, info = flags & os.O_ACCMODE, at.info
    if access != os.O_RDONLY:
        return access == os.O_WRONLY
    is_sole_writer = at.who.uid == info.st_uid and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return info.st_size >= _LARGE and is_sole_writer and not flags & (os.O_TRUNC | FMODE_EXEC)


def _may_pass(fd: int) -> bool:
    """Whether the kernel may write to this file as without any rights, and wherever the client says."""
    mode = calls.fstat(fd).st_mode
    return stat.S_ISREG(mode) and not mode & SET_ID and not calls.is_append_only(fd)


def _find_reason(filesystem: MountedFilesystem) -> str:
    if not compatibility.passes_through():
        return compatibility.why_no_passthrough()
    if not filesystem.has_posix_rules:
        return f"{filesystem.kind} does not go by mode bits and ACLs alone"
    if not filesystem.watched:
        return "changes are not reported"  # by which the daemon learns of what the kernel writes
    if filesystem.can_reserve and filesystem.device not in mountinfo.devices_without_option(b"resgid=", b"resuid="):
        return "blocks are reserved for a user or a group"
    return ""
