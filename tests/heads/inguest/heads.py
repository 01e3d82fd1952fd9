"""A head: a client of CephFS and a mount of cloakfs, in a mount namespace of its own."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.clone import ROOT
from bench.lab.cephcluster import ADDRESS
from bench.lab.nfshost import NfsHost
from cloakfs.linux.libc import check, libc
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key, mounted
from tests.agents import User
from tests.mount.conftest import COMMAND
from tests.mount.test_trees import content_or_error, drop_caches, handle_of
from tests.waiting import wait_until

CEPH, MOUNT = "/tmp/ceph", "/tmp/mount"
TREE = f"{CEPH}/tree"
SERVICE = "10.9.0.10"
TAKE_OVER = os.path.join(ROOT, "examples/heads/take-over")
_WITHOUT_NFSV3 = ("--no-nfs-version", "3", "-G", "10", "-L", "10", "8")
KILL_REQUEST = "kill-the-metadata-server"
"""A file in what the guest shares with the machine: the cluster's metadata server is to be killed and started again."""

_CLONE_NEWNS = 0x20000
_CLONE_NEWUTS = 0x4000000
_CLONE_NEWNET = 0x40000000
_F_OFD_SETLK = 37


def sh(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def _begin(number: int | None) -> None:
    check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
    if number is not None:
        socket.sethostname(host_of(number))
        namespace = os.open(f"/run/netns/{network_of(number)}", os.O_RDONLY)
        check(libc.setns(namespace, _CLONE_NEWNET))
        os.close(namespace)
    sh("mount", "--make-rprivate", "/")
    for place in (CEPH, MOUNT, RUN_DIR, STATE_DIR):
        os.makedirs(place, exist_ok=True)
    for place in (RUN_DIR, STATE_DIR):
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", place)
    # Each mount that shares nothing is a client of its own.
    sh("mount", "-i", "-t", "ceph", f"{ADDRESS}:/", CEPH, "-o", "name=admin,noshare,wsync")


def _serve(options: str) -> None:
    sh(*COMMAND, "mount", TREE, MOUNT, "-o", options)


def _end(*, lose_state: bool) -> None:
    with contextlib.suppress(KeyError, ProcessLookupError):
        os.kill(mounted()[MOUNT].pid, signal.SIGKILL)
    subprocess.run(["umount", "-l", MOUNT], check=False, capture_output=True)
    wait_until(lambda: MOUNT not in mounted())
    if lose_state:
        shutil.rmtree(os.path.join(STATE_DIR, mount_key(TREE, MOUNT)))


def _kill_daemons() -> None:
    for mount in mounted().values():
        os.kill(mount.pid, signal.SIGKILL)


def _guard() -> int:
    pid: int = json.loads(sh(*COMMAND, "export", "status", "--json"))["pid"]
    return pid


def _kill_service(guard: int) -> None:
    os.kill(guard, signal.SIGKILL)
    _kill_daemons()


def _handle(name: str) -> bytes:
    return handle_of(os.path.join(MOUNT, name))


def _by_handle(handle: bytes) -> bytes | int | None:
    return content_or_error(MOUNT, handle)


def _as(uid: int, call: Callable[..., Any], *arguments: Any) -> Any:
    with User(uid) as caller:
        try:
            return caller.do(call, *arguments)
        except OSError as exc:
            return exc.errno


def lock(how: str, fd: int) -> int:
    """Try to lock a file; return the errno."""
    try:
        if how == "flock":
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif how == "ofd":
            fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def _begin_server(number: int) -> None:
    """Begin an NFS server, which keeps the list of its clients where the other head finds it."""
    for place, folders in (
        ("/run", ("cloakfs", "lock", "rpcbind", "rpc_pipefs")),
        ("/var/lib/nfs", ("sm", "sm.bak", "v4recovery")),
    ):
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", place)
        for folder in folders:
            os.mkdir(f"{place}/{folder}")
    Path("/run/nfs.conf").touch()
    sh("mount", "--bind", "/run/nfs.conf", "/etc/nfs.conf")
    for path in ("/run/rpcbind", "/var/lib/nfs/sm", "/var/lib/nfs/sm.bak"):
        os.chmod(path, 0o777)
    for name in ("etab", "rmtab"):
        Path("/var/lib/nfs", name).touch()
    NfsHost(records_of(number))


def network_of(number: int) -> str:
    return f"head{number}"


def host_of(number: int) -> str:
    """What the machine calls itself; its NFS server is called as all are (`_called`)."""
    return f"machine{number}"


def records_of(number: int) -> str:
    """Where nfsdcld of this head writes down which clients it has."""
    return f"{CEPH}/.heads/{number}"


def _called(host: str) -> list[str]:
    """The words before a command that runs on a host of this name, as the NFS server calls itself."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]


def _take_over(number: int, host: str) -> None:
    os.environ["CEPH_ARGS"] = f"-c /dev/null -m {ADDRESS} --auth-client-required none"
    words = ("--name", host, "--evict", host_of(number), f"{records_of(number)}/main.sqlite", "--", *_WITHOUT_NFSV3)
    print(sh(TAKE_OVER, *words))


@contextlib.contextmanager
def networks(count: int) -> Iterator[None]:
    """Make networks for so many heads, in each of which the service has its address; clients reach one (`lead_to`)."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with contextlib.ExitStack() as stack:
        for number in range(count):
            name, here, there = network_of(number), f"tohead{number}", f"head{number}"
            sh("ip", "netns", "add", name)
            stack.callback(sh, "ip", "netns", "del", name)
            sh("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            # The threads of an NFS server keep the network alive, though not its name.
            stack.callback(sh, "ip", "link", "del", here)
            for words in (
                f"addr add 10.8.{number}.1/24 dev {here}",
                f"link set {here} up",
                f"-n {name} addr add 10.8.{number}.2/24 dev {there}",
                f"-n {name} addr add {SERVICE}/32 dev lo",
                f"-n {name} link set {there} up",
                f"-n {name} link set lo up",
                f"-n {name} route add default via 10.8.{number}.1",
            ):
                sh("ip", *words.split())
        yield


def address_of(number: int) -> str:
    """Of a head itself."""
    return f"10.8.{number}.2"


def lead_to(number: int) -> None:
    """Have the address of the service lead to this head from now on."""
    sh("ip", "route", "replace", SERVICE, "via", address_of(number))


class Head:
    """One head; what it does, a process does that sees its mounts.

    Args:
        options: of its mount of cloakfs.
        number: of its network (`networks`), in which its client of CephFS is, too; without, it is in the guest's.
    """

    def __init__(self, options: str, number: int | None = None) -> None:
        self._options = options
        self._number = number
        self._is_cut_off = False
        self._process = User(0)
        self.do = self._process.do
        self.do(_begin, number)

    def serve(self) -> None:
        self.do(_serve, self._options)

    def export(self, number: int, entry: str, *, without_nfsv3: bool = False) -> None:
        """Serve an entry of exports.d over NFS, as a machine of its own (`networks`)."""
        self.do(_begin_server, number)
        if without_nfsv3:
            self.do(sh, "rpc.nfsd", "0")
            self.do(sh, *_called("service"), "rpc.nfsd", *_WITHOUT_NFSV3)
        self.do(Path(f"/run/{network_of(number)}.exports").write_text, entry)
        try:
            self.do(sh, *COMMAND, "export", "up", f"/run/{network_of(number)}.exports")
        except AssertionError as exc:
            raise AssertionError(
                f"{exc}\n{self.do(sh, 'sh', '-c', f'cat {RUN_DIR}/*.log; dmesg | tail -n 20')}"
            ) from exc

    def kill_daemon(self) -> None:
        """Kill the daemon of the export; the service mounts again."""
        self.do(_kill_daemons)

    def die(self) -> None:
        """Leave the network, and kill the service and its daemons. CephFS keeps the locks for a while."""
        guard = self.do(_guard)
        self._set_link("down")  # first: nothing of what follows may reach clients, nor CephFS
        self._is_cut_off = True
        self.do(_kill_service, guard)

    def _set_link(self, state: str) -> None:
        sh("ip", "link", "set", f"tohead{self._number}", state)

    def take_over(self, number: int, host: str = "service") -> None:
        """Let the clients of another head claim what they had there; `host` is what this server calls itself."""
        self.do(_take_over, number, host)

    def restart(self, *, lose_state: bool = False) -> None:
        """Kill the daemon, and mount again."""
        self.do(_end, lose_state=lose_state)
        self.serve()

    def handle(self, name: str) -> bytes:
        return self.do(_handle, name)

    def by_handle(self, handle: bytes) -> bytes | int | None:
        """What the file that the handle names contains, or the errno."""
        return self.do(_by_handle, handle)

    def number(self, name: str) -> int:
        return self.do(os.stat, os.path.join(MOUNT, name)).st_ino

    def list_as(self, uid: int, name: str = "") -> list[str] | int:
        """What a caller sees in a directory, or the errno."""
        found = self.do(_as, uid, os.listdir, os.path.join(MOUNT, name))
        return sorted(found) if isinstance(found, list) else found

    def forget(self) -> None:
        """Have the kernel forget all that nobody uses."""
        self.do(drop_caches)

    def log(self) -> str:
        return self.do(Path(RUN_DIR, f"{mount_key(TREE, MOUNT)}.log").read_text)

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            if self._is_cut_off:
                self._set_link("up")  # otherwise, the kernel could not unmount CephFS
            self.do(_end, lose_state=False)
            self.do(sh, "umount", "-f", "-l", CEPH)
        self._process.close()
