"""An unmodified nfs-ganesha with one export for each fixed view: its configuration, and its process.

The following was measured with nfs-ganesha 4.3 (Debian 12), or read in its source where it is marked so; the tests find
6.5 (Debian 13) to be the same:

- Identity. FSAL_VFS accesses a file system as root for every caller, except where it creates, writes or removes. With
  `Squash = All_Squash` and anonymous ids 0:0 it is always root, and its own permission check says yes. A fixed view
  admits root and serves it as its identity, so cloakfs decides everything, with the identity's supplementary groups.
  The price is that Ganesha answers each ACCESS request with "yes"; the refusal comes with the operation itself.
- Freshness. Attribute times of 0 and `Dir_Chunk = 0` make every request reach the file system.
- **The way up.** When FSAL_VFS creates an export, it looks up ".." at the export's root, and takes the file system that
  it gets to into the export (read: check_filesystem, claim_posix_filesystems). From then on, clients that make up a
  handle (file system id and inode 2) can access, as root, the file system that the mount point lies on. So what is
  exported is a bind mount below `exports/`, an empty file system of its own, which is all that can be found above. It
  is a ramfs, which has no file handles: with a tmpfs, a client that knew one of its handles could go further up. The
  bind mount also means that nothing but a dead mount is left when the original is unmounted.
- One mount for each view. Ganesha tells exports apart by their file systems. On a mount with several views, a handle of
  one view would be accepted in the exports of the others, from any client that knows it.
"""

import contextlib
import errno
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import trio

from .. import linux
from ..fuse.detach import KINDS
from ..linux import mountinfo, ownfiles, programs
from . import ganeshastate
from .ending import end
from .rpc import MOUNT, NFS, RPCBIND, null_call
from .server import ServerError

PROGRAM = "ganesha.nfsd"
NFS_PORT = 2049
MOUNT_PORT = 20048

GRACE_SECONDS = 30
"""How long clients have, after a start, to claim what they held of the server before; and how long a lease is.

The Linux client renews a lease after two thirds of it, and so learns of the start in time, even if no program uses it.
"""

START_SECONDS = 30.0
STOP_SECONDS = 10.0
RELOAD_SECONDS = 20.0

_POLL_SECONDS = 0.02
_STAT_SECONDS = 10.0
_MOUNT_TABLE = "/etc/mtab"
_SECURITY = ("none", "sys", "krb5", "krb5i", "krb5p")

_RELEASE = re.compile(r"\bV(\d+)")
# From some release after 4.3 on, it ends at the start where it may not call prctl(PR_SET_IO_FLUSHER), which takes
# CAP_SYS_RESOURCE, as in many containers; unless it is told not to. 4.3 does not know this key, complains at each
# reload, and that is then taken for a failed one.
_KNOWS_IO_FLUSHER = 6

# Its scanner cannot tell where a string with a backslash ends, and mixes up strings that contain quotes (read).
_UNQUOTABLE = re.compile(r"[\x00-\x1f\x7f\"\\]")
_HOST = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_NETGROUP = re.compile(r"@[A-Za-z_][A-Za-z0-9_.-]*")
_WILDCARD = re.compile(r"[A-Za-z0-9._*?\[\]!-]+")

_SERIOUS = re.compile(r" :[A-Z0-9 _]+ :(?:FATAL|MAJ|CRIT|WARN) :(.*)")
_FATAL = re.compile(r" :[A-Z0-9 _]+ :FATAL :(.*)")
# What it also logs when all is well: without D-Bus, without Kerberos, without rpcbind for NFSv4, without limits.
_HARMLESS = re.compile(
    r"dbus|RADOS|NFS CB|gssd|krb5|Cannot register NFS V4|ID MAPPER|ResourceLimit|RLIMIT|VSOCK", re.IGNORECASE
)


_MS_BIND, _MS_PRIVATE = 1 << 12, 1 << 18
_FLAGS = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC


@dataclass(frozen=True, slots=True)
class GaneshaExport:
    """One fixed view for some clients.

    Attributes:
        export_id: 1 to 65535, unique; part of every file handle, so it must stay the same.
        path: where the view is: a cloakfs mount, or a directory of one.
        pseudo: the absolute path by which clients mount it, unique.
        clients: as in exports(5): `*`, a host, an address, a network, `@netgroup` or a wildcard.
        read_only: whether to refuse every change.
        security: the flavours that are allowed: none, sys, krb5, krb5i, krb5p.
        filesystem_id: major and minor of the fsid that clients see (63 bits each: the server refuses more), unique.
    """

    export_id: int
    path: str
    pseudo: str
    clients: str
    read_only: bool
    security: tuple[str, ...]
    filesystem_id: tuple[int, int]


