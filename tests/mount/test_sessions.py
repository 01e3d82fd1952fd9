"""Sessions: with real logins, each user sees its own view at one path, and nothing of the others.

The logins happen on a machine within the machine, with namespaces of its own (mounts, processes, network) and a copy
of /etc. Accounts, the mount and sshd end with its first process.
"""

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.logins import ANN, BEN, EVA, GROUND, OTHER, SETUP, USERS, AnyMachine, sees

PREPARE = f"""
    set -e
    mount --make-rshared /  # as systemd does
    mount -t tmpfs -o mode=755 tmpfs /srv
    mkdir /srv/etc
    cp -a /etc/. /srv/etc
    mount --bind /srv/etc /etc
    for path in /run /var/log /var/lib/cloakfs; do
        mkdir -p "$path"
        mount -t tmpfs -o mode=755 tmpfs "$path"
    done
    ip link set lo up
    {GROUND}
"""


class Machine(AnyMachine):
    """A machine within the machine, whose PATHs are those of `PREPARE`."""

    def __init__(self) -> None:
        # bash as the first process collects those whose parents have ended.
        first = ("bash", "-c", "echo up; sleep infinity & wait")
        own = ("--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child")
        self._unshare = subprocess.Popen(["unshare", *own, *first], stdout=subprocess.PIPE)
        try:
            assert self._unshare.stdout is not None
            assert self._unshare.stdout.readline() == b"up\n"
            pid = self._unshare.pid
            self.first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
            self.sh(PREPARE)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all its processes, and with them its mounts."""
        self._unshare.kill()
        self._unshare.wait()
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        # Its root is not that of its mount namespace if the tests run in a chroot.
        there = ("nsenter", "--target", str(self.first), "--root", "--wdns=/", "--mount", "--pid", "--net")
        return subprocess.run([*there, *command], capture_output=True, text=True, check=False, timeout=60, cwd="/")

    def etc(self) -> dict[str, tuple[bytes, int]]:
        """All that a setup may change: content and permissions by path; None for a directory."""
        top = Path(f"/proc/{self.first}/root/etc")
        places = [path for part in ("pam.d", "security", "systemd") for path in (top / part).rglob("*")]
        return {
            str(path.relative_to(top)): (b"" if path.is_dir() else path.read_bytes(), path.stat().st_mode)
            for path in places
            if not path.is_symlink()
        }


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with the mount and its views, and nothing set up."""
    made = Machine()
    try:
        made.mount(*USERS)
        yield made
    finally:
        made.close()


def test_each_login_sees_its_own_view_at_one_path(machine: Machine) -> None:
    machine.ok(*SETUP, "--pam", "--install")
    for _ in range(2):  # the second time, the kernel has cached what the others looked at
        for user in USERS:
            sees(machine.su, user)
    for user, uid in USERS.items():
        assert machine.sh(f"stat -c %u /srv/real/{user}/mine") == f"{uid}\n"


def test_root_and_who_has_no_view_stay_outside(machine: Machine) -> None:
    machine.ok(*SETUP, "--pam", "--install")
    assert machine.su("root", "ls /srv/data") == "below\n"
    assert "Permission denied" in machine.su(OTHER, "ls /srv/data 2>&1 || true")
    assert machine.sh("ls /srv/data; grep -c @ /proc/self/mountinfo || true") == "below\n0\n"


def test_exempt_users_see_the_path_itself(machine: Machine) -> None:
    machine.ok(*SETUP, "--pam", "--install", "--exempt", BEN)
    machine.sh("chmod 711 /srv/data; chmod 644 /srv/data/below")
    assert machine.su(BEN, "cat /srv/data/below") == "below\n"
    sees(machine.su, ANN)


def test_su_leaves_the_view_of_the_caller(machine: Machine) -> None:
    machine.sh("passwd -qd root")
    machine.ok(*SETUP, "--pam", "--install")
    sees(lambda user, script: machine.su(ANN, f'exec su - {user} -c "{script}"'), BEN)
    assert machine.su(ANN, "exec su - root -c 'ls /srv/data'") == "below\n"
    # What the document says of the working directory.
    assert machine.su(ANN, f"cd /srv/data && exec su {BEN} -c pwd") == "/srv\n"


