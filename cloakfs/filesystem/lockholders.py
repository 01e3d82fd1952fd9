"""Which open file description on the real file has the locks of which client.

An owner is a process, or an open file (F_OFD_SETLK), and the kernel does not tell which. The first owner that locks by
an open file gets the description that the daemon has for that file. Any other gets one of its own: a child process,
for example, which has the same file open.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from pyfuse3 import FileHandleT

from ..fuse.loop import MOST_LOCK_REQUESTS
from ..linux import filelocks
from ..lockranges import Lock, LockTable, Ranges
from ..shares import Shares
from ..tree import calls
from ..tree.objects import Object

MOST_OF_ONE = MOST_LOCK_REQUESTS // 4
"""How many requests for locks of one caller may wait at a time."""

_ALL = (0, 0)


class Holder:
    """The open file description on the real file to which the locks of one owner belong.

    Args:
        fd: its descriptor.
        access: how it is open (O_RDONLY, O_WRONLY, O_RDWR).
        fh: the client's open file by which the owner locked first.
        uid: the caller, by its server uid, whose share a descriptor counts against.

    Attributes:
        is_own: whether the descriptor is the holder's own, and not that of a client's open file.
        used_by: the client's open files by which the owner has locked.
        ranges: what is locked.
        pid: the process that locked last.
        requests: how many requests lock by this description now, most of which wait.
        waits: the calls that wait.
        is_gone: whether the owner has its locks by another holder, or none any more.
        is_closed: whether the descriptor is closed.
    """

    __slots__ = (
        "access", "fd", "is_closed", "is_gone", "is_own", "pid", "ranges", "requests", "uid", "used_by", "waits",
    )  # fmt: skip

    def __init__(self, fd: int, access: int, fh: FileHandleT, uid: int) -> None:
        self.fd = fd
        self.access = access
        self.uid = uid
        self.is_own = fd != fh
        self.used_by = {fh}
        self.ranges = Ranges()
        self.pid = 0
        self.requests = 0
        self.waits: set[filelocks.BlockedCall] = set()
        self.is_gone = self.is_closed = False

    def allows(self, kind: int) -> bool:
        """Whether a lock of this kind is possible: F_RDLCK takes a file that is open for reading, for example."""
        return self.access in (os.O_RDWR, os.O_RDONLY if kind == fcntl.F_RDLCK else os.O_WRONLY)

    def unlock_all(self) -> None:
        """Release all locks. For a remote file, this takes a request to its server."""
        filelocks.try_lock(self.fd, fcntl.F_UNLCK, _ALL)


class LockHolders:
    """The locks that clients have.

    Args:
        descriptors: of which each caller has a share: a holder may need one.
        most_ranges: how many ranges of files may be locked at a time; callers have shares.

    Attributes:
        by_object: the holders, by object and owner.
        table: what is locked and waited for.
        waiting: how many requests for locks each caller has that are not answered yet, by its server uid.
        unlocking: the same of those that unlock remote files. (On others, they never wait.)
        ranges: how many ranges each caller has locked.
        limiter: for their threads.
    """

    def __init__(self, descriptors: Shares[int], most_ranges: int) -> None:
        self._descriptors = descriptors
        self.by_object: dict[Object, dict[int, Holder]] = {}
        self.table: LockTable[Object, int] = LockTable()
        self._claimed: set[FileHandleT] = set()  # open files by whose descriptor an owner has its locks
        self._used: dict[FileHandleT, dict[Holder, int]] = {}  # by open file: the holders that use it, and their owners
        self.waiting: Shares[int] = Shares(MOST_LOCK_REQUESTS, MOST_OF_ONE)
        self.unlocking: Shares[int] = Shares(MOST_LOCK_REQUESTS, MOST_OF_ONE)
        self.ranges: Shares[int] = Shares(most_ranges)
        self.limiter = trio.CapacityLimiter(2 * MOST_LOCK_REQUESTS)

    def find(self, obj: Object, owner: int) -> Holder | None:
        """Return the holder of an owner, if it has locked anything of this file since it opened it."""
        return self.by_object.get(obj, {}).get(owner)

    def is_free(self, fh: FileHandleT) -> bool:
        """Whether no owner has its locks by the descriptor of this open file."""
        return fh not in self._claimed

    def add(self, obj: Object, owner: int, holder: Holder) -> Holder:
        """Let the owner have its locks by this holder."""
        self.by_object.setdefault(obj, {})[owner] = holder
        holder.ranges = self.table.ranges(obj, owner)
        for fh in holder.used_by:
            self._used.setdefault(fh, {})[holder] = owner
        if holder.is_own:
            self._descriptors.take(holder.uid)
        else:
            self._claimed.add(FileHandleT(holder.fd))
        return holder

    def use(self, holder: Holder, owner: int, fh: FileHandleT) -> None:
        """Note that the owner locks by this open file, too."""
        if fh not in holder.used_by and not holder.is_gone:
            holder.used_by.add(fh)
            self._used.setdefault(fh, {})[holder] = owner

    def drop(self, obj: Object, owner: int) -> Holder:
        """Drop the holder of an owner, whose locks are then to be released (`release`)."""
        holders = self.by_object[obj]
        holder = holders.pop(owner)
        if not holders:
            del self.by_object[obj]
        self.table.drop(obj, owner)
        self._count(holder, -len(holder.ranges.locks))
        holder.is_gone = True
        return holder

    def release(self, holder: Holder) -> list[int]:
        """Give back what a dropped holder has, whose locks have been released; return descriptors to be closed.

        While a request uses the description, it is left alone, so that no other owner gets it.
        """
        if holder.requests or holder.is_closed:
            return []
        holder.is_closed = True
        for fh in holder.used_by:
            used = self._used.get(fh, {})
            used.pop(holder, None)
            if not used:
                self._used.pop(fh, None)
        if not holder.is_own:
            self._claimed.discard(FileHandleT(holder.fd))
            return []
        self._descriptors.give_back(holder.uid)
        return [holder.fd]

    def lock(self, holder: Holder, wanted: Lock) -> None:
        """Note that the owner has this lock now."""
        before = len(holder.ranges.locks)
        holder.ranges.lock(wanted)
        self._count(holder, len(holder.ranges.locks) - before)

    def unlock(self, holder: Holder, start: int, end: int) -> None:
        """Note that the owner has nothing locked any more from `start` to `end`."""
        before = len(holder.ranges.locks)
        holder.ranges.unlock(start, end)
        self._count(holder, len(holder.ranges.locks) - before)

    def _count(self, holder: Holder, more: int) -> None:
        if more > 0:
            self.ranges.take(holder.uid, more)
        elif more:
            self.ranges.give_back(holder.uid, -more)

    def closed(self, obj: Object, fh: FileHandleT) -> list[int]:
        """Note that an open file is about to be closed; return descriptors to be closed as well.

        Who has locked by it alone has no lock any more. Others keep the description: by POSIX, what a process has
        locked belongs to the file, and not to the descriptor.
        """
        found = []
        for holder, owner in self._used.pop(fh, {}).items():
            holder.used_by.discard(fh)
            if (holder.used_by or holder.requests) and self._is_kept_open(holder, fh, obj):
                continue
            if not holder.is_gone:
                self.drop(obj, owner)
            holder.is_closed = True
            if holder.is_own:
                self._descriptors.give_back(holder.uid)
                found.append(holder.fd)
        self._claimed.discard(fh)
        return found

    def _is_kept_open(self, holder: Holder, fh: FileHandleT, obj: Object) -> bool:
        """Give a holder a descriptor of its own if it has that of this open file; return False if there is none."""
        if holder.fd == fh:
            try:
                holder.fd = calls.dup(fh)
            except OSError:
                return False
            holder.is_own = True
            self._descriptors.take(holder.uid)
            if not obj.filesystem.remote:
                filelocks.try_flock(holder.fd, fcntl.LOCK_UN)  # this lock belongs to the open file
        return True

    def pid(self, obj: Object, owner: int, wanted: Lock) -> int:
        """Return a process of this mount that has a lock in the way of `wanted`; 0 if there is none."""
        other = next(self.table.in_the_way(obj, owner, wanted), None)
        return 0 if other is None else self.by_object[obj][other].pid

    @contextmanager
    def wait(self, obj: Object, owner: int, wanted: Lock) -> Iterator[None]:
        """Note that an owner waits for a lock.

        Raises:
            OSError: EDEADLK: it would wait for itself (fcntl(2)).
        """
        if self.table.is_circular(obj, owner, wanted):
            raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
        self.table.waiting.setdefault(owner, []).append((obj, wanted))
        try:
            yield
        finally:
            self.table.waiting[owner].remove((obj, wanted))
            if not self.table.waiting[owner]:
                del self.table.waiting[owner]
