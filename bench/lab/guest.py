"""A guest whose kernel has an NFS server and client: user-mode Linux, an ordinary process.

It sees the host's files, read-only with a tmpfs on top (init, next to this), and shares one directory with the host.
"""

import glob
import os
import shutil
import subprocess
from collections.abc import Sequence

from ..clone import ROOT  # the guest sees it at the same place
from ..workers import running_on
from .shared import SharedDirectory

OUT = "/run/out"
"""In the guest: the directory it shares with the host."""

UML = os.environ.get("CLOAKFS_UML", "/usr")
"""Where user-mode Linux is installed: `bin/linux.uml`, and `lib/uml/modules/VERSION`. Set it for another kernel."""

DRIVERS = ("fuse", "loop", "nfsd", "nfs", "nfsv3", "nfsv4", "veth", "sd_mod")
"""The kernel modules that the tests and trials behind NFS need."""

_MIB = 1500


def inside() -> bool:
    """Is this the guest?"""
    return os.path.exists(os.path.join(OUT, "command"))


def missing() -> str | None:
    """Why there cannot be a guest with NFS here, with the way out."""
    if why := missing_kernel():
        return why
    for program in ("/usr/sbin/exportfs", "/usr/sbin/rpc.nfsd", "/sbin/rpcbind", "/sbin/mount.nfs"):
        if not os.path.exists(program):
            return f"needs {program} (scripts/setup --test)"
    return None


def missing_kernel() -> str | None:
    """Why no guest at all can boot here, with the way out."""
    if os.geteuid() != 0:
        return "needs root: the guest sees the host's files as the user who runs it"
    if not _kernel() or not glob.glob(os.path.join(UML, "lib", "uml", "modules", "*")):
        return "needs user-mode Linux (scripts/setup --test)"
    return None if shutil.which("cc") else "needs a C compiler (scripts/setup --test)"


def _kernel() -> str | None:
    path = os.path.join(UML, "bin", "linux.uml")
    return path if os.access(path, os.X_OK) else None


def kernel_version() -> str:
    """Return the version of the guest's kernel; "none" if there is none."""
    return next((os.path.basename(path) for path in glob.glob(os.path.join(UML, "lib", "uml", "modules", "*"))), "none")


class Guest(SharedDirectory):
    """One guest from boot to power-off. Use it as a context manager: whatever happens, its processes end.

    Args:
        command: shell text to run in it as root.
        mib: its memory, in which its files are as well.
        processor: of the host, on which it runs.
        drivers: the kernel modules to load.
        first: shell text with which its first process goes on after a command that succeeded, such as `exec` of
            another one. Without it, or when it ends, the guest does.
        enter: words of a command that has the guest run in a network.
        network: words of its kernel's command line, for its network devices.
    """

    def __init__(
        self,
        command: str,
        mib: int = _MIB,
        processor: int | None = None,
        *,
        drivers: Sequence[str] = DRIVERS,
        first: str = "",
        enter: Sequence[str] = (),
        network: Sequence[str] = (),
    ) -> None:
        super().__init__("cloakfs-lab-", command)
        if first:
            self.write("first", first)
        modules = glob.glob(os.path.join(UML, "lib", "uml", "modules", "*"))[0]
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else self.out
        here = os.path.dirname(__file__)
        init = os.path.join(here, "init")
        wide_fpu = os.path.join(self.out, "wide_fpu.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", wide_fpu, os.path.join(here, "wide_fpu.c")], check=True)
        # At each system call, user mode passes the turn from one process to another. On two processors, that takes
        # three times as long, and no two runs are alike.
        processor = max(os.sched_getaffinity(0)) if processor is None else processor
        with open(os.path.join(self.out, "console"), "wb") as console, running_on({processor}):
            self._process = subprocess.Popen(
                [*enter, _kernel() or "", f"mem={mib}M", "quiet", "loglevel=1", "root=none", "rootfstype=hostfs",
                 "rootflags=/", "ro", f"init={init}", f"lab.out={self.out}", f"lab.modules={modules}",
                 f"lab.drivers={','.join(drivers)}", f"lab.root={ROOT}", f"uml_dir={self.out}", "umid=guest",
                 "con=null", "con0=null,fd:1", *network],
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TMPDIR": memory, "LD_PRELOAD": wide_fpu},
            )  # fmt: skip
