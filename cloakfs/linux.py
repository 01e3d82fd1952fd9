"""System calls that Python's `os` lacks: per-thread credentials, file handles, directory cookies, mount(2).

Everything here is a thin, typed wrapper that raises `OSError`; meaning is given to it in `tree`, `nodes` and
`daemon`.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from .ids import ServerId

_T = TypeVar("_T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_syscall: Callable[..., int] = _libc.syscall

# x86-64 and the generic table (arm64, riscv64) differ; both are in the kernel's unistd.h.
_NUMBERS = {
    "x86_64": {
        "setgroups": 116, "setfsuid": 122, "setfsgid": 123, "capget": 125, "capset": 126,
        "getdents64": 217, "name_to_handle_at": 303, "open_by_handle_at": 304, "renameat2": 316,
        "unshare": 272, "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "close_range": 436, "faccessat2": 439, "mount_setattr": 442,
    },
    "aarch64": {
        "setgroups": 159, "setfsuid": 151, "setfsgid": 152, "capget": 90, "capset": 91,
        "getdents64": 61, "name_to_handle_at": 264, "open_by_handle_at": 265, "renameat2": 276,
        "unshare": 97, "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "close_range": 436, "faccessat2": 439, "mount_setattr": 442,
    },
}  # fmt: skip
_NR = {name: ctypes.c_long(nr) for name, nr in _NUMBERS[os.uname().machine].items()}

AT_EMPTY_PATH = 0x1000
AT_EACCESS = 0x200
AT_HANDLE_FID = 0x200  # Linux 6.5: an identifier that need not be decodable
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RWF_NOWAIT = os.RWF_NOWAIT
CLOSE_RANGE_UNSHARE = 2
_CLONE_FS = 0x200
FMODE_EXEC = 0x20  # what execve(2) adds to the flags of a FUSE OPEN

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_SYNCHRONOUS = 1, 2, 4, 8, 16
MS_DIRSYNC, MS_NOATIME, MS_NODIRATIME, MS_POSIXACL, MS_RELATIME = 128, 1024, 2048, 1 << 16, 1 << 21
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

_INVALID = ctypes.c_uint32(0xFFFFFFFF)


def _check(result: int, *path: object) -> int:
    """Turn libc's -1 into an OSError."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), *path)
    return result


class Credentials(NamedTuple):
    """Who a system call is made as, in server ids: file-system uid and gid and supplementary groups."""

    uid: ServerId
    gid: ServerId
    groups: tuple[ServerId, ...]


ROOT = Credentials(ServerId(0), ServerId(0), ())
"""The daemon, when it acts for nobody. It is told by identity (`is`) from a caller with the same ids."""

_of_daemon = ROOT


def act_for_nobody_as(who: Credentials) -> None:
    """From now on, `ROOT` means these credentials: so a daemon is known to the cloakfs mount that it lies over.

    Call it before there are other threads.
    """
    global _of_daemon  # noqa: PLW0603 (as all the process's credentials)
    _of_daemon = who


if TYPE_CHECKING:

    class Stat(os.stat_result):  # type: ignore[misc]  # which is final
        """Of an object of the real tree. It is typed as a whole: to wrap each id would cost a call, for every name."""

        st_uid: ServerId
        st_gid: ServerId

else:
    Stat = os.stat_result


fstat = cast(Callable[[int], Stat], os.fstat)
"""fstat(2) of an object of the real tree."""


class _Thread(threading.local):
    who: Credentials | None = None  # nobody known: a new thread begins as the one that made it
    has_own_umask = False


_thread = _Thread()


class _Arguments:
    """A caller's ids, ready for the system calls."""

    __slots__ = ("count", "gid", "groups", "proven", "uid")

    def __init__(self, who: Credentials) -> None:
        self.count = ctypes.c_long(len(who.groups))
        self.groups = (ctypes.c_uint32 * len(who.groups)).from_buffer(array("I", who.groups))
        self.gid = ctypes.c_uint32(who.gid)
        self.uid = ctypes.c_uint32(who.uid)
        self.proven = False


