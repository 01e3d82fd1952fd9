"""Locks on open files: flock(2), and those of fcntl(2) that belong to an open file description (F_OFD_SETLK).

Both belong to the open file rather than to the process. So one process can have conflicting locks on behalf of others,
by a description for each, and they conflict with all other locks on the same file, whoever has them.

Calls that wait are made in threads, and can be interrupted there by a signal.
"""

import ctypes
import errno
import fcntl
import os
import signal
import struct
import threading
from collections.abc import Callable

from .libc import libc

# struct flock on 64-bit machines: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")

_SIGNAL = signal.SIGRTMIN + 8  # no other use of it is known, in glibc or in Python

Range = tuple[int, int]
"""The first byte, and the number of bytes; 0 for all up to the end, wherever that will be (fcntl(2))."""


Conflict = tuple[int, Range, int]
"""A lock that is in the way: its kind, its range, and the process that has it."""


def try_lock(fd: int, kind: int, extent: Range) -> bool:
    """Lock a range (F_RDLCK, F_WRLCK), or unlock it (F_UNLCK), without waiting; return False if another lock forbids.

    Raises:
        OSError: see F_OFD_SETLK in fcntl(2).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, *extent, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return False
    return True


def find_conflict(fd: int, kind: int, extent: Range) -> Conflict | None:
    """Return a lock that keeps the open file from having this one: its kind, its range, and the process; or None.

    The process is -1 if the lock belongs to an open file description, and 0 if the machine is another one.

    Raises:
        OSError: see F_OFD_GETLK in fcntl(2).
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(kind, os.SEEK_SET, *extent, 0))
    kind, _, start, length, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else (kind, (start, length), pid)


def try_flock(fd: int, kind: int) -> bool:
    """Call flock(2) without waiting; return False if another lock forbids it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def allow_interrupts() -> None:
    """Let `BlockedCall.interrupt` work in this process; to be called in the main thread."""
    signal.signal(_SIGNAL, lambda *_: None)  # which makes calls return EINTR


class BlockedCall:
    """A call in a thread that waits for a lock, until another thread interrupts it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._thread: int | None = None
        self._interrupted = False

    def lock(self, fd: int, kind: int, extent: Range) -> None:
        """Lock a range as soon as no other lock forbids it.

        Raises:
            InterruptedError: it was interrupted; nothing has changed.
            OSError: see F_OFD_SETLKW in fcntl(2).
        """
        wanted = ctypes.create_string_buffer(_FLOCK.pack(kind, os.SEEK_SET, *extent, 0))
        self._wait(lambda: libc.fcntl(fd, fcntl.F_OFD_SETLKW, wanted))

    def flock(self, fd: int, kind: int) -> None:
        """Call flock(2).

        Raises:
            InterruptedError: it was interrupted. A lock of another kind that the open file had may be gone.
            OSError: see flock(2).
        """
        self._wait(lambda: libc.flock(fd, kind))

    def _wait(self, call: Callable[[], int]) -> None:
        with self._guard:
            self._thread = threading.get_ident()
        try:
            while not self._interrupted:
                if call() == 0:
                    return
                code = ctypes.get_errno()
                if code != errno.EINTR:
                    raise OSError(code, os.strerror(code))
        finally:
            with self._guard:
                self._thread = None
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def interrupt(self) -> bool:
        """Interrupt the call; return whether it may still go on.

        It does if the signal came just before the call: then this is to be called again.
        """
        self._interrupted = True
        with self._guard:
            if self._thread is None:
                return False
            signal.pthread_kill(self._thread, _SIGNAL)
            return True
