"""The health and the figures of this machine's mounts as OpenMetrics (docs/metrics.md describes each metric)."""

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from cloakfs.messages import printable
from cloakfs.monitoring import BITS
from cloakfs.nfs.health import Health, Machine

# The limits of the histograms are powers of two: 2^14 ns are 16 µs, 2^34 ns are 17 s.
_LIMITS = range(14, 36, 2)

_MOUNT = ["mountpoint"]
_VIEW = ["mountpoint", "view"]

_COUNTERS = {
    "cpu_seconds": "CPU time of the daemon.",
    "reads_in_memory": "Reads that found their data in memory.",
    "reads_waited": "Reads that had to wait for their data.",
    "writes_at_once": "Writes to a disk that went to memory at once.",
    "writes_by_threads": "Writes that a thread made, because they may have to wait for the disk.",
    "prefetch_requested_bytes": "Bytes that reading ahead has requested.",
    "prefetch_asked_bytes": "The same as prefetch_requested_bytes, by its earlier name.",
    "prefetch_useful_bytes": "Bytes that reading ahead has requested and that were read afterwards.",
    "prefetch_wasted_bytes": "Bytes that reading ahead has requested and that no caller is expected to read any more.",
    "probes": "Requests for hidden names, and for file handles that never existed.",
    "probe_alarms": "Callers that made more such requests than the option probe_alarm= allows.",
}
"""The counters in the figures of a mount, which are exported under these names. A daemon of another version may lack
some of them."""

_GAUGES = {
    "waiting_requests": "Requests that are not answered yet.",
    "waiting_locks": "Requests for locks that are not answered yet.",
    "passthrough_files": "Files that the kernel reads and writes by itself now.",
    "locked_ranges": "Ranges of files that are locked by fcntl(2).",
    "known_objects": "Objects that the kernel refers to.",
    "index_bytes": "Size of the index of a mount, and of its log, on disk.",
}

_DESCRIPTORS = {"cached": "descriptors_cached", "clients": "descriptors_clients"}


