"""An NFS server on the kernel of the laboratory's guest."""

import errno
import os
import subprocess
import time

_NFS_CONF = """\
[general]
pipefs-directory=/run/rpc_pipefs
[mountd]
manage-gids={manage_gids}
port=20048
[nfsdcld]
storagedir={records}
"""


def sh(*command: str, check: bool = True, timeout: float = 60) -> str:
    """The standard output of a command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def drop_caches() -> None:
    """Drop all inodes and dentries that the kernel, which is client and server at once here, can drop."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("2\n")


def end_grace() -> None:
    """End the time in which clients of version 4 claim what they held, if it has not ended."""
    try:
        with open("/proc/fs/nfsd/v4_end_grace", "w", encoding="ascii") as file:
            file.write("Y")
    except OSError as exc:  # of newer kernels, while there is nothing that could end
        if exc.errno != errno.EBUSY:
            raise


class NfsHost:
    """What a machine with nfs-kernel-server runs; no grace time to wait for.

    Args:
        records: where nfsdcld(8) keeps records of clients, if no kernel does so by itself: the machine has a network
            namespace of its own.
    """

    def __init__(self, records: str = "") -> None:
        self._records = records or "/var/lib/nfs/nfsdcld"
        sh("mount", "-t", "rpc_pipefs", "rpc_pipefs", "/run/rpc_pipefs")
        sh("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
        sh("rpcbind", "-w")
        self.mountd = self._start_mountd(manage_gids=False)
        sh("rpc.statd")
        if records or not os.path.exists("/proc/fs/nfsd/nfsv4recoverydir"):
            # Newer kernels keep no records of clients by themselves (CONFIG_NFSD_LEGACY_CLIENT_TRACKING).
            os.makedirs(self._records, exist_ok=True)
            sh("nfsdcld", "--pipefsdir=/run/rpc_pipefs")
        self.set_threads(8)
        end_grace()

    def set_threads(self, number: int) -> None:
        """Run with so many threads; 1 has every request served by the thread that served the one before."""
        sh("rpc.nfsd", "-G", "10", "-L", "10", str(number))

    def _start_mountd(self, *, manage_gids: bool) -> subprocess.Popen[bytes]:
        with open("/etc/nfs.conf", "w", encoding="ascii") as file:
            file.write(_NFS_CONF.format(manage_gids="y" if manage_gids else "n", records=self._records))
        return subprocess.Popen(["rpc.mountd", "-F"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def restart_mountd(self, *, manage_gids: bool = False) -> None:
        """Start mountd anew, so that it knows nothing of what it has written into the kernel's caches."""
        self.close()
        self.mountd = self._start_mountd(manage_gids=manage_gids)
        time.sleep(1)
        sh("exportfs", "-f")

    def close(self) -> None:
        """End mountd."""
        self.mountd.terminate()
        self.mountd.wait()
