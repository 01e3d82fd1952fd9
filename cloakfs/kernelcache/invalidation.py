"""Invalidates what the kernel has cached of an object, and of everything below it.

Attributes are invalidated at once, since this never has to wait. A name is invalidated as soon as the lock of its
directory is free (`notifier`) and, where possible, before the reply to the request that changed it. What takes long is
done in the background. Until then, what is to be invalidated is not relied on.
"""

from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakSet

import trio

from ..background.tasks import Tasks
from ..exportmode import ExportMode
from ..tree.nodes import OBJECT_BITS, Nodes
from ..tree.objects import AbsentXattrs, Directory, Object, Viewer
from ..tree.registry import within
from ..tree.visibility import AccessPaths
from ..tuning import STANDARD, Tuning
from .cachepolicy import ABSENT_SECONDS
from .negative import NegativeDentries
from .notifier import Notifier

# How many negative dentries there may be, of those that are invalidated one by one.
_MOST_ABSENT = 10_000

# How many objects of which the kernel has cached nothing are examined before other tasks may run: half a millisecond,
# perhaps.
_EXAMINED_AT_ONCE = 4096

# How long who has got a lock waits for a process that keeps the lock of a directory.
_SETTLE_SECONDS = 1.0

_NO_VIEWS: frozenset[int] = frozenset()
_NO_NAMES: frozenset[bytes] = frozenset()


class _FullInvalidation:
    """One pass over all objects, which invalidates everything that was cached in earlier epochs."""

    def __init__(self) -> None:
        self.by_name = False  # whether each name has to be invalidated, too
        self.begun = False
        self.attributes = trio.Event()  # set when all attributes are invalidated
        self.names = trio.Event()  # set when all names are invalidated


class PendingNames:
    """The names of an object that are to be invalidated.

    Attributes:
        names: the directory, the name, and the nodeids of directory and object, of each.
        is_noted: whether the notifier counts them as pending.
        given: set when they have been given to the notifier.
        expired: each is set when the kernel revalidates a name at each use, if that comes first.
        invalidated: each is set when a name is invalidated.
    """

    __slots__ = ("expired", "given", "invalidated", "is_noted", "names")

    def __init__(self, names: list[tuple[Object, bytes, int, int]]) -> None:
        self.names = names
        self.is_noted = False
        self.given = trio.Event()
        self.expired: set[trio.Event] = set()
        self.invalidated: set[trio.Event] = set()

    async def wait(self) -> None:
        """Wait until all are invalidated."""
        await self.given.wait()
        for name in self.invalidated:
            await name.wait()


class SubtreeInvalidation:
    """What is still to be invalidated below a directory.

    Attributes:
        todo: the objects to go on with, from the end; names of a directory come before what is below it.
        again: whether to begin once more, because the directory has changed again.
        names: each is set when a name is invalidated; without names in the directory itself, which the kernel may have
            locked.
        own_names: the same for the names in the directory itself.
        done: set when all attributes are invalidated; then nothing is relied on.
        last: names of the directory itself, which are invalidated after those below it.
    """

    def __init__(self, directory: Object, todo: list[Object | PendingNames]) -> None:
        self.directory = directory
        self.todo = todo
        self.again = False
        self.names: set[trio.Event] = set()
        self.own_names: set[trio.Event] = set()
        self.done = trio.Event()
        self.last: list[PendingNames] = []


