"""Threads: which one is running, and calls that get a thread of their own."""

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from .libc import NR, check, syscall

_T = TypeVar("_T")

_CLOSE_RANGE_UNSHARE = 2
_CLONE_FS = 0x200


class _ThreadState(threading.local):
    has_own_umask = False

    def __init__(self) -> None:
        self.is_main = threading.get_ident() == threading.main_thread().ident


_thread = _ThreadState()


def in_main_thread() -> bool:
    """Whether this is the thread of the session loop."""
    return _thread.is_main


def umask(mask: int) -> None:
    """Call umask(2) for the calling thread alone, unless it is the main one."""
    if not in_main_thread() and not _thread.has_own_umask:
        check(syscall(NR["unshare"], ctypes.c_long(_CLONE_FS)))
        _thread.has_own_umask = True
    os.umask(mask)


def apart(call: Callable[..., _T], *args: Any) -> _T:
    """Return the result of `call`, made in a thread of its own that has none of the process's descriptors.

    This is for calls that have to wait for the daemon itself, as a client of its own mount. A thread that waits in this
    way cannot be killed, and would keep the session open if the daemon is killed: all clients would wait for ever.

    The thread takes no signals: Python's handler writes to a descriptor, whose number is unused in this thread, or has
    another meaning. As whom it acts is undefined.
    """
    answer: list[_T] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answer.append(call(*args))
        except BaseException as exc:
            failure.append(exc)
        done.set()

    def start() -> None:
        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError as exc:  # the machine cannot start another one
            failure.append(exc)
            done.set()

    _starter(os.getpid()).put(start)
    done.wait()
    if failure:
        raise failure[0]
    return answer[0]


@cache
def _starter(_process: int) -> "queue.SimpleQueue[Callable[[], None]]":
    """Return the queue of a thread without descriptors, which starts threads that have none either.

    It is made once, at best before clients have files open: a thread begins with the descriptors of the one that starts
    it, and to close its copies means to wait for the real tree (flush), which may hang. Linux 6.1 copies the first 64
    even if all are to be closed (CLOSE_RANGE_UNSHARE).
    """
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    failure: list[OSError] = []
    ready = threading.Event()

    def run() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
            check(
                syscall(
                    NR["close_range"], ctypes.c_uint(3), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(_CLOSE_RANGE_UNSHARE)
                )
            )
        except OSError as exc:
            failure.append(exc)
            return
        finally:
            ready.set()
        while True:
            calls.get()()

    threading.Thread(target=run, daemon=True).start()
    ready.wait()
    if failure:
        raise failure[0]
    return calls
