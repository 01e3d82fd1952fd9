"""Operations that take a name: looking up, making, removing, renaming."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import trio
from pyfuse3 import EntryAttributes, FileInfo, FlagT, FUSEError, InodeT, ModeT, RequestContext

from .. import linux
from ..fuse.compatibility import with_backing
from ..identity import ClientId
from ..tree import calls
from ..tree.actor import DAEMON
from ..tree.find import ABSENT, HIDDEN, Found, Missing
from ..tree.index import Unstored
from ..tree.mounts import TooSoon
from ..tree.nodes import OBJECT_BITS
from ..tree.objects import ALL_VIEWERS, ROOT, Descriptor, Directory, Object, Stale, dev_ino
from ..tree.registry import known_entry, unlist
from ..tree.request import Request
from ..tree.visibility import attrs_of, is_entry_visible, is_new_entry_visible, note_not_made
from . import atomic
from .core import Core
from .data import open_again, reopen_flags
from .operation import operation
from .xattrs import CAPABILITY


def _absent_for(seconds: float) -> EntryAttributes:
    """Return the answer that nothing has a name: an entry without a nodeid, as the kernel knows it from libfuse."""
    entry = EntryAttributes()
    entry.st_ino = InodeT(0)
    entry.entry_timeout = seconds
    return entry


# For the kernel, this is ENOENT, and it is cheaper than an exception. It is never changed.
_ABSENT = _absent_for(0.0)

log = logging.getLogger(__name__)

_Remove = Callable[[linux.Credentials, int, bytes], None]  # `calls.unlink` or `calls.rmdir`

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

# How it ends if something has a name already that a request would make.
_TAKEN = (FileExistsError, FUSEError)

_NO_NAME = b""  # nothing has this name

# How often to resolve again a name on which something is mounted.
_TRIES = 20


def _creator(at: Request, mode: int) -> linux.Credentials:
    """Return as whom to make a file and to write to it: as the caller, without its groups if they play no part.

    Apart from the right to do so, they do where blocks are reserved for a group, and for the bit S_ISGID, if it is not
    the caller's primary group that the file gets.
    """
    if at.obj.filesystem.reserves_for_groups or (mode | at.info.st_mode) & stat.S_ISGID:
        return at.credentials
    return at.credentials_for_names()


def _mover(old: Request, new: Request, info: linux.Stat) -> linux.Credentials:
    """Return as whom to rename what has this stat: as the caller, without its groups if they play no part.

    They do for a directory that goes to another one, since its own ".." changes.
    """
    is_far = new.obj is not old.obj
    if new.in_thread or (is_far and stat.S_ISDIR(info.st_mode)) or new.obj.filesystem.reserves_for_groups:
        return new.credentials
    credentials = old.credentials_for_names()
    return new.credentials_for_names() if is_far and not credentials.groups else credentials


def _is_sole_writer(at: Request) -> bool:
    """Whether the session loop works for the owner of a directory in which only this user, and root, may change names.

    (The group bits of a directory with an ACL say the most that the ACL grants to any user, acl(5).) Whatever else
    comes in between two system calls is then the doing of those who can do the same to any file in it.
    """
    return (
        not at.in_thread
        and at.who.uid == at.info.st_uid
        and not at.info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and at.obj.filesystem.has_posix_rules
    )


def _is_single(found: Found) -> bool:
    """Whether this is the only name of what is no directory."""
    return found.info.st_nlink == 1 and not stat.S_ISDIR(found.info.st_mode)


def _remove_plain(at: Request, call: _Remove, name: bytes) -> None:
    call(at.credentials_for_names(), at.fd, name)  # a sticky directory is about uids alone


def _remove_exact(at: Request, call: _Remove, name: bytes, seen: int, info: linux.Stat) -> None:
    atomic.remove(at.credentials_for_names(), at.fd, name, seen, info, call)


class NameOperations(Core):
    """LOOKUP, CREATE, MKNOD, MKDIR, SYMLINK, LINK, UNLINK, RMDIR, RENAME."""

    @operation
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Return what `name` leads to. The kernel looks up "." and ".." when it reconnects a file handle."""
        if parent_inode == ROOT and self.views.top:  # `_is_top`, without a call
            return await self._lookup_view(name, ctx)
        if name in (b".", b".."):
            return await self._reconnect(parent_inode, name, ctx)
        for_kernel = self.knfsd and self.reconnection.finish(ctx.pid, parent_inode, name)
        for _ in range(_TRIES):
            try:
                at = await (self._enter_as_kernel(parent_inode) if for_kernel else self._enter(parent_inode, ctx))
                if at.waits:
                    at, found = await self._find_in_thread(at, name, parent_inode, ctx)
                else:
                    found = self.find(at, name)
            except TooSoon as exc:
                await trio.sleep(exc.seconds)
                continue
            except (OSError, FUSEError):
                self.relookup.name_refused(parent_inode, name)
                raise
            if isinstance(found, Missing):
                self.probing.note_lookup(at, name, ctx, is_hidden=found is HIDDEN)
                return self._absent(at, name, found)
            obj, info = found
            if stat.S_ISDIR(info.st_mode):
                viewer = at.viewer if obj.audience >= ALL_VIEWERS else self.cache.viewer_of(obj, at.viewer, at.who)
                if (pending := self.cache.admit(at.number, obj, viewer)) is not None:
                    await pending
                    continue
            return self.replies.named(at, name, obj, info)
        raise TooSoon(0.0)

    async def _find_in_thread(
        self, at: Request, name: bytes, inode: InodeT, ctx: RequestContext
    ) -> tuple[Request, Found | Missing]:
        """Find what the name leads to in a thread, which may wait; return how to go on (`_again`), and that."""
        try:
            at, fd, info = await self._open_in_thread(at, name, inode, ctx)
        except FileNotFoundError:
            return at, ABSENT
        if info is None:
            return at, HIDDEN
        return at, Found(self.nodes.registry.resolve(fd, at.obj, name, info), info)

    def _absent(self, at: Request, name: bytes, missing: Missing) -> EntryAttributes:
        """Return an answer that nothing has that name, with how long the kernel may cache it."""
        counters = self.requests.counters
        counters.errors["lookup", errno.ENOENT] += 1
        unlist(at.obj, name if missing is ABSENT else _NO_NAME)
        if at.who is DAEMON:
            return _ABSENT
        is_hidden = missing is HIDDEN
        seconds = self.cache.negative(at, name, partial(self._handle_of, at, name, missing), is_hidden=is_hidden)
        return _absent_for(seconds) if seconds else _ABSENT

    def _handle_of(self, at: Request, name: bytes, missing: Missing) -> bytes | None:
        """Return the handle of a hidden file; None if whatever becomes of the name is reported.

        For a name that is absent, as much is done with the directory itself, so that it takes as long.
        """
        try:
            fd = self._open_as_root(at, name if missing is HIDDEN else b".")
        except OSError:
            return None
        try:
            is_directory = stat.S_ISDIR(self.nodes.mounts.stat(fd).st_mode)
            handle, _ = self.nodes.mounts.identify(fd, at.obj)
        finally:
            calls.close(fd)
        return None if is_directory else handle  # a directory has no other name

    async def _lookup_view(self, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name in (b".", b".."):
            return self.replies.top()
        if not name.startswith(b"@"):
            raise FUSEError(errno.ENOENT)
        number = await self.views.find(os.fsdecode(name[1:]), ClientId(ctx.uid))
        if number is None:
            if os.fsdecode(name[1:]) in self.views:
                self.relookup.refused(self.nodes.root)
            # The answer is the same whether there is such a view or not.
            raise FUSEError(errno.ENOENT if ctx.uid == 0 else errno.EACCES)
        view = self.views.get(number)
        assert view is not None
        if not self.callers.admits(view, ctx):
            raise FUSEError(errno.EACCES)
        root = self.nodes.root
        if self.nodes.mounts.waits(root):
            await self._prefault(root)
            view = self.views.get(number)
            if view is None:
                raise Stale
        fd = self.nodes.descriptors.fd(root)
        entry = self.replies.attributes(number, view, root, b"", fd, root.filesystem.stat(fd))
        root.lookups += 1
        return entry

    async def _reconnect(self, inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Answer LOOKUP of "." and "..", which the kernel sends to make sense of a file handle.

        It may come with the identity of another caller than the one on whose behalf it is made. It reveals nothing by
        itself: what the caller then does with the object is checked.
        """
        try:
            return await self._connected(inode, name, ctx)
        except Stale:
            self.nodes.registry.drop_if_unused(self.nodes.known_as(inode))  # it was restored in vain
            if not self.callers.is_daemon(ctx, for_attributes=False):
                self.probing.note_stale_handle(inode, ctx)
            raise

    async def _connected(self, inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        obj = self.nodes.get(inode)
        if self.nodes.mounts.waits(obj):
            await self._prefault(obj)
        number, view = await self.callers.view(inode)
        if (
            name == b"."
            and (self.nodes.registry.disconnected or not obj.filesystem.watched)
            and not view.policy_hides
            and not self.nodes.locator.is_in_tree(obj)
            and not self.search.may_find(obj, obj.filesystem.stat(self.nodes.descriptors.fd(obj)))
        ):
            raise Stale
        if name == b"..":
            if obj is self.nodes.root:
                if self.views.top:
                    return self.replies.top()
            else:
                parent = self.nodes.locator.parent_directory(obj)
                if parent is None:
                    raise Stale
                obj = parent
                if self.reconnects_as_others:
                    self.reconnection.begin(ctx.pid, inode, self.nodes.nodeid(number, parent))
        fd = self.nodes.descriptors.fd(obj)
        info = obj.filesystem.stat(fd)
        if info.st_nlink == 0 and not obj.open_files:
            raise Stale
        entry = self.replies.attributes(number, view, obj, obj.name, fd, info)
        obj.lookups += 1
        return entry

    # -- making ------------------------------------------------------------------------------------

    async def _enter_to_make(self, inode: InodeT, name: bytes, mode: int, ctx: RequestContext) -> Request:
        """Let in a request that makes `name`.

        An object that its maker would not be allowed to see is not made at all (EACCES), since its maker could not
        remove it. Nor is one that would not get a number.
        """
        if inode == ROOT and self.views.top:  # `_is_top`, without a call
            raise FUSEError(errno.EROFS)
        at = await self._enter(inode, ctx)
        self.nodes.index.require_room()
        if at.view.policy_hides and at.who is not DAEMON:
            uid, gid = at.who.uid, at.who.gid
            if at.view.lower is not None:
                at, (uid, gid) = await self._maker(at, inode, ctx)
            gid = at.info.st_gid if at.info.st_mode & stat.S_ISGID else gid
            is_seen = is_new_entry_visible(at.view, at.who, name, mode & ~ctx.umask, uid, gid)
            if not is_seen and not await self._do(at, partial(self._exists, name=name)):
                note_not_made(at.view, at.who, name, mode & ~ctx.umask, uid, gid)
                raise FUSEError(errno.EACCES)
        return at

    async def _require_visible_as(self, at: Request, name: bytes, fd: int, info: linux.Stat, *, or_taken: bool) -> None:
        """Refuse to give what `fd` refers to a name under which the caller would not see it.

        This is for policies that go by names. By any other, the caller sees it under each name. With `or_taken`, a name
        that is taken is let through, since the real tree refuses it (EEXIST).

        Raises:
            FUSEError: EACCES, as for what is made (`_enter_to_make`).
        """
        view, who = at.view, at.who
        if not view.policy_hides or view.cloak is not None or who is DAEMON:
            return
        attrs = attrs_of(name, info, fd, who.lacks)
        if view.visible(who.caller, attrs) or (or_taken and await self._do(at, partial(self._exists, name=name))):
            return
        raise FUSEError(errno.EACCES)

    @staticmethod
    def _exists(at: Request, name: bytes) -> bool:
        try:
            calls.statx(at.credentials, at.fd, name)
        except FileNotFoundError:
            return False
        return True

    async def _make_named(
        self, at: Request, name: bytes, inode: InodeT, ctx: RequestContext, call: Callable[[Request], None]
    ) -> EntryAttributes:
        """Make an object as the caller, by a call that returns no descriptor, and answer with what its name leads to.

        Raises:
            FileNotFoundError: it is gone already, or something hidden has taken its place.
        """
        try:
            fd = await self._do(at, partial(self._make_and_open, call=call, name=name))
        except _TAKEN:
            self.probing.note_existing(at, name, ctx)
            raise
        try:
            before, is_new = at, False
            at = await self._again(at, inode, ctx)
            if fd < 0:
                is_new = at.view is before.view and not before.waits and _is_sole_writer(at)
                fd = self._open_named(at, name)
            info = self.nodes.mounts.stat(fd)
            if info.st_uid != at.who.uid:
                at = await self._again_with_answers(at, fd, inode, ctx)
                if not is_entry_visible(at.view, at.who, name, info, fd):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            # So that it can be recognized (`_unmake`).
            own = (
                Descriptor(self.nodes.descriptors.with_descriptor(calls.dup, fd), dev_ino(info), 0)
                if self.exported
                else None
            )
        except BaseException:
            if fd >= 0:
                calls.close(fd)
            raise
        try:
            return self.replies.named(
                at, name, self.nodes.registry.resolve(fd, at.obj, name, info, is_new=is_new), info
            )
        except Unstored:
            if own is not None:
                await self._unmake(at, name, own.fd, info)
            raise

    def _make_and_open(self, at: Request, call: Callable[[Request], None], name: bytes) -> int:
        """Make an object; return a descriptor (O_PATH) of it if only a thread can open it, else -1."""
        call(at)
        if not at.obj.filesystem.remote:
            return -1
        try:
            return self._open_named(at, name)
        except OSError as exc:
            if exc.errno not in _NO_DESCRIPTORS:
                raise
            return -1  # only the session loop can make room, and `call` must not be made twice

    async def _unmake(self, at: Request, name: bytes, fd: int, info: linux.Stat) -> None:
        """Remove again what was just made, to which `fd` refers, because it cannot get a number."""
        call: _Remove = calls.rmdir if stat.S_ISDIR(info.st_mode) else calls.unlink
        try:
            await self._do(at, partial(_remove_exact, call=call, name=name, seen=fd, info=info))
        except OSError as exc:
            log.warning("%r cannot get a number, and cannot be removed again either (%s)", name, exc.strerror)

    def _made_as(
        self, at: Request, name: bytes, fd: int, *, is_there: bool, is_new: bool = False
    ) -> tuple[Object, linux.Stat, EntryAttributes]:
        """Return the object that `fd` (O_PATH) refers to, whatever has its name now, its stat, and the answer.

        Takes ownership of `fd`. `is_there` is for remote directories: whether the name leads to it, as a thread has
        found. `is_new` says that it was just made, and that no other request has been served since.
        """
        info = at.obj.filesystem.stat(fd)
        obj = self.nodes.registry.resolve(fd, at.obj, name, info, is_new=is_new)
        if is_new and at.obj.filesystem.has_posix_rules:
            self.cache.note_absent_xattr(obj, CAPABILITY)
        if at.obj.filesystem.remote:
            leads_there = is_there
        else:
            leads_there = (is_new and _is_sole_writer(at)) or self.nodes.locator.is_at(
                info, at.obj, name, at.credentials
            )
        if leads_there:
            return obj, info, self.replies.named(at, name, obj, info)
        # The name already leads to something else, so the kernel is not to cache it.
        entry = self.replies.attributes(
            at.number, at.view, obj, name, self.nodes.descriptors.fd(obj), info, at.checked_caller
        )
        self.cache.note_viewer(at.number, obj, self.cache.viewer_of(obj, at.viewer, at.who))
        obj.lookups += 1
        return obj, info, entry

    @operation
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        """See mkdir(2); for a hidden name, the real tree answers EEXIST."""
        at = await self._enter_to_make(parent_inode, name, mode, ctx)
        if self.nodes.locator.is_deepest(at.obj):
            raise FUSEError(errno.ENAMETOOLONG)

        def make(at: Request) -> None:
            calls.mkdir(_creator(at, mode), at.fd, name, stat.S_IMODE(mode), ctx.umask)

        return await self._make_named(at, name, parent_inode, ctx, make)

    @operation
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """See mknod(2)."""
        at = await self._enter_to_make(parent_inode, name, mode, ctx)

        def make(at: Request) -> None:
            calls.mknod(_creator(at, mode), at.fd, name, mode, rdev, ctx.umask)

        return await self._make_named(at, name, parent_inode, ctx, make)

    @operation
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        """See symlink(2)."""
        at = await self._enter_to_make(parent_inode, name, stat.S_IFLNK | 0o777, ctx)

        def make(at: Request) -> None:
            calls.symlink(_creator(at, 0), at.fd, name, target)

        return await self._make_named(at, name, parent_inode, ctx, make)

    @operation
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """See open(2) with O_CREAT, for a name that the kernel believes to be absent.

        A hidden file of that name is not touched: the answer is EEXIST with O_EXCL, else EACCES.
        """
        at = await self._enter_to_make(parent_inode, name, mode, ctx)
        self._require_descriptor(at)

        def work(at: Request) -> tuple[int, linux.Credentials | None, bool, int, bool]:
            fd, maker = self._create(at, name, mode, flags, ctx.umask)
            path_fd, is_there = -1, False
            if at.obj.filesystem.remote:
                with contextlib.suppress(OSError):  # as in `_make_named`
                    path_fd = calls.find_again(linux.ROOT, fd)
                    self.nodes.prefaulter.fetch_attributes(at.credentials, path_fd)
                    is_there = atomic.leads_to(at.credentials, at.fd, name, calls.fstat(path_fd))
            # While a thread makes it, other requests may find it.
            return fd, None if at.in_thread else maker, maker is None, path_fd, is_there

        # Another request may just have given such a file this name.
        at = self._beside_clients(at, known_entry(at.obj, name)) if self.passthrough.passing else at
        try:
            fd, maker, is_old, path_fd, is_there = await self._do(at, work)
        except _TAKEN:
            self.probing.note_existing(at, name, ctx)
            raise
        try:
            view = at.view
            at = await self._again(at, parent_inode, ctx)
            is_new = maker is not None and at.view is view  # otherwise, others may have found it meanwhile
            if path_fd < 0:
                credentials = linux.ANY_CREDENTIALS if at.obj.filesystem.has_posix_rules else linux.ROOT
                path_fd = self.nodes.descriptors.with_descriptor(calls.find_again, credentials, fd)
            taken, path_fd = path_fd, -1
            try:
                obj, info, entry = self._made_as(at, name, taken, is_there=is_there, is_new=is_new)
            except Unstored:
                if not is_old:
                    await self._unmake(at, name, fd, calls.fstat(fd))
                raise
            if is_old and flags & os.O_TRUNC:
                # It lost its set-id bits. Others may know it by other names, and the kernel holds the directory's lock.
                await self.cache.changed(at.number, at.view, obj, emptied_in=at.obj)
        except BaseException:
            calls.close(fd)
            if path_fd >= 0:
                calls.close(path_fd)
            raise
        opener = maker if is_new and not self.ganesha else None  # Ganesha's right to use it is checked again and again
        of_file = Request(at.number, at.view, at.who, obj, fd, info, at.viewer)
        # Of what is made and not appended to, most is small, and written at once.
        may_begin = bool(flags & os.O_APPEND) and self.requests.trace is None
        backing = self.passthrough.open(of_file, fd, flags, may_begin=may_begin) if may_begin or not is_new else 0
        fh = self.files.opened(fd, of_file, as_opener=True, opener=opener, flags=flags)
        entry.attr_timeout = 0 if backing else entry.attr_timeout  # as in `Replies`
        opened = FileInfo(fh=fh, keep_cache=False)
        return with_backing(opened, backing) if backing else opened, entry

    def _create(
        self, at: Request, name: bytes, mode: int, flags: int, umask: int
    ) -> tuple[int, linux.Credentials | None]:
        """Return a descriptor of the file with that name, and as whom it was made here, if so."""
        how, credentials = reopen_flags(flags), _creator(at, mode)
        try:
            fd = self.nodes.descriptors.with_descriptor(
                calls.create, credentials, at.fd, name, how, stat.S_IMODE(mode), umask
            )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # It was made behind the kernel's back, or it is hidden.
            if self._is_hidden(at, name):
                raise FUSEError(errno.EACCES) from None
            path_fd = self._open_named(at, name)
            info = self.finder.check(at, name, path_fd)
            if info is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
            try:
                if not stat.S_ISREG(info.st_mode):
                    # Opening a FIFO would make all callers wait; on this error, the kernel looks the name up again.
                    raise Stale from None
                return self.nodes.descriptors.with_descriptor(open_again, at.credentials, path_fd, flags), None
            finally:
                calls.close(path_fd)
        else:
            return fd, credentials

    @operation
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """See link(2); EXDEV from one view into another."""
        if self._is_top(new_parent_inode):
            raise FUSEError(errno.EROFS)
        if self.nodes.view_of(inode) != self.nodes.view_of(new_parent_inode):
            raise FUSEError(errno.EXDEV)
        await self._enter(inode, ctx)
        at = await self._enter(new_parent_inode, ctx)
        obj = self.nodes.get(inode)
        source = self.nodes.descriptors.with_descriptor(calls.dup, self.nodes.descriptors.fd(obj))
        try:
            await self._require_visible_as(at, new_name, source, obj.filesystem.stat(source), or_taken=True)
            at = await self._again(at, new_parent_inode, ctx)
        except BaseException:
            calls.close(source)
            raise

        def work(at: Request) -> bool:
            calls.link(at.credentials, source, at.fd, new_name)
            if not at.obj.filesystem.remote:
                return False
            with contextlib.suppress(OSError):  # the link has been made
                self.nodes.prefaulter.fetch_attributes(at.credentials, source)
                return atomic.leads_to(at.credentials, at.fd, new_name, calls.fstat(source))
            return False

        if self.passthrough.passing:
            at = self._beside_clients(at, obj)
        try:
            is_there = await self._do(at, work)
        except _TAKEN:
            self.probing.note_existing(at, new_name, ctx)
            raise
        finally:
            calls.close(source)
            self.cache.complete_directories.invalidate(at.obj)
        self.cache.linked(obj)
        at = await self._again(at, new_parent_inode, ctx)
        again = self.nodes.descriptors.with_descriptor(calls.dup, self.nodes.descriptors.fd(obj))
        _, _, entry = self._made_as(at, new_name, again, is_there=is_there)
        return entry

    # -- removing ----------------------------------------------------------------------------------

    async def _remove(self, call: _Remove, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        if inode == ROOT and self.views.top:
            raise FUSEError(errno.EROFS)
        at = await self._enter(inode, ctx)
        if self.passthrough.passing:
            at = self._beside_clients(at, known_entry(at.obj, name))
        if not at.view.policy_hides or at.who is DAEMON:
            await self._do(at, partial(_remove_plain, call=call, name=name))
            await self.cache.removed(at.number, [(at.obj, name)])
            return
        at_once = self._remove_at_once(at, name, call)
        if at_once is not None:
            others = at_once if at_once.cached_in - {at.number} else None  # in its own view, the kernel knows
            await self.cache.removed(at.number, [(at.obj, name)], others)
            return
        for _ in range(atomic.TRIES):
            at, seen, info = await self._open_visible(at, name, inode, ctx)
            if self.passthrough.passing:
                at = self._beside_clients(at, known_entry(at.obj, name))
            try:
                await self._do(at, partial(_remove_exact, call=call, name=name, seen=seen.fd, info=info))
            except atomic.Elsewhere:
                at = await self._again(at, inode, ctx)
            else:
                removed = self.nodes.descriptors.at_place(at.obj, name, info) or self.nodes.registry.known(
                    seen.fd, at.obj
                )
                await self.cache.removed(at.number, [(at.obj, name)], removed)
                return
        raise Stale

    def _beside_clients(self, at: Request, *objects: Object | None) -> Request:
        """Return the same request, which holds if it is about to take the locks of these objects (`Request.holds`).

        The kernel may hold that of a file that passes while it copies what a client reads: xfs does so, and ext4 with
        O_DIRECT. Unlike a client that writes, one that reads has no lock in the mount, by which others would wait
        before they send a request.
        """
        holds = any(obj in self.passthrough.passing for obj in objects)
        return replace(at, waits=True, holds=True) if holds else at

    def _remove_at_once(self, at: Request, name: bytes, call: _Remove) -> Object | None:
        """Remove a name in a directory that the caller alone may change; return what it led to.

        The name is what it was a moment before, so that nothing need be moved aside (`atomic`). None: it is not such a
        case.
        """
        if at.waits or not _is_sole_writer(at):
            return None
        found = self.find(at, name)
        if isinstance(found, Missing):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.nodes.registry.drop_if_unused(found.obj)  # the kernel may not know it (yet)
        if not (stat.S_ISDIR(found.info.st_mode) if call is calls.rmdir else _is_single(found)):
            return None
        at.obj.filesystem.timed(call, at.credentials_for_names(), at.fd, name)
        return found.obj

    @operation
    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        """See unlink(2); ENOENT for a hidden name."""
        await self._remove(calls.unlink, parent_inode, name, ctx)

    @operation
    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        """See rmdir(2); ENOENT for a hidden name, ENOTEMPTY where only hidden entries are left."""
        await self._remove(calls.rmdir, parent_inode, name, ctx)

    @operation
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """See renameat2(2).

        A hidden source is ENOENT; a hidden target is EEXIST with RENAME_NOREPLACE, ENOENT with RENAME_EXCHANGE,
        else EACCES. A rename from one view into another is EXDEV.
        """
        self._require_one_view(parent_inode_old, parent_inode_new)
        if flags & ~(linux.RENAME_NOREPLACE | linux.RENAME_EXCHANGE):
            raise FUSEError(errno.EINVAL)
        old = new = await self._enter(parent_inode_old, ctx)
        if parent_inode_old != parent_inode_new:
            new = await self._enter(parent_inode_new, ctx)
            old = self._at(new, self.nodes.get(parent_inode_old))
        if self.passthrough.passing:
            new = self._beside_clients(new, known_entry(old.obj, name_old), known_entry(new.obj, name_new))
        if parent_inode_old == parent_inode_new and await self._rename_at_once(new, name_old, name_new, flags):
            return
        old_obj = old.obj
        if new.obj is not old_obj and self.nodes.locator.is_deepest(new.obj):
            moved = known_entry(old_obj, name_old)
            if moved is None or isinstance(moved, Directory):
                raise FUSEError(errno.ENAMETOOLONG)
        with contextlib.ExitStack() as stack:
            stack.callback(self.cache.complete_directories.invalidate, new.obj)
            stack.callback(self.cache.complete_directories.invalidate, old_obj)
            removed = None
            if not new.view.policy_hides or new.who is DAEMON:
                await self._do(new, partial(self._rename, old, name_old, name_new=name_new, flags=flags))
            else:
                inodes = parent_inode_old, parent_inode_new
                new, replaced = await self._rename_visible(old, name_old, new, name_new, flags, inodes, ctx)
                if replaced is not None:
                    stack.callback(calls.close, replaced)
                    removed = self.nodes.registry.known(replaced, new.obj)
            await self.cache.removed(new.number, [(old_obj, name_old), (new.obj, name_new)], removed)
        new = await self._again(new, parent_inode_new, ctx)
        await self._moved(old_obj, new, name_new)
        if flags & linux.RENAME_EXCHANGE:
            await self._moved(new.obj, self._at(new, old_obj), name_old)

    def _require_one_view(self, old: InodeT, new: InodeT) -> None:
        if ROOT in (old, new) and self.views.top:
            raise FUSEError(errno.EROFS)
        if (old ^ new) >> OBJECT_BITS:  # they are of two views
            raise FUSEError(errno.EXDEV)

    async def _rename_visible(
        self,
        old: Request,
        name_old: bytes,
        new: Request,
        name_new: bytes,
        flags: int,
        inodes: tuple[InodeT, InodeT],
        ctx: RequestContext,
    ) -> tuple[Request, int | None]:
        """Rename what the caller sees, and onto what it sees.

        Returns:
            how to go on in the new directory (`_again`), and a descriptor (O_PATH) of what was replaced, if anything.
        """
        for _ in range(atomic.TRIES):
            old, seen, info = await self._open_visible(old, name_old, inodes[0], ctx)
            new = await self._again(new, inodes[1], ctx)
            is_refused = bool(flags & linux.RENAME_NOREPLACE)
            await self._require_visible_as(new, name_new, seen.fd, info, or_taken=is_refused)
            new = await self._again(new, inodes[1], ctx)
            if self.passthrough.passing:
                new = self._beside_clients(new, known_entry(old.obj, name_old), known_entry(new.obj, name_new))
            rename = partial(self._rename_exact, old, name_old, seen, info, name_new=name_new, flags=flags)
            try:
                return new, await self._do(new, rename)
            except atomic.Elsewhere:
                old = await self._again(old, inodes[0], ctx)
            except _TAKEN:
                self.probing.note_existing(new, name_new, ctx)
                raise
        raise Stale

    async def _rename_at_once(self, at: Request, name_old: bytes, name_new: bytes, flags: int) -> bool:
        """Rename within a directory that the caller alone may change; return False if this is not such a case.

        The names are what they were a moment before, so that nothing need be moved aside (`atomic`).
        """
        directory = at.obj
        if at.waits or at.who is DAEMON or at.view.cloak is None or not at.view.policy_hides:
            return False
        if flags & linux.RENAME_EXCHANGE or name_old == name_new or not _is_sole_writer(at):
            return False
        found = self.find(at, name_old)
        if isinstance(found, Missing):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        replaced = None
        try:
            # A hidden name may take longer here than an absent one, since the answer says that it is taken.
            if directory.filesystem.timed(calls.statx_if_there, at.credentials_for(os.X_OK), at.fd, name_new) is None:
                if not (_is_single(found) or stat.S_ISDIR(found.info.st_mode)):
                    return False
            else:
                target = self.find(at, name_new)
                if isinstance(target, Missing) or flags:
                    return False
                replaced = target.obj
                if not (_is_single(found) and _is_single(target)):
                    return False
            credentials = _mover(at, at, found.info)
            directory.filesystem.timed(calls.rename, credentials, at.fd, name_old, at.fd, name_new, flags)
            await self.cache.removed(at.number, [(directory, name_old), (directory, name_new)], replaced)
            self.nodes.registry.move(found.obj, directory, name_new)
            await self.cache.moved(at.number, at.view, found.obj, directory, directory)
        finally:
            self.cache.complete_directories.invalidate(directory)
            self.nodes.registry.drop_if_unused(found.obj)  # the kernel may not know it (yet)
            self.nodes.registry.drop_if_unused(replaced)
        return True

    def _at(self, at: Request, obj: Object) -> Request:
        """Return the same request, about another object of the view to which the caller was let in as well."""
        fd = self.nodes.descriptors.fd(obj)
        info, waits = obj.filesystem.stat(fd), self.nodes.mounts.waits(obj)
        return replace(at, obj=obj, fd=fd, info=info, has_acl=None, pin=obj.descriptor, waits=waits)

    @staticmethod
    def _rename(old: Request, name_old: bytes, new: Request, *, name_new: bytes, flags: int) -> None:
        calls.rename(new.credentials, old.fd, name_old, new.fd, name_new, flags)

    def _rename_exact(
        self,
        old: Request,
        name_old: bytes,
        seen: Descriptor,
        info: linux.Stat,
        new: Request,
        *,
        name_new: bytes,
        flags: int,
    ) -> int | None:
        """Rename `seen`, replacing nothing but what the caller sees; return a descriptor (O_PATH) of what was replaced.

        Raises:
            atomic.Elsewhere: a name leads to something else by now, and nothing was renamed.
        """
        if not flags:
            open_target = partial(self._open_target, new, name_new, errno.EACCES)
            return atomic.rename(_mover(old, new, info), old.fd, name_old, new.fd, name_new, seen.fd, open_target)
        if not atomic.leads_to(new.credentials, old.fd, name_old, info):
            raise atomic.Elsewhere
        there = self._open_target(new, name_new, errno.EEXIST if flags & linux.RENAME_NOREPLACE else errno.ENOENT)
        if there is None and flags & linux.RENAME_NOREPLACE:
            self._rename(old, name_old, new, name_new=name_new, flags=flags)
            return None
        # As the caller, who may not be allowed to search the directory.
        atomic.leads_to(new.credentials, new.fd, name_new, info)
        if there is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            if flags & linux.RENAME_NOREPLACE:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            atomic.exchange(new.credentials, old.fd, name_old, new.fd, name_new, seen.fd, there)
        finally:
            calls.close(there)
        return None

    def _open_target(self, at: Request, name: bytes, if_hidden: int) -> int | None:
        """Open (O_PATH) the entry `name`, if the caller may know of it; None if there is no such entry.

        Raises:
            FUSEError: `if_hidden`: the entry is hidden.
        """
        try:
            # In a lower mount, something may be hidden from the caller. (Elsewhere, to do this as the daemon would cost
            # a switch, and an exception would take longer.)
            if not at.obj.filesystem.remote and calls.statx_if_there(at.credentials_for(os.X_OK), at.fd, name) is None:
                return None
            fd = self._open_as_root(at, name)
        except FileNotFoundError:
            return None
        try:
            if not is_entry_visible(at.view, at.who, name, self.nodes.mounts.stat(fd), fd):
                raise FUSEError(if_hidden)
        except BaseException:
            calls.close(fd)
            raise
        return fd

    def _open_as_root(self, at: Request, name: bytes) -> int:
        return self.finder.open(linux.ROOT, at.fd, name)

    async def _moved(self, before: Object, to: Request, name: bytes) -> None:
        try:
            obj = None
            if not to.waits:
                with contextlib.suppress(PermissionError):  # it was just withdrawn
                    obj = self.nodes.registry.moved_at_once(to.credentials_for(os.X_OK), to.obj, name)
            if obj is None:
                fd = await self._do(to, partial(self._open_as_root, name=name))
                obj = self.nodes.registry.moved(fd, to.obj, name)
        except OSError:
            return  # it is somewhere else already, and is searched for at the next request about it
        if obj is not None:
            await self.cache.moved(to.number, to.view, obj, before, to.obj)
