"""Checks, inside a daemon, that what the kernel caches holds for all callers to which the kernel could show it.

`install` is for `conftest.daemons_with`. The daemon then notes what its replies let the kernel cache for longer than an
instant, and what it invalidates. Whenever nothing is left to be read or to be invalidated, it checks against the real
tree that

- a caller that knows of an object belongs to the audience of the object,
- each cached name, and all attributes that are cached, hold for the whole audience: each caller in it, whatever
  its groups are, sees the object and everything above, and may search the directory of the name,
- each negative dentry is true for all callers, and where something is hidden at all, known to one uid alone, from
  which nothing in that directory is hidden,
- each ACL that the kernel caches, also because it does not read the attributes of the object, is the present one and
  holds for the same audience (every mount is checked as on a kernel without the fix of CVE-2026-68149),
- the entries that the kernel caches of a directory are there, and visible to all callers that were given them,
- a caller that learns of a directory by a LOOKUP may know all names that are cached in it by then,
- each name in a listing is one that its reader sees.

The audience is taken to include every caller that got there by "..", from a directory that the kernel has below this
one. `Policy.visible` alone decides what a view shows, and mode bits and ACLs who may search. Nothing of
`cloakfs.kernelcache.timeouts` is used. Violations are logged, in lines that begin with "ORACLE". The daemon answers
statfs(2) only after such a check.

With delays, it also holds back some replies, reads the events of fanotify(7) late, and invalidates some names late.
"""

import contextlib
import errno
import logging
import math
import os
import random
import stat
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    XAttrNameT,
)

from cloakfs import acl, linux
from cloakfs.filesystem import Filesystem
from cloakfs.filesystem.directories import Reply
from cloakfs.filesystem.handles import OpenDirectory
from cloakfs.fuse.compatibility import is_name_only, requester
from cloakfs.identity import Caller, ClientId, ServerId
from cloakfs.kernelcache import invalidation, notifier
from cloakfs.kernelcache.sharedwatch import SharedWatch
from cloakfs.kernelcache.watch import _BATCH, Watch
from cloakfs.linux import fanotify
from cloakfs.linux.fanotify import Event
from cloakfs.mount import start, watching
from cloakfs.policy import Attrs
from cloakfs.state.runtime import RUN_DIR
from cloakfs.tree.actor import DAEMON
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.objects import ALL_VIEWERS, NO_VIEWER, Object, Viewer, group_of
from cloakfs.tree.request import Request
from cloakfs.view import View
from tests.altered import replace
from tests.waiting import wait_in_loop

if TYPE_CHECKING:
    from tests.mount.conftest import Mount

_pyfuse3: Any = pyfuse3  # of which functions are replaced
_invalidation: Any = invalidation
_notifier: Any = notifier
_fanotify: Any = fanotify

log = logging.getLogger("cloakfs.oracle")

MARK = "ORACLE"
"""Begins what is logged about a violation."""

STRANGER = ServerId(4_000_001)
"""A uid and gid that own nothing."""

_POLL_SECONDS = 0.001  # how often to look for changes behind the mount
_AN_INSTANT = 0.003  # a little longer than the timeout of attributes for one system call
_QUIET_SECONDS = 60.0  # how long the daemon may take until nothing is left to be invalidated
# The share of replies that are held back, and of directories whose names are invalidated late; how long at most.
_HELD_BACK, _REPLY_SECONDS, _EVENT_SECONDS, _NAMES_SECONDS = 0.25, 0.02, 0.05, 0.06

Name = tuple[int, bytes]
"""The nodeid of a directory, and a name in it."""


def violations(mount: "Mount") -> list[str]:
    """Return all violations that the daemon of this mount has found so far, after it has checked once more."""
    os.statvfs(mount.path)
    return [line for line in mount.log.splitlines() if MARK in line]


class Attributes(NamedTuple):
    """What the kernel knows of an object."""

    until: float
    mode: int
    uid: int
    gid: int


class Entry(NamedTuple):
    """What the kernel knows of a name; the nodeid is 0 for an absent one."""

    until: float
    nodeid: int