# -- the configuration, as text --------------------------------------------------------------------


def render(
    exports: Sequence[GaneshaExport],
    *,
    state_dir: str,
    port: int,
    bind_addr: str | None,
    protocols: tuple[int, ...],
    mount_port: int = MOUNT_PORT,
    release: int = 0,
) -> str:
    """Return the whole of ganesha.conf; the same arguments give the same text.

    Args:
        exports: in any order; they are written by export_id.
        state_dir: where the server keeps its log and the records of NFSv4 clients.
        port: the port of NFS, 1 to 65535.
        bind_addr: the one address to listen on (IPv4 or IPv6); None for all.
        protocols: (4,), or (3, 4), which needs rpcbind.
        mount_port: the port of the MOUNT protocol, which only NFSv3 has.
        release: of the server (`installed_release`), which refuses what it does not know; 0 for any.

    Raises:
        ServerError: the server's configuration cannot express one of the values.
    """
    if not protocols or set(protocols) - {3, 4}:
        raise ServerError(f"NFS versions {', '.join(map(str, protocols)) or '(none)'}: only 3 and 4 are served")
    versions = ", ".join(str(version) for version in sorted(set(protocols)))
    kerberos = any(flavour.startswith("krb5") for export in exports for flavour in export.security)
    core = [f"NFS_Port = {_number(port, 'port', 65535)};"]
    if 3 in protocols:
        core.append(f"MNT_Port = {_number(mount_port, 'port', 65535)};")
    if bind_addr is not None:
        core.append(f"Bind_Addr = {_address(bind_addr)};")
    core += [
        f"Protocols = {versions};",
        "Enable_UDP = false;",
        "Enable_NLM = false;",
        "Enable_RQUOTA = false;",
        "mount_path_pseudo = true;",
    ]
    if release >= _KNOWS_IO_FLUSHER:
        core.append("allow_set_io_flusher_fail = true;")
    blocks = [
        _block("NFS_CORE_PARAM", core),
        _block(
            "NFSv4",
            [
                "Graceless = false;",
                f"Lease_Lifetime = {GRACE_SECONDS};",
                f"Grace_Period = {GRACE_SECONDS};",
                "Only_Numeric_Owners = true;",
                "Allow_Numeric_Owners = true;",
                "RecoveryBackend = fs_ng;",
                f"RecoveryRoot = {_quoted(_recovery_of(state_dir))};",
            ],
        ),
        _block(
            "NFS_KRB5",
            [
                f"Active_krb5 = {'true' if kerberos else 'false'};",
                f"CCacheDir = {_quoted(os.path.join(state_dir, 'krb5'))};",
            ],
        ),
        _block("MDCACHE", ["Dir_Chunk = 0;"]),
        *(_export_block(export, versions) for export in sorted(exports, key=lambda export: export.export_id)),
        "LOG {\n"
        "    Default_Log_Level = EVENT;\n"
        "    # Reports that a reload is complete, and its errors.\n"
        "    Components { CONFIG = INFO; }\n"
        f"    Facility {{ name = FILE; destination = {_quoted(_log_of(state_dir))}; enable = active; }}\n"
        "}\n",
    ]
    _require_distinct("export_id", [str(export.export_id) for export in exports])
    _require_distinct("pseudo path", [export.pseudo.rstrip("/") for export in exports])
    _require_distinct("filesystem_id", ["{}.{}".format(*export.filesystem_id) for export in exports])
    return "# Written by cloakfs; changes are lost.\n" + "".join(blocks)


