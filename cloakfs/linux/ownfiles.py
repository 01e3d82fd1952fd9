"""Calls on files of the daemon's own, made as the daemon: /proc and devices, the log, the state of mounts,
configuration, and mount points. (`linux.database`, `linux.programs` and `linux.sockets` are the same for these.)

A thread that serves callers retains the credentials of the one for whom it made its last call on the real tree
(`tree.calls`). Whatever else it opened would be opened as that caller. So each function acts as the daemon first;
that costs no more than a test if the thread does so already. In a process without callers (a command, the guard of
a service, the reaper), nothing is switched.

Most functions are those of the standard library, with its names; `open` returns a file object, and `open_fd` is
os.open. (The reaper uses this module, so it imports next to nothing.)
"""

import builtins
import contextlib
import fcntl
import glob as globbing
import os
from collections.abc import Iterator

from . import capabilities, syscalls
from .credentials import act_as_daemon, as_daemon

# -- on open descriptors: the same for all callers ---------------------------------------------------

fstat = os.fstat
fstatvfs = os.fstatvfs
pread = os.pread
read = os.read
write = os.write

# -- on paths --------------------------------------------------------------------------------------

access = as_daemon(os.access)
chdir = as_daemon(os.chdir)
chmod = as_daemon(os.chmod)
exists = as_daemon(os.path.exists)
fchown = as_daemon(os.fchown)
isdir = as_daemon(os.path.isdir)
link = as_daemon(os.link)
listdir = as_daemon(os.listdir)
lstat = as_daemon(os.lstat)
makedirs = as_daemon(os.makedirs)
mkdir = as_daemon(os.mkdir)
open = as_daemon(builtins.open)
open_by_handle = as_daemon(syscalls.open_by_handle)
open_fd = as_daemon(os.open)
readlink = as_daemon(os.readlink)
realpath = as_daemon(os.path.realpath)
rename = as_daemon(os.rename)
rmdir = as_daemon(os.rmdir)
samefile = as_daemon(os.path.samefile)
scandir = as_daemon(os.scandir)
stat = as_daemon(os.stat)
statvfs = as_daemon(os.statvfs)
unlink = as_daemon(os.unlink)
utime = as_daemon(os.utime)


@as_daemon
def glob(directory: str, pattern: str) -> list[str]:
    """Return the paths in or below a directory, itself no pattern, that match a pattern of glob(7)."""
    return [os.path.join(directory, name) for name in globbing.glob(pattern, root_dir=directory)]


@as_daemon
def lock(fd: int, *, shared: bool = False) -> bool:
    """Lock what is open (flock(2)), exclusively or shared, without waiting; return False if another lock forbids it.

    The lock lasts until all copies of the descriptor are closed.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: str) -> bool:
    """Whether a file or directory is locked exclusively. Any number of processes may call this at once.

    Raises:
        OSError: it cannot be opened.
    """
    fd = open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return not lock(fd, shared=True)
    finally:
        os.close(fd)


@as_daemon
def rmtree(path: str) -> None:
    """Remove a directory and what is below it; see shutil.rmtree."""
    import shutil  # noqa: PLC0415  (the reaper needs none of it)

    shutil.rmtree(path)


@contextlib.contextmanager
def raised(*numbers: int) -> Iterator[None]:
    """Act as the daemon with these capabilities raised, which it has dropped but may raise again.

    The thread must not switch while they are raised: with its ids, it would change its capabilities.
    """
    act_as_daemon()
    with capabilities.raised(*numbers):
        yield


# -- whole files -----------------------------------------------------------------------------------


def beside(path: str) -> str:
    """Return the path to which the new content of a file is written before it replaces the old."""
    return f"{path}.new"


@as_daemon
def replace(path: str, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace the content of the file at `path`, which need not exist yet, by `content`, atomically.

    A reader finds the old content or the new, never a part of either. If a process is killed here, the temporary file
    that it leaves is overwritten by the next one. If the disk is full, none is left.

    Args:
        path: the path of the file itself, not of a link to it.
        content: the whole new content.
        mode: the permissions of the file; the umask is subtracted, as usual.
        durable: the file has the old content or the new even after a power failure. This waits for the disk.

    Raises:
        OSError: it cannot be written; the file is unchanged. The error names the file, or the temporary one.
    """
    try:
        with open(beside(path), "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside(path), path)
    except OSError as exc:
        if exc.filename is None:  # write(2) and fsync(2) know no name
            exc.filename = path
        with contextlib.suppress(OSError):
            os.unlink(beside(path))
        raise
