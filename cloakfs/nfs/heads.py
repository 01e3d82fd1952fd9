"""What must be the same on machines that serve one tree (heads), so that clients can go from one to another.

A head describes itself in a file, and another compares that with itself. The description has no secret: of the key of
file handles, it has the fingerprint.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from ..config.render import format_options
from ..config.viewitems import User
from ..linux import database, mountinfo, ownfiles, userdatabase
from ..state import handlekey
from ..state.handlekey import HandleKey
from ..state.persistent import INDEX
from ..state.runtime import STATE_DIR, mount_key
from ..state.versions import version_problem
from ..tree.computed import KINDS
from ..tree.index import FIRST_COMPUTED, is_of_key
from .knfsd import export_options
from .plan import Mount, Plan
from .server import ServerError

VERSION = 1
"""The version of a description."""

FIRST_USER, LAST_USER = 1000, 65533
"""The uids of accounts that are compared; those of the machine itself may differ."""

SAME = "the same on each machine with the key"
_OWN_NUMBERS = "of this machine alone: its index gives the numbers of objects (docs/nfs.md)"
_OWN_EXPORTS = "of this machine alone: nfs-ganesha adds a number that each machine gives by itself (docs/nfs.md)"
_OWN_SECRET = "of this machine alone: its state has a secret of its own, or there is no key (docs/nfs.md)"

Description = dict[str, Any]


def describe(made: Plan) -> Description:
    """Return the description of this machine, which would serve this plan.

    Raises:
        HandleKeyError: the key cannot be used.
        ServerError: the state of a mount cannot be read.
        OSError: a tree cannot be reached.
    """
    key = handlekey.read()
    named = {str(item) for mount in made.mounts for item in mount.options.views if isinstance(item, User)}
    return {
        "version": VERSION,
        "server": made.server,
        "key of file handles": None if key is None else key.fingerprint,
        "mounts": {f"{mount.path} of {mount.client}": _of_mount(mount, made.server, key) for mount in made.mounts},
        "accounts": dict(sorted(_accounts(named))),
    }


def _of_mount(mount: Mount, server: str, key: HandleKey | None) -> dict[str, str | None]:
    return {
        "file handles": _OWN_EXPORTS if server == "ganesha" else _handles(mount, key),
        "tree": mount.source,
        "file system": _file_system(mount.source),
        "options": format_options(mount.options),
        "export": export_options(mount) if server == "knfsd" else None,
    }


def _handles(mount: Mount, key: HandleKey | None) -> str:
    """Say whether file handles of a mount can be the same on another machine (`SAME`), or else why not."""
    state = os.path.join(STATE_DIR, mount_key(mount.source, mount.path), INDEX)
    secret = None if key is None else key.secret(mount_key(mount.source, mount.path))
    if not ownfiles.exists(state):  # it was never mounted here
        kind = _file_system(mount.source).partition(" ")[0]
        return _OWN_NUMBERS if kind not in KINDS else _OWN_SECRET if secret is None else SAME
    try:
        with contextlib.closing(database.connect(f"file:{quote(state)}?mode=ro", timeout=10, uri=True)) as db:
            if db.execute("PRAGMA user_version").fetchone()[0] < FIRST_COMPUTED:
                return _OWN_NUMBERS
            computed, stored = db.execute("SELECT computed, key FROM numbering, secret").fetchone() or (0, b"")
    except sqlite3.Error as exc:
        raise ServerError(f"{state}: {exc}") from exc
    if not computed:
        return _OWN_NUMBERS
    return SAME if secret is not None and is_of_key(stored, secret) else _OWN_SECRET


def _file_system(path: str) -> str:
    """Return the kind and the number of a file system, and the inode number of the tree in it."""
    fd = ownfiles.open_fd(path, os.O_PATH | os.O_CLOEXEC)
    try:
        place = mountinfo.by_id().get(mountinfo.id_of(fd))
        number = ownfiles.fstatvfs(fd).f_fsid
        return f"{place.kind if place is not None else 'unknown'} {number:x}, inode {ownfiles.fstat(fd).st_ino}"
    finally:
        os.close(fd)


def _accounts(named: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the accounts of people, as far as the user database lists them, and those that are named by entries."""
    wanted = set(named)
    for entry in userdatabase.getpwall():
        if FIRST_USER <= entry.pw_uid <= LAST_USER:
            wanted.add(entry.pw_name)
    for name in wanted:
        try:
            entry = userdatabase.getpwnam(name)
        except KeyError:
            continue
        groups = sorted({*userdatabase.getgrouplist(name, entry.pw_gid)} - {entry.pw_gid})
        yield name, ":".join([str(entry.pw_uid), str(entry.pw_gid), "+".join(map(str, groups))]).rstrip(":")


def require_description(found: object, path: str) -> Description:
    """Return what was read from a file as a description.

    Raises:
        ServerError: it is none, or of another version.
    """
    if not isinstance(found, dict) or "version" not in found:
        raise ServerError(f"{path}: is not what cloakfs export same-as prints")
    if found["version"] != VERSION:
        raise ServerError(version_problem(path, found["version"], VERSION, "use the same cloakfs on both machines"))
    return found


def differences(here: object, there: object, of: str = "") -> Iterator[str]:
    """Yield a line for each difference between two descriptions, and for file handles that cannot be the same."""
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for name in {**here, **there}:
            yield from differences(here.get(name), there.get(name), f"{of}, {name}" if of else str(name))
    elif here != there or (here in (_OWN_NUMBERS, _OWN_EXPORTS, _OWN_SECRET)):
        yield f"{of}: {_told(here)} here, {_told(there)} there"


def _told(value: object) -> str:
    return "none" if value is None else "one" if isinstance(value, Mapping) else str(value)
