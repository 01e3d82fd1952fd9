"""What other processes can find out about a mount: its published state, its control socket, and its figures."""

import time
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from ..accounts.threadstatus import ThreadStatus
from ..filesystem import Filesystem
from ..fuse.attach import Attached
from ..probes import Kind
from ..reasons import passthrough_in_words, who_checks, who_locks
from ..state.runtime import PublishedState
from ..tree.index import Index
from .control import Control
from .reread import as_json
from .settings import Settings


def publish(
    settings: Settings, key: str, attached: Attached, filesystem: Filesystem, index: Index
) -> tuple[PublishedState, Control]:
    """Return what others can know of the mount: what it publishes, and what it answers."""
    published = PublishedState(
        key,
        settings.source,
        settings.target,
        as_json(settings.options),
        settings.policy_dir,
        attached.device,
        settings.mount_options.given,
    )
    control = Control(
        key,
        published,
        settings.group_words,
        filesystem.views,
        filesystem.upper,
        filesystem.tracers,
        partial(figures, filesystem),
        filesystem.probing.events,
        xattrs=settings.mount_options.xattrs,
    )
    return published, control


class Publisher:
    """Publishes facts about a mount that change while it is served.

    Args:
        settings: of the mount.
        filesystem: its operations.
        index: the numbers of its objects.
        published: what other processes read.
        threads: knows whether there were callers that the daemon cannot see.
    """

    def __init__(
        self,
        settings: Settings,
        filesystem: Filesystem,
        index: Index,
        published: PublishedState,
        threads: ThreadStatus,
    ) -> None:
        self._settings = settings
        self._filesystem = filesystem
        self._index = index
        self._published = published
        self._threads = threads

    def rules(self) -> None:
        """Publish what the kernel may cache or does by itself, who checks permissions, where locks hold, what fails."""
        # `way_out` is what scripts, and earlier versions of `cloakfs status`, read as the hint.
        filesystem = self._filesystem
        cached = [{**asdict(fact), "way_out": fact.hint} for fact in filesystem.cache.report()]
        self._published.rules(
            cached,
            access=self.access(),
            locks=self.locks(),
            passthrough=passthrough_in_words(filesystem.passthrough.why_not(filesystem.nodes.mounts.filesystems)),
            numbers=self._numbers(),
        )

    def work(self) -> None:
        """Publish what was answered, read and refused so far."""
        filesystem = self._filesystem
        self._published.work(filesystem.requests.counts(), filesystem.reader.state(), refused(filesystem))

    def access(self) -> str:
        """Return who checks permissions, in words."""
        mount_options = self._settings.mount_options
        return who_checks(
            self._filesystem.views.any(),
            self._settings.options.groups,
            by_kernel=mount_options.default_permissions,
            exported=mount_options.export_mode.is_exported,
            has_unseen=self._threads.has_unseen,
        )

    def locks(self) -> str:
        """Return where the locks of clients hold, in words."""
        settings = self._settings.mount_options
        return who_locks(self._filesystem.enable_locks, settings.export_mode.server, local=settings.local_locks)

    def _numbers(self) -> str:
        """Return what is wrong with the numbers of objects; "" if nothing is."""
        trouble = self._index.trouble
        if trouble is None:
            return ""
        if self._settings.mount_options.export_mode.is_exported:
            return f"cannot be stored, so that nothing can be made or looked up for the first time ({trouble})"
        return f"in memory, and lost when the daemon ends ({trouble})"


def refused(mount: Filesystem) -> dict[str, int]:
    """Return how often callers were refused more than their share, by what they wanted more of."""
    requests = mount.requests
    return {
        "requests": requests.waiting.refused + requests.writes.refused + mount.reader.unwritten.refused,
        "open files": mount.files.shares.refused,
        "locks": mount.locks.waiting.refused + mount.locks.ranges.refused,
    }


def figures(mount: Filesystem) -> dict[str, Any]:
    """Return the figures, ready for JSON. They concern no single caller, and have no names of files.

    Returns:
        "view" is the kind of the views: "caller" or "fixed". "refused" is what `refused` returns. "counters" and
        "gauges" have plain numbers, and the remaining fields are those of `Counters.plain`.
    """
    requested, useful, wasted = mount.reader.read_ahead()
    return {
        **mount.requests.counters.plain(),
        "refused": refused(mount),
        "view": "fixed" if mount.views.fixed else "caller",
        "counters": {
            "cpu_seconds": time.process_time(),
            "reads_in_memory": mount.reader.counts["hits"],
            "reads_waited": mount.reader.counts["misses"],
            "writes_at_once": mount.reader.counts["written_at_once"],
            "writes_by_threads": mount.reader.counts["written_by_threads"],
            "prefetch_requested_bytes": requested,
            "prefetch_asked_bytes": requested,  # the earlier name
            "prefetch_useful_bytes": useful,
            "prefetch_wasted_bytes": wasted,
            "probes": sum(mount.probing.probes.counts[kind] for kind in get_args(Kind)),
            "probe_alarms": mount.probing.probes.counts["alarms"],
        },
        "gauges": {
            "waiting_requests": mount.requests.waiting.total + mount.requests.writes.total,
            "waiting_locks": mount.locks.waiting.total,
            "locked_ranges": mount.locks.ranges.total,
            "passthrough_files": len(mount.passthrough.passing),
            "descriptors_cached": len(mount.nodes.descriptors),
            "descriptors_cached_most": mount.nodes.descriptors.max_fds,
            "descriptors_clients": mount.files.shares.total,
            "descriptors_clients_most": mount.files.shares.most,
            "known_objects": len(mount.nodes.registry.by_number),
            "index_bytes": mount.nodes.numbers.size(),
        },
    }
