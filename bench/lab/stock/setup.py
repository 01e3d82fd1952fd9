"""What the laboratory needs of the host: root, and packages of Debian, which are installed when they are missing."""

import os
import platform
import subprocess

from ...clone import ROOT

CACHE = os.path.join(ROOT, ".cache", "stock")
"""Where kernels and images are kept."""

HOST_PACKAGES = ("qemu-system-x86", "busybox-static", "kmod", "e2fsprogs", "gcc", "libc6-dev", "util-linux", "xz-utils")
"""What boots the guest."""

GUEST_PACKAGES = (
    "bindfs", "fuse3", "gcc", "git", "iproute2", "kmod", "libc6-dev", "make", "mount", "nfs-common",
    "nfs-kernel-server", "procps", "python3", "rpcbind", "rsync",
)  # fmt: skip
"""What the guest has, beside what Debian holds for essential, and what these depend on."""

_SECONDS = 900
_POLICY = "/usr/sbin/policy-rc.d"
_NO_SERVERS = "#!/bin/sh\nexit 101\n"


class NoLaboratory(Exception):
    """The laboratory cannot be set up; the text is one line that says why."""


def install_missing() -> list[str]:
    """Install the packages that are missing; return their names.

    Raises:
        NoLaboratory: this is not root, or not Debian 12 on x86, or they cannot be installed.
    """
    if "bookworm" not in platform.freedesktop_os_release().get("VERSION_CODENAME", ""):
        raise NoLaboratory("needs Debian 12: its kernels, and the plugins of its qemu")
    if os.uname().machine != "x86_64":
        raise NoLaboratory(f"needs a machine with x86-64 instructions, not {os.uname().machine}")
    if os.geteuid() != 0:
        raise NoLaboratory("needs root: the guest gets the host's files, and this may install packages")
    missing = missing_packages()
    if missing:
        run("apt-get", "update", "-qq")
        # Servers would be started as soon as they are installed; the guest starts its own.
        silent = not os.path.exists(_POLICY)
        if silent:
            with open(_POLICY, "w", encoding="ascii") as file:
                file.write(_NO_SERVERS)
            os.chmod(_POLICY, 0o755)
        try:
            run("apt-get", "install", "-yqq", "--no-install-recommends", *missing)
        finally:
            if silent:
                os.unlink(_POLICY)
    return missing


def missing_packages() -> list[str]:
    """Return which packages are not installed.

    Raises:
        NoLaboratory: this is not Debian.
    """
    wanted = dict.fromkeys((*HOST_PACKAGES, *GUEST_PACKAGES))
    installed = set()
    for line in run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n").splitlines():
        name, _, status = line.partition(" ")
        if status == "installed":
            installed.add(name)
    return [name for name in wanted if name not in installed]


def run(*command: str, cwd: str = "/") -> str:
    """Run a command; return its standard output.

    Raises:
        NoLaboratory: it is not there, failed, or took too long.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NoLaboratory(f"{command[0]}: {exc}") from exc
    if done.returncode:
        said = " ".join(done.stderr.split())[-500:]
        raise NoLaboratory(f"{' '.join(command[:3])}: {said or f'exit status {done.returncode}'}")
    return done.stdout
