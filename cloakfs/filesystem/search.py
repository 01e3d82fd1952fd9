"""Searches the tree for files that are used by handle, while nothing says in which directory they are.

That is so after the state of the mount was lost, and after a file was renamed while the mount was not there. Only a
directory has a way up (".."). So the tree is walked through, once for all files that are sought, slowly enough that
others do not notice; a client is told to try again meanwhile (EAGAIN; over NFS, NFS3ERR_JUKEBOX or NFS4ERR_DELAY).
"""

import stat
import time
from dataclasses import dataclass, field

import trio

from ..linux import Stat
from ..tree.computed import COMPUTED
from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..tree.treewalk import FoundName, TreeWalk

PATIENCE_SECONDS = 0.5
"""How long a request waits before the client is told to try again."""

# The walk goes on for so long at a time, and then pauses, so that it takes at most this share of one processor.
_STEP_SECONDS = 0.02
_SHARE = 0.25
# A small tree is walked through at once.
_WITHOUT_PAUSE_SECONDS = 0.2

# How many files that were sought in vain are remembered.
_MOST_IN_VAIN = 10_000

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
        walks: how many walks have gone by that began after it was sought.
        is_in_walk: whether the present walk is one of them.
        found: how many names were found.
        done: is set at the end.
    """

    inode: int
    nlink: int
    ctime: int
    walks: int = 0
    is_in_walk: bool = False
    found: int = 0
    done: trio.Event = field(default_factory=trio.Event)


class Search:
    """The search of one mount.

    Args:
        nodes: the objects.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._sought: dict[int, _Sought] = {}  # by number of the object
        self._in_vain: dict[int, int] = {}  # ctimes, by number of the object
        self._wake = trio.Event()

    def may_find(self, obj: Object, info: Stat) -> bool:
        """Whether a search may find out where an object is. `info` is its present stat."""
        registry = self._nodes.registry
        reported = registry.disconnected.get(obj)
        return (
            (obj in registry.disconnected or not obj.filesystem.watched)  # otherwise its renames were reported
            and (reported is None or not reported.directory)  # otherwise it was seen leaving the tree
            and not stat.S_ISDIR(info.st_mode)
            and info.st_nlink > 0
            and obj.filesystem is registry.root.filesystem
            and (not obj.filesystem.by_threads or obj.number & COMPUTED > 0)
            and self._in_vain.get(obj.number) != info.st_ctime_ns
            and next(self._nodes.locator.places(obj, info), None) is None
        )

    async def wait_for(self, obj: Object, info: Stat) -> bool:
        """Have an object searched for (`may_find`); return whether the search has ended within `PATIENCE_SECONDS`."""
        sought = self._sought.get(obj.number)
        if sought is None:
            sought = self._sought[obj.number] = _Sought(info.st_ino, info.st_nlink, info.st_ctime_ns)
            self._wake.set()
        with trio.move_on_after(PATIENCE_SECONDS):
            await sought.done.wait()
        return sought.done.is_set()

    async def run(self) -> None:
        """Search for what is sought, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._sought:
                await self._walk()

    async def _walk(self) -> None:
        """Walk through the tree once."""
        for sought in self._sought.values():
            sought.is_in_walk = True
        root = self._nodes.registry.root
        walk = TreeWalk(root.filesystem, self._nodes.descriptors.fd(root))
        try:
            spent, goes_on = 0.0, True
            while goes_on and self._sought:
                began = time.monotonic()
                inodes = frozenset(sought.inode for sought in self._sought.values())
                found, goes_on = await trio.to_thread.run_sync(walk.step, inodes, _STEP_SECONDS)
                for one in found:
                    self._note(one)
                took = time.monotonic() - began
                spent += took
                if goes_on and spent > _WITHOUT_PAUSE_SECONDS:
                    await trio.sleep(took * (1 / _SHARE - 1))
        finally:
            walk.close()
        for number, sought in list(self._sought.items()):
            sought.walks += sought.is_in_walk
            if sought.found or sought.walks >= _MOST_WALKS:
                self._end(number, sought)

    def _note(self, found: FoundName) -> None:
        """Note a name that was found, unless it is outdated by now."""
        for number, sought in list(self._sought.items()):
            if sought.inode == found.inode and self._is_placed(number, found):
                sought.found += 1
                if sought.found >= sought.nlink:
                    self._end(number, sought)

    def _is_placed(self, number: int, found: FoundName) -> bool:
        registry, locator = self._nodes.registry, self._nodes.locator
        if registry.root.filesystem.by_threads:
            return self._is_placed_unseen(number, found)
        parent = locator.directory_below_root(registry.root.filesystem, found.directory)
        if parent is None:
            return False
        try:
            obj = self._nodes.get(number)
            info = obj.filesystem.stat(self._nodes.descriptors.fd(obj))
            if not locator.is_at(info, parent, found.name):
                return False
            registry.found_again(obj, parent, found.name, info)
            registry.disconnected.pop(obj, None)
            registry.drop_if_unused(obj)  # its place is noted
        except OSError:
            return False
        finally:
            registry.drop_if_unused(parent)
        return True

    def _is_placed_unseen(self, number: int, found: FoundName) -> bool:
        """As `_is_placed`, where it may take long to look; the next request for the object verifies the place."""
        registry = self._nodes.registry
        directory = self._nodes.numbers.number_of(registry.root, found.directory)
        try:
            obj, parent = self._nodes.get(number), self._nodes.get(directory) if directory else None
        except OSError:
            return False
        if parent is not None:
            registry.move(obj, parent, found.name)
            registry.disconnected.pop(obj, None)
        registry.drop_if_unused(obj)
        return parent is not None

    def _end(self, number: int, sought: _Sought) -> None:
        del self._sought[number]
        sought.done.set()
        if not sought.found:
            while len(self._in_vain) >= _MOST_IN_VAIN:
                del self._in_vain[next(iter(self._in_vain))]
            self._in_vain[number] = sought.ctime
