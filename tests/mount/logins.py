"""Machines on which users log in: accounts, a tree with a directory for each of them, and what each may see of it."""

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable

from tests.mount.conftest import COMMAND

USERS = {"cfs-ann": 4661, "cfs-ben": 4662, "cfs-eva": 4663}
ANN, BEN, EVA = USERS
OTHER = "cfs-odd"
"""An account without a view."""

CLOAK = "cloak_list=uid +077 0 -1"
SETUP = ("session", "setup", "/srv/views/export", "/srv/data")

_ACCOUNTS = "\n".join(
    f"useradd -s /bin/sh -M -d /srv/home -u {uid} {name} && passwd -qd {name}"
    for name, uid in {**USERS, OTHER: 4664}.items()
)
_FILES = "\n".join(
    f"install -d -m 700 -o {name} -g {name} /srv/real/{name}; echo of {name} >/srv/real/{name}/file; "
    f"chown {name}: /srv/real/{name}/file"
    for name in USERS
)
GROUND = f"""
mkdir /srv/real /srv/data /srv/home
install -d -m 700 /srv/views
mkdir /srv/views/export
chmod 700 /srv/data
echo below >/srv/data/below
{_ACCOUNTS}
{_FILES}
"""
"""Makes accounts and the tree in an empty /srv."""


class AnyMachine(ABC):
    """A machine that is prepared with `GROUND`."""

    @abstractmethod
    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command there as root."""

    def sh(self, script: str) -> str:
        """Have root run a script there; its output."""
        done = self.run("bash", "-c", script)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout

    def cloakfs(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(*COMMAND, *arguments)

    def ok(self, *arguments: str) -> str:
        done = self.cloakfs(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mount(self, *views: str) -> None:
        options = [word for view in views for word in ("--view", view)]
        self.ok("mount", "/srv/real", "/srv/views/export", "-o", CLOAK, *options)

    def su(self, user: str, script: str) -> str:
        """What a script prints in a login of this user."""
        done = self.run("su", "-", user, "-c", script)
        assert done.returncode == 0, f"{user}: {done.stdout}{done.stderr}"
        return done.stdout


def sees(login: Callable[[str, str], str], user: str) -> None:
    """A login of this user sees the view of this user at the path, and nothing of the others, cached or not."""
    look = f"cd /srv/data; ls -A; cat {user}/file; id -un >{user}/mine"
    assert login(user, look).split("\n") == [user, f"of {user}", ""]
    others = set(USERS) - {user}
    here = ["below", *(path for other in others for path in (other, f"{other}/file"))]
    there = [f"/srv/views/export/@{other}" for other in others]
    # Of `never` and `always`, one has the kernel ask the daemon, and the other answer from its cache.
    looks = [f"stat --cached={how} {' '.join((*here, *there))}" for how in ("default", "never", "always")]
    said = login(user, f"cd /srv/data; exec 2>&1; {'; '.join(looks)}; true").splitlines()
    refused = ["No such file or directory"] * len(here) + ["Permission denied"] * len(there)
    assert [line.rpartition(": ")[2] for line in said] == refused * len(looks), said