def test_sudo_stays_in_the_view_and_sudo_i_leaves_it(machine: Machine) -> None:
    if shutil.which("sudo") is None:
        pytest.skip("there is no sudo (apt install sudo)")
    machine.sh(f"echo '{ANN} ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/test")
    machine.ok(*SETUP, "--pam", "--install")
    # Root acts as ann there: it neither sees more nor owns what it makes.
    assert machine.su(ANN, f"cd /srv/data && sudo ls -A && sudo touch {ANN}/by-root") == f"{ANN}\n"
    assert machine.sh(f"stat -c %u /srv/real/{ANN}/by-root") == f"{USERS[ANN]}\n"
    assert machine.su(ANN, "sudo su - root -c 'ls /srv/data'") == f"{ANN}\n"
    assert machine.su(ANN, "sudo -i ls /srv/data") == "below\n"
    assert machine.su(ANN, f"sudo -i -u {BEN} ls /srv/data") == f"{BEN}\n"


def test_a_job_of_cron_sees_the_view_of_its_user(machine: Machine) -> None:
    if shutil.which("cron") is None:
        pytest.skip("there is no cron (apt install cron)")
    machine.ok(*SETUP, "--pam", "--install")
    machine.sh("rm -f /etc/cron.d/* && install -d -m 777 /srv/jobs")
    jobs = [f"@reboot {user} ls -A /srv/data >/srv/jobs/{user}.new; cd /srv/jobs; mv {user}.new {user}"
            for user in (*USERS, "root")]  # fmt: skip
    machine.sh("cat >/etc/cron.d/test <<'END'\n" + "\n".join(jobs) + "\nEND\ncron")
    done = [f"/srv/jobs/{user}" for user in (*USERS, "root")]
    machine.sh(f"until [ $(ls {' '.join(done)} 2>/dev/null | wc -l) = 4 ]; do sleep 0.1; done")
    assert machine.sh(f"cat {' '.join(done)}").split() == [*USERS, "below"]


