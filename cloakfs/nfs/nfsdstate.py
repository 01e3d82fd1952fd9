"""What NFSv4 clients hold on the kernel's server: open files, locks and delegations; and on which mounts that are gone.

The server keeps a file open for as long as a client has it open. When its mount is replaced by another one at the same
path, the file stays that of the old mount, whose daemon has ended, and each READ and WRITE fails. Only a client that
claims its files again (RFC 8881 §8.4.2), as after a restart of the server, gets those of the new mount.
"""

import contextlib
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..fuse.detach import KINDS
from ..linux import mountinfo, ownfiles, programs
from ..linux.database import connect
from ..state.runtime import RUN_DIR

_CLIENTS = "/proc/fs/nfsd/clients"
_CACHES = ("nfsd.export", "nfsd.fh")
_MADE = os.path.join(RUN_DIR, "nfsd")
_LEGACY = "/proc/fs/nfsd/nfsv4recoverydir"
_DATABASES = ("/var/lib/nfs/nfsdcld/main.sqlite", "/var/lib/nfs/nfsdcltrack/main.sqlite")
_DATABASE_SECONDS = 5.0

_superblock = re.compile(r'superblock: "([0-9a-f]+):([0-9a-f]+):')
_name = re.compile(r'^name: "(.*)"$', re.MULTILINE)
_address = re.compile(r'^address: "(.*)"$', re.MULTILINE)
_escape = re.compile(rb"\\x([0-9a-f]{2})")
_table = re.compile(r"clients|rec-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Client:
    """An NFSv4 client.

    Attributes:
        name: what identifies it to the server, whatever its address (`co_ownerid`).
        address: its address, for people.
        devices: the file systems on which it has open files, locks or delegations, like `mountinfo.Place.device`.
    """

    name: bytes
    address: str
    devices: frozenset[str]


def clients() -> list[Client]:
    """Return the clients of the server of this network namespace; none if it does not run."""
    found = []
    for folder in ownfiles.glob(_CLIENTS, "*"):
        with contextlib.suppress(OSError):  # it has just gone
            found.append(parse(_read(f"{folder}/info"), _read(f"{folder}/states")))
    return found


def parse(info: str, states: str) -> Client:
    """Return the client that the files `info` and `states` of its directory below /proc/fs/nfsd/clients describe."""
    name, address = _name.search(info), _address.search(info)
    return Client(
        _escape.sub(lambda found: bytes([int(found[1], 16)]), os.fsencode(name[1])) if name else b"",
        address[1] if address else "?",
        frozenset(f"{int(major, 16)}:{int(minor, 16)}" for major, minor in _superblock.findall(states)),
    )


def _read(path: str) -> str:
    with ownfiles.open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


# -- who could claim its files again ---------------------------------------------------------------


def unrecorded(names: Iterable[bytes]) -> set[bytes]:
    """Return which of these clients the server would not let claim anything after a restart.

    It does so for those of which there is a record on its disk (nfsdcld(8), nfsdcltrack(8), or else a directory for
    each client): a server that has forgotten what a client had locked cannot know whether others got the lock since.
    """
    left = set(names)
    with contextlib.suppress(OSError):
        recorded = set(ownfiles.listdir(_read(_LEGACY).strip()))
        left = {name for name in left if hashlib.md5(name, usedforsecurity=False).hexdigest() not in recorded}
    for database in _databases():
        if left and ownfiles.exists(database):
            with contextlib.suppress(sqlite3.Error):
                left -= _in_database(database)
    return left


def _databases() -> list[str]:
    """Where nfsdcld(8) and nfsdcltrack(8) keep their databases, as nfs.conf(5) says or by themselves."""
    found = list(_DATABASES)
    for section in ("nfsdcld", "nfsdcltrack"):
        with contextlib.suppress(OSError):
            asked = programs.run(
                ["nfsconf", "--get", section, "storagedir"],
                capture_output=True,
                text=True,
                check=False,
                env=programs.SYSTEM_ENVIRONMENT,
            )
            if folder := asked.stdout.strip():
                found.insert(0, os.path.join(folder, "main.sqlite"))
    return found


def _in_database(database: str) -> set[bytes]:
    uri = f"file:{database}?mode=ro"
    with contextlib.closing(connect(uri, uri=True, timeout=_DATABASE_SECONDS)) as opened:
        names = [str(row[0]) for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            bytes(row[0])
            for table in filter(_table.fullmatch, names)
            for row in opened.execute(f'SELECT id FROM "{table}"')
        }


# -- which mount is exported ------------------------------------------------------------------------


def flush_export_caches() -> None:
    """Have the server ask mountd again which mount each export is, as `exportfs -f` does, but within a millisecond.

    mountd gives no answer as long as nothing is mounted at the path of an export with `mp`. Requests of clients wait
    for its answer (NFS4ERR_DELAY, NFS3ERR_JUKEBOX, or none), until the threads of the server are restarted, or for two
    minutes: no flush ends a question that is not answered yet (net/sunrpc/cache.c: cache_is_expired).

    Raises:
        OSError: it cannot be done.
    """
    for cache in _CACHES:
        with ownfiles.open(f"/proc/net/rpc/{cache}/flush", "w", encoding="ascii") as file:
            file.write(f"{int(time.time()) + 1}\n")


# -- mounts that were replaced ---------------------------------------------------------------------


def note_mounts(paths: Iterable[str]) -> None:
    """Record what is mounted at these paths now and is exported, for `lost_mounts`, also of a later process.

    Raises:
        OSError: it cannot be recorded.
    """
    wanted = set(paths)
    top = {place.path: place.device for place in mountinfo.by_id().values() if place.path in wanted}
    ownfiles.makedirs(_MADE, mode=0o700, exist_ok=True)
    for path, device in top.items():
        with ownfiles.open(os.path.join(_MADE, device), "wb") as file:
            file.write(os.fsencode(path))


def _noted() -> dict[str, str]:
    noted = {}
    with contextlib.suppress(FileNotFoundError):
        for device in ownfiles.listdir(_MADE):
            with ownfiles.open(os.path.join(_MADE, device), "rb") as file:
                noted[device] = os.fsdecode(file.read())
    return noted


def are_unmounted_held() -> bool:
    """Whether clients hold files of a noted mount that is not at its path now, whatever else may be there."""
    top = {place.path: place.device for place in mountinfo.by_id().values()}
    old = {device for device, path in _noted().items() if top.get(path) != device}
    return any(client.devices & old for client in clients()) if old else False


def lost_mounts() -> dict[str, str]:
    """Return the file systems that clients hold files of, and whose noted path leads to a later one now: their paths.

    They may still be mounted elsewhere, by a bind mount. Where no client holds anything, their records are
    removed, because their numbers will be given to new ones.
    """
    noted = _noted()
    places = mountinfo.by_id().values()
    top = {place.path: place.device for place in places}
    old = {device: path for device, path in noted.items() if top.get(path) != device}
    if not old:
        return {}
    held = {device for client in clients() for device in client.devices}
    held -= {place.device for place in places if place.kind not in KINDS}  # that number is another file system's now
    for device in old.keys() - held:
        with contextlib.suppress(FileNotFoundError):
            ownfiles.unlink(os.path.join(_MADE, device))
    # At a path with another mount, or none, clients could not claim their files.
    return {
        device: path for device, path in old.items() if device in held and path in top and noted.get(top[path]) == path
    }
