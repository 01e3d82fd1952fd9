"""Which file systems the mounts of this machine show, so that each knows whether it is the only one to show one."""

import contextlib
import fcntl
import os

from ..linux import filelocks, ownfiles
from .runtime import RUN_DIR

_EXTENT = (0, 1)


class Presence:
    """The file systems that one mount shows, by their st_dev, until its daemon ends.

    There is a file for each, which every mount that shows it has locked for reading. Mounts in a container that has a
    /run of its own are not seen.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def announce(self, device: int) -> None:
        """Let other mounts know that this one shows a file system. If that cannot be done, none counts as alone."""
        if device in self._fds:
            return
        path = os.path.join(RUN_DIR, f"shown-{os.major(device)}-{os.minor(device)}.lock")
        with contextlib.suppress(OSError):
            fd = ownfiles.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            filelocks.try_lock(fd, fcntl.F_RDLCK, _EXTENT)
            self._fds[device] = fd

    def is_alone(self, device: int) -> bool:
        """Whether this mount, and no other one, shows a file system."""
        fd = self._fds.get(device)
        return fd is not None and filelocks.find_conflict(fd, fcntl.F_WRLCK, _EXTENT) is None

    def close(self) -> None:
        """Show nothing any more."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
