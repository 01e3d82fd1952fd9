"""Operations on directories as lists of names."""

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Set
from functools import partial

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, InodeT, ReaddirToken, RequestContext

from .. import linux
from ..fuse.compatibility import UNKNOWN_INODE, keeps_listings, name_only, opened, requester
from ..identity import ClientId
from ..tree import calls
from ..tree.actor import DAEMON
from ..tree.index import Unstored
from ..tree.mounts import TooSoon
from ..tree.nodes import Nodes
from ..tree.objects import ALL_VIEWERS, Object, Stale
from ..tree.positions import END
from ..tree.request import Request
from ..tree.visibility import TooManyAncestors, VisibilityResult, is_entry_visible
from .core import CheckedAncestors
from .handles import Entry, OpenDirectory
from .names import NameOperations
from .operation import SLICE_SECONDS, operation

# stat(2) is timed for up to this many names of a batch. For a name that is in memory, it takes less than this:
_SAMPLES = 16
_WARM_SECONDS = 0.0001

# Names in a remote directory are read in batches of this many bytes: some hundred names, each of which takes a
# descriptor meanwhile.
_REMOTE_BATCH = 4096

# How long a listing waits for a remote file system mounted in the directory, before it leaves that out.
_ANSWER_SECONDS = 0.5

# About how many entries the lower mount is queried at a time: a reply of one page (fs/fuse/readdir.c) has no room for
# more.
_MOST_QUERIED = 32

# An answer that has something is sent after this time, even if it has room for more.
_REPLY_SECONDS = 0.01

# After how many entries the clock is read.
_ENTRIES_AT_ONCE = 16

_TOP = FileHandleT(2**62)  # no descriptor has this number


log = logging.getLogger(__name__)


