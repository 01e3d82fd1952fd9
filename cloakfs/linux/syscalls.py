"""System calls on files that Python's `os` lacks: file handles, directory cookies, statx(2), fallocate(2).

Each function is a thin, typed wrapper that raises `OSError`; `tree.calls` calls them with chosen credentials.
"""

import ctypes
import errno
import fcntl
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, cast

from ..identity import ServerId
from .libc import AT_EMPTY_PATH, NR, check, libc, syscall

AT_EACCESS = 0x200
AT_HANDLE_FID = 0x200  # Linux 6.5: an identifier that need not be decodable
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RWF_NOWAIT = os.RWF_NOWAIT
FALLOC_FL_KEEP_SIZE = 0x01
FMODE_EXEC = 0x20  # what execve(2) adds to the flags of a FUSE OPEN

if TYPE_CHECKING:

    class Stat(os.stat_result):  # type: ignore[misc]  # which is final
        """The stat of an object of the real tree, typed as a whole: to wrap each id would cost a call per name."""

        st_uid: ServerId
        st_gid: ServerId

else:
    Stat = os.stat_result


fstat = cast(Callable[[int], Stat], os.fstat)  # noqa: TID251  (on an open descriptor)
"""fstat(2) of an object of the real tree."""


_MAX_HANDLE = 128
_fresh_handle = struct.pack("Ii", _MAX_HANDLE, 0)
_NAME_TO_HANDLE_AT = NR["name_to_handle_at"]


class _HandleBuffer(threading.local):
    """A struct file_handle and the id of a mount, made once for each thread."""

    def __init__(self) -> None:
        self.buf = ctypes.create_string_buffer(8 + _MAX_HANDLE)
        self.mount_id = ctypes.c_int()
        self.address = ctypes.byref(self.mount_id)


_handle_buffer = _HandleBuffer()


def name_to_handle(fd: int, flags: int = 0) -> tuple[bytes, int]:
    """Return the file handle of what `fd` refers to, and the id of the mount it lies on (name_to_handle_at(2)).

    The handle is the type (4 bytes, native order) followed by the opaque bytes.

    Raises:
        OSError: EOPNOTSUPP when the file system has no handles.
    """
    buffer = _handle_buffer
    buf = buffer.buf
    buf.value = _fresh_handle
    # libc passes on six registers as they are; each of these numbers is an int for the kernel.
    if syscall(_NAME_TO_HANDLE_AT, fd, b"", buf, buffer.address, AT_EMPTY_PATH | flags) < 0:
        check(-1)
    raw = buf.raw
    return raw[4 : 8 + int.from_bytes(raw[:4], "little")], buffer.mount_id.value


def open_by_handle(mount_fd: int, handle: bytes, flags: int) -> int:
    """Open the object that `handle` (from `name_to_handle`) names (open_by_handle_at(2)).

    Raises:
        OSError: ESTALE when the object is gone.
    """
    buf = ctypes.create_string_buffer(struct.pack("I", len(handle) - 4) + handle)
    return check(syscall(NR["open_by_handle_at"], ctypes.c_long(mount_fd), buf, ctypes.c_long(flags | os.O_CLOEXEC)))


def renameat2(src_dir: int, src: bytes, dst_dir: int, dst: bytes, flags: int) -> None:
    """Call renameat2(2), with `RENAME_NOREPLACE` or `RENAME_EXCHANGE`."""
    check(
        syscall(
            NR["renameat2"],
            ctypes.c_long(src_dir),
            src,
            ctypes.c_long(dst_dir),
            dst,
            ctypes.c_long(flags),
        )
    )


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2). (`os.posix_fallocate` has no modes, and writes zeros where the file system allocates nothing.)

    Raises:
        OSError: EOPNOTSUPP when the file system cannot do this.
    """
    check(libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))


def may_access(fd: int, mode: int) -> bool:
    """Whether the thread's file-system identity may access what `fd` refers to (faccessat2(2), AT_EACCESS)."""
    return (
        syscall(
            NR["faccessat2"],
            ctypes.c_long(fd),
            b"",
            ctypes.c_long(mode),
            ctypes.c_long(AT_EMPTY_PATH | AT_EACCESS),
        )
        == 0
    )