FEW_GROUPS = 64
"""Of identities with more groups only a few are remembered: any user can be in 65,536."""

MOST_LONG = 8
"""So many."""

_arguments = lru_cache(1024)(_Arguments)  # clients choose ids: there must be a bound
_long: dict[int, tuple[Credentials, _Arguments]] = {}  # by id()


def _long_arguments(who: Credentials) -> _Arguments:
    """The same for many groups, without so much as hashing them each time."""
    known, ready = _long.get(id(who), (None, None))
    if ready is None or known is not who:
        if len(_long) >= MOST_LONG:
            _long.clear()
        ready = _Arguments(who)
        _long[id(who)] = who, ready
    return ready


_SETGROUPS, _SETFSUID, _SETFSGID = _NR["setgroups"], _NR["setfsuid"], _NR["setfsgid"]


def assume(who: Credentials) -> None:
    """Make the calling thread's file-system operations run as `who`, until it assumes somebody else.

    Only this thread changes (raw system calls; libc's wrappers would change all). Leaving uid 0 drops the
    file-related capabilities from the effective set, coming back raises them (capabilities(7)).

    Raises:
        PermissionError: the kernel refused one of the ids (for example, one not mapped in a user namespace).
    """
    if who is ROOT:
        who = _of_daemon
    before = _thread.who
    if before is who or before == who:
        return
    _thread.who = None
    ready = _arguments(who) if len(who.groups) <= FEW_GROUPS else _long_arguments(who)
    if before is None or before.groups != who.groups:
        _check(_syscall(_SETGROUPS, ready.count, ready.groups))
    _syscall(_SETFSGID, ready.gid)
    _syscall(_SETFSUID, ready.uid)
    if not ready.proven:
        # setfsuid(2) reports no errors: it has to be asked what is in force now. What worked once works again.
        if (
            _syscall(_SETFSUID, _INVALID) & 0xFFFFFFFF != who.uid
            or _syscall(_SETFSGID, _INVALID) & 0xFFFFFFFF != who.gid
        ):
            raise PermissionError(errno.EPERM, f"cannot act as {who.uid}:{who.gid}")
        ready.proven = True
    _thread.who = who


def in_main_thread() -> bool:
    """Is this the thread of the session loop?"""
    return threading.get_ident() == threading.main_thread().ident


def umask(mask: int) -> None:
    """umask(2) for the calling thread alone, unless it is the main one."""
    if not in_main_thread() and not _thread.has_own_umask:
        _check(_syscall(_NR["unshare"], ctypes.c_long(_CLONE_FS)))
        _thread.has_own_umask = True
    os.umask(mask)


def apart(call: Callable[..., _T], *args: Any) -> _T:
    """The result of `call`, made in a thread of its own that has none of the process's descriptors.

    For calls that have to wait for the daemon itself, as a client of its own mount. A thread that waits so cannot be
    killed, and would keep the session open that the daemon is killed with: all clients would wait for ever.

    It takes no signals: Python's handler writes to a descriptor, which there is somebody else's, or nobody's.
    """
    answer: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
            _check(
                _syscall(
                    _NR["close_range"], ctypes.c_uint(3), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(CLOSE_RANGE_UNSHARE)
                )
            )
            answer.append(call(*args))
        except BaseException as exc:
            failure.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer[0]


def has_only_root_ids(pid: int) -> bool:
    """Are the real, effective and saved ids of this thread all root's? (Whatever its file-system ids are; proc(5).)

    It is how the kernel tells who may enter a FUSE mount without `allow_other`. The caller must be able to read /proc.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return False
    ids = [line.split()[1:4] for line in lines if line.startswith((b"Uid:", b"Gid:"))]
    return ids == [[b"0"] * 3] * 2


_CAP_HEADER = struct.pack("Ii", 0x20080522, 0)
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
CAP_SETFCAP = 31


def effective_capabilities() -> int:
    """The calling thread's effective capabilities, as a bit mask (capabilities(7))."""
    data = ctypes.create_string_buffer(24)
    _check(_syscall(_NR["capget"], ctypes.create_string_buffer(_CAP_HEADER), data))
    words = struct.unpack("6I", data.raw)
    return int(words[0] | words[3] << 32)


