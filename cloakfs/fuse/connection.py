"""Aborts a FUSE connection, and sets what the kernel sends: how many requests at a time, and how far it reads ahead.

(The reaper uses this module, so it imports next to nothing.)

A connection ends when no process has its session open any more. A thread that waits in the kernel still has it open:
when it makes the kernel invalidate a name, it waits for the directory's lock, which a user can hold indefinitely, and
neither a signal nor the end of its process gets it out of there. All users of the mount would have to wait as long.
"""

import contextlib
import errno
import os

from ..linux import ownfiles
from ..linux.mounting import mount_apart

_MINOR_BITS = 20


_CONTROL = "/sys/fs/fuse/connections"


def open_control(device: str, name: str, flags: int) -> int:
    """Open a file of the connection whose file system has this device (`mountinfo.Place`).

    A file system for this is mounted where no path leads. Where that cannot be, as in a container, the machine's is
    used, if any.
    """
    major, _, minor = device.partition(":")
    number = int(major) << _MINOR_BITS | int(minor)
    try:
        connections = mount_apart("fusectl")
    except OSError:
        return ownfiles.open_fd(f"{_CONTROL}/{number}/{name}", flags | os.O_CLOEXEC)
    try:
        return ownfiles.open_fd(f"{number}/{name}", flags | os.O_CLOEXEC, dir_fd=connections)
    finally:
        os.close(connections)


def limit_background(device: str, most: int, congested: int) -> None:
    """Let the kernel send up to `most` requests for which no process waits; it reads less ahead from `congested` on.

    Without this, it sends 12: if as many reads hang, it sends no other.

    Raises:
        OSError: the files of the connection cannot be written; or the kernel has not taken the number (EDOM).
    """
    for name, number in (("max_background", most), ("congestion_threshold", congested)):
        with ownfiles.open(open_control(device, name, os.O_WRONLY), "wb", buffering=0) as file:
            file.write(b"%d" % number)
        with ownfiles.open(open_control(device, name, os.O_RDONLY), "rb", buffering=0) as file:
            if int(file.read(32)) != number:
                raise OSError(errno.EDOM, os.strerror(errno.EDOM))


def set_read_ahead(device: str, kib: int) -> None:
    """Let the kernel read so much ahead of a program that reads in order, in requests of up to 1 MiB.

    To be called after FUSE_INIT has been answered, which sets the 128 KiB that libfuse asks for.

    Raises:
        OSError: the setting cannot be written, as where /sys is read-only.
    """
    of_mount = f"/sys/class/bdi/{device}"
    if ownfiles.exists(f"{of_mount}-fuseblk"):  # then, without this, it is the one of the block device itself
        of_mount += "-fuseblk"
    with ownfiles.open(f"{of_mount}/read_ahead_kb", "wb", buffering=0) as file:
        file.write(b"%d" % kib)


def open_abort(device: str) -> int:
    """Return a descriptor for `abort`, of the connection whose file system has this device (`mountinfo.Place`).

    It works for this connection and no later one, and does not keep the connection alive.

    Raises:
        OSError: the kernel cannot do this (before Linux 5.2), or there is no such connection.
    """
    return open_control(device, "abort", os.O_WRONLY)


def abort(fd: int) -> None:
    """Fail all waiting and later requests with ENOTCONN; does nothing if the connection has already ended."""
    with contextlib.suppress(OSError):
        ownfiles.write(fd, b"1")
