"""Taking our mounts off the tree. (The clean-up process has this module, so it imports next to nothing.)"""

import contextlib
import errno
import os

from . import linux
from .linux import mountinfo

KINDS = ("fuse.cloakfs", "fuseblk.cloakfs")
"""The types of our mounts: without and with a block device."""


def detach_dead(path: str, mount_id: int | None = None) -> bool:
    """Take off what is mounted last at `path` if it is ours and its daemon has died (and it has this number, if any).

    Nothing that is mounted there meanwhile is taken for it.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        number = mountinfo.id_of(fd)
        place = mountinfo.by_id().get(number)
        if place is None or place.path != path or place.kind not in KINDS or mount_id not in (None, number):
            return False
        if not _is_dead(fd):
            return False
        with linux.raised(linux.CAP_SYS_ADMIN), contextlib.suppress(OSError):  # somebody else unmounted it
            linux.detach_mount(fd)
        return True
    finally:
        os.close(fd)


def _is_dead(fd: int) -> bool:
    """Of a daemon that lives, or just comes up, this is answered. (stat(2) would be told what the kernel remembers.)"""
    try:
        os.fstatvfs(fd)
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def detach(target: str) -> None:
    """Take what is mounted at `target` off the tree at once; who has it open keeps it until they close it."""
    with linux.raised(linux.CAP_SYS_ADMIN), contextlib.suppress(OSError):  # somebody else unmounted it
        linux.umount(target, linux.MNT_DETACH)
