"""Files whose content tells where it belongs, and the page cache they are to be out of."""

import ctypes
import os
import struct
import time
import zlib

from cloakfs.mounted import mounted

PAGE = 4096

_WORD = struct.Struct("<Q")
_PATIENCE = 0.5  # without any progress

_libc = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # Linux 6.5, everywhere the same


def create(directory: str, name: str, size: int) -> None:
    """Make a file of `size` bytes, and the directories above it; it is on the disk afterwards.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    path = os.path.join(directory, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        pages = -(-size // PAGE)
        for first in range(0, pages, 256):
            words = (_WORD.pack(_word(name, page)) for page in range(first, min(first + 256, pages)))
            file.write(b"".join(word * (PAGE // _WORD.size) for word in words))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def verify(name: str, offset: int, data: memoryview) -> None:
    """Are these the bytes that `create` wrote there? One word of each page is looked at.

    Raises:
        OSError: they are not.
    """
    at = -offset % _WORD.size
    while at + _WORD.size <= len(data):
        page = (offset + at) // PAGE
        (found,) = _WORD.unpack_from(data, at)
        if found != _word(name, page):
            raise OSError(f"{name}: wrong content at {offset + at}: {found:#x} instead of {_word(name, page):#x}")
        at = (page + 1) * PAGE - offset


def _word(name: str, page: int) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogateescape")) << 32 | page


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def cached_pages(fd: int) -> int | None:
    """How many pages of the file are in memory, or on their way; None if the kernel cannot tell."""
    told = _CacheStat()
    failed = _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(0, 0)), ctypes.byref(told), 0)
    return None if failed else int(told.cached)


def forget(path: str) -> int | None:
    """Have the kernel drop a file's pages; how many are left. Below a cloakfs mount, those of the real file, too.

    What is on its way into memory is waited for, and dropped. A file system in memory keeps them all.

    Raises:
        OSError: it cannot be opened.
    """
    real = _real_path(path)
    left = _forget(path)
    return left if real is None else _forget(real)


def _forget(path: str) -> int | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        before, changed = cached_pages(fd), time.monotonic()
        while True:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            left = cached_pages(fd)
            if left != before:
                before, changed = left, time.monotonic()
            if not left or time.monotonic() > changed + _PATIENCE:
                return left
            time.sleep(0.005)
    finally:
        os.close(fd)


def _real_path(path: str) -> str | None:
    """What lies behind a mount of ours, as far as root may know."""
    path = os.path.realpath(path)
    for mount in mounted().values():
        if path.startswith(f"{mount.target}/"):
            real = os.path.join(mount.source, os.path.relpath(path, mount.target))
            return real if os.path.exists(real) else None
    return None
