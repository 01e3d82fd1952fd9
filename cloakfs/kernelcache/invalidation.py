"""Makes the kernel forget what it was told to remember about an object, and about everything below it.

Attributes are forgotten at once, since this never has to wait. A name is forgotten as soon as the lock of its directory
is free and, where possible, before the request that changed it is answered (see `notifier`). What takes long goes on
in the background; meanwhile, nothing is relied on that has yet to be forgotten.
"""

from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakSet

import trio

from ..background.tasks import Tasks
from ..exportmode import ExportMode
from ..tree.nodes import Nodes
from ..tree.objects import AbsentXattrs, Directory, Object
from ..tree.visibility import AccessPaths
from ..tuning import STANDARD, Tuning
from .negative import Absences
from .notifier import Notifier
from .policy import ABSENT_SECONDS

# How many names at most are remembered to lead nowhere, of those that are forgotten one by one.
_MOST_ABSENT = 10_000

# How many objects of which the kernel may remember nothing are looked at without giving time to others: half a
# millisecond, perhaps.
_EXAMINED_AT_ONCE = 4096

_NOBODY: frozenset[int] = frozenset()
_NO_NAMES: frozenset[bytes] = frozenset()


class _Sweep:
    """One pass that forgets everything that was remembered before; see `Invalidation.forget_everything`."""

    def __init__(self) -> None:
        self.by_name = False  # whether each name has to be forgotten, too
        self.begun = False
        self.attributes = trio.Event()  # set when all attributes are forgotten
        self.names = trio.Event()  # set when all names are forgotten


class Names:
    """The names of an object, with the directories that they are in, and the nodeids of directory and object.

    Attributes:
        names: see above.
        is_noted: whether they count as names that have yet to be forgotten.
        given: set when they have been given to the notifier.
        expired: each is set when the kernel asks about a name each time, if that comes first.
        forgotten: each is set when a name is forgotten.
    """

    __slots__ = ("expired", "forgotten", "given", "is_noted", "names")

    def __init__(self, names: list[tuple[Object, bytes, int, int]]) -> None:
        self.names = names
        self.is_noted = False
        self.given = trio.Event()
        self.expired: set[trio.Event] = set()
        self.forgotten: set[trio.Event] = set()

    async def wait(self) -> None:
        """Wait until all are forgotten."""
        await self.given.wait()
        for name in self.forgotten:
            await name.wait()


class Below:
    """The work of forgetting what was remembered below a directory.

    Attributes:
        todo: the objects to go on with, from the end; names of a directory come before what is below it.
        again: whether to begin once more, because the directory has changed again.
        names: each is set when a name is forgotten; without names in the directory itself, which the kernel may hold.
        own_names: the same for the names in the directory itself.
        done: set when no attributes are remembered any more; then nothing is relied on.
        last: names of the directory itself, which are forgotten after those below it.
    """

    def __init__(self, directory: Object, todo: list[Object | Names]) -> None:
        self.directory = directory
        self.todo = todo
        self.again = False
        self.names: set[trio.Event] = set()
        self.own_names: set[trio.Event] = set()
        self.done = trio.Event()
        self.last: list[Names] = []


