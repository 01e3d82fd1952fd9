"""Regular work of a daemon: durable numbers, idle descriptors, the log, published figures."""

import contextlib
import logging
import sqlite3

import trio

from ..background.logfile import follow_rotation
from ..filesystem import Filesystem
from ..linux import mountinfo
from ..tree.index import Index, Unstored
from . import gctuning
from .publication import Publisher
from .settings import Settings
from .watching import share_changes

log = logging.getLogger(__name__)

# A daemon of a local mount that is killed loses the nodeids of this many seconds.
_SECOND = 1.0


class Housekeeping:
    """What a daemon does regularly, whether or not there are requests.

    Args:
        settings: of the mount.
        filesystem: its operations.
        index: the numbers of its objects.
        publisher: publishes what was done so far.
    """

    def __init__(self, settings: Settings, filesystem: Filesystem, index: Index, publisher: Publisher) -> None:
        self._settings = settings
        self._filesystem = filesystem
        self._index = index
        self._publisher = publisher

    async def each_second(self) -> None:
        """Make the numbers of objects durable every second, for ever, and see that changes are still reported."""
        while True:
            await trio.sleep(_SECOND)
            self._filesystem.cache.check_watcher()
            with contextlib.suppress(Unstored):  # it is logged, and raised again when a number is needed
                while self._index.commit():
                    await trio.sleep(0)
            while self._filesystem.nodes.numbers.commit():
                await trio.sleep(0)

    async def _find_reserves(self) -> None:
        """Find out for which file systems of the tree blocks are reserved for a group by now.

        A remount may change that, and the kernel does not report each. Who has no such file system pays nothing.
        """
        those = [it for it in self._filesystem.nodes.mounts.filesystems if it.can_reserve]
        if those:
            with contextlib.suppress(OSError):  # another time
                free = await trio.to_thread.run_sync(mountinfo.devices_without_option, b"resgid=")
                for filesystem in those:
                    filesystem.reserves_for_groups = filesystem.device not in free

    async def run(self) -> None:
        """Do all else that has to be done now and then, for ever."""
        gctuning.freeze_survivors()
        requests, answered, problem = self._filesystem.requests, -1, ""
        while True:
            await trio.sleep(self._settings.tuning.housekeeping_seconds)
            before, answered = answered, sum(requests.counts().values())
            if before == answered and not requests.waiting.total + requests.writes.total:
                gctuning.collect_if_due()
            nodes = self._filesystem.nodes
            for _ in nodes.descriptors.close_idle():
                await trio.sleep(0)
            if self._settings.log is not None:
                follow_rotation(self._settings.log)
            await self._find_reserves()
            await share_changes(self._filesystem)
            sweep = nodes.sweeper.sweep()
            nodes.sweeper.swept(await trio.to_thread.run_sync(sweep, abandon_on_cancel=True))
            self._index.tidy()
            self._publisher.work()
            self._publisher.rules()
            try:
                await trio.to_thread.run_sync(self._index.checkpoint)
                problem = ""
            except sqlite3.Error as exc:
                if problem != str(exc):  # not every few seconds
                    problem = str(exc)
                    log.warning("the log of the index cannot be merged, and grows until it can be: %s", problem)