class Tree:
    """The real tree at one moment; paths are relative to its top, which is ""."""

    def __init__(self, top: str) -> None:
        self.top = top
        self.infos = {"": os.stat(top)}
        self._acls: dict[tuple[str, str], bytes] = {}
        todo = [""]
        while todo:
            at = todo.pop()
            with contextlib.suppress(OSError), os.scandir(os.path.join(top, at)) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        path = os.path.join(at, entry.name)
                        self.infos[path] = info = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(info.st_mode):
                            todo.append(path)
        self._places: dict[tuple[int, int], list[str]] = defaultdict(list)
        for path, info in self.infos.items():
            self._places[info.st_dev, info.st_ino].append(path)
        self._seen: dict[tuple[View, Caller, str], bool] = {}

    def places(self, info: os.stat_result) -> list[str]:
        """Return all paths of an object."""
        return self._places.get((info.st_dev, info.st_ino), [])

    def chain(self, path: str) -> list[str]:
        """Return the paths of an object and of all directories above it, without the top, which is never hidden."""
        parts = path.split("/") if path else []
        return ["/".join(parts[: n + 1]) for n in range(len(parts))]

    def shows(self, view: View, who: Caller, path: str) -> bool:
        """Whether this identity sees what is at the path, and all directories above."""
        if not path:
            return True
        known = self._seen.get((view, who, path))
        if known is None:
            info = self.infos[path]
            attrs = Attrs(os.path.basename(path), info.st_mode, ServerId(info.st_uid), ServerId(info.st_gid))
            above = self.shows(view, who, os.path.dirname(path))
            known = self._seen[view, who, path] = above and view.policy.visible(who, attrs)
        return known

    def acl(self, path: str, name: str = "system.posix_acl_access") -> bytes:
        """Return an ACL, as the extended attribute of this name has it; nothing if there is none."""
        if (path, name) not in self._acls:
            try:
                value = os.getxattr(os.path.join(self.top, path), name, follow_symlinks=False)
            except OSError:
                value = b""
            self._acls[path, name] = value
        return self._acls[path, name]

    def may_search(self, who: Caller, path: str) -> bool:
        """Whether this identity may search the directory: acl(5), but Linux ignores an ACL that masks everything."""
        info = self.infos[path]
        if who.uid in (0, info.st_uid):
            return who.uid == 0 or bool(info.st_mode & stat.S_IXUSR)
        value = self.acl(path)
        if not value or not info.st_mode & stat.S_IRWXG:  # acl_permission_check in fs/namei.c
            return bool(info.st_mode & (stat.S_IXGRP if info.st_gid in who.groups else stat.S_IXOTH))
        entries = list(struct.iter_unpack("<HHI", value[4:]))
        mask = next((perm for tag, perm, _ in entries if tag == 0x10), 7)
        for tag, perm, entry_id in entries:
            if tag == 2 and entry_id == who.uid:
                return bool(perm & mask & 1)
        of_groups = [
            perm & mask & 1
            for tag, perm, entry_id in entries
            if (tag == 4 and info.st_gid in who.groups) or (tag == 8 and entry_id in who.groups)
        ]
        return any(of_groups) if of_groups else bool(info.st_mode & stat.S_IXOTH)


class Moment(NamedTuple):
    """What is true while nothing else runs; `viewers` are client uids, by what they may ask the kernel about."""

    tree: Tree
    time: float
    viewers: dict[int, set[int]]


