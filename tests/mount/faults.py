"""Lets a test make a daemon's background tasks fail (`arm`, for `conftest.daemons_with`).

A function that each task calls is wrapped. Tests write lines `POINT FAULT` to a file: the next call at that point then
fails with that fault. Each failure is appended to the same name with `.done`.
"""

import errno
import os
from collections.abc import Callable
from typing import Any

import trio

from cloakfs.accounts import groups
from cloakfs.filesystem import reader, selfprobe
from cloakfs.fuse import attach
from cloakfs.kernelcache import invalidation, notifier, watch
from cloakfs.mount import control, reload
from cloakfs.policy import Policy
from cloakfs.tree import descriptors, index, mounts, views
from tests.altered import replace

FAULTS: dict[str, Callable[[], BaseException]] = {
    "EMFILE": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "ENOMEM": MemoryError,
    "thread": lambda: RuntimeError("can't start new thread"),
    "bytes": lambda: UnicodeDecodeError("utf-8", b"x\xff", 1, 2, "invalid start byte"),
    "arbitrary": lambda: ZeroDivisionError("arbitrary"),
}

POINTS: dict[str, tuple[object, str]] = {
    "house": (descriptors.Descriptors, "close_idle"),
    "nodeids": (index.Index, "commit"),
    "user database": (views, "user_identity"),
    "invalidate": (notifier.Notifier, "_find_stalled"),
    "invalidate names": (notifier, "invalidate_names"),
    "invalidate pages": (notifier, "invalidate_pages"),
    "invalidate everything": (invalidation.Invalidation, "_invalidate_all"),
    "invalidate subtrees": (invalidation.Invalidation, "_unfinished"),
    "mounts": (mounts.TreeMounts, "inside"),
    "changes": (watch.Watch, "read"),
    "signals": (reload.Reloader, "_reload"),
    "stop": (attach.Attached, "detach"),
    "look up again": (selfprobe.SelfProbe, "stat"),
    "ahead": (reader, "_advise"),
    "groups": (groups, "database_groups"),
    "connection": (control.Control, "_admit"),
    "question": (control.Control, "_answer"),
}
"""What each background task calls; the name is the task's."""


class _Armed:
    def __init__(self, path: str) -> None:
        self._path = path
        self._next: dict[str, list[str]] = {}
        self._read = 0

    def take(self, point: str) -> str | None:
        """Return the fault that is to happen here now, if any."""
        try:
            with open(self._path, encoding="ascii") as file:
                lines = file.read().splitlines()
        except OSError:
            return None
        for line in lines[self._read :]:
            where, _, fault = line.rpartition(" ")
            self._next.setdefault(where, []).append(fault)
        self._read = len(lines)
        left = self._next.get(point)
        return left.pop(0) if left else None

    def done(self, point: str, fault: str) -> None:
        with open(f"{self._path}.done", "a", encoding="ascii") as file:
            file.write(f"{point} {fault}\n")


def _wrap(armed: _Armed, point: str, owner: object, name: str) -> None:
    call: Callable[..., Any] = getattr(owner, name)
    is_static = isinstance(vars(owner).get(name), staticmethod)

    def failing(*args: Any, **kwargs: Any) -> Any:
        fault = armed.take(point)
        if fault is not None:
            armed.done(point, fault)
            raise FAULTS[fault]()
        return call(*args, **kwargs)

    replace(owner, name, staticmethod(failing) if is_static else failing)


def _no_thread(armed: _Armed) -> None:
    """Make armed functions fail to get a thread: the fault "thread" happens where trio starts the thread."""
    run_sync = trio.to_thread.run_sync

    async def failing(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if armed.take("start of a thread") is not None:
            armed.done("start of a thread", "thread")
            raise FAULTS["thread"]()
        return await run_sync(call, *args, **kwargs)

    replace(trio.to_thread, "run_sync", failing)


class Plain(Policy):
    """The built-in policy, as a plug-in: that can be reloaded without a file of exports.d."""


def arm(path: str) -> None:
    """Make the functions at `POINTS` heed what is written to a file, in this process."""
    armed = _Armed(path)
    for point, (owner, name) in POINTS.items():
        _wrap(armed, point, owner, name)
    _no_thread(armed)
