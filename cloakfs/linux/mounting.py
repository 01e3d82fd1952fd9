"""mount(2), umount(2), and mounts that are not attached anywhere. What takes a path acts as the daemon."""

import ctypes
import os
import re
import struct

from . import ownfiles
from .credentials import as_daemon
from .libc import AT_EMPTY_PATH, NR, check, libc, syscall

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_SYNCHRONOUS, MS_REMOUNT = 1, 2, 4, 8, 16, 32
MS_NOSYMFOLLOW = 256
MS_DIRSYNC, MS_NOATIME, MS_NODIRATIME, MS_POSIXACL, MS_RELATIME = 128, 1024, 2048, 1 << 16, 1 << 21
MS_BIND = 4096
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8


@as_daemon
def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """Call mount(2)."""
    check(
        libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()),
        target,
    )


@as_daemon
def umount(target: str, flags: int = 0) -> None:
    """Call umount2(2); a symbolic link at the end of `target` is never followed."""
    check(libc.umount2(os.fsencode(target), ctypes.c_int(flags | UMOUNT_NOFOLLOW)), target)


@as_daemon
def detach_mount(fd: int) -> None:
    """Detach exactly the mount whose top `fd` refers to, wherever it is and whatever its path leads to by now."""
    check(libc.umount2(b"/proc/self/fd/%d" % fd, ctypes.c_int(MNT_DETACH)))


_FSCONFIG_CMD_CREATE = 6


def mount_apart(kind: str) -> int:
    """Mount a file system that needs no device, without attaching it; it lasts until the descriptor is closed.

    Returns a descriptor of its top. See fsopen(2) and fsmount(2), since Linux 5.2.
    """
    closed_on_exec = ctypes.c_uint(1)
    context = check(syscall(NR["fsopen"], kind.encode(), closed_on_exec), kind)
    try:
        create = ctypes.c_uint(_FSCONFIG_CMD_CREATE)
        check(syscall(NR["fsconfig"], ctypes.c_long(context), create, None, None, ctypes.c_long(0)), kind)
        return check(syscall(NR["fsmount"], ctypes.c_long(context), closed_on_exec, ctypes.c_uint(0)), kind)
    finally:
        os.close(context)


_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MS_PRIVATE = 1 << 18
_MOUNT_ATTR_RDONLY = 1


@as_daemon
def clone_writable(path: str) -> int:
    """Return a descriptor (O_PATH) of the top of a detached copy of the mount at `path`, which is not read-only.

    Raises:
        OSError: ENOSYS before Linux 5.12.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    fd = check(syscall(NR["open_tree"], ctypes.c_long(_AT_FDCWD), os.fsencode(path), flags), path)
    try:
        attributes = struct.pack("QQQQ", 0, _MOUNT_ATTR_RDONLY, _MS_PRIVATE, 0)
        size = ctypes.c_size_t(len(attributes))
        check(
            syscall(NR["mount_setattr"], ctypes.c_long(fd), b"", ctypes.c_uint(AT_EMPTY_PATH), attributes, size), path
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


@as_daemon
def clone_tree(path: str) -> int:
    """Return a descriptor (O_PATH) of the top of a detached copy of the mounts at and below `path`.

    Later mounts and unmounts do not show in it. It lasts until the descriptor is closed. See open_tree(2).
    """
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    fd = check(
        syscall(NR["open_tree"], ctypes.c_long(_AT_FDCWD), os.fsencode(path), ctypes.c_uint(flags)),
        path,
    )
    attributes = struct.pack("QQQQ", 0, 0, _MS_PRIVATE, 0)
    # Best effort: where there is no such call (before Linux 5.12), nothing is propagated to a detached copy.
    syscall(
        NR["mount_setattr"],
        ctypes.c_long(fd),
        b"",
        ctypes.c_uint(AT_EMPTY_PATH | _AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    return fd


def may_lease() -> bool:
    """Whether the kernel grants leases on files (fs.leases-enable, proc(5)), such as the NFSv4 server's delegations."""
    try:
        with ownfiles.open("/proc/sys/fs/leases-enable", encoding="ascii") as file:
            return file.read().strip() != "0"
    except OSError:
        return True


def may_delegate_writing() -> bool:
    """Whether the kernel's NFSv4 server may grant delegations for writing (Linux 6.6 and later)."""
    return kernel_version() >= (6, 6) and may_lease()


def kernel_version() -> tuple[int, ...]:
    """Return the first two numbers of the kernel's release."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", os.uname().release)[:2])
