"""User units: under a real systemd, the units of each user see its own view at one path, and nothing of the others."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.booted import Booted, unbootable
from tests.mount.conftest import COMMAND
from tests.mount.logins import ANN, CLOAK, EVA, OTHER, SETUP, USERS, sees

# What keeps managers from starting before an entry with `nofail` is mounted (docs/sessions.md).
FIRST = "x-systemd.before=systemd-user-sessions.service"
OPTIONS = f"rw,nofail,{FIRST},{CLOAK},views={' '.join(USERS)}".replace(" ", r"\040")

# What an administrator does once, before a restart of the machine. All three users have a unit of their own, and
# managers that start with the machine.
BEFORE = f"""
ln -sf {Path(sys.executable).parent}/mount.fuse.cloakfs /usr/sbin/
cat >/etc/fstab <<'END'
/srv/real /srv/views/export fuse.cloakfs {OPTIONS} 0 0
END
mount /srv/views/export
{shlex.join((*COMMAND, *SETUP, "--systemd", "--install"))}
{shlex.join((*COMMAND, "umount", "/srv/views/export"))}
touch {" ".join(f"/var/lib/systemd/linger/{user}" for user in USERS)}
install -d -m 1777 /srv/seen
mkdir -p /etc/systemd/user/default.target.wants
cat >/etc/systemd/user/look.service <<'END'
[Service]
Type=oneshot
ExecStart=-sh -c 'exec >/srv/seen/%u.new 2>&1; ls -A /srv/data; stat -c %%U /srv/data/%u/file'
ExecStart=mv /srv/seen/%u.new /srv/seen/%u
END
ln -s ../look.service /etc/systemd/user/default.target.wants/
"""

PATH_ITSELF = "below\n"
LOOK = "ls -A /srv/data"


@pytest.fixture(scope="module")
def machine() -> Iterator[Booted]:
    """A machine with the mount, the setup and a manager of each user; each test leaves those of ann as they were."""
    if why := unbootable():
        pytest.skip(why)
    with Booted(BEFORE) as booted:
        # Units outside their view shall see what is there.
        booted.sh(f"chmod 755 /srv/data; systemctl start {' '.join(f'user@{uid}' for uid in USERS.values())}")
        yield booted


def restart_manager(machine: Booted) -> None:
    """Restart the manager of ann."""
    machine.sh(f"systemctl restart user@{USERS[ANN]}")


def test_user_units_see_their_own_views_from_the_start_of_the_machine(machine: Booted) -> None:
    assert machine.sh("readlink /proc/1/exe; systemctl is-active srv-views-export.mount").split() == [
        "/usr/lib/systemd/systemd", "active"]  # fmt: skip
    for user in USERS:
        machine.sh(f"until [ -e /srv/seen/{user} ]; do sleep 0.1; done")
        assert machine.sh(f"cat /srv/seen/{user}") == f"{user}\n{user}\n"
    for user in (*USERS, ANN):  # ann once more, when the kernel has cached what the others looked at
        sees(machine.unit, user)


def test_units_of_the_system_and_of_who_has_no_view_see_the_path_itself(machine: Booted) -> None:
    machine.sh(f"systemctl start user@$(id -u {OTHER})")
    assert machine.unit(OTHER, LOOK) == PATH_ITSELF
    system = ("systemd-run", "--quiet", "--collect", "--wait", "--pipe", f"--property=User={EVA}")
    assert machine.run(*system, *LOOK.split()).stdout == PATH_ITSELF
    view = f"--property=BindPaths=/srv/views/export/@{EVA}:/srv/data"
    assert machine.run(*system, view, *LOOK.split()).stdout == f"{EVA}\n"


def test_a_manager_keeps_what_it_has_until_it_starts_again(machine: Booted) -> None:
    machine.ok("session", "setup", "--systemd", "--remove")
    restart_manager(machine)  # by files that systemd has not read again
    assert machine.unit(ANN, LOOK) == f"{ANN}\n"
    machine.sh("systemctl daemon-reload")
    assert machine.unit(ANN, LOOK) == f"{ANN}\n"
    restart_manager(machine)
    assert machine.unit(ANN, LOOK) == PATH_ITSELF
    machine.ok(*SETUP, "--systemd", "--install")
    machine.sh("systemctl daemon-reload")
    assert machine.unit(ANN, LOOK) == PATH_ITSELF
    restart_manager(machine)
    assert machine.unit(ANN, LOOK) == f"{ANN}\n"


def test_a_manager_starts_without_the_mount_and_keeps_one_that_is_taken_away(machine: Booted) -> None:
    machine.sh("umount /srv/views/export")
    assert machine.unit(ANN, LOOK) == f"{ANN}\n"
    assert "still serves processes that have files open" in machine.run("mount", "/srv/views/export").stderr
    machine.sh("systemctl stop 'user@*'; while pgrep -f ^cloakfs-cleanup; do sleep 0.1; done")  # the daemon has ended
    restart_manager(machine)
    assert machine.unit(ANN, LOOK) == PATH_ITSELF
    assert machine.sh("ls -A /srv/views/export") == ""
    machine.sh("mount /srv/views/export")
    assert machine.unit(ANN, LOOK) == PATH_ITSELF
    restart_manager(machine)
    sees(machine.unit, ANN)


def test_shells_see_the_view_by_pam_and_units_by_systemd(machine: Booted) -> None:
    machine.ok(*SETUP, "--pam", "--install")
    manager = f"user@{USERS[ANN]}"
    machine.sh(f"loginctl disable-linger {ANN}; systemctl stop {manager}")
    said = machine.su(ANN, f"{LOOK}; systemd-run --user --quiet --collect --wait --pipe {LOOK}")
    assert said == f"{ANN}\n{ANN}\n"
    # The manager began with the first login of its user, and ends with the last.
    machine.sh(f"while systemctl --quiet is-active {manager}; do sleep 0.1; done")
