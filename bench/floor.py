"""A file system in Python that only passes requests on, to show what pyfuse3 itself costs.

It does so as root, checks and maps nothing, and lets the kernel cache nothing. It runs in the session loop of cloakfs.
Usage: python -m bench.floor TREE MOUNTPOINT; SIGTERM ends it.
"""

import errno
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    XAttrNameT,
)

from cloakfs.fuse import loop


def _attributes(info: os.stat_result, nodeid: int) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = InodeT(nodeid)
    entry.generation = 0
    entry.entry_timeout = entry.attr_timeout = 0
    entry.st_mode = ModeT(info.st_mode)
    entry.st_nlink, entry.st_uid, entry.st_gid = info.st_nlink, info.st_uid, info.st_gid
    entry.st_rdev, entry.st_size = info.st_rdev, info.st_size
    entry.st_blksize, entry.st_blocks = info.st_blksize, info.st_blocks
    entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns
    return entry


class _Floor(pyfuse3.Operations):
    """Knows each object by a descriptor, and calls it by its inode number; the tree must be one file system."""

    def __init__(self, tree: str) -> None:
        super().__init__()
        self._fds: dict[int, int] = {pyfuse3.ROOT_INODE: os.open(tree, os.O_PATH)}
        self._known: Counter[int] = Counter()

    def _node(self, info: os.stat_result, parent: int, name: bytes) -> int:
        nodeid = info.st_ino
        if nodeid not in self._fds:
            self._fds[nodeid] = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._fds[parent])
        self._known[nodeid] += 1
        return nodeid

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """See pyfuse3, as for all others."""
        try:
            info = os.stat(name, dir_fd=self._fds[parent_inode], follow_symlinks=False)
            return _attributes(info, self._node(info, parent_inode, name))
        except OSError as exc:
            raise FUSEError(exc.errno or errno.EIO) from None

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for nodeid, count in inode_list:
            self._known[nodeid] -= count
            if self._known[nodeid] <= 0 and nodeid != pyfuse3.ROOT_INODE:
                del self._known[nodeid]
                os.close(self._fds.pop(nodeid))

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return _attributes(os.fstat(self._fds[inode]), inode)

    async def setattr(
        self, inode: InodeT, attr: EntryAttributes, fields: SetattrFields, fh: FileHandleT | None, ctx: RequestContext
    ) -> EntryAttributes:
        if fields.update_size:
            os.truncate(f"/proc/self/fd/{self._fds[inode]}", attr.st_size)
        return await self.getattr(inode, ctx)

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        raise FUSEError(errno.ENODATA)

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        fd = os.open(name, flags | os.O_CREAT, mode, dir_fd=self._fds[parent_inode])
        info = os.fstat(fd)
        return FileInfo(fh=FileHandleT(fd)), _attributes(info, self._node(info, parent_inode, name))

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=FileHandleT(os.open(f"/proc/self/fd/{self._fds[inode]}", flags)))

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    async def release(self, fh: FileHandleT) -> None:
        os.close(fh)

    async def flush(self, fh: FileHandleT) -> None:
        raise FUSEError(errno.ENOSYS)

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        os.unlink(name, dir_fd=self._fds[parent_inode])

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        fd = os.open(f"/proc/self/fd/{self._fds[fh]}", os.O_RDONLY)
        try:
            names = os.listdir(fd)
        finally:
            os.close(fd)
        for number, name in enumerate(names[start_id:], start_id + 1):
            encoded = FileNameT(os.fsencode(name))
            info = os.stat(name, dir_fd=self._fds[fh], follow_symlinks=False)
            if not pyfuse3.readdir_reply(token, encoded, _attributes(info, info.st_ino), number):
                break
            self._node(info, fh, encoded)

    async def releasedir(self, fh: FileHandleT) -> None:
        pass


def main() -> None:
    """Mount, and serve until SIGTERM."""
    tree, at = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    operations: Any = _Floor(tree)
    pyfuse3.init(operations, at, {"fsname=floor", "allow_other"})
    signal.signal(signal.SIGTERM, lambda *_: pyfuse3.terminate())
    os.umask(0)
    try:
        trio.run(loop.serve)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
