"""What is left of a service whose guard was killed: it is served on, and nobody watches over it.

The guard writes down what it has made in its directory below /run; whoever comes after it can take that down.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .. import files
from ..linux import process
from ..versions import is_known, refusal
from .ganesha import Ganesha
from .knfsd import unexport
from .plan import Mount, ServerKind
from .server import ServerError

VERSION = 1
"""Of what is written down."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a guard has made.

    Attributes:
        pid: of the guard.
        started: when it began (`process.start_time`).
        server: which exports.
        state_dir: nfs-ganesha's.
        exports: mount points, each with its client.
        made: directories that are to go.
    """

    pid: int
    started: int | None
    server: ServerKind
    state_dir: str
    exports: tuple[tuple[str, str], ...]
    made: tuple[str, ...]

    @property
    def is_watched(self) -> bool:
        """Does the guard live?"""
        return self.started is not None and process.start_time(self.pid) == self.started

    @property
    def paths(self) -> list[str]:
        """The mount points, sorted."""
        return sorted(path for path, _ in self.exports)


def _path(run_dir: str) -> str:
    return os.path.join(run_dir, "service.json")


def write(run_dir: str, server: ServerKind, state_dir: str, mounts: Iterable[Mount], made: Iterable[str]) -> None:
    """Write down, as the guard, what there is to take down."""
    exports = tuple(dict.fromkeys((mount.path, mount.client) for mount in mounts))
    pid = os.getpid()
    record = Record(pid, process.start_time(pid), server, state_dir, exports, tuple(sorted(made)))
    files.replace(_path(run_dir), json.dumps({"version": VERSION, **asdict(record)}).encode())


def read(run_dir: str) -> Record | None:
    """What was written down; None if there is nothing (any more).

    Raises:
        ServerError: it is of a version that is not known.
    """
    try:
        with open(_path(run_dir), encoding="utf-8") as file:
            told = json.load(file)
        version = told.pop("version", None)
        if not is_known(version, VERSION):
            way_out = "export status and down take the cloakfs that wrote it"
            raise ServerError(refusal(_path(run_dir), version, VERSION, way_out))
        told["exports"] = tuple((path, client) for path, client in told["exports"])
        told["made"] = tuple(told["made"])
        return Record(**told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


async def end_server(record: Record) -> None:
    """Export nothing of it any more. The kernel's server itself goes on: others may use it."""
    if record.server == "knfsd":
        await unexport(record.exports)
    else:
        ganesha = Ganesha(record.state_dir)
        await ganesha.end_left_over()
        await ganesha.stop()


def remove_directories(record: Record) -> None:
    """After the unmounting."""
    for path in record.made:
        with contextlib.suppress(OSError):
            os.rmdir(path)
