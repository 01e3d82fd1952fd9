"""nfs-ganesha as a server of the guard: one export for each mount, with permanent export numbers."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence

from ..linux import ownfiles
from ..state.versions import is_known, version_problem
from . import served
from .ganesha import GRACE_SECONDS, Ganesha, GaneshaExport
from .plan import Mount
from .server import ServerError

log = logging.getLogger(__name__)

VERSION = 1
"""The version of the file that stores the numbers of exports."""

_MOST_EXPORTS = 65535

# This key is among the exports, whose names all contain zero bytes, so that 0.1.0 can read the file, too.
_VERSION_KEY = "version"


class GaneshaServer:
    """One nfs-ganesha as an `NfsServer`.

    Args:
        ganesha: the process.
        ids: the file that stores the number of each export, which is part of every file handle.
    """

    def __init__(self, ganesha: Ganesha, ids: str) -> None:
        self._ganesha = ganesha
        self._ids = ids
        self._mounts: Sequence[Mount] = ()
        self._started = ""  # when, for people, if clients had to claim something then

    async def start(self, mounts: Sequence[Mount]) -> None:
        """Start nfs-ganesha with an export for each mount, and return when it answers."""
        self._mounts = mounts
        await self._ganesha.start(exports_of(mounts, self._ids))
        self._note_grace()

    async def change(self, mounts: Sequence[Mount], renewed: Sequence[Mount]) -> None:
        """Export these mounts, and no others; `renewed` have replaced old mounts at their paths."""
        exports, before = exports_of(mounts, self._ids), self._ganesha.pid
        if before is None:
            await self._ganesha.stop()
            await self._ganesha.start(exports)
        else:
            paths = {mount.path for mount in renewed}
            await self._ganesha.reload(exports, {export.export_id for export in exports if export.path in paths})
        self._mounts = mounts
        if self._ganesha.pid != before:
            self._note_grace()

    async def find_problems(self, mounts: Sequence[Mount]) -> served.ServiceProblems:
        """Return why the server, or some of these mounts, are not served at this moment.

        It lists the exports whose root it holds open.
        """
        if self._ganesha.is_held:
            return served.ServiceProblems(
                "nfs-ganesha was ended until what its clients have files open of is mounted again"
            )
        if self._ganesha.pid is None:
            return served.ServiceProblems("nfs-ganesha has ended")
        if not await self._ganesha.answers():
            return served.ServiceProblems(f"nfs-ganesha does not answer; see {self._ganesha.log}")
        ids = {export.path: export.export_id for export in exports_of(mounts, self._ids, store=False)}
        current = self._ganesha.current()

        def problem(mount: Mount) -> str | None:
            if ids[mount.path] not in current:
                return f"nfs-ganesha does not export it; see {self._ganesha.log}"
            source = served.admitted_from(mount)
            if source is None:
                return None
            host = self._ganesha.bind_addr or source
            return served.by_lookup(host, self._ganesha.port, pseudo_path(mount), source)

        return served.ServiceProblems(mounts=await served.each(mounts, problem))

    def wants_local_locks(self) -> bool:
        """Yes: what clients have locked shows only in locks that the kernel handles (`ganeshastate`)."""
        return True

    async def hold(self) -> None:
        """Have clients wait that have files open of what was unmounted just now; the others get an error."""
        await self._ganesha.hold()

    async def repair(self) -> str | None:
        """Start nfs-ganesha again if it has ended, or export again what it has lost; return what was wrong."""
        if self._ganesha.is_held:
            return None  # until `change`
        if self._ganesha.pid is None:
            await self._ganesha.stop()
            await self.start(self._mounts)
            return "nfs-ganesha had ended; started again"
        current = self._ganesha.current()
        exports = exports_of(self._mounts, self._ids, store=False)
        lost = {export.export_id for export in exports} - current
        if not lost:
            return None
        await self._ganesha.reload(exports, lost)
        return f"nfs-ganesha did not export {', '.join(e.path for e in exports if e.export_id in lost)}; exported again"

    def notes(self) -> list[str]:
        """Return that clients are in their grace time, if they are."""
        return [self._started] if self._started and self._ganesha.is_in_grace else []

    def _note_grace(self) -> None:
        if self._ganesha.is_in_grace:
            self._started = (
                f"{time.strftime('%Y-%m-%d %H:%M:%S')}: nfs-ganesha was started; until NFSv4 clients have claimed what "
                f"they had locked, for {GRACE_SECONDS} s at most, they wait if they open or lock anything else"
            )
            log.warning("%s", self._started)

    async def stop(self) -> None:
        """End nfs-ganesha, and unmount what it exported."""
        await self._ganesha.stop()


def exports_of(mounts: Sequence[Mount], ids: str, *, store: bool = True) -> list[GaneshaExport]:
    """Return what nfs-ganesha is to export for these mounts; new ones get numbers, which the file `ids` stores.

    Raises:
        ServerError: there are too many exports, or the version of the file is not known.
        OSError: the file cannot be written.
    """
    before = _read(ids)
    known = dict(before)
    exports = []
    for mount in mounts:
        key = "\0".join((mount.source, mount.client, mount.view))
        if key not in known:
            known[key] = max(known.values(), default=0) + 1
            if known[key] > _MOST_EXPORTS:
                raise ServerError(f"more than {_MOST_EXPORTS} exports; remove {ids} (clients then have to mount again)")
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        exports.append(
            GaneshaExport(
                export_id=known[key],
                path=mount.path,
                pseudo=pseudo_path(mount),
                clients=mount.client,
                read_only=mount.options.read_only,
                security=tuple((dict(mount.options.other).get("sec") or "sys").replace("unix", "sys").split(":")),
                filesystem_id=(int.from_bytes(digest[:8]) >> 1 | 1, int.from_bytes(digest[8:]) >> 1),
            )
        )
    if store and known != before:
        ownfiles.makedirs(os.path.dirname(ids), mode=0o700, exist_ok=True)
        ownfiles.replace(ids, json.dumps({_VERSION_KEY: VERSION, **known}).encode(), durable=True)
    return exports


def _read(ids: str) -> dict[str, int]:
    if not ownfiles.exists(ids):
        return {}
    with ownfiles.open(ids, encoding="utf-8") as file:
        known: dict[str, int] = json.load(file)
    version = known.pop(_VERSION_KEY, None)
    if not is_known(version, VERSION):
        hint = "use the cloakfs that wrote it, or remove it (clients then have to mount again)"
        raise ServerError(version_problem(ids, version, VERSION, hint))
    return known


def pseudo_path(mount: Mount) -> str:
    """Return the path that clients mount: `/home@10.1.0.0_16`, for one of several views `/home@10.1.0.0_16/@ann`."""
    name, plus, view = mount.name.rpartition("+")
    return f"/{name}/@{view}" if plus and mount.view else f"/{mount.name}"
