"""The kernel's NFS server: the export options of each mount, and how the server is started, checked and stopped."""

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from ipaddress import ip_network

import trio

from ..config.errors import Remark
from ..config.files import files_of, read_all
from ..config.lint import ROOT_FSID, beside_root, fsid_of, same_fsid
from ..config.options import CONDITIONS
from ..config.values import host_of
from ..linux import mountinfo, ownfiles, process, programs
from ..state.runtime import mounted
from . import hosts, nfsdrestart, nfsdstate, root, served
from .plan import Mount, Plan
from .rpc import null_call
from .server import ServerError, run

log = logging.getLogger(__name__)

_NFS = 100003
_PORT = 2049
_THREADS = 8
_ANSWER_SECONDS = 30.0
_MOUNTDS = ("rpc.mountd", "nfsv4.exportd")
_CHANNEL = "/net/rpc/nfsd.export/channel"  # on which the kernel asks them
_RESTART_SECONDS = 5.0
_RESTARTED_BY_OTHERS_SECONDS = 1.0  # an administrator or systemd may be doing so just now
_EXPORTFS = "/usr/sbin/exportfs"
_RESUMED = "a restart of the threads of the kernel's NFS server had been interrupted; they are started again"
_UNKNOWN_OPTION = "asked_by_cloakfs"
_ETAB = "/var/lib/nfs/etab"
_EXPORTS = "/etc/exports"
_EXPORTS_D = "/etc/exports.d"


def export_options(mount: Mount) -> str:
    """Return the options of exports(5) under which the kernel's server exports a mount.

    - `mp`: while nothing is mounted there, nothing is exported, so the real tree never is. An `mp` in the entry refers
      to the real tree, of which the server knows nothing; the guard applies it.
    - `fsid=`: a FUSE mount has no identity of its own that outlives it. It is derived from source and client unless
      given.
    - `root_squash`, unless root provably may stay root: cloakfs maps and squashes, but the kernel lets root share
      files that others have open without asking the daemon (`root`).
    """
    given = dict(mount.options.other)
    words = ["ro" if mount.options.read_only else "rw", "mp", *root.words(mount.options)]
    if "no_subtree_check" not in given and "subtree_check" not in given:
        words.append("no_subtree_check")
    words += [name if value is None else f"{name}={value}" for name, value in given.items() if name not in CONDITIONS]
    if "fsid" not in given:
        words.append(f"fsid={_fsid(mount)}")
    return ",".join(words)


def _fsid(mount: Mount) -> uuid.UUID:
    key = f"{mount.source}\0{mount.client}".encode("utf-8", "surrogateescape")
    return uuid.UUID(bytes=hashlib.blake2b(key, digest_size=16).digest())


def render(mounts: Iterable[Mount]) -> str:
    """Return the text of exports(5) that is equivalent to the commands with which `Knfsd` configures the server."""
    return "".join(f"{mount.path} {mount.client}({export_options(mount)})\n" for mount in mounts)


def unknown_options(mounts: Sequence[Mount]) -> list[Remark]:
    """Return the options that this machine's exportfs(8) does not know, and with which it would refuse to export.

    It is called with all of them, and at the end one that it cannot know, so that the call never exports anything. It
    does not resolve the name of a wildcard.
    """
    words = {word: mount for mount in reversed(mounts) for word in export_options(mount).split(",")}
    said: list[Remark] = []
    while True:
        try:
            tried = programs.run(
                [_EXPORTFS, "-o", ",".join([*words, _UNKNOWN_OPTION]), "*.cloakfs.invalid:/"],
                capture_output=True, text=True, errors="replace", check=False, env={"LC_ALL": "C"},
            )  # fmt: skip
        except OSError:
            return said  # `up` will say that it is not there
        found = re.search(r'unknown keyword "([^"]*)"', tried.stderr)
        if found is None or found[1] not in words:
            return said
        said.append(
            Remark(words.pop(found[1]).location, f"{found[1]}: the exportfs of this machine does not know this option")
        )


def conflicts_with_others(made: Plan, own: Collection[str] = ()) -> list[Remark]:
    """Return which mounts the server would confuse with what this machine exports elsewhere, because of their fsid.

    Args:
        made: the plan.
        own: the paths that this service exports now.
    """
    given = [(mount, fsid) for mount in made.mounts if (fsid := fsid_of(mount.options)) is not None]
    others = _other_exports(made, own) if given else []
    found = []
    for mount, fsid in given:
        same = [path for path, other in others if other == fsid]
        if fsid == ROOT_FSID and others:
            found.append(Remark(mount.location, beside_root(others[0][0])))
        elif same:
            text = f"fsid={fsid} is that of {same[0]}, too, which this machine exports: give each its own, or none"
            found.append(Remark(mount.location, text))
    return found


