"""Which file systems the mounts of this machine show, so that each knows whether it is the only one to show one."""

import fcntl
import os

from ..linux import filelocks, ownfiles
from .runtime import RUN_DIR

_EXTENT = (0, 1)


class Presence:
    """The file systems that one mount shows, by a key of each, until its daemon ends.

    There is a file for each, which every mount that shows it has locked for reading. Mounts in a container that has a
    /run of its own are not seen.
    """

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._shown_twice: set[str] = set()

    def announce(self, key: str) -> None:
        """Let other mounts know that this one shows a file system.

        Raises:
            OSError: the file cannot be made; this mount does not count as alone either.
        """
        if key in self._fds:
            self._shown_twice.add(key)
            return
        path = os.path.join(RUN_DIR, f"shown-{key}.lock")
        fd = self._fds[key] = ownfiles.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        filelocks.try_lock(fd, fcntl.F_RDLCK, _EXTENT)

    def is_alone(self, key: str) -> bool:
        """Whether this mount shows a file system, in one place, and no other mount does."""
        fd = self._fds.get(key)
        if fd is None or key in self._shown_twice:
            return False
        return filelocks.find_conflict(fd, fcntl.F_WRLCK, _EXTENT) is None

    def close(self) -> None:
        """Show nothing any more."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
