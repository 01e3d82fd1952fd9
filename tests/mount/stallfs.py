"""A FUSE file system in memory that stops answering on command: `python -m tests.mount.stallfs MOUNTPOINT`.

The kernel may cache nothing of it. It reads commands from standard input, and answers each with a line: `N` makes it
answer N more requests and keep the next ones waiting; `go` makes it answer all, including those that wait; `silent`
reports how many wait.
"""

import errno
import os
import stat
import sys

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    XAttrNameT,
)


class Node:
    def __init__(self, number: int, mode: int, content: bytes = b"") -> None:
        self.number = number
        self.mode = mode
        self.content = content
        self.children: dict[bytes, Node] = {}
        self.nlink = 1


class Stalling(pyfuse3.Operations):
    supports_dot_lookup = True

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, Node] = {}
        self._new(stat.S_IFDIR | 0o777)
        self._left: int | None = None
        self._waiting = 0
        self._go = trio.Event()

    def _new(self, mode: int, content: bytes = b"") -> Node:
        number = len(self._nodes) + 1
        node = self._nodes[number] = Node(number, mode, content)
        return node

    async def _gate(self) -> None:
        if self._left is None:
            return
        if self._left:
            self._left -= 1
            return
        self._waiting += 1
        await self._go.wait()

    def command(self, word: str) -> str:
        if word == "go":
            self._left = None
            self._waiting = 0
            self._go.set()
            self._go = trio.Event()
        elif word != "silent":
            self._left = int(word)
        return str(self._waiting)

    def _entry(self, node: Node) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = InodeT(node.number)
        entry.st_mode = ModeT(node.mode)
        entry.st_nlink = node.nlink
        entry.st_size = len(node.content)
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    def _child(self, parent: int, name: bytes) -> Node:
        try:
            return self._nodes[parent].children[name]
        except KeyError:
            raise FUSEError(errno.ENOENT) from None

    def _link(self, parent: int, name: bytes, node: Node) -> EntryAttributes:
        if name in self._nodes[parent].children:
            raise FUSEError(errno.EEXIST)
        self._nodes[parent].children[name] = node
        return self._entry(node)

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        await self._gate()
        return self._entry(self._nodes[inode])

    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        await self._gate()
        return self._entry(self._nodes[parent_inode] if name == b"." else self._child(parent_inode, name))

    async def setattr(
        self, inode: InodeT, attr: EntryAttributes, fields: SetattrFields, fh: FileHandleT | None, ctx: RequestContext
    ) -> EntryAttributes:
        await self._gate()
        node = self._nodes[inode]
        if fields.update_mode:
            node.mode = attr.st_mode
        if fields.update_size:
            node.content = node.content[: attr.st_size].ljust(attr.st_size, b"\0")
        return self._entry(node)

    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        await self._gate()
        return self._link(parent_inode, name, self._new(stat.S_IFDIR | mode))

    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        await self._gate()
        return self._link(parent_inode, name, self._new(mode))

    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        await self._gate()
        return self._link(parent_inode, name, self._new(stat.S_IFLNK | 0o777, target))

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        await self._gate()
        return self._nodes[inode].content

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        await self._gate()
        self._nodes[inode].nlink += 1
        return self._link(new_parent_inode, new_name, self._nodes[inode])

    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await self._gate()
        self._child(parent_inode, name)
        del self._nodes[parent_inode].children[name]

    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await self.unlink(parent_inode, name, ctx)

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await self._gate()
        if flags:
            raise FUSEError(errno.EINVAL)
        node = self._child(parent_inode_old, name_old)
        del self._nodes[parent_inode_old].children[name_old]
        self._nodes[parent_inode_new].children[name_new] = node

    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        await self._gate()
        entry = self._link(parent_inode, name, self._new(mode))
        return FileInfo(fh=FileHandleT(entry.st_ino)), entry

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        await self._gate()
        return FileInfo(fh=FileHandleT(inode))

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        await self._gate()
        return self._nodes[fh].content[off : off + size]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        await self._gate()
        node = self._nodes[fh]
        node.content = node.content[:off].ljust(off, b"\0") + buf + node.content[off + len(buf) :]
        return len(buf)

    async def flush(self, fh: FileHandleT) -> None:
        await self._gate()

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._gate()

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        await self._gate()
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        await self._gate()
        for cookie, (name, node) in list(enumerate(self._nodes[fh].children.items(), 1))[start_id:]:
            if not pyfuse3.readdir_reply(token, name, self._entry(node), cookie):
                break

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        await self._gate()
        raise FUSEError(errno.ENODATA)

    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        await self._gate()

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> list[XAttrNameT]:
        await self._gate()
        return []

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._obey)
            await pyfuse3.main(1, 1000)
            nursery.cancel_scope.cancel()

    async def _obey(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(0)
            words = os.read(0, 100).decode().split()
            if not words:
                return
            for word in words:
                print(self.command(word), flush=True)


if __name__ == "__main__":
    stalling = Stalling()
    pyfuse3.init(stalling, sys.argv[1], {"fsname=stallfs", "allow_other", *sys.argv[2:]})
    try:
        trio.run(stalling.serve)
    finally:
        pyfuse3.close()
