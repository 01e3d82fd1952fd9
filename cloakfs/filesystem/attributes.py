"""Operations on attributes: reading and changing them, access, symbolic links, statfs."""

import errno
import os
import stat
import time
from functools import partial

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FUSEError,
    InodeT,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from .. import linux
from ..ids import ClientId, ServerId
from ..tree import calls
from ..tree.door import attrs_of
from .core import Core
from .entered import SET_ID, Entered
from .names import Names
from .request import answers

# pyfuse3 turns "set to now" into a time, so a time that is this close to now is assumed to mean it.
_NOW_NS = 1_000_000_000


def _target(at: Entered) -> bytes:
    return calls.readlink(at.credentials, at.fd)


def _may(at: Entered, mode: int) -> bool:
    return calls.access(at.credentials, at.fd, mode)


class Attributes(Names, Core):
    """GETATTR, SETATTR, ACCESS, READLINK, STATFS."""

    @answers
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """See stat(2)."""
        if self._is_top(inode):
            return self.replies.top()
        if self.knfsd and self.reconnecting.looks_at(ctx.pid, inode):
            at = await self._let_kernel_in(inode)
        else:
            # read(2) makes the kernel ask, too. nfs-ganesha keeps files open that no client has open.
            at = await self._enter(inode, ctx, or_open=not self.ganesha, for_attributes=True)
        return self.replies.of_object(at, at.info)

    @answers
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """See chown(2), chmod(2), truncate(2) and utimensat(2), each of which is called as the caller."""
        if self._is_top(inode):
            raise FUSEError(errno.EROFS)
        at = await self._enter(inode, ctx)
        await self._do(at, lambda at: self._change_attributes(at, attr, fields, fh))
        if fields.update_mode and attr.st_mode & SET_ID:
            for obj in (at.obj, *self.nodes.twins(at.obj)):
                self.files.may_have_set_id(obj)
                if attr.st_mode & stat.S_ISGID:
                    self.files.act_with_groups(obj, at.who)
        # By truncate(2), the real tree drops set-id bits.
        if fields.update_uid or fields.update_gid or fields.update_mode or fields.update_size:
            await self.cache.changed(at.number, at.view, at.obj)
        at = await self._again(at, inode, ctx)
        return self.replies.of_object(at, at.obj.filesystem.stat(at.fd))

    def _change_attributes(
        self, at: Entered, attr: EntryAttributes, fields: SetattrFields, fh: FileHandleT | None
    ) -> None:
        if fields.update_uid or fields.update_gid:
            uid = self._owner(at, ClientId(attr.st_uid)) if fields.update_uid else None
            gid = self._group(at, ClientId(attr.st_gid)) if fields.update_gid else None
            calls.chown(at.credentials, at.fd, uid, gid)
        if fields.update_mode:
            self._change_mode(at, attr, fields)
        if fields.update_size:
            if fh is not None:
                calls.ftruncate(at.credentials, fh, attr.st_size)
            else:
                self._truncate(at, attr.st_size)
            if fields.update_mode:
                self._drop_set_id(at, stat.S_IMODE(attr.st_mode) | self._hidden_set_id(at))
        if fields.update_atime or fields.update_mtime:
            self._utimens(at, attr, fields)
        self.nodes.ask(at.credentials, at.fd)

    def _change_mode(self, at: Entered, attr: EntryAttributes, fields: SetattrFields) -> None:
        mode, before = stat.S_IMODE(attr.st_mode), stat.S_IMODE(at.info.st_mode)
        owner_too = fields.update_uid or fields.update_gid
        if not owner_too:  # chown(2) drops them
            mode |= self._hidden_set_id(at)
        # On chown(2) and truncate(2) the kernel drops set-id bits, as the real tree does by itself. It drops the sticky
        # bit as well, because without default_permissions it does not know of it.
        dropped = before & ~mode if mode & ~before == 0 else 0
        if not (owner_too or fields.update_size) or not dropped or dropped & 0o777:
            self._chmod(at, mode)

    def _drop_set_id(self, at: Entered, mode: int) -> None:
        """After truncate(2), drop the set-id bits that are not in `mode`: the real tree does not drop them for root."""
        now = stat.S_IMODE(calls.fstat(at.fd).st_mode)
        dropped = now & ~mode & SET_ID
        if dropped:
            self._chmod(at, now & ~dropped)

    @staticmethod
    def _hidden_set_id(at: Entered) -> int:
        """Return the set-id bits that the caller is not shown, and so cannot have meant to remove."""
        real = at.info.st_mode & SET_ID
        if not real:
            return 0
        shown = at.view.show(attrs_of(at.obj.name, at.info, at.fd))
        return real & ~shown[0] if shown is not None else real

    def _truncate(self, at: Entered, size: int) -> None:
        try:
            self._truncate_as(at.credentials, at, size)
        except PermissionError:
            if not self._has_nfs_right(at, os.O_WRONLY):
                raise
            self._truncate_as(linux.ROOT, at, size)

    def _truncate_as(self, who: linux.Credentials, at: Entered, size: int) -> None:
        if not linux.in_main_thread() or not stat.S_ISREG(at.info.st_mode):
            calls.truncate(who, at.fd, size)
            return
        # truncate(2) waits until a lease on the file is released, ftruncate(2) does not.
        fd = self._with_descriptor(calls.open, who, at.fd, os.O_WRONLY)
        try:
            calls.ftruncate(who, fd, size)
        finally:
            calls.close(fd)

    def _owner(self, at: Entered, client_uid: ClientId) -> ServerId:
        uid = at.view.server_id("uid", client_uid)
        if uid is None:
            raise FUSEError(errno.EINVAL)
        return uid

    def _group(self, at: Entered, client_gid: ClientId) -> ServerId:
        gid = at.view.server_id("gid", client_gid)
        if gid is None:
            raise FUSEError(errno.EINVAL)
        return gid

    def _chmod(self, at: Entered, mode: int) -> None:
        try:
            calls.chmod(at.credentials, at.fd, mode)
        except PermissionError:
            # A write by anybody but the owner drops the set-id bits. The kernel requests this by SETATTR (including the
            # sticky bit, see `_change_mode`). A caller that may write could have achieved the same by writing.
            before = stat.S_IMODE(at.info.st_mode)
            dropped = before & ~mode
            drops_set_id = dropped & SET_ID and not dropped & 0o777 and not mode & ~before
            if not drops_set_id or not stat.S_ISREG(at.info.st_mode) or not _may(at, os.W_OK):
                raise
            calls.chmod(linux.ROOT, at.fd, mode | before & stat.S_ISVTX)

    def _utimens(self, at: Entered, attr: EntryAttributes, fields: SetattrFields) -> None:
        atime = attr.st_atime_ns if fields.update_atime else at.info.st_atime_ns
        mtime = attr.st_mtime_ns if fields.update_mtime else at.info.st_mtime_ns
        try:
            calls.utimens(at.credentials, at.fd, (atime, mtime))
        except PermissionError:
            # Only the owner may set an arbitrary time, but anybody who may write may set it to now.
            now = time.time_ns()
            if not (fields.update_atime and fields.update_mtime and abs(now - atime) < _NOW_NS > abs(now - mtime)):
                raise
            calls.utimens(at.credentials, at.fd, None)

    @answers
    async def access(self, inode: InodeT, mode: int, ctx: RequestContext) -> bool:
        """See access(2) and chdir(2): the real tree's mode bits and ACLs decide, for the mapped caller."""
        if self._is_top(inode):
            return not mode & os.W_OK
        at = await self._enter(inode, ctx)
        is_granted = await self._do(at, partial(_may, mode=mode))
        if not is_granted:
            self.requests.counters.errors["access", errno.EACCES] += 1
        return is_granted

    @answers
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """See readlink(2); the text is the real tree's, unchanged."""
        at = await self._enter(inode, ctx)
        return await self._do(at, _target)

    @answers
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Return the statvfs(3) of the file system that the root of the tree is on."""
        if ctx.pid in self.inside.threads:
            return pyfuse3.StatvfsData()  # the daemon asks itself whether it answers, not how the tree is
        root = self.nodes.root
        if root.filesystem.remote:
            real = await trio.to_thread.run_sync(calls.fstatvfs, root.fd, abandon_on_cancel=True)
        else:
            real = calls.fstatvfs(self.nodes.fd(root))
        shown = pyfuse3.StatvfsData()
        shown.f_bsize = real.f_bsize
        shown.f_frsize = real.f_frsize
        shown.f_blocks = real.f_blocks
        shown.f_bfree = real.f_bfree
        shown.f_bavail = real.f_bavail
        shown.f_files = real.f_files
        shown.f_ffree = real.f_ffree
        shown.f_favail = real.f_favail
        shown.f_namemax = real.f_namemax
        return shown
