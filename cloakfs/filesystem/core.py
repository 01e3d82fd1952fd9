"""What every operation starts and ends with: who asks, of which object, and the attributes of the answer."""

import errno
import functools
import inspect
import logging
import os
import stat
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FUSEError, InodeT, RequestContext

from .. import linux
from ..above import INSIDE, Above
from ..asked import Answers, Asked, Asking, ask
from ..caller import Caller, ClientCaller
from ..groups import GroupSource
from ..ids import ClientId, ServerId
from ..loop import SHARE
from ..reader import Reader
from ..tasks import Tasks
from ..tree import calls
from ..tree.door import (
    INSIDER,
    Door,
    Subject,
    attrs_of,
    credentials,
    everybody_may,
    sees,
    subject,
    surely_may,
    with_group,
)
from ..tree.nodes import Nodes
from ..tree.objects import ROOT, Object, Stale
from ..view import Asker, View
from ..views import Views
from . import pyfuse3memory
from .kernelcache import KernelCache
from .reconnect import Reconnecting

if TYPE_CHECKING:
    from ..below import Below

log = logging.getLogger(__name__)

_C = TypeVar("_C", bound="Core")
_P = ParamSpec("_P")
_T = TypeVar("_T")

# When to look up a refused directory again, in seconds after the last refusal and after each other.
_REPAIR_DELAYS = (0.0, 0.02, 0.1, 0.4)

_FIRST_KERNEL_ERRNO = 512

# After a rename behind the mount, what is above a remote directory is found level by level.
_MOST_LOOKS = 100

SET_ID = stat.S_ISUID | stat.S_ISGID
"""The bits of a mode that make a program run as its owner, or its group."""

MOST_ENTRIES = 20_000
"""So many entries of directories are read ahead for one caller at most, some 3 MB."""

# A failure that was told is told again after so many seconds: clients must not be able to fill the log.
_TELL_AGAIN_SECONDS = 60.0
# What threading.Thread.start says in a RuntimeError, which has no type of its own.
_NO_THREAD = "can't start new thread"


