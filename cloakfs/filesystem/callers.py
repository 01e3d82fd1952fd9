"""The caller of a request: its view, and the identity as which it is served."""

import errno
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from pyfuse3 import FUSEError, InodeT, RequestContext

from ..accounts.groups import GroupSource
from ..accounts.threadstatus import ThreadStatus
from ..exportmode import ExportMode
from ..identity import Caller, ClientCaller, ClientId
from ..linux import CAP_SETUID
from ..stacking.upper import UPPER, UpperDaemons
from ..tree.actor import DAEMON, Actor, RootActor, actor, with_group
from ..tree.nodes import OBJECT_BITS, Nodes
from ..tree.notes import noting
from ..tree.objects import ALL_VIEWERS, NO_VIEWER, Stale, Viewer
from ..tree.views import Views
from ..view import KernelCheckedCaller, View
from .selfprobe import SelfProbe

Served = tuple[int, View, Actor, Viewer]
"""As whom a request is served: the number of the view, the view, who it is, and who learns the answer (`viewer`)."""

# Returns the ids of a request. (The function is typed as a whole, because wrapping each id would cost a call.)
_client_ids: Callable[[RequestContext], tuple[ClientId, ClientId]] = attrgetter("uid", "gid")
_viewer_of: Callable[[RequestContext], Viewer] = attrgetter("uid")


