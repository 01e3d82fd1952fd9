"""A machine that has booted systemd: the laboratory's guest (bench/lab), whose first process becomes systemd.

It has nothing of this machine's services, fstab, users' units and lingering users; only what is in Debian's packages.
"""

import os
import shlex
import subprocess

from bench.lab.guest import Guest, inside, missing_kernel
from tests.mount.logins import GROUND, AnyMachine

_NEEDED = {
    "/lib/systemd/systemd": "systemd",
    "/usr/bin/dbus-daemon": "dbus",
    "/usr/lib/systemd/user/dbus.socket": "dbus-user-session",
    "/usr/lib/pam.d/systemd-user": "libpam-systemd",
}

_BOOT_SECONDS = 120.0
_SECONDS = 60  # for a command; a system call takes twenty times as long as on the host

# Of what Debian has systemd do before it is up, this leaves out what the machine needs neither for itself nor for its
# users, which takes as long as all the rest.
_PREPARE = """
set -e
for path in /etc/systemd /var/lib/systemd /usr/lib/systemd/system/sysinit.target.wants; do
    mount -t tmpfs -o mode=755 tmpfs "$path"
done
mkdir -p /etc/systemd/system /run/generators /var/lib/systemd/linger
cp /usr/lib/systemd/system-generators/systemd-fstab-generator /run/generators
mount --bind /run/generators /usr/lib/systemd/system-generators
tr -d - </proc/sys/kernel/random/uuid >/run/machine-id
cat /run/machine-id >/etc/machine-id
: >/etc/fstab
printf '[Journal]\\nStorage=volatile\\n' >/etc/systemd/journald.conf
printf '[Login]\\nUserStopDelaySec=0\\n' >/etc/systemd/logind.conf
cat >/etc/systemd/system/tests.service <<'END'
[Unit]
Requires=systemd-journald.service dbus.service systemd-logind.service systemd-user-sessions.service
After=systemd-journald.service dbus.service systemd-logind.service systemd-user-sessions.service
[Service]
ExecStart=/bin/bash /run/serve
ExecStopPost=/bin/sh -c 'echo o >/proc/sysrq-trigger'
StandardOutput=append:/run/out/log
StandardError=append:/run/out/log
END
cat >/run/serve <<'END'
for ((number = 1; ; number++)); do
    SECONDS=0
    until [ -e /run/out/ask-$number ]; do
        [ $SECONDS -lt 120 ] || exit  # the tests were killed
        sleep 0.02
    done
    bash /run/out/ask-$number >/run/out/said-$number 2>/run/out/erred-$number </dev/null
    status=$?
    sync /run/out/{said,erred}-$number  # a manager may still have them open, so that they are not on the host yet
    echo $status >/run/out/ended-$number.new
    mv /run/out/ended-$number.new /run/out/ended-$number
done
END
"""

_FIRST = "exec /lib/systemd/systemd --system --unit=tests.service"


def unbootable() -> str | None:
    """Why there can be no such machine here, with the way out."""
    if inside():
        return "boots a guest, which cannot be done in a guest"
    for path, package in _NEEDED.items():
        if not os.path.exists(path):
            return f"needs {package} (scripts/setup --test)"
    return missing_kernel()


class Booted(AnyMachine):
    """A machine with systemd. Use it as a context manager: whatever happens, its processes end.

    Args:
        before: a script that root runs on the machine before it boots.
    """

    def __init__(self, before: str) -> None:
        # That of the tests, which wait for it: the other one may have the guest of the kernel's NFS server.
        processor = min(os.sched_getaffinity(0))
        self._guest = Guest(f"{_PREPARE}{GROUND}{before}", processor=processor, drivers=("fuse",), first=_FIRST)
        self._asked = 0

    def __enter__(self) -> "Booted":
        try:
            self._run("true", _BOOT_SECONDS)
        except BaseException:
            self._guest.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._guest.close()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self._run(shlex.join(("timeout", "--kill-after=5", str(_SECONDS), *command)), _SECONDS + 10)

    def _run(self, script: str, seconds: float) -> subprocess.CompletedProcess[str]:
        self._asked += 1
        self._guest.write(f"ask-{self._asked}", f"cd /; {script}\n")
        status = self._guest.wait_for(f"ended-{self._asked}", seconds)
        said, erred = (self._guest.read(f"{name}-{self._asked}") for name in ("said", "erred"))
        return subprocess.CompletedProcess(script, int(status), said, erred)

    def unit(self, user: str, script: str) -> str:
        """What a script prints in a transient unit of this user's manager."""
        words = ("systemd-run", "--user", "--quiet", "--collect", "--wait", "--pipe", "sh", "-c", script)
        done = self.as_user(user, *words)
        assert done.returncode == 0, f"{user}: {done.stdout}{done.stderr}"
        return done.stdout

    def as_user(self, user: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command, which can reach the user's manager, as this user, and not below that manager."""
        uid = self.sh(f"id -u {user}").strip()
        ids = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups")
        return self.run(*ids, "env", f"XDG_RUNTIME_DIR=/run/user/{uid}", *command)
