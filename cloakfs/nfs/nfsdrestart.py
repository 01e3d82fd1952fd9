"""Restarts the threads of the kernel's NFS server, after which clients claim their files and locks again.

It is the machine's server: afterwards, it has as many threads as before, the same versions, and the same listeners.
Clients wait meanwhile. NFSv4 clients then find that the server knows them no more, and claim what they have open and
locked; until the grace period ends, no client gets anything new. Locks of NFSv3 are lockd's, which ends with the last
thread, unless the machine has mounted NFSv3 exports of others. If it has ended, sm-notify(8) notifies the clients that
had locks, as after a restart of the machine, and they claim these again, too.

A process of its own does it, which goes on if the guard is killed. If it is killed as well while there are no threads,
they are started by whichever guard or command finds what it has recorded below /run (`resume`).
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

import trio

from ..linux import ownfiles, programs
from ..state.runtime import RUN_DIR
from . import nfsdstate
from .server import ServerError

_PROC = "/proc/fs/nfsd"
_MONITORED = "/var/lib/nfs/sm"
_BACKLOG = 64  # as of rpc.nfsd(8)
_LOCK = os.path.join(RUN_DIR, "nfsd.lock")
_LOCK_SECONDS, _LOCK_RETRY_SECONDS = 20.0, 0.1
_STOPPED = os.path.join(RUN_DIR, "nfsd.json")
_PROGRAM = (sys.executable, "-P", "-c", "from cloakfs.nfs.nfsdrestart import main; main()")

# A thread that waits for a disk at each of so many checks would keep the others from being started again.
_STUCK_CHECKS, _CHECK_SECONDS = 10, 0.1

# In /proc/net: the file, family and state of sockets that listen (net/tcp_states.h).
_TABLES = {
    "tcp": (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)),
    "udp": (("udp", socket.AF_INET), ("udp6", socket.AF_INET6)),
}
_STATES = {"tcp": "0A", "udp": "07"}
_word = struct.Struct("=I")


class Listener(NamedTuple):
    """One address on which the server listens: `rdma` has none of its own."""

    transport: str
    port: int
    family: socket.AddressFamily = socket.AF_UNSPEC
    address: str = ""


class NfsdConfig(NamedTuple):
    """What makes the server: threads in each pool, versions (`+3 -4.0`), and listeners."""

    threads: tuple[int, ...]
    versions: str
    listeners: tuple[Listener, ...]


class Busy(ServerError):
    """Another service of cloakfs starts, restarts or stops the threads."""


@contextlib.asynccontextmanager
async def exclusive(seconds: float = _LOCK_SECONDS) -> AsyncIterator[int]:
    """Keep other services of this machine from starting, restarting and stopping the threads in a with block.

    Otherwise, a service may find a server without threads that another one is just restarting. Gives the descriptor of
    the lock: a process that inherits it keeps others out until it ends.

    Args:
        seconds: how long to wait for the others; 0 means not at all.

    Raises:
        Busy: one of the others does so all this time.
        OSError: the lock file cannot be opened.
    """
    ownfiles.makedirs(RUN_DIR, mode=0o755, exist_ok=True)
    lock = ownfiles.open_fd(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = trio.current_time() + seconds
        while not ownfiles.lock(lock):
            if trio.current_time() >= deadline:
                raise Busy(f"another service restarts the kernel's NFS server (fuser {_LOCK})")
            await trio.sleep(_LOCK_RETRY_SECONDS)
        yield lock
    finally:
        os.close(lock)


def current_config() -> NfsdConfig:
    """Return what makes the server that runs now.

    Raises:
        ServerError: the addresses on which it listens cannot be found out.
        OSError: there is none.
    """
    return NfsdConfig(_numbers("pool_threads"), _read("versions").strip(), _listeners())


async def restart_apart(lock: int) -> None:
    """Restart the threads in a process that does so even if this one is killed.

    Args:
        lock: what `exclusive` gives.

    Raises:
        ServerError: as `restart`.
    """
    with trio.CancelScope(shield=True):  # half of it would be the end of the server
        done = await trio.run_process(  # noqa: TID251  (a guard acts for no caller)
            _PROGRAM, stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True, check=False,
            start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ServerError(said[-1] if said else f"exit status {done.returncode}")


def main() -> None:
    """As the process of `restart_apart`: restart the threads, or say why that cannot be done."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        restart()
    except (ServerError, OSError) as exc:
        sys.exit(str(exc))


