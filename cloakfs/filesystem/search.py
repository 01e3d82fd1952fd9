"""Searches the tree for files that are used by handle, while nothing says in which directory they are.

That is so after the state of the mount was lost, and after a file was renamed while the mount was not there. Only a
directory has a way up (".."). So the tree is walked through, once for all files that are sought, slowly enough that
others do not notice; a client is told to try again meanwhile (EAGAIN; over NFS, NFS3ERR_JUKEBOX or NFS4ERR_DELAY).
"""

import itertools
import math
import stat
import time
from dataclasses import dataclass, field

import trio

from ..linux import Stat
from ..tree.computed import COMPUTED
from ..tree.nodes import Nodes
from ..tree.objects import Directory, Object
from ..tree.treewalk import FoundName, TreeWalk

PATIENCE_SECONDS = 0.5
"""How long requests wait for an object, from the first one on, before clients are told to try again."""

# The walk goes on for so long at a time, and pauses, so that all searches take at most this share of one processor.
_STEP_SECONDS = 0.02
_SHARE = 0.25
# After a time without any search, so much goes on without a pause: a small tree is walked through at once.
_WITHOUT_PAUSE_SECONDS = 0.2

# How many names are looked at before others have a turn.
_NAMES_AT_ONCE = 20

# How many files that were sought are remembered, and for how long that one was sought in vain: a directory may not have
# been readable.
_MOST_SEARCHED = 10_000
_IN_VAIN_SECONDS = 60.0

# A directory that is renamed during a walk, from where the walk has yet to come to where it has been, is missed. So is
# what is in it.
_MOST_WALKS = 2


@dataclass(eq=False, slots=True)
class _Sought:
    """A file that is sought.

    Attributes:
        inode: st_ino.
        nlink: how many names it has.
        ctime: its st_ctime_ns.
        until: how long requests wait for it (`trio.current_time`).
        walks: how many walks have gone by that began after it was sought.
        is_in_walk: whether the present walk is one of them.
        found: how many names were found.
        done: is set at the end.
    """

    inode: int
    nlink: int
    ctime: int
    until: float
    walks: int = 0
    is_in_walk: bool = False
    found: int = 0
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def is_complete(self) -> bool:
        """Whether no further walk is worth while."""
        return self.walks >= (1 if self.found else _MOST_WALKS)


class _Share:
    """Says when to pause, so that no more than a share of one processor is used, whatever the searches are."""

    def __init__(self) -> None:
        self._left = _WITHOUT_PAUSE_SECONDS
        self._at = time.monotonic()

    def pause(self, took: float) -> float:
        """Return how many seconds to pause now that the work of so many seconds was done."""
        now = time.monotonic()
        self._left = min(_WITHOUT_PAUSE_SECONDS, self._left + (now - self._at) * _SHARE) - took
        self._at = now
        return max(0.0, -self._left / _SHARE)


