"""What is left of a service whose guard was killed: it is still served, but nothing watches over it.

The guard records what it has made in its directory below /run, so that a later command can take that down.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import trio

from ..linux import ownfiles, process
from ..state.versions import is_known, version_problem
from .ganesha import Ganesha
from .knfsd import resume, unexport
from .plan import Mount, ServerKind
from .server import ServerError

VERSION = 1
"""The version of the record."""

_MOUNTING_SECONDS = 60.0
_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """The record of what a guard has made.

    Attributes:
        pid: the pid of the guard.
        started: when the guard started (`process.start_time`).
        server: the server that exports the mounts.
        state_dir: the state directory of nfs-ganesha.
        exports: mount points, each with its client.
        made: directories that are to be removed.
    """

    pid: int
    started: int | None
    server: ServerKind
    state_dir: str
    exports: tuple[tuple[str, str], ...]
    made: tuple[str, ...]

    @property
    def is_watched(self) -> bool:
        """Whether the guard lives."""
        return self.started is not None and process.start_time(self.pid) == self.started

    @property
    def paths(self) -> list[str]:
        """The mount points, sorted."""
        return sorted(path for path, _ in self.exports)


def _path(run_dir: str) -> str:
    return os.path.join(run_dir, "service.json")


def write(run_dir: str, server: ServerKind, state_dir: str, mounts: Iterable[Mount], made: Iterable[str]) -> None:
    """Record, as the guard, what must be taken down if the guard is killed."""
    exports = tuple(dict.fromkeys((mount.path, mount.client) for mount in mounts))
    pid = os.getpid()
    record = ServiceRecord(pid, process.start_time(pid), server, state_dir, exports, tuple(sorted(made)))
    ownfiles.replace(_path(run_dir), json.dumps({"version": VERSION, **asdict(record)}).encode())


def read(run_dir: str) -> ServiceRecord | None:
    """Return the record; None if there is none (any more).

    Raises:
        ServerError: the version of the record is not known.
    """
    try:
        with ownfiles.open(_path(run_dir), encoding="utf-8") as file:
            stored = json.load(file)
        version = stored.pop("version", None)
        if not is_known(version, VERSION):
            hint = "use the cloakfs that wrote it for export status and down"
            raise ServerError(version_problem(_path(run_dir), version, VERSION, hint))
        stored["exports"] = tuple((path, client) for path, client in stored["exports"])
        stored["made"] = tuple(stored["made"])
        return ServiceRecord(**stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


async def end_server(record: ServiceRecord, staying: Iterable[tuple[str, str]] = ()) -> None:
    """Stop exporting what was recorded. The kernel's server itself goes on, because others may use it.

    Args:
        record: the record.
        staying: what the kernel's server goes on exporting: mount points, each with its client.
    """
    if record.server == "knfsd":
        await resume()
        await unexport(set(record.exports).difference(staying))
    else:
        ganesha = Ganesha(record.state_dir)
        await ganesha.end_stale_server()
        await ganesha.stop()


@contextlib.contextmanager
def mounting(run_dir: str) -> Iterator[int]:
    """Give a descriptor to be inherited by a command that mounts: while it runs, `wait_for_mounting` waits."""
    held = ownfiles.open_fd(_mounting_path(run_dir), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield held
    finally:
        os.close(held)


async def wait_for_mounting(run_dir: str) -> None:
    """Wait until no command mounts any more that a guard has started which was killed meanwhile.

    What such a command has yet to mount could not be found.

    Raises:
        ServerError: one does not come to an end.
    """
    try:
        held = ownfiles.open_fd(_mounting_path(run_dir), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        with trio.move_on_after(_MOUNTING_SECONDS):
            while not ownfiles.lock(held):
                await trio.sleep(_RETRY_SECONDS)
            return
    finally:
        os.close(held)
    raise ServerError(f"a mount that was begun is not finished yet; see who has {_mounting_path(run_dir)} open (fuser)")


def _mounting_path(run_dir: str) -> str:
    return os.path.join(run_dir, "mounting")


def remove_directories(record: ServiceRecord) -> None:
    """Remove the directories that the guard made, after unmounting."""
    for path in sorted(record.made, reverse=True):
        with contextlib.suppress(OSError):
            ownfiles.rmdir(path)
