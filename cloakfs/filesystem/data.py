"""Operations on the content of files."""

import errno
import os
import stat
from dataclasses import replace
from functools import partial
from typing import cast

import trio
from pyfuse3 import FileHandleT, FileInfo, FlagT, FUSEError, InodeT, RequestContext

from .. import linux
from ..fuse.compatibility import offers_noflush, with_backing, without_flush
from ..tree import calls
from ..tree.objects import Descriptor, Stale
from ..tree.request import Request
from . import atomic
from .core import Core
from .operation import operation
from .recall import OWN

# The kernel has already dealt with these; O_DIRECT would need aligned buffers, which requests do not have.
_NOT_AGAIN = os.O_CREAT | os.O_EXCL | os.O_NOCTTY | os.O_NOFOLLOW | os.O_DIRECT | linux.FMODE_EXEC


# By one request: half a second on a slow disk. A program asks for the rest (copy_file_range(2)).
_MOST_COPIED = 64 << 20


def reopen_flags(flags: int) -> int:
    """Return the flags with which the real file is opened for a client that used `flags`.

    O_APPEND is left out: with it, pwrite(2) writes at the end whatever its offset, even what is written after
    fcntl(F_SETFL), or to a mapping. See `DataOperations.write`.
    """
    return flags & ~(_NOT_AGAIN | os.O_APPEND)


def open_again(credentials: linux.Credentials, fd: int, flags: int) -> int:
    """Open what `fd` (O_PATH) refers to, as `credentials`, for a client that used `flags`.

    Raises:
        OSError: the error of the real file system.
    """
    try:
        return calls.open(credentials, fd, reopen_flags(flags))
    except PermissionError as exc:
        if exc.errno != errno.EPERM or not flags & os.O_APPEND:
            raise
        return calls.open(credentials, fd, reopen_flags(flags) | os.O_APPEND)  # chattr +a allows nothing else


def _seek(fd: int, offset: int, whence: int, *, without_holes: bool) -> int:
    """Call lseek(2) with SEEK_DATA or SEEK_HOLE; `without_holes` treats all of the file as data."""
    if not without_holes:
        return calls.lseek(fd, offset, whence)
    size = calls.fstat(fd).st_size
    if offset >= size:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    return offset if whence == os.SEEK_DATA else size


def _may_have_more(at: Request, flags: int) -> bool:
    """Whether a file that says it is empty may have content all the same, which the kernel would not read.

    It reads what lies beyond the size only with FOPEN_DIRECT_IO, which refuses shared mappings. Who opens an empty
    file to write to it may be about to make it larger and to map it, so this is for those who read; except where no
    process maps anything. File systems with rules of POSIX alone say true sizes.
    """
    filesystem = at.obj.filesystem
    if filesystem.has_posix_rules or at.info.st_size:
        return False
    return filesystem.makes_up_files or flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY


def _is_named(at: Request, fd: int, name: bytes, _pin: Descriptor | None) -> bool:
    return atomic.leads_to(linux.ROOT, fd, name, at.info)


