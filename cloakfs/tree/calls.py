"""Every system call on the real tree, each made with the credentials of a caller or of the daemon.

The first argument, `credentials`, says whose: the kernel decides what they permit. `linux.ROOT` is the daemon itself,
and `linux.ANY_CREDENTIALS` says that they do not matter.
Switching costs up to four system calls and is done only when the thread acts with other credentials.

Calls on an open descriptor for which the kernel checks no permission (fstat(2), dup(2), close(2), pread(2) and the
like) are the same for all callers and take no `credentials`.

All functions raise `OSError`, like the system call that they are named after.
"""

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from .. import linux
from ..identity import ServerId
from ..linux import ANY_CREDENTIALS, ROOT, Credentials, SpecialTime, Stat
from ..linux.credentials import assume

_T = TypeVar("_T")

btrfs_top = linux.btrfs_top
close = os.close
dup = os.dup
fadvise = os.posix_fadvise
fdatasync = os.fdatasync
fstat = linux.fstat
fstatvfs = os.fstatvfs
fsync = os.fsync
is_append_only = linux.is_append_only
lseek = os.lseek
name_to_handle = linux.name_to_handle
pread = os.pread
preadv = os.preadv
statx_fd: Callable[[int], tuple[Stat, int]] = linux.statx
xfs_uuid = linux.xfs_uuid

Entries: TypeAlias = "os._ScandirIterator[str]"
"""An iterator over the entries of a directory, which can be closed (os.scandir)."""

_FOUND = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def _path(fd: int) -> str:
    """Return a path that leads to the object that `fd` refers to, even if `fd` is O_PATH."""
    return f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def as_others() -> Iterator[None]:
    """Have the thread act as the daemon again when this ends.

    It is for calls on behalf of code that does not use `linux.ownfiles`, and goes on in this thread: a plug-in, or a
    command.
    """
    try:
        yield
    finally:
        linux.act_as_daemon()


# -- finding ---------------------------------------------------------------------------------------


def find(credentials: Credentials, at: int, name: bytes | str, flags: int = 0) -> int:
    """Return a descriptor (O_PATH) for the entry `name` of the directory `at`; symbolic links are not followed."""
    if credentials is not ANY_CREDENTIALS:
        assume(credentials)
    return os.open(name, _FOUND | flags, dir_fd=at)


def find_top(path: str) -> int:
    """Return a descriptor (O_PATH) for the directory at `path`, a path that the administrator chose."""
    assume(ROOT)
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def copy_top(path: str) -> int:
    """Open (O_PATH) the root of a detached copy of the tree with its mounts (`linux.clone_tree`)."""
    assume(ROOT)
    return linux.clone_tree(path)


def find_above(fd: int) -> int:
    """Return a descriptor (O_PATH) for "..", opened as the daemon."""
    assume(ROOT)
    return os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)


def find_handle(mount_fd: int, handle: bytes, flags: int = 0) -> int:
    """Return a descriptor (O_PATH) for a file handle. Only the daemon can do this (CAP_DAC_READ_SEARCH)."""
    assume(ROOT)
    return linux.open_by_handle(mount_fd, handle, os.O_PATH | os.O_NOFOLLOW | flags)


def is_linked(mount_fd: int, handle: bytes) -> bool:
    """Whether the file with this handle still has a name: any. True in doubt."""
    try:
        fd = find_handle(mount_fd, handle)
    except OSError as exc:
        return exc.errno not in (errno.ESTALE, errno.ENOENT)
    try:
        return fstat(fd).st_nlink > 0
    finally:
        close(fd)


def statx(credentials: Credentials, at: int, name: bytes) -> tuple[Stat, int]:
    """Return the stat of the entry `name` of the directory `at`, and the id of its mount (`linux.statx`)."""
    if credentials is not ANY_CREDENTIALS:
        assume(credentials)
    return linux.statx(at, name)


def statx_if_there(credentials: Credentials, at: int, name: bytes) -> tuple[Stat, int] | None:
    """Return what `statx` does, or None if there is no such entry."""
    if credentials is not ANY_CREDENTIALS:
        assume(credentials)
    return linux.statx_if_there(at, name)


def stat_path(path: bytes) -> os.stat_result:
    """Return the stat of the directory at `path`, in which the administrator mounted something."""
    assume(ROOT)
    return os.stat(path)


def fstat_as(credentials: Credentials, fd: int) -> Stat:
    """Call fstat(2) as `credentials`, on a file system whose daemon may answer each caller differently."""
    assume(credentials)
    return fstat(fd)


def path_of(fd: int) -> bytes:
    """Return the path on this machine at which the kernel believes it to be; by now that may lead to something else."""
    assume(ROOT)
    return os.readlink(_path(fd).encode())


def access(credentials: Credentials, fd: int, mode: int) -> bool:
    """Whether `credentials` may access what `fd` refers to (`linux.may_access`)."""
    assume(credentials)
    return linux.may_access(fd, mode)


