"""Operations on extended attributes; ids inside POSIX ACLs are mapped."""

import errno
import os
import stat
from collections.abc import Sequence
from functools import partial

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

_OPEN_TO_ALL = frozenset({b"security.capability", *acl.XATTRS})
"""What may be read without any permission (xattr(7)), and what the kernel asks for by itself all the time: the former
before every write, ACLs before it checks a permission."""


def _get(at: Entered, name: bytes) -> bytes:
    if name not in _OPEN_TO_ALL:
        return calls.getxattr(at.credentials, at.fd, name)
    # To switch to the caller would take longer than the call; only other machines and processes care who asks.
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
            at = await self._enter_object(inode, ctx)
            value = await self._do(at, partial(_get, name=name))
        except OSError as exc:
            if exc.errno != errno.EOPNOTSUPP or name not in acl.XATTRS:
                raise
            # The kernel's check of a permission must not fail on a tree without ACLs.
            raise FUSEError(errno.ENODATA if self.enable_acl else errno.EOPNOTSUPP) from None
        if name not in acl.XATTRS:
            return value
        return (await self._again(at, inode, ctx)).view.acl_out(value)

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
        await self._do(at, lambda at: calls.setxattr(at.credentials, at.fd, name, value))
        await self._changed(at)

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
        await self._do(at, lambda at: calls.removexattr(at.credentials, at.fd, name))
        await self._changed(at)

    async def _changed(self, at: Entered) -> None:
        """Note that attributes have changed: an ACL changes the mode, too."""
        self.cache.forget_attributes(at.obj)
        await self.cache.changed(at.number, at.view, at.obj)
