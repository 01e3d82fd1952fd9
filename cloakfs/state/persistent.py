"""The state of mounts that outlives their daemons: what there is, and what no mount can use any more."""

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..fuse.detach import KINDS
from ..linux import mountinfo, ownfiles
from .runtime import RUN_DIR, STATE_DIR, mount_key, state_path
from .versions import is_known, version_problem

VERSION = 1
"""The version of the record of a mount. 0.1.0 wrote none."""

INDEX = "nodes.sqlite"
PLACES = "places.sqlite"
IMAGE = "identity"
_RECORD = "mount.json"

# In the order of removal: as long as anything is left, the record says of which mount it is.
_FILES = (
    *(f"{name}{end}" for name in (INDEX, PLACES) for end in ("", "-wal", "-shm", "-journal")),
    IMAGE,
    ownfiles.beside(_RECORD),
    _RECORD,
)

_key = re.compile(r".+-[0-9a-f]{12}", re.DOTALL)

_ATTEMPTS = 20
_ATTEMPT_SECONDS = 0.02
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MountRecord:
    """The record of a mount, in the directory of its state.

    Attributes:
        source: the real tree.
        target: the mount point.
        source_on: the file system on which the real tree lies (`_file_system`).
        target_on: the file system on which the mount point lies.
        exported: an NFS server exports the mount, so that clients may hold handles while it is not mounted.
        version: the version of the record.
    """

    source: str
    target: str
    source_on: list[str]
    target_on: list[str]
    exported: bool
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class PersistentState:
    """The state of one mount.

    Attributes:
        key: the name of its directory (`mount_key`).
        record: which mount it is; None if that is not known.
        unknown: one line that says why it is not known; None if it is.
        size: how much the files take up, in bytes.
    """

    key: str
    record: MountRecord | None
    unknown: str | None
    size: int

    @property
    def path(self) -> str:
        """The directory."""
        return os.path.join(STATE_DIR, self.key)


@dataclass(frozen=True, slots=True)
class Removability:
    """Whether a state can be removed, and in a few words why, or why not."""

    removable: bool
    reason: str


def lock(key: str) -> int | None:
    """Return a descriptor of the directory of a mount's state, made if need be, with the lock that its daemon holds.

    None means that a daemon serves the mount. Other commands, which check for one, have the lock for a moment only.

    Raises:
        OSError: the directory cannot be made.
    """
    path = os.path.join(STATE_DIR, key)
    for _ in range(_ATTEMPTS):
        ownfiles.makedirs(path, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:  # removed meanwhile (`remove`)
            state = ownfiles.open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, state)
            if ownfiles.lock(state) and os.path.samestat(ownfiles.fstat(state), ownfiles.stat(path)):
                stack.pop_all()
                return state
        time.sleep(_ATTEMPT_SECONDS)
    return None


def write_record(source: str, target: str, *, exported: bool) -> None:
    """Record of which mount the state is. This comes before the mount itself is made.

    Raises:
        OSError: the record cannot be written.
    """
    record = MountRecord(source, target, _file_system_at(source), _file_system_at(target), exported)
    ownfiles.replace(
        os.path.join(STATE_DIR, mount_key(source, target), _RECORD), json.dumps(asdict(record)).encode(), mode=0o600
    )