class Oracle:
    """What the kernel was told and has not been made to invalidate."""

    def __init__(self, filesystem: Filesystem, top: str) -> None:
        self._filesystem = filesystem
        self._top = top
        self.watch: CheckedWatch | CheckedSharedWatch | None = None
        self.names: dict[Name, Entry] = {}
        self.references = Counter[int]()  # of each nodeid: the lookups that the kernel has not forgotten
        self.attributes: dict[int, Attributes] = {}
        self.told: dict[int, set[int]] = defaultdict(set)  # nodeid -> client uids, and groups (`_viewer`)
        self.acls: dict[tuple[int, bytes], bytes] = {}  # of a nodeid, by the name of the attribute; no value: no ACL
        self.acls_asked: set[int] = set()  # the kernel does not keep what it is made to invalidate while it asks
        self.above: dict[int, int] = {}  # a directory -> the one in which the kernel has it
        self.kept: dict[int, set[bytes]] = {}  # a directory -> names of entries that the kernel keeps
        self.readers: dict[int, set[int]] = defaultdict(set)  # a directory -> who was given its entries, as in `told`
        self.on_its_way = Counter[int]()  # replies that are held back, by the nodeids that they tell; 0 in each
        self._new: list[Name | int] = []
        self._listed: list[tuple[Name, Caller]] = []
        self._new_kept: set[int] = set()
        self._new_acls: set[tuple[int, bytes]] = set()
        self._reported: set[str] = set()

    # -- what is told ------------------------------------------------------------------------------

    def tells(self, nodeid: int, ctx: RequestContext) -> None:
        """Note that this caller learns of the object."""
        number, view, obj = self._find(nodeid)
        if view is None or obj is None or view.fixed is not None or ctx.pid in self._filesystem.self_probe.threads:
            return
        viewer = self._viewer(view, obj, ctx)
        self.told[nodeid].add(viewer)
        if number == 0 and obj.audience not in (ALL_VIEWERS, viewer):
            self._report(f"{ctx.uid} is told of {obj.name!r}, and its audience is {obj.audience}")

    @staticmethod
    def _viewer(view: View, obj: Object, ctx: RequestContext) -> int:
        """Return the audience of the object if it is a group, and the process is in it; else the client uid."""
        if obj.audience >= ALL_VIEWERS:
            return ctx.uid
        lines = Path(f"/proc/{ctx.pid}/status").read_text().splitlines()
        groups = next(line for line in lines if line.startswith("Groups:")).split()[1:]
        server_gids = {view.policy.ids["gid"].forward(ClientId(gid)) for gid in (ctx.gid, *map(int, groups))}
        return obj.audience if group_of(obj.audience) in server_gids else ctx.uid

    def note_reader(self, nodeid: int, ctx: RequestContext) -> None:
        """Note that this caller may be given the entries of a directory that the kernel keeps."""
        _, view, obj = self._find(nodeid)
        self.readers[nodeid].add(ctx.uid if view is None or obj is None else self._viewer(view, obj, ctx))

    def tells_attributes(self, entry: EntryAttributes) -> None:
        """Note which attributes the kernel may cache."""
        nodeid = int(entry.st_ino)
        self.attributes.pop(nodeid, None)
        if entry.attr_timeout > _AN_INSTANT:
            until = trio.current_time() + entry.attr_timeout
            self.attributes[nodeid] = Attributes(until, entry.st_mode, entry.st_uid, entry.st_gid)
            self._new.append(nodeid)

    def tells_name(self, parent: int, name: bytes, entry: EntryAttributes, ctx: RequestContext) -> None:
        """Note that the kernel may cache a name, and attributes of what it leads to."""
        if name in (b".", b".."):
            return
        nodeid = int(entry.st_ino)
        self.names.pop((parent, name), None)
        if entry.entry_timeout > _AN_INSTANT:
            self.names[parent, name] = Entry(trio.current_time() + entry.entry_timeout, nodeid)
            self._new.append((parent, name))
        if nodeid:
            self.references[nodeid] += 1
            if stat.S_ISDIR(entry.st_mode):
                self.above[nodeid] = parent
            self.tells(nodeid, ctx)
            self.tells_attributes(entry)

    def tells_acl(self, nodeid: int, name: bytes, value: bytes) -> None:
        """Note an ACL, or that there is none, which the kernel now caches unless it was invalidated meanwhile."""
        if nodeid in self.acls_asked:
            self.acls[nodeid, name] = value
            self._new_acls.add((nodeid, name))

    def forgets_attributes(self, nodeid: int) -> None:
        """Note that the kernel has been made to invalidate the attributes of an object, and its ACLs."""
        self.attributes.pop(nodeid, None)
        self.forgets_acls(nodeid)

    def forgets_acls(self, nodeid: int) -> None:
        """Note that the kernel has dropped the ACLs of an object."""
        self.acls_asked.discard(nodeid)
        for name in acl.XATTRS:
            self.acls.pop((nodeid, name), None)

    def lists(self, parent: int, name: bytes, who: Caller) -> None:
        """Note that this caller (server ids) learns of a name."""
        if name not in (b".", b".."):
            self._listed.append(((parent, name), who))

    def keeps(self, directory: int, names: Sequence[bytes]) -> None:
        """Note that the kernel keeps these entries of a directory."""
        self.kept.setdefault(directory, set()).update(name for name in names if name not in (b".", b".."))
        self._new_kept.add(directory)

    def changes(self, *directories: int) -> None:
        """Note a change with which the kernel by itself drops the entries that it keeps of these directories."""
        for directory in directories:
            self.kept.pop(directory, None)

    def moved(self, old: Name, new: Name, *, exchanged: bool) -> None:
        """Note a rename, with which the kernel moves what it caches."""
        self.changes(old[0], new[0])
        there, here = self.names.pop(new, None), self.names.pop(old, None)
        for name, entry in ((new, here), (old, there if exchanged else None)):
            if entry is not None:
                self.names[name] = entry
                if entry.nodeid in self.above:
                    self.above[entry.nodeid] = name[0]

    def forgets(self, nodeid: int, count: int) -> None:
        """Note that the kernel has forgotten lookups; with the last one, it has dropped the inode and all its names.

        `Object.lookups` are those of all views, each of which has an inode of its own.
        """
        self.references[nodeid] -= count
        if self.references[nodeid] > 0:
            return
        del self.references[nodeid]
        self.forgets_attributes(nodeid)
        self.told.pop(nodeid, None)
        self.above.pop(nodeid, None)
        self.kept.pop(nodeid, None)
        self.readers.pop(nodeid, None)
        for name in [name for name, entry in list(self.names.items()) if entry.nodeid == nodeid or name[0] == nodeid]:
            del self.names[name]

    # -- what must hold ----------------------------------------------------------------------------

    def is_calm(self) -> bool:
        """Whether the daemon knows of every change, and has nothing to do."""
        return self._is_told() and self._is_done()

    def _is_told(self) -> bool:
        """Whether the daemon knows of every change made by others."""
        return self.watch is None or self.watch.is_told()

    def _is_done(self) -> bool:
        """Whether the kernel has invalidated all that it has to invalidate, and has got all answers."""
        cache: Any = self._filesystem.cache.invalidation
        names = cache.notifier
        return not (
            self.on_its_way[0] or cache.subtrees or cache._full_invalidations or names._queues or names._deferred
        )

    async def settle(self) -> None:
        """Wait until the daemon knows of every change made until now, and check everything that is cached."""
        watch = self.watch
        heard = watch.heard if watch is not None else 0
        if watch is not None:
            await wait_in_loop(lambda: watch.is_silent() or watch.heard > heard, math.inf)
        try:
            await wait_in_loop(self._is_done, _QUIET_SECONDS)
        except AssertionError:
            self._report("something is still pending")
        self._check_references()
        now = self._moment()
        self._check(now, [*list(self.names), *list(self.attributes)])
        self._check_kept(now, list(self.kept))
        self._check_acls(now, list(self.acls))

    def check_new(self) -> None:
        """Check what was told since the last time, unless there are changes that the daemon need not know of yet.

        It has to hold also for those who get there by names that the kernel has yet to invalidate.
        """
        if (self._new or self._listed or self._new_kept or self._new_acls) and self._is_told():
            now = self._moment()
            self._check(now, self._new)
            if self._is_done():
                self._check(now, [], self._listed)
                self._check_kept(now, [nodeid for nodeid in self._new_kept if nodeid in self.kept])
                self._check_acls(now, [fact for fact in self._new_acls if fact in self.acls])
        self._new, self._listed, self._new_kept, self._new_acls = [], [], set(), set()

    def _moment(self) -> Moment:
        linux.act_as_daemon()
        return Moment(Tree(self._top), trio.current_time(), self._viewers())

    def _check(self, moment: Moment, facts: Sequence[Name | int], listed: Sequence[tuple[Name, Caller]] = ()) -> None:
        tree, now, viewers = moment
        for fact in facts:
            if isinstance(fact, tuple):
                entry = self.names.get(fact)
                if entry is not None and entry.until > now:
                    self._check_name(tree, fact, entry, viewers[fact[0]])
            else:
                attributes = self.attributes.get(fact)
                if attributes is not None and attributes.until > now:
                    self._check_attributes(tree, fact, attributes, viewers[fact])
        for (parent, name), who in listed:
            _, view, obj = self._find(parent)
            for place in self._places(tree, obj):
                there = os.path.join(place, os.fsdecode(name))
                if view is not None and there in tree.infos and not tree.shows(view, who, there):
                    self._report(f"{there} is listed, and hidden from {who}")

    def check_names_in(self, nodeid: int, ctx: RequestContext) -> None:
        """Check what this caller, who is being told of a directory, can find there without asking."""
        names = [(name, entry) for name, entry in list(self.names.items()) if name[0] == nodeid and entry.nodeid]
        _, view, obj = self._find(nodeid)
        if not names or view is None or obj is None or not self._is_told():
            return
        viewer = self._viewer(view, obj, ctx)
        if viewer in self.told[nodeid]:
            linux.act_as_daemon()
            tree = Tree(self._top)
            for name, entry in names:
                self._check_name(tree, name, entry, {viewer})

    def _viewers(self) -> dict[int, set[int]]:
        """Return who may ask the kernel about each object: client uids, groups, or ALL.

        They know of it, or get there by ".." or by names that the kernel has.
        """
        now = trio.current_time()
        leads_to: dict[int, set[int]] = defaultdict(set)
        for nodeid, above in self.above.items():
            leads_to[nodeid].add(above)
        for (parent, _), entry in list(self.names.items()):
            if entry.until > now and entry.nodeid:
                leads_to[parent].add(entry.nodeid)
        of_acls = (nodeid for nodeid, _ in list(self.acls))
        of_names = (parent for parent, _ in list(self.names))
        begins: dict[int, list[int]] = defaultdict(list)  # client uid -> nodeids
        for nodeid in {*self.told, *self.attributes, *of_acls, *of_names, *self.above}:
            obj = self._find(nodeid)[2]
            for uid in self.told.get(nodeid, set()) | ({obj.audience} - {NO_VIEWER} if obj is not None else set()):
                begins[uid].append(nodeid)
        viewers: dict[int, set[int]] = defaultdict(set)
        for uid, nodeids in begins.items():
            todo = [*nodeids]
            while todo:
                at = todo.pop()
                if uid not in viewers[at]:
                    viewers[at].add(uid)
                    todo += leads_to[at]
        return viewers

    def _check_references(self) -> None:
        registry = self._filesystem.nodes.registry
        counted = Counter[int]()
        for nodeid, count in self.references.items():
            counted[nodeid & (1 << 48) - 1] += count
        for number, obj in registry.by_number.items():
            if obj is not registry.root and obj.lookups != counted[number]:
                self._report(f"{obj.name!r} counts {obj.lookups} lookups, and {counted[number]} were answered")

    def _check_name(self, tree: Tree, name: Name, entry: Entry, viewers: set[int]) -> None:
        _, view, parent = self._find(name[0])
        places = self._places(tree, parent)
        if view is None or not places:
            return
        there = os.path.join(places[0], os.fsdecode(name[1]))
        info = tree.infos.get(there)
        if not entry.nodeid:
            if info is not None and (view.fixed is None or tree.shows(view, view.fixed, there)):
                self._report(f"{there} is cached as absent")
            if view.fixed is None and view.policy.hides and not self._shows_all(view, viewers, tree, places[0]):
                self._report(f"the negative dentry {there} is cached in a view that hides something")
            return
        obj = self._find(entry.nodeid)[2]
        if info is None or there not in self._places(tree, obj):
            self._report(f"{there} is cached, and leads elsewhere")
            return
        for who in self._identities(view, viewers, tree, there):
            if not tree.shows(view, who, there):
                self._report(f"the name {there} is cached for {viewers}, and hidden from {who}")
                break
            if not tree.may_search(who, places[0]):
                self._report(f"the name {there} is cached for {viewers}, and {who} may not search its directory")
                break

    def _check_attributes(self, tree: Tree, nodeid: int, told: Attributes, viewers: set[int]) -> None:
        _, view, obj = self._find(nodeid)
        places = self._places(tree, obj)
        if view is None or obj is None or not places:
            return
        info = tree.infos[places[0]]
        real = view.policy.show(Attrs("", info.st_mode, ServerId(info.st_uid), ServerId(info.st_gid)))
        set_id = told.mode & (stat.S_ISUID | stat.S_ISGID)  # some are not shown
        if (told.mode & ~set_id, told.uid, told.gid) != (
            real.mode & ~(stat.S_ISUID | stat.S_ISGID), real.uid, real.gid
        ) or set_id & ~real.mode:  # fmt: skip
            self._report(f"{told} is cached of {places}, which is {real}")
        for who in self._identities(view, viewers, tree, *places):
            if not any(tree.shows(view, who, place) for place in places):
                self._report(
                    f"the attributes of {places} are cached for {viewers}, and hidden from {who} "
                    f"(references: {obj.lookups}, views: {set(obj.cached_in)}, {told})"
                )
                break

    def _check_acls(self, moment: Moment, facts: Sequence[tuple[int, bytes]]) -> None:
        """Check these ACLs that the kernel keeps."""
        tree, _, viewers = moment
        for nodeid, name in facts:
            _, view, obj = self._find(nodeid)
            places = self._places(tree, obj)
            if view is None or not places:
                continue
            real = tree.acl(places[0], os.fsdecode(name))
            if (view.acl_out(real) if real else b"") != self.acls[nodeid, name]:
                self._report(f"another ACL is kept of {places}")
            for who in self._identities(view, viewers[nodeid], tree, *places):
                if not any(tree.shows(view, who, place) for place in places):
                    self._report(f"the ACL of {places} is kept for {viewers[nodeid]}, and hidden from {who}")
                    break

    def _shows_all(self, view: View, viewers: set[int], tree: Tree, directory: str) -> bool:
        """Whether these viewers are one uid or one group, and all of it see everything in the directory."""
        inside = [path for path in tree.infos if path and os.path.dirname(path) == directory]
        return len(viewers - {ALL_VIEWERS}) == len(viewers) == 1 and all(
            tree.shows(view, who, path) for path in inside for who in self._identities(view, viewers, tree, path)
        )

    def _check_kept(self, moment: Moment, directories: Sequence[int]) -> None:
        """Check the entries that the kernel keeps of these directories."""
        tree = moment.tree
        for directory in directories:
            _, view, obj = self._find(directory)
            for place in self._places(tree, obj):
                for name in sorted(self.kept.get(directory, ())):
                    there = os.path.join(place, os.fsdecode(name))
                    readers = self.readers[directory]
                    if there not in tree.infos:
                        self._report(f"the kernel keeps the entry {there}, which is gone")
                    elif view is not None and not all(
                        tree.shows(view, who, there) for who in self._identities(view, readers, tree, there)
                    ):
                        self._report(f"the kernel keeps the entry {there} for {readers}, and it is hidden from some")

    @staticmethod
    def _identities(view: View, viewers: set[int], tree: Tree, *paths: str) -> Iterator[Caller]:
        """Return the identities that these callers may have: each in none, one or all of the groups that matter.

        All callers are represented by the owners of what is on the way, and a stranger; the members of a group by the
        same, but all in that group.
        """
        if view.fixed is not None:
            yield view.fixed
            return
        infos = [tree.infos[part] for path in paths for part in ["", *tree.chain(path)]]
        gids = {ServerId(info.st_gid) for info in infos}
        uids = {view.policy.ids["uid"].forward(ClientId(uid)) for uid in viewers if uid >= 0}
        if ALL_VIEWERS in viewers:
            uids |= {STRANGER, *(ServerId(info.st_uid) for info in infos)}
        several = (frozenset[ServerId](), *(frozenset({gid}) for gid in gids), frozenset(gids))
        for uid in uids:
            for groups in several:
                yield Caller(uid, STRANGER, groups | {STRANGER})
        for group in {group_of(Viewer(viewer)) for viewer in viewers if viewer < ALL_VIEWERS}:
            for uid in {STRANGER, *(ServerId(info.st_uid) for info in infos)}:
                for groups in several:
                    yield Caller(uid, STRANGER, groups | {STRANGER, group})

    def _find(self, nodeid: int) -> tuple[int, View | None, Object | None]:
        nodes = self._filesystem.nodes
        number = nodes.view_of(nodeid)
        return number, self._filesystem.views.get(number), nodes.registry.by_number.get(nodeid & (1 << 48) - 1)

    def _places(self, tree: Tree, obj: Object | None) -> list[str]:
        if obj is None:
            return []
        linux.act_as_daemon()
        try:
            return tree.places(os.fstat(self._filesystem.nodes.descriptors.fd(obj)))
        except OSError:
            return []  # it is gone

    def _report(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            log.warning("%s %s", MARK, what)


class CheckedFilesystem(Filesystem):
    """The operations of a daemon that checks what it answers."""

    delays: ClassVar[random.Random | None] = None

    def __init__(self, nodes: Nodes, *args: Any, **kwargs: Any) -> None:
        super().__init__(nodes, *args, **kwargs)
        self.oracle = oracle = Oracle(self, nodes.mounts._source)
        self._listing: Request | None = None  # the directory that is being listed
        self._told_in_listing: list[int] = []
        self._names_in_listing: list[bytes] = []
        watch = self.cache.watch

        def add_watch(added: Watch | SharedWatch) -> None:
            assert isinstance(added, CheckedWatch | CheckedSharedWatch)
            oracle.watch = added
            watch(added)

        share = self.cache.share_changes

        async def share_changes(make: Callable[[], SharedWatch]) -> bool:
            made: list[SharedWatch] = []

            def note() -> SharedWatch:
                made.append(make())
                return made[0]

            shares = await share(note)
            if shares:
                (added,) = made
                assert isinstance(added, CheckedSharedWatch)
                oracle.watch = added
            return shares

        self.cache.watch = add_watch  # type: ignore[assignment]
        self.cache.share_changes = share_changes  # type: ignore[method-assign]
        self._note_listings()
        self._note_what_is_forgotten()

    def _note_listings(self) -> None:
        reply = pyfuse3.readdir_reply

        def noting(token: ReaddirToken, name: bytes, entry: EntryAttributes, cookie: int) -> bool:
            has_room = reply(token, name, entry, cookie)
            at = self._listing
            if has_room and at is not None and at.who is not DAEMON:
                parent = self.nodes.nodeid(at.number, at.obj)
                self._names_in_listing.append(name)
                self.oracle.lists(parent, name, at.who.caller)
                if not is_name_only(entry):
                    self.oracle.tells_name(parent, name, entry, requester(token))
                    self._told_in_listing.append(int(entry.st_ino))
            elif has_room and name not in (b".", b"..") and not is_name_only(entry):
                self.oracle.references[int(entry.st_ino)] += 1  # for the daemon, or for the kernel to reconnect it
            return has_room

        _pyfuse3.readdir_reply = noting

    def _note_what_is_forgotten(self) -> None:
        oracle, increment_epoch = self.oracle, self.cache.invalidation.notifier.increment_epoch
        invalidate_entry, invalidate_inode = pyfuse3.invalidate_entry, pyfuse3.invalidate_inode

        def entry(parent: InodeT, name: bytes, *args: Any) -> None:
            try:
                invalidate_entry(parent, name, *args)
            finally:  # if it fails, the kernel does not know the name
                oracle.names.pop((parent, name), None)

        def inode(nodeid: InodeT, *args: Any, **kwargs: Any) -> None:
            if not kwargs.get("attr_only"):
                oracle.kept.pop(nodeid, None)
            try:
                invalidate_inode(nodeid, *args, **kwargs)
            except OSError:
                if not oracle.on_its_way[nodeid]:  # else the kernel does not know it yet
                    oracle.forgets_attributes(nodeid)
                raise
            oracle.forgets_attributes(nodeid)

        def every() -> bool:
            done = increment_epoch()
            if done:
                oracle.names.clear()
            return done

        _pyfuse3.invalidate_entry, _pyfuse3.invalidate_inode = entry, inode
        self.cache.invalidation.notifier.increment_epoch = every  # type: ignore[method-assign]

    async def _send(self, *nodeids: int) -> None:
        """Check what is about to be answered, and hold it back for a moment if there are to be delays."""
        self.oracle.check_new()
        chance = self.delays
        if chance is not None and chance.random() < _HELD_BACK:
            held_back = (0, *nodeids)
            self.oracle.on_its_way.update(held_back)
            try:
                await trio.sleep(chance.random() * _REPLY_SECONDS)
            finally:
                self.oracle.on_its_way.subtract(held_back)

    async def _send_name(
        self, parent: int, name: bytes, answer: Awaitable[EntryAttributes], ctx: RequestContext
    ) -> EntryAttributes:
        entry = await answer
        self.oracle.tells_name(parent, name, entry, ctx)
        await self._send(int(entry.st_ino))
        return entry

    def _answered(self) -> int:
        return sum(self.requests.counts().values())

    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        was_calm, count = self.oracle.is_calm(), self._answered()
        try:
            entry = await super().lookup(parent_inode, name, ctx)
        except FUSEError:
            self.oracle.names.pop((parent_inode, name), None)  # the kernel asks only if it is not sure any more
            raise
        self.oracle.tells_name(parent_inode, name, entry, ctx)
        if (
            was_calm and self._answered() == count + 1 and not self.requests.waiting.total
        ):  # no process is changing anything
            self.oracle.check_names_in(int(entry.st_ino), ctx)
        await self._send(int(entry.st_ino))
        return entry

    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        return await self._send_name(parent_inode, name, super().mkdir(parent_inode, name, mode, ctx), ctx)

    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._send_name(parent_inode, name, super().mknod(parent_inode, name, mode, rdev, ctx), ctx)

    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self._send_name(parent_inode, name, super().symlink(parent_inode, name, target, ctx), ctx)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        answer = super().link(inode, new_parent_inode, new_name, ctx)
        return await self._send_name(new_parent_inode, new_name, answer, ctx)

    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        opened, entry = await super().create(parent_inode, name, mode, flags, ctx)
        self.oracle.tells_name(parent_inode, name, entry, ctx)
        await self._send(int(entry.st_ino))
        return opened, entry

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        self.oracle.forgets_acls(inode)  # as the kernel does before it asks
        entry = await super().getattr(inode, ctx)
        self.oracle.tells(inode, ctx)
        self.oracle.tells_attributes(entry)
        await self._send(inode)
        return entry

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        if name not in acl.XATTRS or self._is_top(inode):
            return await super().getxattr(inode, name, ctx)
        self.oracle.acls_asked.add(inode)
        try:
            value = await super().getxattr(inode, name, ctx)
        except FUSEError as exc:
            if exc.errno == errno.ENODATA:
                self.oracle.tells_acl(inode, name, b"")
                await self._send(inode)
            raise
        self.oracle.tells_acl(inode, name, value)
        await self._send(inode)
        return value

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        entry = await super().setattr(inode, attr, fields, fh, ctx)
        self.oracle.tells(inode, ctx)
        self.oracle.tells_attributes(entry)
        await self._send(inode)
        return entry

    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await super().unlink(parent_inode, name, ctx)
        self.oracle.changes(parent_inode)
        self.oracle.names.pop((parent_inode, name), None)
        await self._send()

    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await super().rmdir(parent_inode, name, ctx)
        self.oracle.changes(parent_inode)
        self.oracle.names.pop((parent_inode, name), None)
        await self._send()

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await super().rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx)
        is_exchange = bool(flags & linux.RENAME_EXCHANGE)
        self.oracle.moved((parent_inode_old, name_old), (parent_inode_new, name_new), exchanged=is_exchange)
        await self._send()

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        opened = await super().opendir(inode, ctx)
        if isinstance(opened, FileInfo):
            self.oracle.note_reader(inode, ctx)
            if not opened.keep_cache:
                self.oracle.changes(inode)
        return opened

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        await super().readdir(fh, start_id, token)
        listed, self._told_in_listing = self._told_in_listing, []
        await self._send(*listed)

    def _fill(self, at: Request, directory: OpenDirectory, reply: Reply, most: int) -> bool:
        self._listing, self._names_in_listing = at, []
        try:
            return super()._fill(at, directory, reply, most)
        finally:
            self._listing = None
            if directory.is_kept:
                self.oracle.keeps(self.nodes.nodeid(at.number, at.obj), self._names_in_listing)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        await super().forget(inode_list)
        for nodeid, count in inode_list:
            self.oracle.forgets(nodeid, count)

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        await self.oracle.settle()
        return await super().statfs(ctx)