class DataOperations(Core):
    """OPEN, READ, WRITE, FALLOCATE, COPY_FILE_RANGE, LSEEK, FLUSH, FSYNC, RELEASE.

    pyfuse3 passes on FALLOCATE, COPY_FILE_RANGE and LSEEK only with the patches in contrib/pyfuse3. Without them, the
    kernel fails the first with EOPNOTSUPP, copies by reading and writing, and treats all of a file as data.
    """

    @operation
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open the real file as the caller: its permissions and ACLs decide, at this moment."""
        if self.self_probe.threads and (own := self._opened_by_daemon(flags, ctx)):
            return own
        if self.knfsd:
            self.expired_names.used_by_handle(inode)
        at = await self._enter(inode, ctx)
        self._require_descriptor(at)
        if at.info.st_nlink == 0 and not at.obj.open_files and (self.exported or not at.obj.filesystem.watched):
            at = await self._require_name(at, inode, ctx)
        # The kernel checks this only for descriptors to write to; for others, when the daemon has emptied the file.
        if flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY | os.O_TRUNC and self.files.is_executed(at.obj):
            raise OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY))
        # For the lock of the file; unlike others, this request has not waited for it.
        at = replace(at, waits=True) if flags & os.O_TRUNC and self.reader.is_busy(at.obj.filesystem) else at
        try:
            if flags & linux.FMODE_EXEC:
                fd = await self._do(at, self._open_to_execute)
            else:
                fd = await self._do(at, self._reopen, flags)
        except PermissionError:
            if flags & os.O_ACCMODE != os.O_RDONLY:
                raise
            at = await self._again(at, inode, ctx)
            # The pages that the kernel has for others are not for this caller.
            return FileInfo(fh=self._open_for_attributes(at, ctx), keep_cache=False, direct_io=True)
        as_opener = self.ganesha or flags & os.O_ACCMODE != os.O_RDONLY
        keeps = self.cache.opening(at)
        opener = at.credentials_to_write(flags) if as_opener and not self.ganesha else None
        backing = self.passthrough.open(at, fd, flags, may_begin=self.requests.trace is None)
        fh = self.files.opened(fd, at, as_opener=as_opener, opener=opener, flags=flags)
        prevents = self.knfsd and self._prevents_delegation(at, flags)
        if prevents or flags & os.O_TRUNC:
            await self._has_opened(fh, at, inode, flags, prevents=prevents)
        opened = FileInfo(fh=fh, keep_cache=keeps, direct_io=self.ganesha or _may_have_more(at, flags))
        if backing:
            self.cache.invalidate(at.obj)  # from now on, its attributes are not cached (`Replies`)
            with_backing(opened, backing)
        return without_flush(opened) if self._leaves_out_flush(at, flags) else opened

    async def _require_name(self, at: Request, inode: InodeT, ctx: RequestContext) -> Request:
        """Refuse to open a file that was removed behind the mount, and that nobody has open; return how to go on.

        A caller that has just looked its name up, or knows its handle, would write to a file without a name. ESTALE
        makes the kernel look the name up again, and an NFS client, too; both may then make a new file. Some FUSE file
        systems say st_nlink 0 of all files, so the name is looked up as well.

        Raises:
            Stale: it was removed.
        """
        parent = at.obj.parent
        if parent is not None:
            fd, pin = self.nodes.descriptors.fd(parent), parent.descriptor
            if await self._do(at, partial(_is_named, fd=fd, name=at.obj.name, _pin=pin)):
                return await self._again(at, inode, ctx)
        self.cache.has_no_name(at.obj)
        raise Stale

    def _opened_by_daemon(self, flags: int, ctx: RequestContext) -> FileInfo | None:
        """Answer an OPEN by which the daemon keeps delegations away, or has them recalled; None if it is not one.

        Raises:
            FUSEError: EPERM: it was made to recall them.
        """
        if self.recalls.is_own(ctx.pid):
            return without_flush(FileInfo(fh=FileHandleT(OWN), keep_cache=True))
        if self.recalls.refuses(ctx.pid, flags):
            raise FUSEError(errno.EPERM)
        return None

    async def _has_opened(self, fh: FileHandleT, at: Request, inode: InodeT, flags: int, *, prevents: bool) -> None:
        """Prevent a delegation of a file that was opened, and see to what emptying it changes; close it on failure."""
        try:
            if prevents:
                await self.recalls.prevent(fh, inode, self.nodes.generation(inode, at.obj))
            if flags & os.O_TRUNC:
                await self._may_have_lost_set_id(fh)
        except BaseException:
            self._close(fh)
            raise

    def _prevents_delegation(self, at: Request, flags: int) -> bool:
        """Whether the server must not grant a delegation of a file that it opens with these flags (`recall`)."""
        if at.obj.filesystem.watched:
            return self._prevents_write_delegations and flags & os.O_ACCMODE != os.O_RDONLY
        # execve(2), which only this machine can call, refuses what is open for writing.
        if flags & linux.FMODE_EXEC or not stat.S_ISREG(at.info.st_mode) or not linux.may_lease():
            return False
        if not offers_noflush:  # a daemon that is being ended would wait for its own answer to a FLUSH
            self.recalls.cannot_prevent(errno.EOPNOTSUPP, "this takes the patched pyfuse3 and Linux 5.16")
        return offers_noflush

    def _leaves_out_flush(self, at: Request, flags: int) -> bool:
        """Whether the kernel need not report each close(2) of a file that is being opened.

        FLUSH releases what the process has locked by this or by another descriptor of the file. RELEASE does so for
        what is locked by this one, which is as good where nothing has been locked yet and this does not write. But an
        NFS server opens a file once for all clients, and FLUSH says whose locks are over.
        """
        only_reads = flags & os.O_ACCMODE == os.O_RDONLY
        is_local = at.obj.filesystem.has_posix_rules and not self.exported
        return only_reads and is_local and at.obj not in self.locks.by_object

    def _reopen(self, at: Request, flags: int) -> int:
        only_reads = not flags & (os.O_ACCMODE | os.O_TRUNC | os.O_NOATIME) and stat.S_ISREG(at.info.st_mode)
        try:
            if only_reads:
                credentials = at.credentials_for(os.R_OK)
                return self.nodes.descriptors.with_descriptor(
                    calls.open, credentials, at.fd, flags & ~(_NOT_AGAIN | os.O_APPEND)
                )
            return self.nodes.descriptors.with_descriptor(open_again, at.credentials_to_write(flags), at.fd, flags)
        except PermissionError:
            if not self._has_nfs_right(at, flags):
                raise
            return self.nodes.descriptors.with_descriptor(open_again, linux.ROOT, at.fd, flags)

    def _open_to_execute(self, at: Request) -> int:
        """Open for execve(2): the right to execute is what counts, and the kernel reads on the caller's behalf."""
        if not calls.access(at.credentials, at.fd, os.X_OK):
            raise FUSEError(errno.EACCES)
        return self.nodes.descriptors.with_descriptor(calls.open, linux.ROOT, at.fd, os.O_RDONLY)

    @operation
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Return up to `size` bytes from `off`."""
        self.files.require_readable(fh)
        await self._check_again(fh, os.R_OK)
        obj = self.files.by_fd[fh].obj
        content = await self.reader.read(fh, obj.number, obj.filesystem, off, size)
        return cast("bytes", content)  # pyfuse3 accepts any buffer; a copy would be wasteful

    @operation
    async def write(  # type: ignore[override]  # the decorator hides that the last argument has a default
        self, fh: FileHandleT, off: int, buf: bytes, append: bool | None = None
    ) -> int:
        """Write through to the real file, as the caller that opened it (set-id bits are cleared, quotas are charged).

        The kernel turns O_APPEND into an offset, that of the end as it believes. Others may have written there, behind
        the mount or in another view. So what is appended goes to the real end. The patched pyfuse3 says whether it is.
        With the released one (None), that has to be guessed of what is written to a file opened with O_APPEND.
        """
        await self._check_again(fh, os.W_OK)
        file = self.files.by_fd[fh]
        obj, opener = file.obj, file.opener
        assert opener is not None
        appends = append
        if appends is None:
            # What may be mapped may also be written anywhere. (So may other files after fcntl(F_SETFL), but hardly any
            # program does that.)
            appends = file.appends and (not file.may_be_mapped or off == obj.size_in_kernel(file.number))
        in_sync = bool(file.flags & (os.O_SYNC | os.O_DSYNC))
        done = await self.reader.write(fh, opener, obj.filesystem, off, buf, append=appends, in_sync=in_sync)
        file.written += done
        if off + done > obj.size_in_kernel(file.number):
            obj.report_size(file.number, off + done)
        if self.files.may_lose_set_id(file):
            await self._may_have_lost_set_id(fh)
        if appends and not obj.filesystem.remote and calls.fstat(fh).st_size != off + done:
            self.cache.invalidate(obj, pages_in=file.number)  # what others wrote is at `off`
        return done

    async def _may_have_lost_set_id(self, fh: FileHandleT) -> None:
        """Invalidate the attributes of a file, and its names if it may be hidden from a caller without set-id bits.

        The real tree drops them when the file is written to. The kernel learns of it from the next attributes (with
        FUSE_HANDLE_KILLPRIV_V2), or has those dropped first that it knows of.
        """
        file = self.files.by_fd[fh]
        self.files.check_set_id(fh)  # first: what is dropped from now on is noticed by the request that does it
        self.cache.invalidate(file.obj)
        view = self.views.get(file.number)
        if view is not None:
            await self.cache.changed(file.number, view, file.obj)

    @operation
    async def fallocate(self, fh: FileHandleT, mode: FlagT, off: int, length: int) -> None:
        """See fallocate(2), which is called as the caller that opened the file (as in `write`).

        The kernel drops its own pages of a range that no longer contains anything.
        """
        await self._check_again(fh, os.W_OK)
        file = self.files.by_fd[fh]
        obj, opener = file.obj, file.opener
        assert opener is not None
        try:
            with self.reader.thread_writes(obj.filesystem):
                await trio.to_thread.run_sync(calls.fallocate, opener, fh, mode, off, length, abandon_on_cancel=True)
        except OSError:
            self.cache.invalidate(obj)  # ext4 keeps what it allocated before the disk was full
            raise
        if self.files.may_lose_set_id(file):
            await self._may_have_lost_set_id(fh)
        if not mode & linux.FALLOC_FL_KEEP_SIZE and off + length > obj.size_in_kernel(file.number):
            obj.report_size(file.number, off + length)

    @operation
    async def copy_file_range(
        self, fh_in: FileHandleT, off_in: int, fh: FileHandleT, off: int, size: int, flags: FlagT
    ) -> int:
        """See copy_file_range(2): `fh`, from `off` on, gets a part of `fh_in`, which the real file system may share.

        It is called as the caller that opened `fh` (as in `write`). Where it cannot copy, the kernel reads and writes.

        Returns:
            how many bytes were copied: at most so many that no thread is busy with it for long.
        """
        self.files.require_readable(fh_in)
        await self._check_again(fh_in, os.R_OK)
        await self._check_again(fh, os.W_OK)
        file = self.files.by_fd[fh]
        obj, opener = file.obj, file.opener
        assert opener is not None
        copy = partial(calls.copy_file_range, opener, fh_in, off_in, fh, off, min(size, _MOST_COPIED))
        with self.reader.thread_writes(obj.filesystem):
            done = await trio.to_thread.run_sync(copy, abandon_on_cancel=True)
        if self.files.may_lose_set_id(file):
            await self._may_have_lost_set_id(fh)
        file.written += done
        if off + done > obj.size_in_kernel(file.number):
            obj.report_size(file.number, off + done)
        return done

    @operation
    async def lseek(self, fh: FileHandleT, off: int, whence: int) -> int:
        """Find the next data (SEEK_DATA) or the next hole (SEEK_HOLE) from `off`.

        A file that may be mapped for writing has no holes: the kernel may have data for them that it has not written.
        """
        self.files.require_readable(fh)
        await self._check_again(fh, os.R_OK)
        without_holes = self.files.may_be_mapped(self.files.by_fd[fh].obj)
        seek = partial(_seek, fh, off, whence, without_holes=without_holes)
        return await trio.to_thread.run_sync(seek, abandon_on_cancel=True)

    @operation
    async def flush(self, fh: FileHandleT) -> None:
        """Handle close(2) of one of the client's descriptors by passing on what the real file system reports.

        Local file systems have nothing to report. If there are no others, the answer (ENOSYS) makes the kernel send no
        more FLUSH.
        """
        if all(filesystem.has_posix_rules for filesystem in self.nodes.mounts.filesystems):
            raise FUSEError(errno.ENOSYS)
        if fh == OWN:
            return
        await trio.to_thread.run_sync(
            calls.close, self.nodes.descriptors.with_descriptor(calls.dup, fh), abandon_on_cancel=True
        )

    @operation
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """See fsync(2) and fdatasync(2)."""
        sync = calls.fdatasync if datasync else calls.fsync
        if self.files.by_fd[fh].obj.filesystem.in_memory:
            sync(fh)  # there is nothing to wait for
        else:
            await trio.to_thread.run_sync(sync, fh, abandon_on_cancel=True)

    @operation
    async def release(self, fh: FileHandleT) -> None:
        """Close the file, since the last of the client's descriptors is gone."""
        if fh != OWN:
            self._close(fh)