def _require_distinct(what: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ServerError(f"{what} {value}: used by two exports")


def _export_block(export: GaneshaExport, versions: str) -> str:
    if not export.security or set(export.security) - set(_SECURITY):
        shown = ", ".join(export.security) or "(none)"
        raise ServerError(f"{export.pseudo}: security {shown}: expected {', '.join(_SECURITY)}")
    for path in (export.path, export.pseudo):
        if not path.startswith("/"):
            raise ServerError(f"{path}: not an absolute path")
    if export.pseudo.strip("/") == "" or any(part in (".", "..") for part in export.pseudo.split("/")):
        raise ServerError(f"{export.pseudo}: NFSv4 clients need a name below / to mount")
    access = "RO" if export.read_only else "RW"
    major, minor = (_number(part, "filesystem_id", 2**63 - 1, 0) for part in export.filesystem_id)
    lines = [
        f"Export_Id = {_number(export.export_id, 'export_id', 65535)};",
        f"Path = {_quoted(export.path)};",
        f"Pseudo = {_quoted(export.pseudo)};",
        f"Protocols = {versions};",
        "Transports = TCP;",
        f"SecType = {', '.join(export.security)};",
        "# Every caller becomes root: the view serves it as its own identity, and decides.",
        "Squash = All_Squash;",
        "Anonymous_Uid = 0;",
        "Anonymous_Gid = 0;",
        "Attr_Expiration_Time = 0;",
        f"Filesystem_Id = {major}.{minor};",
        "FSAL { Name = VFS; }",
    ]
    clients = _clients(export.clients)
    if clients is None:
        lines.append(f"Access_Type = {access};")
    else:
        lines.append("Access_Type = None;")
        # Without Protocols, a reload complains about those that are not served, and is then taken for a failed one.
        who = f"Clients = {', '.join(clients)}; Access_Type = {access}; Protocols = {versions};"
        lines.append(f"CLIENT {{ {who} }}")
    return _block("EXPORT", lines)


def _block(name: str, lines: Iterable[str]) -> str:
    return f"{name} {{\n" + "".join(f"    {line}\n" for line in lines) + "}\n"


def _number(value: int, what: str, most: int, least: int = 1) -> int:
    if not least <= value <= most:
        raise ServerError(f"{what} {value}: not in {least} to {most}")
    return value


def _quoted(path: str) -> str:
    """Return the path between double quotes, within which nothing but quotes and backslashes is special."""
    if bad := _UNQUOTABLE.search(path):
        raise ServerError(f"{path!r}: nfs-ganesha's configuration cannot express a path with {bad[0]!r}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ServerError(f"{path!r}: NFS paths must be UTF-8") from None
    return f'"{path}"'


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ServerError(f"{text}: not an address to listen on") from None


def _clients(text: str) -> list[str] | None:
    """Translate the clients of an export from exports(5) to ganesha.conf; None means all clients.

    The two differ: in ganesha.conf, 0.0.0.0 means all clients, a prefix length has one or two digits and does not begin
    with 0, and a netmask is not known.
    """
    if text == "*":
        return None
    if text.startswith("@"):
        if not _NETGROUP.fullmatch(text):
            raise ServerError(f"{text}: nfs-ganesha cannot express this netgroup")
        return [text]
    if "/" in text or ":" in text or text.strip("0123456789.") == "":
        return _networks(text)
    if any(char in text for char in "*?["):
        # Ganesha takes a word for a host if its only wildcard is a question mark at the beginning.
        if not _WILDCARD.fullmatch(text) or not any(char in text.removeprefix("?") for char in "*?["):
            raise ServerError(f"{text}: nfs-ganesha cannot express this wildcard")
        return [text]
    if not _HOST.fullmatch(text):
        raise ServerError(f"{text}: nfs-ganesha takes this for something other than a host; give its address")
    return [text]


def _networks(text: str) -> list[str]:
    """Translate an address or a network."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ServerError(f"{text}: not an address or network that nfs-ganesha can be given") from None
    if network.prefixlen == network.max_prefixlen:
        if network.network_address == ipaddress.ip_address("0.0.0.0"):
            raise ServerError(f"{text}: no machine has this address, and nfs-ganesha would take it for every machine")
        return [str(network.network_address)]
    if network.prefixlen == 0:
        return [str(half) for half in network.subnets()]
    if network.prefixlen > 99:
        raise ServerError(f"{text}: nfs-ganesha knows IPv6 networks up to /99 and single addresses")
    return [str(network)]


# -- the machine -----------------------------------------------------------------------------------


def _mount_of(path: str, places: Mapping[str, mountinfo.Place]) -> mountinfo.Place | None:
    """Return the mount that a path, which need not be a mount point, lies on by its name."""
    at = path.rstrip("/")
    while at and at not in places:
        at = os.path.dirname(at).rstrip("/")
    return places.get(at or "/")


def _require_cloakfs(path: str) -> None:
    """Raise ServerError unless a cloakfs mount is at `path`: nothing else is ever exported."""
    place = _mount_of(path, _places())
    if place is None or place.kind not in KINDS:
        raise ServerError(f"{path}: not a cloakfs mount, so it is not exported (cloakfs mount)")


async def _require_answer(path: str) -> None:
    """Raise ServerError unless what is mounted at `path` answers."""
    try:
        with trio.fail_after(_STAT_SECONDS):
            await trio.to_thread.run_sync(ownfiles.stat, path, abandon_on_cancel=True)
    except trio.TooSlowError:
        raise ServerError(f"{path}: its daemon has not answered for {_STAT_SECONDS:g} s") from None
    except OSError as exc:
        raise ServerError(
            f"{path}: {exc.strerror}; has the mount's daemon ended? (umount it and mount it again)"
        ) from None


def _places() -> dict[str, mountinfo.Place]:
    """Return mount point -> the last file system mounted there."""
    return {place.path: place for place in mountinfo.by_id().values()}


def installed_release() -> int:
    """Return the first number of the version of nfs-ganesha that is installed; 0 if it is not known."""
    try:
        done = programs.run([PROGRAM, "-v"], capture_output=True, text=True, timeout=_STAT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _RELEASE.search(done.stdout)
    return int(found[1]) if found else 0


async def _answers(host: str, port: int, program: int, version: int) -> bool:
    return await trio.to_thread.run_sync(null_call, host, port, program, version, abandon_on_cancel=True)


def _honours_bind_addr() -> bool:
    """Whether nfs-ganesha listens on one address alone if `Bind_Addr` says so.

    It asks getaddrinfo(3) for it as an IPv6 address, which yields none on a machine that only has ::1. Then it takes
    the wrong part of the IPv4 answer, which is all zeroes (read). Without an IPv6 stack, all is well.
    """
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return True
    try:
        with ownfiles.open("/proc/net/if_inet6", encoding="ascii") as file:
            return any(not line.startswith(f"{1:032x}") for line in file)
    except FileNotFoundError:
        return False


def _listeners(pid: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of the TCP sockets that a process listens on, from proc_pid_net(5)."""
    # psutil would save fewer than twenty lines, and only in this function: not worth a compiled dependency.
    own = set()
    for fd in ownfiles.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(ownfiles.readlink(f"/proc/{pid}/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            with ownfiles.open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except FileNotFoundError:
            continue
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                # The address consists of 32-bit words in the machine's byte order.
                words = bytes.fromhex(row[1].partition(":")[0])
                packed = b"".join(
                    words[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(words), 4)
                )
                address = ipaddress.ip_address(packed)
                mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
                found.add(mapped or address)
    return found


# -- the process -----------------------------------------------------------------------------------


def _has_open_below(pid: int, mount_points: Collection[str]) -> bool:
    """Whether a process has something open by mounts at these places, apart from their roots; asks no file system."""
    places = {number: place.path for number, place in mountinfo.by_id().items() if place.path in mount_points}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in ownfiles.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = places.get(mountinfo.id_of(int(fd), pid))
                if path is not None and ownfiles.readlink(f"/proc/{pid}/fd/{fd}") != path:
                    return True
    return False


def _log_of(state_dir: str) -> str:
    return os.path.join(state_dir, "ganesha.log")


def _recovery_of(state_dir: str) -> str:
    return os.path.join(state_dir, "recovery")


class Ganesha:
    """One nfs-ganesha server, a child of this process.

    Everything it needs is in its state directory; it uses neither D-Bus nor files of another instance.

    Args:
        state_dir: an absolute path; the directory is made if absent, for root alone.
        port: the port of NFS.
        bind_addr: the one address to listen on; None for all.
        protocols: (4,), or (3, 4), which needs rpcbind.
        mount_port: the port of the MOUNT protocol, for NFSv3.
    """

    def __init__(
        self,
        state_dir: str,
        *,
        port: int = NFS_PORT,
        bind_addr: str | None = None,
        protocols: tuple[int, ...] = (4,),
        mount_port: int = MOUNT_PORT,
    ) -> None:
        self.state_dir = state_dir
        self.port = port
        self.bind_addr = bind_addr
        self.protocols = protocols
        self.mount_port = mount_port
        self.is_held = False
        """Whether it was ended so that clients wait for the next start."""
        self._process: trio.Process | None = None
        self._exports: dict[int, GaneshaExport] = {}
        self._release = 0
        self._one_change = trio.Lock()

    @property
    def log(self) -> str:
        """The path of its log."""
        return _log_of(self.state_dir)

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        if self.is_held or self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def is_in_grace(self) -> bool:
        """Whether it waits for clients to claim what they held of the server before."""
        return self.pid is not None and ganeshastate.is_in_grace(_recovery_of(self.state_dir))

    async def start(self, exports: Sequence[GaneshaExport]) -> None:
        """Start serving `exports`, and return when the server answers.

        Raises:
            ServerError: the server is not installed, its port is taken, rpcbind is missing, it refuses the
                configuration, there is no cloakfs mount at a path, or it would listen on more addresses than
                `bind_addr`.
        """
        if programs.which(PROGRAM) is None:
            raise ServerError(f"{PROGRAM} is not installed (apt install nfs-ganesha nfs-ganesha-vfs)")
        if not ownfiles.exists(_MOUNT_TABLE):
            raise ServerError(
                f"{_MOUNT_TABLE} does not exist, and without it nfs-ganesha exports nothing (ln -s /proc/self/mounts "
                f"{_MOUNT_TABLE})"
            )
        self._release = await trio.to_thread.run_sync(installed_release)
        text = self._render(exports)
        await self._check_hosts(exports)
        ownfiles.makedirs(self.state_dir, mode=0o700, exist_ok=True)
        await self.end_stale_server()
        self._check_ports()
        if 3 in self.protocols and not await _answers("127.0.0.1", 111, RPCBIND, 2):
            raise ServerError(
                "NFSv3 needs rpcbind, which does not answer on port 111 (apt install rpcbind, or NFSv4 alone)"
            )
        try:
            self._make_bind_root()
            for export in exports:
                await _require_answer(export.path)
                self._bind(export)
            self._write(text)
            with contextlib.suppress(FileNotFoundError):
                ownfiles.rename(self.log, f"{self.log}.1")
            for path in (_recovery_of(self.state_dir), os.path.join(self.state_dir, "krb5")):
                ownfiles.makedirs(path, mode=0o700, exist_ok=True)
            ganeshastate.remove_old_records(_recovery_of(self.state_dir))
            await self._spawn()
            self._exports = {export.export_id: export for export in exports}
            self._check_exported(0)
            self._check_listening()
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.stop()
            raise

    async def reload(self, exports: Sequence[GaneshaExport], renewed: Collection[int] = ()) -> None:
        """Serve these exports from now on; clients of exports that stay do not notice.

        Args:
            exports: what to serve.
            renewed: ids of exports whose mounts have been replaced, apart from those whose device shows it.

        Raises:
            ServerError: one of the new ones cannot be served; what was served before is still served, if it can be.
            OSError: the system fails while they are mounted or written, with the same result.
        """
        async with self._one_change:
            self._render(exports)
            await self._check_hosts(exports)
            before, current = list(self._exports.values()), self.current()
            for export in exports:
                _require_cloakfs(export.path)
                if export.export_id not in current or export.export_id in renewed:
                    await _require_answer(export.path)
            try:
                await self._change(before, exports, renewed)
            except (ServerError, OSError):
                with contextlib.suppress(ServerError, OSError):
                    lost = {export.export_id for export in before} - self.current()
                    await self._change(before, before, lost)
                raise

    async def _change(
        self, before: Sequence[GaneshaExport], exports: Sequence[GaneshaExport], renewed: Collection[int]
    ) -> None:
        # It holds on to the path and the root of an export: what has changed there must be seen to go and to come.
        old = {export.export_id: export for export in before}
        places = _places()
        gone = {
            export.export_id
            for export in exports
            if export.export_id in renewed
            or old.get(export.export_id, export).path != export.path
            or self._is_replaced(export, places)
        }
        if gone & (set(self._exports) | self._bound_ids()):
            if await self._are_used(gone):
                await self._kill()
                await self.stop()
                await self.start(exports)
                return
            await self._apply([export for export in before if export.export_id not in gone])
        for export in exports:
            self._bind(export)
        await self._apply(exports)

    def _is_replaced(self, export: GaneshaExport, places: Mapping[str, mountinfo.Place]) -> bool:
        """Whether what is bound for an export is not what is mounted at its path now."""
        bound, now = places.get(self._bind_path(export.export_id)), _mount_of(export.path, places)
        return bound is not None and (now is None or bound.device != now.device)

    # -- what clients use and have locked ------------------------------------------------------------

    async def hold(self) -> None:
        """End the server until the next `start` if clients have files open of a mount that is at its place no more.

        They wait for it then, and go on. Of a server that forgets an export, and what is open and locked of it, Linux
        takes what it uses for gone and what it has locked for lost: all use of these files fails until they are closed.
        """
        async with self._one_change:
            places = _places()
            gone = {export.export_id for export in self._exports.values() if self._is_replaced(export, places)}
            if gone and await self._are_used(gone):
                await self._kill()

    async def _are_used(self, export_ids: Collection[int]) -> bool:
        """Whether the server has something open of what is bound for these exports, apart from their roots."""
        if self.pid is None:
            return False
        bind_paths = {self._bind_path(export_id) for export_id in export_ids}
        return await trio.to_thread.run_sync(_has_open_below, self.pid, bind_paths)

    async def _kill(self) -> None:
        """End the server at once, so that it answers nothing more, least of all with an error."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:  # if it has ended by itself, it is not known what was locked
            self._skip_grace_unless_locked(process.pid)
        self.is_held = True
        process.kill()
        with trio.move_on_after(STOP_SECONDS):  # if a mount hangs, so does its end
            await process.wait()

    def _skip_grace_unless_locked(self, pid: int) -> None:
        """Have the next server start without a grace time if no client of this one has locked anything.

        What is open and not locked, clients open again without being asked for.
        """
        bound = {place.device for path, place in _places().items() if path.startswith(f"{self._bind_root}/")}
        if not bound & ganeshastate.locked_by(pid):
            with contextlib.suppress(OSError):
                ganeshastate.skip_next_grace(_recovery_of(self.state_dir))

    def current(self) -> set[int]:
        """Return the ids of the exports that the server has, according to the directories that it holds open.

        It holds the root of the file system of each export. One whose mount has been replaced does not count.
        """
        if self.pid is None:
            return set()
        mounts = mountinfo.by_id()
        places = {place.path: place for place in mounts.values()}
        held = set()
        with contextlib.suppress(OSError):
            for fd in ownfiles.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    place = mounts.get(mountinfo.id_of(int(fd), self.pid))
                    if place is not None and place.path == ownfiles.readlink(f"/proc/{self.pid}/fd/{fd}"):
                        held.add(place.device)
        return {
            export.export_id
            for export in self._exports.values()
            if (now := _mount_of(export.path, places)) is not None and now.device in held
        }

    async def stop(self) -> None:
        """End the server, by SIGKILL if it does not end in time, and unmount what it exported."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            if not self.is_held:
                self._skip_grace_unless_locked(process.pid)
            process.terminate()
            with trio.move_on_after(STOP_SECONDS):
                await process.wait()
            if process.poll() is None:
                process.kill()
                await process.wait()
        self.is_held = False
        self._exports = {}
        self._clear_bind_root()

    # -- the process itself ------------------------------------------------------------------------

    async def _spawn(self) -> None:
        path = self.state_dir
        for left in ("blkid.tab", "blkid.tab.old"):  # loop devices may have changed meanwhile
            with contextlib.suppress(FileNotFoundError):
                ownfiles.unlink(os.path.join(path, left))
        with ownfiles.open(os.path.join(path, "ganesha.out"), "wb") as out:
            self._process = await trio.lowlevel.open_process(  # noqa: TID251  (a guard acts for no caller)
                [
                    PROGRAM, "-F",
                    "-f", self._config, "-L", _log_of(path), "-p", os.path.join(path, "ganesha.pid"), "-N", "NIV_EVENT",
                ],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                # Otherwise, this file is shared with all other users of libblkid.
                env={**os.environ, "BLKID_FILE": os.path.join(path, "blkid.tab")},
            )  # fmt: skip
        with trio.move_on_after(START_SECONDS):
            while self._process.poll() is None:
                if "NFS SERVER INITIALIZED" in self._log(0) and await self.answers():
                    return
                await trio.sleep(_POLL_SECONDS)
        raise ServerError(f"{PROGRAM} {'does not answer' if self.pid else 'ended'}: {self._problem(0)}")

    async def answers(self) -> bool:
        """Whether it answers on all of its ports."""
        ports = [(self.port, NFS, version) for version in self.protocols]
        if 3 in self.protocols:
            ports.append((self.mount_port, MOUNT, 3))
        return all([await _answers(self._host, port, program, version) for port, program, version in ports])

    @property
    def _host(self) -> str:
        return self.bind_addr or "127.0.0.1"

    async def end_stale_server(self) -> None:
        """End the server that an earlier cloakfs process left running in this state directory.

        It is known by its command line. The file with its pid comes later, when it may have been left already.
        """
        for entry in ownfiles.listdir("/proc"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not entry.isdigit() or ownfiles.stat(f"/proc/{entry}").st_uid != 0:
                    continue
                with ownfiles.open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                if os.path.basename(words[0]) == PROGRAM.encode() and os.fsencode(self._config) in words:
                    self._skip_grace_unless_locked(int(entry))
                    await end(int(entry), ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)))

    # -- addresses ---------------------------------------------------------------------------------

    def _check_ports(self) -> None:
        """Check before the start that the ports are free.

        Otherwise the server would end with a message about something else, or share the port.
        """
        ports = [self.port, *([self.mount_port] if 3 in self.protocols else [])]
        for port in ports:
            for family, host in self._listening():
                try:
                    with socket.socket(family, socket.SOCK_STREAM) as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        if family == socket.AF_INET6:
                            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                        probe.bind((host, port))
                        probe.listen()
                except OSError as exc:
                    if family == socket.AF_INET6 and self.bind_addr is None and exc.errno != errno.EADDRINUSE:
                        continue  # this machine has no IPv6
                    hint = (
                        "another server is there; stop it, or choose another port"
                        if exc.errno == errno.EADDRINUSE
                        else ""
                    )
                    where = f"{self.bind_addr} port {port}" if self.bind_addr else f"port {port}"
                    raise ServerError(f"{where}: {exc.strerror}{'; ' if hint else ''}{hint}") from None
        if self.bind_addr and not _honours_bind_addr():
            raise ServerError(
                f"{self.bind_addr}: nfs-ganesha would listen on every address, for this machine has an IPv6 stack but "
                "no IPv6 address apart from ::1; give an interface one (a link-local is enough), turn IPv6 off "
                "(ipv6.disable=1), or listen everywhere and use a firewall"
            )

    def _listening(self) -> list[tuple[socket.AddressFamily, str]]:
        if self.bind_addr is None:
            return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
        return [(socket.AF_INET6 if ":" in self.bind_addr else socket.AF_INET, self.bind_addr)]

    def _check_listening(self) -> None:
        """Check after the start that the server listens on `bind_addr`, and on no other address.

        Raises:
            ServerError: it listens elsewhere.
        """
        if self.bind_addr is None or self.pid is None:
            return
        wanted = ipaddress.ip_address(self.bind_addr)
        other = {str(address) for address in _listeners(self.pid) if address != wanted}
        if other:
            raise ServerError(
                f"{self.bind_addr}: nfs-ganesha listens on {', '.join(sorted(other))} instead, and was stopped again; "
                "listen on every address and use a firewall"
            )

    # -- configuration and reload ------------------------------------------------------------------

    @property
    def _config(self) -> str:
        return os.path.join(self.state_dir, "ganesha.conf")

    def _render(self, exports: Sequence[GaneshaExport]) -> str:
        return render(
            [replace(export, path=self._bind_path(export.export_id)) for export in exports],
            state_dir=self.state_dir,
            port=self.port,
            bind_addr=self.bind_addr,
            protocols=self.protocols,
            mount_port=self.mount_port,
            release=self._release,
        )

    def _write(self, text: str) -> None:
        ownfiles.replace(self._config, text.encode())

    async def _check_hosts(self, exports: Sequence[GaneshaExport]) -> None:
        """Check that all hosts can be found: Ganesha drops an export with one that cannot, even if it is in use."""
        for export in exports:
            for client in _clients(export.clients) or ():
                if _HOST.fullmatch(client):
                    try:
                        await trio.socket.getaddrinfo(client, None)
                    except OSError as exc:
                        raise ServerError(f"{export.pseudo}: {client}: {exc.strerror}; give its address") from None

    async def _apply(self, exports: Sequence[GaneshaExport]) -> None:
        """Put a configuration into effect, and unmount what it no longer needs.

        Raises:
            ServerError: it is not in effect, or not all of it.
            OSError: it could not be written, and nothing has changed.
        """
        if self.pid is None:
            raise ServerError(f"{PROGRAM} is not running")
        assert self._process is not None
        self._write(self._render(exports))
        at = self._log_size()
        self._process.send_signal(signal.SIGHUP)
        # Until it is known what has come of it, it may have the exports of before and those of now.
        self._exports |= {export.export_id: export for export in exports}
        complete = False
        with trio.move_on_after(RELOAD_SECONDS):
            while not complete and self.pid is not None:
                await trio.sleep(_POLL_SECONDS)
                complete = "Reread exports complete" in self._log(at)
        # Errors are logged after that line.
        await trio.sleep(_POLL_SECONDS)
        if self.pid is None:
            raise ServerError(f"{PROGRAM} has ended; see {self.log}")
        if not complete or self._serious(at):
            raise ServerError(f"{PROGRAM} did not apply the new exports: {self._problem(at)}")
        self._exports = {export.export_id: export for export in exports}
        self._check_exported(at)
        for export_id in self._bound_ids() - set(self._exports):
            self._unbind(export_id)

    def _check_exported(self, start: int) -> None:
        """Check that the server has all exports, about which it may say nothing but in its log.

        Raises:
            ServerError: it lacks one.
        """
        if lacking := set(self._exports) - self.current():
            pseudo = ", ".join(sorted(self._exports[export_id].pseudo for export_id in lacking))
            raise ServerError(f"{PROGRAM} does not export {pseudo}: {self._problem(start)}")

    def _log_size(self) -> int:
        try:
            return ownfiles.stat(self.log).st_size
        except FileNotFoundError:
            return 0

    def _log(self, start: int) -> str:
        try:
            with ownfiles.open(self.log, "rb") as file:
                file.seek(start)
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _serious(self, start: int) -> list[str]:
        found = [found[1] for line in self._log(start).splitlines() if (found := _SERIOUS.search(line))]
        # It complains like this about a mount that has just died: at every request, and when it lets go of the mount.
        return [said for said in found if "to ERR_FSAL_" not in said and "Error closing file" not in said]

    def _problem(self, start: int) -> str:
        """Return why the server has ended, or else the first message that it calls serious, in one line."""
        if fatal := _FATAL.search(self._log(start)):
            return fatal[1].strip()
        for said in self._serious(start):
            if not _HARMLESS.search(said):
                return said.strip()
        try:
            with ownfiles.open(os.path.join(self.state_dir, "ganesha.out"), encoding="utf-8", errors="replace") as file:
                said = file.read().split("\n")[0].strip()
        except FileNotFoundError:
            said = ""
        return said or f"see {self.log}"

    # -- what is exported: bind mounts on an empty file system ---------------------------------------

    @property
    def _bind_root(self) -> str:
        return os.path.join(self.state_dir, "exports")

    def _bind_path(self, export_id: int) -> str:
        return os.path.join(self._bind_root, str(export_id))

    def _bound_ids(self) -> set[int]:
        """Return the export ids for which something is mounted."""
        prefix = f"{self._bind_root}/"
        return {
            int(path[len(prefix) :]) for path in mountinfo.by_path() if re.fullmatch(rf"{re.escape(prefix)}\d+", path)
        }

    def _make_bind_root(self) -> None:
        self._clear_bind_root()
        ownfiles.makedirs(self._bind_root, mode=0o700, exist_ok=True)
        linux.mount("cloakfs", self._bind_root, "ramfs", _FLAGS, "mode=700")
        linux.mount("", self._bind_root, "none", _MS_PRIVATE, "")

    def _clear_bind_root(self) -> None:
        for export_id in self._bound_ids():
            linux.umount(self._bind_path(export_id), linux.MNT_DETACH)
        while self._bind_root in mountinfo.by_path():
            linux.umount(self._bind_root, linux.MNT_DETACH)

    def _bind(self, export: GaneshaExport) -> None:
        """Make the view visible to the server, if it is not already."""
        if export.export_id in self._bound_ids():
            return
        _require_cloakfs(export.path)
        place = self._bind_path(export.export_id)
        ownfiles.makedirs(place, mode=0o700, exist_ok=True)
        linux.mount(export.path, place, "none", _MS_BIND, "")
        linux.mount("", place, "none", _MS_PRIVATE, "")

    def _unbind(self, export_id: int) -> None:
        linux.umount(self._bind_path(export_id), linux.MNT_DETACH)
        ownfiles.rmdir(self._bind_path(export_id))