async def _pause(delays: random.Random | None) -> None:
    """Wait for a while before the daemon hears of anything."""
    await trio.sleep(_POLL_SECONDS if delays is None else delays.random() * _EVENT_SECONDS)


class CheckedWatch(Watch):
    """Events of which the daemon may hear late, and the oracle does not.

    Attributes:
        heard: how often all events were read that there were.
    """

    delays: ClassVar[random.Random | None] = None
    heard = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ahead: deque[bytes] = deque()  # what the oracle has read, and the daemon has not
        read, ours = fanotify.read, self._marks.fd
        _fanotify.read = lambda fd, size: self._ahead.popleft() if self._ahead and fd == ours else read(fd, size)
        self._read_new = read

    def is_told(self) -> bool:
        """Whether the daemon has read of all changes but its own, which it need not be told."""
        while not super().is_silent():
            self._ahead.append(self._read_new(self._marks.fd, _BATCH))
        return all(event.own for raw in self._ahead for event in fanotify.parse(raw, self._own))

    def is_silent(self) -> bool:
        return not self._ahead and super().is_silent()

    async def changes(self) -> list[Event]:
        while True:
            await _pause(self.delays)
            if not self.is_silent() and (events := self.read()):
                return events

    def read(self) -> list[Event]:
        events = super().read()
        self._more = not self.is_silent()  # what was read ahead may be older than what is there
        self.heard += not self._more
        return events


