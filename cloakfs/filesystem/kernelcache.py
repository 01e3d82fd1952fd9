"""What the kernel may remember, and making it forget.

The kernel's dentries and attributes are shared by all callers of a mount. So in a caller view it may remember only
what every caller would be told: of an object that all see alike, below directories that all see and may search.
In a fixed view there is but one identity, and everything may be remembered, absent names, too, behind a gate that is
not: the name of the view, the kernel's own check of its top directory, or else the first level of names.

What was remembered is forgotten when it stops being true. Attributes at once, for that waits for nobody; a name as
soon as the kernel has it free, and before who changed it is answered, where that is possible (see `forgetter`).
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import trio

from .. import linux
from ..caller import Caller
from ..linux.fanotify import (
    FAN_ATTRIB,
    FAN_CLOSE_WRITE,
    FAN_CREATE,
    FAN_DELETE,
    FAN_MODIFY,
    FAN_MOVED_FROM,
    FAN_MOVED_TO,
    FAN_ONDIR,
    FAN_Q_OVERFLOW,
    OF_ITSELF,
    Event,
)
from ..tasks import Tasks
from ..tree import calls
from ..tree.door import attrs_of, credentials, everybody_may, sees, subject
from ..tree.filesystems import Filesystem
from ..tree.locate import is_settled
from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..tree.passages import Passages
from ..view import View
from ..views import Views
from ..watch import Watch, mounts_changed
from .forgetter import AT_ONCE, Forgetter

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

# Of one batch of events, the names of so many hidden directories are looked up, which takes half a millisecond. Anybody
# can change directories all the time; of what is more, the absence is remembered for ABSENT_SECONDS at most.
_MOST_LOOKED_UP = 16

# So many names that lead nowhere are remembered in top directories.
_MOST_ABSENT = 10_000
# After looking at what is mounted, so many times as long it is not looked at.
_SHARE_OF_MOUNTS = 20

_NOBODY: frozenset[int] = frozenset()
_NAMES = FAN_CREATE | FAN_DELETE | FAN_MOVED_FROM | FAN_MOVED_TO


class _Sweep:
    """Everything that was remembered before is forgotten; see `KernelCache.forget_everything`."""

    def __init__(self) -> None:
        self.by_name = False  # each name has to be forgotten, too
        self.begun = False
        self.attributes = trio.Event()  # done
        self.names = trio.Event()  # done


class _Below:
    """What was remembered below a directory is being forgotten.

    Attributes:
        todo: where to go on.
        again: once more from the beginning, for the directory has changed again.
        names: each is set when a name is forgotten; without those in the directory itself, which the kernel may hold.
        done: no attributes are remembered any more, and nothing is relied on.
    """

    def __init__(self, directory: Object, todo: list[Object]) -> None:
        self.directory = directory
        self.todo = todo
        self.again = False
        self.names: set[trio.Event] = set()
        self.done = trio.Event()


class KernelCache:
    """Decides for one mount what may be remembered how long.

    Args:
        nodes: the objects.
        views: what is offered.
        passages: what is told of directories that change.
        exported: a server of the kernel exports the mount: requests come by handle, without any LOOKUP.
        gated: the kernel itself keeps everybody else out of the only, fixed, view.
        forgetful: directories change with every answer (`no_client_cache`).
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        passages: Passages,
        *,
        exported: bool = False,
        gated: bool = False,
        forgetful: bool = False,
    ) -> None:
        self._nodes = nodes
        self._views = views
        self._passages = passages
        self._brief = 0.0 if exported or forgetful else BRIEF_SECONDS
        self._exported = exported
        self._forgetful = forgetful
        self._gated = gated or views.top
        self._watched: dict[int, list[Filesystem]] = {}  # by the id that events bear
        self._sets: dict[frozenset[int], frozenset[int]] = {}  # one of each, for `Object.kept`
        self.forgetter = Forgetter()
        # What was remembered in an earlier era (`Object.era`) is not relied on any more; a sweep tells the kernel.
        self._era = 0
        self._sweeps: list[_Sweep] = []
        self._sweep_wanted = trio.Event()
        # The directories below which there is so much to forget that others are given time in between.
        self._below: dict[Object, _Below] = {}
        self._below_wanted = trio.Event()
        # View, and a name that is remembered to lead nowhere in its top; since when.
        self._absent: dict[tuple[int, bytes], float] = {}
        self._to_look_up = 0  # so many more of this batch of events
        self._has_followed = False  # if it is begun again, changes behind the mount may have been read and not heeded
        self._mounts = nodes.mounts.mounts_below()

    # -- what may be remembered --------------------------------------------------------------------

    def of_name(self, at: "Entered", obj: Object, name: bytes, fd: int, info: linux.Stat) -> tuple[float, float]:
        """How long to remember that `obj` is called `name` in a directory, and its attributes, in seconds.

        Only for an answer to somebody who is not the daemon itself.
        """
        view, parent = at.view, at.obj
        if self.forgetter.is_late(self._nodes.nodeid(at.number, parent)):
            return 0.0, 0.0
        if view.fixed is None:
            if not self._same_for_all(view, name, info, fd) or not self._is_public(at.number, view, parent):
                return 0.0, self._brief
        elif not self._is_steady(view) or (parent is self._nodes.root and not self._gated):
            return 0.0, self._brief
        elif not (at.has_searched or self._may_search(view.fixed, parent, at.fd, at.info)):
            return 0.0, 0.0  # a listing tells names, no more
        seconds = self._seconds(obj)
        self._keep(at.number, parent)
        self._keep(at.number, obj)
        return seconds, self._of_attributes(view, obj, info, seconds)

    @staticmethod
    def _may_search(who: Caller, obj: Object, fd: int, info: linux.Stat) -> bool:
        if everybody_may(os.X_OK, obj, fd, info):
            return True
        if obj.filesystem.remote:
            return False  # only a thread may ask
        return calls.access(credentials(who), fd, os.X_OK)

    def of_absence(self, number: int, view: View, parent: Object, name: bytes) -> float:
        """How long to remember that `name` leads nowhere in `parent`.

        Never in a caller view: names that are hidden from some may not be remembered, and how long it takes to be told
        of a name would tell which ones are.
        """
        if view.fixed is None or not self._is_steady(view) or (parent is self._nodes.root and not self._gated):
            return 0.0
        if self.forgetter.is_late(self._nodes.nodeid(number, parent)):
            return 0.0
        self._keep(number, parent)
        if parent is self._nodes.root:
            # Other directories are forgotten with all that is in them; of this one there is no name to forget.
            if len(self._absent) >= _MOST_ABSENT:
                return 0.0
            self._absent[number, name] = trio.current_time()
        return min(ABSENT_SECONDS, self._seconds(parent))

    def of_object(self, number: int, view: View, obj: Object, fd: int, info: linux.Stat) -> float:
        """How long to remember the attributes of an object that was asked about by its nodeid."""
        if obj is self._nodes.root:
            if view.below is not None or (view.fixed is not None and not self._gated):
                return 0.0
        elif view.fixed is None:
            if not self._same_for_all(view, obj.name, info, fd) or not self._is_public_place(number, view, obj, info):
                return self._brief
        elif not self._is_steady(view) or not sees(view, subject(view.fixed), obj.name, info, fd):
            return self._brief  # a change that is just being answered may have hidden it
        if obj.parent is not None and self.forgetter.is_late(self._nodes.nodeid(number, obj.parent)):
            return 0.0
        self._keep(number, obj)
        return self._of_attributes(view, obj, info, self._seconds(obj))

    def _of_attributes(self, view: View, obj: Object, info: linux.Stat, seconds: float) -> float:
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
        return LONG_SECONDS if obj.filesystem.watched else SHORT_SECONDS

    def _is_steady(self, view: View) -> bool:
        """Does a fixed view change only when the tree, or its identity, does?"""
        return view.below is None and view.shows_by_mapping and (view.cloak is not None or not view.hides)

    def _same_for_all(self, view: View, name: bytes, info: linux.Stat, fd: int) -> bool:
        if view.cloak is not None and view.forwards_by_mapping and view.below is None:
            return view.cloak.same_for_all(info.st_mode, info.st_uid, info.st_gid)
        return view.same_for_all(attrs_of(name, info, fd))

    def _same_by_name(self, view: View, obj: Object) -> bool:
        """Does the name that an object has got change nothing for anybody?"""
        if view.cloak is not None:
            return True
        fd = self._nodes.fd(obj)
        return self._same_for_all(view, obj.name, obj.filesystem.stat(fd), fd)

    def _is_public(self, number: int, view: View, obj: Object) -> bool:
        """Does everybody see this directory and all above it, and may search them?

        Then each of them has to be kept: what is remembered below is forgotten when that is not so any more. So is
        this answer, so that each directory is looked at but once, however deep the tree is.
        """
        nodes = self._nodes
        above: list[Object] = []
        while not (number in obj.public and self.is_known_to_all(number, obj)):
            above.append(obj)
            if obj.barrier is not None and self._is_stopped(view, obj):
                for directory in above:
                    directory.barrier = obj.barrier
                return False
            fd = nodes.fd(obj)
            info = obj.filesystem.stat(fd)
            if not self._lets_all_through(view, obj, fd, info):
                for directory in above:
                    directory.barrier = obj
                return False
            if obj is nodes.root:
                break
            parent = obj.parent
            if parent is None:
                return False
            if obj.checked != info.st_ctime_ns and not nodes.is_child(obj, parent):
                return False
            obj = parent
        is_told = True  # of those above
        for directory in reversed(above):
            self._keep(number, directory)
            is_told = is_told and directory.filesystem.watched
            if is_told and number not in directory.public:
                public = directory.public | {number}
                directory.public = self._sets.setdefault(public, public)
        return True

    def _lets_all_through(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        if not everybody_may(os.X_OK, obj, fd, info):
            return False
        return obj is self._nodes.root or self._same_for_all(view, obj.name, info, fd)

    def _is_stopped(self, view: View, obj: Object) -> bool:
        """Is not everybody let through where that was so the last time? It is one look, however deep the tree is."""
        barrier, obj.barrier = obj.barrier, None
        at: Object | None = obj
        while at is not None and at is not barrier:
            at = at.parent
        if at is None:
            return False
        fd = self._nodes.fd(at)
        if self._lets_all_through(view, at, fd, at.filesystem.stat(fd)):
            return False
        obj.barrier = barrier
        return True

    def _is_public_place(self, number: int, view: View, obj: Object, info: linux.Stat) -> bool:
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            return False
        places = list(self._nodes.places(obj, info))
        return len(places) == 1 and self._is_public(number, view, places[0][0])

    def is_known_to_all(self, number: int, obj: Object) -> bool:
        """Does the kernel remember it, so that nobody needs to be asked who may know of it?"""
        is_kept = number in obj.kept and obj.era == self._era and obj.filesystem.watched
        return is_kept and not (self._below and self._is_being_forgotten(obj))

    def _is_being_forgotten(self, obj: Object) -> bool:
        for parent, _ in self._names(obj):
            at: Object | None = parent
            while at is not None:
                if at in self._below:
                    return True
                at = at.parent
        return False

    def keeps_content(self, number: int, obj: Object, info: linux.Stat) -> bool:
        """May the kernel go on with the pages that it has of a file which is being opened?

        If nothing tells of a change since the last time, as NFS clients have it (close-to-open).
        """
        stamp = (number, info.st_mtime_ns, info.st_ctime_ns, info.st_size)
        same = obj.content == stamp
        obj.content = stamp if is_settled(info) and obj.filesystem.has_posix_rules else None
        return same

    def _keep(self, number: int, obj: Object) -> None:
        if obj.era != self._era:
            self._forget_era(obj, by_name=self.forgetter.session < 0)
            obj.era = self._era
        if number not in obj.kept:
            kept = obj.kept | {number}
            obj.kept = self._sets.setdefault(kept, kept)
            self._nodes.hold(obj, obj.kept)

    # -- forgetting --------------------------------------------------------------------------------

    def forget_attributes(self, obj: Object) -> None:
        """The attributes changed; waits for nobody."""
        for number in obj.kept:
            parent = None if obj.parent is None else self._nodes.nodeid(number, obj.parent)
            self.forgetter.attributes(self._nodes.nodeid(number, obj), parent)

    def forget_name(self, parent: Object, name: bytes, numbers: Iterable[int]) -> None:
        """Something else is called `name` now, or nothing, or not everybody may know."""
        for number in numbers:
            self.forgetter.name(self._nodes.nodeid(number, parent), name)

    def forget(self, obj: Object) -> None:
        """Neither its names nor its attributes are to be relied on, nor anything below."""
        self._forget_one(obj)
        self._forget_below(obj)

    def _forget_one(self, obj: Object) -> dict[trio.Event, Object]:
        """Forget it alone.

        Returns:
            events, each set when a name of it is forgotten, and the directory of that name.
        """
        waits: dict[trio.Event, Object] = {}
        if not obj.kept:
            return waits
        self.forget_attributes(obj)
        for parent, name in self._names(obj):
            for number in obj.kept:
                nodeid = self._nodes.nodeid(number, obj)
                wait = self.forgetter.name(self._nodes.nodeid(number, parent), name, nodeid)
                if wait is not None:
                    waits[wait] = parent
        obj.kept = obj.public = _NOBODY
        return waits

    def _forget_below(self, directory: Object) -> _Below:
        """Forget what is below it; what takes long goes on in the background.

        Nobody makes others wait for this: whoever has it done again has made the kernel remember it again before.
        """
        if directory is self._nodes.root:
            self._forget_absences()
        below = self._below.get(directory)
        if below is not None:
            below.again = True
            return below
        below = _Below(directory, self._nodes.within(directory))
        if not below.todo:  # a file, mostly
            below.done.set()
            return below
        # Noted first: if this part fails, the background task goes on with it.
        self._below[directory] = below
        self._below_wanted.set()
        self._go_on_below(below)
        return below

    def _forget_some(self, below: _Below) -> bool:
        """Forget a part of it; True if nothing is left."""
        for _ in range(AT_ONCE):
            if not below.todo:
                break
            obj = below.todo[-1]
            inside: list[Object] = []
            if obj.ever_kept:
                for wait, parent in self._forget_one(obj).items():
                    if parent is not below.directory:
                        below.names.add(wait)
                inside = self._nodes.within(obj)
            below.todo.pop()
            below.todo += inside
        return not below.todo

    async def _keep_forgetting_below(self) -> None:
        while True:
            if not self._below:
                self._below_wanted = trio.Event()
                await self._below_wanted.wait()
            for below in self._unfinished():
                self._go_on_below(below)
                await trio.sleep(0)

    def _unfinished(self) -> list[_Below]:
        return list(self._below.values())

    def _go_on_below(self, below: _Below) -> None:
        if not self._forget_some(below):
            return
        if below.again:
            below.again = False
            below.todo = self._nodes.within(below.directory)
        else:
            del self._below[below.directory]
            below.done.set()

    def _forget_absences(self) -> None:
        """Of the top there is no name to forget, with which all that is absent in it would be forgotten."""
        absent, self._absent = self._absent, {}
        for number, name in absent:
            self.forget_name(self._nodes.root, name, (number,))

    @staticmethod
    def _names(obj: Object) -> list[tuple[Object, bytes]]:
        return [*([(obj.parent, obj.name)] if obj.parent is not None else []), *(obj.others or [])]

    def forget_everything(self) -> None:
        """The policy changed, or what is mounted, or nobody knows what."""
        self._passages.forget()
        self._begin_era()

    def _begin_era(self) -> _Sweep:
        """From now on nothing is relied on that was remembered before; the kernel is told name by name, soon."""
        self._era += 1
        if not self._sweeps or self._sweeps[-1].begun:
            self._sweeps.append(_Sweep())
            self._sweep_wanted.set()
        sweep = self._sweeps[-1]
        if self.forgetter.every_name():
            self._absent = {}
        else:
            sweep.by_name = True
            self._forget_absences()
        return sweep

    def _forget_era(self, obj: Object, *, by_name: bool) -> set[trio.Event]:
        """Forget what was remembered of it before this era."""
        if by_name:
            return set(self._forget_one(obj))
        self.forget_attributes(obj)
        obj.kept = obj.public = _NOBODY
        return set()

    async def _keep_sweeping(self) -> None:
        while True:
            if not self._sweeps:
                self._sweep_wanted = trio.Event()
                await self._sweep_wanted.wait()
            await self._sweep(list(self._sweeps))

    async def _sweep(self, sweeps: list[_Sweep]) -> None:
        for sweep in sweeps:
            sweep.begun = True
        by_name = any(sweep.by_name for sweep in sweeps)
        waits: set[trio.Event] = set()
        count = 0
        for obj in self._nodes.objects():
            if obj.kept and obj.era != self._era:
                waits |= self._forget_era(obj, by_name=by_name)
                count += 1
                if count % AT_ONCE == 0:
                    await trio.sleep(0)
        for sweep in sweeps:
            sweep.attributes.set()
        for wait in waits:
            await wait.wait()
        for sweep in sweeps:
            sweep.names.set()
        del self._sweeps[: len(sweeps)]

    def forget_content(self, obj: Object) -> None:
        """The content changed."""
        obj.content = None
        self.forget_attributes(obj)
        for number in obj.kept:
            self.forgetter.pages(self._nodes.nodeid(number, obj))

    def forget_pages(self, number: int, obj: Object) -> None:
        """What the kernel has of the content, because it wrote it there, is not what there is."""
        obj.content = None
        nodeid = self._nodes.nodeid(number, obj)
        self.forgetter.attributes(nodeid, None if obj.parent is None else self._nodes.nodeid(number, obj.parent))
        self.forgetter.pages(nodeid)

    async def keep_forgetting(self) -> None:
        """Do, for ever, what may have to wait for the kernel."""
        async with trio.open_nursery() as nursery:
            tasks = Tasks(nursery)
            tasks.keep("having the kernel forget names", self.forgetter.run)
            tasks.keep("having the kernel forget everything", self._keep_sweeping)
            tasks.keep("having the kernel forget what is below", self._keep_forgetting_below)
            while True:
                await trio.sleep(1)
                expired = trio.current_time() - ABSENT_SECONDS
                self._absent = {key: since for key, since in self._absent.items() if since > expired}
                if self.forgetter.overflowed:
                    self.forgetter.overflowed = False
                    self.forget_everything()

    # -- changes made behind the mount -------------------------------------------------------------

    def watch(self, watch: Watch) -> None:
        """Have changes told, on the file systems that do that."""
        for filesystem in self._nodes.mounts.filesystems:
            self._add(watch, filesystem)
        self._nodes.mounts.on_new_filesystem = partial(self._add, watch)
        watch.on_own = self._heed_own
        self._passages.is_up_to_date = partial(self._is_all_heeded, watch)

    def _add(self, watch: Watch, filesystem: Filesystem) -> None:
        try:
            if filesystem.remote:
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
        self._watched.setdefault(fsid, []).append(filesystem)
        filesystem.watched = True

    async def follow(self, watch: Watch) -> None:
        """Have the kernel forget, for ever, what others change."""
        if self._has_followed:
            self.forget_everything()
        self._has_followed = True
        while True:
            self._heed_all(await watch.changes())

    def _is_all_heeded(self, watch: Watch) -> bool:
        """Is nothing of what was changed until now still to be heeded? What can be at once, is."""
        if watch.is_silent():
            return True
        try:
            self._heed_all(watch.read())
        except BaseException:
            self.forget_everything()
            raise
        return watch.is_silent()

    def _heed_all(self, events: list[Event]) -> None:
        forgotten = False
        self._to_look_up = _MOST_LOOKED_UP
        for event in events:
            if event.mask & FAN_Q_OVERFLOW:
                self.forget_everything()
            for filesystem in self._watched.get(event.fsid, ()):
                forgotten |= self._heed(event, filesystem)
        if forgotten:
            self._begin_era()

    def _heed_own(self, event: Event) -> None:
        """This process changed a directory itself, for whomever."""
        for filesystem in self._watched.get(event.fsid, ()):
            self._heed_passages(event, filesystem)

    def _heed_passages(self, event: Event, filesystem: Filesystem) -> None:
        if event.mask & FAN_ONDIR and event.mask & OF_ITSELF:
            if not event.target:  # before Linux 5.17
                self._passages.forget()
            elif (directory := self._nodes.by_handle(filesystem, event.target)) is not None:
                self._passages.changed(directory)

    def _forget_shunned(self, path: str) -> None:
        """A user has mounted something there: what was seen below is not to be seen on."""
        place = self._nodes.at_path(path)
        if place is None:
            return
        parent, name = place
        self.forget_name(parent, name, parent.ever_kept)
        child = (parent.children or {}).get(name)
        if child is not None:
            self.forget(child)

    async def follow_mounts(self) -> None:
        """Have the kernel forget, for ever, what others mount over."""
        shunned: set[tuple[int, str]] = set()
        async with contextlib.aclosing(mounts_changed()) as changes:
            async for _ in changes:
                began = trio.current_time()
                before, shunned = shunned, self._nodes.mounts.shunned_places()
                for _, path in shunned - before:
                    self._forget_shunned(path)
                now = self._nodes.mounts.mounts_below()
                if now != self._mounts:
                    self.forget_everything()
                    self._mounts = now
                # Whoever mounts and unmounts all the time is not to keep others waiting.
                await trio.sleep(_SHARE_OF_MOUNTS * (trio.current_time() - began))

    def _heed(self, event: Event, filesystem: Filesystem) -> bool:
        """Something happened on this file system. True if everything has to be forgotten for it."""
        self._heed_passages(event, filesystem)
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
            if event.mask & FAN_ONDIR and event.mask & OF_ITSELF and event.name == b".":
                self._forget_absence(filesystem, event.target)
            return not event.target and bool(event.mask & FAN_ONDIR) and is_name
        if event.mask & FAN_ONDIR and event.mask & OF_ITSELF:
            if is_name or self._tells_anybody_less(target):
                self.forget(target)  # below, too, everything may be for others now
            self._forget_absence_of(target)
            return not event.target  # of a kernel that does not tell whom, nobody knows whether it was this one
        if event.mask & (_NAMES | FAN_ATTRIB):
            self.forget(target)
        if event.mask & (FAN_MODIFY | FAN_CLOSE_WRITE):
            self.forget_content(target)
        return False

    def _forget_absence(self, filesystem: Filesystem, handle: bytes) -> None:
        """A directory that nobody was shown has changed itself, which the kernel tells without its name."""
        own = self._views.get(0)
        if self._to_look_up and (own is None or own.fixed is not None):  # in a caller view no absence is remembered
            self._to_look_up -= 1
            place = self._nodes.place_of(filesystem, handle)
            if place is not None:
                parent, name = place
                self.forget_name(parent, name, parent.ever_kept)

    def _forget_absence_of(self, directory: Object) -> None:
        """A directory has changed: it may be visible where it has been absent, which only fixed views remember."""
        for parent, name in self._names(directory):
            for number in parent.ever_kept - directory.kept:
                view = self._views.get(number)
                if view is None or view.fixed is not None:
                    self.forget_name(parent, name, (number,))

    def _tells_anybody_less(self, directory: Object) -> bool:
        """As `_tells_less`, of a directory, in all views: as it is now, for whatever is done to it later is told."""
        try:
            for number in directory.ever_kept:
                view = self._views.get(number)
                fd = self._nodes.fd(directory)
                if view is None or self._tells_less(view, directory, fd, directory.filesystem.stat(fd)):
                    return True
        except OSError:
            return True
        return False

    # -- changes made through the mount ------------------------------------------------------------

    async def changed(self, number: int, view: View, obj: Object) -> None:
        """Mode, owner or ACL of `obj` were changed by a request that has not been answered yet.

        Must not be called while the kernel holds the directory that `obj` is in for this request.
        """
        if not obj.ever_kept:
            return
        fd = self._nodes.fd(obj)
        info = obj.filesystem.stat(fd)
        if not self._tells_less(view, obj, fd, info):
            return
        twins = [obj, *self._nodes.twins(obj)]
        waits = {wait for twin in twins for wait in self._forget_one(twin)}
        belows = [self._forget_below(twin) for twin in twins]
        for below in belows:
            await below.done.wait()
            waits |= below.names
        for wait in waits:
            await wait.wait()

    def _tells_less(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        """Is there anybody who may not know (any more) what the kernel remembers of `obj`, or below?"""
        if view.below is not None:
            return True  # it does not tell; nothing is remembered for long there
        if view.fixed is not None:
            if not sees(view, subject(view.fixed), obj.name, info, fd):
                return True
            return stat.S_ISDIR(info.st_mode) and not self._may_search(view.fixed, obj, fd, info)
        if obj is not self._nodes.root and not self._same_for_all(view, obj.name, info, fd):
            return True
        return stat.S_ISDIR(info.st_mode) and not everybody_may(os.X_OK, obj, fd, info)

    def removed(self, obj: Object | None) -> None:
        """A name of `obj` is gone, by a request that is not answered yet: it may have been the one that all knew."""
        if obj is not None and obj.kept and obj.filesystem.stat(self._nodes.fd(obj)).st_nlink > 0:
            self.forget(obj)

    async def moved(self, number: int, view: View, obj: Object, parent: Object) -> None:
        """`obj` was renamed into `parent` by a request that has not been answered yet."""
        for twin in self._nodes.twins(obj):
            self.forget(twin)  # nothing tells where it is now
        if view.fixed is not None or (self._is_public(number, view, parent) and self._same_by_name(view, obj)):
            return
        self._forget_one(obj)
        for one in [obj, *self._nodes.twins(obj)]:
            await self._forget_below(one).done.wait()  # for names, the kernel waits for the answer