class Families(Collector):
    """Makes the metrics of a machine.

    Args:
        machine_state: returns the state of the machine.
    """

    def __init__(self, machine_state: Callable[[], Machine]) -> None:
        self._machine_state = machine_state

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that no state is found out when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, by the present state of the machine."""
        machine = self._machine_state()
        return [*_of_mounts(machine.mounts), *_of_services(machine)]


def registry(machine_state: Callable[[], Machine]) -> CollectorRegistry:
    """Return a registry of nothing but the metrics of a machine, whose state `machine_state` returns."""
    made = CollectorRegistry(auto_describe=False)
    made.register(Families(machine_state))
    return made


def text(machine: Machine) -> str:
    """Return all metrics of a machine as OpenMetrics text."""
    made: bytes = generate_latest(registry(lambda: machine))  # type: ignore[no-untyped-call]
    return made.decode()


# -- mounts ----------------------------------------------------------------------------------------


def _of_mounts(mounts: Iterable[Health]) -> Iterable[Metric]:
    by_label = {printable(one.path): one for one in mounts}  # two names that look alike are one series
    up = GaugeMetricFamily("cloakfs_up", "Whether the daemon of the mount answers.", labels=_MOUNT)
    kind = InfoMetricFamily("cloakfs_mount", "The kind of the views.", labels=_MOUNT)
    started = GaugeMetricFamily(
        "cloakfs_start_time_seconds", "When it was mounted, since 1970.", labels=_MOUNT, unit="seconds"
    )
    reloads = CounterMetricFamily("cloakfs_reloads", "Reloads of the configuration.", labels=["mountpoint", "result"])
    restarts = CounterMetricFamily(
        "cloakfs_guard_restarts", "How often the guard has replaced the daemon.", labels=["mountpoint", "service"]
    )
    for label, one in by_label.items():
        answers = one.mount is not None and (one.figures is not None or one.problem is None)
        up.add_metric([label], float(answers))
        if one.mount is not None and not one.mount.unknown:
            started.add_metric([label], one.mount.since)
            reloads.add_metric([label, "applied"], one.mount.reloads)
            reloads.add_metric([label, "refused"], one.mount.asked - one.mount.reloads)
        if one.figures is not None:
            kind.add_metric([label], {"view": one.figures["view"]})
        if one.service is not None and one.restarts is not None:
            restarts.add_metric([label, one.service.name], one.restarts)
    yield from (up, kind, started, reloads, restarts)
    figures = {label: one.figures for label, one in by_label.items() if one.figures is not None}
    yield _durations(figures)
    yield from _answers(figures)
    yield from _plain(figures)


def _durations(figures: Mapping[str, Mapping[str, Any]]) -> Metric:
    family = HistogramMetricFamily(
        "cloakfs_request_duration_seconds",
        "How long the daemon took to answer requests.",
        labels=[*_VIEW, "operation"],
        unit="seconds",
    )
    for label, of_mount in figures.items():
        for operation, (total, counted) in sorted(of_mount["durations"].items()):
            of_bits = dict(counted)
            buckets = [(str(2**limit / 1e9), _up_to(limit, of_bits)) for limit in _LIMITS]
            buckets.append(("+Inf", _up_to(BITS, of_bits)))
            family.add_metric([label, of_mount["view"], operation], buckets, total / 1e9)
    return family


def _up_to(limit: int, of_bits: Mapping[int, int]) -> float:
    """Return how many durations have at most so many bits."""
    return float(sum(count for bits, count in of_bits.items() if bits <= limit))


def _answers(figures: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    errors = CounterMetricFamily(
        "cloakfs_errors", "Requests that were answered with an error.", labels=[*_VIEW, "operation", "error"]
    )
    answers = CounterMetricFamily(
        "cloakfs_answers",
        "Answers that tell of a name, or of attributes, by whether the kernel may cache them for more than 2 ms.",
        labels=[*_VIEW, "what", "cached", "remembered"],
    )
    hidden = CounterMetricFamily(
        "cloakfs_hidden", "Answers in which something was hidden from the caller.", labels=[*_VIEW, "by"]
    )
    refused = CounterMetricFamily(
        "cloakfs_refused", "Requests of callers that wanted more than their share.", labels=[*_VIEW, "share"]
    )
    for label, of_mount in figures.items():
        view = of_mount["view"]
        for operation, code, count in sorted(of_mount["errors"]):
            errors.add_metric([label, view, operation, errno.errorcode.get(code, str(code))], count)
        for what in ("names", "attributes"):
            for cached, count in zip(("no", "yes"), of_mount[what], strict=True):
                # `remembered` is the earlier name of the label, with the same value.
                answers.add_metric([label, view, what, cached, cached], count)
        for by, count in of_mount["hidden"].items():
            hidden.add_metric([label, view, by], count)
        for what, count in of_mount.get("refused", {}).items():  # an earlier version has none
            refused.add_metric([label, view, what], count)
    yield from (errors, answers, hidden, refused)


def _plain(figures: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    for name, what in _COUNTERS.items():
        counter = CounterMetricFamily(f"cloakfs_{name}", what, labels=_VIEW)
        for label, of_mount in figures.items():
            if name in of_mount["counters"]:
                counter.add_metric([label, of_mount["view"]], of_mount["counters"][name])
        yield counter
    for name, what in _GAUGES.items():
        gauge = GaugeMetricFamily(f"cloakfs_{name}", what, labels=_VIEW)
        for label, of_mount in figures.items():
            if name in of_mount["gauges"]:
                gauge.add_metric([label, of_mount["view"]], of_mount["gauges"][name])
        yield gauge
    descriptors = GaugeMetricFamily("cloakfs_descriptors", "Descriptors that are open.", labels=[*_VIEW, "for"])
    most = GaugeMetricFamily("cloakfs_descriptors_limit", "How many descriptors may be open.", labels=[*_VIEW, "for"])
    for label, of_mount in figures.items():
        for what, name in _DESCRIPTORS.items():
            descriptors.add_metric([label, of_mount["view"], what], of_mount["gauges"][name])
            most.add_metric([label, of_mount["view"], what], of_mount["gauges"][f"{name}_most"])
    yield from (descriptors, most)


# -- services --------------------------------------------------------------------------------------


def _of_services(machine: Machine) -> Iterable[Metric]:
    healthy = GaugeMetricFamily(
        "cloakfs_service_up", "Whether the guard of the service lives, and the server answers.", labels=["service"]
    )
    for service in machine.services:
        healthy.add_metric([service.name], float(service.problem is None))
    yield healthy