def restart() -> None:
    """Restart the threads, within `exclusive`.

    Raises:
        ServerError: they could not be restarted safely; if nothing else is said, the server was not touched.
    """
    before = current_config()
    if not any(before.threads):
        raise ServerError("it has no threads")
    monitored = _monitored() if "+3" in before.versions.split() else {}
    if monitored and not _is_installed("sm-notify"):
        raise ServerError("sm-notify(8) is missing, so that NFSv3 clients would lose their locks")
    if stuck := _stuck():
        raise ServerError(f"a thread of the server waits for a disk (process {stuck})")
    lockd = _lockd()
    stopped = {"lockd": lockd, "monitored": monitored, "server": before}
    ownfiles.replace(_STOPPED, json.dumps(stopped).encode())
    _run("rpc.nfsd", "0")
    with contextlib.suppress(OSError):
        nfsdstate.lost_mounts()  # no client holds anything now, so this drops the records of these mounts
    _start_stopped(before, lockd, monitored)


def resume() -> bool:
    """In a worker thread, within `exclusive`: start the threads that a process had stopped before it was killed.

    Returns:
        whether there was one.

    Raises:
        ServerError: as `start`.
        OSError: they cannot be started.
    """
    try:
        with ownfiles.open(_STOPPED, encoding="utf-8") as file:
            stored = json.load(file)
        threads, versions, listeners = stored["server"]
        before = NfsdConfig(
            tuple(threads),
            versions,
            tuple(
                Listener(transport, port, socket.AddressFamily(family), address)
                for transport, port, family, address in listeners
            ),
        )
        lockd, monitored = int(stored["lockd"]), dict(stored.get("monitored", {}))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if any(_numbers("pool_threads")):  # another process has started them
        ownfiles.unlink(_STOPPED)
        return False
    _start_stopped(before, lockd, monitored)
    return True


def _start_stopped(before: NfsdConfig, lockd: int, monitored: dict[str, str]) -> None:
    try:
        start(before)
    finally:
        if any(_numbers("pool_threads")):
            with contextlib.suppress(FileNotFoundError):
                ownfiles.unlink(_STOPPED)
        if _lockd() != lockd and monitored:
            _monitor(monitored)
            _run("sm-notify", "-f")


def start(before: NfsdConfig) -> None:
    """In a worker thread, within `exclusive`: start the threads of a server that has none, as they were before.

    If its listeners are not known, it gets those of nfs.conf(5).

    Raises:
        ServerError: the server is not as before.
    """
    failures = []
    try:
        if before.versions and _read("versions").strip() != before.versions:
            _write("versions", before.versions)
        for listener in before.listeners:
            try:
                _listen(listener)
            except OSError as exc:
                failures.append(f"{listener.address} {listener.transport} {listener.port}: {exc.strerror}")
    except OSError as exc:
        failures.append(f"{before.versions}: {exc.strerror}")
    finally:
        # It finds that there are listeners, and adds threads alone.
        _run("rpc.nfsd", str(sum(before.threads)))
    if before.listeners and _numbers("pool_threads") != before.threads:
        _write("pool_threads", " ".join(map(str, before.threads)))
    after = current_config() if before.listeners else before
    if failures or after != before:
        raise ServerError(
            f"the kernel's NFS server was restarted, and is not as before: {'; '.join(failures) or after} "
            "(systemctl restart nfs-server)"
        )


def is_in_grace() -> bool:
    """Whether the grace period lasts, in which clients may only claim what they had."""
    with contextlib.suppress(OSError), ownfiles.open(f"{_PROC}/v4_end_grace", encoding="ascii") as file:
        return file.read().strip() == "N"
    return False


def grace_seconds() -> int:
    """Return how long the grace period lasts at most."""
    with contextlib.suppress(OSError, ValueError):
        return _numbers("nfsv4gracetime")[0]
    return 90