def _read_names(nodes: Nodes, fd: int, far: Set[bytes], *, all_of_them: bool) -> list[tuple[bytes, int, int]]:
    """Return a batch of names, as `linux.getdents` does. The stats of all but those in `far` are in memory then."""
    entries = calls.getdents(linux.ROOT, fd)
    names = [name for name, _, _ in entries if name not in far]
    some = names if all_of_them else names[:: len(names) // _SAMPLES + 1]
    began = time.monotonic()
    _prefault_all(nodes, fd, some)
    if not all_of_them and time.monotonic() - began > _WARM_SECONDS * len(some):
        _prefault_all(nodes, fd, names)
    return entries


def _prefault_all(nodes: Nodes, fd: int, names: list[bytes]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            nodes.prefaulter.prefault_name(linux.ROOT, fd, name)


class Reply:
    """The answer to READDIRPLUS.

    Attributes:
        token: what pyfuse3 knows it by.
        until: when others are to be served (`time.monotonic`).
        has_entries: whether there is anything in it. An answer without entries would end the listing.
    """

    __slots__ = ("_began", "has_entries", "token", "until")

    def __init__(self, token: ReaddirToken) -> None:
        self.token = token
        self.has_entries = False
        self._began = time.monotonic()
        self.until = self._began + SLICE_SECONDS

    def must_wait(self) -> bool:
        """Whether others are to be served now. An answer with entries is sent then; one without is resumed later."""
        now = time.monotonic()
        return now > (self._began + _REPLY_SECONDS if self.has_entries else self.until)


class DirectoryOperations(NameOperations):
    """OPENDIR, READDIRPLUS, RELEASEDIR, FSYNCDIR."""

    @operation
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open the real directory as the caller."""
        if self._is_top(inode):
            return _TOP
        sought = self.reconnection.sought_child(ctx.pid, inode) if self.knfsd else None
        at = await (self._enter(inode, ctx) if sought is None else self._enter_as_kernel(inode))
        if sought is None:
            self._require_descriptor(at)
        try:
            fd = await self._do(at, self._open_directory)
        except PermissionError:
            return self._open_for_attributes(await self._again(at, inode, ctx), ctx)
        fh = FileHandleT(fd)
        directory = self.files.opened_directory(fd, at)
        directory.sought = sought
        if keeps_listings and not self.self_probe.threads and self.visibility.access_paths.is_up_to_date():
            directory.is_kept, has_entries = self.cache.complete_directories.may_cache_entries(at)
            if directory.is_kept:
                return opened(fh, keep_cache=has_entries)
        return fh

    def _open_directory(self, at: Request) -> int:
        return self.nodes.descriptors.with_descriptor(
            calls.open, at.credentials_for(os.R_OK), at.fd, os.O_RDONLY | os.O_DIRECTORY
        )

    @operation
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Report the names after position `start_id` that the caller who reads now may see.

        Each is reported with the position of the next one that the caller may see, or of the end: positions depend on
        nothing that is hidden. They are the real directory's own (getdents64(2)), encrypted, so that they survive
        deletions, a re-open and a restart.
        """
        ctx = requester(token)
        self.self_probe.last_reader = ctx.pid
        if ctx.pid in self.self_probe.threads:
            return  # no entries: what is known of them has to be watched
        if fh == _TOP:
            await self._read_top(start_id, token, ctx)
            return
        self.files.require_readable(fh)
        directory = self.files.directory(fh)
        if directory.sought is not None:
            sought = self.nodes.get(directory.sought)
            if self.nodes.mounts.waits(sought):
                await self._prefault(sought)
            self._report_sought(directory, directory.sought, start_id, token, ctx)
            return
        self.half_read.take(directory)
        reply = Reply(token)
        try:
            if not self._seek(fh, directory, start_id):
                return
            while True:
                if reply.must_wait():
                    if reply.has_entries:
                        break
                    reply.until = await self.turns.wait_for_turn(ctx.uid)
                # An entry is reported when it is known what comes next.
                directory.at_end = len(directory.pending) <= 1 and not await self._read_on(fh, directory)
                try:
                    has_room = await self._report(fh, directory, reply, ctx)
                    if has_room and directory.at_end and directory.proof is not None:
                        self.cache.complete_directories.end(directory.obj, directory.proof)
                    if not has_room or directory.at_end:
                        break
                except TooSoon as exc:
                    await trio.sleep(exc.seconds)
                    if directory.obj.filesystem.remote:
                        position, shown = directory.cookie, directory.shown
                        self._drop_pending(directory)
                        calls.lseek(fh, position, os.SEEK_SET)
                        directory.cookie, directory.shown = position, shown
        finally:
            if directory.obj.filesystem.remote:
                self._drop_pending(directory)
            self.half_read.put(directory)

    def _seek(self, fh: FileHandleT, directory: OpenDirectory, start_id: int) -> bool:
        """Go to a position as a client sees it; return False if it is the end."""
        if directory.tweak < 0:
            directory.tweak = self.nodes.positions.tweak(directory.obj.handle)
        if start_id and start_id == directory.shown:
            return directory.cookie != END
        # From the start, the present names are read (rewinddir(3p)): btrfs lists those that there were when the
        # directory was opened, or rewound.
        position = self.nodes.positions.real(directory.tweak, start_id) if start_id else 0
        if position == END:
            return False
        calls.lseek(fh, position, os.SEEK_SET)
        directory.cookie, directory.shown = position, start_id
        directory.pending = []
        directory.proof = None
        directory.begins = not start_id
        return True

    def _drop_pending(self, directory: OpenDirectory) -> None:
        """Drop remote entries that have not been reported: they are read again."""
        for fd in directory.found.values():
            calls.close(fd)
        directory.found = {}
        if directory.pending:
            directory.pending = []
            directory.cookie = directory.shown = -1

    async def _read_on(self, fh: FileHandleT, directory: OpenDirectory) -> bool:
        """Read more of the names; return False at the end. Afterwards, their stats are in memory, or they are open."""
        filesystem = directory.obj.filesystem
        silent: Set[bytes] = frozenset()
        if filesystem.in_memory and not self.nodes.mounts.waits(directory.obj):
            names = calls.getdents(linux.ROOT, fh)
        elif filesystem.remote:
            names = await self._read_remote(fh, directory)
        else:
            far = self.nodes.mounts.remote_names(directory.obj)
            read = partial(_read_names, self.nodes, fh, far, all_of_them=filesystem.waits)
            names = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
            silent = {name for name, _, _ in names if name in far and not await self._responds(directory.obj, name)}
        if not names:
            return False
        entries, after, kinds = zip(*names, strict=True)
        *shown, directory.end = self.nodes.positions.shown(directory.tweak, (*after, END))
        read_on = zip(entries, after, kinds, shown, strict=True)
        directory.pending += [it for it in read_on if it[0] not in silent] if silent else read_on
        return True

    async def _read_remote(self, fh: FileHandleT, directory: OpenDirectory) -> list[tuple[bytes, int, int]]:
        """Return more names of a remote directory, and open what they lead to."""
        far = self.nodes.mounts.remote_names(directory.obj)
        read = partial(self._read_some, fh, far)
        try:
            names, found = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        except OSError as exc:
            # It may have read names before it failed.
            calls.lseek(fh, directory.pending[-1][1] if directory.pending else max(directory.cookie, 0), os.SEEK_SET)
            if not self.nodes.descriptors.makes_room(exc):
                raise
            names, found = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        directory.found |= found
        for name in {name for name, _, _ in names} & far:
            if await self._responds(directory.obj, name):
                with contextlib.suppress(OSError):
                    opened = partial(self._open_to_list, fh, name)
                    directory.found[name] = await trio.to_thread.run_sync(opened, abandon_on_cancel=True)
        return names

    def _read_some(self, fh: int, far: Set[bytes]) -> tuple[list[tuple[bytes, int, int]], dict[bytes, int]]:
        names = calls.getdents(linux.ROOT, fh, _REMOTE_BATCH)
        found: dict[bytes, int] = {}
        try:
            for name, _, _ in names:
                if name in far or name in (b".", b".."):
                    continue
                try:
                    found[name] = self._open_to_list(fh, name)
                except OSError as exc:
                    if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                        raise
        except BaseException:
            for fd in found.values():
                calls.close(fd)
            raise
        return names, found

    def _open_to_list(self, fh: int, name: bytes) -> int:
        return self.finder.open(linux.ROOT, fh, name)

    async def _responds(self, obj: Object, name: bytes) -> bool:
        """Whether what is mounted at `name` answers within a moment: no listing may have to wait for it."""
        key = obj.number, name
        answered = self._unanswered.get(key)
        if answered is None:
            answered = self._unanswered[key] = trio.Event()
            assert self.tasks is not None
            self.tasks.once("checking what is mounted", self._await_response, obj, name, answered)
        with trio.move_on_after(_ANSWER_SECONDS):
            await answered.wait()
        return answered.is_set()

    async def _await_response(self, obj: Object, name: bytes, answered: trio.Event) -> None:
        try:
            await self._prefault(obj, name)
            answered.set()
        except (OSError, RuntimeError) as exc:  # no descriptor, or no thread
            log.debug("%r: not checked: %s", name, exc)
        finally:
            del self._unanswered[obj.number, name]

    async def _report(
        self,
        fh: FileHandleT,
        directory: OpenDirectory,
        reply: Reply,
        ctx: RequestContext,
        checked: CheckedAncestors | None = None,
    ) -> bool:
        """Report the names that were read, as many as there is time for; return False when the reply is full."""
        obj = directory.obj
        most = len(directory.pending)
        if self.nodes.mounts.waits(obj):
            if self.views.lower is not None and directory.found:
                most = _MOST_QUERIED
            found = [directory.found[name] for name, *_ in directory.pending[:most] if name in directory.found]
            served = await self._served_prefaulted(obj, self._nodeid(directory), ctx, listed=found)
        else:
            served = await self.callers.served(self._nodeid(directory), ctx)
        number, view, who, viewer = served
        if not self.cache.subtree_check:
            self.cache.note_viewer(number, obj, self.cache.viewer_of(obj, viewer, who))
        info = obj.filesystem.stat(fh)
        try:
            is_hidden = view.hides and self._check_visibility(view, who, obj, info, checked) is VisibilityResult.HIDDEN
        except TooManyAncestors:
            checked = await self._check_ancestors(obj, self._nodeid(directory), ctx, checked)
            return await self._report(fh, directory, reply, ctx, checked)
        if (
            not is_hidden
            and (self.nodes.registry.disconnected or not obj.filesystem.watched)
            and self._is_outside(view, who, obj)
        ):
            self.requests.counters.hidden_handles += 1
            raise Stale
        if is_hidden:
            self.visibility.note_hidden(view, who, obj)
            self.requests.counters.hidden_handles += 1
            raise Stale
        if self.cache.subtree_check:
            self.cache.note_viewer(number, obj, viewer)
        at = Request(number, view, who, obj, fh, info, viewer, self.callers.checked_caller(view, who, ctx))
        if directory.is_kept:
            self.visibility.access_paths.is_up_to_date()
            self.cache.complete_directories.check_reader(at)
        with self.nodes.index.batch():
            return self._fill(at, directory, reply, most)

    def _report_sought(
        self, directory: OpenDirectory, sought: int, start_id: int, token: ReaddirToken, ctx: RequestContext
    ) -> None:
        """List only the entry for which the kernel reads this directory."""
        view = self.views.get(directory.number)
        if start_id or view is None or self.reconnection.sought_child(ctx.pid, self._nodeid(directory)) != sought:
            return
        obj = self.nodes.get(sought)
        fd = self.nodes.descriptors.fd(obj)
        info = obj.filesystem.stat(fd)
        name = next((name for parent, name in self.nodes.locator.places(obj, info) if parent is directory.obj), None)
        if name is None:
            return
        self.reconnection.found(ctx.pid, name)
        if pyfuse3.readdir_reply(token, name, self.replies.attributes(directory.number, view, obj, name, fd, info), 1):
            obj.lookups += 1

    def _nodeid(self, directory: OpenDirectory) -> InodeT:
        return InodeT(self.nodes.nodeid(directory.number, directory.obj))

    def _fill(self, at: Request, directory: OpenDirectory, reply: Reply, most: int) -> bool:
        """Report up to `most` of the pending entries, as many as there is time for; return False if it is full.

        The last one that is shown remains pending, until it is known what comes next.
        """
        if directory.begins:
            directory.begins = False
            directory.proof = self.cache.complete_directories.begin(at)
        # What the kernel already knows takes as little as possible: directories may have very many names.
        viewer = self.cache.viewer_of(at.obj, at.viewer, at.who)
        proof, number, unreported = directory.proof, at.number, directory.unreported
        if proof is not None and proof.is_proven:
            proof = None
        is_known_to, nodeid, readdir_reply = self.cache.is_known_to, self.nodes.nodeid, pyfuse3.readdir_reply
        token, found, expired = reply.token, directory.found, self.expired_names.nodeids
        # It must be what the name leads to now: every change made until now has to have been reported.
        known = (at.obj.children or {}) if at.who is not DAEMON and self.visibility.access_paths.is_up_to_date() else {}
        pending = directory.pending
        # The last one that is shown, with what to report of it: attributes, or an inode number alone.
        last: Entry | None = None
        last_shown: EntryAttributes | int = 0
        reached: Entry | None = None  # the last one that is reported, or left out
        done = 0
        left: list[bytes] = []
        try:
            for done, it in enumerate(pending[:most]):
                if done % _ENTRIES_AT_ONCE == 0 and done and reply.must_wait():
                    return True
                name = it[0]
                obj = known.get(name)
                shown: EntryAttributes | int | None
                if proof is not None:
                    self.cache.complete_directories.check_entry(at, proof, name)
                if (
                    obj is not None
                    and name not in unreported
                    and (obj.rare is None or not obj.others)  # a policy may hide one of several names of a file
                    and is_known_to(number, obj, viewer)
                    and not (expired and nodeid(number, obj) in expired)
                ):
                    shown = nodeid(number, obj)
                else:
                    shown = self._entry_of(at, directory, name)
                    if shown is None:
                        self.cache.complete_directories.invalidate(at.obj)
                        self._drop_found(directory, name)
                        if last is None:
                            reached = it
                        else:
                            last = last[0], it[1], last[2], it[3]
                        continue
                if last is not None:
                    if isinstance(last_shown, int) and not found:  # as `_add` does, without the call
                        has_room = readdir_reply(token, last[0], name_only(last_shown, last[2]), last[3])
                    else:
                        has_room = self._add(directory, reply, last, last_shown)
                    if not has_room:
                        if not isinstance(shown, int):
                            left.append(name)
                        return False
                    reply.has_entries = True
                    reached = last
                last, last_shown = it, shown
            done = min(most, len(pending))
            if last is not None and directory.at_end:
                end = last[0], END, last[2], directory.end
                if not self._add(directory, reply, end, last_shown):
                    return False
                reached, last = end, None
            return True
        finally:
            if reached is not None:
                _, directory.cookie, _, directory.shown = reached
            directory.pending = pending[done:]
            if last is not None:
                directory.pending.insert(0, last)
                if not isinstance(last_shown, int):
                    left.append(last[0])
            directory.unreported = tuple(left)

    def _add(self, directory: OpenDirectory, reply: Reply, it: Entry, shown: EntryAttributes | int) -> bool:
        """Report an entry, with these attributes or an inode number alone; return False if there is no room."""
        name, _, kind, position = it
        if isinstance(shown, int):
            if not pyfuse3.readdir_reply(reply.token, name, name_only(shown, kind), position):
                return False
        else:
            if not pyfuse3.readdir_reply(reply.token, name, shown, position):
                return False
            if name not in (b".", b".."):
                self.nodes.get(shown.st_ino).lookups += 1
                self.expired_names.renewed(shown.st_ino)
        reply.has_entries = True
        if directory.found:
            self._drop_found(directory, name)
        return True

    @staticmethod
    def _drop_found(directory: OpenDirectory, name: bytes) -> None:
        fd = directory.found.pop(name, -1)
        if fd >= 0:
            calls.close(fd)

    def _entry_of(self, at: Request, directory: OpenDirectory, name: bytes) -> EntryAttributes | int | None:
        """Return the attributes to report for an entry, or its inode number alone; None if it is hidden or gone."""
        if name == b".":
            return self.replies.attributes(at.number, at.view, at.obj, at.obj.name, at.fd, at.info, at.checked_caller)
        if name == b"..":
            return self._dot_dot(at)
        # The right to list is enough for names; before a caller gets attributes, the kernel sends LOOKUP.
        if at.obj.filesystem.remote:
            found = directory.found.get(name, -1)  # which stays until the entry has been reported
            return (
                self._entry_found(at, name, self.nodes.descriptors.with_descriptor(calls.dup, found))
                if found >= 0
                else None
            )
        try:
            info, _ = calls.statx(linux.ROOT, at.fd, name)
            obj = self.nodes.descriptors.at_place(at.obj, name, info)
            if obj is not None:
                if is_entry_visible(at.view, at.who, name, info, obj.fd):
                    return self._shown(at, name, obj, info)
                self.requests.counters.hidden_entries += 1
                return None
            fd = self.nodes.descriptors.with_descriptor(calls.find, linux.ROOT, at.fd, name)
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            return None
        return self._entry_found(at, name, fd)

    def _entry_found(self, at: Request, name: bytes, fd: int) -> EntryAttributes | int | None:
        """Return what to report (`_entry_of`) of what `fd` (O_PATH) refers to. Takes ownership of `fd`."""
        try:
            info = self.nodes.mounts.stat(fd)
            if not is_entry_visible(at.view, at.who, name, info, fd):
                self.requests.counters.hidden_entries += 1
                calls.close(fd)
                return None
        except BaseException as exc:
            calls.close(fd)
            if isinstance(exc, PermissionError) and not isinstance(exc, TooSoon):
                return None  # it is on an excluded mount (`TreeMounts.stat`)
            raise
        try:
            obj = self.nodes.registry.resolve(fd, at.obj, name, info)
        except Unstored:
            return UNKNOWN_INODE  # it can be listed all the same
        return self._shown(at, name, obj, info)

    def _shown(self, at: Request, name: bytes, obj: Object, info: linux.Stat) -> EntryAttributes | int | None:
        viewer = at.viewer if obj.audience >= ALL_VIEWERS else self.cache.viewer_of(obj, at.viewer, at.who)
        if not self.cache.may_list(at.number, obj, viewer, is_directory=stat.S_ISDIR(info.st_mode)):
            return self.nodes.nodeid(at.number, obj)
        try:
            return self.replies.entry(at, name, obj, info)
        except Stale:
            return None

    def _dot_dot(self, at: Request) -> EntryAttributes:
        """Return the entry "..", of which programs use the inode number alone."""
        obj = at.obj
        if obj is self.nodes.root:
            if self.views.top:
                return self.replies.top()
        elif obj.parent is not None:
            obj = obj.parent
        fd = self.nodes.descriptors.fd(obj)
        return self.replies.attributes(at.number, at.view, obj, obj.name, fd, obj.filesystem.stat(fd))

    async def _read_top(self, start_id: int, token: ReaddirToken, ctx: RequestContext) -> None:
        for cookie, name in (1, b"."), (2, b".."):
            if cookie > start_id and not pyfuse3.readdir_reply(token, name, self.replies.top(), cookie):
                return
        root, reply = self.nodes.root, Reply(token)
        for number, label, view in self.views.after(max(start_id - 2, 0)):
            if view.admits(ClientId(ctx.uid)):
                fd = self.nodes.descriptors.fd(root)
                entry = self.replies.attributes(number, view, root, b"", fd, root.filesystem.stat(fd))
                root.lookups += 1
                if not pyfuse3.readdir_reply(token, b"@" + os.fsencode(label), entry, number + 2):
                    return
                reply.has_entries = True
            if reply.must_wait():
                if reply.has_entries:
                    return
                reply.until = await self.turns.wait_for_turn(ctx.uid)

    @operation
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close the directory, since the last of the client's descriptors is gone."""
        if fh != _TOP:
            self.half_read.take(self.files.directory(fh))
            self._close(fh)

    @operation
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """See fsync(2)."""
        if fh != _TOP:
            await trio.to_thread.run_sync(calls.fdatasync if datasync else calls.fsync, fh, abandon_on_cancel=True)
