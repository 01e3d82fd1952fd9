"""FUSE file systems that users mount for themselves."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

from cloakfs import linux
from cloakfs.linux.libc import libc


@contextlib.contextmanager
def as_users_mount(
    path: bytes, uid: int, *, name: bytes = b"users", subtype: bytes = b"x", words: bytes = b""
) -> Iterator[int]:
    """As fusermount3 mounts for this user, who need not be able to open /dev/fuse here; no daemon ever answers.

    Yields the descriptor.
    """
    session = os.open("/dev/fuse", os.O_RDWR)
    data = b"fd=%d,rootmode=40000,user_id=%d,group_id=%d%s" % (session, uid, uid, words)
    try:
        if libc.mount(name, path, b"fuse." + subtype, linux.MS_NOSUID | linux.MS_NODEV, data):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        try:
            yield session
        finally:
            libc.umount2(path, linux.MNT_DETACH)
    finally:
        os.close(session)
