"""What the kernel may remember, and making it forget.

The kernel's dentries and attributes are shared by all callers of a mount. So in a caller view it may remember only
what every caller would be told: of an object that all see alike, below directories that all see and may search.
In a fixed view there is but one identity, and everything may be remembered, absent names, too, behind a gate that is
not: the name of the view, the kernel's own check of its top directory, or else the first level of names.

What was remembered is forgotten when it stops being true. Attributes at once, for that waits for nobody; a name as
soon as the kernel has it free, and before who changed it is answered, where that is possible.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import pyfuse3
import trio
from pyfuse3 import InodeT

from .. import linux, mounts
from ..caller import Caller
from ..door import attrs_of, everybody_may, sees, subject
from ..fanotify import (
    FAN_ATTRIB,
    FAN_CLOSE_WRITE,
    FAN_CREATE,
    FAN_DELETE,
    FAN_MODIFY,
    FAN_MOVED_FROM,
    FAN_MOVED_TO,
    FAN_ONDIR,
    FAN_Q_OVERFLOW,
    Event,
)
from ..nodes import Filesystem, Nodes, Object
from ..view import View
from ..views import Views
from ..watch import Watch

if TYPE_CHECKING:
    from .core import Entered

log = logging.getLogger(__name__)

LONG_SECONDS = 3600.0
"""How long the kernel remembers what it is told to forget when it changes, also behind the mount (fanotify(7))."""

SHORT_SECONDS = 1.0
"""How long it remembers where changes behind the mount are not told: so long may they go unnoticed."""

ABSENT_SECONDS = 10.0
"""How long it remembers, where it does, that a name leads nowhere.