class Invalidation:
    """What is invalidated, and what cannot be relied on until that is done.

    Args:
        nodes: the objects.
        access_paths: is informed of directories that change.
        mode: how the mount is exported.
        tuning: times and bounds.

    Attributes:
        notifier: sends the notifications to the kernel.
        epoch: the present one. What was cached in an earlier one (`Object.cache_epoch`) is not relied on any more; a
            full invalidation notifies the kernel.
        subtrees: the directories below which there is so much to invalidate that other tasks run in between.
        proven: the directories that have a proof (`Directory.proof`), or are about to have one.
        on_attributes: is called when attributes of an object may have changed behind the mount; with None if it is not
            known of which.
        on_change: is called when anything of an object may have changed behind the mount; with None if it is not
            known of which.
        on_proof: is called when a directory is about to have a proof.
        on_hidden: is called with the handle of a file of which the kernel is about to have a negative dentry, as the
            file system gives it.
    """

    def __init__(self, nodes: Nodes, access_paths: AccessPaths, mode: ExportMode, tuning: Tuning = STANDARD) -> None:
        self._nodes = nodes
        self._access_paths = access_paths
        self._subtree_check = mode.subtree_check
        self._at_once = tuning.names_at_once
        self.notifier = Notifier(tuning)
        self.epoch = 0
        self._full_invalidations: list[_FullInvalidation] = []
        self._full_invalidation_wanted = trio.Event()
        self.subtrees: dict[Object, SubtreeInvalidation] = {}
        self._subtrees_wanted = trio.Event()
        # What comes first, and the names that come last.
        self._ending: list[tuple[set[trio.Event], list[PendingNames]]] = []
        self._tasks: Tasks | None = None
        # Negative dentries, each with the number of a view.
        self._negative: NegativeDentries[Object, tuple[int, bytes]] = NegativeDentries(_MOST_ABSENT)
        # Of these, the hidden files, by handle: each with the number of a view, the directory and the name.
        self._hidden: NegativeDentries[bytes, tuple[int, Object, bytes]] = NegativeDentries(_MOST_ABSENT)
        self.proven: WeakSet[Object] = WeakSet()
        # What is noted of an object in the present epoch: by the names noted before, and the one that is added.
        self._absent_xattrs: dict[tuple[frozenset[bytes], bytes], AbsentXattrs] = {}
        self.on_attributes: Callable[[Object | None], None] = lambda _: None
        self.on_hidden: Callable[[bytes], None] = lambda _: None
        self.on_proof: Callable[[], None] = lambda: None
        self.on_change: Callable[[Object | None], None] = lambda _: None

    # -- an object, its names, and what is below ---------------------------------------------------

    def invalidate_attributes(self, obj: Object, *, but: int | None = None) -> None:
        """Invalidate the attributes of an object, without waiting, in all views `but` the one with this number."""
        for number in obj.cached_in:
            if number == but:
                continue
            view = number << OBJECT_BITS  # of the nodeids (`Nodes.nodeid`, without a call)
            self.notifier.invalidate_attributes(
                view | obj.number, None if obj.parent is None else view | obj.parent.number
            )

    def invalidate_name(self, parent: Object, name: bytes, numbers: Iterable[int]) -> set[trio.Event]:
        """Invalidate a name in these views: it leads to something else now, or nowhere, or not all callers may know it.

        Returns:
            events, each set when the kernel looks the name up again in one of the views.
        """
        self.invalidate_listing(parent)
        nodeid, notifier = self._nodes.nodeid, self.notifier
        child = (parent.children or {}).get(name)
        if child is not None and child.children:
            names = PendingNames([(parent, name, nodeid(number, parent), nodeid(number, child)) for number in numbers])
            self.invalidate_subtree(child, names)
            return names.invalidated | names.expired
        waits: set[trio.Event | None] = set()
        for number in numbers:
            directory = nodeid(number, parent)
            # Below what had the name before, much may be cached, which is being invalidated first.
            waits.add(
                (notifier.expire_entry if notifier.is_deferred(directory, name) else notifier.invalidate_entry)(
                    directory, name
                )
            )
        return {wait for wait in waits if wait is not None}

    def expire_name(self, parent: Object, name: bytes) -> None:
        """Make a name expire in all views: the kernel revalidates it at each use."""
        self.invalidate_listing(parent)
        for number in parent.ever_cached_in:
            self.notifier.expire_entry(self._nodes.nodeid(number, parent), name)

    def invalidate_content(self, obj: Object) -> None:
        """Invalidate the pages of a file, and its attributes.

        It uses pages of a file that is open, whether or not it may cache anything else of it. Those of one that is not
        are dropped at the next open (`Timeouts.opening`). It has none of a file that it writes by itself.
        """
        obj.content = None
        self.invalidate_attributes(obj)
        if obj.backing:
            return
        for number in set(obj.open_files.values()):
            self.notifier.invalidate_pages(self._nodes.nodeid(number, obj))

    def closed(self, obj: Object) -> None:
        """Invalidate what a program may have written through a mapping: it has closed a file that it could write to.

        Mostly, it has not. Who has just locked the file may be asking for its end; so there, this waits
        (`Notifier.confirm`).
        """
        nodeids = {number: self._nodes.nodeid(number, obj) for number in obj.open_files.values()}
        locked = {number for number, nodeid in nodeids.items() if self.notifier.was_locked(nodeid)}
        if not locked:
            self.invalidate_content(obj)
            return
        obj.content = None
        for number in obj.cached_in - locked:
            self.notifier.invalidate_attributes(
                self._nodes.nodeid(number, obj), None if obj.parent is None else self._nodes.nodeid(number, obj.parent)
            )
        for number, nodeid in nodeids.items():
            if number in locked:
                self.notifier.invalidate_after_lock(nodeid)
            elif not obj.backing:
                self.notifier.invalidate_pages(nodeid)

    def invalidate_pages(self, number: int, obj: Object) -> None:
        """Invalidate pages that the kernel has because it wrote them, although the file now contains something else."""
        obj.content = None
        nodeid = self._nodes.nodeid(number, obj)
        self.notifier.invalidate_attributes(
            nodeid, None if obj.parent is None else self._nodes.nodeid(number, obj.parent)
        )
        self.notifier.invalidate_pages(nodeid)

    def invalidate(self, obj: Object) -> tuple[SubtreeInvalidation, PendingNames]:
        """Invalidate the names and attributes of an object, and of everything below it.

        Returns:
            the work that is left below, and the names of the object, which come last.
        """
        waits, names = self._invalidate_itself(obj)
        names.invalidated |= waits.keys()
        return self.invalidate_subtree(obj, names), names

    def invalidate_object(self, obj: Object) -> set[trio.Event]:
        """Invalidate the object alone; return events, each set when one of its names is invalidated."""
        waits, names = self._invalidate_itself(obj)
        self._invalidate_names(names)
        return names.invalidated | waits.keys()

    def _invalidate_itself(self, obj: Object) -> tuple[dict[trio.Event, Object], PendingNames]:
        """Invalidate everything of the object but its names, which are returned.

        Among them are names that are still pending because of an earlier change: a request that waits for this
        invalidation has to wait for them, too.

        Returns:
            events, each set when a listing that has the object is invalidated, with its directory; and the names.
        """
        waits: dict[trio.Event, Object] = {}
        places = self.names_of(obj)
        if obj.proof is not None:
            self.invalidate_listing(obj)
        for parent, _ in places:
            listing = self.invalidate_listing(parent) if parent.proof is not None else None
            if listing is not None:
                waits[listing] = parent
        is_idle, views = self.notifier.is_idle(), obj.cached_in
        if not views and is_idle:
            return waits, PendingNames([])
        names = [
            (parent, name, view | parent.number, view | obj.number)
            for parent, name in places
            for number in (views if is_idle else obj.ever_cached_in)
            for view in (number << OBJECT_BITS,)
            if number in views or self.notifier.is_pending(view | parent.number, name)
        ]
        if views:
            self.invalidate_attributes(obj)
            self._note_nothing_cached(obj)
        return waits, PendingNames(names)

    def _note(self, names: PendingNames) -> None:
        """Have the notifier count these names as pending."""
        for _, name, directory, _ in names.names:
            self.notifier.defer(directory, name)
        names.is_noted = True

    def _invalidate_names(self, names: PendingNames, *, first: bool = False) -> dict[trio.Event, Object]:
        """Invalidate these names; return events, each set when one is invalidated, with its directory."""
        waits: dict[trio.Event, Object] = {}
        invalidate = (
            partial(self.notifier.invalidate_deferred, first=first)
            if names.is_noted
            else self.notifier.invalidate_entry
        )
        while names.names:
            parent, name, directory, nodeid = names.names[-1]
            wait = invalidate(directory, name, nodeid)
            names.names.pop()
            if wait is not None:
                waits[wait] = parent
        names.invalidated |= waits.keys()
        names.given.set()
        return waits

    @staticmethod
    def _note_nothing_cached(obj: Object) -> None:
        obj.cached_in = _NO_VIEWS
        if isinstance(obj, Directory):
            obj.public_in = _NO_VIEWS

    def invalidate_subtree(self, directory: Object, names: PendingNames | None = None) -> SubtreeInvalidation:
        """Invalidate what is below a directory, and then `names` of it; what takes long is done in the background.

        A user cannot make others wait for ever: before it is done again, the kernel must have cached something again.
        """
        if directory is self._nodes.root:
            self._invalidate_negative(directory)
        subtree = self.subtrees.get(directory)
        is_new = subtree is None
        if subtree is None:
            subtree = SubtreeInvalidation(directory, [*within(directory)] if isinstance(directory, Directory) else [])
            if not subtree.todo:  # a file, mostly
                subtree.done.set()
                if names is not None:
                    self._invalidate_names(names)
                return subtree
            # This is noted first: if the part done here fails, the background task goes on with it.
            self.subtrees[directory] = subtree
            self._subtrees_wanted.set()
        else:
            subtree.again = True
        if names is not None:
            self._note(names)
            subtree.last.append(names)
        if is_new:
            self._continue_subtree(subtree, at_once=True)
        if names is not None and not names.given.is_set():
            for _, name, parent, _ in names.names:
                expired = self.notifier.expire_entry(parent, name)
                if expired is not None:
                    names.expired.add(expired)
        return subtree

    @staticmethod
    async def invalidated(subtree: SubtreeInvalidation) -> None:
        """Wait until what is below the directory is invalidated, without names in the directory itself."""
        await subtree.done.wait()
        for name in list(subtree.names):
            await name.wait()

    def _invalidate_some(self, subtree: SubtreeInvalidation) -> bool:
        """Invalidate a part of it; return whether nothing is left."""
        for _ in range(self._at_once):
            if not subtree.todo:
                break
            it = subtree.todo[-1]
            waits: dict[trio.Event, Object] = {}
            inside: list[Object | PendingNames] = []
            if isinstance(it, PendingNames):
                waits = self._invalidate_names(it)
            elif it.ever_cached_in:
                it.relocated = self._subtree_check  # a request may have passed it already
                inside += within(it)
                waits, names = self._invalidate_itself(it)
                if inside and names.names:
                    self._note(names)
                    inside.insert(0, names)
                else:
                    waits |= self._invalidate_names(names)
            for wait, parent in waits.items():
                (subtree.own_names if parent is subtree.directory else subtree.names).add(wait)
            subtree.todo.pop()
            subtree.todo += inside
        return not subtree.todo

    def _unfinished(self) -> list[SubtreeInvalidation]:
        return list(self.subtrees.values())

    def _continue_subtree(self, subtree: SubtreeInvalidation, *, at_once: bool = False) -> None:
        """Invalidate a part of it. `at_once`: it is the first part; if nothing is left, there was little to do."""
        if not self._invalidate_some(subtree):
            return
        last, subtree.last = subtree.last, []
        if at_once:
            # The kernel drops so little in no time, and until then, it uses the name without a request.
            for names in last:
                self._invalidate_names(names, first=True)
        elif last:
            self._ending.append((set(subtree.names), last))
            self._end(*self._ending[-1])
        if subtree.again:
            subtree.again = False
            subtree.todo = [*within(subtree.directory)]
        else:
            del self.subtrees[subtree.directory]
            subtree.done.set()

    def _end(self, first: set[trio.Event], last: list[PendingNames]) -> None:
        if self._tasks is not None:
            self._tasks.supervise("invalidating names in the kernel", self._invalidate_last, first, last)

    async def _invalidate_last(self, first: set[trio.Event], last: list[PendingNames]) -> None:
        for wait in first:
            await wait.wait()
        for names in last:
            self._invalidate_names(names)
        self._ending.remove((first, last))

    async def settled(self) -> None:
        """Wait until nothing is cached by name that is known to have changed, for a second at most.

        It takes longer only where a process holds the lock of a directory.
        """
        if self.notifier.is_idle() and not self.subtrees:
            return
        with trio.move_on_after(_SETTLE_SECONDS):
            for subtree in list(self.subtrees.values()):
                await self.invalidated(subtree)
            await self.notifier.names_settled()

    def is_being_invalidated(self, obj: Object) -> bool:
        """Whether the object is below a directory whose subtree is still being invalidated."""
        for parent, _ in self.names_of(obj):
            at: Object | None = parent
            while at is not None:
                if at in self.subtrees:
                    return True
                at = at.parent
        return False

    @staticmethod
    def names_of(obj: Object) -> list[tuple[Object, bytes]]:
        """Return the directories that the object is known to be in, each with its name there."""
        names: list[tuple[Object, bytes]] = [] if obj.parent is None else [(obj.parent, obj.name)]
        if obj.rare is not None and obj.rare.others:  # `Object.others`, without a call
            names += obj.rare.others
        return names

    # -- what is known without the kernel ----------------------------------------------------------

    def note_absent_xattr(self, obj: Object, name: bytes) -> None:
        """Note that the object has no extended attribute of this name, until a change of it is reported."""
        known = obj.absent_xattrs
        names = known.names if known is not None and known.epoch == self.epoch else _NO_NAMES
        absent = self._absent_xattrs.get((names, name))
        if absent is None:
            absent = self._absent_xattrs[names, name] = AbsentXattrs(self.epoch, names | {name})
        obj.absent_xattrs = absent

    def clear_absent_xattrs(self, obj: Object) -> None:
        """Note that the object may have any extended attribute now, and any mode."""
        obj.absent_xattrs = None
        self.on_attributes(obj)

    def lacks_xattr(self, obj: Object, name: bytes) -> bool:
        """Whether it is known, as far as changes are reported, that the object has no such extended attribute."""
        known = obj.absent_xattrs
        return known is not None and known.epoch == self.epoch and name in known.names

    # -- all entries of a directory, and names that lead nowhere -----------------------------------

    def invalidate_listing(self, directory: Object) -> trio.Event | None:
        """End the proof of a directory, and invalidate what the kernel has cached because of it.

        Returns:
            an event, set when the kernel has dropped the listing; None if it has none.
        """
        proof = directory.proof
        if proof is None or not isinstance(directory, Directory):
            return None
        directory.proof = None
        self.proven.discard(directory)
        self._invalidate_negative(directory)
        return self.notifier.invalidate_listing(self._nodes.nodeid(0, directory)) if proof.is_in_kernel else None

    def note_negative(self, number: int, directory: Object, name: bytes, viewer: Viewer) -> bool:
        """Note that the kernel will have a negative dentry `name`; False if `viewer` has its share of them.

        Most negative dentries go with the name of their directory. These are noted because they have to be invalidated
        one by one: the top has no name, and when a proof ends, the name of the directory stays.
        """
        absent = self._negative
        if not absent.admits(viewer, directory, (number, name)):
            return False
        given_up = absent.note(viewer, directory, (number, name), trio.current_time())
        if given_up is not None:
            other, (number, name) = given_up
            self.notifier.invalidate_entry(self._nodes.nodeid(number, other), name)
        return True

    def note_hidden(self, number: int, directory: Object, name: bytes, viewer: Viewer, handle: bytes) -> bool:
        """Note that the kernel will have a negative dentry for a hidden file; False if `viewer` has its share of them.

        When the file becomes visible, the event may name another of its names, or none if it is changed by handle.

        Args:
            number: of the view.
            directory: in which the file is.
            name: of the file there.
            viewer: the client uid that learns the reply.
            handle: of the file, as objects have it.
        """
        place = number, directory, name
        if not self._hidden.admits(viewer, handle, place):
            return False
        self.on_hidden(handle[4:])
        given_up = self._hidden.note(viewer, handle, place, trio.current_time())
        if given_up is not None:
            _, (number, directory, name) = given_up
            self.notifier.invalidate_entry(self._nodes.nodeid(number, directory), name)
        return True

    def hidden(self) -> Iterable[bytes]:
        """Return the handles of the files of which the kernel has negative dentries."""
        return self._hidden.directories()

    def invalidate_hidden(self, handle: bytes) -> None:
        """Invalidate the negative dentries of a file that was hidden: it has changed."""
        for number, directory, name in self._hidden.take(handle):
            self.invalidate_name(directory, name, (number,))

    def _invalidate_negative(self, directory: Object) -> None:
        """Invalidate the negative dentries of a directory that have been noted."""
        for number, name in self._negative.take(directory):
            self.invalidate_name(directory, name, (number,))

    # -- everything --------------------------------------------------------------------------------

    def invalidate_everything(self) -> None:
        """Invalidate everything: the policy has changed, or what is mounted, or it is not known what has changed."""
        self._access_paths.invalidate()
        self.begin_epoch()

    def begin_epoch(self) -> _FullInvalidation:
        """Stop relying on anything that was cached before; the kernel is notified soon, of each object if need be."""
        self.epoch += 1
        self._absent_xattrs.clear()
        self.on_attributes(None)
        self.on_change(None)
        if not self._full_invalidations or self._full_invalidations[-1].begun:
            self._full_invalidations.append(_FullInvalidation())
            self._full_invalidation_wanted.set()
        full = self._full_invalidations[-1]
        if self.notifier.increment_epoch():
            self._negative.clear()
            self._hidden.clear()
        else:
            full.by_name = True
            for directory in self._negative.directories():
                self._invalidate_negative(directory)
        return full

    def invalidate_earlier_epochs(self, obj: Object, *, by_name: bool) -> set[trio.Event]:
        """Invalidate what was cached of an object in earlier epochs; return the events of its names."""
        if by_name:
            return self.invalidate_object(obj)
        self.invalidate_listing(obj)
        self.invalidate_attributes(obj)
        self._note_nothing_cached(obj)
        return set()

    # -- in the background -------------------------------------------------------------------------

    async def _invalidate_subtrees(self) -> None:
        while True:
            if not self.subtrees:
                self._subtrees_wanted = trio.Event()
                await self._subtrees_wanted.wait()
            for subtree in self._unfinished():
                self._continue_subtree(subtree)
                await trio.sleep(0)

    async def _run_full_invalidations(self) -> None:
        while True:
            if not self._full_invalidations:
                self._full_invalidation_wanted = trio.Event()
                await self._full_invalidation_wanted.wait()
            await self._invalidate_all(list(self._full_invalidations))

    async def _invalidate_all(self, all_full: list[_FullInvalidation]) -> None:
        for full in all_full:
            full.begun = True
        by_name = any(full.by_name for full in all_full)
        waits: set[trio.Event] = set()
        count = 0
        for examined, obj in enumerate(self._nodes.registry.objects(), 1):
            if examined % _EXAMINED_AT_ONCE == 0:
                await trio.sleep(0)
            if obj.cached_in and obj.cache_epoch != self.epoch:
                waits |= self.invalidate_earlier_epochs(obj, by_name=by_name)
                count += 1
                if count % self._at_once == 0:
                    await trio.sleep(0)
        for full in all_full:
            full.attributes.set()
        for wait in waits:
            await wait.wait()
        for full in all_full:
            full.names.set()
        del self._full_invalidations[: len(all_full)]

    async def run(self) -> None:
        """Run for ever, doing what may have to wait for the kernel."""
        async with trio.open_nursery() as nursery:
            self._tasks = tasks = Tasks(nursery)
            for first, last in self._ending:
                self._end(first, last)
            tasks.supervise("invalidating names in the kernel", self.notifier.run)
            tasks.supervise("invalidating everything in the kernel", self._run_full_invalidations)
            tasks.supervise("invalidating what is below in the kernel", self._invalidate_subtrees)
            while True:
                await trio.sleep(1)
                self._negative.drop_until(trio.current_time() - ABSENT_SECONDS)
                self._hidden.drop_until(trio.current_time() - ABSENT_SECONDS)
                if self.notifier.overflowed:
                    self.notifier.overflowed = False
                    self.invalidate_everything()
