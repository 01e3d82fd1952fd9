"""What `cloakfs metrics` exports is valid, documented, and all that the dashboard asks for."""

import errno
import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cli.openmetrics import text
from cloakfs.nfs.health import DAEMON_DIED, Health, Machine
from cloakfs.nfs.services import Service
from cloakfs.state.runtime import VERSION, Mounted

TOP = Path(__file__).parents[2]
DASHBOARD = TOP / "examples/grafana/cloakfs.json"

FIGURES: dict[str, Any] = {
    "view": "caller",
    "durations": {"lookup": [3_000_000, [[14, 1], [15, 2], [36, 1]]]},
    "errors": [["lookup", errno.ENOENT, 2], ["read", 4095, 1]],
    "names": [1, 2],
    "attributes": [3, 4],
    "hidden": {"name": 5, "handle": 6, "listing": 7},
    "refused": {"requests": 8, "open files": 9},
    "counters": {
        "cpu_seconds": 1.5, "reads_in_memory": 1, "reads_waited": 2, "writes_at_once": 8,
        "writes_by_threads": 9, "prefetch_requested_bytes": 3, "prefetch_asked_bytes": 3,
        "prefetch_useful_bytes": 4, "prefetch_wasted_bytes": 5, "probes": 6,
        "probe_alarms": 7,
    },
    "gauges": {
        "waiting_requests": 1, "descriptors_cached": 2, "descriptors_cached_most": 3, "descriptors_clients": 4,
        "descriptors_clients_most": 5, "known_objects": 6, "index_bytes": 7,
        "waiting_locks": 8, "locked_ranges": 9, "passthrough_files": 10,
    },
}  # fmt: skip


def mount(path: str, version: int = VERSION) -> Mounted:
    return Mounted(7, "/srv", path, "rw", ".", reloads=2, asked=3, since=9.0, version=version)


def machine() -> Machine:
    """A mount in every state."""
    service = Service("default", 8, "knfsd", None, {"/a": {"restarts": 2}, "/dead": {}})
    return Machine(
        [
            Health("/a", mount("/a"), figures=FIGURES, service=service),
            Health("/hung", mount("/hung"), "it has not answered for 5 s"),
            Health("/older", mount("/older")),
            Health("/newer", mount("/newer", VERSION + 1)),
            Health('/odd"\\\udcff\n', mount("/odd"), figures={**FIGURES, "view": "fixed"}),
            Health("/dead", None, DAEMON_DIED, service=service),
            Health("/dead", None, DAEMON_DIED),
        ],
        [service, Service("other", problem="its guard has died")],
    )


def samples(of: Machine) -> dict[tuple[str, str], float]:
    """The values, by the name of the sample and its labels in alphabetical order."""
    return {
        (
            sample.name.removeprefix("cloakfs_"),
            " ".join(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text(of))  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def test_each_state_of_a_mount() -> None:
    found = samples(machine())
    assert {label: value for (name, label), value in found.items() if name == "up"} == {
        "/a": 1, "/hung": 0, "/older": 1, "/newer": 1, '/odd"\\\\377\\012': 1, "/dead": 0,
    }  # fmt: skip
    assert {label: value for (name, label), value in found.items() if name == "service_up"} == {
        "default": 1,
        "other": 0,
    }
    assert found["start_time_seconds", "/hung"] == 9
    assert ("start_time_seconds", "/newer") not in found
    assert found["reloads_total", "/a applied"] == 2
    assert found["reloads_total", "/a refused"] == 1
    assert {label: value for (name, label), value in found.items() if name == "guard_restarts_total"} == {
        "/a default": 2
    }


def test_the_limits_of_a_histogram() -> None:
    found = samples(machine())
    limits = {
        label.split()[0]: value
        for (name, label), value in found.items()
        if name == "request_duration_seconds_bucket" and label.split()[1:] == ["/a", "lookup", "caller"]
    }
    # 2^14 ns, 2^16 ns, …; 36 bits are more than 2^34 ns.
    assert (limits["1.6384e-05"], limits["6.5536e-05"], limits["17.179869184"], limits["+Inf"]) == (1, 3, 3, 4)
    assert found["request_duration_seconds_sum", "/a lookup caller"] == 0.003


def test_what_the_figures_become() -> None:
    found = samples(machine())
    of_a = {
        (name, label.replace("/a ", "").replace(" caller", "").replace("caller ", "")): value
        for (name, label), value in found.items()
        if "/a" in label.split()
    }
    assert of_a["errors_total", "ENOENT lookup"] == 2
    assert of_a["errors_total", "4095 read"] == 1
    assert of_a["answers_total", "no no names"] == 1
    assert of_a["answers_total", "yes yes attributes"] == 4
    assert [of_a["hidden_total", by] for by in ("name", "handle", "listing")] == [5, 6, 7]


def names() -> set[str]:
    """The names of all samples."""
    return {f"cloakfs_{name}" for name, _ in samples(machine())}


def test_each_metric_is_documented() -> None:
    documented = set(re.findall(r"^\| `(cloakfs_\w+)", (TOP / "docs/metrics.md").read_text(), re.MULTILINE))
    histogram = "cloakfs_request_duration_seconds"
    assert {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in names()} == documented
    assert histogram in documented


def strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_the_dashboard_asks_for_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    named = set(re.findall(r"\bcloakfs_\w+", " ".join(asked)))
    assert named
    assert named <= names()
    known = {"by", "cached", "error", "for", "le", "mountpoint", "operation", "result", "service", "view", "what"}
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        labels = re.findall(r"(\w+)(?:=~?|!~|!=)\"", expression)
        labels += [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r", *", group)]
        assert set(labels) <= known, expression
    # Panels do not lie on one another.
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