class CheckedSharedWatch(SharedWatch):
    """Events that come from the watcher, of which the daemon may hear late, and the oracle does not."""

    delays: ClassVar[random.Random | None] = None
    heard = 0

    def __init__(self, directory: str = RUN_DIR, **kwargs: Any) -> None:
        self._ahead: deque[bytes] = deque()
        super().__init__(directory, **kwargs)

    def is_told(self) -> bool:
        """Whether the daemon has read of all changes but its own, which it need not be told."""
        while (link := self._link) is not None and not link.is_broken and not link.is_silent():
            if raw := link.read():
                self._ahead.append(raw)
        parsed = (fanotify.parse(raw, -1 if self._own else os.getpid()) for raw in self._ahead)
        return all(event.own for events in parsed for event in events)

    def is_silent(self) -> bool:
        return not self._ahead and super().is_silent()

    has_read_all = is_silent

    async def changes(self) -> list[Event]:
        while True:
            await _pause(self.delays)
            if self._link is None or self._link.is_broken:
                return await super().changes()
            if not self.is_silent() and (events := self.read()):
                return events

    def read(self) -> list[Event]:
        events = self.parse(self._ahead.popleft()) if self._ahead else super().read()
        self.heard += self.is_silent()
        return events


def invalidate_late(name: bytes | None, seconds: float, chance: random.Random | None = None) -> None:
    """Have the threads wait before they invalidate a batch of names that contains this one, or that `chance` selects.

    Args:
        name: None for no particular name.
        seconds: for how long they wait; at most, if `chance` is given.
        chance: selects batches whatever names they contain, and says how long to wait; None to select none.
    """
    invalidate_names = notifier.invalidate_names

    def late(parent: int, batch: Any, session: int) -> None:
        if name in batch.names or (chance is not None and chance.random() < _HELD_BACK):
            time.sleep(seconds if chance is None else chance.random() * seconds)
        invalidate_names(parent, batch, session)

    _notifier.invalidate_names = late


def install(delays: int | None = None, *, shared: bool = False, later: bool = False) -> None:
    """Make this process, which is about to become a daemon, check itself.

    Args:
        delays: with this seed, hold back replies and events, and invalidate names late; None for no delays.
        shared: have the watcher read what is changed, as where several mounts show the same.
        later: have it do so as soon as there is regular work, as where another mount shows the same by then.
    """
    replace(start, "Filesystem", CheckedFilesystem)
    replace(watching, "Watch", CheckedSharedWatch if shared else CheckedWatch)
    replace(watching, "SharedWatch", CheckedSharedWatch)
    is_alone = chain([True], repeat(not later))
    replace(watching, "is_alone", lambda _: next(is_alone))
    if delays is not None:
        CheckedFilesystem.delays = CheckedWatch.delays = CheckedSharedWatch.delays = random.Random(delays)
        invalidate_late(None, _NAMES_SECONDS, random.Random(delays))
