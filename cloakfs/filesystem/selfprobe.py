"""Requests that the daemon makes to its own mount, from threads of its own, which it recognizes by them."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Collection

from .. import linux
from ..fuse import compatibility
from ..linux import ownfiles

log = logging.getLogger(__name__)


class SelfProbe:
    """Makes requests of the daemon to its own mount, from threads whose requests it recognizes.

    Args:
        mountpoint: the mount point, as the daemon finds it.

    Attributes:
        threads: the threads that make such a request now.
        last_reader: the thread, of any process, whose request to read a directory came last.
    """

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.threads: set[int] = set()
        self.last_reader = 0

    def check(self) -> None:
        """In a thread: list the daemon's own mount, and return when it answers.

        Raises:
            OSError: it does not answer.
            MountError: a listing does not know who reads it (`fuse.compatibility`).
        """
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            with ownfiles.scandir(self.mountpoint) as entries:
                next(entries, None)  # reading all of a large directory would take time and memory
        finally:
            self.threads.discard(me)
        if self.last_reader != me:
            raise compatibility.unsupported("the caller of a listing cannot be found out")

    def ping(self) -> None:
        """In a thread: return when the daemon has answered a request for which it waits for no file system (`statfs`).

        Raises:
            OSError: there was no answer.
        """
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            ownfiles.statvfs(self.mountpoint)
        finally:
            self.threads.discard(me)

    def recall(self, handles: Collection[bytes]) -> set[bytes]:
        """In a thread: have the kernel recall leases on files of the daemon's own mount (delegations, of knfsd).

        Opening a file for writing does so (fcntl(2), F_SETLEASE). Where there is no lease, the open gets as far as the
        daemon, which refuses it (`refuses`). So nothing changes, and nothing is waited for but answers of the daemon.

        Args:
            handles: file handles of the files (`linux.name_to_handle`), of which those that the kernel knows count.

        Returns:
            those of files on which there are leases that have not been given back yet.

        Raises:
            OSError: EROFS: the kernel cannot be made to; or the mount does not answer.
        """
        me = threading.get_native_id()
        self.threads.add(me)
        found = set()
        try:
            with contextlib.ExitStack() as stack:  # kept open, they would keep the session from ending
                where = self.mountpoint
                if ownfiles.statvfs(where).f_flag & os.ST_RDONLY:
                    with ownfiles.raised(linux.CAP_SYS_ADMIN):
                        copy = linux.clone_writable(self.mountpoint)
                    stack.callback(os.close, copy)
                    where = f"/proc/self/fd/{copy}"
                top = ownfiles.open_fd(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, top)
                for handle in handles:
                    if _has_lease(top, handle):
                        found.add(handle)
        finally:
            self.threads.discard(me)
        return found

    def refuses(self, pid: int, flags: int) -> bool:
        """Whether an open(2) by this thread with these flags was made by `recall`."""
        return flags & os.O_ACCMODE != os.O_RDONLY and pid in self.threads

    def stat(self, path: bytes) -> None:
        """In a thread: look up `path`, which lies in the daemon's own mount."""
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            ownfiles.stat(path)
        except OSError as exc:
            log.debug("%s: %s", path, exc)
        finally:
            self.threads.discard(me)


def _has_lease(top: int, handle: bytes) -> bool:
    try:
        fd = ownfiles.open_by_handle(top, handle, os.O_WRONLY | os.O_NONBLOCK)
    except BlockingIOError:
        return True
    except OSError as exc:
        if exc.errno == errno.EROFS:
            raise
        return False  # EPERM of `refuses`, or ESTALE: the kernel has forgotten the file
    os.close(fd)
    return False