def _listeners() -> tuple[Listener, ...]:
    wanted = Counter((line.split()[0], int(line.split()[1])) for line in _read("portlist").splitlines())
    found = []
    for (transport, port), number in wanted.items():
        if transport == "rdma":
            found += [Listener(transport, port)] * number
            continue
        listening = _sockets(transport, port)
        if len(listening) != number:
            raise ServerError(f"it cannot be told on which of the addresses with {transport} port {port} it listens")
        found += listening
    return tuple(sorted(found))


def _sockets(transport: str, port: int) -> list[Listener]:
    found = []
    for table, family in _TABLES.get(transport, ()):
        with contextlib.suppress(FileNotFoundError), ownfiles.open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                where, _, number = fields[1].partition(":")
                if int(number, 16) == port and fields[3] == _STATES[transport]:
                    found.append(Listener(transport, port, family, _address(where, family)))
    return found


def _address(text: str, family: socket.AddressFamily) -> str:
    """Return an address in /proc/net, which is printed as 32-bit numbers in the byte order of the machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(map(_word.pack, words)))


def _listen(listener: Listener) -> None:
    if listener.transport == "rdma":
        _write("portlist", f"rdma {listener.port}\n")
        return
    kind = socket.SOCK_STREAM if listener.transport == "tcp" else socket.SOCK_DGRAM
    with socket.socket(listener.family, kind) as made:
        if listener.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((listener.address, listener.port))
        if kind == socket.SOCK_STREAM:
            made.listen(_BACKLOG)
        _write("portlist", f"{made.fileno()}\n")


def _stuck() -> int:
    """Return the pid of a thread of the server that waits without an end in sight; 0 if there is none."""
    waiting: set[int] | None = None
    for _ in range(_STUCK_CHECKS):
        now = {pid for pid, name, state in _kernel_threads() if name == "nfsd" and state == "D"}
        waiting = now if waiting is None else waiting & now
        if not waiting:
            return 0
        time.sleep(_CHECK_SECONDS)
    return min(waiting) if waiting else 0


def _monitored() -> dict[str, str]:
    """Return what statd has written down of the clients that have locks, by name of the file."""
    found = {}
    for name in ownfiles.listdir(_MONITORED):
        with contextlib.suppress(FileNotFoundError), ownfiles.open(f"{_MONITORED}/{name}", encoding="latin-1") as file:
            found[name] = file.read()
    return found


def _monitor(monitored: dict[str, str]) -> None:
    """Write these again where lockd has had statd forget them, as it does since Linux 6.12 when it ends."""
    owner = ownfiles.stat(_MONITORED)
    for name, text in monitored.items():
        with contextlib.suppress(FileExistsError):
            fd = ownfiles.open_fd(f"{_MONITORED}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                ownfiles.fchown(fd, owner.st_uid, owner.st_gid)
                ownfiles.write(fd, text.encode("latin-1"))
            finally:
                os.close(fd)


def _lockd() -> int:
    return next((pid for pid, name, _ in _kernel_threads() if name == "lockd"), 0)


def _kernel_threads() -> list[tuple[int, str, str]]:
    """Return pid, name and state of kernel threads, among others."""
    found = []
    for path in ownfiles.glob("/proc", "[0-9]*/stat"):
        with contextlib.suppress(OSError), ownfiles.open(path, encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
            pid, _, name = before.partition(" (")
            found.append((int(pid), name, after.split()[0]))
    return found


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, _read(name).split()))


def _read(name: str) -> str:
    with ownfiles.open(f"{_PROC}/{name}", encoding="ascii") as file:
        return file.read()


def _write(name: str, text: str) -> None:
    with ownfiles.open(f"{_PROC}/{name}", "w", encoding="ascii") as file:
        file.write(text)


def _is_installed(program: str) -> bool:
    return any(ownfiles.access(os.path.join(folder, program), os.X_OK) for folder in programs.SYSTEM_PATH.split(":"))


def _run(*command: str) -> None:
    try:
        done = programs.run(command, capture_output=True, text=True, check=False, env=programs.SYSTEM_ENVIRONMENT)
    except OSError as exc:
        raise ServerError(f"{command[0]}: {exc.strerror}") from exc
    if done.returncode:
        raise ServerError(f"{' '.join(command)}: {' '.join(done.stderr.split()) or f'exit status {done.returncode}'}")