def remarks(made: Plan, own: Collection[str] = ()) -> list[Remark]:
    """Return warnings of what the configuration of this machine's server means for some of the mounts.

    Args:
        made: the plan.
        own: the paths that this service exports now.
    """
    return [*_out_of_reach(made, own), *_manage_gids_warnings(made.mounts)]


def _out_of_reach(made: Plan, own: Collection[str]) -> list[Remark]:
    """Return a warning for each mount that is not below the root that an administrator chose for NFSv4."""
    tops = [path for path, fsid in _other_exports(made, own) if fsid == ROOT_FSID]
    return [
        Remark(
            mount.location,
            f"{tops[0]} is the root of this machine's NFSv4 exports (fsid=0): over NFSv4, clients reach only what is "
            f"below it, and {mount.path} is not (--root chooses where the mounts are)",
        )
        for mount in made.mounts
        if tops and not any(f"{mount.path}/".startswith(f"{top.rstrip('/')}/") for top in tops)
    ]


def _other_exports(made: Plan, own: Collection[str]) -> list[tuple[str, str | None]]:
    """Return the paths that this machine exports elsewhere, or would if the server started, each with its fsid, if any.

    What cannot be read is named by its place.
    """
    found: list[tuple[str, str | None]] = []
    with contextlib.suppress(OSError), ownfiles.open(_ETAB, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path, _, to = line.rstrip("\n").partition("\t")
            given = re.search(r"[(,]fsid=([^,)]*)", to)
            found.append((path, given and same_fsid(given[1])))
    for name in (_EXPORTS, *files_of(_EXPORTS_D)):
        with contextlib.suppress(OSError):
            entries, _, errors = read_all(name)
            found += [(entry.path, fsid_of(entry.options)) for entry in entries]
            # The server may know options that cloakfs does not.
            found += [(f"what {error.location} exports", None) for error in errors]
    ours = {*own, *(mount.path for mount in made.mounts)}
    return [(path, fsid) for path, fsid in found if path not in ours]


def _manage_gids_warnings(mounts: Iterable[Mount]) -> list[Remark]:
    if not _manages_gids():
        return []
    return [
        Remark(
            mount.location,
            "mountd's manage-gids is on: groups are looked up by the client's uid, which is another user's on the "
            "server; set it to n in /etc/nfs.conf while ids are mapped (cloakfs looks groups up in the database in any "
            "case)",
        )
        for mount in mounts
        if mount.options.range_map or mount.options.has_plugin
    ]


def _manages_gids() -> bool:
    try:
        said = programs.run(
            ["/usr/sbin/nfsconf", "--get", "mountd", "manage-gids"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return False
    return said.strip().lower() in ("y", "yes", "1", "true", "t", "on")


class Knfsd:
    """The kernel's server as an `NfsServer`. One that is already running is used as it is, and left running.

    Args:
        protocols: NFS versions to start the server with if it is not running: 4, or 3 and 4.
        still_exported: mounts that are exported already (`export_unmounted`), and whose clients wait for them.
    """

    def __init__(self, protocols: Sequence[int] = (4,), still_exported: Sequence[Mount] = ()) -> None:
        self._protocols = protocols
        self._mounts: tuple[Mount, ...] = tuple(still_exported)
        self._is_own_server = False
        self._foreign_config: nfsdrestart.NfsdConfig | None = None  # a server that others started, as it last ran
        self._mountd: programs.Popen | None = None
        self._restarted = ""  # when and why the threads were, for people
        self._not_reclaimed: str | None = None  # why clients cannot use files that they hold

    async def start(self, mounts: Sequence[Mount]) -> None:
        """Export the mounts; start the server if it does not run, and return when it answers."""
        try:
            async with nfsdrestart.exclusive():
                await _resume()
                if _threads():
                    await self._save_config()
                else:
                    await self._start_server()
        except OSError as exc:
            raise ServerError(str(exc)) from exc
        await self.change(mounts, ())
        await self._wait_for_answer()

    def wants_local_locks(self) -> bool:
        """Whether NFSv3 is served: FUSE refuses its lock manager's locks if the file system handles locks (ENOLCK)."""
        with contextlib.suppress(OSError):
            return 3 in (_versions() if _threads() else self._protocols)
        return True

    async def _save_config(self) -> None:
        """Record the configuration of a server that others started, so that it can be started again as it is."""
        self._protocols = _versions()
        found = nfsdrestart.NfsdConfig(
            (_threads(),), "", ()
        )  # the rest is that of nfs.conf(5), if it cannot be found out
        with contextlib.suppress(ServerError):
            found = await trio.to_thread.run_sync(nfsdrestart.current_config)
        if any(found.threads):
            self._foreign_config = found

    async def _need_rpcbind(self) -> None:
        if 3 in self._protocols and not await _answers(111, 100000, 2):
            raise ServerError(
                "rpcbind does not answer, and NFSv3 needs it: apt install rpcbind, start it, or use --protocols 4"
            )

    async def _start_server(self) -> None:
        await self._need_rpcbind()
        self._is_own_server = True
        if ownfiles.isdir("/run/systemd/system"):
            await run("systemctl", "start", "nfs-server", hint="apt install nfs-kernel-server")
            return
        with contextlib.suppress(ServerError):
            await run("modprobe", "nfsd")
        if not ownfiles.exists("/proc/fs/nfsd/threads"):
            await run(
                "mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd", hint="does this kernel have nfsd? (modprobe nfsd)"
            )
        without = [] if 3 in self._protocols else ["--no-nfs-version", "3"]
        await run(
            "rpc.nfsd", *without, str(_THREADS), hint="apt install nfs-kernel-server; is port 2049 free? (ss -lntp)"
        )
        if not _threads():
            raise ServerError(
                "rpc.nfsd started no threads; is port 2049 free? (ss -lntp); see the kernel's log (dmesg)"
            )
        self._start_mountd()

    def _start_mountd(self) -> None:
        without = [] if 3 in self._protocols else ["--no-nfs-version", "3"]
        # It runs in the foreground, so that it can be ended by its pid; like any mountd, it reads /etc/exports, too.
        self._mountd = programs.Popen(
            ["/usr/sbin/rpc.mountd", "--foreground", *without], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    async def _start_again(self, found: nfsdrestart.NfsdConfig) -> None:
        """Start a server again that others had started, with its configuration of before."""
        await self._need_rpcbind()
        if ownfiles.isdir("/run/systemd/system"):  # it knows what belongs to the server
            with contextlib.suppress(ServerError):
                await run("systemctl", "start", "nfs-server")
        if not _threads():
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(nfsdrestart.start, found)
        if not await trio.to_thread.run_sync(_has_mountd):
            self._start_mountd()

    async def _wait_for_answer(self) -> None:
        with trio.move_on_after(_ANSWER_SECONDS):
            for version in _versions():
                while not await _answers(_PORT, _NFS, version):
                    await trio.sleep(0.05)
            return
        raise ServerError(f"the kernel's NFS server does not answer on port {_PORT} within {_ANSWER_SECONDS:g} s")

    async def change(self, mounts: Sequence[Mount], renewed: Sequence[Mount]) -> None:
        """Export these mounts, and no others of this service; `renewed` have replaced old mounts at their paths."""
        with contextlib.suppress(OSError):  # before clients can hold files of them
            nfsdstate.note_mounts(mount.path for mount in mounts)
        # Before the server learns of a new mount: until then, clients wait. Then each use of a file of the old one
        # would fail.
        await self._restart_for_reclaim(mounts)
        wanted = {(mount.path, mount.client) for mount in mounts}
        await _unexport(pair for mount in self._mounts if (pair := (mount.path, mount.client)) not in wanted)
        before = {mount: export_options(mount) for mount in self._mounts}
        self._mounts = tuple(mounts)
        unlisted = await _unlisted(mounts)
        for mount in mounts:
            if before.get(mount) != export_options(mount) or mount in renewed:
                await _export(mount)
            elif mount in unlisted:  # withdrawn by others; a failure need not keep the other mounts from being changed
                with contextlib.suppress(ServerError):
                    await _export(mount)
        # The kernel caches the root of an export, and where it is mounted.
        await run("exportfs", "-f")

    async def hold(self) -> None:
        """Have clients wait for what is exported and was unmounted just now."""
        await hold()

    async def _restart_for_reclaim(self, mounts: Sequence[Mount]) -> None:
        """Have NFSv4 clients claim what they hold of mounts that have been replaced by these.

        The threads of the server are restarted, and all its clients notice. If it must not be, `repair` says so.
        """
        self._not_reclaimed = None
        lost = await _lost(mounts)
        if not lost:
            return
        paths = ", ".join(sorted(set(lost.values())))
        clients = nfsdstate.clients()
        holders = ", ".join(sorted(client.address for client in clients if client.devices & lost.keys()))
        try:
            async with nfsdrestart.exclusive() as lock:
                if not await _lost(mounts):
                    return  # another service has restarted the threads meanwhile
                with_files = [client for client in nfsdstate.clients() if client.devices]
                names = [client.name for client in with_files]
                if unrecorded := await trio.to_thread.run_sync(nfsdstate.unrecorded, names):
                    others = ", ".join(client.address for client in with_files if client.name in unrecorded)
                    raise ServerError(
                        f"there is no record of {others} on disk, without which locks are lost (nfsdcld(8))"
                    )
                await nfsdrestart.restart_apart(lock)
        except (ServerError, OSError) as exc:
            threads = _threads() or _THREADS
            self._not_reclaimed = (
                f"NFSv4 clients ({holders}) hold files of an earlier mount of {paths}, and get errors until the "
                f"server's threads are restarted, which was not done: {exc}; rpc.nfsd 0; rpc.nfsd {threads}"
            )
            return
        self._restarted = (
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}: the threads of the kernel's NFS server were restarted, so that "
            f"NFSv4 clients ({holders}) claim the files again that they hold of {paths}"
        )
        log.warning("%s; %s", self._restarted, _grace())

    async def _are_all_served(self) -> bool:
        """Whether there is a daemon for each mount: where there is none, clients would claim their files in vain."""
        served_mounts = await trio.to_thread.run_sync(mounted)
        return all(mount.path in served_mounts for mount in self._mounts)

    def notes(self) -> list[str]:
        """Return what administrators should know: a restart of the threads."""
        if not self._restarted:
            return []
        return [self._restarted + (f"; {_grace()}" if nfsdrestart.is_in_grace() else "")]

    async def find_problems(self, mounts: Sequence[Mount]) -> served.ServiceProblems:
        """Return why the server, or some of these mounts, are not served at this moment."""
        if not _threads():
            with contextlib.suppress(ServerError, OSError):
                async with nfsdrestart.exclusive(_RESTART_SECONDS):  # it may be restarted just now
                    pass
        if not _threads():
            return served.ServiceProblems(
                "the kernel's NFS server has no threads (rpc.nfsd, systemctl status nfs-server)"
            )
        if not await trio.to_thread.run_sync(_has_mountd):
            return served.ServiceProblems(
                "rpc.mountd does not run, or is stopped; without it, the kernel's NFS server knows no client for long "
                "(systemctl status nfs-mountd)"
            )
        versions = _versions()
        for version in versions:
            if not await _answers(_PORT, _NFS, version):
                return served.ServiceProblems(f"the kernel's NFS server does not answer on port {_PORT}")
        problem = partial(_problem, exported=_exported(), top=_root_of_nfs4(), versions=versions)
        return served.ServiceProblems(mounts=await served.each(mounts, problem))

    async def repair(self) -> str | None:
        """Start the server again if it has ended, and export again what was withdrawn; return what was wrong."""
        try:
            return await self._repair()
        except OSError as exc:
            raise ServerError(str(exc)) from exc

    async def _repair(self) -> str | None:
        said = None
        with contextlib.suppress(nfsdrestart.Busy):  # it is checked the next time
            async with nfsdrestart.exclusive(0):
                said = await self._restart_if_stopped()
        failure = None
        for mount in await _unlisted(self._mounts):
            try:
                await _export(mount)
                said = said or f"{mount.path} was not exported any more (exportfs -r, or a restart?); exported again"
            except ServerError as exc:
                failure = failure or exc
        if failure is not None:
            raise failure
        # There may be some only now: that a client holds a file shows when the client comes back, for example.
        if (self._not_reclaimed or await _lost(self._mounts)) and await self._are_all_served():
            await self._restart_for_reclaim(self._mounts)
        if self._not_reclaimed:
            raise ServerError(self._not_reclaimed)
        return said

    async def _restart_if_stopped(self) -> str | None:
        if await _resume():
            return _RESUMED
        if not _threads():
            await trio.sleep(_RESTARTED_BY_OTHERS_SECONDS)
        if not _threads():
            if self._foreign_config is None:
                await self._start_server()
            else:
                await self._start_again(self._foreign_config)
            return "the kernel's NFS server had no threads any more; started again"
        if not self._is_own_server:
            await self._save_config()
        if self._mountd is not None and self._mountd.poll() is not None:
            self._start_mountd()
            return "rpc.mountd had ended; started again"
        return None

    async def stop(self) -> None:
        """Stop exporting the mounts, and stop the server if it was started by `start`."""
        if self._is_own_server:
            # First, so that clients wait for it to come back, and do not get ESTALE.
            async with contextlib.AsyncExitStack() as stack:
                with contextlib.suppress(ServerError, OSError):
                    await stack.enter_async_context(nfsdrestart.exclusive())
                await self._stop_server()
        with contextlib.suppress(ServerError):
            await self.change((), ())

    async def _stop_server(self) -> None:
        if ownfiles.isdir("/run/systemd/system"):
            with contextlib.suppress(ServerError):
                await run("systemctl", "stop", "nfs-server")
            return
        with contextlib.suppress(ServerError):
            await run("rpc.nfsd", "0")
        if self._mountd is not None:
            self._mountd.terminate()
            await trio.to_thread.run_sync(self._mountd.wait)
            self._mountd = None


async def hold() -> None:
    """Have clients wait for what is exported and was unmounted just now: until `NfsServer.change`."""
    # Only where the threads will be restarted: nothing else ends the wait before two minutes have passed.
    with contextlib.suppress(OSError):
        if await trio.to_thread.run_sync(nfsdstate.are_unmounted_held):
            nfsdstate.flush_export_caches()


async def export_unmounted(mounts: Iterable[Mount]) -> list[Mount]:
    """Export mounts that an earlier process exported, with their present options, while they are not mounted.

    Returns:
        those for which this succeeded; the others are exported no more.
    """
    still_exported = []
    for mount in mounts:
        try:
            await _export(mount)
            still_exported.append(mount)
        except ServerError:
            await _unexport([(mount.path, mount.client)])
    return still_exported


async def unexport(exports: Iterable[tuple[str, str]]) -> None:
    """Withdraw exports of paths to clients that an earlier process made, if they still exist."""
    await _unexport(exports)
    with contextlib.suppress(ServerError):
        await run("exportfs", "-f")


async def _unexport(exports: Iterable[tuple[str, str]]) -> None:
    for path, client in exports:
        with contextlib.suppress(ServerError):  # it is withdrawn already
            await run("exportfs", "-u", _specification(path, client))


def _specification(path: str, client: str) -> str:
    return f"[{client}]:{path}" if ":" in client else f"{client}:{path}"


async def _lost(mounts: Iterable[Mount]) -> dict[str, str]:
    """Return what `nfsdstate.lost_mounts` does of the paths of these mounts."""
    paths = {mount.path for mount in mounts}
    lost = await trio.to_thread.run_sync(nfsdstate.lost_mounts)
    return {device: path for device, path in lost.items() if path in paths}


async def resume() -> None:
    """Start the server's threads if a process was killed that had stopped them to start them again.

    Raises:
        ServerError: they are not as before.
        OSError: they cannot be started.
    """
    async with nfsdrestart.exclusive():
        await _resume()


async def _resume() -> bool:
    """Start the threads, within `exclusive`, that a killed process had stopped; return whether there were any."""
    with trio.CancelScope(shield=True):
        if not await trio.to_thread.run_sync(nfsdrestart.resume):
            return False
    log.warning("%s", _RESUMED)
    return True


async def _export(mount: Mount) -> None:
    """Export a mount.

    Raises:
        ServerError: exportfs refuses, or says that it has exported it, and has not: to an unknown host, for example.
    """
    where = _specification(mount.path, mount.client)
    said = await run("exportfs", "-o", export_options(mount), where, hint="apt install nfs-kernel-server", errors=True)
    if await _unlisted([mount]):
        raise ServerError(f"{mount.path}: exportfs did not export it to {mount.client}: {' '.join(said.split())}")


def _grace() -> str:
    return (
        f"until they have, and for {nfsdrestart.grace_seconds()} s at most, no NFSv4 client of this machine opens or "
        "locks anything else"
    )


def _threads() -> int:
    with contextlib.suppress(OSError, ValueError), ownfiles.open("/proc/fs/nfsd/threads", encoding="ascii") as file:
        return int(file.read())
    return 0


def _versions() -> list[int]:
    """Return the major NFS versions that the server supports."""
    with ownfiles.open("/proc/fs/nfsd/versions", encoding="ascii") as file:
        words = file.read().split()
    return [version for version in (3, 4) if f"+{version}" in words]


def _has_mountd() -> bool:
    """Whether a program tells the kernel's server of this network who may mount what: rpc.mountd(8), nfsv4.exportd(8).

    A name alone says nothing: any user may choose it for a program, and a container may have a server of its own.
    """
    return any(
        process.command_of(int(name)) in _MOUNTDS and _answers_the_kernel(int(name))
        for name in ownfiles.listdir("/proc")
        if name.isdigit()
    )


def _answers_the_kernel(pid: int) -> bool:
    """Whether a process has the kernel's questions about exports open, and goes on."""
    try:
        if process.is_stopped(pid) or ownfiles.readlink(f"/proc/{pid}/ns/net") != ownfiles.readlink(
            "/proc/self/ns/net"
        ):
            return False
        descriptors = ownfiles.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for fd in descriptors:
        with contextlib.suppress(OSError):
            if ownfiles.readlink(f"/proc/{pid}/fd/{fd}").endswith(_CHANNEL):
                return True
    return False


def _problem(mount: Mount, *, exported: dict[str, set[str]], top: str, versions: Collection[int]) -> str | None:
    """Return why a mount is not served to its client at this moment; None if it is, or this machine is no client of it.

    Args:
        mount: the mount.
        exported: what the server's table lists (`_exported`).
        top: the path of which NFSv4 clients see nothing.
        versions: the major NFS versions of the server.
    """
    if not _is_listed(mount, exported):
        return f"the server's table does not list it for {mount.client} (exportfs -v)"
    host = host_of(mount.client)
    if host is not None and (why := hosts.problem(host)):
        return f"{host} cannot be resolved ({why}), so that mountd does not know this client any more"
    source = served.admitted_from(mount)
    if source is None:
        return None
    # It listens on the address from which this machine asks.
    if 4 not in versions:
        return served.by_mount(source, mount.path, source)
    below_top = f"{mount.path}/".startswith(f"{top.rstrip('/')}/")
    path = mount.path[len(top.rstrip("/")) :] if below_top else mount.path
    said = served.by_lookup(source, _PORT, path, source)
    # The root of NFSv4 does not concern clients of NFSv3.
    if said and 3 in versions and served.by_mount(source, mount.path, source) is None:
        return None
    return said


def _exported() -> dict[str, set[str]]:
    """Return the paths that mountd would let clients mount, each with these clients, as mountd calls them."""
    found: dict[str, set[str]] = {}
    with contextlib.suppress(OSError), ownfiles.open(_ETAB, "rb") as file:
        for line in file:
            path, tab, rest = line.partition(b"\t")
            if tab:
                client = os.fsdecode(rest.partition(b"(")[0])
                found.setdefault(mountinfo.unescaped(path), set()).add(client)
    return found


def _root_of_nfs4() -> str:
    """Return the path of which NFSv4 clients see nothing: `/`, unless an administrator has exported another as root."""
    with contextlib.suppress(OSError), ownfiles.open(_ETAB, "rb") as file:
        for line in file:
            path, _, to = line.rstrip(b"\n").partition(b"\t")
            if b"fsid=0" in re.split(rb"[(),]", to):
                return mountinfo.unescaped(path)
    return "/"


async def _unlisted(mounts: Sequence[Mount]) -> list[Mount]:
    """Return those of the mounts that the server's table does not list for their clients."""

    def find() -> list[Mount]:
        exported = _exported()
        return [mount for mount in mounts if not _is_listed(mount, exported)]

    return await trio.to_thread.run_sync(find)  # it may wait for DNS


def _is_listed(mount: Mount, exported: dict[str, set[str]]) -> bool:
    """Whether the server's table lists a mount for its client, also if it calls the client otherwise.

    exportfs writes the canonical name of a host, and an address as it likes.
    """
    clients = exported.get(mount.path, set())
    return mount.client in clients or any(_is_same(mount.client, other) for other in clients)


def _is_same(one: str, other: str) -> bool:
    try:
        return ip_network(one, strict=False) == ip_network(other, strict=False)
    except ValueError:
        pass
    if host_of(one) is None or host_of(other) is None:
        return False
    try:
        return not hosts.addresses_of(one).isdisjoint(hosts.addresses_of(other))
    except (OSError, UnicodeError):
        return False


async def _answers(port: int, program: int, version: int) -> bool:
    return await trio.to_thread.run_sync(null_call, "127.0.0.1", port, program, version, 2.0)
