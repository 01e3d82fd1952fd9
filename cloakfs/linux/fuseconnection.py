"""Aborts a FUSE connection. (The clean-up process uses this module, so it imports next to nothing.)

A connection ends when nobody has its session open any more. A thread that waits in the kernel still has it open: when
it makes the kernel forget a name, it waits for the directory's lock, which a user can hold indefinitely, and neither a
signal nor the end of its process gets it out of there. All users of the mount would have to wait as long.
"""

import contextlib
import os

from .mounting import mount_apart

_MINOR_BITS = 20


def open_abort(device: str) -> int:
    """Return a descriptor for `abort`, of the connection whose file system has this device (`mountinfo.Place`).

    It works for this connection and no later one, and does not keep the connection alive.

    Raises:
        OSError: the kernel cannot do this (before Linux 5.2), or there is no such connection.
    """
    major, _, minor = device.partition(":")
    number = int(major) << _MINOR_BITS | int(minor)
    connections = mount_apart("fusectl")
    try:
        return os.open(f"{number}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=connections)
    finally:
        os.close(connections)


def abort(fd: int) -> None:
    """Fail all waiting and later requests with ENOTCONN; does nothing if the connection has already ended."""
    with contextlib.suppress(OSError):
        os.write(fd, b"1")
