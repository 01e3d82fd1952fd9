"""Lets the daemon look at its own mount, from threads of its own, whose requests it recognizes."""

import logging
import os
import threading

from .. import linux
from . import pyfuse3memory

log = logging.getLogger(__name__)


class Inside:
    """Looks at the daemon's own mount.

    Args:
        mountpoint: the mount point, as the daemon finds it.

    Attributes:
        threads: the threads that are looking now.
        last_reader: the thread, of any process, whose request to read a directory came last.
    """

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.threads: set[int] = set()
        self.last_reader = 0

    def check(self) -> None:
        """In a thread: look at the daemon's own mount, and return when it answers.

        Raises:
            OSError: it does not answer.
            MountError: a listing does not know who reads it (`pyfuse3memory`).
        """
        linux.act_as_daemon()
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            with os.scandir(self.mountpoint) as entries:  # noqa: TID251  (the mount, not the tree)
                next(entries, None)  # reading all of a large directory would take time and memory
        finally:
            self.threads.discard(me)
        if self.last_reader != me:
            raise pyfuse3memory.unsupported("the caller of a listing cannot be found out")

    def ask(self) -> None:
        """In a thread: return when the daemon has answered a request for which it asks nobody else (`statfs`).

        Raises:
            OSError: there was no answer.
        """
        linux.act_as_daemon()
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            os.statvfs(self.mountpoint)  # noqa: TID251  (the mount, not the tree)
        finally:
            self.threads.discard(me)

    def stat(self, path: bytes) -> None:
        """In a thread: look up `path`, which lies in the daemon's own mount."""
        linux.act_as_daemon()
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            os.stat(path)  # noqa: TID251  (the mount, not the tree)
        except OSError as exc:
            log.debug("%s: %s", path, exc)
        finally:
            self.threads.discard(me)
