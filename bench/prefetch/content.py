"""Files whose content says where it belongs, and dropping their pages from the page cache."""

import ctypes
import os
import struct
import time
import zlib

from cloakfs.state.runtime import mounted

PAGE = 4096

_WORD = struct.Struct("<Q")
_PATIENCE = 0.5  # how long to wait without any progress

_libc = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # since Linux 6.5; the same number on every architecture


def create(directory: str, name: str, size: int) -> None:
    """Make a file of `size` bytes, and the directories above it, and write it to the disk.

    Raises:
        OSError: it exists already, or cannot be written.
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
    """Check that these are the bytes that `create` wrote there, by one word of each page.

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
    """Return how many pages of the file are in memory, or being read; None if the kernel does not report that."""
    stat = _CacheStat()
    failed = _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(0, 0)), ctypes.byref(stat), 0)
    return None if failed else int(stat.cached)


def can_count_pages() -> bool:
    """Whether the kernel can report what is in memory."""
    fd = os.open(__file__, os.O_RDONLY)
    try:
        return cached_pages(fd) is not None
    finally:
        os.close(fd)


def drop_pages(path: str) -> int | None:
    """Make the kernel drop a file's pages; return how many are left. Below a cloakfs mount, drop the real file's, too.

    This waits for pages that are being read, and drops them. A file system in memory keeps all of them.

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
    """Return the real path behind a cloakfs mount, if root may see it there."""
    path = os.path.realpath(path)
    for mount in mounted().values():
        if path.startswith(f"{mount.target}/"):
            real = os.path.join(mount.source, os.path.relpath(path, mount.target))
            return real if os.path.exists(real) else None
    return None