class Callers:
    """Determines as whom the requests of one mount are served.

    Args:
        nodes: knows the view of a nodeid.
        views: the views that the mount offers.
        groups: where callers' supplementary groups come from.
        probe: knows the daemon's own threads.
        upper: knows the daemons of upper mounts.
        threads: knows what callers may do as root; None if a server exports the mount: then all that root may do.
        mode: how the mount is exported.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        groups: GroupSource,
        probe: SelfProbe,
        upper: UpperDaemons,
        threads: ThreadStatus | None,
        mode: ExportMode,
    ) -> None:
        self._nodes = nodes
        self._views = views
        self._groups = groups
        self._probe = probe
        self._upper = upper
        self._threads = threads
        self._knfsd = mode.knfsd
        self._all_squash = mode.all_squash

    async def view(self, inode: InodeT) -> tuple[int, View]:
        """Return the number of the view that a nodeid belongs to, and the view."""
        number = self._nodes.view_of(inode)
        return number, self._views.get(number) or await self._revived(number)

    async def _revived(self, number: int) -> View:
        view = await self._views.revive(number) if self._views.top and number else None
        if view is None:
            raise Stale
        return view

    async def served(self, inode: InodeT, ctx: RequestContext, *, for_attributes: bool = False) -> Served:
        """Return as whom the request is served, by the policy that is in force."""
        number = self._nodes.view_of(inode)
        while (served := self.served_at_once(inode, ctx, for_attributes=for_attributes)) is None:
            view = self._views.get(number)
            if view is None:
                await self._revived(number)
                continue
            who = await self._who_by_groups(view, ctx)
            if self._views.get(number) is view:  # otherwise, the policy was reloaded meanwhile
                return number, view, self._checked(view, who), self._viewer(view, ctx)
        return served

    def served_at_once(self, inode: InodeT, ctx: RequestContext, *, for_attributes: bool) -> Served | None:
        """Return as whom the request is served; None if that has to be waited for."""
        number = inode >> OBJECT_BITS  # `Nodes.view_of`, without a call
        view = self._views.get(number)
        if view is None:
            return None
        # `is_daemon` is called only if there are such daemons at all: every request passes here.
        if (self._probe.threads or self._upper.threads) and self.is_daemon(ctx, for_attributes=for_attributes):
            return number, view, DAEMON, NO_VIEWER if ctx.pid in self._probe.threads else ALL_VIEWERS
        if view.fixed is not None:
            if not self.admits(view, ctx):
                raise FUSEError(errno.EACCES)
            who = self._known(view.fixed, ctx)
        elif view.forwards_by_mapping and not self._groups.by_user:
            uid, gid = _client_ids(ctx)
            server_uid, server_gid = view.server_ids(uid, gid)
            if server_uid or self._threads is None:
                who = Actor(server_uid, server_gid, self._identify, view, uid, gid, ctx.pid)
            else:
                find_lacks = partial(self._threads.lacks, ctx.pid)
                who = RootActor(server_uid, server_gid, find_lacks, self._identify, view, uid, gid, ctx.pid)
        else:
            return None  # it depends on groups
        viewer = self._viewer(view, ctx) if self._all_squash else _viewer_of(ctx)
        return number, view, who if view.lower is None else self._checked(view, who), viewer

    def admits(self, view: View, ctx: RequestContext) -> bool:
        """Whether the caller may enter the view: any caller a caller view, and only some uids a fixed one.

        Those are root, the uids of view_access, and the one whose identity the view has (`View.admits`). Root may enter
        the views of others if it could become them anyway (CAP_SETUID). A root that this daemon cannot see counts by
        its uid. Otherwise, root outside the pid namespace of the daemon could not mount views for others.
        """
        uid = _client_ids(ctx)[0]
        if not view.admits(uid):
            return False
        threads, fixed = self._threads, view.fixed
        if uid or threads is None or fixed is None or not fixed.uid or uid in view.entrants:
            return True
        return threads.is_unseen(ctx.pid) or not threads.lacks(ctx.pid, 1 << CAP_SETUID)

    @staticmethod
    def _checked(view: View, who: Actor) -> Actor:
        """Return `who`, unless the lower mount would take this identity for this daemon.

        Raises:
            FUSEError: EACCES.
        """
        if view.lower is not None and (who.uid, who.gid) == UPPER[:2]:
            raise FUSEError(errno.EACCES)
        return who

    def is_daemon(self, ctx: RequestContext, *, for_attributes: bool) -> bool:
        """Whether a daemon, this one or that of an upper mount, makes the request on its own behalf."""
        if ctx.pid in self._probe.threads:
            return True
        upper = self._upper
        return len(upper.threads) > 0 and upper.is_request_of(*_client_ids(ctx), ctx.pid, for_attributes=for_attributes)

    async def _who_by_groups(self, view: View, ctx: RequestContext) -> Actor:
        caller = self._identify(view, *_client_ids(ctx), ctx.pid)
        more = await self._groups.of_user(caller.uid)
        return self._known(caller._replace(groups=caller.groups | more) if more else caller, ctx)

    def _known(self, caller: Caller, ctx: RequestContext) -> Actor:
        if caller.uid or self._threads is None:
            return actor(caller)
        return RootActor(caller.uid, caller.gid, partial(self._threads.lacks, ctx.pid), lambda: caller)

    def _identify(self, view: View, uid: ClientId, gid: ClientId, pid: int) -> Caller:
        caller = view.identify(ClientCaller(uid, gid, with_group(self._groups.of_request(pid), gid)))
        if caller is None:
            raise FUSEError(errno.ENOENT)
        if (notes := noting.get()) is not None:
            notes.caller = caller
        return caller

    def _viewer(self, view: View, ctx: RequestContext) -> Viewer:
        """Return who learns the answer to a request of a caller, as `audience.Audiences` has it.

        Where the server makes all callers one, any other caller is local root, such as mountd at the top directory, or
        a thread of the server that reconnects a handle with the identity of the caller that it served before. They must
        not end what is cached for the one caller.
        """
        return NO_VIEWER if self._all_squash and not view.is_squashed_caller(ClientId(ctx.uid)) else _viewer_of(ctx)

    def checked_caller(self, view: View, who: Actor, ctx: RequestContext) -> KernelCheckedCaller | None:
        """Return the caller if the kernel checks permissions against the attributes that are shown; otherwise None."""
        if self._knfsd and view.fixed is None and who is not DAEMON:
            return KernelCheckedCaller(*_client_ids(ctx), who.uid, who.gid)
        return None
