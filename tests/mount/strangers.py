"""Makes a daemon act as a stranger whenever something begins in it, and notes which files it then opens as one.

A thread that serves callers keeps the credentials of the last one, so whatever begins in it may begin as anybody
(`alter`, for `conftest.daemons_with`). Python tells an audit hook of most calls that take a path; the others are
wrapped. Each is to be made as the daemon, or by `tree.calls`, which says as whom.
"""

import builtins
import contextlib
import ctypes
import fcntl
import inspect
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import trio

from cloakfs.identity import ServerId
from cloakfs.linux import Credentials, credentials, database, ownfiles
from cloakfs.linux.libc import NR, syscall
from cloakfs.tree import calls
from tests.altered import replace

STRANGER = Credentials(ServerId(61234), ServerId(61234), ())

EVENTS = {
    "glob.glob", "open", "os.chdir", "os.chmod", "os.chown", "os.getxattr", "os.link", "os.listdir", "os.listxattr",
    "os.mkdir", "os.posix_spawn", "os.remove", "os.removexattr", "os.rename", "os.rmdir", "os.scandir", "os.setxattr",
    "os.symlink", "os.truncate", "os.utime", "socket.bind", "socket.connect", "sqlite3.connect", "subprocess.Popen",
}  # fmt: skip
"""The audit events of calls that take a path (https://docs.python.org/3/library/audit_events.html)."""

SILENT = ("access", "lstat", "readlink", "stat", "statvfs")
"""The functions of `os` that take a path, and raise no event."""


class _Audit:
    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._noted: dict[str, None] = {}
        self._written = 0
        self.is_on = False

    def begin(self) -> None:
        self._fd = fcntl.fcntl(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), fcntl.F_DUPFD, 900)
        self.is_on = True

    def note(self, what: str, arguments: tuple[object, ...], frame: FrameType | None) -> None:
        """Note a call: `own` if it was made as the daemon or as root, `real` if by tree.calls, else `STRANGE`."""
        if not self.is_on or (arguments and isinstance(arguments[0], int)):  # a descriptor
            return
        if frame is not None and frame.f_code.co_filename == calls.__file__:
            return
        who = syscall(NR["setfsuid"], ctypes.c_uint32(0xFFFFFFFF)) & 0xFFFFFFFF
        kind = "own" if who == 0 else "STRANGE"
        line = f"{kind} {what} {arguments[:1]!r}"
        if kind == "STRANGE":
            way: list[str] = []
            while frame is not None and len(way) < 12:
                way.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
                frame = frame.f_back
            line += f" as {who}, {' < '.join(way)}"
        self._noted[line] = None
        with contextlib.suppress(OSError):  # a thread without descriptors (`linux.apart`): another one writes it
            for new in list(self._noted)[self._written :]:
                os.write(self._fd, new.encode("utf-8", "backslashreplace") + b"\n")
                self._written += 1


class _Begin(trio.abc.Instrument):
    def before_task_step(self, task: object) -> None:
        credentials.assume(STRANGER)


def _as_stranger(call: Callable[..., Any]) -> Callable[..., Any]:
    def begun(*args: Any, **kwargs: Any) -> Any:
        credentials.assume(STRANGER)
        return call(*args, **kwargs)

    return begun


def alter(path: str) -> None:
    """Begin as a stranger from the start of the session loop on, and write to `path` how files are opened."""
    audit = _Audit(path)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if audit.is_on and event in EVENTS:
            is_socket = event.startswith("socket.")
            audit.note(event, arguments[1:] if is_socket else arguments, _caller())

    sys.addaudithook(hook)
    for name in SILENT:
        setattr(os, name, _noted(audit, name, getattr(os, name)))

    connect = database.connect

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        opened = connect(*args, **kwargs)
        opened.set_trace_callback(lambda statement: audit.note("SQL", (statement.split(" ")[0],), None))
        return opened

    replace(database, "connect", connected)

    run_sync = trio.to_thread.run_sync

    def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run_sync(_as_stranger(call), *args, **kwargs)

    replace(trio.to_thread, "run_sync", in_thread)
    run = trio.run

    def begin(main: Callable[..., Any], *args: Any) -> Any:
        replace(threading.Thread, "run", _as_stranger(threading.Thread.run))
        audit.begin()
        return run(main, *args, instruments=[_Begin()])

    replace(trio, "run", begin)


def _caller() -> FrameType | None:
    """Return the frame of the function that called what called this."""
    here = inspect.currentframe()
    return here and here.f_back and here.f_back.f_back


def _noted(audit: _Audit, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        audit.note(f"os.{name}", args, _caller())
        return call(*args, **kwargs)

    return noted


def forget_to_switch() -> None:
    """Open the daemon's own files with the credentials that the thread has, as code would without `linux.ownfiles`."""
    replace(ownfiles, "open_fd", os.open)
    replace(ownfiles, "open", builtins.open)
