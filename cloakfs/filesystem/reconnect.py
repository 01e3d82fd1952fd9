"""The requests that the kernel may make while it reconnects a file handle to the tree, with whatever identity.

When an NFS server receives the handle of a directory that the kernel has forgotten, the kernel searches for the way up.
It sends, for each level, LOOKUP of "..", GETATTR of the child, a listing of the parent in which it searches for the
child's inode number, and LOOKUP of the name that it found. All this runs with the identity of the caller that the
server's thread served before. If that caller may not see the directory, its owner would get ESTALE. So these requests
are answered, with nothing but the child in the listing, and only to the thread that looked up "..". What the caller
then does with the handle is checked as always. (Linux, fs/exportfs/expfs.c, `reconnect_path`.)
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


class HandleReconnection:
    """The steps at which threads of the NFS server are. Objects are identified by nodeids."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def begin(self, pid: int, child: int, parent: int) -> None:
        """Note that thread `pid` has looked up "..", of `child`, and got `parent`. Many threads may have pid 0."""
        if pid:
            self._steps[pid] = _Step(child, parent, b"", time.monotonic() + _SECONDS)

    def end(self, pid: int) -> None:
        """Note that the thread does something else, which ends what it was allowed."""
        self._steps.pop(pid, None)

    def _step(self, pid: int) -> _Step | None:
        step = self._steps.get(pid)
        if step is not None and time.monotonic() > step.until:
            del self._steps[pid]
            return None
        return step

    def is_getattr_step(self, pid: int, nodeid: int) -> bool:
        """Whether GETATTR of `nodeid` by this thread is a part of reconnecting."""
        step = self._step(pid)
        return step is not None and nodeid in (step.child, step.parent)

    def sought_child(self, pid: int, nodeid: int) -> int | None:
        """Return the child that is sought by listing the directory `nodeid`; None if this is an ordinary listing."""
        step = self._step(pid)
        return step.child if step is not None and nodeid == step.parent else None

    def found(self, pid: int, name: bytes) -> None:
        """Note that the child is called `name`."""
        step = self._step(pid)
        if step is not None:
            step.name = name

    def finish(self, pid: int, nodeid: int, name: bytes) -> bool:
        """Whether LOOKUP of `name` in `nodeid` is the last step. If so, reconnecting ends with it."""
        step = self._step(pid)
        if step is None or nodeid != step.parent or not name or name != step.name:
            return False
        del self._steps[pid]
        return True
