"""Ending a FUSE connection by force. (The clean-up process has this module, so it imports next to nothing.)

A connection ends when nobody has its session open any more. A thread that waits in the kernel has: one that is to make
it forget a name waits for a directory's lock, which a user can hold as long as he likes, and neither a signal nor the
end of its process gets it out of there. Whoever asks the mount for anything would wait as long.
"""

import contextlib
import os

from .mounting import mount_apart

_MINOR_BITS = 20


def open_abort(device: str) -> int:
    """A descriptor for `abort`, of the connection whose file system has this device (`mountinfo.Place`).

    It is good for this connection and no later one, and keeps nothing of it.

    Raises:
        OSError: this kernel cannot do that (before Linux 5.2), or there is no such connection.
    """
    major, _, minor = device.partition(":")
    number = int(major) << _MINOR_BITS | int(minor)
    connections = mount_apart("fusectl")
    try:
        return os.open(f"{number}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=connections)
    finally:
        os.close(connections)


def abort(fd: int) -> None:
    """Whoever waits for an answer, or asks from now on, is told ENOTCONN; nothing if it has ended already."""
    with contextlib.suppress(OSError):
        os.write(fd, b"1")