def require_access(fd: int, mode: int) -> None:
    """Raise unless the thread's file-system identity may access what `fd` refers to (faccessat2(2), AT_EACCESS).

    Raises:
        OSError: it may not; EPERM if no caller may write, because the file is immutable (chattr(1)).
    """
    arguments = ctypes.c_long(fd), b"", ctypes.c_long(mode), ctypes.c_long(AT_EMPTY_PATH | AT_EACCESS)
    check(syscall(NR["faccessat2"], *arguments))


class SpecialTime(Enum):
    """What utimensat(2) takes in place of a time: the present, or what there is; the values are its `tv_nsec`."""

    NOW = (1 << 30) - 1
    OMIT = (1 << 30) - 2


_NS = 1_000_000_000


def utimens(fd: int, atime: int | SpecialTime, mtime: int | SpecialTime) -> None:
    """Set the times, in nanoseconds since 1970, of what `fd` refers to; it may be O_PATH (utimensat(2))."""
    words = [
        word
        for time in (atime, mtime)
        for word in ((0, time.value) if isinstance(time, SpecialTime) else divmod(time, _NS))
    ]
    check(libc.utimensat(fd, b"", (ctypes.c_long * 4)(*words), AT_EMPTY_PATH))


_dirent = struct.Struct("=QqHB")


def getdents(fd: int, size: int = 32768) -> Iterator[tuple[bytes, int, int]]:
    """Yield one batch of directory entries: (name, cookie of the position after it, DT_…); nothing at the end.

    The cookies are the file system's own (getdents64(2) d_off): they survive deletions and a re-open, and
    `os.lseek(fd, cookie, os.SEEK_SET)` returns to one.
    """
    buf = ctypes.create_string_buffer(size)
    filled = check(syscall(NR["getdents64"], ctypes.c_long(fd), buf, ctypes.c_long(size)))
    raw = ctypes.string_at(buf, filled)
    at = 0
    while at < filled:
        _ino, cookie, length, kind = _dirent.unpack_from(raw, at)
        yield raw[at + 19 : raw.index(b"\0", at + 19)], cookie, kind
        at += length


_AT_SYMLINK_NOFOLLOW = 0x100
_AT_NO_AUTOMOUNT = 0x800
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BASIC_STATS, _STATX_MNT_ID = 0x7FF, 0x1000
_STATX_NAME = ctypes.c_int(_AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC)
_STATX_FD = ctypes.c_int(AT_EMPTY_PATH | _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC)
_STATX_WANTED = ctypes.c_uint(_STATX_BASIC_STATS | _STATX_MNT_ID)

# struct statx: blksize, nlink, uid, gid, mode, ino, size, blocks, atime, ctime, mtime, rdev, dev, mnt_id.
_statx_answer = struct.Struct("=4xI8xIIIH2xQQQ8xqI4x16xqI4xqI4xIIIIQ")
_STATX_SIZE = 256


class _StatxBuffer(threading.local):
    def __init__(self) -> None:
        self.buf = ctypes.create_string_buffer(_STATX_SIZE)
        self.address = ctypes.byref(self.buf)


_statx_buffer = _StatxBuffer()
_statx: Callable[..., int] = libc.statx


def statx(fd: int, name: bytes = b"") -> tuple[Stat, int]:
    """Return lstat(2) of `name` in the directory `fd`, or of `fd` itself, and the id of the mount it was found on.

    No server gets a request (AT_STATX_DONT_SYNC): for a remote file system, the answer is what the kernel has cached.
    The lookup of `name` in a remote directory may need a request to the server nevertheless. Only the fields `…_ns`
    include fractions of seconds.
    """
    buffer = _statx_buffer
    if _statx(fd, name, _STATX_NAME if name else _STATX_FD, _STATX_WANTED, buffer.address) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), *((name,) if name else ()))
    return _answer_of_statx(buffer)


def statx_if_there(fd: int, name: bytes) -> tuple[Stat, int] | None:
    """Return what `statx` does for a name, None if it is absent. An exception would take as long as the call."""
    buffer = _statx_buffer
    if _statx(fd, name, _STATX_NAME, _STATX_WANTED, buffer.address) < 0:
        code = ctypes.get_errno()
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code), name)
    return _answer_of_statx(buffer)