def set_effective_capabilities(mask: int) -> None:
    """Set the calling thread's effective capabilities; the permitted and inheritable sets stay."""
    header = ctypes.create_string_buffer(_CAP_HEADER)
    data = ctypes.create_string_buffer(24)
    _check(_syscall(_NR["capget"], header, data))
    words = list(struct.unpack("6I", data.raw))
    words[0] = mask & words[1]
    words[3] = mask >> 32 & words[4]
    _check(_syscall(_NR["capset"], header, ctypes.create_string_buffer(struct.pack("6I", *words))))


@contextlib.contextmanager
def raised(*capabilities: int) -> Iterator[None]:
    """With these capabilities, which the daemon has given up, but may raise again."""
    before = effective_capabilities()
    set_effective_capabilities(before | sum(1 << number for number in capabilities))
    try:
        yield
    finally:
        set_effective_capabilities(before)


_MAX_HANDLE = 128
_fresh_handle = struct.pack("Ii", _MAX_HANDLE, 0)


def name_to_handle(fd: int, flags: int = 0) -> tuple[bytes, int]:
    """The file handle of what `fd` refers to, and the id of the mount it lies on (name_to_handle_at(2)).

    The handle is the type (4 bytes, native order) followed by the opaque bytes.

    Raises:
        OSError: EOPNOTSUPP when the file system has no handles.
    """
    buf = ctypes.create_string_buffer(_fresh_handle, 8 + _MAX_HANDLE)
    mount_id = ctypes.c_int()
    _check(
        _syscall(
            _NR["name_to_handle_at"],
            ctypes.c_long(fd),
            b"",
            buf,
            ctypes.byref(mount_id),
            ctypes.c_long(AT_EMPTY_PATH | flags),
        )
    )
    raw = buf.raw
    return raw[4 : 8 + int.from_bytes(raw[:4], "little")], mount_id.value


def open_by_handle(mount_fd: int, handle: bytes, flags: int) -> int:
    """A new descriptor for the object that `handle` (from `name_to_handle`) names (open_by_handle_at(2)).

    Raises:
        OSError: ESTALE when the object is gone.
    """
    buf = ctypes.create_string_buffer(struct.pack("I", len(handle) - 4) + handle)
    return _check(_syscall(_NR["open_by_handle_at"], ctypes.c_long(mount_fd), buf, ctypes.c_long(flags | os.O_CLOEXEC)))


def renameat2(src_dir: int, src: bytes, dst_dir: int, dst: bytes, flags: int) -> None:
    """rename(2) relative to descriptors, with `RENAME_NOREPLACE` or `RENAME_EXCHANGE`."""
    _check(
        _syscall(
            _NR["renameat2"],
            ctypes.c_long(src_dir),
            src,
            ctypes.c_long(dst_dir),
            dst,
            ctypes.c_long(flags),
        )
    )


def may_access(fd: int, mode: int) -> bool:
    """May the thread's file-system identity access what `fd` refers to (faccessat2(2), AT_EACCESS)?"""
    return (
        _syscall(
            _NR["faccessat2"],
            ctypes.c_long(fd),
            b"",
            ctypes.c_long(mode),
            ctypes.c_long(AT_EMPTY_PATH | AT_EACCESS),
        )
        == 0
    )


_dirent = struct.Struct("=QqHB")