def require_access(credentials: Credentials, fd: int, mode: int) -> None:
    """Raise the error of access(2) unless `credentials` may access what `fd` refers to (`linux.require_access`)."""
    assume(credentials)
    linux.require_access(fd, mode)


def getdents(credentials: Credentials, fd: int, size: int = 32768) -> list[tuple[bytes, int, int]]:
    """Return the next batch of entries of the directory: (name, cookie, DT_…), as `linux.getdents` yields them."""
    assume(credentials)
    return list(linux.getdents(fd, size))


def name_in(credentials: Credentials, fd: int, inode: int, most: int) -> bytes | None:
    """Return which of the first `most` entries of the directory `fd` (O_PATH) has this inode number, if one has."""
    assume(credentials)
    with os.scandir(_path(fd)) as entries:
        for entry in itertools.islice(entries, most):
            if entry.inode() == inode:
                return os.fsencode(entry.name)
    return None


def entries(credentials: Credentials, fd: int) -> Entries:
    """Return an iterator over the entries of the directory that `fd` (open for reading) refers to; see scandir(3)."""
    assume(credentials)
    return os.scandir(fd)


def is_empty(credentials: Credentials, fd: int) -> bool:
    """Whether the directory that `fd` (O_PATH) refers to has no entries."""
    assume(credentials)
    with os.scandir(_path(fd)) as entries:
        return next(entries, None) is None


def readlink(credentials: Credentials, fd: int) -> bytes:
    """Return the text of the symbolic link that `fd` (O_PATH) refers to."""
    assume(credentials)
    return os.readlink(b"", dir_fd=fd)


# -- opening ---------------------------------------------------------------------------------------


def open(credentials: Credentials, fd: int, flags: int) -> int:
    """Open the object that `fd` (O_PATH) refers to.

    Raises:
        BlockingIOError: a process holds a lease on it (fcntl(2)), and only a thread can wait until it is released.
    """
    if credentials is not ANY_CREDENTIALS:
        assume(credentials)
    if linux.in_main_thread():
        flags |= os.O_NONBLOCK
    if _own_fds < 0:
        return _open_again(fd, flags)
    return os.open(str(fd), flags | os.O_CLOEXEC, dir_fd=_own_fds)  # the same, without a call


def find_again(credentials: Credentials, fd: int) -> int:
    """Return another descriptor (O_PATH) for the object that `fd` refers to."""
    if credentials is not ANY_CREDENTIALS:
        assume(credentials)
    if _own_fds < 0:
        return _open_again(fd, os.O_PATH)
    return os.open(str(fd), os.O_PATH | os.O_CLOEXEC, dir_fd=_own_fds)  # the same, without a call


_own_fds = -1  # the directory of this process's descriptors: a path that begins there is shorter


def _open_again(fd: int, flags: int) -> int:
    global _own_fds  # noqa: PLW0603 (opened when it is first needed, and once more after a fork)
    if _own_fds < 0:
        _own_fds = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return os.open(str(fd), flags | os.O_CLOEXEC, dir_fd=_own_fds)


def _forget_own_fds() -> None:
    """In a child: the directory is that of the parent."""
    global _own_fds  # noqa: PLW0603
    if _own_fds >= 0:
        os.close(_own_fds)
        _own_fds = -1


os.register_at_fork(after_in_child=_forget_own_fds)


def only_reads(fd: int) -> bool:
    """Whether `fd` is open for reading alone."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


# -- making ----------------------------------------------------------------------------------------


def create(credentials: Credentials, at: int, name: bytes, flags: int, mode: int, umask: int) -> int:
    """Call open(2) with O_CREAT and O_EXCL."""
    linux.umask(umask)
    assume(credentials)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=at)


def mkdir(credentials: Credentials, at: int, name: bytes, mode: int, umask: int) -> None:
    """See mkdir(2)."""
    linux.umask(umask)
    assume(credentials)
    os.mkdir(name, mode, dir_fd=at)


def mknod(credentials: Credentials, at: int, name: bytes, mode: int, rdev: int, umask: int) -> None:
    """See mknod(2)."""
    linux.umask(umask)
    assume(credentials)
    os.mknod(name, mode, rdev, dir_fd=at)


def symlink(credentials: Credentials, at: int, name: bytes, target: bytes) -> None:
    """See symlink(2)."""
    assume(credentials)
    os.symlink(target, name, dir_fd=at)


def link(credentials: Credentials, fd: int, at: int, name: bytes) -> None:
    """Give the file that `fd` (O_PATH) refers to one more name; see link(2)."""
    assume(credentials)
    os.link(_path(fd), name, dst_dir_fd=at, follow_symlinks=True)


# -- renaming and removing -------------------------------------------------------------------------


def rename(credentials: Credentials, old: int, name_old: bytes, new: int, name_new: bytes, flags: int = 0) -> None:
    """See renameat2(2)."""
    assume(credentials)
    if flags:
        linux.renameat2(old, name_old, new, name_new, flags)
    else:
        os.rename(name_old, name_new, src_dir_fd=old, dst_dir_fd=new)


def unlink(credentials: Credentials, at: int, name: bytes) -> None:
    """See unlink(2)."""
    assume(credentials)
    os.unlink(name, dir_fd=at)


def rmdir(credentials: Credentials, at: int, name: bytes) -> None:
    """See rmdir(2)."""
    assume(credentials)
    os.rmdir(name, dir_fd=at)


# -- changing --------------------------------------------------------------------------------------


def chown(credentials: Credentials, fd: int, uid: ServerId | None, gid: ServerId | None) -> None:
    """See chown(2); None leaves that id unchanged."""
    assume(credentials)
    os.chown(_path(fd), -1 if uid is None else uid, -1 if gid is None else gid)


def chmod(credentials: Credentials, fd: int, mode: int) -> None:
    """See chmod(2)."""
    assume(credentials)
    os.chmod(_path(fd), mode)


def truncate(credentials: Credentials, fd: int, size: int) -> None:
    """See truncate(2); the call waits until a lease on the file is released."""
    assume(credentials)
    os.truncate(_path(fd), size)


def ftruncate(credentials: Credentials, fd: int, size: int) -> None:
    """See ftruncate(2). `fd` is open for writing; the caller's credentials decide which set-id bits are cleared."""
    assume(credentials)
    os.ftruncate(fd, size)


