"""What all operations share: the caller and the object of a request, and as whom and in which thread it is served."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FUSEError, InodeT, RequestContext

from .. import linux
from ..accounts.groups import GroupSource
from ..accounts.threadstatus import ThreadStatus
from ..background.tasks import Tasks
from ..exportmode import ExportMode
from ..fuse.compatibility import keeps_listings, offers_locks, offers_noflush
from ..identity import ServerId
from ..kernelcache.cache import KernelCache
from ..kernelcache.cachepolicy import MountTraits
from ..linux import process
from ..stacking.answers import AnsweredActor, LowerAnswers, Query, query
from ..stacking.upper import UpperDaemons
from ..tracerecords import Record, described
from ..tree import calls
from ..tree.actor import DAEMON, Actor
from ..tree.find import Finder, Missing
from ..tree.nodes import OBJECT_MASK, Nodes
from ..tree.notes import noting
from ..tree.objects import ALL_VIEWERS, NO_VIEWER, ROOT, Descriptor, Directory, Object, Stale, dev_ino
from ..tree.request import Request
from ..tree.views import Views
from ..tree.visibility import AT_ONCE, TooManyAncestors, Visibility, VisibilityResult, is_entry_visible
from ..tuning import STANDARD, Tuning
from ..view import LowerMount, View
from .callers import Callers, Served
from .expirednames import ExpiredNames
from .handles import HalfRead, OpenFiles
from .lockholders import LockHolders
from .operation import Requests, Turns
from .passing import Passing
from .passthrough import Passthrough
from .probing import Probing
from .reader import Reader
from .recall import Recalls
from .reconnect import HandleReconnection
from .references import References
from .relookup import DentryRelookup
from .replies import Replies
from .search import Search
from .selfprobe import SelfProbe
from .trace import Trace, Tracers

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NOT_HELD = contextlib.nullcontext()

# After a rename behind the mount, what is above a remote directory is found level by level.
_MOST_PREFAULTS = 100

# How often to begin again with a long way on which directories change meanwhile.
_MOST_CHECKS = 20


class CheckedAncestors(NamedTuple):
    """The visibility of many directories above an object, as `Core._check_ancestors` finds it while a request waits.

    Attributes:
        view, uid: by which view, and for which server uid. By any other, nothing is known.
        known: of some directories above, whether the caller sees them.
        tries: how often all this was found out.
    """

    view: View
    uid: int
    known: dict[Object, bool]
    tries: int


def _refuses(fd: int, credentials: linux.Credentials | None, mode: int) -> bool:
    assert credentials is not None
    return not calls.access(credentials, fd, mode) and calls.fstat(fd).st_uid != credentials.uid


def _why_no_passthrough(wanted: bool, views: Views, reader: Reader, *, exported: bool) -> str:
    """Return in words why the kernel must not read and write any file by itself; "" if it may."""
    if not wanted:
        return "passthrough=off"
    if exported:
        return "a server exports the mount"
    if views.top:
        return "views share their files"  # each of which the kernel caches for each of them
    return "reads are recorded" if reader.records else ""


class Core(pyfuse3.Operations):
    """The state of one mount, and what its operations share.

    Args:
        nodes: the objects of the tree.
        views: the views that the mount offers.
        groups: where callers' supplementary groups come from.
        threads: knows what callers may do as root.
        reader: reads and writes files.
        mountpoint: where the daemon finds its own mount.
        mode: how the mount is exported, but for what follows from its views.
        default_permissions: whether the kernel checks permissions, too.
        xattrs: whether there are extended attributes, ACLs among them.
        max_open: how many files and directories clients may have open.
        local_locks: let the kernel handle locks, which then hold within this mount alone.
        passthrough: let the kernel read and write files by itself where callers see no difference.
        tuning: times and bounds.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False
    # The real tree drops set-id bits and capabilities (`DataOperations._may_have_lost_set_id`). Only a patched pyfuse3
    # knows this; otherwise, the kernel requests `security.capability` before each write.
    enable_killpriv_v2 = True
    enable_append = True  # a patched pyfuse3 then tells `write` what is appended

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        groups: GroupSource,
        threads: ThreadStatus,
        reader: Reader,
        mountpoint: str,
        mode: ExportMode,
        *,
        default_permissions: bool = False,
        xattrs: bool = True,
        max_open: int = 1024,
        local_locks: bool = False,
        passthrough: bool = True,
        tuning: Tuning = STANDARD,
    ) -> None:
        super().__init__()
        # Offers POSIX ACLs to the kernel, which checks them and answers NFS's requests for them.
        self.enable_acl = default_permissions and xattrs
        self.xattrs = xattrs
        # The kernel keeps others out of a mount that is one fixed view, since its top is shown as its identity's alone.
        only = views.get(0)
        kernel_gate = only is not None and only.fixed is not None and not only.entrants and default_permissions
        self.mode = mode = replace(mode, kernel_gate=kernel_gate)
        # Attributes of their own, since each request reads them.
        self.knfsd = mode.knfsd
        self.ganesha = mode.ganesha
        self.expired_names = ExpiredNames()
        self.exported = mode.is_exported
        # The text of a symbolic link never changes, except where another machine or process serves the file system, and
        # a caller gets to it by a name. (In an export, by a handle.)
        self.enable_symlink_cache = not self.exported and not any(it.remote for it in nodes.mounts.filesystems)
        self.enable_locks = offers_locks and not local_locks
        # With subtree_check, the kernel reconnects a handle with the identity of the caller that sent it.
        self.reconnects_as_others = mode.knfsd and not mode.subtree_check
        self.reconnection = HandleReconnection()
        self.nodes = nodes
        self.views = views
        self.upper = UpperDaemons()
        self.reader = reader
        self.visibility = Visibility(nodes, AT_ONCE)
        self.tasks: Tasks | None = None
        self.requests = Requests()
        self.references = References(nodes.forget, self.requests.is_news, nodes.registry.drop_unused)
        self._prevents_write_delegations = self.knfsd and self.enable_locks and linux.may_delegate_writing()
        # `Recalls.prevent` may open what clients have open a second time.
        self.files = OpenFiles(nodes, max_open // 2 if self.knfsd and offers_noflush else max_open)
        self.passthrough = Passthrough(_why_no_passthrough(passthrough, views, reader, exported=self.exported))
        self.enable_passthrough = self.passthrough.is_allowed
        self.locks = LockHolders(self.files.shares, tuning.most_locked_ranges)
        self.half_read = HalfRead()
        self.turns = Turns()
        self.self_probe = SelfProbe(mountpoint)
        threads.daemons = self.upper.pids
        self.callers = Callers(
            nodes,
            views,
            groups,
            self.self_probe,
            self.upper,
            None if self.exported else threads,  # a server's options decide what a client's root may do
            mode,
        )
        self.relookup = DentryRelookup(nodes, views, self.self_probe)
        self.recalls = Recalls(nodes, self.files, self.self_probe, self._invalidate_attributes)
        self.probing = Probing(nodes, views, mountpoint, exported=self.exported, seconds=tuning.probe_seconds)
        self.tracers = Tracers(self._switch_trace, tuning.trace_bytes)
        self._switch_trace(False)
        self.cache = KernelCache(
            nodes,
            views,
            self.visibility.access_paths,
            MountTraits(
                views.fixed,
                views.top,
                mode,
                xattrs,
                acls=self.enable_acl,
                keeps_listings=keeps_listings,
                process_groups=not groups.by_user,
            ),
            self.requests.counters,
            on_attributes=self.files.may_have_set_id,
            on_change=self.recalls.changed if mode.knfsd else lambda _: None,
            tuning=tuning,
        )
        self.search = Search(nodes)
        self.finder = Finder(nodes, self._note_hidden_name)
        self.find = self.finder.find
        self.replies = Replies(nodes, self.cache, mode)
        self.passing = Passing(nodes, views, self.cache, self.visibility.access_paths, mode)
        # For every request, without a call.
        self._by_number = nodes.registry.by_number
        self._remote_mountpoints = nodes.mounts.remote_mountpoints
        # Remote mounts that have not answered a request of the daemon yet.
        self._unanswered: dict[tuple[int, bytes], trio.Event] = {}

    def _invalidate_attributes(self, obj: Object) -> None:
        self.cache.invalidate(obj)

    def _note_hidden_name(self, info: linux.Stat, obj: Object | None) -> None:
        """Note that a caller looked up a name that is hidden from it, with the stat, and the object if it is known."""
        self.requests.counters.hidden_names += 1
        if stat.S_ISDIR(info.st_mode):
            self.relookup.refused(obj)

    def _switch_trace(self, on: bool) -> None:
        """Have each request traced if there are tracers, or if it is to be logged (`mount --debug`)."""
        if not on and not log.isEnabledFor(logging.DEBUG):
            self.requests.trace = None
        elif self.requests.trace is None:
            self.requests.trace = Trace(
                self.nodes, self.views, self.files, self.requests, self.self_probe, self._publish_record
            )

    def _publish_record(self, record: Record) -> None:
        self.tracers.publish(record)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", described(record))

    # -- coming in ---------------------------------------------------------------------------------

    async def _enter(
        self,
        inode: InodeT,
        ctx: RequestContext,
        *,
        or_open: bool = False,
        has_open: bool = False,
        for_attributes: bool = False,
        checked: CheckedAncestors | None = None,
    ) -> Request:
        """Let a request by nodeid in.

        Args:
            inode: the nodeid.
            ctx: the caller.
            or_open: even to a hidden file, if this identity has it open.
            has_open: even to a hidden file: the request comes with a handle, so that this process has it open.
            for_attributes: the request changes nothing, and reveals nothing but attributes.
            checked: what `_check_ancestors` has found.

        Raises:
            Stale: the object is gone, or hidden from this caller: a hidden name is absent, a hidden handle is stale.
            FUSEError: EAGAIN: it is very deep in the tree, and the directories above keep changing.
        """
        if self.knfsd:
            self.reconnection.end(ctx.pid)
        obj = self._by_number.get(inode & OBJECT_MASK) or self.nodes.get(inode)  # the same, mostly without a call
        filesystem = obj.filesystem
        may_wait = filesystem.by_threads or filesystem.slow_until > 0 or self._remote_mountpoints  # likewise
        waits = bool(may_wait) and self.nodes.mounts.waits(obj)
        if waits:
            number, view, who, viewer = await self._served_prefaulted(obj, inode, ctx, for_attributes=for_attributes)
        else:
            served = self.callers.served_at_once(inode, ctx, for_attributes=for_attributes)
            number, view, who, viewer = served or await self.callers.served(inode, ctx, for_attributes=for_attributes)
        audience = viewer if obj.audience >= ALL_VIEWERS else self.cache.viewer_of(obj, viewer, who)
        if obj.audience != ALL_VIEWERS and not self.cache.subtree_check:
            self.cache.note_viewer(number, obj, audience)  # this caller evidently got the nodeid, or the object itself
        fd, pin = self.nodes.descriptors.fd(obj), obj.descriptor
        info = obj.filesystem.stat(fd)
        has_acl = None
        if view.hides and not self.cache.is_known_to(number, obj):
            try:
                # While no change is reported, all ancestors are as they were when the kernel was answered (`audience`).
                # (A directory is verified once, to know later on whether it has an ACL.)
                epoch = self.nodes.registry.epoch
                is_unchanged = (
                    obj.cached_for_one
                    and (obj.verified_epoch == epoch or not isinstance(obj, Directory))
                    and self.visibility.access_paths.is_up_to_date()
                    and self.cache.is_known_to(number, obj, audience)
                    and is_entry_visible(view, who, obj.name, info, fd)
                )
                has_acl = False if is_unchanged and obj.no_acl_since == obj.verified_epoch == epoch else None
                result = (
                    VisibilityResult.VISIBLE if is_unchanged else self._check_visibility(view, who, obj, info, checked)
                )
            except TooManyAncestors:
                checked = await self._check_ancestors(obj, inode, ctx, checked, for_attributes=for_attributes)
                return await self._enter(
                    inode, ctx, or_open=or_open, has_open=has_open, for_attributes=for_attributes, checked=checked
                )
            has_acl = False if result is VisibilityResult.VISIBLE_WITHOUT_ACL else has_acl
            if result is VisibilityResult.HIDDEN and not has_open and not (or_open and self.files.has_open(who, obj)):
                if obj is self.nodes.root:  # this mount's own policy does not hide it
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                await self._search_or_refuse(view, who, obj, info)
                return await self._enter(inode, ctx, or_open=or_open, has_open=has_open, for_attributes=for_attributes)
        if (
            (self.nodes.registry.disconnected or not obj.filesystem.watched)
            and self._is_outside(view, who, obj)
            and not has_open
            and not (or_open and self.files.has_open(who, obj))
        ):
            await self._search_or_refuse(view, who, obj, info)
            return await self._enter(inode, ctx, or_open=or_open, has_open=has_open, for_attributes=for_attributes)
        if self.cache.subtree_check and (pending := self.cache.note_viewer(number, obj, viewer)) is not None:
            await pending
            return await self._enter(inode, ctx, or_open=or_open, has_open=has_open, for_attributes=for_attributes)
        checked_caller = self.callers.checked_caller(view, who, ctx) if self.knfsd else None
        return Request(number, view, who, obj, fd, info, viewer, checked_caller, has_acl=has_acl, pin=pin, waits=waits)

    async def _search_or_refuse(self, view: View, who: Actor, obj: Object, info: linux.Stat) -> None:
        """Refuse an object that is hidden from the caller, unless a search finds a name of it, by which it may be seen.

        Raises:
            Stale: there is nothing to search for, or nothing was found.
            FUSEError: EAGAIN: the search takes longer.
        """
        # What is hidden by its own attributes is refused at once, like what is gone.
        fd = self.nodes.descriptors.fd(obj)
        is_hidden = view.cloak is not None and not is_entry_visible(view, who, obj.name, info, fd)
        if not is_hidden and self.search.may_find(obj, info):
            has_found = await self.search.has_found(obj, info)
            if has_found is None:
                raise FUSEError(errno.EAGAIN)
            if has_found:
                return
        if view.hides and not is_hidden:
            self.visibility.note_hidden(view, who, obj)
        self.requests.counters.hidden_handles += 1
        raise Stale

    def _is_outside(self, view: View, who: Actor, obj: Object) -> bool:
        """Whether the object was moved out of the tree, if the check of visibility does not find out where it is."""
        return not view.policy_hides and who is not DAEMON and not self.nodes.locator.is_in_tree(obj)

    def _check_visibility(
        self, view: View, who: Actor, obj: Object, info: linux.Stat, checked: CheckedAncestors | None
    ) -> VisibilityResult:
        """Check visibility, with what `_check_ancestors` has found, if that still holds.

        Raises:
            TooManyAncestors: there are too many directories above to check them at once.
        """
        if checked is None or checked.view is not view or checked.uid != who.uid:
            return self.visibility.check(view, who, obj, info)
        return self.visibility.check(view, who, obj, info, checked.known)

    async def _check_ancestors(
        self,
        obj: Object,
        inode: InodeT,
        ctx: RequestContext,
        before: CheckedAncestors | None,
        *,
        for_attributes: bool = False,
    ) -> CheckedAncestors:
        """Check the many directories above an object in small steps, between which others are served.

        Each is judged as it is after the request has come in. That is what the kernel does, too, when it walks along a
        path. `before` is what the last call for this request returned.

        Raises:
            FUSEError: EAGAIN: this was called too often.
        """
        tries = 1 if before is None else before.tries + 1
        if tries > _MOST_CHECKS:
            raise FUSEError(errno.EAGAIN)
        _, view, who, _ = await self.callers.served(inode, ctx, for_attributes=for_attributes)
        checked = CheckedAncestors(view, who.uid, {}, tries)
        for one in self.visibility.approach(obj, checked.known):
            await self.turns.wait_for_turn(ctx.uid)
            _, view, who, _ = await self.callers.served(inode, ctx, for_attributes=for_attributes)
            if checked.view is not view or checked.uid != who.uid:
                break
            try:
                info = one.filesystem.stat(self.nodes.descriptors.fd(one))
                checked.known[one] = self.visibility.is_visible(view, who, one, info, checked.known)
            except TooManyAncestors:
                break  # these are not the directories above any more
        return checked

    async def _enter_by_open_file(
        self, inode: InodeT, ctx: RequestContext, *, or_open: bool = False, for_attributes: bool = False
    ) -> Request:
        """Let a request by nodeid in (`_enter`), or a thread of the kernel that works on a file that a client has open.

        Such a thread comes as root (NFSv4.2 COPY of more than a MiB), and no policy is consulted. An open file stays
        usable when it is hidden, and pyfuse3 does not pass on the handle of a GETATTR. A thread that serves clients of
        NFS is let in like all callers: there, root is a client.
        """
        try:
            return await self._enter(inode, ctx, or_open=or_open, for_attributes=for_attributes)
        except (OSError, FUSEError):
            if not self._works_on_open_file(inode, ctx):
                raise
        if (notes := noting.get()) is not None:
            notes.hidden.clear()
        return await self._enter_as_kernel(inode)

    def _works_on_open_file(self, inode: InodeT, ctx: RequestContext) -> bool:
        """Whether this is a thread of the kernel itself, and a client has the file open in this view."""
        obj = self.nodes.known_as(inode)
        if (ctx.uid, ctx.gid) != (0, 0) or obj is None or not self.files.is_open(obj, self.nodes.view_of(inode)):
            return False
        name = process.kernel_thread(ctx.pid)
        return name is not None and name not in process.NFS_SERVERS

    async def _served_prefaulted(
        self,
        obj: Object,
        inode: InodeT,
        ctx: RequestContext,
        *,
        for_attributes: bool = False,
        listed: Collection[int] = (),
    ) -> Served:
        """Prefault `obj`; return as whom the request is served.

        That is by the policy that is in force then. Until the next await, `obj` can be judged without waiting.

        The lower mount is also queried about what the descriptors in `listed` (O_PATH) refer to.
        """
        lower = self.views.lower
        if lower is None:
            seen = await self._prefault(obj, uid=ctx.uid)
            served = await self.callers.served(inode, ctx, for_attributes=for_attributes)
        else:
            while True:
                served = number, view, who, viewer = await self.callers.served(
                    inode, ctx, for_attributes=for_attributes
                )
                lower_query = None if who is DAEMON else Query(lower, who, listed)
                seen = await self._prefault(obj, lower_query=lower_query, uid=ctx.uid)
                if self.views.get(number) is view:
                    break
            if lower_query is not None:
                served = number, view, AnsweredActor(who, lower_query.answers), viewer
        self.nodes.locator.use_prefaulted(seen)
        return served

    async def _prefault(
        self, obj: Object, name: bytes | None = None, lower_query: Query | None = None, uid: int = -1
    ) -> Mapping[tuple[int, bytes], tuple[int, int]]:
        """Prefault the object, and `name` in it; return what was found there.

        These are st_dev and st_ino, by the number of the directory and the name (for `Locator.use_prefaulted`).

        With `lower_query`, the same thread queries the lower mount about it. What is deep in the tree is prefaulted in
        parts, for one request of each caller (`uid`, or the daemon) at a time.

        Raises:
            Stale: directories are moved faster than they can be prefaulted.
        """
        for _ in range(_MOST_PREFAULTS):
            *ancestors, last = self.nodes.prefaulter.parts(obj)
            there: dict[tuple[int, bytes], tuple[int, int]] = {}
            has_moved = False
            if ancestors:
                async with self.turns.alone(uid):  # a part takes many descriptors
                    for part in ancestors:
                        prefault = self.nodes.descriptors.with_descriptor(
                            self.nodes.prefaulter.prefault, obj, None, part
                        )
                        found = await trio.to_thread.run_sync(prefault, abandon_on_cancel=True)
                        has_moved |= self.nodes.prefaulter.prefaulted(found)
                        there |= found.inodes
            prefault = self.nodes.descriptors.with_descriptor(self.nodes.prefaulter.prefault, obj, name, last)
            if lower_query is not None:
                prefault = lower_query.after(prefault, obj, self.nodes.root)
            found = await trio.to_thread.run_sync(prefault, abandon_on_cancel=True)
            has_moved |= self.nodes.prefaulter.prefaulted(found)
            if not has_moved:
                there |= found.inodes
                self.nodes.locator.use_prefaulted(there)
                return there
        raise Stale

    async def _do(self, at: Request, call: Callable[..., _T], *args: Any) -> _T:
        """Make `call(at, *args)`, which may take long: at once if the file system has been quick, else in a thread.

        In the session loop, `call` may raise BlockingIOError instead of waiting; a thread then calls it. Go on with
        `_again`.

        The kernel holds the lock of a file that passes while it reads what a client writes, which may be a mapping of
        a file of this mount: what waits for that lock in the session loop would wait for itself.
        """
        rare = at.obj.rare
        if not at.waits and (rare is None or not rare.backing):
            try:
                return at.obj.filesystem.timed(call, at, *args)
            except BlockingIOError:
                pass
        who = at.who.found()  # only this thread may find out the groups
        try:
            return await self._do_in_thread(replace(at, who=who), call, *args)
        except OSError as exc:
            if not self.nodes.descriptors.makes_room(exc):
                raise
            return await self._do_in_thread(replace(at, who=who), call, *args)

    async def _do_in_thread(self, at: Request, call: Callable[..., _T], *args: Any) -> _T:
        """Make `call(at, *args)` in a thread, which may outlive this task, but not `at.pin`."""
        at = replace(at, in_thread=True)
        with at.obj.filesystem.held() if at.holds else _NOT_HELD:
            return await trio.to_thread.run_sync(partial(call, at, *args), abandon_on_cancel=True)

    async def _again(self, at: Request, inode: InodeT, ctx: RequestContext) -> Request:
        """Return how to go on after an await: the policy may be new, and the object changed."""
        if self.views.get(at.number) is at.view:
            filesystem, rare = at.obj.filesystem, at.obj.rare
            # It may have changed while a thread was waited for.
            if filesystem.slow_until > 0 or filesystem.by_threads or at.holds or (rare is not None and rare.backing):
                return replace(at, info=filesystem.stat(at.fd), has_acl=None)
            at.has_acl = None
            return at
        return await self._enter(inode, ctx)

    async def _again_with_answers(
        self, at: Request, fd: int, inode: InodeT, ctx: RequestContext, answers: LowerAnswers | None = None
    ) -> Request:
        """Return how to go on after an await (`_again`), with the answers of the lower mount about `fd` (O_PATH).

        `answers` are those that there are already, which do not count if a reload has changed the caller's identity.
        """
        while True:
            at = await self._again(at, inode, ctx)
            lower = at.view.lower
            if lower is None or at.who is DAEMON:
                return at
            if answers is not None and answers.credentials == at.who.credentials:
                return replace(at, who=AnsweredActor(at.who, answers))
            pin = Descriptor(self.nodes.descriptors.with_descriptor(calls.dup, fd), (0, 0), 0)
            of_it = replace(at, fd=pin.fd, who=at.who.found(), pin=pin)
            answers = await self._do_in_thread(of_it, self._query_lower)

    @staticmethod
    def _query_lower(at: Request) -> LowerAnswers | None:
        """In a thread: return the answers of the lower mount to this caller about what `at.fd` refers to."""
        lower = at.view.lower
        return None if lower is None or at.who is DAEMON else query(lower, at.who.credentials, [at.fd])

    async def _enter_as_kernel(self, inode: InodeT) -> Request:
        """Let the kernel itself in, which is reconnecting a handle: no policy is consulted."""
        number, view = await self.callers.view(inode)
        obj = self.nodes.get(inode)
        waits = self.nodes.mounts.waits(obj)
        if waits:
            await self._prefault(obj)
        fd = self.nodes.descriptors.fd(obj)
        info = obj.filesystem.stat(fd)
        return Request(number, view, DAEMON, obj, fd, info, NO_VIEWER, pin=obj.descriptor, waits=waits)

    async def _maker(
        self, at: Request, inode: InodeT, ctx: RequestContext
    ) -> tuple[Request, tuple[ServerId, ServerId]]:
        """Return how to go on (`_again`), and the owner and group of what the caller would make in the directory.

        A lower mount may squash them.
        """
        while (lower := at.view.lower) is not None and lower.contains(at.info):
            made = await self._do(at, partial(self._made_in_lower, lower))
            before, at = at, await self._again(at, inode, ctx)
            if at.view is before.view:
                return at, made
        return at, (at.who.uid, at.who.gid)

    @staticmethod
    def _made_in_lower(lower: LowerMount, at: Request) -> tuple[ServerId, ServerId]:
        return lower.owner_of_new(at.credentials, at.fd)

    async def _open_in_thread(
        self, at: Request, name: bytes, inode: InodeT, ctx: RequestContext
    ) -> tuple[Request, int, linux.Stat | None]:
        """Open (O_PATH) the entry `name` of the directory, as the caller, in a thread, because it may take long.

        Returns:
            how to go on (`_again`), the descriptor, and its stat; None if it is hidden, and the descriptor closed.

        Raises:
            OSError: there is no such entry, or the name leads to an excluded mount (`TreeMounts.stat`).
        """
        fd, answers = await self._do(at, partial(self._open_and_query, name=name))
        if not self.nodes.mounts.is_name_remote(at.obj, name):
            # It is in memory now. Changes may have been reported meanwhile, and what the kernel is to cache must have
            # been found after them.
            calls.close(fd)
            at = await self._again(at, inode, ctx)
            fd = self._open_named(at, name)
            return at, fd, self.finder.check(at, name, fd)
        try:
            at = await self._again_with_answers(at, fd, inode, ctx, answers)
        except BaseException:
            calls.close(fd)
            raise
        return replace(at, has_searched=True), fd, self.finder.check(at, name, fd)

    async def _open_visible(
        self, at: Request, name: bytes, inode: InodeT, ctx: RequestContext
    ) -> tuple[Request, Descriptor, linux.Stat]:
        """Return how to go on (`_again`), a descriptor (O_PATH) for the entry `name` of the directory, and its stat.

        Raises:
            FileNotFoundError: there is no such entry, or it is hidden.
            OSError: it is on an excluded mount (`TreeMounts.stat`).
        """
        if not at.waits:
            found = self.find(at, name)
            if not isinstance(found, Missing):
                seen = found.obj.descriptor
                assert seen is not None
                self.nodes.registry.drop_if_unused(found.obj)  # the kernel may not know it (yet)
                return at, seen, found.info
        else:
            at, fd, info = await self._open_in_thread(at, name, inode, ctx)
            if info is not None:
                return at, Descriptor(fd, dev_ino(info), 0), info
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _open_named(self, at: Request, name: bytes) -> int:
        """Open (O_PATH) the entry `name` of the directory, as the caller; it has yet to be judged."""
        return self.finder.open(at.credentials_for(os.X_OK), at.fd, name)

    def _open_and_query(self, at: Request, name: bytes) -> tuple[int, LowerAnswers | None]:
        """In a thread: open the entry `name` (`_open_named`), and query the lower mount about it."""
        fd = self._open_named(at, name)
        try:
            return fd, self._query_lower(replace(at, fd=fd))
        except BaseException:
            calls.close(fd)
            raise

    def _is_hidden(self, at: Request, name: bytes) -> bool:
        """Whether there is an entry `name` that the caller may not know of."""
        if not at.view.hides or at.who is DAEMON:
            return False
        try:
            fd = self.finder.open(linux.ROOT, at.fd, name)
        except OSError:
            return False
        try:
            return not is_entry_visible(at.view, at.who, name, self.nodes.mounts.stat(fd), fd)
        finally:
            calls.close(fd)

    def _has_nfs_right(self, at: Request, flags: int) -> bool:
        """Whether an open that the mode forbids is one that NFS allows. Only the kernel's server is trusted with it.

        NFS has no descriptors: a caller that created a file as 0444, or removed its own right while it had the file
        open, must be able to go on, and a client that executes a file reads it (RFC 1813 §4.4). The kernel has checked
        the mode that it was shown; it refuses such an open by a local process before it sends it to the daemon.
        """
        if not self.knfsd or not stat.S_ISREG(at.info.st_mode):
            return False
        if at.who.uid == at.info.st_uid:
            return True
        return flags & os.O_ACCMODE == os.O_RDONLY and calls.access(at.credentials, at.fd, os.X_OK)

    async def _check_again(self, fh: FileHandleT, mode: int) -> None:
        """Check permission anew: nfs-ganesha keeps files open for minutes on behalf of clients that have none open.

        Raises:
            FUSEError: EACCES; never for the owner, who may have created the file without that right (RFC 1813 §4.4).
        """
        if not self.ganesha:
            return
        file = self.files.by_fd[fh]
        refused = partial(_refuses, fh, file.opener, mode)
        if await trio.to_thread.run_sync(refused, abandon_on_cancel=True) if file.obj.filesystem.remote else refused():
            raise FUSEError(errno.EACCES)

    def _open_for_attributes(self, at: Request, ctx: RequestContext) -> FileHandleT:
        """Open for nfs-ganesha, which opens everything for reading to get its attributes, and assumes that root can.

        Raises:
            PermissionError: this is not nfs-ganesha.
        """
        if not self.ganesha or ctx.uid != 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        fd = self.nodes.descriptors.with_descriptor(calls.dup, at.fd)
        if stat.S_ISDIR(at.info.st_mode):
            self.files.opened_directory(fd, at)
        else:
            self.files.opened(fd, at, as_opener=True)
        self.files.by_fd[fd].unreadable = True
        return FileHandleT(fd)

    def _require_descriptor(self, at: Request) -> None:
        """Refuse to open anything for a caller that has its share open.

        Raises:
            OSError: EMFILE: the caller has its share of what may be open. What is left is for others.
        """
        shares, uid = self.files.shares, at.who.uid
        if not shares.has_share_left(uid):
            # The kernel's NFS server makes EIO of EMFILE as well, but warns as of a fault of its own.
            code = errno.EIO if self.knfsd else errno.EMFILE
            raise self.requests.refuse(shares, "files and directories open", uid, f"server uid {uid}", code)

    def _close(self, fh: FileHandleT) -> None:
        """Close what a client had open. Where that may take long, no request waits for it."""
        if self.recalls.own:
            assert self.tasks is not None
            self.recalls.closed(fh, self.tasks)
        if self.locks.by_object:
            for fd in self.locks.closed(self.files.by_fd[fh].obj, fh):
                self._close_for_locks(self.files.by_fd[fh].obj, fd)
        if (open_file := self.files.by_fd[fh]).obj.backing:
            open_file.written = calls.fstat(fh).st_size  # at most; the daemon does not see what the kernel writes
            self.passthrough.closing(open_file.obj, fh)
        file = self.files.close(fh)
        if file is not None:
            assert self.tasks is not None
            self.tasks.once("closing a file", self.files.close_in_thread, fh, file)

    def _close_for_locks(self, obj: Object, fd: int) -> None:
        if not obj.filesystem.remote:
            calls.close(fd)
            return
        assert self.tasks is not None
        close = partial(trio.to_thread.run_sync, abandon_on_cancel=True, limiter=self.locks.limiter)
        self.tasks.once("closing a descriptor for locks", close, calls.close, fd)

    def _is_top(self, inode: InodeT) -> bool:
        """Whether this is the list of views at the root of the mount."""
        return inode == ROOT and self.views.top
