"""Operations on locks, which are locks on the real file: of fcntl(2), of open file descriptions, and of flock(2).

So they exclude each other across views, mounts, exports and programs on the real tree.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
        with self._share(file, self.locks.waiting):
            found = await self._conflict(file, fh, owner, lock)
        answer: Any = type(lock)  # pyfuse3's, which only the patched one has
        if found is None:
            return answer(type=fcntl.F_UNLCK)
        kind, (start, length), pid = found
        if pid < 0:
            pid = self.locks.pid(file.obj, owner, _lock(kind, start, length))
        return answer(type=kind, start=start, len=length, pid=pid)

    async def _conflict(self, file: OpenFile, fh: FileHandleT, owner: int, lock: FileLock) -> filelocks.Conflict | None:
        holder = self.locks.find(file.obj, owner)
        if holder is not None:
            fd = holder.fd
        else:
            fd = fh if self.locks.is_free(fh) else await self._for_locks(file, fh, os.O_RDONLY)
        try:
            return await self._call(file, filelocks.find_conflict, fd, lock.type, (lock.start, lock.len))
        finally:
            if holder is None and fd != fh:
                await self._call(file, calls.close, fd)

    @operation
    async def setlk(self, fh: FileHandleT, owner: int, lock: FileLock, wait: LockWait | None) -> None:
        """Lock or unlock a range (F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW)."""
        file = self.files.by_fd[fh]
        if lock.type == fcntl.F_UNLCK:
            await self._unlock(file, owner, lock)
            return
        if not self.locks.ranges.has_share_left(file.uid):
            raise self._refuse(self.locks.ranges, "ranges locked", file)
        with self._share(file, self.locks.waiting):
            await self._check_again(fh, os.R_OK if lock.type == fcntl.F_RDLCK else os.W_OK)
            while True:
                holder = await self._holder(file, fh, owner, lock.type)
                self.locks.use(holder, owner, fh)
                if await self._lock(file, holder, owner, lock, wait):
                    break
            await self._confirm_content(file)

    async def _unlock(self, file: OpenFile, owner: int, lock: FileLock) -> None:
        holder = self.locks.find(file.obj, owner)
        if holder is None:
            return
        with self._share(file, self.locks.unlocking):
            await self._call(file, filelocks.try_lock, holder.fd, fcntl.F_UNLCK, (lock.start, lock.len))
        wanted = _lock(fcntl.F_UNLCK, lock.start, lock.len)
        self.locks.unlock(holder, wanted.start, wanted.end)

    async def _lock(self, file: OpenFile, holder: Holder, owner: int, lock: FileLock, wait: LockWait | None) -> bool:
        """Lock by the description of this holder; return False if it is not the owner's any more."""
        wanted, extent = _lock(lock.type, lock.start, lock.len), (lock.start, lock.len)
        holder.requests += 1
        try:
            if not await self._call(file, filelocks.try_lock, holder.fd, lock.type, extent):
                if wait is None:
                    raise FUSEError(errno.EAGAIN)
                if not holder.is_gone:
                    await self._wait_for(file, holder, owner, lock, wait)
        finally:
            holder.requests -= 1
            if holder.is_gone:
                await self._release(file, holder)
        if holder.is_gone:
            return False
        self.locks.lock(holder, wanted)
        holder.pid = lock.pid
        return True

    async def _wait_for(self, file: OpenFile, holder: Holder, owner: int, lock: FileLock, wait: LockWait) -> None:
        """Wait with a descriptor of its own, as that of the holder may be closed, and its number used again.

        If the owner gets another holder meanwhile (`_replaced`), this ends as if it had the lock.
        """
        fd = self.nodes.descriptors.with_descriptor(calls.dup, holder.fd)
        blocked = filelocks.BlockedCall()
        holder.waits.add(blocked)
        try:
            with self.locks.wait(file.obj, owner, _lock(lock.type, lock.start, lock.len)):
                await self._wait(wait, blocked, blocked.lock, fd, lock.type, (lock.start, lock.len))
        except InterruptedError:
            if not holder.is_gone:
                raise
        finally:
            holder.waits.discard(blocked)
            await self._call(file, calls.close, fd)

    def _replaced(self, holder: Holder) -> None:
        """Have those that wait by a holder wait by that which the owner has instead: its locks would be in the way."""
        assert self.tasks is not None
        for blocked in holder.waits:
            self.tasks.once("changing the description that a lock is waited for with", self._interrupt, blocked)

    async def _release(self, file: OpenFile, holder: Holder) -> None:
        """Release the locks of a holder that was dropped."""
        if holder.is_closed:
            return
        holder.requests += 1
        try:
            await self._call(file, holder.unlock_all)
        finally:
            holder.requests -= 1
            for fd in self.locks.release(holder):
                await self._call(file, calls.close, fd)

    @operation
    async def flock(self, fh: FileHandleT, op: int, wait: LockWait | None) -> None:
        """See flock(2): the lock belongs to the open file, as it does on the real file."""
        file = self.files.by_fd[fh]
        if op == fcntl.LOCK_UN:
            with self._share(file, self.locks.unlocking):
                await self._call(file, filelocks.try_flock, fh, op)
            return
        with self._share(file, self.locks.waiting):
            if not await self._call(file, filelocks.try_flock, fh, op):
                if wait is None:
                    raise FUSEError(errno.EWOULDBLOCK)
                blocked = filelocks.BlockedCall()
                await self._wait(wait, blocked, blocked.flock, fh, op)
            await self._confirm_content(file)

    @operation
    async def unlock(self, fh: FileHandleT, owner: int) -> None:
        """Release what a process has locked, since it closes one of its descriptors of the file."""
        file = self.files.by_fd[fh]
        holder = self.locks.find(file.obj, owner)
        if holder is None:
            return
        with self._share(file, self.locks.unlocking):
            if holder.requests:  # another thread of the process waits for a lock, and goes on waiting
                self.locks.unlock(holder, 0, END)
                await self._call(file, holder.unlock_all)
            else:
                await self._release(file, self.locks.drop(file.obj, owner))

    async def _confirm_content(self, file: OpenFile) -> None:
        """Wait until the kernel caches nothing of the file that has changed: whoever has a lock relies on that.

        An NFS client that still has a delegation would go on with its own pages. While one has to return it, the answer
        is ETIMEDOUT, of which the kernel's server makes NFS4ERR_DELAY: the client asks again. (It cannot be waited for,
        because the client may be the same.) The lock remains until then, or until the server closes the file for its
        owner.

        Raises:
            FUSEError: ETIMEDOUT.
        """
        await self.cache.confirm_content(file.number, file.obj, self._in_thread)
        if self.knfsd and not await self.recalls.are_returned(file.obj):
            raise FUSEError(errno.ETIMEDOUT)

    async def _holder(self, file: OpenFile, fh: FileHandleT, owner: int, kind: int) -> Holder:
        """Return what the owner has its locks by, and which allows this kind of lock."""
        obj, access = file.obj, file.flags & os.O_ACCMODE
        holder = self.locks.find(obj, owner)
        if holder is not None and holder.allows(kind):
            return holder
        if holder is None and access != os.O_WRONLY and self.locks.is_free(fh):
            return self.locks.add(obj, owner, Holder(fh, access, fh, file.uid))
        # What is open for writing alone would not do as soon as the owner locks for reading, by another open file.
        own = access
        access = os.O_RDONLY if holder is None and access == os.O_RDONLY else os.O_RDWR
        try:
            new = Holder(await self._for_locks(file, fh, access), access, fh, file.uid)
        except PermissionError:  # it is immutable by now (chattr +i)
            if holder is not None or not self.locks.is_free(fh):
                raise FUSEError(errno.ENOLCK) from None
            return self.locks.add(obj, owner, Holder(fh, own, fh, file.uid))
        holder = self.locks.find(obj, owner)
        if holder is not None:
            if holder.allows(kind):  # another thread of the process was first
                calls.close(new.fd)
                return holder
            self._hand_over(holder, new)
            locked = holder.ranges.locks
            old = self.locks.drop(obj, owner)
            self.locks.add(obj, owner, new)
            for lock in locked:
                self.locks.lock(new, lock)
            self._replaced(old)
            await self._release(file, old)
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
            OSError: ENOLCK: the caller has its share of descriptors; EPERM: not even root may open it.
        """
        shares = self.files.shares
        if not shares.has_share_left(file.uid):
            raise self._refuse(shares, "files and directories open", file)
        try:
            return await self._call(file, calls.open, ROOT, fh, access)
        except PermissionError:  # it can only be appended to (chattr +a)
            return await self._call(file, calls.open, ROOT, fh, access | os.O_APPEND)

    def _refuse(self, shares: Shares[int], what: str, file: OpenFile) -> OSError:
        return self.requests.refuse(shares, what, file.uid, f"server uid {file.uid}", errno.ENOLCK)

    def _share(self, file: OpenFile, shares: Shares[int]) -> AbstractContextManager[None]:
        """Count a request against the caller's share while it is answered, if it may have to wait.

        Raises:
            OSError: ENOLCK: the caller has its share of requests that wait already.
        """
        if shares is self.locks.unlocking and not file.obj.filesystem.remote:
            return nullcontext()
        if not shares.has_share_left(file.uid):
            raise self._refuse(shares, "requests for locks waiting", file)
        return shares.taken(file.uid)

    async def _call(self, file: OpenFile, call: Callable[..., _T], *args: object) -> _T:
        """Make a call that may have to wait only if the file system is remote."""
        if file.obj.filesystem.remote:
            return await self._in_thread(call, *args)
        return call(*args)

    async def _wait(
        self, wait: LockWait, blocked: filelocks.BlockedCall, call: Callable[..., None], *args: object
    ) -> None:
        """Wait for a lock in a thread until the client is interrupted.

        Raises:
            OSError: EINTR, or the error of the real file system.
        """
        assert self.tasks is not None
        wait.on_interrupt(partial(self.tasks.once, "interrupting a wait for a lock", self._interrupt, blocked))
        await self._in_thread(call, *args)

    async def _in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        return await trio.to_thread.run_sync(call, *args, limiter=self.locks.limiter, abandon_on_cancel=True)

    @staticmethod
    async def _interrupt(blocked: filelocks.BlockedCall) -> None:
        while blocked.interrupt():
            await trio.sleep(_AGAIN_SECONDS)