def answers(
    handler: Callable[Concatenate[_C, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_C, _P], Coroutine[Any, Any, _T]]:
    """The boundary of every operation: an error of the tree is passed on, a surprise is EIO and logged.

    Without it one unexpected exception would end the daemon, and every client with it. Whoever has too many requests
    waiting is told EAGAIN, so that there is always somebody left to read those of others; so is whoever needs a
    thread when the machine starts no more of them (RLIMIT_NPROC, `pids.max`).
    """

    name = handler.__name__
    # What only gives something back is never refused.
    counted = name not in ("release", "releasedir")
    has_context = "ctx" in inspect.signature(handler).parameters

    @functools.wraps(handler)
    async def guarded(self: _C, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self.requests[name] += 1
        if counted:
            caller: int = cast("Any", args[-1]).uid if has_context else self._opener(args[0])
            waiting = self.waiting
            others = waiting.get(caller, 0)
            if others >= SHARE:
                raise FUSEError(errno.EAGAIN)
            waiting[caller] = others + 1
        try:
            return await handler(self, *args, **kwargs)
        except OSError as exc:
            raise FUSEError(_errno_to_pass_on(exc)) from None
        except FUSEError:
            raise
        except Exception as exc:
            if isinstance(exc, RuntimeError) and str(exc) == _NO_THREAD:
                if self.is_news(name, exc):
                    log.warning("%s: %s: answered EAGAIN", name, exc)
                raise FUSEError(errno.EAGAIN) from None
            linux.act_as_daemon()  # the traceback reads source files
            if self.is_news(name, exc):
                log.exception("%s%r failed: answered EIO", name, args)
            raise FUSEError(errno.EIO) from None
        finally:
            if counted:
                others = waiting[caller] - 1
                if others:
                    waiting[caller] = others
                else:
                    del waiting[caller]

    return cast("Callable[Concatenate[_C, _P], Coroutine[Any, Any, _T]]", guarded)


def _errno_to_pass_on(exc: OSError) -> int:
    """The error as FUSE can tell it.

    Real file systems have been seen to fail with the kernel's own numbers (ENOTSUPP is 524): the kernel refuses an
    answer with one, and the client waits for ever. ENOSYS means that nobody is to ask again on this mount.
    """
    code = exc.errno or errno.EIO
    if code == errno.ENOSYS:
        return errno.EOPNOTSUPP
    return code if 0 < code < _FIRST_KERNEL_ERRNO else errno.EIO


# Of a request. (It is typed as a whole: to wrap each id would cost a call.)
_client_ids: Callable[[RequestContext], tuple[ClientId, ClientId]] = attrgetter("uid", "gid")


class Entered(NamedTuple):
    """A request that was let in: the view, who it is served as, and the object it names.

    `fd` (O_PATH) is good until the next await.
    """

    number: int
    view: View
    who: Subject
    obj: Object
    fd: int
    info: linux.Stat
    asker: Asker | None = None  # where the kernel checks permissions with what is shown
    has_searched: bool = False  # the caller has just found something in this directory

    @property
    def credentials(self) -> linux.Credentials:
        """What system calls for the caller are made with."""
        return self.who.credentials


class OpenFile:
    """A file or directory that a client has open; its number is the descriptor's."""

    __slots__ = (
        "appends", "cookie", "found", "is_directory", "number", "obj", "opener", "pending", "sought", "uid",
        "unreadable",
    )  # fmt: skip

    def __init__(self, at: Entered, opener: linux.Credentials | None = None) -> None:
        self.obj = at.obj
        self.number = at.number  # of the view, which a reload may replace
        self.uid = at.who.uid
        self.opener = opener  # as whom to go on, where that matters
        self.unreadable = False  # opened to be looked at alone
        self.appends = False  # opened with O_APPEND
        self.is_directory = stat.S_ISDIR(at.info.st_mode)
        # Directories: where `pending`, the entries read ahead, begin.
        self.cookie = 0
        self.pending: list[tuple[bytes, int, int]] = []
        # Of remote ones: what is called so (O_PATH), as long as a request is being served.
        self.found: dict[bytes, int] = {}
        self.sought: int | None = None  # the nodeid for whose name alone the kernel reads this


class HalfRead:
    """What was read ahead of directories and not told yet, by who opened them: bounded in size.

    What is too much is dropped, and read again from the position where it began.
    """

    def __init__(self) -> None:
        self._of: dict[int, dict[OpenFile, int]] = {}  # numbers of entries, of who read last at the end
        self._totals: Counter[int] = Counter()

    def take(self, file: OpenFile) -> None:
        """Somebody reads on, or has closed it: it is not to be dropped meanwhile."""
        files = self._of.get(file.uid)
        if files is None or file not in files:
            return
        self._totals[file.uid] -= files.pop(file)
        if not files:
            del self._of[file.uid], self._totals[file.uid]

    def put(self, file: OpenFile) -> None:
        """Nobody reads it for now."""
        self.take(file)
        if not file.pending:
            return
        files = self._of.setdefault(file.uid, {})
        files[file] = len(file.pending)
        self._totals[file.uid] += len(file.pending)
        while self._totals[file.uid] > MOST_ENTRIES and len(files) > 1:
            oldest = next(iter(files))
            self._totals[file.uid] -= files.pop(oldest)
            oldest.pending = []
            oldest.cookie = -1  # whatever the position that is asked for next, the descriptor is not there


class Core(pyfuse3.Operations):
    """The state of one mount, and what its operations share.

    Args:
        nodes: the objects of the tree.
        views: what is offered.
        groups: where callers' supplementary groups come from.
        reader: reads and writes files.
        mountpoint: where the daemon finds its own mount.
        no_client_cache: show every directory as changed just now [SZ §3.2].
        knfsd: the kernel's NFS server exports the mount (docs/design.md).
        ganesha: nfs-ganesha does.
        default_permissions: the kernel checks permissions, too.
        xattrs: there are extended attributes, ACLs among them.
        max_open: how many files and directories clients may have open.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        groups: GroupSource,
        reader: Reader,
        mountpoint: str,
        *,
        no_client_cache: bool = False,
        knfsd: bool = False,
        ganesha: bool = False,
        default_permissions: bool = False,
        xattrs: bool = True,
        max_open: int = 1024,
    ) -> None:
        super().__init__()
        # Offers POSIX ACLs to the kernel, which checks them and answers NFS's requests for them.
        self.enable_acl = default_permissions and xattrs
        self.xattrs = xattrs
        self.knfsd = knfsd
        self.ganesha = ganesha
        self.exported = knfsd or ganesha
        self.reconnecting = Reconnecting()
        self.nodes = nodes
        self.views = views
        self.above = Above()
        self.groups = groups
        self.reader = reader
        self.door = Door(nodes)
        self.mountpoint = mountpoint
        self.tasks: Tasks | None = None
        self.requests: Counter[str] = Counter()  # by operation
        # Requests that are not answered yet, by the caller's client uid, or by `_opener`.
        self.waiting: dict[int, int] = {}
        self._open: dict[int, OpenFile] = {}
        self.half_read = HalfRead()
        self._max_open = max_open
        self._no_client_cache = no_client_cache
        # Of a mount that is one fixed view, the kernel keeps others out: it shows the top as its identity's alone.
        only = views.get(0)
        self._gate = only is not None and only.fixed is not None and not only.entrants and default_permissions
        self.cache = KernelCache(
            nodes,
            views,
            self.door.passages,
            exported=knfsd,
            gated=self._gate or ganesha,
            forgetful=no_client_cache,
        )
        self._last_change = 0
        self._insiders: set[int] = set()
        self._repairing: dict[int, int] = {}  # object number -> refusals while it is going on
        self.last_reader = 0
        self._asking: dict[
            tuple[int, bytes], trio.Event
        ] = {}  # remote mounts that were asked and have not answered yet
        self._one_repair = trio.CapacityLimiter(1)
        self._logged: dict[tuple[str, type[Exception], int], float] = {}  # cause -> when

    def _opener(self, fh: Any) -> int:
        """Who answers for a request without a caller: the server uid of who opened the file, as a number below 0."""
        file = self._open.get(fh)
        return -1 if file is None else -2 - file.uid

    def is_news(self, what: str, exc: Exception) -> bool:
        """Is this failure to be logged, or was it just now?"""
        cause = (what, type(exc), [line for _, line in traceback.walk_tb(exc.__traceback__)][-1])
        now = time.monotonic()
        if now < self._logged.get(cause, -_TELL_AGAIN_SECONDS) + _TELL_AGAIN_SECONDS:
            return False
        self._logged[cause] = now
        return True

    # -- coming in ---------------------------------------------------------------------------------

    async def _view(self, inode: InodeT) -> tuple[int, View]:
        number = self.nodes.view_of(inode)
        return number, self.views.get(number) or await self._revived(number)

    async def _revived(self, number: int) -> View:
        view = await self.views.revive(number) if self.views.top and number else None
        if view is None:
            raise Stale
        return view

    async def _served(
        self, inode: InodeT, ctx: RequestContext, *, for_attributes: bool = False
    ) -> tuple[int, View, Subject]:
        """The view, its number, and who the request is served as; nothing of a policy that is not in force any more."""
        number = self.nodes.view_of(inode)
        view = self.views.get(number) or await self._revived(number)
        if self._is_inside(ctx, for_attributes=for_attributes):
            return number, view, INSIDER
        who = self._who(view, ctx) or await self._who_by_groups(view, ctx)
        while (now := self.views.get(number)) is not view:  # a reload came while the user database was asked
            if now is None:
                raise Stale
            view = now
            who = self._who(view, ctx) or await self._who_by_groups(view, ctx)
        if view.below is not None and (who.uid, who.gid) == INSIDE[:2]:
            raise FUSEError(errno.EACCES)
        return number, view, who

    def _is_inside(self, ctx: RequestContext, *, for_attributes: bool) -> bool:
        """Does a daemon ask for itself, this one or one above?"""
        return ctx.pid in self._insiders or self.above.asks(*_client_ids(ctx), ctx.pid, for_attributes=for_attributes)

    def _who(self, view: View, ctx: RequestContext) -> Subject | None:
        """The identity a request is served as, unless it depends on groups; EACCES at the gate of a fixed view."""
        if view.fixed is not None:
            uid, _ = _client_ids(ctx)
            if not view.admits(uid):
                raise FUSEError(errno.EACCES)
            return subject(view.fixed)
        if view.forwards_by_mapping and not self.groups.by_user:
            uid, gid = _client_ids(ctx)
            return Subject(*view.server_ids(uid, gid), partial(self._identify, view, uid, gid, ctx.pid))
        return None

    async def _who_by_groups(self, view: View, ctx: RequestContext) -> Subject:
        who = self._identify(view, *_client_ids(ctx), ctx.pid)
        more = await self.groups.of_user(who.uid)
        return subject(who._replace(groups=who.groups | more) if more else who)

    def _identify(self, view: View, uid: ClientId, gid: ClientId, pid: int) -> Caller:
        who = view.identify(ClientCaller(uid, gid, with_group(self.groups.of_request(pid), gid)))
        if who is None:
            raise FUSEError(errno.ENOENT)
        return who

    async def _enter(
        self, inode: InodeT, ctx: RequestContext, *, or_open: bool = False, for_attributes: bool = False
    ) -> Entered:
        """Let a request by nodeid in; with `or_open` also into a hidden file that this identity has open.

        `for_attributes` says that it changes nothing, and tells nothing else.

        Raises:
            Stale: the object is gone, or hidden from this caller: as a name it is absent, as a handle stale.
        """
        if self.knfsd:
            self.reconnecting.end(ctx.pid)
        obj = self.nodes.get(inode)
        if self.nodes.waits(obj):
            number, view, who = await self._served_late(obj, inode, ctx, for_attributes=for_attributes)
        else:
            number, view, who = await self._served(inode, ctx, for_attributes=for_attributes)
        fd = self.nodes.fd(obj)
        info = obj.filesystem.stat(fd)
        if (
            view.hides
            and not self.cache.is_known_to_all(number, obj)
            and not self.door.visible(view, who, obj, info)
            and not (or_open and self._has_open(who, obj))
        ):
            if obj is self.nodes.root:  # which the own policy hides from nobody
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise Stale
        return Entered(number, view, who, obj, self.nodes.fd(obj), info, self._asker(view, who, ctx))

    async def _served_late(
        self,
        obj: Object,
        inode: InodeT,
        ctx: RequestContext,
        *,
        for_attributes: bool = False,
        listed: Collection[int] = (),
    ) -> tuple[int, View, Subject]:
        """`_served`, where it has to be waited for what it takes to judge `obj`: until the next await, it is known.

        So it is for what `listed` (O_PATH) refer to, as far as the mount below is concerned.
        """
        below = self.views.below
        if below is None:
            seen = await self._look(obj)
            served = await self._served(inode, ctx, for_attributes=for_attributes)
        else:
            while True:
                number, view, who = served = await self._served(inode, ctx, for_attributes=for_attributes)
                asking = None if who is INSIDER else Asking(below, who, listed)
                seen = await self._look(obj, asking=asking)
                if self.views.get(number) is view:
                    break
            if asking is not None:
                served = number, view, Asked(who, asking.answers)
        self.nodes.recall(seen)
        return served

    def _asker(self, view: View, who: Subject, ctx: RequestContext) -> Asker | None:
        if self.knfsd and view.fixed is None and who is not INSIDER:
            return Asker(*_client_ids(ctx), who.uid, who.gid)
        return None

    async def _look(
        self, obj: Object, name: bytes | None = None, asking: Asking | None = None
    ) -> Mapping[tuple[int, bytes], tuple[int, int]]:
        """Return when looking at the object, and at `name` in it, takes no time; with what is for `Nodes.recall`.

        With `asking`, the same thread asks the mount below about it.

        Raises:
            Stale: directories move about faster than one can look.
        """
        for _ in range(_MOST_LOOKS):
            look = self._with_descriptor(self.nodes.look, obj, name)
            if asking is not None:
                look = asking.after(look, obj, self.nodes.root)
            found = await trio.to_thread.run_sync(look, abandon_on_cancel=True)
            if not self.nodes.looked(found):
                return found.there
        raise Stale

    async def _do(self, at: Entered, call: Callable[[Entered], _T]) -> _T:
        """Do what may take long: at once where that has been quick so far, else in a thread. See `_again`.

        What would have to wait, `call` may refuse on the loop's thread by BlockingIOError.
        """
        filesystem = at.obj.filesystem
        if not self.nodes.waits(at.obj):
            began = filesystem.begin()
            try:
                return call(at)
            except BlockingIOError:
                pass
            finally:
                filesystem.took(began)
        who = subject(at.who.caller) if at.who is not INSIDER else INSIDER  # only this thread may find out
        try:
            return await self._do_in_thread(at._replace(who=who), call)
        except OSError as exc:
            if not self._frees_descriptors(exc):
                raise
            return await self._do_in_thread(at._replace(who=who, fd=self.nodes.fd(at.obj)), call)

    async def _do_in_thread(self, at: Entered, call: Callable[[Entered], _T]) -> _T:
        own = at._replace(fd=self._with_descriptor(calls.dup, at.fd))

        def work() -> _T:
            try:
                return call(own)
            finally:
                calls.close(own.fd)

        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)

    async def _again(self, at: Entered, inode: InodeT, ctx: RequestContext) -> Entered:
        """Go on after an await: there may be a new policy, and the descriptor another."""
        if self.views.get(at.number) is at.view:
            return at._replace(fd=self.nodes.fd(at.obj))
        return await self._enter(inode, ctx)

    async def _again_asked(
        self, at: Entered, fd: int, inode: InodeT, ctx: RequestContext, answers: Answers | None = None
    ) -> Entered:
        """`_again`, to judge what `fd` (O_PATH) refers to: what the mount below says of it is known afterwards.

        `answers` is what it has said already; a reload may have made another identity of the caller.
        """
        while True:
            at = await self._again(at, inode, ctx)
            below = at.view.below
            if below is None or at.who is INSIDER:
                return at
            if answers is not None and answers.who == at.who.credentials:
                return at._replace(who=Asked(at.who, answers))
            of_it = at._replace(fd=fd, who=subject(at.who.caller))
            answers = await self._do_in_thread(of_it, self._ask_below)

    @staticmethod
    def _ask_below(at: Entered) -> Answers | None:
        """In a thread: what the mount below says to the caller of what `at.fd` refers to."""
        below = at.view.below
        return None if below is None or at.who is INSIDER else ask(below, at.who.credentials, [at.fd])

    async def _let_kernel_in(self, inode: InodeT) -> Entered:
        """For the kernel itself, which reconnects a handle: nobody is asked."""
        number, view = await self._view(inode)
        obj = self.nodes.get(inode)
        if self.nodes.waits(obj):
            await self._look(obj)
        fd = self.nodes.fd(obj)
        return Entered(number, view, INSIDER, obj, fd, obj.filesystem.stat(fd))

    async def _maker(
        self, at: Entered, inode: InodeT, ctx: RequestContext
    ) -> tuple[Entered, tuple[ServerId, ServerId]]:
        """Owner and group of what the caller would make in the directory: a mount below may squash them.

        And how to go on (`_again`).
        """
        while (below := at.view.below) is not None and below.has(at.info):
            made = await self._do(at, partial(self._made_below, below))
            before, at = at, await self._again(at, inode, ctx)
            if at.view is before.view:
                return at, made
        return at, (at.who.uid, at.who.gid)

    @staticmethod
    def _made_below(below: "Below", at: Entered) -> tuple[ServerId, ServerId]:
        return below.makes(at.credentials, at.fd)

    def _has_open(self, who: Subject, obj: Object) -> bool:
        """Did `who` open this file while it was visible? (Directories do not count: nothing is read from them.)"""
        opened = (self._open[fd] for fd in obj.open_files or ())
        return any(not file.is_directory and file.uid == who.uid for file in opened)

    def _find(self, at: Entered, name: bytes) -> tuple[int, linux.Stat]:
        """Open (O_PATH) and stat what is called `name` in the directory, as the caller.

        Raises:
            FileNotFoundError: there is nothing, or nothing for this caller.
            PermissionError: it must not be looked into (`Nodes.stat`).
        """
        fd = self._open_named(at, name)
        return fd, self._judge(at, name, fd)

    async def _find_late(
        self, at: Entered, name: bytes, inode: InodeT, ctx: RequestContext
    ) -> tuple[Entered, int, linux.Stat]:
        """`_find`, by a thread where that may have to wait; and how to go on (`_again`)."""
        if not self.nodes.waits(at.obj):
            return at, *self._find(at, name)
        fd, answers = await self._do(at, partial(self._open_and_ask, name=name))
        if not self.nodes.is_name_remote(at.obj, name):
            # It is in memory now. Changes may have been told meanwhile: what the kernel is to remember, is found after.
            calls.close(fd)
            at = await self._again(at, inode, ctx)
            return at, *self._find(at, name)
        try:
            at = await self._again_asked(at, fd, inode, ctx, answers)
        except BaseException:
            calls.close(fd)
            raise
        return at._replace(has_searched=True), fd, self._judge(at, name, fd)

    @staticmethod
    def _credentials_for(at: Entered, bits: int) -> linux.Credentials:
        """As whom to make a call that needs no more than `bits` of the object: the daemon, if the caller surely may.

        To act as the caller takes its groups, which are not cheap to find out. By the time that a thread gets to it,
        `at` may be outdated: there the kernel decides.
        """
        what = bits, at.obj, at.fd, at.info
        if linux.in_main_thread() and (everybody_may(*what) or surely_may(at.who, *what)):
            return linux.ROOT
        return at.credentials

    def _open_named(self, at: Entered, name: bytes) -> int:
        """Open (O_PATH) what is called `name` in the directory, as the caller; it has yet to be judged."""
        return self._open_as(self._credentials_for(at, os.X_OK), at.fd, name)

    def _open_and_ask(self, at: Entered, name: bytes) -> tuple[int, Answers | None]:
        """In a thread: the same, and what the mount below says of it."""
        fd = self._open_named(at, name)
        try:
            return fd, self._ask_below(at._replace(fd=fd))
        except BaseException:
            calls.close(fd)
            raise

    def _open_as(self, who: linux.Credentials, directory: int, name: bytes) -> int:
        """The same as `who`."""
        fd = self._with_descriptor(calls.find, who, directory, name)
        try:
            self.nodes.ask(who, fd)
        except BaseException:
            calls.close(fd)
            raise
        return fd

    def _judge(self, at: Entered, name: bytes, fd: int) -> linux.Stat:
        """The stat of what was found by its name, and `fd` refers to, which is closed if the caller may not see it."""
        try:
            info = self.nodes.stat(fd)
            if sees(at.view, at.who, name, info, fd):
                return info
            if stat.S_ISDIR(info.st_mode) and linux.in_main_thread():
                self._repair(self.nodes.known(fd, at.obj))
        except BaseException:
            calls.close(fd)
            raise
        calls.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _known_at(self, at: Entered, name: bytes) -> tuple[Object, linux.Stat] | None:
        """What is called `name` in the directory, with its stat, if the kernel knows it already; None: it may not.

        Raises:
            FileNotFoundError: there is nothing, or nothing for this caller.
        """
        who = self._credentials_for(at, os.X_OK)
        began = at.obj.filesystem.begin()
        try:
            info, _ = calls.statx(who, at.fd, name)
        finally:
            at.obj.filesystem.took(began)
        obj = self.nodes.at_place(at.obj, name, info)
        if obj is None:
            return None
        if sees(at.view, at.who, name, info, obj.fd):
            return obj, info
        if stat.S_ISDIR(info.st_mode):
            self._repair(obj)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _is_hidden(self, at: Entered, name: bytes) -> bool:
        """Is there something called `name` that the caller may not know of?"""
        if not at.view.hides or at.who is INSIDER:
            return False
        try:
            fd = self._open_as(linux.ROOT, at.fd, name)
        except OSError:
            return False
        try:
            return not sees(at.view, at.who, name, self.nodes.stat(fd), fd)
        finally:
            calls.close(fd)

    def _with_descriptor(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Make a call that needs a descriptor; once more after closing some if there are too many."""
        try:
            return call(*args, **kwargs)
        except OSError as exc:
            # Which descriptors are in use, only the session loop knows.
            if not linux.in_main_thread() or not self._frees_descriptors(exc):
                raise
            return call(*args, **kwargs)

    def _frees_descriptors(self, exc: OSError) -> bool:
        """If there were too many descriptors, there are fewer now: the call is worth another try."""
        return exc.errno in (errno.EMFILE, errno.ENFILE) and self.nodes.shed() > 0

    def _has_nfs_right(self, at: Entered, flags: int) -> bool:
        """Is an open that the mode forbids one that NFS allows? Only the kernel's server is believed to know.

        NFS has no descriptors: who created a file as 0444, or took away its own right while it had the file open,
        must be able to go on, and a client that executes a file reads it (RFC 1813 §4.4). The kernel has checked by the
        mode that it was shown; what a local process opens, it refuses before asking the daemon.
        """
        if not self.knfsd or not stat.S_ISREG(at.info.st_mode):
            return False
        if at.who.uid == at.info.st_uid:
            return True
        return flags & os.O_ACCMODE == os.O_RDONLY and calls.access(at.credentials, at.fd, os.X_OK)

    def _open_to_look(self, at: Entered, ctx: RequestContext) -> FileHandleT:
        """nfs-ganesha opens files and directories for reading to get their attributes, and takes it that root may.

        Raises:
            PermissionError: it is not it who asks.
        """
        if not self.ganesha or ctx.uid != 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        fh = self._opened(self._with_descriptor(calls.dup, at.fd), at, as_opener=True)
        self._open[fh].unreadable = True
        return fh

    def _require_readable(self, fh: FileHandleT) -> None:
        if self._open[fh].unreadable:
            raise FUSEError(errno.EACCES)

    # -- going out ---------------------------------------------------------------------------------

    def _attributes(
        self,
        number: int,
        view: View,
        obj: Object,
        name: bytes,
        fd: int,
        info: linux.Stat,
        asker: Asker | None = None,
    ) -> EntryAttributes:
        """The attributes of `obj` as `view` shows them (to `asker`).

        Raises:
            Stale: the policy failed to say.
        """
        if view.shows_by_mapping:
            uid, gid = view.client_ids(info.st_uid, info.st_gid)
            mode, nlink = info.st_mode, info.st_nlink
            if mode & SET_ID:
                mode = view.shown_mode(mode, info.st_uid, info.st_gid, uid, gid)
            if view.hides and stat.S_ISDIR(mode):
                nlink = 1
        else:
            shown = view.show(attrs_of(name, info, fd))
            if shown is None:
                raise Stale
            mode, uid, gid, nlink = shown
        if asker is not None:
            uid, gid = asker.recognise(info.st_uid, info.st_gid, uid, gid)
        if self._gate and obj is self.nodes.root and view.fixed is not None:
            mode = stat.S_IFDIR | stat.S_IRWXU
            uid, gid = view.client_id("uid", view.fixed.uid), view.client_id("gid", view.fixed.gid)
        entry = EntryAttributes()
        nodeid = self.nodes.nodeid(number, obj)
        entry.st_ino = InodeT(nodeid)
        entry.generation = self.nodes.generation(nodeid, obj)
        entry.entry_timeout = entry.attr_timeout = 0  # until somebody proves that the kernel may remember it
        entry.st_mode, entry.st_uid, entry.st_gid, entry.st_nlink = mode, uid, gid, nlink
        entry.st_rdev = info.st_rdev
        entry.st_size = info.st_size
        obj.report_size(number, info.st_size)
        entry.st_blksize = info.st_blksize
        entry.st_blocks = info.st_blocks
        entry.st_atime_ns = info.st_atime_ns
        if self._no_client_cache and stat.S_ISDIR(info.st_mode):
            entry.st_mtime_ns = entry.st_ctime_ns = self._change()
        else:
            entry.st_mtime_ns = info.st_mtime_ns
            entry.st_ctime_ns = info.st_ctime_ns
        return entry

    def _change(self) -> int:
        """The time of a change that nobody was told before, for no_client_cache."""
        self._last_change = max(self._last_change + 1, time.time_ns())
        return self._last_change

    def _hand_out(self, at: Entered, name: bytes, fd: int, info: linux.Stat) -> EntryAttributes:
        """Answer a request by name: the kernel now holds one more reference. Takes `fd` over."""
        return self._named(at, name, self.nodes.resolve(fd, at.obj, name), info)

    def _named(self, at: Entered, name: bytes, obj: Object, info: linux.Stat) -> EntryAttributes:
        """Answer a request by name with what it leads to: the kernel now holds one more reference."""
        entry = self._entry(at, name, obj, info)
        obj.lookups += 1
        return entry

    def _entry(self, at: Entered, name: bytes, obj: Object, info: linux.Stat) -> EntryAttributes:
        """The attributes of what is called `name` in the directory, and how long to remember both."""
        fd = self.nodes.fd(obj)
        entry = self._attributes(at.number, at.view, obj, name, fd, info, at.asker)
        if at.who is not INSIDER:
            entry.entry_timeout, entry.attr_timeout = self.cache.of_name(at, obj, name, fd, info)
        return entry

    def _object(self, at: Entered, info: linux.Stat) -> EntryAttributes:
        """The attributes of what was asked about by its nodeid, and how long to remember them."""
        entry = self._attributes(at.number, at.view, at.obj, at.obj.name, at.fd, info, at.asker)
        if at.who is not INSIDER:
            entry.attr_timeout = self.cache.of_object(at.number, at.view, at.obj, at.fd, info)
        return entry

    # -- what is open ------------------------------------------------------------------------------

    def _require_descriptor(self) -> None:
        """Before anything is opened for a client. What is left is for other requests: close(2) may need a descriptor.

        Raises:
            OSError: EMFILE.
        """
        if len(self._open) >= self._max_open:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _opened(self, fd: int, at: Entered, *, as_opener: bool = False, flags: int = 0) -> FileHandleT:
        """Keep `fd`, which refers to what `at` says, for a client.

        Args:
            fd: the descriptor.
            at: object and stat are those of what was opened.
            as_opener: what follows is done as who opened it.
            flags: the client's, of open(2).
        """
        file = self._open[fd] = OpenFile(at, credentials(at.who.caller) if as_opener else None)
        file.appends = bool(flags & os.O_APPEND)
        if flags & os.O_TRUNC:
            at.obj.report_size(at.number, 0)
        self.nodes.opened(at.obj, fd)
        return FileHandleT(fd)

    async def _closed(self, fh: FileHandleT) -> None:
        """Close a client's file, which for a remote one means to tell its server."""
        file = self._open.pop(fh)
        self.nodes.closed(file.obj, fh)
        if file.obj.filesystem.remote:
            await trio.to_thread.run_sync(calls.close, fh, abandon_on_cancel=True)
        else:
            calls.close(fh)

    # -- the permitted caller's working directory --------------------------------------------------

    def _repair(self, obj: Object | None) -> None:
        """Somebody was refused this directory: see to it that those standing in it do not suffer.

        The kernel unhashes the dentry of a name that anybody was refused, for whatever reason, and getcwd(2) fails for
        everybody in it until somebody permitted looks it up again. The daemon does so at once, and a few times more:
        the kernel may get to the unhashing late.
        """
        if obj is None or (obj.lookups <= 0 and obj is not self.nodes.root) or self.tasks is None:
            return
        if obj.number in self._repairing:
            self._repairing[obj.number] += 1
            return
        names = []
        at: Object | None = obj
        while at is not None and at is not self.nodes.root:
            names.append(at.name)
            at = at.parent
        self._repairing[obj.number] = 0
        self.tasks.once("looking up again", self._look_up_again, obj.number, names[::-1])

    def _repair_entry(self, parent_inode: InodeT, name: bytes) -> None:
        """Somebody was refused this name before it was looked at: see `_repair`."""
        try:
            parent = self.nodes.get(parent_inode)
            if self.nodes.waits(parent):
                self._repair((parent.children or {}).get(name))
                return
            fd = calls.find(linux.ROOT, self.nodes.fd(parent), name, os.O_DIRECTORY)
        except OSError:
            return
        try:
            known = self.nodes.known(fd, parent)
        except OSError:
            return
        finally:
            calls.close(fd)
        self._repair(known)

    async def _look_up_again(self, number: int, names: list[bytes]) -> None:
        try:
            delays = iter(_REPAIR_DELAYS)
            while (delay := next(delays, None)) is not None:
                refusals = self._repairing[number]
                await trio.sleep(delay)
                for top in self._tops():
                    await trio.to_thread.run_sync(
                        linux.apart,
                        self._stat_from_inside,
                        os.path.join(top, *names),
                        limiter=self._one_repair,
                        abandon_on_cancel=True,
                    )
                if self._repairing[number] != refusals:
                    delays = iter(_REPAIR_DELAYS)
        finally:
            del self._repairing[number]

    def _tops(self) -> list[bytes]:
        mountpoint = os.fsencode(self.mountpoint)
        if not self.views.top:
            return [mountpoint]
        return [os.path.join(mountpoint, b"@" + os.fsencode(label)) for label in self.views.labels(ClientId(0))]

    def check_from_inside(self) -> None:
        """Look at the own mount, in a thread: returns when it answers.

        Raises:
            OSError: it does not.
            MountError: a listing does not know who reads it.
        """
        linux.act_as_daemon()
        me = threading.get_native_id()
        self._insiders.add(me)
        try:
            with os.scandir(self.mountpoint) as entries:  # noqa: TID251  (the mount, not the tree)
                next(entries, None)  # all of a large directory would take time and memory
        finally:
            self._insiders.discard(me)
        if self.last_reader != me:
            raise pyfuse3memory.unsupported("a listing does not know who reads it")

    def _stat_from_inside(self, path: bytes) -> None:
        linux.act_as_daemon()
        me = threading.get_native_id()
        self._insiders.add(me)
        try:
            os.stat(path)  # noqa: TID251  (the mount, not the tree)
        except OSError as exc:
            log.debug("%s: %s", path, exc)
        finally:
            self._insiders.discard(me)

    def _is_top(self, inode: InodeT) -> bool:
        """Is this the list of views at the root of the mount?"""
        return inode == ROOT and self.views.top
