"""Operations on extended attributes; ids inside POSIX ACLs are mapped."""

import errno
import os
import stat
from collections.abc import Sequence

from pyfuse3 import FUSEError, InodeT, RequestContext, XAttrNameT

from .. import acl, linux
from ..linux import process
from ..policy import Attrs
from ..stacking.upper import QUERY_XATTR
from ..tree import calls
from ..tree.objects import ALL_VIEWERS, Object, Stale
from ..tree.request import Request
from .core import Core
from .operation import operation

CAPABILITY = b"security.capability"
_LABEL = b"security.selinux"
_QUERY = os.fsencode(QUERY_XATTR)

_OFTEN_READ = frozenset({CAPABILITY, _LABEL, *acl.XATTRS})
"""What the kernel reads before every write, and ls(1) and smbd(8) of every file; mostly, there is none."""

_READ_BY_SAMBA = b"user.DOSATTRIB"
"""What smbd(8) reads of every file that it lists. Unlike the others, it takes the right to read the file."""

_ALL_NAMES, _PLAIN_NAMES = b"", b"*"
"""No names of attributes: they stand for all of an object's, and for all but those that only root may list."""


class XattrOperations(Core):
    """GETXATTR, SETXATTR, LISTXATTR, REMOVEXATTR."""

    async def _enter_object(self, inode: InodeT, ctx: RequestContext, name: bytes = b"") -> Request:
        if not self.xattrs:
            raise FUSEError(errno.ENOSYS)  # after this, the kernel sends no more such requests
        self._require_server(ctx)
        if self._is_top(inode):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if name == CAPABILITY:  # the kernel reads it, and removes it, before a write
            return await self._enter_by_open_file(inode, ctx, or_open=not self.ganesha)
        return await self._enter(inode, ctx)

    def _require_server(self, ctx: RequestContext) -> None:
        """Refuse local users in a mount that is for a server alone.

        The kernel does so for all other requests (`fuse.attach`), but not for `security.` names and ACLs of what
        can be reached without a search: the root of the mount. A process in a pid namespace that is not below the
        daemon's has pid 0 here; it is a thread of the kernel's server, when the daemon runs in a container.
        """
        if not self.exported or not ctx.pid or ctx.pid in self.self_probe.threads:
            return
        if not process.has_only_root_ids(ctx.pid):
            raise FUSEError(errno.EACCES)

    @operation
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """See getxattr(2)."""
        if name == _QUERY:
            return await self._answer_query(inode, ctx)
        if self.knfsd:
            self.expired_names.used_by_handle(inode)
        if name in _OFTEN_READ and self._is_known_to_lack(inode, ctx, name):
            raise FUSEError(_has_none(name))
        if name == _READ_BY_SAMBA and self._is_known_to_have_none(inode, ctx, name):
            raise FUSEError(errno.ENODATA)
        try:
            at = await self._enter_object(inode, ctx, name)
            if name in acl.XATTRS:
                return await self._get_acl(at, inode, name, ctx)
            return await self._do(at, self._get, name)
        except OSError as exc:
            # The kernel's check of a permission must not fail where there are no ACLs.
            is_check = self.enable_acl and name in acl.XATTRS
            if exc.errno == errno.ENODATA or (exc.errno == errno.EOPNOTSUPP and is_check):
                raise FUSEError(_has_none(name)) from None
            raise

    async def _get_acl(self, at: Request, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        waits, value, absent = at.waits, b"", None
        try:
            value = await self._do(at, self._get, name)
        except OSError as exc:
            if exc.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
            absent = exc
        at, view = await self._again(at, inode, ctx), at.view
        may_have_changed = (waits or at.view is not view) and at.obj.filesystem.watched
        is_alike = at.checked_caller is None or absent is not None or at.view.shows_acl_alike(value)
        self.cache.acl(at, may_be_cached=is_alike and not may_have_changed)
        if absent is not None:
            raise absent
        return at.view.acl_out(value, at.checked_caller)

    def _is_known_to_lack(self, inode: InodeT, ctx: RequestContext, name: bytes = _PLAIN_NAMES) -> bool:
        """Whether the object has no attribute of this name, and its attributes are cached for this caller.

        Without a name, whether it has none that the caller may list. Both hold as long as no change is reported: the
        kernel itself would answer, if it cached this as it does the attributes. So no system call is needed to know it.
        """
        obj = self.nodes.known_as(inode)
        if obj is None or not self.cache.lacks_xattr(obj, name) or not self.xattrs or self._is_top(inode):
            return False
        if self.knfsd and obj is self.nodes.root and name in _OFTEN_READ:
            return self._is_top_known_to_lack(inode, obj, ctx, name)
        if self.exported and (name != CAPABILITY or not self.knfsd):
            return False
        # `KernelCache.acl` decides what the kernel keeps of ACLs.
        return not (self.enable_acl and name in acl.XATTRS) and self._may_answer_at_once(inode, obj, ctx, name)

    def _is_top_known_to_lack(self, inode: InodeT, obj: Object, ctx: RequestContext, name: bytes) -> bool:
        """Whether the root of an export has no such attribute, also if it was set just now behind the mount.

        From Linux 6.2 on, the kernel does not keep the ACL of a mount's root, and asks for it at each request of a
        client (subtree_check). A client keeps the answer for as long as the ctime is the same.
        """
        self._require_server(ctx)
        return (
            self.visibility.access_paths.is_up_to_date()  # first: a change that it handles may have set the attribute
            and self.cache.lacks_xattr(obj, name)
            and self.cache.is_known_to(self.nodes.view_of(inode), obj)
        )

    def _may_answer_at_once(self, inode: InodeT, obj: Object, ctx: RequestContext, name: bytes) -> bool:
        """Whether the attributes of the object are cached for this caller, who may list so much, or read this one."""
        if self.knfsd:
            self.reconnection.end(ctx.pid)
        served = self.callers.served_at_once(inode, ctx, for_attributes=True)
        if served is None:
            return False
        number, _, who, viewer = served
        if name == _PLAIN_NAMES and who.uid == 0 and not self.cache.lacks_xattr(obj, _ALL_NAMES):
            return False
        if name == _READ_BY_SAMBA:
            info = obj.filesystem.stat(self.nodes.descriptors.fd(obj))
            if who.uid != info.st_uid or not info.st_mode & stat.S_IRUSR:
                return False  # this takes more than a look at its mode
        viewer = self.cache.viewer_of(obj, viewer, who)
        if self.cache.subtree_check and obj.audience not in (viewer, ALL_VIEWERS):
            return False
        return self.cache.note_viewer(number, obj, viewer) is None and self.cache.is_known_to(number, obj, viewer)

    def _get(self, at: Request, name: bytes) -> bytes:
        if name not in acl.XATTRS and not name.startswith(b"security."):
            try:
                return calls.getxattr(at.credentials, at.fd, name)
            except OSError as exc:
                if name == _READ_BY_SAMBA:
                    self._note_absent(at, name, exc)
                raise
        # All callers may read these (xattr(7)). To switch to the caller would take longer than the call; only other
        # machines and processes depend on the caller.
        plain = at.obj.filesystem.has_posix_rules
        try:
            return calls.peek_xattr(linux.ANY_CREDENTIALS if plain else at.credentials, at.fd, name)
        except OSError as exc:
            if name in _OFTEN_READ:
                self._note_absent(at, name, exc)
            raise

    def _note_absent(self, at: Request, name: bytes, exc: OSError) -> None:
        # By the time that a thread has the answer, a change may have been reported.
        if exc.errno == errno.ENODATA and at.obj.filesystem.has_posix_rules and not at.in_thread:
            self.cache.note_absent_xattr(at.obj, name)

    async def _answer_query(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """Answer an upper daemon's query for one of its callers (`upper.QUERY_XATTR`)."""
        self._require_server(ctx)
        if self._is_top(inode):
            return b"0 0"  # all callers may know of it, and none may make anything in it
        at = await self._enter(inode, ctx)
        at, (uid, gid) = await self._maker(at, inode, ctx)
        shown = at.view.show(Attrs("", stat.S_IFREG, uid, gid))
        if shown is None:
            raise Stale
        return b"%d %d" % shown[1:3]

    @operation
    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        """See setxattr(2); an ACL entry that cannot be mapped is EINVAL."""
        at = await self._enter_object(inode, ctx)
        if name in acl.XATTRS:
            try:
                value = at.view.acl_in(value)
            except ValueError:
                raise FUSEError(errno.EINVAL) from None
        try:
            await self._do(at, lambda at: calls.setxattr(at.credentials, at.fd, name, value))
        finally:
            for obj in (at.obj, *self.nodes.registry.twins(at.obj)):
                self.cache.clear_absent_xattrs(obj)
        await self._changed(at)

    @operation
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """See listxattr(2)."""
        if self._is_known_to_have_none(inode, ctx):
            return []
        at = await self._enter_object(inode, ctx)
        names = await self._do(at, self._list)
        return [XAttrNameT(os.fsencode(name)) for name in names]

    def _is_known_to_have_none(self, inode: InodeT, ctx: RequestContext, name: bytes = _PLAIN_NAMES) -> bool:
        """As `_is_known_to_lack`, also if one was set just now behind the mount.

        Unlike what the kernel asks for by itself, programs such as `cp -a` would miss it.
        """
        obj = self.nodes.known_as(inode)
        if obj is None or not self.cache.lacks_xattr(obj, name):
            return False
        return self.visibility.access_paths.is_up_to_date() and self._is_known_to_lack(inode, ctx, name)

    def _list(self, at: Request) -> Sequence[str]:
        names = calls.listxattr(at.credentials, at.fd)
        # As for `_get`.
        if not names and at.obj.filesystem.has_posix_rules and not at.in_thread:
            self.cache.note_absent_xattr(at.obj, _PLAIN_NAMES)
            if calls.lists_all_xattrs(at.credentials):
                self.cache.note_absent_xattr(at.obj, _ALL_NAMES)
        return names

    @operation
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        """See removexattr(2)."""
        at = await self._enter_object(inode, ctx, name)
        try:
            await self._do(at, lambda at: calls.removexattr(at.credentials, at.fd, name))
        except PermissionError:
            # The kernel also sends this before a write, as the writer, who need not be privileged. The real file
            # system removes it then in any case. (The kernel lets only the privileged call removexattr(2) for it.)
            if name != CAPABILITY:
                raise
            if ctx.uid == 0 and not (self.files.has_open(at.who, at.obj) or self._works_on_open_file(inode, ctx)):
                raise
            return
        await self._changed(at)

    async def _changed(self, at: Request) -> None:
        """Note that attributes have changed: an ACL changes the mode, too."""
        self.cache.invalidate(at.obj)
        await self.cache.changed(at.number, at.view, at.obj)


def _has_none(name: bytes) -> int:
    """Return the error that says that an object has no attribute of this name.

    Where SELinux runs, it answers requests for a label itself. ls(1) sends one for each file all the same, unless the
    file system has once answered that it has no labels.
    """
    return errno.EOPNOTSUPP if name == _LABEL else errno.ENODATA