def utimens(credentials: Credentials, fd: int, atime: int | SpecialTime, mtime: int | SpecialTime) -> None:
    """Set the times of what `fd` refers to (`linux.utimens`). To set both to now needs fewer rights than others."""
    assume(credentials)
    linux.utimens(fd, atime, mtime)


def pwrite(credentials: Credentials, fd: int, data: bytes | memoryview, offset: int, flags: int = 0) -> int:
    """See pwritev2(2). Who writes determines whose quota is charged and which set-id bits are cleared."""
    assume(credentials)
    return os.pwritev(fd, [data], offset, flags)


def fallocate(credentials: Credentials, fd: int, mode: int, offset: int, length: int) -> None:
    """See fallocate(2). Who calls determines who may use reserved blocks, and which set-id bits are cleared."""
    assume(credentials)
    linux.fallocate(fd, mode, offset, length)


def copy_file_range(
    credentials: Credentials, source: int, offset: int, target: int, target_offset: int, size: int
) -> int:
    """See copy_file_range(2). Who copies determines whose quota is charged and which set-id bits are cleared."""
    assume(credentials)
    return os.copy_file_range(source, target, size, offset, target_offset)


# A uid and a gid that own nothing: 65534 may well own files.
_WITHOUT_RIGHTS = Credentials(ServerId(4294967293), ServerId(4294967293), ())


def without_rights(call: Callable[[int], _T], number: int) -> _T:
    """Make a call that needs CAP_SYS_ADMIN, and whose credentials the kernel stores, without rights to files."""
    assume(_WITHOUT_RIGHTS)
    with linux.raised(linux.CAP_SYS_ADMIN):
        return call(number)


# -- extended attributes ---------------------------------------------------------------------------


def _with_privileges(credentials: Credentials) -> contextlib.AbstractContextManager[None]:
    """Raise the privileges over `trusted.` and `security.` names, which only uid 0 gets, if it has them elsewhere."""
    if credentials.uid != 0:
        return contextlib.nullcontext()
    return linux.raised(*(it for it in (linux.CAP_SYS_ADMIN, linux.CAP_SETFCAP) if not credentials.lacks >> it & 1))


def peek_xattr(credentials: Credentials, fd: int, name: bytes | str) -> bytes:
    """Call getxattr(2) for a name that needs no privilege."""
    if credentials is not ANY_CREDENTIALS:
        assume(credentials)
    return os.getxattr(f"/proc/self/fd/{fd}", name)  # `_path`, without a call


def getxattr(credentials: Credentials, fd: int, name: bytes) -> bytes:
    """See getxattr(2)."""
    assume(credentials)
    with _with_privileges(credentials):
        return os.getxattr(_path(fd), name)


def setxattr(credentials: Credentials, fd: int, name: bytes, value: bytes) -> None:
    """See setxattr(2)."""
    assume(credentials)
    with _with_privileges(credentials):
        os.setxattr(_path(fd), name, value)


def listxattr(credentials: Credentials, fd: int) -> Sequence[str]:
    """See listxattr(2)."""
    assume(credentials)
    with _with_privileges(credentials):
        return os.listxattr(_path(fd))


def lists_all_xattrs(credentials: Credentials) -> bool:
    """Whether `listxattr` with these credentials lists `trusted.` names, too."""
    return credentials.uid == 0 and not credentials.lacks >> linux.CAP_SYS_ADMIN & 1


def removexattr(credentials: Credentials, fd: int, name: bytes) -> None:
    """See removexattr(2)."""
    assume(credentials)
    with _with_privileges(credentials):
        os.removexattr(_path(fd), name)
