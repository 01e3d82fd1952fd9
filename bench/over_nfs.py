"""`ls -l` over NFS: exports of the kernel's server, a tree of 1,000 files, and a client that has nothing cached.

The client mounts anew for each listing, with `nosharecache`, so that it has nothing cached. The server has answered
the same requests before. It is *warm* if its kernel still has what it may cache, and *cold* if that was dropped. The
guest is client and server at once: what is dropped is dropped for both.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .homes import HOME, USERS, rights_of
from .job import PINNED, Piece
from .lab.nfsexports import NfsExports, requests
from .lab.nfshost import drop_caches, sh
from .tree import OWNER, WORKER, Rights, make_directory, make_file
from .workers import done_as

BARE_EXPORT = "bare export"
CALLER = "cloakfs export, caller view"
FIXED = "cloakfs export, fixed view"
CALLER_CHECKED, FIXED_CHECKED = f"{CALLER}, subtree_check", f"{FIXED}, subtree_check"
SQUASHED = "cloakfs export, all_squash"

_CLOAK = f"cloak_list = uid +077 {WORKER} {WORKER + USERS - 1}"

EXPORTS: dict[str, str | None] = {
    BARE_EXPORT: None,
    CALLER: _CLOAK,
    CALLER_CHECKED: f"subtree_check,{_CLOAK}",
    FIXED: f"views = {WORKER}:{WORKER}",
    FIXED_CHECKED: f"subtree_check,views = {WORKER}:{WORKER}",
    SQUASHED: f"all_squash,anonuid={WORKER},anongid={WORKER},{_CLOAK}",
}
"""Every export, in the order of the tables: its options in exports.d; None: the tree itself."""

PUBLIC, BELOW = "public", "below home"
PLACES = {PUBLIC: "", HOME: os.path.join("home", "user-00"), BELOW: os.path.join("home", "user-00", "work")}
"""By kind of files: the directory that is listed."""

VERSIONS = ("3", "4.2")

BASE = "/over-nfs"
"""In the guest: the directory in which everything is mounted."""

TREE = f"{BASE}/tree"
"""The tree that is exported."""

CLIENT = ("nosharecache", "acregmin=60", "acdirmin=60")
"""Options of a client that lists: what it learned is to last as long as the listing; on a slow machine over 3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NfsListing(Piece):
    """One `ls -l`, by this version of NFS, of a server that is cold or warm."""

    version: str
    cold: bool


def all_listings(heavy_rounds: int) -> dict[str, NfsListing]:
    """Return all by name, those of one kind of files together; cold ones are done in no more than `heavy_rounds`."""
    found = {}
    for kind in PLACES:
        for version in VERSIONS:
            for cold in (False, True):
                name = f"ls -l over NFSv{version}{' cold' if cold else ''} {kind}"
                found[name] = NfsListing(
                    name, kind, f"ls -l over NFS, {kind}", "listings", (PINNED,), heavy_rounds if cold else None,
                    version=version, cold=cold,
                )  # fmt: skip
    return found


def prepare(tree: str, kind: str, files: int) -> None:
    """Fill an empty tree, which will be the worker's, with files of a kind; beside a home is that of another user.

    For each permission that the client requests (ACCESS) and does not have, the server sends the daemon two requests.
    At the top, the worker has all.
    """
    os.chown(tree, WORKER, WORKER)
    if kind == PUBLIC:
        _fill(tree, rights_of(PUBLIC), files)
        return
    make_directory(os.path.join(tree, "home"), Rights(OWNER, OWNER, 0o755, 0o644))
    for user in (0, 1):
        rights, place = rights_of(HOME, user), os.path.join(tree, "home", f"user-{user:02}")
        make_directory(place, rights)
        if kind == BELOW:
            place = os.path.join(place, "work")
            make_directory(place, rights._replace(directory=0o755))
        _fill(place, rights, files)


def _fill(directory: str, rights: Rights, files: int) -> None:
    for number in range(files):
        make_file(os.path.join(directory, f"file-{number:04}"), rights)


class Listed(NamedTuple):
    """How long a listing took, in seconds, and how many requests the daemon answered meanwhile, by operation."""

    seconds: float
    requests: Counter[str]


class ExportedTree:
    """Exports of a tree with files of one kind, in the laboratory's guest, whose server has to run.

    Args:
        exports: what makes them, and reaches them.
        served: the path of each for clients.
        kind: of files.
        files: how many there are.
    """

    def __init__(self, exports: NfsExports, served: dict[str, str], kind: str, files: int) -> None:
        self._exports = exports
        self._served = served
        self._kind = kind
        self._files = files
        self._warm: set[tuple[str, str]] = set()

    def list_once(self, export: str, version: str, *, cold: bool = False) -> Listed:
        """List the directory and stat each entry, as `ls -l` does, as the worker.

        Raises:
            RuntimeError, WorkError: it failed.
        """
        if cold:
            drop_caches()
            self._warm.clear()
        elif (export, version) not in self._warm:
            self._list(export, version)
        self._warm.add((export, version))
        return self._list(export, version)

    def _list(self, export: str, version: str) -> Listed:
        served = self._served[export]

        def answered() -> Counter[str]:
            return Counter() if EXPORTS[export] is None else requests(served)

        with self._exports.reach(served, version, *CLIENT) as at:
            real, seen = (os.path.join(top, PLACES[self._kind]) for top in (TREE, at))
            before = answered()
            seconds = done_as(WORKER, "/", partial(_timed, real, seen, self._files))
            return Listed(seconds, answered() - before)


@contextlib.contextmanager
def site(kind: str, files: int, chosen: Sequence[str] = tuple(EXPORTS)) -> Iterator[ExportedTree]:
    """Make a tree in memory and the chosen exports of it, for as long as they are needed."""
    os.makedirs(TREE, exist_ok=True)
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "over-nfs", TREE)
    try:
        prepare(TREE, kind, files)
        exports = NfsExports(BASE, "over-nfs")
        with exports.serve(TREE, [EXPORTS[name] for name in chosen]) as paths:
            yield ExportedTree(exports, dict(zip(chosen, paths, strict=True)), kind, files)
    finally:
        sh("umount", "-l", TREE)


def _timed(real: str, seen: str, files: int) -> float:
    _list(real, files)  # a process that has just begun is slow
    began = time.perf_counter()
    _list(seen, files)
    return time.perf_counter() - began


def _list(path: str, files: int) -> None:
    with os.scandir(path) as entries:
        found = [entry.stat(follow_symlinks=False).st_mode for entry in entries]
    if len(found) != files:
        raise OSError(f"{path}: {len(found)} files, not {files}")
