"""Has the kernel forget what it was told to remember: what there is to forget of an object, and of all that is below.

Attributes are forgotten at once, for that waits for nobody; a name as soon as the kernel has it free, and before who
changed it is answered, where that is possible (see `forgetter`). What takes long goes on in the background; meanwhile
nothing is relied on that is still to be forgotten.
"""

from collections.abc import Iterable

import trio

from ..tasks import Tasks
from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..tree.passages import Passages
from .forgetter import AT_ONCE, Forgetter

ABSENT_SECONDS = 10.0
"""How long the kernel remembers, where it does, that a name leads nowhere.

Not longer, since of a hidden file that a server changes by handle, its mode for example, the kernel may not tell the
name.
"""

# So many names that lead nowhere are remembered in top directories.
_MOST_ABSENT = 10_000

_NOBODY: frozenset[int] = frozenset()


class _Sweep:
    """Everything that was remembered before is forgotten; see `Forgetting.forget_everything`."""

    def __init__(self) -> None:
        self.by_name = False  # each name has to be forgotten, too
        self.begun = False
        self.attributes = trio.Event()  # done
        self.names = trio.Event()  # done


class Below:
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


class Forgetting:
    """What the kernel has still to forget, and what cannot be relied on until it has.

    Args:
        nodes: the objects.
        passages: what is told of directories that change.

    Attributes:
        forgetter: tells the kernel.
        era: what was remembered in an earlier one (`Object.era`) is not relied on any more; a sweep tells the kernel.
        below: the directories below which there is so much to forget that others are given time in between.
    """

    def __init__(self, nodes: Nodes, passages: Passages) -> None:
        self._nodes = nodes
        self._passages = passages
        self.forgetter = Forgetter()
        self.era = 0
        self._sweeps: list[_Sweep] = []
        self._sweep_wanted = trio.Event()
        self.below: dict[Object, Below] = {}
        self._below_wanted = trio.Event()
        # View, and a name that is remembered to lead nowhere in its top; since when.
        self._absent: dict[tuple[int, bytes], float] = {}

    # -- an object, its names, and what is below ---------------------------------------------------

    def forget_attributes(self, obj: Object) -> None:
        """The attributes changed; waits for nobody."""
        for number in obj.kept:
            parent = None if obj.parent is None else self._nodes.nodeid(number, obj.parent)
            self.forgetter.attributes(self._nodes.nodeid(number, obj), parent)

    def forget_name(self, parent: Object, name: bytes, numbers: Iterable[int]) -> None:
        """Something else is called `name` now, or nothing, or not everybody may know."""
        for number in numbers:
            self.forgetter.name(self._nodes.nodeid(number, parent), name)

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

    def forget(self, obj: Object) -> None:
        """Neither its names nor its attributes are to be relied on, nor anything below."""
        self.forget_one(obj)
        self.forget_below(obj)

    def forget_one(self, obj: Object) -> dict[trio.Event, Object]:
        """Forget it alone.

        Returns:
            events, each set when a name of it is forgotten, and the directory of that name.
        """
        waits: dict[trio.Event, Object] = {}
        if not obj.kept:
            return waits
        self.forget_attributes(obj)
        for parent, name in self.names_of(obj):
            for number in obj.kept:
                nodeid = self._nodes.nodeid(number, obj)
                wait = self.forgetter.name(self._nodes.nodeid(number, parent), name, nodeid)
                if wait is not None:
                    waits[wait] = parent
        obj.kept = obj.public = _NOBODY
        return waits

    def forget_below(self, directory: Object) -> Below:
        """Forget what is below it; what takes long goes on in the background.

        Nobody makes others wait for this: whoever has it done again has made the kernel remember it again before.
        """
        if directory is self._nodes.root:
            self._forget_absences()
        below = self.below.get(directory)
        if below is not None:
            below.again = True
            return below
        below = Below(directory, self._nodes.within(directory))
        if not below.todo:  # a file, mostly
            below.done.set()
            return below
        # Noted first: if this part fails, the background task goes on with it.
        self.below[directory] = below
        self._below_wanted.set()
        self._go_on_below(below)
        return below

    def _forget_some(self, below: Below) -> bool:
        """Forget a part of it; True if nothing is left."""
        for _ in range(AT_ONCE):
            if not below.todo:
                break
            obj = below.todo[-1]
            inside: list[Object] = []
            if obj.ever_kept:
                for wait, parent in self.forget_one(obj).items():
                    if parent is not below.directory:
                        below.names.add(wait)
                inside = self._nodes.within(obj)
            below.todo.pop()
            below.todo += inside
        return not below.todo

    def _unfinished(self) -> list[Below]:
        return list(self.below.values())

    def _go_on_below(self, below: Below) -> None:
        if not self._forget_some(below):
            return
        if below.again:
            below.again = False
            below.todo = self._nodes.within(below.directory)
        else:
            del self.below[below.directory]
            below.done.set()

    def is_being_forgotten(self, obj: Object) -> bool:
        """Is it below a directory below which not all is forgotten yet?"""
        for parent, _ in self.names_of(obj):
            at: Object | None = parent
            while at is not None:
                if at in self.below:
                    return True
                at = at.parent
        return False

    @staticmethod
    def names_of(obj: Object) -> list[tuple[Object, bytes]]:
        """The directories that it is in, as far as is known, and what it is called there."""
        return [*([(obj.parent, obj.name)] if obj.parent is not None else []), *(obj.others or [])]

    # -- names that lead nowhere -------------------------------------------------------------------

    def note_absence(self, number: int, name: bytes) -> bool:
        """The kernel is to remember that `name` leads nowhere in the top. False: there is too much of that already.

        Other directories are forgotten with all that is in them; of this one there is no name to forget.
        """
        if len(self._absent) >= _MOST_ABSENT:
            return False
        self._absent[number, name] = trio.current_time()
        return True

    def _forget_absences(self) -> None:
        """Of the top there is no name to forget, with which all that is absent in it would be forgotten."""
        absent, self._absent = self._absent, {}
        for number, name in absent:
            self.forget_name(self._nodes.root, name, (number,))

    # -- everything --------------------------------------------------------------------------------

    def forget_everything(self) -> None:
        """The policy changed, or what is mounted, or nobody knows what."""
        self._passages.forget()
        self.begin_era()

    def begin_era(self) -> _Sweep:
        """From now on nothing is relied on that was remembered before; the kernel is told name by name, soon."""
        self.era += 1
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

    def forget_era(self, obj: Object, *, by_name: bool) -> set[trio.Event]:
        """Forget what was remembered of it before this era."""
        if by_name:
            return set(self.forget_one(obj))
        self.forget_attributes(obj)
        obj.kept = obj.public = _NOBODY
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
        for obj in self._nodes.objects():
            if obj.kept and obj.era != self.era:
                waits |= self.forget_era(obj, by_name=by_name)
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
