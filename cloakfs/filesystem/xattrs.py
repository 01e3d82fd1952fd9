"""Operations on extended attributes; ids inside POSIX ACLs are mapped."""

import errno
import os
import stat
from collections.abc import Sequence

from pyfuse3 import FUSEError, InodeT, RequestContext, XAttrNameT

from .. import acl, linux
from ..above import QUESTION
from ..linux import process
from ..policy import Attrs
from ..tree import calls
from ..tree.objects import Stale
from .core import Core
from .entered import Entered
from .request import answers

_CAPABILITY = b"security.capability"


def _get(at: Entered, name: bytes) -> bytes:
    if name not in acl.XATTRS:
        return calls.getxattr(at.credentials, at.fd, name)
    # Everybody may read an ACL (xattr(7)), and the kernel asks for it before it checks a permission. To switch to the
    # caller would take longer than the call; only other machines and processes care who asks.
    who = linux.ANYBODY if at.obj.filesystem.has_posix_rules else at.credentials
    return calls.peek_xattr(who, at.fd, name)


class ExtendedAttributes(Core):
    """GETXATTR, SETXATTR, LISTXATTR, REMOVEXATTR."""

    async def _enter_object(self, inode: InodeT, ctx: RequestContext) -> Entered:
        if not self.xattrs:
            raise FUSEError(errno.ENOSYS)  # the kernel is not to ask again
        self._require_server(ctx)
        if self._is_top(inode):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return await self._enter(inode, ctx)

    def _require_server(self, ctx: RequestContext) -> None:
        """Refuse local users in a mount that is for a server alone.

        The kernel does so for all other requests (`mountpoint.attach`), but not for `security.` names and ACLs of what
        can be reached without a search: the root of the mount. A process in a pid namespace that is not below the
        daemon's has pid 0 here; it is a thread of the kernel's server, when the daemon runs in a container.
        """
        if not self.exported or not ctx.pid or ctx.pid in self.inside.threads:
            return
        if not process.has_only_root_ids(ctx.pid):
            raise FUSEError(errno.EACCES)

    @answers
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """See getxattr(2)."""
        if name == os.fsencode(QUESTION):
            return await self._answer_above(inode, ctx)
        try:
            if name == _CAPABILITY:
                return await self._capability(inode, ctx)
            at = await self._enter_object(inode, ctx)
            value = await self._do(at, _get, name)
        except OSError as exc:
            if exc.errno != errno.EOPNOTSUPP or name not in acl.XATTRS:
                raise
            # The kernel's check of a permission must not fail on a tree without ACLs.
            raise FUSEError(errno.ENODATA if self.enable_acl else errno.EOPNOTSUPP) from None
        if name not in acl.XATTRS:
            return value
        return (await self._again(at, inode, ctx)).view.acl_out(value)

    async def _capability(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """Return what the kernel asks for before every write; everybody may know it.

        Mostly there is none, and no system call is needed to know that.
        """
        if self._surely_has_none(inode, ctx):
            raise FUSEError(errno.ENODATA)
        return await self._do(await self._enter_object(inode, ctx), self._read_capability)

    def _surely_has_none(self, inode: InodeT, ctx: RequestContext) -> bool:
        """Whether the object has no `security.capability`, and its attributes are remembered for who asks.

        Both hold as long as no change is reported: the kernel itself would answer, if it remembered this as it does
        the attributes.
        """
        obj = self.nodes.known_as(inode)
        if obj is None or not self.cache.has_no_capability(obj):
            return False
        if not self.xattrs or self.exported or self._is_top(inode):
            return False
        served = self.callers.served_at_once(inode, ctx, for_attributes=True)
        if served is None:
            return False
        number, view, who = served
        hearer = self.callers.hearer(view, who, ctx)
        self.cache.tell(number, obj, hearer)
        return self.cache.is_known_to(number, obj, hearer)

    def _read_capability(self, at: Entered) -> bytes:
        # Reading it needs no permission (xattr(7)) where nobody but this machine's kernel is asked.
        plain = at.obj.filesystem.has_posix_rules
        try:
            return calls.peek_xattr(linux.ANYBODY if plain else at.credentials, at.fd, _CAPABILITY)
        except OSError as exc:
            # By the time that a thread has the answer, a change may have been reported.
            if exc.errno == errno.ENODATA and plain and linux.in_main_thread():
                self.cache.note_no_capability(at.obj)
            raise

    async def _answer_above(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """Answer what a mount above asks as a caller; see `above.QUESTION`."""
        self._require_server(ctx)
        if self._is_top(inode):
            return b"0 0"  # everybody may know of it, and nobody may make anything in it
        at = await self._enter(inode, ctx)
        at, (uid, gid) = await self._maker(at, inode, ctx)
        shown = at.view.show(Attrs("", stat.S_IFREG, uid, gid))
        if shown is None:
            raise Stale
        return b"%d %d" % shown[1:3]

    @answers
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
            self._may_have_capability(at)
        await self._changed(at)

    def _may_have_capability(self, at: Entered) -> None:
        for obj in (at.obj, *self.nodes.twins(at.obj)):
            self.cache.forget_no_capability(obj)

    @answers
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """See listxattr(2)."""
        at = await self._enter_object(inode, ctx)
        names = await self._do(at, lambda at: calls.listxattr(at.credentials, at.fd))
        return [XAttrNameT(os.fsencode(name)) for name in names]

    @answers
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        """See removexattr(2)."""
        at = await self._enter_object(inode, ctx)
        try:
            await self._do(at, lambda at: calls.removexattr(at.credentials, at.fd, name))
        except PermissionError:
            # The kernel also asks for this before a write, as whoever writes, who need not be privileged. The real file
            # system removes it then in any case. (The kernel lets only the privileged call removexattr(2) for it.)
            if name != _CAPABILITY or (ctx.uid == 0 and not self.files.has_open(at.who, at.obj)):
                raise
            return
        await self._changed(at)

    async def _changed(self, at: Entered) -> None:
        """Note that attributes have changed: an ACL changes the mode, too."""
        self.cache.forget_attributes(at.obj)
        await self.cache.changed(at.number, at.view, at.obj)
