"""Detaches cloakfs mounts. (The reaper uses this module, so it imports next to nothing.)"""

import contextlib
import errno
import os

from .. import linux
from ..linux import mountinfo, ownfiles

KINDS = ("fuse.cloakfs", "fuseblk.cloakfs")
"""The file system types of cloakfs mounts: without and with a block device."""


def detach_dead(path: str, mount_id: int | None = None) -> bool:
    """Detach the topmost mount at `path` if it is a cloakfs mount whose daemon has died (and has this id, if given).

    A mount that another process makes there meanwhile is not detached in its place.
    """
    try:
        fd = ownfiles.open_fd(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        number = mountinfo.id_of(fd)
        place = mountinfo.by_id().get(number)
        if place is None or place.path != path or place.kind not in KINDS or mount_id not in (None, number):
            return False
        if not _is_dead(fd):
            return False
        with ownfiles.raised(linux.CAP_SYS_ADMIN), contextlib.suppress(OSError):  # another process unmounted it
            linux.detach_mount(fd)
        return True
    finally:
        os.close(fd)


def _is_dead(fd: int) -> bool:
    """Whether the daemon has died. A daemon that lives, or is starting, answers. (stat(2) might use cached data.)"""
    try:
        ownfiles.fstatvfs(fd)
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def detach(target: str) -> None:
    """Detach the mount at `target` at once; processes that have it open can use it until they close it."""
    with ownfiles.raised(linux.CAP_SYS_ADMIN), contextlib.suppress(OSError):  # another process unmounted it
        linux.umount(target, linux.MNT_DETACH)
