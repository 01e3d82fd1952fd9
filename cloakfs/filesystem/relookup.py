"""Looks up directories again that a caller was refused, for the sake of processes that stand in them.

The kernel unhashes the dentry of a name that was refused, for whatever reason. Then getcwd(2) fails for all processes
in it until one that is permitted looks it up again.
"""

import logging
import os
from collections.abc import Iterator
from functools import partial

import trio

from .. import linux
from ..background.tasks import Tasks
from ..linux import process
from ..tree import calls
from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..tree.views import Views
from .selfprobe import SelfProbe

log = logging.getLogger(__name__)

# If looking up again takes this long, a process keeps the lock of the directory. It is searched for as often, and named
# once a minute.
_LOCKED_SECONDS = 2.0
_LOG_AGAIN_SECONDS = 60.0

_PATH_MAX = 4096  # <linux/limits.h>

# When to look up a refused directory again, in seconds: first after the last refusal, then after the previous time.
_DELAYS = (0.0, 0.02, 0.1, 0.4)


class DentryRelookup:
    """Makes the daemon look up again, through its own mount, what a caller was refused.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        probe: makes requests to the daemon's own mount.

    Attributes:
        tasks: where this runs; None before that is possible.
    """

    def __init__(self, nodes: Nodes, views: Views, probe: SelfProbe) -> None:
        self._nodes = nodes
        self._views = views
        self._probe = probe
        self.tasks: Tasks | None = None
        self._refusals: dict[int, int] = {}  # object number -> number of refusals meanwhile
        self._one_at_a_time = trio.CapacityLimiter(1)
        # When processes that keep a lock were last searched for, and when one was logged.
        self._searched_at = self._logged_at = -_LOG_AGAIN_SECONDS

    def refused(self, obj: Object | None) -> None:
        """Look up a directory again that a caller was refused.

        The daemon does so at once, and a few more times, because the kernel may unhash the dentry late.
        """
        if obj is None or (obj.lookups <= 0 and obj is not self._nodes.root) or self.tasks is None:
            return
        if obj.number in self._refusals:
            self._refusals[obj.number] += 1
            return
        names: list[bytes] = []
        length = len(self._probe.mountpoint)
        at: Object | None = obj
        while at is not None and at is not self._nodes.root:
            names.append(at.name)
            length += 1 + len(at.name)
            if length > _PATH_MAX:
                return  # no path leads there, and getcwd(2) fails anyway
            at = at.parent
        self._refusals[obj.number] = 0
        self.tasks.once("looking up again", self._look_up_again, obj.number, names[::-1], obj.parent or obj)

    def name_refused(self, parent_inode: int, name: bytes) -> None:
        """Look up a directory again that a caller was refused before the daemon knew which object it is."""
        try:
            parent = self._nodes.get(parent_inode)
            if self._nodes.mounts.waits(parent):
                self.refused((parent.children or {}).get(name))
                return
            fd = calls.find(linux.ROOT, self._nodes.descriptors.fd(parent), name, os.O_DIRECTORY)
        except OSError:
            return
        try:
            known = self._nodes.registry.known(fd, parent)
        except OSError:
            return
        finally:
            calls.close(fd)
        self.refused(known)

    async def _look_up_again(self, number: int, names: list[bytes], parent: Object) -> None:
        name = parent.name or os.path.basename(os.fsencode(self._probe.mountpoint))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_lock, parent, name)
            await self._keep_looking_up(number, names)
            nursery.cancel_scope.cancel()

    async def _watch_lock(self, parent: Object, name: bytes) -> None:
        """Log who keeps the lock of the directory `parent`, which has this name, if looking up in it takes long."""
        while True:
            await trio.sleep(_LOCKED_SECONDS)
            now = trio.current_time()
            if now < max(self._searched_at + _LOCKED_SECONDS, self._logged_at + _LOG_AGAIN_SECONDS):
                continue
            self._searched_at = now
            who = partial(process.who_lists, partial(self._nodes.is_of, parent), name)
            for pid, uid in await trio.to_thread.run_sync(who, abandon_on_cancel=True):
                self._logged_at = now
                log.warning(
                    "%s: process %d of uid %d keeps the directory %r locked, so that others wait for names in it",
                    self._probe.mountpoint,
                    pid,
                    uid,
                    os.fsdecode(name),
                )

    async def _keep_looking_up(self, number: int, names: list[bytes]) -> None:
        try:
            delays = iter(_DELAYS)
            while (delay := next(delays, None)) is not None:
                refusals = self._refusals[number]
                await trio.sleep(delay)
                for top in self._tops():
                    await trio.to_thread.run_sync(
                        linux.apart,
                        self._probe.stat,
                        os.path.join(top, *names),
                        limiter=self._one_at_a_time,
                        abandon_on_cancel=True,
                    )
                if self._refusals[number] != refusals:
                    delays = iter(_DELAYS)
        finally:
            del self._refusals[number]

    def _tops(self) -> Iterator[bytes]:
        mountpoint = os.fsencode(self._probe.mountpoint)
        if not self._views.top:
            yield mountpoint
            return
        for _, label, _ in self._views.after(0):
            yield os.path.join(mountpoint, b"@" + os.fsencode(label))