def _file_system_at(path: str) -> list[str]:
    """Return on which file system an object is; an empty list, with which its state is kept, if it does not say."""
    there = ownfiles.open_fd(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return _file_system(there)
    except OSError:  # no statfs(2), for example
        return []
    finally:
        os.close(there)


def _file_system(fd: int) -> list[str]:
    """Return on which file system an object is: mount point, type, and what statvfs(3) calls f_fsid.

    That of a tmpfs is left out, since what is not on a new one at the same place is not anywhere. The list is empty if
    the object lies on a detached mount.
    """
    place = mountinfo.by_id().get(mountinfo.id_of(fd))
    if place is None:
        return []
    # f_fsid of the mount point, because on btrfs that of each subvolume differs.
    number = "" if place.kind == "tmpfs" else str(ownfiles.statvfs(place.path).f_fsid)
    return [place.path, place.kind, number]


def all_states() -> list[PersistentState]:
    """Return the states of mounts on this machine, whether they are mounted or not, by name.

    Raises:
        OSError: they cannot be listed.
    """
    try:
        names = sorted(ownfiles.listdir(STATE_DIR))
    except FileNotFoundError:
        return []
    return [_read(name) for name in names if _key.fullmatch(name) and _has_nothing_else(name)]


def _has_nothing_else(key: str) -> bool:
    """Whether this is the state of a mount, and not that of an export with such a name."""
    try:
        return set(ownfiles.listdir(os.path.join(STATE_DIR, key))) <= set(_FILES)
    except (NotADirectoryError, FileNotFoundError):
        return False


def _read(key: str) -> PersistentState:
    size = 0
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            size += ownfiles.lstat(os.path.join(STATE_DIR, key, name)).st_blocks * 512
    path = os.path.join(STATE_DIR, key, _RECORD)
    try:
        with ownfiles.open(path, encoding="utf-8") as file:
            written = json.load(file)
        if not is_known(written["version"], VERSION):
            return PersistentState(
                key, None, version_problem(path, written["version"], VERSION, "use the cloakfs that wrote it"), size
            )
        record = MountRecord(**written)
        if mount_key(record.source, record.target) == key:
            return PersistentState(key, record, None, size)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return PersistentState(key, None, "it has no record of its mount; a mount by this version writes one", size)


def removability(state: PersistentState, named: frozenset[str] = frozenset()) -> Removability:
    """Return whether no mount can use this state any more; in doubt, one can.

    What an NFS server exports is kept as long as the real tree exists, because the mount points of exports come and go.
    A path that cannot be opened, or whose file system is not mounted, is not taken for removed.

    Args:
        state: the state.
        named: mount points whose states are to be removed if only they are not mounted.
    """
    if ownfiles.is_locked(state.path):
        return Removability(removable=False, reason="mounted")
    record = state.record
    if record is None:
        return Removability(removable=False, reason=state.unknown or "")
    if any(place.path == record.target and place.kind in KINDS for place in mountinfo.by_id().values()):
        return Removability(removable=False, reason="its daemon has died, but the mount is still there")
    if record.target in named:
        return Removability(removable=True, reason="not mounted")
    source = _is_gone(record.source, record.source_on)
    if source is None:
        return Removability(removable=False, reason=f"{record.source} cannot be reached")
    if source:
        return Removability(removable=True, reason=f"{record.source} is gone")
    if not record.exported and _is_gone(record.target, record.target_on):
        return Removability(removable=True, reason=f"{record.target} is gone")
    return Removability(removable=False, reason="not mounted, but it can be mounted again")


def remove(state: PersistentState) -> bool:
    """Remove a state and the log of its mount; return False if it is in use after all.

    Raises:
        OSError: it cannot be removed.
    """
    lock = ownfiles.open_fd(state.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not ownfiles.lock(lock):
            return False
        for path in (*(os.path.join(state.path, name) for name in _FILES), *_left_in_run(state.key)):
            with contextlib.suppress(FileNotFoundError):
                ownfiles.unlink(path)
        ownfiles.rmdir(state.path)
    finally:
        os.close(lock)
    return True


def _left_in_run(key: str) -> Iterator[str]:
    yield os.path.join(RUN_DIR, f"{key}.log")
    yield state_path(key)


def _is_gone(path: str, on: list[str]) -> bool | None:
    """Whether a directory has been removed; None if that cannot be found out, also because nothing answers."""
    answers: list[bool | None] = []
    # A thread that waits for a file system that hangs does not keep the process from ending.
    thread = threading.Thread(target=lambda: answers.append(_has_gone(path, on)), daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    return answers[0] if answers else None


def _has_gone(path: str, on: list[str]) -> bool | None:
    """Whether a directory is gone: whether the nearest one above lies on the file system on which it was itself."""
    ancestor = path
    while True:
        try:
            fd = ownfiles.open_fd(ancestor, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR):
                return None
            ancestor = os.path.dirname(ancestor)
            continue
        try:
            if ancestor == path:
                # A file system that reports errors only when it is used, such as one whose daemon has died.
                ownfiles.fstat(fd)
                return False
            there = _file_system(fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        # A lower cloakfs mount may merely hide it.
        return True if there == on and there and there[1] not in KINDS else None