def test_ssh_logins_see_their_own_views(machine: Machine) -> None:
    if not os.path.exists("/usr/sbin/sshd"):
        pytest.skip("there is no sshd (apt install openssh-server)")
    machine.sh("""
        set -e
        mkdir -p /run/sshd /srv/ssh
        cd /srv/ssh
        ssh-keygen -q -t ed25519 -N '' -f host
        ssh-keygen -q -t ed25519 -N '' -f key
        cat >config <<'END'
ListenAddress 127.0.0.1:22
HostKey /srv/ssh/host
AuthorizedKeysFile /srv/ssh/key.pub
UsePAM yes
PidFile none
END
        /usr/sbin/sshd -f config -E log
    """)
    machine.ok(*SETUP, "--pam", "--install")

    def ssh(user: str, script: str) -> str:
        options = ("-F", "none", "-i", "/srv/ssh/key", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes")
        done = machine.run("ssh", "-q", *options, "-o", "UserKnownHostsFile=/dev/null", f"{user}@127.0.0.1", script)
        assert done.returncode == 0, done.stderr + machine.sh("cat /srv/ssh/log")
        return done.stdout

    for user in USERS:
        sees(ssh, user)


def test_users_can_log_in_while_the_mount_is_not_there(machine: Machine) -> None:
    """And what they would see at the path is the directory itself, not one that was made below the mount point."""
    machine.ok(*SETUP, "--pam", "--install")
    machine.ok("umount", "/srv/views/export")
    assert "Permission denied" in machine.su(ANN, "ls /srv/data 2>&1 || true")
    assert machine.sh("ls -A /srv/views/export") == ""
    machine.mount(*USERS)
    sees(machine.su, ANN)


def test_a_user_whose_view_was_removed_cannot_log_in(machine: Machine) -> None:
    machine.ok(*SETUP, "--pam", "--install")
    machine.ok("umount", "/srv/views/export")
    machine.mount(BEN, EVA)
    assert machine.run("su", "-", ANN, "-c", "true").returncode != 0
    sees(machine.su, BEN)


def test_a_session_keeps_its_view_after_the_mount_is_taken_away(machine: Machine) -> None:
    machine.ok(*SETUP, "--pam", "--install")
    machine.sh(f"mkfifo /srv/go; su - {ANN} -c 'read x </srv/go; ls /srv/data' >/srv/seen 2>&1 &")
    machine.sh(f"until pgrep -u {USERS[ANN]} >/dev/null; do sleep 0.1; done")
    machine.ok("umount", "--lazy", "/srv/views/export")
    machine.sh("echo >/srv/go; until [ -s /srv/seen ]; do sleep 0.1; done")
    assert machine.sh("cat /srv/seen") == f"{ANN}\n"
    assert machine.sh("while pgrep -f ^cloakfs-cleanup >/dev/null; do sleep 0.1; done") == ""  # the daemon has ended


@pytest.mark.parametrize("how", ["--pam", "--systemd"])
def test_removing_leaves_the_files_as_they_were(machine: Machine, how: str) -> None:
    machine.sh("printf 'session optional pam_permit.so' >>/etc/pam.d/su; chmod 604 /etc/pam.d/login")  # no line feed
    before = machine.etc()
    said = machine.ok(*SETUP, how, "--install").split("\n")
    after = machine.etc()
    changed = {path for path in after if after[path] != before.get(path)}
    assert {f"/etc/{path}" for path in changed if not path.endswith(".d")} == {
        line.removesuffix(": written") for line in said if line
    }
    assert [after[path][1] for path in before] == [mode for _, mode in before.values()]
    assert machine.cloakfs(*SETUP, how, "--install").stderr.endswith("nothing to change\n")
    assert machine.etc() == after
    machine.ok("session", "setup", how, "--remove")
    assert machine.etc() == before
    assert machine.cloakfs("session", "setup", how, "--remove").stderr == "cloakfs: nothing to change\n"


def test_lines_of_the_administrator_stay(machine: Machine) -> None:
    machine.ok(*SETUP, "--pam", "--install")
    ours = machine.sh("cat /etc/pam.d/su")
    machine.sh("sed -i '1i # above' /etc/pam.d/su; echo '# below' >>/etc/pam.d/su")
    machine.sh("echo '# mine' >>/etc/security/namespace.d/cloakfs.conf")
    assert machine.cloakfs(*SETUP, "--pam", "--install").stderr == "cloakfs: nothing to change\n"
    assert machine.sh("cat /etc/pam.d/su") == f"# above\n{ours}# below\n"
    sees(machine.su, ANN)
    machine.ok("session", "setup", "--pam", "--remove")
    assert machine.sh("head -n 1 /etc/pam.d/su; tail -n 1 /etc/pam.d/su") == "# above\n# below\n"
    assert machine.sh("grep -rl cloakfs /etc/pam.d || cat /etc/security/namespace.d/*") == "# mine\n"


def test_a_second_setup_replaces_the_first(machine: Machine) -> None:
    before = machine.etc()
    machine.ok(*SETUP, "--pam", "--install")
    machine.sh("mkdir -m 700 /srv/other")
    machine.ok("session", "setup", "/srv/views/export", "/srv/other", "--pam", "--install", "--service", "su")
    assert machine.su(ANN, "ls -A /srv/other; ls -A /srv/data 2>/dev/null || true") == f"{ANN}\n"
    assert machine.sh("cd /etc/pam.d; grep -l cloakfs *") == "su\n"
    machine.ok("session", "setup", "--pam", "--remove")
    assert machine.etc() == before


def test_a_setup_that_fails_half_way_changes_nothing(machine: Machine) -> None:
    before = machine.etc()
    machine.sh("mkdir /etc/pam.d/runuser.new")  # where the new content would be written; runuser comes after su
    refused = machine.cloakfs(*SETUP, "--pam", "--install")
    assert (refused.returncode, refused.stderr) == (
        1, "cloakfs: /etc/pam.d/runuser.new: Is a directory; no file was changed\n")  # fmt: skip
    machine.sh("rmdir /etc/pam.d/runuser.new")
    assert machine.etc() == before


def test_without_install_nothing_changes(machine: Machine) -> None:
    before = machine.etc()
    shown = machine.ok(*SETUP, "--pam", "--service", "su")
    assert machine.etc() == before
    assert shown == textwrap.dedent(f"""\
        /etc/security/namespace.d/cloakfs.conf:
          /srv/data /srv/views/export/@ user:noinit ~{ANN},{BEN},{EVA}
        /etc/pam.d/su:
          session [success=ignore default=1] pam_exec.so quiet seteuid /usr/bin/mountpoint -q /srv/views/export
          session required pam_namespace.so unmnt_remnt ignore_instance_parent_mode
        """)


REFUSED = {
    "edited": ("sed -i s/unmnt_remnt/debug/ /etc/pam.d/su", (), 1,
               r"/etc/pam.d/su:62: the marked lines were edited by hand; restore them, or delete them yourself"),
    "runs it": ("echo 'session required pam_namespace.so' >/etc/pam.d/login", (), 1,
                "/etc/pam.d/login:1: runs pam_namespace already; remove that, or choose other services (--service)"),
    "no module": ("mount -t tmpfs tmpfs $(dirname /lib/*/security/pam_namespace.so)", (), 1,
                  "pam_namespace.so: this machine does not have it (on Debian, it is in libpam-modules)"),
    "no mount": ("", ("/srv/real", "/srv/data"), 1,
                 "/srv/real: no cloakfs mount, or one whose daemon has died (cloakfs status lists all)"),
    "one view": ("mkdir /srv/single", ("/srv/single", "/srv/data"), 1,
                 "/srv/single: has no views in directories @NAME; mount it with several views or a range of them"),
    "inside": ("", ("/srv/views/export", f"/srv/views/export/@{ANN}"), 2,
               f"/srv/views/export/@{ANN}: PATH and /srv/views/export must not contain each other"),
    "no path": ("", ("/srv/views/export", "/srv/absent"), 1, "/srv/absent: No such file or directory"),
    "mounted on": ("mount -t tmpfs -o mode=700 tmpfs /srv/data", (), 1,
                   "/srv/data: something is mounted there, which su would unmount for its session"),
    "others write": ("chmod o+w /srv", (), 1, "/srv: must belong to root, and only root may be able to write to it"),
    "not shut": ("chmod 711 /srv/views", (), 1,
                 "/srv/views/export: users who can open it can keep all others from logging in; mount it below a "
                 "directory of mode 0700, such as one made by: install -d -m 700 /srv/views"),
    "odd path": ("mkdir '/srv/a b'", ("/srv/views/export", "/srv/a b"), 2,
                 "/srv/a b: only letters, digits and . _ @ + - / may be in the paths of MOUNTPOINT and PATH"),
    "exempt": ("", ("/srv/views/export", "/srv/data", "--exempt", "bne"), 2,
               "--exempt bne: /srv/views/export has no view of that name"),
    "service": ("", ("/srv/views/export", "/srv/data", "--service", "sue"), 2,
                "--service sue: there is no /etc/pam.d/sue"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_and_change_nothing(machine: Machine, case: str) -> None:
    before, arguments, status, line = REFUSED[case]
    if case == "edited":
        machine.ok(*SETUP, "--pam", "--install")
    if case == "one view":
        machine.sh("mkdir /srv/single")
        machine.ok("mount", "/srv/real", "/srv/single", "--view", ANN)
        before = ""
    machine.sh(before)
    there = machine.etc()
    refused = machine.cloakfs("session", "setup", *(arguments or SETUP[2:]), "--pam", "--install")
    assert refused.stderr == f"cloakfs: {line}\n"
    assert refused.returncode == status
    assert machine.etc() == there
    if case == "edited":
        assert machine.cloakfs("session", "setup", "--pam", "--remove").stderr == f"cloakfs: {line}\n"


def test_views_without_a_user_name_are_named(machine: Machine) -> None:
    machine.ok("umount", "/srv/views/export")
    machine.mount(ANN, f"{USERS[BEN]}:{USERS[BEN]}")
    done = machine.cloakfs(*SETUP, "--pam", "--install")
    assert done.stderr == (
        "cloakfs: /srv/views/export: warning: pam_namespace needs views of user names, "
        f"so it cannot use @{USERS[BEN]}\n"
    )
    assert machine.sh("grep -o '~.*' /etc/security/namespace.d/cloakfs.conf") == f"~{ANN}\n"


def test_a_range_stands_for_its_accounts(machine: Machine) -> None:
    machine.ok("umount", "/srv/views/export")
    machine.mount("4661-4662")
    machine.ok(*SETUP, "--pam", "--install")
    sees(machine.su, BEN)
    assert "Permission denied" in machine.su(EVA, "ls /srv/data 2>&1 || true")


def test_the_drop_ins_of_user_managers_are_valid(machine: Machine) -> None:
    machine.ok(*SETUP, "--systemd", "--install")
    for user, uid in USERS.items():
        unit = f"user@{uid}.service"
        text = machine.sh(f"grep -v ^# /etc/systemd/system/{unit}.d/cloakfs.conf")
        assert text == f"[Service]\nBindPaths=-/srv/views/export/@{user}:/srv/data\n"
        if shutil.which("systemd-analyze"):
            assert "cloakfs.conf" not in machine.sh(f"systemd-analyze verify --man=no {unit} 2>&1 || true")
