"""The figures of a mount at one moment, for `cloakfs metrics`."""

import time
from typing import Any, get_args

from ..probes import Kind
from ..tree.index import Index
from .core import Core


def refused(mount: Core) -> dict[str, int]:
    """Return how often callers were refused more than their share, by what they wanted more of."""
    requests = mount.requests
    return {
        "requests": requests.waiting.refused + requests.writes.refused + mount.reader.unwritten.refused,
        "open files": mount.files.shares.refused,
    }


def figures(mount: Core, index: Index) -> dict[str, Any]:
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
            "prefetch_asked_bytes": requested,
            "prefetch_useful_bytes": useful,
            "prefetch_wasted_bytes": wasted,
            "probes": sum(mount.probing.probes.counts[kind] for kind in get_args(Kind)),
            "probe_alarms": mount.probing.probes.counts["alarms"],
        },
        "gauges": {
            "waiting_requests": mount.requests.waiting.total + mount.requests.writes.total,
            "descriptors_cached": len(mount.nodes.descriptors),
            "descriptors_cached_most": mount.nodes.descriptors.max_fds,
            "descriptors_clients": mount.files.shares.total,
            "descriptors_clients_most": mount.files.shares.most,
            "known_objects": len(mount.nodes.registry.by_number),
            "index_bytes": index.size(),
        },
    }
