"""Whether the mounts and the services of this machine are healthy: asks their daemons and guards, and waits for none.

What hangs must not make others wait, so all are asked at the same time, and those that do not answer in time count as
not healthy.
"""

import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from ..linux.mountinfo import Place
from ..messages import shell_word
from ..state.client import Conversation, DaemonError, RefusedError
from ..state.runtime import Mounted, all_mounted, dead, mounted, waiting
from . import services
from .services import Service, problem_of

PATIENCE_SECONDS = 5.0
"""How long an answer may take."""

# A mount whose daemon has not published anything yet looks as if that had died.
_STARTING_SECONDS = 0.5

DAEMON_DIED = "its daemon has died, and nobody gets an answer"
"""The problem of a mount that no daemon serves."""

REMOUNTING = "its daemon has died, and it is being mounted again"
"""The problem of a mount with the option `restart` until an attempt succeeds."""

NOT_A_MOUNT = "not a cloakfs mount"
"""The problem of a path that is no mount point."""


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a mount point.

    Attributes:
        path: the mount point.
        mount: the mount; None if no daemon serves it.
        problem: why it is not healthy, in one line; None if it is.
        hint: what to do about that, in one line.
        figures: what `publication.figures` returns; None if the daemon does not answer, or is of an earlier version.
        service: the service that the mount belongs to, if any.
    """

    path: str
    mount: Mounted | None
    problem: str | None = None
    hint: str | None = None
    figures: Mapping[str, Any] | None = None
    service: Service | None = None

    @property
    def is_absent(self) -> bool:
        """Whether there is no such mount point."""
        return self.problem == NOT_A_MOUNT

    @property
    def restarts(self) -> int | None:
        """How often the guard of the service has replaced the daemon; None if no guard tells."""
        return None if self.service is None else self.service.mounts[self.path].get("restarts")


@dataclass(frozen=True, slots=True)
class Machine:
    """The state of a machine.

    Attributes:
        mounts: the mount points in alphabetical order, those that are not served at the end.
        services: the services.
    """

    mounts: list[Health]
    services: list[Service]

    @property
    def is_healthy(self) -> bool:
        """Whether all of it is."""
        problems = [*(one.problem for one in self.mounts), *(one.problem for one in self.services)]
        return not any(problems)

    def only(self, paths: Iterable[str]) -> "Machine":
        """Return the state of these mount points, and of the services that they belong to."""
        by_path = {one.path: one for one in self.mounts}
        mounts = [by_path.get(path) or Health(path, None, NOT_A_MOUNT) for path in paths]
        wanted = {one.service.name for one in mounts if one.service is not None}
        return Machine(mounts, [service for service in self.services if service.name in wanted])


def machine_state(seconds: float = PATIENCE_SECONDS) -> Machine:
    """Return the state of this machine; this takes little longer than `seconds`, whatever hangs.

    Raises:
        OSError: there is no free descriptor, or not enough memory, to find out.
    """
    # Each mount takes a descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return trio.run(_machine_state, seconds)


async def _machine_state(seconds: float) -> Machine:
    served = mounted()
    states: dict[str, tuple[str | None, Mapping[str, Any] | None]] = {}
    found: dict[str, Service] = {}
    limit = trio.CapacityLimiter(math.inf)  # one that hangs must not keep others from being asked

    async def query_daemon(mount: Mounted) -> None:
        states[mount.target] = await _daemon_state(mount, seconds, limit)

    async def query_guard(name: str) -> None:
        found[name] = await services.service_state(name, seconds, limit)

    async with trio.open_nursery() as nursery:
        for mount in served.values():
            nursery.start_soon(query_daemon, mount)
        for name in services.names():
            nursery.start_soon(query_guard, name)
    left = await _dead()
    of_path = {path: found[name] for name in sorted(found) for path in found[name].mounts}
    alive = [
        _health(served[path], *states[path], of_path.get(path))
        for path in sorted(served)
        if states[path][0] is None or _is_there(served[path])
    ]
    mounts: dict[str, Health] = {}
    for one in (*alive, *_without_daemon(left, of_path), *_refused(of_path)):
        mounts.setdefault(one.path, one)
    return Machine(list(mounts.values()), [found[name] for name in sorted(found)])


def _without_daemon(left: Iterable[Place], of_path: Mapping[str, Service]) -> Iterator[Health]:
    """Yield the mounts of daemons that have died, and those that are about to be mounted again."""
    for place in left:
        hint = f"cloakfs umount {shell_word(place.path)}; mounting there again unmounts it, too"
        yield Health(place.path, None, DAEMON_DIED, hint, service=of_path.get(place.path))
    for one in waiting():
        yield Health(
            one.target, None, REMOUNTING, f"process {one.pid}; cloakfs umount {shell_word(one.target)} ends it"
        )


def _refused(of_path: Mapping[str, Service]) -> Iterator[Health]:
    """Yield the mounts that their guard cannot make, or whose server does not serve them."""
    for path, service in of_path.items():
        problem = problem_of(service.mounts[path])
        if problem:
            yield Health(path, None, problem, service=service)


async def _dead() -> list[Place]:
    """Return the mounts that no daemon serves, and that are not just starting."""
    left = dead()
    if not left:
        return left
    await trio.sleep(_STARTING_SECONDS)
    again = {(place.path, place.device) for place in dead()}
    return [place for place in left if (place.path, place.device) in again]


def _is_there(mount: Mounted) -> bool:
    """Whether the daemon of this mount, which did not answer, still lives; it may just have ended."""
    return any((other.pid, other.device) == (mount.pid, mount.device) for other in all_mounted())


def _health(mount: Mounted, problem: str | None, figures: Mapping[str, Any] | None, service: Service | None) -> Health:
    hint = None
    if problem is not None:
        hint = f"kill -USR1 {mount.pid} has it log where it hangs, and kill -9 {mount.pid} ends it"
    elif service is not None:
        problem = problem_of(service.mounts[mount.target])
    return Health(mount.target, mount, problem, hint, figures, service)


async def _daemon_state(
    mount: Mounted, seconds: float, limit: trio.CapacityLimiter
) -> tuple[str | None, Mapping[str, Any] | None]:
    """Return why the daemon of this mount is not healthy, and its figures; None for what there is not."""
    began = time.monotonic()
    try:
        with trio.fail_after(seconds):
            return None, await trio.to_thread.run_sync(_figures, mount, abandon_on_cancel=True, limiter=limit)
    except RefusedError:
        return None, None
    except trio.TooSlowError:
        return f"its daemon (process {mount.pid}) has not answered for {time.monotonic() - began:.0f} s", None
    except DaemonError as exc:
        return str(exc).removeprefix(f"{mount.target}: "), None
    except RuntimeError as exc:  # the machine starts no more threads
        return f"its daemon (process {mount.pid}) cannot be asked: {exc}", None


def _figures(mount: Mounted) -> Mapping[str, Any] | None:
    with Conversation(mount) as daemon:
        figures = daemon.query({"method": "metrics"}).get("metrics")
    return figures if isinstance(figures, dict) else None
