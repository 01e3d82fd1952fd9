"""Operations on locks, which are locks on the real file: of fcntl(2), of open file descriptions, and of flock(2).

So they exclude each other across views, mounts, exports and programs on the real tree.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import trio
from pyfuse3 import FileHandleT, FUSEError

from ..fuse.compatibility import FileLock, LockWait
from ..linux import ROOT, filelocks
from ..lockranges import END, Lock
from ..shares import Shares
from ..tree import calls
from .core import Core
from .handles import OpenFile
from .lockholders import Holder
from .operation import operation

_T = TypeVar("_T")

# How often a call is interrupted again: the signal may have come just before the call.
_AGAIN_SECONDS = 0.005


def _lock(kind: int, start: int, length: int) -> Lock:
    return Lock(start, start + length if length else END, kind == fcntl.F_WRLCK)


class LockOperations(Core):
    """GETLK, SETLK and SETLKW, and what FLUSH and RELEASE mean for locks.

    pyfuse3 passes the former on only with the patch in contrib/pyfuse3, and if `enable_locks` is set. Otherwise the
    kernel handles the locks of the mount by itself.
    """

    def needs_flush(self, fh: FileHandleT, owner: int) -> bool:
        """Whether there is anything to do when an owner closes one of its descriptors."""
        obj = self.files.by_fd[fh].obj
        return owner in self.locks.by_object.get(obj, ()) or not obj.filesystem.has_posix_rules

    @operation
    async def getlk(self, fh: FileHandleT, owner: int, lock: FileLock) -> Any:
        """Find a lock that keeps the owner from having this one (F_GETLK, F_OFD_GETLK)."""
        file = self.files.by_fd[fh]
        obj, holder = file.obj, self.locks.find(file.obj, owner)
        if holder is not None:
            fd = holder.fd
        else:
            fd = fh if self.locks.is_free(obj, fh) else await self._for_locks(file, fh, os.O_RDONLY)
        try:
            found = await self._call(file, filelocks.find_conflict, fd, lock.type, (lock.start, lock.len))
        finally:
            if holder is None and fd != fh:
                calls.close(fd)
        answer: Any = type(lock)  # pyfuse3's, which only the patched one has
        if found is None:
            return answer(type=fcntl.F_UNLCK)
        kind, (start, length), pid = found
        if pid < 0:
            pid = self.locks.pid(obj, owner, _lock(kind, start, length))
        return answer(type=kind, start=start, len=length, pid=pid)

    @operation
    async def setlk(self, fh: FileHandleT, owner: int, lock: FileLock, wait: LockWait | None) -> None:
        """Lock or unlock a range (F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW)."""
        file = self.files.by_fd[fh]
        kind, extent = lock.type, (lock.start, lock.len)
        wanted = _lock(kind, *extent)
        if kind == fcntl.F_UNLCK:
            holder = self.locks.find(file.obj, owner)
            if holder is not None:
                await self._call(file, filelocks.try_lock, holder.fd, kind, extent)
                self.locks.unlock(holder, wanted.start, wanted.end)
            return
        if not self.locks.ranges.has_share_left(file.uid):
            raise self._refuse(self.locks.ranges, "ranges locked", file)
        await self._check_again(fh, os.R_OK if kind == fcntl.F_RDLCK else os.W_OK)
        holder = await self._holder(file, fh, owner, kind)
        if not await self._call(file, filelocks.try_lock, holder.fd, kind, extent):
            if wait is None:
                raise FUSEError(errno.EAGAIN)
            holder.waiting += 1
            try:
                with self._waiting(file, owner, wanted):
                    await self._wait(wait, filelocks.BlockedCall.lock, holder.fd, kind, extent)
            finally:
                holder.waiting -= 1
                if holder.is_gone:  # another thread of the process has closed the file
                    await self._call(file, holder.release)
        if holder.is_gone:
            raise FUSEError(errno.EINTR)
        self.locks.lock(holder, wanted)
        holder.pid = lock.pid
        await self.cache.confirm_content(file.number, file.obj)

    @operation
    async def flock(self, fh: FileHandleT, op: int, wait: LockWait | None) -> None:
        """See flock(2): the lock belongs to the open file, as it does on the real file."""
        file = self.files.by_fd[fh]
        if not await self._call(file, filelocks.try_flock, fh, op):
            if wait is None:
                raise FUSEError(errno.EWOULDBLOCK)
            with self._waiting(file, fh, None):
                await self._wait(wait, filelocks.BlockedCall.flock, fh, op)
        if op != fcntl.LOCK_UN:
            await self.cache.confirm_content(file.number, file.obj)

    @operation
    async def unlock(self, fh: FileHandleT, owner: int) -> None:
        """Release what a process has locked, since it closes one of its descriptors of the file."""
        file = self.files.by_fd[fh]
        if self.locks.find(file.obj, owner) is not None:
            await self._call(file, self.locks.drop(file.obj, owner).release)

    async def _holder(self, file: OpenFile, fh: FileHandleT, owner: int, kind: int) -> Holder:
        """Return what the owner has its locks by, and which allows this kind of lock."""
        obj, access = file.obj, file.flags & os.O_ACCMODE
        holder = self.locks.find(obj, owner)
        if holder is not None and holder.allows(kind):
            return holder
        if holder is None and access != os.O_WRONLY and self.locks.is_free(obj, fh):
            return self.locks.add(obj, owner, Holder(fh, access, fh, file.uid))
        # What is open for writing alone would not do as soon as the owner locks for reading, by another open file.
        access = os.O_RDONLY if holder is None and access == os.O_RDONLY else os.O_RDWR
        new = Holder(await self._for_locks(file, fh, access), access, fh, file.uid)
        holder = self.locks.find(obj, owner)
        if holder is not None:
            if holder.allows(kind):  # another thread of the process was first
                calls.close(new.fd)
                return holder
            self._hand_over(holder, new)
            locked = holder.ranges.locks
            await self._call(file, self.locks.drop(obj, owner).release)
            self.locks.add(obj, owner, new)
            for lock in locked:
                self.locks.lock(new, lock)
            return new
        return self.locks.add(obj, owner, new)

    @staticmethod
    def _hand_over(holder: Holder, new: Holder) -> None:
        """Lock by `new` what `holder` has locked, which has locks for reading alone.

        Raises:
            FUSEError: ENOLCK: that is not so, as the file could not be opened for reading and writing before.
        """
        for lock in holder.ranges.locks:
            extent = lock.start, 0 if lock.end == END else lock.end - lock.start
            if lock.exclusive or not filelocks.try_lock(new.fd, fcntl.F_RDLCK, extent):
                calls.close(new.fd)
                raise FUSEError(errno.ENOLCK)

    async def _for_locks(self, file: OpenFile, fh: FileHandleT, access: int) -> int:
        """Open the file once more, for locks alone: nothing is read or written by this descriptor.

        Raises:
            OSError: ENOLCK: the caller has its share of descriptors.
        """
        shares = self.files.shares
        if not shares.has_share_left(file.uid):
            raise self._refuse(shares, "files and directories open", file)
        return await self._call(file, calls.open, ROOT, fh, access)

    def _refuse(self, shares: Shares[int], what: str, file: OpenFile) -> OSError:
        return self.requests.refuse(shares, what, file.uid, f"server uid {file.uid}", errno.ENOLCK)

    async def _call(self, file: OpenFile, call: Callable[..., _T], *args: object) -> _T:
        """Make a call that may have to wait only if the file system is remote."""
        if file.obj.filesystem.remote:
            return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=True)
        return call(*args)

    def _waiting(self, file: OpenFile, owner: int, wanted: Lock | None) -> AbstractContextManager[None]:
        """Note that a caller waits for a lock, within a context.

        Raises:
            OSError: EDEADLK, or ENOLCK: the caller waits for its share already.
        """
        shares = self.locks.waiting
        if not shares.has_share_left(file.uid):
            raise self._refuse(shares, "locks waited for", file)
        return self.locks.wait(file.uid, file.obj, owner, wanted)

    async def _wait(self, wait: LockWait, call: Callable[..., None], *args: object) -> None:
        """Wait for a lock in a thread until the client is interrupted.

        Raises:
            OSError: EINTR, or the error of the real file system.
        """
        assert self.tasks is not None
        blocked = filelocks.BlockedCall()
        wait.on_interrupt(partial(self.tasks.once, "interrupting a wait for a lock", self._interrupt, blocked))
        await trio.to_thread.run_sync(call, blocked, *args, limiter=self.locks.limiter, abandon_on_cancel=True)

    @staticmethod
    async def _interrupt(blocked: filelocks.BlockedCall) -> None:
        while blocked.interrupt():
            await trio.sleep(_AGAIN_SECONDS)