class Search:
    """The search of one mount.

    Args:
        nodes: the objects.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._sought: dict[int, _Sought] = {}  # by number of the object
        self._numbers: dict[int, list[int]] = {}  # of the objects that are sought, by st_ino
        # Those that were sought, by number of the object: the ctime, and until when that counts.
        self._searched: dict[int, tuple[int, float]] = {}
        self._share = _Share()
        self._wake = trio.Event()

    def may_find(self, obj: Object, info: Stat) -> bool:
        """Whether a search may find out where an object is, or a further name. `info` is its present stat."""
        if obj.number in self._sought:
            return True
        registry = self._nodes.registry
        reported = registry.disconnected.get(obj)
        return (
            (obj in registry.disconnected or not obj.filesystem.watched)  # otherwise its renames were reported
            and (reported is None or not reported.directory)  # otherwise it was seen leaving the tree
            and not stat.S_ISDIR(info.st_mode)
            and info.st_nlink > 0
            and obj.filesystem is registry.root.filesystem
            and (not obj.filesystem.by_threads or obj.number & COMPUTED > 0)
            and not self._was_searched(obj, info)
            and (info.st_nlink > 1 + len(obj.others) or next(self._nodes.locator.places(obj, info), None) is None)
        )

    def _was_searched(self, obj: Object, info: Stat) -> bool:
        ctime, until = self._searched.get(obj.number, (None, 0.0))
        return ctime == info.st_ctime_ns and time.monotonic() < until

    async def has_found(self, obj: Object, info: Stat) -> bool | None:
        """Have an object searched for (`may_find`); return whether any name was found, None if it takes longer."""
        sought = self._sought.get(obj.number)
        if sought is None:
            until = trio.current_time() + PATIENCE_SECONDS
            sought = self._sought[obj.number] = _Sought(info.st_ino, info.st_nlink, info.st_ctime_ns, until)
            self._numbers.setdefault(info.st_ino, []).append(obj.number)
            self._wake.set()
        with trio.move_on_at(sought.until):
            await sought.done.wait()
        return sought.found > 0 if sought.done.is_set() else None

    async def run(self) -> None:
        """Search for what is sought, for ever."""
        while True:
            if not self._sought:
                self._wake = trio.Event()
                await self._wake.wait()
            await self._walk()

    async def _walk(self) -> None:
        """Walk through the tree once."""
        for sought in self._sought.values():
            sought.is_in_walk = True
        root = self._nodes.registry.root
        walk = TreeWalk(root.filesystem, self._nodes.descriptors.fd(root))
        try:
            goes_on = True
            while goes_on and self._sought:
                began = time.monotonic()
                found, goes_on = await trio.to_thread.run_sync(walk.step, frozenset(self._numbers), _STEP_SECONDS)
                took = time.monotonic() - began
                for directory, names in itertools.groupby(found, lambda one: one.directory):
                    took += await self._note(directory, list(names))
                await trio.sleep(self._share.pause(took))
        finally:
            walk.close()
        for number, sought in list(self._sought.items()):
            sought.walks += sought.is_in_walk
            if sought.is_complete:
                self._end(number, sought)

    async def _note(self, directory: bytes, found: list[FoundName]) -> float:
        """Note names that were found in a directory, unless they are outdated; return how many seconds that took."""
        began, waited = time.monotonic(), 0.0
        try:
            parent = self._directory(directory)
        except OSError:
            parent = None
        if parent is None:
            return time.monotonic() - began
        parent.pins += 1  # others have a turn meanwhile
        try:
            for count, one in enumerate(found, 1):
                for number in list(self._numbers.get(one.inode, ())):
                    sought = self._sought[number]
                    if self._is_placed(number, parent, one.name):
                        sought.found += 1
                        if sought.found >= sought.nlink:
                            self._end(number, sought)
                if count % _NAMES_AT_ONCE == 0:
                    paused = time.monotonic()
                    await trio.sleep(0)
                    waited += time.monotonic() - paused
        finally:
            parent.pins -= 1
            self._nodes.registry.drop_if_unused(parent)
        return time.monotonic() - began - waited

    def _directory(self, handle: bytes) -> Directory | None:
        registry = self._nodes.registry
        if not registry.root.filesystem.by_threads:
            found = self._nodes.locator.directory_below_root(registry.root.filesystem, handle)
        else:  # it may take long to look, and the next request for what is in it verifies its place
            number = self._nodes.numbers.number_of(registry.root, handle)
            found = self._nodes.get(number) if number else None
        return found if isinstance(found, Directory) else None

    def _is_placed(self, number: int, parent: Directory, name: bytes) -> bool:
        registry = self._nodes.registry
        try:
            obj = self._nodes.get(number)
            if obj.filesystem.by_threads:
                registry.move(obj, parent, name)
            else:
                info = obj.filesystem.stat(self._nodes.descriptors.fd(obj))
                if not self._nodes.locator.is_at(info, parent, name):
                    return False
                registry.found_again(obj, parent, name, info)
            registry.disconnected.pop(obj, None)
            registry.drop_if_unused(obj)  # its place is noted
        except OSError:
            return False
        return True

    def _end(self, number: int, sought: _Sought) -> None:
        del self._sought[number]
        numbers = self._numbers[sought.inode]
        numbers.remove(number)
        if not numbers:
            del self._numbers[sought.inode]
        sought.done.set()
        while len(self._searched) >= _MOST_SEARCHED:
            del self._searched[next(iter(self._searched))]
        self._searched[number] = sought.ctime, math.inf if sought.found else time.monotonic() + _IN_VAIN_SECONDS
