"""The services (`cloakfs export`) of this machine, and what their guards tell of them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from ..linux import ownfiles, sockets
from ..state.runtime import RUN_DIR
from ..state.versions import is_known, version_problem
from . import stale
from .guard import RUN_DIR_PREFIX, VERSION, control_path
from .server import ServerError

_LONGEST_ANSWER = 16 << 20


@dataclass(frozen=True, slots=True)
class Service:
    """The state of a service.

    Attributes:
        name: its name.
        pid: the pid of its guard; 0 if that is not known.
        server: "knfsd" or "ganesha"; "" if that is not known.
        problem: why it is not healthy as a whole, in one line; None if it is, or if there is nothing of it yet.
        mounts: its mounts, by mount point, each as in the answer of the guard (`Guard.status`).
    """

    name: str
    pid: int = 0
    server: str = ""
    problem: str | None = None
    mounts: dict[str, dict[str, Any]] = field(default_factory=dict)


def problem_of(state: Mapping[str, Any]) -> str | None:
    """Return what a guard says is wrong with the server, or with a mount; None if nothing is.

    Args:
        state: its answer, or the part of it about the mount. A guard of an earlier version calls it `complaint` only.
    """
    found: str | None = state.get("problem", state.get("complaint"))
    return found


def run_dir(name: str) -> str:
    """Return the directory of the guard of the service with this name."""
    return os.path.join(RUN_DIR, f"{RUN_DIR_PREFIX}{name}")


def names() -> list[str]:
    """Return the names of the services that are up, or of which something may be left."""
    places = ownfiles.glob(RUN_DIR, f"{RUN_DIR_PREFIX}*/")
    return sorted(os.path.basename(place.rstrip("/")).removeprefix(RUN_DIR_PREFIX) for place in places)


def send_order(guard_dir: str, order: str, seconds: float) -> dict[str, Any]:
    """Give the guard of a service an order, and return its answer, which may be of another version.

    Args:
        guard_dir: the guard's directory (`run_dir`).
        order: `status`, `reload` or `down`.
        seconds: how long the guard may take to accept the connection, and to answer.

    Raises:
        FileNotFoundError: no guard takes orders.
        ConnectionRefusedError: no guard takes orders any more.
        OSError: the guard does not answer.
        ValueError: the answer is no JSON.
        TypeError: the answer is no JSON object.
    """
    with sockets.connect(control_path(guard_dir), seconds) as control, control.makefile("rb") as answer:
        control.sendall(order.encode() + b"\n")
        return dict(json.loads(answer.read(_LONGEST_ANSWER)))


async def service_state(name: str, seconds: float, limit: trio.CapacityLimiter) -> Service:
    """Return the state of a service, within this time whatever happens.

    Args:
        name: the name of the service.
        seconds: how long its guard may take to answer.
        limit: of the threads that ask.
    """
    try:
        with trio.fail_after(seconds):
            answer = await trio.to_thread.run_sync(
                send_order, run_dir(name), "status", 2 * seconds, abandon_on_cancel=True, limiter=limit
            )
    except trio.TooSlowError:
        record = _left(name)
        return Service(
            name,
            record.pid if record else 0,
            record.server if record else "",
            f"its guard does not answer within {seconds:g} s: see {run_dir(name)}.log",
            _mounts_of(record),
        )
    except (OSError, RuntimeError, ValueError, TypeError):
        return _unanswered(name)
    if not is_known(answer.get("version"), VERSION):
        place = f"its guard (process {answer.get('pid')})"
        hint = "use the cloakfs that runs it to see whether it serves"
        return Service(
            name, answer.get("pid") or 0, problem=version_problem(place, answer.get("version"), VERSION, hint)
        )
    mounts = {mount["path"]: mount for mount in answer["mounts"]}
    problem = problem_of(answer)
    problem = problem and f"{answer['server']}: {problem}"
    return Service(name, answer["pid"], answer["server"], problem, mounts)


def _left(name: str) -> stale.ServiceRecord | None:
    try:
        return stale.read(run_dir(name))
    except ServerError:
        return None


def _mounts_of(record: stale.ServiceRecord | None) -> dict[str, dict[str, Any]]:
    return {path: {"path": path} for path in record.paths} if record is not None else {}


def _unanswered(name: str) -> Service:
    """Return the state of a service whose guard cannot be asked: it has died, or is just starting or stopping."""
    try:
        record = stale.read(run_dir(name))
    except ServerError as exc:
        return Service(name, problem=str(exc))
    if record is None:
        return Service(name)
    if record.is_watched:
        return Service(
            name,
            record.pid,
            record.server,
            f"it is just starting or stopping, and not served (process {record.pid}; cloakfs export down --name {name} "
            "stops it)",
            _mounts_of(record),
        )
    return Service(
        name,
        record.pid,
        record.server,
        f"its guard (process {record.pid}) has died, and nobody mounts again what dies "
        f"(cloakfs export up --name {name} takes over, and down ends it)",
        _mounts_of(record),
    )
