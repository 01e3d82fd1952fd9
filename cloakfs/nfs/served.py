"""Whether exports are served at this moment: the checks, each with a time limit."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from ..linux import ownfiles
from . import hosts, rpc
from .plan import Mount

SECONDS = 2.0
"""The limit for the answers of all mounts, and then again for those of the server.

Together, this is below the patience of `cloakfs status`.
"""

_CALL_SECONDS = 1.5
_CALLS_AT_ONCE = 16
_STATS_AT_ONCE = 64

Problem = str | None


@dataclass(frozen=True, slots=True)
class ServiceProblems:
    """Why a server, or some of its mounts, are not served.

    Attributes:
        server: why the server as a whole does not serve, in one line; None if it answers.
        mounts: by path, why a mount is not served, in one line. A mount that is absent is served.
    """

    server: Problem = None
    mounts: dict[str, str] = field(default_factory=dict)


async def each(mounts: Sequence[Mount], find_problem: Callable[[Mount], Problem]) -> dict[str, str]:
    """Check several mounts in threads; return the problems by path. Each call must have a time limit of its own."""
    limit = trio.CapacityLimiter(_CALLS_AT_ONCE)
    said: dict[str, str] = {mount.path: f"no answer within {SECONDS:g} s" for mount in mounts}

    async def one(mount: Mount) -> None:
        problem = await trio.to_thread.run_sync(find_problem, mount, abandon_on_cancel=True, limiter=limit)
        if problem is None:
            del said[mount.path]
        else:
            said[mount.path] = problem

    with trio.move_on_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for mount in mounts:
                nursery.start_soon(one, mount)
    return said


def admitted_from(mount: Mount) -> str | None:
    """Return the address from which this machine is a client of a mount, by AUTH_SYS; None if it is not (known to be).

    Waits for DNS.
    """
    flavours = (dict(mount.options.other).get("sec") or "sys").split(":")
    return hosts.own_address(mount.client) if {"sys", "unix"} & set(flavours) else None


def by_lookup(host: str, port: int, path: str, source: str) -> Problem:
    """Look up what clients mount over NFSv4, as a client that is admitted; return why that fails."""
    names = [name for name in path.split("/") if name]
    try:
        status = rpc.lookup(host, port, names, source, _CALL_SECONDS)
    except OSError as exc:
        return f"the server gives no answer to a LOOKUP of {path}: {exc.strerror or exc}"
    return _refusal(path, status)


def by_mount(host: str, path: str, source: str) -> Problem:
    """Ask for the root of an export over NFSv3, as a client that is admitted; return why that fails."""
    try:
        status = rpc.mount(host, path, source, _CALL_SECONDS)
    except OSError as exc:
        return f"the server gives no answer to a MOUNT of {path}: {exc.strerror or exc}"
    return _refusal(path, status)


def _refusal(path: str, status: int) -> Problem:
    # WRONGSEC comes from the export. Without version 4.0, the server answers no such request.
    if status in (rpc.OK, rpc.WRONGSEC, rpc.MINOR_VERS_MISMATCH):
        return None
    return f"the server refuses {path} to a client that it should admit: {rpc.described(status)}"


class StatChecks:
    """Asks what is exported for an answer, each in a thread. A thread that hangs is not joined by a second one."""

    def __init__(self) -> None:
        self._limit = trio.CapacityLimiter(_STATS_AT_ONCE)
        self._since: dict[str, float] = {}  # path -> since when it has not answered

    async def find_problems(self, paths: Iterable[str]) -> dict[str, str]:
        """Return, by path, why stat(2) or statvfs(2) fails there, or that it has not returned for so long."""
        said: dict[str, str] = {}

        async def one(path: str) -> None:
            if path not in self._since:
                self._since[path] = time.monotonic()
                with trio.move_on_after(SECONDS):
                    failure = await trio.to_thread.run_sync(
                        self._answer, path, abandon_on_cancel=True, limiter=self._limit
                    )
                    if failure is not None:
                        said[path] = f"it does not answer: {failure}"
                    return
            said[path] = f"it has not answered for {time.monotonic() - self._since.get(path, 0):.0f} s"

        async with trio.open_nursery() as nursery:
            for path in paths:
                nursery.start_soon(one, path)
        return said

    def _answer(self, path: str) -> Problem:
        try:
            ownfiles.stat(path)
            ownfiles.statvfs(path)  # the kernel may know the attributes, but asks the daemon for this
        except OSError as exc:
            return exc.strerror or str(exc)
        finally:
            self._since.pop(path, None)
        return None