def _answer_of_statx(buffer: _StatxBuffer) -> tuple[Stat, int]:
    (
        blksize, nlink, uid, gid, mode, ino, size, blocks, atime, atime_ns, ctime, ctime_ns, mtime, mtime_ns,
        rdev_major, rdev_minor, dev_major, dev_minor, mount_id,
    ) = _statx_answer.unpack_from(buffer.buf)  # fmt: skip
    info = Stat(
        (
            mode, ino, os.makedev(dev_major, dev_minor), nlink, uid, gid, size, atime, mtime, ctime,
            atime, mtime, ctime,
            atime * 1_000_000_000 + atime_ns, mtime * 1_000_000_000 + mtime_ns, ctime * 1_000_000_000 + ctime_ns,
            blksize, blocks, rdev_major and os.makedev(rdev_major, rdev_minor),
        )
    )  # fmt: skip
    return info, mount_id


_GET_FLAGS, _APPEND_ONLY = 0x80086601, 0x20  # FS_IOC_GETFLAGS, which writes an int; FS_APPEND_FL


def is_append_only(fd: int) -> bool:
    """Whether the file can only be appended to (ioctl_iflags(2), chattr +a); `fd` must not be O_PATH."""
    try:
        flags = fcntl.ioctl(fd, _GET_FLAGS, bytes(8))
    except OSError as exc:
        if exc.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            return False  # the file system has no such flags
        raise
    return int.from_bytes(flags[:4], sys.byteorder) & _APPEND_ONLY > 0


# XFS_IOC_FSGEOMETRY_V1, a struct xfs_fsop_geom_v1; the UUID comes after eight 32-bit and four 64-bit numbers.
_XFS_GEOMETRY, _XFS_GEOMETRY_SIZE = 0x80705864, 112
_XFS_UUID = slice(64, 80)


def xfs_uuid(fd: int) -> bytes:
    """Return the UUID of the xfs that `fd` is on, which must not be O_PATH (ioctl_xfs_fsgeometry(2)).

    Raises:
        OSError: ENOTTY if it is not an xfs.
    """
    return fcntl.ioctl(fd, _XFS_GEOMETRY, bytes(_XFS_GEOMETRY_SIZE))[_XFS_UUID]


# BTRFS_IOC_TREE_SEARCH: a struct btrfs_ioctl_search_args, whose key is what is searched for (tree, inodes, offsets,
# transactions, types: from … to …) and how many are wanted; each one found follows the key, after a header.
_BTRFS_SEARCH, _BTRFS_SEARCH_SIZE = 0xD0009411, 4096
_btrfs_key = struct.Struct("=7Q4I4Q")
_BTRFS_HEADER_SIZE = 32
_BTRFS_INODE_ITEM = 1
_BTRFS_TOP_TREE, _BTRFS_TOP_INODE = 5, 256
_FILEID_BTRFS_WITHOUT_PARENT = 0x4D


def btrfs_top(fd: int) -> bytes:
    """Return the handle of the top of the btrfs that `fd` is on, which must not be O_PATH, as of `name_to_handle`.

    It has the inode's generation, which differs from one file system to the next, and without which some kernels
    (Linux 6.1) do not find the top.

    Raises:
        OSError: ENOTTY if it is not a btrfs, EPERM without CAP_SYS_ADMIN.
    """
    most, inode, kind = 2**64 - 1, _BTRFS_TOP_INODE, _BTRFS_INODE_ITEM
    key = _btrfs_key.pack(_BTRFS_TOP_TREE, inode, inode, 0, most, 0, most, kind, kind, 1, 0, 0, 0, 0, 0)
    found = bytearray(key.ljust(_BTRFS_SEARCH_SIZE, b"\0"))
    fcntl.ioctl(fd, _BTRFS_SEARCH, found)
    if _btrfs_key.unpack_from(found)[9] != 1:
        raise OSError(errno.ENOENT, "this btrfs has no top")
    (generation,) = struct.unpack_from("=Q", found, _btrfs_key.size + _BTRFS_HEADER_SIZE)
    return struct.pack("=iQQI", _FILEID_BTRFS_WITHOUT_PARENT, inode, _BTRFS_TOP_TREE, generation & 0xFFFFFFFF)
