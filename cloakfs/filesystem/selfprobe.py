"""The daemon's requests to its own mount, made in threads of its own, by which it recognizes them."""

import contextlib
import logging
import threading
from collections.abc import Iterator

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

    @contextlib.contextmanager
    def marked(self) -> Iterator[int]:
        """In a thread: let the daemon recognize the requests of this thread, until the context ends; yield its id."""
        me = threading.get_native_id()
        self.threads.add(me)
        try:
            yield me
        finally:
            self.threads.discard(me)

    def check(self) -> None:
        """In a thread: begin to list the daemon's own mount, and return when it answers.

        Raises:
            OSError: it does not answer.
            MountError: a listing does not know who reads it (`fuse.compatibility`).
        """
        with self.marked() as me, ownfiles.scandir(self.mountpoint) as entries:
            next(entries, None)  # there are none for this thread
        if self.last_reader != me:
            raise compatibility.unsupported("the caller of a listing cannot be found out")

    def ping(self) -> None:
        """In a thread: return when the daemon has answered a request for which it waits for no file system (`statfs`).

        Raises:
            OSError: there was no answer.
        """
        with self.marked():
            ownfiles.statvfs(self.mountpoint)

    def stat(self, path: bytes) -> None:
        """In a thread: look up `path`, which lies in the daemon's own mount."""
        with self.marked():
            try:
                ownfiles.stat(path)
            except OSError as exc:
                log.debug("%s: %s", path, exc)