def getdents(fd: int, size: int = 32768) -> Iterator[tuple[bytes, int, int]]:
    """One batch of directory entries: (name, cookie of the position after it, DT_…); empty at the end.

    The cookies are the file system's own (getdents64(2) d_off): they survive deletions and a re-open, and
    `os.lseek(fd, cookie, os.SEEK_SET)` goes back to one.
    """
    buf = ctypes.create_string_buffer(size)
    filled = _check(_syscall(_NR["getdents64"], ctypes.c_long(fd), buf, ctypes.c_long(size)))
    raw = ctypes.string_at(buf, filled)
    at = 0
    while at < filled:
        _ino, cookie, length, kind = _dirent.unpack_from(raw, at)
        yield raw[at + 19 : raw.index(b"\0", at + 19)], cookie, kind
        at += length


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """mount(2)."""
    _check(
        _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()),
        target,
    )


def umount(target: str, flags: int = 0) -> None:
    """umount2(2); never follows a symbolic link at the end of `target`."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags | UMOUNT_NOFOLLOW)), target)


def detach_mount(fd: int) -> None:
    """Take the very mount off whose top `fd` refers to, wherever it is and whatever its path leads to by now."""
    _check(_libc.umount2(b"/proc/self/fd/%d" % fd, ctypes.c_int(MNT_DETACH)))


_FSCONFIG_CMD_CREATE = 6


def mount_apart(kind: str) -> int:
    """Mount a file system that needs no device, at no place: a descriptor of its top, which it lasts as long as.

    See fsopen(2) and fsmount(2), since Linux 5.2.
    """
    closed_on_exec = ctypes.c_uint(1)
    context = _check(_syscall(_NR["fsopen"], kind.encode(), closed_on_exec), kind)
    try:
        create = ctypes.c_uint(_FSCONFIG_CMD_CREATE)
        _check(_syscall(_NR["fsconfig"], ctypes.c_long(context), create, None, None, ctypes.c_long(0)), kind)
        return _check(_syscall(_NR["fsmount"], ctypes.c_long(context), closed_on_exec, ctypes.c_uint(0)), kind)
    finally:
        os.close(context)


_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MS_PRIVATE = 1 << 18


def clone_tree(path: str) -> int:
    """A copy of the mounts at and below `path` that hangs nowhere: the descriptor (O_PATH) of its top.

    What is mounted or unmounted later, it does not show. It lasts until the descriptor is closed. See open_tree(2).
    """
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    fd = _check(
        _syscall(_NR["open_tree"], ctypes.c_long(_AT_FDCWD), os.fsencode(path), ctypes.c_uint(flags)),
        path,
    )
    attributes = struct.pack("QQQQ", 0, 0, _MS_PRIVATE, 0)
    # Best effort: where there is no such call (before Linux 5.12), nothing is propagated to what hangs nowhere.
    _syscall(
        _NR["mount_setattr"],
        ctypes.c_long(fd),
        b"",
        ctypes.c_uint(AT_EMPTY_PATH | _AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    return fd


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
_statx: Callable[..., int] = _libc.statx


def statx(fd: int, name: bytes = b"") -> tuple[Stat, int]:
    """lstat(2) of `name` in the directory `fd`, or of `fd` itself, and the id of the mount it was found on.

    Nobody who serves a file system is asked (AT_STATX_DONT_SYNC): of what is far, that is what the kernel remembers.
    The way to `name` in a directory that is far itself may have to be asked for all the same. Fractions of seconds are
    in the fields `…_ns` alone.
    """
    buffer = _statx_buffer
    if _statx(fd, name, _STATX_NAME if name else _STATX_FD, _STATX_WANTED, buffer.address) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), *((name,) if name else ()))
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


# XFS_IOC_FSGEOMETRY_V1, a struct xfs_fsop_geom_v1; the UUID comes after eight 32-bit and four 64-bit numbers.
_XFS_GEOMETRY, _XFS_GEOMETRY_SIZE = 0x80705864, 112
_XFS_UUID = slice(64, 80)


def xfs_uuid(fd: int) -> bytes:
    """The UUID of the xfs that `fd` is on, which must not be O_PATH (ioctl_xfs_fsgeometry(2)).

    Raises:
        OSError: ENOTTY if it is no xfs.
    """
    return fcntl.ioctl(fd, _XFS_GEOMETRY, bytes(_XFS_GEOMETRY_SIZE))[_XFS_UUID]
