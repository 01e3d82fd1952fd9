"""Operations on attributes: reading and changing them, access, symbolic links, statfs."""

import contextlib
import errno
import os
import stat
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

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
from ..fuse import compatibility
from ..identity import ClientId, ServerId
from ..linux import SpecialTime
from ..tree import calls
from ..tree.actor import Actor
from ..tree.objects import ROOT
from ..tree.request import SET_ID, Request
from ..tree.visibility import attrs_of
from .core import Core
from .names import NameOperations
from .operation import operation

NOW, OMIT = SpecialTime.NOW, SpecialTime.OMIT

Time: TypeAlias = int | SpecialTime
"""In nanoseconds since 1970; or the present, or as it is."""


class Change(NamedTuple):
    """What one SETATTR is to change, in server ids; None, and OMIT, leave something as it is."""

    uid: ServerId | None
    gid: ServerId | None
    mode: int | None
    size: int | None
    atime: Time
    mtime: Time

    @property
    def parts(self) -> int:
        """How many system calls it takes."""
        owner = self.uid is not None or self.gid is not None
        times = self.atime is not OMIT or self.mtime is not OMIT
        return owner + (self.mode is not None) + (self.size is not None) + times

    def with_present(self, atime: bool, mtime: bool) -> "Change":
        """Return this change with the present for one or both of the times. A new size brings that mtime by itself."""
        return self._replace(
            atime=NOW if atime else self.atime,
            mtime=(NOW if self.size is None else OMIT) if mtime else self.mtime,
        )


def _changes_nothing(fields: SetattrFields) -> bool:
    times = fields.update_atime or fields.update_mtime
    return not (fields.update_uid or fields.update_gid or fields.update_mode or fields.update_size or times)


def _check_rights(who: Actor, info: linux.Stat, change: Change) -> None:
    """Check what is for the owner alone, as chown(2), chmod(2) and utimensat(2) do; the right to write is not checked.

    Raises:
        PermissionError: EPERM.
    """
    if who.uid == 0:
        return  # what its capabilities permit, they permit for every part
    is_choice = not {change.atime, change.mtime} <= {NOW, OMIT}
    if (change.uid, change.gid, change.mode) == (None, None, None) and not is_choice:
        return
    gives_away = change.uid not in (None, info.st_uid)
    is_strange = change.gid not in (None, info.st_gid) and not who.has_group(change.gid)
    if who.uid != info.st_uid or gives_away or is_strange:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def _restore(fd: int, before: linux.Stat) -> None:
    """Undo chown(2) and chmod(2); their error is not reported, but the one that made this necessary."""
    with contextlib.suppress(OSError):
        calls.chown(linux.ROOT, fd, before.st_uid, before.st_gid)
        calls.chmod(linux.ROOT, fd, stat.S_IMODE(before.st_mode))


def _dropped_by_write(mode: int) -> int:
    """Return the bits that a file with this mode loses when it is written to (of S_ISGID, see inode(7))."""
    return mode & (SET_ID if mode & stat.S_IXGRP else stat.S_ISUID)


def _target(at: Request) -> bytes:
    return calls.readlink(at.credentials, at.fd)


def _may(at: Request, mode: int) -> bool:
    return calls.access(at.credentials, at.fd, mode)


_MOST = (1 << 64) - 1  # of a number in statvfs(3)


