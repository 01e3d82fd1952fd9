"""What the kernel may ask while it reconnects a file handle to the tree, whoever it seems to ask for.

When an NFS server is handed the handle of a directory that the kernel has forgotten, the kernel looks for its way up:
for each level LOOKUP of "..", GETATTR of the child, a listing of the parent in which it searches the child's inode
number, and LOOKUP of the name it found. All this runs with the identity of whoever the server's thread served
before. If that one may not see the directory, its owner would get ESTALE; so these requests are answered, with nothing
but the child in the listing, and only to the thread that asked for "..". What the caller then does with the handle
passes the door as ever. (Linux, fs/exportfs/expfs.c, `reconnect_path`.)
"""

import time
from dataclasses import dataclass

_SECONDS = 5.0
"""How long a step may take before it counts as given up."""


@dataclass(slots=True)
class _Step:
    child: int
    parent: int
    name: bytes
    until: float


class Reconnecting:
    """Which thread of the NFS server is at which step; nodeids throughout."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def begin(self, pid: int, child: int, parent: int) -> None:
        """Thread `pid` was told that ".." of `child` is `parent`. A thread without a pid cannot be told from others."""
        if pid:
            self._steps[pid] = _Step(child, parent, b"", time.monotonic() + _SECONDS)

    def end(self, pid: int) -> None:
        """The thread did something else: what it was allowed is over."""
        self._steps.pop(pid, None)

    def _step(self, pid: int) -> _Step | None:
        step = self._steps.get(pid)
        if step is not None and time.monotonic() > step.until:
            del self._steps[pid]
            return None
        return step

    def looks_at(self, pid: int, nodeid: int) -> bool:
        """Is GETATTR of `nodeid` a part of it?"""
        step = self._step(pid)
        return step is not None and nodeid in (step.child, step.parent)

    def seeks_in(self, pid: int, nodeid: int) -> int | None:
        """The child that is sought by listing the directory `nodeid`; None: this listing is no part of it."""
        step = self._step(pid)
        return step.child if step is not None and nodeid == step.parent else None

    def found(self, pid: int, name: bytes) -> None:
        """The child is called `name`."""
        step = self._step(pid)
        if step is not None:
            step.name = name

    def finish(self, pid: int, nodeid: int, name: bytes) -> bool:
        """Is LOOKUP of `name` in `nodeid` its last step? Then it is over."""
        step = self._step(pid)
        if step is None or nodeid != step.parent or not name or name != step.name:
            return False
        del self._steps[pid]
        return True