Not longer, since of a hidden file that a server changes by handle, its mode for example, the kernel may not tell the
name.
"""

BRIEF_SECONDS = 0.002
"""How long it remembers attributes of anything else: the system call that asked for them may ask again."""

# How long to wait for the kernel to have a name free.
_PATIENCE_SECONDS = 1.0
# So many names that lead nowhere are remembered in top directories.
_MOST_ABSENT = 10_000
# After looking at what is mounted, so many times as long it is not looked at.
_SHARE_OF_MOUNTS = 20
# After what time to make it forget once more.
_AGAIN_SECONDS = 0.1

_NOBODY: frozenset[int] = frozenset()
_NAMES = FAN_CREATE | FAN_DELETE | FAN_MOVED_FROM | FAN_MOVED_TO


class KernelCache:
    """Decides for one mount what may be remembered how long.

    Args:
        nodes: the objects.
        views: what is offered.
        exported: a server of the kernel exports the mount: requests come by handle, without any LOOKUP.
        gated: the kernel itself keeps everybody else out of the only, fixed, view.
        forgetful: directories change with every answer (`no_client_cache`).
    """

    def __init__(
        self, nodes: Nodes, views: Views, *, exported: bool = False, gated: bool = False, forgetful: bool = False
    ) -> None:
        self._nodes = nodes
        self._views = views
        self._brief = 0.0 if exported or forgetful else BRIEF_SECONDS
        self._exported = exported
        self._forgetful = forgetful
        self._gated = gated or views.top
        self._told: dict[int, list[Filesystem]] = {}  # by the id that events bear
        self._sets: dict[frozenset[int], frozenset[int]] = {}  # one of each, for `Object.kept`
        self._lately: list[tuple[int, bytes | None]] = []  # nodeid, and a name in it or None for its attributes
        # View, and a name that is remembered to lead nowhere in its top; since when.
        self._absent: dict[tuple[int, bytes], float] = {}
        self._pages: set[int] = set()  # nodeids of files whose pages are outdated
        self._lost = False  # may changes behind the mount have gone unnoticed?
        self._mounts = nodes.mounts_below()
        nodes.on_shunned = self._forget_shunned

    # -- what may be remembered --------------------------------------------------------------------

    def of_name(self, at: "Entered", obj: Object, name: bytes, fd: int, info: os.stat_result) -> tuple[float, float]:
        """How long to remember that `obj` is called `name` in a directory, and its attributes, in seconds.

        Only for an answer to somebody who is not the daemon itself.
        """
        view, parent = at.view, at.obj
        if view.fixed is None:
            if not self._same_for_all(view, name, info, fd) or not self._is_public(view, parent):
                return 0.0, self._brief
        elif not self._is_steady(view) or (parent is self._nodes.root and not self._gated):
            return 0.0, self._brief
        elif not self._may_search(view.fixed, parent, at.fd, at.info):
            return 0.0, 0.0  # a listing tells names, no more
        seconds = self._seconds(obj)
        self._keep(at.number, parent)
        self._keep(at.number, obj)
        return seconds, self._of_attributes(view, obj, info, seconds)

    @staticmethod
    def _may_search(who: Caller, obj: Object, fd: int, info: os.stat_result) -> bool:
        if everybody_may(os.X_OK, obj, fd, info):
            return True
        subject(who).assume()
        return linux.may_access(fd, os.X_OK)

    def of_absence(self, number: int, view: View, parent: Object, name: bytes) -> float:
        """How long to remember that `name` leads nowhere in `parent`.

        Never in a caller view: names that are hidden from some may not be remembered, and how long it takes to be told
        of a name would tell which ones are.
        """
        if view.fixed is None or not self._is_steady(view) or (parent is self._nodes.root and not self._gated):
            return 0.0
        self._keep(number, parent)
        if parent is self._nodes.root:
            # Other directories are forgotten with all that is in them; of this one there is no name to forget.
            if len(self._absent) >= _MOST_ABSENT:
                return 0.0
            self._absent[number, name] = trio.current_time()
        return min(ABSENT_SECONDS, self._seconds(parent))

    def of_object(self, number: int, view: View, obj: Object, fd: int, info: os.stat_result) -> float:
        """How long to remember the attributes of an object that was asked about by its nodeid."""
        if obj is self._nodes.root:
            if view.fixed is not None and not self._gated:
                return 0.0
        elif view.fixed is None:
            if not self._same_for_all(view, obj.name, info, fd) or not self._is_public_place(view, obj, info):
                return self._brief
        elif not self._is_steady(view):
            return self._brief
        self._keep(number, obj)
        return self._of_attributes(view, obj, info, self._seconds(obj))

    def _of_attributes(self, view: View, obj: Object, info: os.stat_result, seconds: float) -> float:
        is_directory = stat.S_ISDIR(info.st_mode)
        if is_directory and self._forgetful:
            return 0.0
        if view.fixed is not None:
            # Handles pass by the gate; who uses one has to be asked for.
            return 0.0 if self._exported else seconds
        # Of a hard link, another name may be hidden, and be the one that is left.
        if info.st_nlink > 1 and not is_directory:
            return self._brief
        if self._exported and not view.is_shown_alike(info.st_uid, info.st_gid):
            return 0.0
        return seconds

    def _seconds(self, obj: Object) -> float:
        return LONG_SECONDS if obj.filesystem.told else SHORT_SECONDS

    def _is_steady(self, view: View) -> bool:
        """Does a fixed view change only when the tree, or its identity, does?"""
        return view.plain_show and (view.cloak is not None or not view.hides)

    def _same_for_all(self, view: View, name: bytes, info: os.stat_result, fd: int) -> bool:
        if view.cloak is not None and view.plain_forward:
            in_group, outside = view.cloak.verdict(info.st_mode, info.st_uid, info.st_gid)
            return in_group and outside
        return view.same_for_all(attrs_of(name, info, fd))

    def _same_by_name(self, view: View, obj: Object) -> bool:
        """Does the name that an object has got change nothing for anybody?"""
        if view.cloak is not None:
            return True
        fd = self._nodes.fd(obj)
        return self._same_for_all(view, obj.name, os.fstat(fd), fd)

    def _is_public(self, view: View, obj: Object) -> bool:
        """Does everybody see this directory and all above it, and may search them?"""
        nodes = self._nodes
        while True:
            fd = nodes.fd(obj)
            info = os.fstat(fd)
            if not everybody_may(os.X_OK, obj, fd, info):
                return False
            if obj is nodes.root:
                return True
            parent = obj.parent
            if parent is None or not self._same_for_all(view, obj.name, info, fd):
                return False
            if obj.checked != info.st_ctime_ns and not nodes.is_child(obj, parent):
                return False
            obj = parent

    def _is_public_place(self, view: View, obj: Object, info: os.stat_result) -> bool:
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            return False
        places = list(self._nodes.places(obj, info))
        return len(places) == 1 and self._is_public(view, places[0][0])

    def is_known_to_all(self, number: int, obj: Object) -> bool:
        """Does the kernel remember it, so that nobody needs to be asked who may know of it?"""
        return number in obj.kept and obj.filesystem.told

    def keeps_content(self, number: int, obj: Object, info: os.stat_result) -> bool:
        """May the kernel go on with the pages that it has of a file which is being opened?

        If nothing tells of a change since the last time, as NFS clients have it (close-to-open).
        """
        stamp = (number, info.st_mtime_ns, info.st_ctime_ns, info.st_size)
        same = obj.content == stamp
        obj.content = stamp if self._nodes.is_settled(info) and obj.filesystem.plain else None
        return same

    def _keep(self, number: int, obj: Object) -> None:
        if number not in obj.kept:
            kept = obj.kept | {number}
            obj.kept = self._sets.setdefault(kept, kept)
            ever = obj.ever_kept | kept
            obj.ever_kept = self._sets.setdefault(ever, ever)

    # -- forgetting --------------------------------------------------------------------------------

    def forget_attributes(self, obj: Object) -> None:
        """The attributes changed; waits for nobody."""
        for number in obj.kept:
            self._invalidate(number, obj)

    def _invalidate(self, number: int, obj: Object) -> None:
        nodeid = self._nodes.nodeid(number, obj)
        self._lately.append((nodeid, None))
        with contextlib.suppress(OSError):  # the kernel does not know it (any more)
            pyfuse3.invalidate_inode(InodeT(nodeid), attr_only=True)

    def forget_name(self, parent: Object, name: bytes, numbers: Iterable[int]) -> None:
        """Something else is called `name` now, or nothing, or not everybody may know."""
        for number in numbers:
            nodeid = self._nodes.nodeid(number, parent)
            self._lately.append((nodeid, name))
            pyfuse3.invalidate_entry_async(InodeT(nodeid), name, ignore_enoent=True)

    def forget(self, obj: Object) -> None:
        """Neither its names nor its attributes are to be relied on."""
        if not obj.kept:
            return
        self.forget_attributes(obj)
        for parent, name in self._names(obj):
            self.forget_name(parent, name, obj.kept)
        obj.kept = _NOBODY

    @staticmethod
    def _names(obj: Object) -> list[tuple[Object, bytes]]:
        return [*([(obj.parent, obj.name)] if obj.parent is not None else []), *(obj.others or [])]

    def forget_everything(self) -> None:
        """The policy changed, or who may pass a directory, or nobody knows what."""
        for obj in self._nodes.objects():
            self.forget(obj)
        absent, self._absent = self._absent, {}
        for number, name in absent:
            self.forget_name(self._nodes.root, name, (number,))

    def forget_content(self, obj: Object) -> None:
        """The content changed."""
        obj.content = None
        self.forget_attributes(obj)
        self._pages.update(self._nodes.nodeid(number, obj) for number in obj.kept)

    def forget_pages(self, number: int, obj: Object) -> None:
        """What the kernel has of the content, because it wrote it there, is not what there is."""
        obj.content = None
        self._invalidate(number, obj)
        self._pages.add(self._nodes.nodeid(number, obj))

    async def keep_forgetting(self) -> None:
        """Do, for ever, what may have to wait for the kernel.

        What an answer told the kernel may get there after it was made to forget it: everything is forgotten twice.
        """
        while True:
            await trio.sleep(_AGAIN_SECONDS)
            expired = trio.current_time() - ABSENT_SECONDS
            self._absent = {key: since for key, since in self._absent.items() if since > expired}
            if self._lately or self._pages:
                lately, self._lately = self._lately, []
                pages, self._pages = self._pages, set()
                try:
                    await trio.to_thread.run_sync(self._forget_again, lately, pages, abandon_on_cancel=True)
                except Exception:
                    self._lately[:0] = lately
                    self._pages |= pages
                    raise

    @staticmethod
    def _forget_again(lately: list[tuple[int, bytes | None]], pages: set[int]) -> None:
        for nodeid, name in lately:
            with contextlib.suppress(OSError):
                if name is None:
                    pyfuse3.invalidate_inode(InodeT(nodeid), attr_only=True)
                else:
                    pyfuse3.invalidate_entry(InodeT(nodeid), name)
        for nodeid in pages:
            with contextlib.suppress(OSError):
                pyfuse3.invalidate_inode(InodeT(nodeid))

    # -- changes made behind the mount -------------------------------------------------------------

    def watch(self, watch: Watch) -> None:
        """Have changes told, on the file systems that do that."""
        for filesystem in self._nodes.filesystems:
            self._add(watch, filesystem)
        self._nodes.on_new_filesystem = partial(self._add, watch)

    def _add(self, watch: Watch, filesystem: Filesystem) -> None:
        try:
            if filesystem.far:
                raise OSError(errno.EOPNOTSUPP, "what others do, they do elsewhere")
            fsid = watch.add(filesystem.fd)
        except OSError as exc:
            log.info(
                "%s (%s): changes behind the mount are not told (%s); they are seen within %g s",
                filesystem.path,
                filesystem.kind,
                exc.strerror,
                SHORT_SECONDS,
            )
            return
        self._told.setdefault(fsid, []).append(filesystem)
        filesystem.told = True

    async def follow(self, watch: Watch) -> None:
        """Have the kernel forget, for ever, what others change."""
        while True:
            if self._lost:
                self.forget_everything()
            self._lost = True  # unless all of them are heeded
            events = await watch.changes()
            lost = False
            for event in events:
                lost |= bool(event.mask & FAN_Q_OVERFLOW)
                for filesystem in self._told.get(event.fsid, ()):
                    lost |= self._heed(event, filesystem)
            self._lost = lost

    def _forget_shunned(self, parent: Object, name: bytes) -> None:
        """A user has mounted something there."""
        self.forget_name(parent, name, parent.ever_kept)
        child = (parent.children or {}).get(name)
        if child is not None:
            self.forget(child)

    async def follow_mounts(self) -> None:
        """Have the kernel forget, for ever, what others mount over."""
        async with contextlib.aclosing(mounts.changes()) as changes:
            async for _ in changes:
                began = trio.current_time()
                self._nodes.heed_mounts()
                now = self._nodes.mounts_below()
                if now != self._mounts:
                    self.forget_everything()
                    self._mounts = now
                # Whoever mounts and unmounts all the time is not to keep others waiting.
                await trio.sleep(_SHARE_OF_MOUNTS * (trio.current_time() - began))

    def _heed(self, event: Event, filesystem: Filesystem) -> bool:
        """Something happened on this file system. True if everything has to be forgotten for it."""
        parent = self._nodes.by_handle(filesystem, event.directory)
        is_name = bool(event.mask & _NAMES)
        if event.target:
            target = self._nodes.by_handle(filesystem, event.target)
        else:  # before Linux 5.17
            target = (parent.children or {}).get(event.name) if parent is not None else None
        if parent is not None and event.mask & (_NAMES | FAN_ATTRIB):
            self.forget_attributes(parent)
            if event.name != b".":
                self.forget_name(parent, event.name, parent.ever_kept)
        if target is None:
            return not event.target and bool(event.mask & FAN_ONDIR) and is_name
        if event.mask & FAN_ONDIR and event.mask & (FAN_ATTRIB | FAN_MOVED_FROM | FAN_MOVED_TO):
            return True  # below, too, everything may be for others now
        if event.mask & (_NAMES | FAN_ATTRIB):
            self.forget(target)
        if event.mask & (FAN_MODIFY | FAN_CLOSE_WRITE):
            self.forget_content(target)
        return False

    # -- changes made through the mount ------------------------------------------------------------

    async def changed(self, number: int, view: View, obj: Object) -> None:
        """Mode, owner or ACL of `obj` were changed by a request that has not been answered yet.

        Must not be called while the kernel holds the directory that `obj` is in for this request.
        """
        if not obj.kept:
            return
        fd = self._nodes.fd(obj)
        info = os.fstat(fd)
        if not self._tells_less(view, obj, fd, info):
            return
        kept, names = obj.kept, self._names(obj)
        if stat.S_ISDIR(info.st_mode):
            self.forget_everything()
        else:
            self.forget(obj)
        with trio.move_on_after(_PATIENCE_SECONDS):
            for parent, name in names:
                for one in kept:
                    await trio.to_thread.run_sync(
                        self._invalidate_entry, self._nodes.nodeid(one, parent), name, abandon_on_cancel=True
                    )

    def _tells_less(self, view: View, obj: Object, fd: int, info: os.stat_result) -> bool:
        """Is there anybody who may not know (any more) what the kernel remembers of `obj`, or below?"""
        if view.fixed is not None:
            if not sees(view, subject(view.fixed), obj.name, info, fd):
                return True
            return stat.S_ISDIR(info.st_mode) and not self._may_search(view.fixed, obj, fd, info)
        if obj is not self._nodes.root and not self._same_for_all(view, obj.name, info, fd):
            return True
        return stat.S_ISDIR(info.st_mode) and not everybody_may(os.X_OK, obj, fd, info)

    @staticmethod
    def _invalidate_entry(parent: int, name: bytes) -> None:
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_entry(InodeT(parent), name)

    def removed(self, obj: Object | None) -> None:
        """A name of `obj` is gone, by a request that is not answered yet: it may have been the one that all knew."""
        if obj is not None and obj.kept and os.fstat(self._nodes.fd(obj)).st_nlink > 0:
            self.forget(obj)

    def moved(self, view: View, obj: Object, parent: Object) -> None:
        """`obj` was renamed into `parent` by a request that has not been answered yet."""
        if view.fixed is not None or (self._is_public(view, parent) and self._same_by_name(view, obj)):
            return
        if obj.pins:
            self.forget_everything()
        else:
            self.forget(obj)
