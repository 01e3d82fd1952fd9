"""fanotify(7): reports what others change on a whole file system, by file handles and names.

This is a thin binding, like `syscalls`. No existing one fits: pyfanotify 0.3 (PyPI) runs a process of its own, wants an
unlimited queue, does not know FAN_REPORT_TARGET_FID, and turns handles into paths.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import ownfiles
from .libc import check, libc

_fanotify_init: Callable[..., int] = libc.fanotify_init
_fanotify_mark: Callable[..., int] = libc.fanotify_mark
_fstatfs: Callable[..., int] = libc.fstatfs

# fanotify_init(2)
FAN_CLOEXEC = 0x1
FAN_NONBLOCK = 0x2
FAN_CLASS_NOTIF = 0
FAN_REPORT_FID = 0x200
FAN_REPORT_DIR_FID = 0x400
FAN_REPORT_NAME = 0x800
FAN_REPORT_TARGET_FID = 0x1000  # Linux 5.17: report the target of a create, delete or move, too
FAN_REPORT_DFID_NAME_FID = FAN_REPORT_DIR_FID | FAN_REPORT_NAME | FAN_REPORT_FID  # Linux 5.9
FAN_REPORT_DFID_NAME_TARGET = FAN_REPORT_DFID_NAME_FID | FAN_REPORT_TARGET_FID

# fanotify_mark(2)
FAN_MARK_ADD = 0x1
FAN_MARK_REMOVE = 0x2
FAN_MARK_FILESYSTEM = 0x100
_AT_FDCWD = -100

# Events.
FAN_MODIFY = 0x2
FAN_ATTRIB = 0x4
FAN_CLOSE_WRITE = 0x8
FAN_MOVED_FROM = 0x40
FAN_MOVED_TO = 0x80
FAN_CREATE = 0x100
FAN_DELETE = 0x200
FAN_Q_OVERFLOW = 0x4000
FAN_ONDIR = 0x40000000

OF_ITSELF = FAN_ATTRIB | FAN_MOVED_FROM | FAN_MOVED_TO
"""Together with FAN_ONDIR, these mean that the directory itself has changed, and not only what is in it."""

_VERSION = 3
_FID, _DFID_NAME, _DFID = 1, 2, 3  # FAN_EVENT_INFO_TYPE_*

# struct fanotify_event_metadata: event_len, mask, pid.
_metadata = struct.Struct("=I4xQ4xi")
# struct fanotify_event_info_fid, up to the handle's type: info_type, len, fsid, handle_bytes.
_info = struct.Struct("=BxHQI")
_FRESH_STATFS = bytes(256)  # struct statfs has 120 bytes where a long has 64 bits
_statfs = struct.Struct("@l48xQ")


class Event(NamedTuple):
    """One event record of the kernel.

    Attributes:
        mask: FAN_… bits; several, if the same process did more with the same name before the event was read.
        fsid: the id of the file system, as in `os.fstatvfs`.
        directory: handle of the directory in which it happened, as from `syscalls.name_to_handle`; b"" if not reported.
        name: in that directory; b"." if it happened to the directory itself, b"" if not reported.
        target: handle of the object that it happened to, to which the name leads, or led; b"" if not reported.
        own: whether this process did it.
    """

    mask: int
    fsid: int
    directory: bytes
    name: bytes
    target: bytes
    own: bool = False


def init(flags: int) -> int:
    """Create a group of marks; return the descriptor from which events are read (fanotify_init(2))."""
    return check(_fanotify_init(ctypes.c_uint(flags), ctypes.c_uint(os.O_RDONLY)))


def mark(group: int, flags: int, mask: int, fd: int) -> None:
    """Request the events of `mask` on what `fd` (O_PATH suffices) refers to (fanotify_mark(2)).

    Raises:
        OSError: ENODEV or EOPNOTSUPP if the file system has no id or no handles, EXDEV in a subvolume of btrfs.
    """
    place = f"/proc/self/fd/{fd}".encode()
    check(_fanotify_mark(group, ctypes.c_uint(flags), ctypes.c_uint64(mask), _AT_FDCWD, place))


def filesystem(fd: int) -> tuple[int, int]:
    """Return the magic number (statfs(2) f_type) and the id, as in events, of the file system that `fd` is on."""
    buf = ctypes.create_string_buffer(_FRESH_STATFS)
    check(_fstatfs(fd, buf))
    magic, fsid = _statfs.unpack_from(buf)
    return magic, fsid


def read(group: int, size: int) -> bytes:
    """Read events in the kernel's format, for `parse`; raises BlockingIOError if there are none."""
    return ownfiles.read(group, size)


def records(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """Return what was read, event by event, each with the process that has caused it."""
    at = 0
    while at < len(raw):
        length, _, pid = _metadata.unpack_from(raw, at)
        yield raw[at : at + length], pid
        at += length


def parse(raw: bytes, own: int) -> list[Event]:
    """Return the events that were read; of those caused by the process `own`, only changes of directories themselves.

    Raises:
        OSError: EPROTO if the kernel speaks another version.
    """
    metadata, info = _metadata.unpack_from, _info.unpack_from
    events: list[Event] = []
    at, end = 0, len(raw)
    if end and raw[4] != _VERSION:
        raise OSError(errno.EPROTO, "fanotify of another version")
    while at < end:
        length, mask, pid = metadata(raw, at)
        if pid == own and not (mask & FAN_ONDIR and mask & OF_ITSELF):
            at += length
            continue
        fsid = 0
        directory = name = target = b""
        record = at + 24
        at += length
        while record < at:
            kind, size, fsid_, n = info(raw, record)
            handle = record + 16
            if kind == _FID:
                fsid = fsid_
                target = raw[handle : handle + 4 + n]
            elif kind == _DFID_NAME:
                fsid = fsid_
                directory = raw[handle : handle + 4 + n]
                name = raw[handle + 4 + n : raw.index(0, handle + 4 + n)]
            elif kind == _DFID:
                fsid = fsid_
                directory = raw[handle : handle + 4 + n]
            record += size
        if name == b"." and not target:
            target = directory
        events.append(Event(mask, fsid, directory, name, target, pid == own))
    return events