class AttributeOperations(NameOperations, Core):
    """GETATTR, SETATTR, ACCESS, READLINK, STATFS."""

    @operation
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """See stat(2)."""
        if self._is_top(inode):
            return self.replies.top()
        if self.knfsd and self.reconnection.is_getattr_step(ctx.pid, inode):
            at = await self._enter_as_kernel(inode)
            return self.replies.of_object(at, at.info)
        may_repeat = self.cache.subtree_check and self.requests.trace is None
        if may_repeat and (answer := self.passing.answer(inode, ctx)) is not None:
            self.reconnection.end(ctx.pid)
            return answer
        # read(2) makes the kernel send GETATTR, too. nfs-ganesha keeps files open that no client has open.
        at = await self._enter_by_open_file(inode, ctx, or_open=not self.ganesha, for_attributes=True)
        entry = self.replies.of_object(at, at.info)
        if may_repeat:
            self.passing.note(inode, ctx, at, entry)
        return entry

    @operation
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """See chown(2), chmod(2), truncate(2) and utimensat(2), each of which is called as the caller."""
        if inode == ROOT and self.views.top:  # `_is_top`, without a call
            raise FUSEError(errno.EROFS)
        if _changes_nothing(fields):  # the kernel has removed security.capability, before a write
            at = await self._enter_by_open_file(inode, ctx, or_open=not self.ganesha)
        else:
            # A handle proves that the caller has the file open; the kernel sends it only with a size (ftruncate(2)).
            # But nfs-ganesha uses one that it has kept.
            if fh is not None:
                await self._check_again(fh, os.W_OK)
            at = await self._enter(inode, ctx, has_open=fh is not None and not self.ganesha)
        if self.reader.is_busy(at.obj.filesystem):  # with the file, perhaps: xfs has it locked while it is read
            at = replace(at, waits=True)
        change = self._wanted(at, attr, fields)
        try:
            await self._do(at, self._change, change, fh)
        except PermissionError:
            if change.atime is OMIT and change.mtime is OMIT:
                raise
            # Times of the caller's choice are for the owner alone, and the present is not.
            with_present = change.with_present(*await compatibility.to_the_present(inode))
            if with_present == change:
                raise
            at = await self._again(at, inode, ctx)
            await self._do(at, self._change, with_present, fh)
        if fields.update_mode and attr.st_mode & SET_ID:
            for obj in (at.obj, *self.nodes.registry.twins(at.obj)):
                self.files.may_have_set_id(obj)
                if attr.st_mode & stat.S_ISGID:
                    self.files.act_with_groups(obj, at.who)
        # By truncate(2), the real tree drops set-id bits.
        if fields.update_uid or fields.update_gid or fields.update_mode or fields.update_size:
            await self.cache.changed(at.number, at.view, at.obj)
        at = await self._again(at, inode, ctx)
        return self.replies.of_object(at, at.obj.filesystem.stat(at.fd))

    def _wanted(self, at: Request, attr: EntryAttributes, fields: SetattrFields) -> Change:
        uid = self._owner(at, ClientId(attr.st_uid)) if fields.update_uid else None
        gid = self._group(at, ClientId(attr.st_gid)) if fields.update_gid else None
        mode = stat.S_IMODE(attr.st_mode) if fields.update_mode else None
        size = attr.st_size if fields.update_size else None
        atime = attr.st_atime_ns if fields.update_atime else OMIT
        mtime = attr.st_mtime_ns if fields.update_mtime else OMIT
        return Change(uid, gid, mode, size, atime, mtime)

    def _change(self, at: Request, change: Change, fh: FileHandleT | None) -> None:
        """Make a change as a whole, or not at all.

        The real tree takes a system call for each part, and decides about that part. So a caller that may not do all of
        it is refused first. What then fails nevertheless (a quota that the new owner has used up, a full disk) has the
        parts before it undone: the size, which cannot be undone, comes after the parts that may fail.
        """
        uid, gid, mode, size, atime, mtime = change
        if mode is not None:
            mode = self._mode_to_set(at, change, mode)
        if size is None and change.parts == 1:  # by one call, which needs no undoing
            if uid is not None or gid is not None:
                calls.chown(at.credentials, at.fd, uid, gid)
            elif mode is not None:
                self._chmod(at, mode)
            else:
                self._set_times(at, atime, mtime, has_size=False)
        else:
            self._change_parts(at, change._replace(mode=mode), change.mode, fh)
        if at.in_thread:
            self.nodes.prefaulter.fetch_attributes(at.credentials, at.fd)

    def _change_parts(self, at: Request, change: Change, wanted_mode: int | None, fh: FileHandleT | None) -> None:
        """Make a change as a whole, or not at all, by several system calls; `wanted_mode` is what the caller wants."""
        uid, gid, mode, size, atime, mtime = change
        before = at.info
        if change.parts > 1:
            before = calls.fstat(at.fd)
            _check_rights(at.who, before, change)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
            if size is not None and fh is None:
                fh = self._open_to_truncate(at)
                opened.callback(calls.close, fh)
            if uid is not None or gid is not None:
                calls.chown(at.credentials, at.fd, uid, gid)
                undo.callback(_restore, at.fd, before)
            if mode is not None:
                self._chmod(at, mode)
                undo.callback(_restore, at.fd, before)
            if size is not None and fh is not None:
                calls.ftruncate(at.credentials, fh, size)
                if wanted_mode is not None:
                    self._drop_set_id(at, wanted_mode | self._hidden_set_id(at))
            if atime is not OMIT or mtime is not OMIT:
                self._set_times(at, atime, mtime, has_size=size is not None)
            undo.pop_all()

    def _mode_to_set(self, at: Request, change: Change, mode: int) -> int | None:
        """Return the mode to set; None if the other parts of the change bring it about."""
        before = stat.S_IMODE(at.info.st_mode)
        owner_too = change.uid is not None or change.gid is not None
        if not owner_too:  # chown(2) drops them
            mode |= self._hidden_set_id(at)
        # On chown(2) and truncate(2) the kernel drops set-id bits, as the real tree does by itself. It drops the sticky
        # bit as well, because without default_permissions it does not know of it.
        dropped = before & ~mode if mode & ~before == 0 else 0
        is_done = (owner_too or change.size is not None) and dropped and not dropped & 0o777
        return None if is_done else mode

    def _drop_set_id(self, at: Request, mode: int) -> None:
        """After truncate(2), drop the set-id bits that are not in `mode`: the real tree does not drop them for root."""
        now = stat.S_IMODE(calls.fstat(at.fd).st_mode)
        dropped = now & ~mode & SET_ID
        if dropped:
            self._chmod(at, now & ~dropped)

    @staticmethod
    def _hidden_set_id(at: Request) -> int:
        """Return the set-id bits that the caller is not shown, and so cannot have meant to remove."""
        real = at.info.st_mode & SET_ID
        if not real:
            return 0
        shown = at.view.show(attrs_of(at.obj.name, at.info, at.fd))
        return real & ~shown[0] if shown is not None else real

    def _open_to_truncate(self, at: Request) -> int:
        """Open the file for ftruncate(2), which changes mtime in any case, and does not wait for leases.

        Raises:
            OSError: as truncate(2) reports it.
        """
        if not stat.S_ISREG(at.info.st_mode):
            calls.truncate(at.credentials, at.fd, 0)  # which fails, with the right error
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        try:
            return self.nodes.descriptors.with_descriptor(calls.open, at.credentials, at.fd, os.O_WRONLY)
        except PermissionError:
            if not self._has_nfs_right(at, os.O_WRONLY):
                raise
            return self.nodes.descriptors.with_descriptor(calls.open, linux.ROOT, at.fd, os.O_WRONLY)

    def _owner(self, at: Request, client_uid: ClientId) -> ServerId:
        uid = at.view.server_id("uid", client_uid)
        if uid is None:
            raise FUSEError(errno.EINVAL)
        return uid

    def _group(self, at: Request, client_gid: ClientId) -> ServerId:
        gid = at.view.server_id("gid", client_gid)
        if gid is None:
            raise FUSEError(errno.EINVAL)
        return gid

    def _chmod(self, at: Request, mode: int) -> None:
        try:
            calls.chmod(at.credentials_for_mode(mode), at.fd, mode)
        except PermissionError:
            # A write by a user other than the owner drops the set-id bits. Unless it leaves that to the real tree
            # (`enable_killpriv_v2`), the kernel requests this by SETATTR (including the sticky bit, see
            # `_mode_to_set`). A caller that may write could have achieved the same by writing, but no part of it alone.
            before = stat.S_IMODE(at.info.st_mode)
            dropped = before & ~mode
            by_write = _dropped_by_write(before & ~self._hidden_set_id(at))
            drops_set_id = by_write and dropped & ~stat.S_ISVTX == by_write and not mode & ~before
            if not drops_set_id or not stat.S_ISREG(at.info.st_mode) or not _may(at, os.W_OK):
                raise
            calls.chmod(linux.ROOT, at.fd, mode | before & stat.S_ISVTX)

    def _set_times(self, at: Request, atime: Time, mtime: Time, *, has_size: bool) -> None:
        try:
            calls.utimens(at.credentials, at.fd, atime, mtime)
        except PermissionError:
            # utimensat(2) lets the owner alone set one of them to the present, an NFS server all who may write.
            if not (self.exported or has_size) or not {atime, mtime} <= {NOW, OMIT}:
                raise
            calls.require_access(at.credentials, at.fd, os.W_OK)
            calls.utimens(linux.ROOT, at.fd, atime, mtime)

    @operation
    async def access(self, inode: InodeT, mode: int, ctx: RequestContext) -> bool:
        """See access(2) and chdir(2): the real tree's mode bits and ACLs decide, for the mapped caller."""
        if self._is_top(inode):
            return not mode & os.W_OK
        at = await self._enter(inode, ctx)
        is_granted = await self._do(at, partial(_may, mode=mode))
        if not is_granted:
            self.requests.counters.errors["access", errno.EACCES] += 1
        return is_granted

    @operation
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """See readlink(2); the text is the real tree's, unchanged."""
        at = await self._enter(inode, ctx)
        return await self._do(at, _target)

    @operation
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Return the statvfs(3) of the file system that the root of the tree is on."""
        if ctx.pid in self.self_probe.threads:
            return pyfuse3.StatvfsData()  # of the daemon itself (`SelfProbe.ping`), which waits for no file system
        root = self.nodes.root
        if root.filesystem.remote:
            real = await trio.to_thread.run_sync(calls.fstatvfs, root.fd, abandon_on_cancel=True)
        else:
            real = calls.fstatvfs(self.nodes.descriptors.fd(root))
        shown = pyfuse3.StatvfsData()
        for name in (
            "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax",
        ):  # fmt: skip
            # Python takes the largest number for -1, by which CephFS says how many more inodes it may have.
            setattr(shown, name, getattr(real, name) & _MOST)
        return shown
