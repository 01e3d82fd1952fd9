"""A slow FUSE file system below a mount: `python -m tests.mount.slowfs MOUNTPOINT FLAG`.

Any number is the name of a file of one MiB. FSYNC, and READ of files from `10000` on, get no answer until the
file FLAG exists; FLAG.asked is created when such a request arrives.
"""

import errno
import math
import os
import stat
import sys

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FlagT, FUSEError, InodeT, ReaddirToken, RequestContext

from tests.waiting import wait_in_loop

_FIRST = 100
_FIRST_STALLED = _FIRST + 10_000


class Slow(pyfuse3.Operations):
    def __init__(self, flag: str) -> None:
        super().__init__()
        self._flag = flag
        self._flagged = trio.Event()

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o777 if inode < _FIRST else stat.S_IFREG | 0o666
        entry.st_size = 1 << 20
        entry.st_nlink = 0  # like file systems that do not count names
        return entry

    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name in (b".", b".."):
            return await self.getattr(parent_inode, ctx)
        if not name.isdigit():
            raise FUSEError(errno.ENOENT)
        return await self.getattr(InodeT(_FIRST + int(name)), ctx)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        pass

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=FileHandleT(inode))

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        if fh >= _FIRST_STALLED:
            os.close(os.open(self._flag + ".asked", os.O_CREAT | os.O_WRONLY))
            await self._flagged.wait()
        return bytes(size)

    async def flush(self, fh: FileHandleT) -> None:
        pass

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._flagged.wait()

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await pyfuse3.main(1, 1000)
            nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        await wait_in_loop(lambda: os.path.exists(self._flag), math.inf, every=0.01)
        self._flagged.set()


if __name__ == "__main__":
    slow = Slow(sys.argv[2])
    pyfuse3.init(slow, sys.argv[1], {"fsname=slowfs", "allow_other"})
    try:
        trio.run(slow.serve)
    finally:
        pyfuse3.close()
