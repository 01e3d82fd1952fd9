"""Machines with nfs-ganesha in the laboratory's guest, which is their client: a network and a mount namespace each."""

import os
import subprocess

from bench.lab.nfshost import sh
from tests.waiting import wait_until

_PREPARE = (
    "mount -t tmpfs -o mode=755 none /run && mkdir -p /run/cloakfs /run/rpcbind /run/lock /run/ganesha && "
    "chown _rpc /run/rpcbind && mount -t tmpfs -o mode=755 none /var/lib/cloakfs && "
    "rpcbind -w && echo ready && exec sleep infinity"
)

_PARAMETERS = """\
NFS_CORE_PARAM { Protocols = 3, 4; Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; MNT_Port = 20048; }
NFSv4 { Graceless = true; Only_Numeric_Owners = true; RecoveryBackend = fs_ng; RecoveryRoot = /run/ganesha; }
LOG { Default_Log_Level = EVENT; Facility { name = FILE; destination = /run/ganesha/log; enable = active; } }
"""

_EXPORT = """\
EXPORT {{
    Export_Id = {number}; Path = {path}; Pseudo = {path}; Protocols = 3, 4; Transports = TCP; SecType = sys;
    Access_Type = RW; Squash = {squash}; Filesystem_Id = 9.{number}; FSAL {{ Name = VFS; }}
}}
"""


class GaneshaHost:
    """A machine at `address`, which runs rpcbind and whatever else it is told to.

    Args:
        name: of its network namespace.
        number: which of such machines it is, 1 to 254.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"10.7.{number}.2"
        self._ganesha: subprocess.Popen[bytes] | None = None
        sh("ip", "netns", "add", name)
        sh("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        sh("ip", "addr", "add", f"10.7.{number}.1/24", "dev", f"to-{name}")
        sh("ip", "link", "set", f"to-{name}", "up")
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            sh("ip", "-n", name, *words.split())
        alone = ("nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--propagation", "private")
        self._holder = subprocess.Popen(
            [*alone, "sh", "-c", _PREPARE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    def _words(self, *command: str) -> list[str]:
        within = [f"--net=/run/netns/{self.name}", f"--mount=/proc/{self._holder.pid}/ns/mnt"]
        return ["nsenter", *within, f"--wd={os.getcwd()}", *command]

    def sh(self, *command: str, check: bool = True) -> str:
        """Run a command on it; return its standard output."""
        return sh(*self._words(*command), check=check, timeout=600)

    def serve_bare(self, trees: dict[str, str]) -> None:
        """Export trees as they are, each with a value of `Squash`."""
        text = _PARAMETERS
        for number, (path, squash) in enumerate(trees.items(), 1):
            text += _EXPORT.format(number=number, path=path, squash=squash)
        with open(f"/tmp/{self.name}.conf", "w", encoding="ascii") as file:
            file.write(text)
        words = ("ganesha.nfsd", "-F", "-p", "/run/ganesha/pid", "-f", f"/tmp/{self.name}.conf")
        self._ganesha = subprocess.Popen(self._words(*words), stdin=subprocess.DEVNULL)
        wait_until(self._answers, every=0.1)

    def _answers(self) -> bool:
        assert self._ganesha is not None
        assert self._ganesha.poll() is None, self.sh("cat", "/run/ganesha/log", check=False)
        return self.sh("rpcinfo", "-T", "tcp", "127.0.0.1", "nfs", "3", check=False) != ""

    def mount(self, path: str, version: str, at: str, *options: str) -> None:
        """Have the guest, as a client, mount an export."""
        os.makedirs(at)
        words = [f"vers={version}", *options]
        if version == "3":
            words += ["nolock", "port=2049", "mountport=20048"]  # Ganesha is configured without NLM
        sh("mount", "-t", "nfs", "-o", ",".join(words), f"{self.address}:{path}", at)

    def close(self) -> None:
        """End what it runs."""
        if self._ganesha is not None:
            self._ganesha.terminate()
            self._ganesha.wait()
        self._holder.terminate()
        self._holder.communicate()
        sh("ip", "netns", "del", self.name)