class Invalidation:
    """What the kernel still has to forget, and what cannot be relied on until it has.

    Args:
        nodes: the objects.
        access_paths: is informed of directories that change.
        mode: how the mount is exported.
        tuning: times and bounds.

    Attributes:
        notifier: tells the kernel what to forget.
        era: the present one. What was remembered in an earlier one (`Object.era`) is not relied on any more; a sweep
            tells the kernel.
        below: the directories below which there is so much to forget that others are given time in between.
        on_attributes: is called when attributes of an object may have changed behind the mount; with None if it is not
            known of which.
        on_change: is called when anything of an object may have changed behind the mount, likewise.
    """

    def __init__(self, nodes: Nodes, access_paths: AccessPaths, mode: ExportMode, tuning: Tuning = STANDARD) -> None:
        self._nodes = nodes
        self._access_paths = access_paths
        self._checks_above = mode.subtree_check
        self._at_once = tuning.names_at_once
        self.notifier = Notifier(tuning)
        self.era = 0
        self._sweeps: list[_Sweep] = []
        self._sweep_wanted = trio.Event()
        self.below: dict[Object, Below] = {}
        self._below_wanted = trio.Event()
        self._ending: list[tuple[set[trio.Event], list[Names]]] = []  # what comes first, and the names that come last
        self._tasks: Tasks | None = None
        # Names that are remembered to lead nowhere, each with the number of a view.
        self._absent: Absences[Object, tuple[int, bytes]] = Absences(_MOST_ABSENT)
        # Of these, the hidden files, by handle: each with the number of a view, the directory and the name.
        self._hidden: Absences[bytes, tuple[int, Object, bytes]] = Absences(_MOST_ABSENT)
        self.listed: WeakSet[Object] = WeakSet()  # the directories that have a `listing`
        # What is noted of an object in the present era: by the names noted before, and the one that is added.
        self._absent_xattrs: dict[tuple[frozenset[bytes], bytes], AbsentXattrs] = {}
        self.on_attributes: Callable[[Object | None], None] = lambda _: None
        self.on_change: Callable[[Object | None], None] = lambda _: None

    # -- an object, its names, and what is below ---------------------------------------------------

    def forget_attributes(self, obj: Object, *, but: int | None = None) -> None:
        """Forget the attributes of an object, without waiting, in all views `but` the one with this number."""
        for number in obj.kept:
            if number == but:
                continue
            parent = None if obj.parent is None else self._nodes.nodeid(number, obj.parent)
            self.notifier.attributes(self._nodes.nodeid(number, obj), parent)

    def forget_name(self, parent: Object, name: bytes, numbers: Iterable[int]) -> set[trio.Event]:
        """Forget a name in these views: it leads to something else now, or nowhere, or not everybody may know it.

        Returns:
            events, each set when the kernel asks about the name again in one of the views.
        """
        self.forget_listing(parent)
        nodeid, notifier = self._nodes.nodeid, self.notifier
        child = (parent.children or {}).get(name)
        if child is not None and child.children:
            names = Names([(parent, name, nodeid(number, parent), nodeid(number, child)) for number in numbers])
            self.forget_below(child, names)
            return names.forgotten | names.expired
        waits: set[trio.Event | None] = set()
        for number in numbers:
            directory = nodeid(number, parent)
            # Of what had the name before, much may be known below, which is being forgotten first.
            waits.add((notifier.expire if notifier.comes_later(directory, name) else notifier.name)(directory, name))
        return {wait for wait in waits if wait is not None}

    def expire_name(self, parent: Object, name: bytes) -> None:
        """Make the kernel ask about a name each time, in all views; where it leads elsewhere, it is forgotten later."""
        self.forget_listing(parent)
        for number in parent.ever_kept:
            self.notifier.expire(self._nodes.nodeid(number, parent), name)

    def forget_content(self, obj: Object) -> None:
        """Forget the content of a file, and its attributes."""
        obj.content = None
        self.forget_attributes(obj)
        for number in obj.kept:
            self.notifier.pages(self._nodes.nodeid(number, obj))

    def forget_pages(self, number: int, obj: Object) -> None:
        """Forget pages that the kernel has because it wrote them, although the file now contains something else."""
        obj.content = None
        nodeid = self._nodes.nodeid(number, obj)
        self.notifier.attributes(nodeid, None if obj.parent is None else self._nodes.nodeid(number, obj.parent))
        self.notifier.pages(nodeid)

    def forget(self, obj: Object) -> tuple[Below, Names]:
        """Forget the names and attributes of an object, and of everything below it.

        Returns:
            the work that is left below, and the names of the object, which come last.
        """
        waits, names = self._forget_itself(obj)
        names.forgotten |= waits.keys()
        return self.forget_below(obj, names), names

    def forget_one(self, obj: Object) -> set[trio.Event]:
        """Forget the object alone; return events, each set when one of its names is forgotten."""
        waits, names = self._forget_itself(obj)
        self._forget_names(names)
        return names.forgotten | waits.keys()

    def _forget_itself(self, obj: Object) -> tuple[dict[trio.Event, Object], Names]:
        """Forget everything of the object but its names, which are returned.

        Among them are those that an earlier change has had forgotten, and that the kernel may still have: whoever waits
        for this has to wait for these, too.

        Returns:
            events, each set when a listing that has the object is forgotten, with its directory; and the names.
        """
        waits: dict[trio.Event, Object] = {}
        self.forget_listing(obj)
        for parent, _ in self.names_of(obj):
            listing = self.forget_listing(parent)
            if listing is not None:
                waits[listing] = parent
        is_idle, kept, nodeid = self.notifier.is_idle(), obj.kept, self._nodes.nodeid
        if not kept and is_idle:
            return waits, Names([])
        names = [
            (parent, name, nodeid(number, parent), nodeid(number, obj))
            for parent, name in self.names_of(obj)
            for number in (kept if is_idle else obj.ever_kept)
            if number in kept or self.notifier.is_forgetting(nodeid(number, parent), name)
        ]
        if kept:
            self.forget_attributes(obj)
            self._keep_nothing(obj)
        return waits, Names(names)

    def _note(self, names: Names) -> None:
        """Have these names count as names that have yet to be forgotten."""
        for _, name, directory, _ in names.names:
            self.notifier.later(directory, name)
        names.is_noted = True

    def _forget_names(self, names: Names, *, first: bool = False) -> dict[trio.Event, Object]:
        """Forget these names; return events, each set when one is forgotten, with its directory."""
        waits: dict[trio.Event, Object] = {}
        forget = partial(self.notifier.now, first=first) if names.is_noted else self.notifier.name
        while names.names:
            parent, name, directory, nodeid = names.names[-1]
            wait = forget(directory, name, nodeid)
            names.names.pop()
            if wait is not None:
                waits[wait] = parent
        names.forgotten |= waits.keys()
        names.given.set()
        return waits

    @staticmethod
    def _keep_nothing(obj: Object) -> None:
        obj.kept = _NOBODY
        if isinstance(obj, Directory):
            obj.public = _NOBODY

    def forget_below(self, directory: Object, names: Names | None = None) -> Below:
        """Forget what is below a directory, and then `names` of it; what takes long goes on in the background.

        Nobody can make others wait for this: whoever has it done again must first make the kernel remember it again.
        """
        if directory is self._nodes.root:
            self._forget_absences(directory)
        below = self.below.get(directory)
        is_new = below is None
        if below is None:
            below = Below(directory, [*self._nodes.within(directory)])
            if not below.todo:  # a file, mostly
                below.done.set()
                if names is not None:
                    self._forget_names(names)
                return below
            # This is noted first: if the part done here fails, the background task goes on with it.
            self.below[directory] = below
            self._below_wanted.set()
        else:
            below.again = True
        if names is not None:
            self._note(names)
            below.last.append(names)
        if is_new:
            self._go_on_below(below, at_once=True)
        if names is not None and not names.given.is_set():
            for _, name, parent, _ in names.names:
                expired = self.notifier.expire(parent, name)
                if expired is not None:
                    names.expired.add(expired)
        return below

    @staticmethod
    async def forgotten(below: Below) -> None:
        """Wait until what is below the directory is forgotten, without names in the directory itself."""
        await below.done.wait()
        for name in list(below.names):
            await name.wait()

    def _forget_some(self, below: Below) -> bool:
        """Forget a part of it; return whether nothing is left."""
        for _ in range(self._at_once):
            if not below.todo:
                break
            it = below.todo[-1]
            waits: dict[trio.Event, Object] = {}
            inside: list[Object | Names] = []
            if isinstance(it, Names):
                waits = self._forget_names(it)
            elif it.ever_kept:
                it.strayed = self._checks_above  # a request may have passed it already
                inside += self._nodes.within(it)
                waits, names = self._forget_itself(it)
                if inside and names.names:
                    self._note(names)
                    inside.insert(0, names)
                else:
                    waits |= self._forget_names(names)
            for wait, parent in waits.items():
                (below.own_names if parent is below.directory else below.names).add(wait)
            below.todo.pop()
            below.todo += inside
        return not below.todo

    def _unfinished(self) -> list[Below]:
        return list(self.below.values())

    def _go_on_below(self, below: Below, *, at_once: bool = False) -> None:
        """Forget a part of it. `at_once`: it is the first part; if nothing is left, hardly anything was there."""
        if not self._forget_some(below):
            return
        last, below.last = below.last, []
        if at_once:
            # The kernel drops so little in no time, and until then, it uses the name without asking.
            for names in last:
                self._forget_names(names, first=True)
        elif last:
            self._ending.append((set(below.names), last))
            self._end(*self._ending[-1])
        if below.again:
            below.again = False
            below.todo = [*self._nodes.within(below.directory)]
        else:
            del self.below[below.directory]
            below.done.set()

    def _end(self, first: set[trio.Event], last: list[Names]) -> None:
        if self._tasks is not None:
            self._tasks.supervise("invalidating names in the kernel", self._forget_last, first, last)

    async def _forget_last(self, first: set[trio.Event], last: list[Names]) -> None:
        for wait in first:
            await wait.wait()
        for names in last:
            self._forget_names(names)
        self._ending.remove((first, last))

    def is_being_forgotten(self, obj: Object) -> bool:
        """Whether the object is below a directory below which not everything has been forgotten yet."""
        for parent, _ in self.names_of(obj):
            at: Object | None = parent
            while at is not None:
                if at in self.below:
                    return True
                at = at.parent
        return False

    @staticmethod
    def names_of(obj: Object) -> list[tuple[Object, bytes]]:
        """Return the directories that the object is known to be in, each with its name there."""
        return [*([(obj.parent, obj.name)] if obj.parent is not None else []), *obj.others]

    # -- what is known without the kernel ----------------------------------------------------------

    def note_absent_xattr(self, obj: Object, name: bytes) -> None:
        """Note that the object has no extended attribute of this name, until a change of it is reported."""
        known = obj.absent_xattrs
        names = known.names if known is not None and known.era == self.era else _NO_NAMES
        absent = self._absent_xattrs.get((names, name))
        if absent is None:
            absent = self._absent_xattrs[names, name] = AbsentXattrs(self.era, names | {name})
        obj.absent_xattrs = absent

    def forget_absent_xattrs(self, obj: Object) -> None:
        """Note that the object may have any extended attribute now, and any mode."""
        obj.absent_xattrs = None
        self.on_attributes(obj)

    def lacks_xattr(self, obj: Object, name: bytes) -> bool:
        """Whether it is known, as far as changes are reported, that the object has no such extended attribute."""
        known = obj.absent_xattrs
        return known is not None and known.era == self.era and name in known.names

    # -- all entries of a directory, and names that lead nowhere -----------------------------------

    def forget_listing(self, directory: Object) -> trio.Event | None:
        """Forget what is known of all entries of a directory, and what the kernel remembers because of it.

        Returns:
            an event like that of `Notifier.name`; None if the kernel has no listing.
        """
        listing = directory.listing
        if listing is None or not isinstance(directory, Directory):
            return None
        directory.listing = None
        self.listed.discard(directory)
        self._forget_absences(directory)
        return self.notifier.listing(self._nodes.nodeid(0, directory)) if listing.is_in_kernel else None

    def note_absence(self, number: int, directory: Object, name: bytes, viewer: int) -> bool:
        """Note that the kernel will remember that `name` leads nowhere; False if `viewer` has its share of all these.

        Most absences are forgotten with the directory's own name. The top has no name to forget, and of a listing the
        name of the directory says nothing.
        """
        absent = self._absent
        if not absent.admits(viewer, directory, (number, name)):
            return False
        given_up = absent.note(viewer, directory, (number, name), trio.current_time())
        if given_up is not None:
            other, (number, name) = given_up
            self.notifier.name(self._nodes.nodeid(number, other), name)
        return True

    def note_hidden(self, number: int, directory: Object, name: bytes, viewer: int, handle: bytes) -> bool:
        """Note that the kernel will remember that a file is absent which is hidden; False as with `note_absence`.

        Another of its names may be reported when it becomes visible, or, if it is changed by handle, none.

        Args:
            number: of the view.
            directory: in which the file is.
            name: of the file there.
            viewer: who is told.
            handle: of the file, as objects have it.
        """
        place = number, directory, name
        if not self._hidden.admits(viewer, handle, place):
            return False
        given_up = self._hidden.note(viewer, handle, place, trio.current_time())
        if given_up is not None:
            _, (number, directory, name) = given_up
            self.notifier.name(self._nodes.nodeid(number, directory), name)
        return True

    def forget_hidden(self, handle: bytes) -> None:
        """Forget the absence of a file that was hidden, by all names: it has changed."""
        for number, directory, name in self._hidden.take(handle):
            self.forget_name(directory, name, (number,))

    def _forget_absences(self, directory: Object) -> None:
        """Forget absences in a directory one by one."""
        for number, name in self._absent.take(directory):
            self.forget_name(directory, name, (number,))

    # -- everything --------------------------------------------------------------------------------

    def forget_everything(self) -> None:
        """Forget everything: the policy has changed, or what is mounted, or it is not known what has changed."""
        self._access_paths.forget()
        self.begin_era()

    def begin_era(self) -> _Sweep:
        """Stop relying on anything that was remembered before; the kernel is soon told name by name."""
        self.era += 1
        self._absent_xattrs.clear()
        self.on_attributes(None)
        self.on_change(None)
        if not self._sweeps or self._sweeps[-1].begun:
            self._sweeps.append(_Sweep())
            self._sweep_wanted.set()
        sweep = self._sweeps[-1]
        if self.notifier.every_name():
            self._absent.clear()
            self._hidden.clear()
        else:
            sweep.by_name = True
            for directory in self._absent.directories():
                self._forget_absences(directory)
        return sweep

    def forget_era(self, obj: Object, *, by_name: bool) -> set[trio.Event]:
        """Forget what was remembered of an object before this era; return the events of its names."""
        if by_name:
            return self.forget_one(obj)
        self.forget_listing(obj)
        self.forget_attributes(obj)
        self._keep_nothing(obj)
        return set()

    # -- in the background -------------------------------------------------------------------------

    async def _keep_forgetting_below(self) -> None:
        while True:
            if not self.below:
                self._below_wanted = trio.Event()
                await self._below_wanted.wait()
            for below in self._unfinished():
                self._go_on_below(below)
                await trio.sleep(0)

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
        for examined, obj in enumerate(self._nodes.objects(), 1):
            if examined % _EXAMINED_AT_ONCE == 0:
                await trio.sleep(0)
            if obj.kept and obj.era != self.era:
                waits |= self.forget_era(obj, by_name=by_name)
                count += 1
                if count % self._at_once == 0:
                    await trio.sleep(0)
        for sweep in sweeps:
            sweep.attributes.set()
        for wait in waits:
            await wait.wait()
        for sweep in sweeps:
            sweep.names.set()
        del self._sweeps[: len(sweeps)]

    async def keep_forgetting(self) -> None:
        """Run for ever, doing what may have to wait for the kernel."""
        async with trio.open_nursery() as nursery:
            self._tasks = tasks = Tasks(nursery)
            for first, last in self._ending:
                self._end(first, last)
            tasks.supervise("invalidating names in the kernel", self.notifier.run)
            tasks.supervise("invalidating everything in the kernel", self._keep_sweeping)
            tasks.supervise("invalidating what is below in the kernel", self._keep_forgetting_below)
            while True:
                await trio.sleep(1)
                self._absent.drop_until(trio.current_time() - ABSENT_SECONDS)
                self._hidden.drop_until(trio.current_time() - ABSENT_SECONDS)
                if self.notifier.overflowed:
                    self.notifier.overflowed = False
                    self.forget_everything()
