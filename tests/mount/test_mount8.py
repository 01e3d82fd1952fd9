"""mount(8), fstab and their options, where the helper is installed in a mount namespace and not on this machine."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import kill

ROOT = Path(__file__).parents[2]
COMMANDS = (ROOT / "docs" / "commands.md").read_text("utf-8")
SCRIPTS = Path(sys.executable).parent

# The namespace has directories of its own for what is installed, and for what cloakfs and mount(8) keep. Copies of
# mounts that others made would keep their daemons from ending.
STAGE = f"""
set -e
umount --all --internal-only --lazy --types fuse.cloakfs
for directory in /srv /mnt /run/cloakfs /var/lib/cloakfs /usr/local/bin /media; do
  mkdir -p $directory; mount -t tmpfs -o mode=755 none $directory
done
[ ! -d /run/mount ] || mount -t tmpfs none /run/mount
mkdir /media/upper /media/work /srv/real /mnt/view
mount -t overlay -o lowerdir=/usr/sbin,upperdir=/media/upper,workdir=/media/work none /usr/sbin
rm -f /usr/sbin/mount.fuse.cloakfs
ln -s {SCRIPTS}/mount.fuse.cloakfs /usr/sbin/
ln -s {SCRIPTS}/cloakfs /usr/local/bin/
chmod 777 /srv/real
cp /bin/true /srv/real/program
chmod 4755 /srv/real/program
echo ready
exec sleep infinity
"""

VIEW = "/mnt/view"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOUNT = ("mount", "-t", "fuse.cloakfs")


@dataclass
class Machine:
    """A mount namespace with the helper installed."""

    holder: subprocess.Popen[str]

    def do(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            # Its root is not that of its mount namespace if the tests run in a chroot.
            ["nsenter", "--target", str(self.holder.pid), "--root", "--wdns=/", "--mount", *command],
            capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"PATH": PATH},
        )  # fmt: skip

    def well(self, *command: str) -> str:
        done = self.do(*command)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def refused(self, *command: str) -> str:
        done = self.do(*command)
        assert done.returncode, done
        assert "Traceback" not in done.stderr
        return done.stderr.strip()

    def table(self) -> str:
        """The line of the mount table."""
        return self.well("findmnt", "--noheadings", "--output", "SOURCE,FSTYPE,OPTIONS", VIEW)

    def words(self) -> set[str]:
        return set(self.well("findmnt", "--noheadings", "--output", "VFS-OPTIONS", VIEW).strip().split(","))

    def write(self, text: str, path: str) -> None:
        self.well("sh", "-c", 'printf "%s\\n" "$1" >"$2"', "sh", text, path)

    @contextlib.contextmanager
    def mounted(self, *command: str, says: str = "") -> Iterator[None]:
        try:
            done = self.do(*command)
            assert (done.returncode, done.stderr) == (0, says), done
            yield
        finally:
            self.do("umount", VIEW)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", STAGE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "ready\n"
            yield Machine(holder)
        finally:
            Machine(holder).do("umount", "--all", "--lazy", "--types", "fuse.cloakfs")
            kill(holder.pid)


@pytest.fixture
def by_mount_fuse(machine: Machine) -> Iterator[None]:
    """Without a helper of its own, mount(8) finds the command by that of FUSE."""
    if not Path("/sbin/mount.fuse3").exists():
        pytest.skip("no /sbin/mount.fuse3 (package fuse3)")
    machine.well("mv", "/usr/sbin/mount.fuse.cloakfs", "/media/put-away")
    yield
    machine.well("mv", "/media/put-away", "/usr/sbin/mount.fuse.cloakfs")


def test_what_users_of_fuse_are_used_to(machine: Machine) -> None:
    machine.well("touch", f"{VIEW}/below")
    words = 'nonempty,auto_unmount,fsname="lab files",no_root_squash'
    with machine.mounted(*MOUNT, "/srv/real", VIEW, "-o", words):
        assert machine.table().split(maxsplit=2)[:2] == ["lab", "files"]
        assert machine.well("ls", VIEW) == "program\n"
        assert "tree      /srv/real" in machine.well("cloakfs", "status", VIEW)
        pid = machine.well("sh", "-c", "sed 's/.*\"pid\": \\([0-9]*\\).*/\\1/' /run/cloakfs/*.json")
        kill(int(pid))
        until_gone = "for n in $(seq 600); do findmnt /mnt/view >/dev/null || exit 0; sleep .1; done; exit 1"
        machine.well("sh", "-c", until_gone)
    assert machine.well("ls", VIEW) == "below\n"
    machine.well("rm", f"{VIEW}/below")


def test_an_entry_of_exports_d_in_fstab(machine: Machine) -> None:
    machine.write("/srv/real one(rw) two(ro)", "/srv/some.exports")
    line = "/srv/real /mnt/view fuse.cloakfs {},nofail,exports=/srv/some.exports,client={} 0 0"
    machine.write(line.format("rw", "one"), "/srv/fstab")
    with machine.mounted("mount", "-T", "/srv/fstab", VIEW):
        assert "rw" in machine.words()
        # mount(8) passes all of the line on.
        machine.well("mount", "-T", "/srv/fstab", "-o", "remount,ro", VIEW)
        assert "ro" in machine.words()
    machine.write(line.format("rw", "two"), "/srv/fstab")
    with machine.mounted("mount", "-T", "/srv/fstab", VIEW):
        assert "ro" in machine.words()
        assert "change the exports.d file and reload it (kill -HUP " in machine.refused(
            "mount", "-o", "remount,noexec", VIEW
        )
        machine.well("mount", "-o", "remount,rw", VIEW)
        assert "rw" in machine.words()
    machine.write(line.format("ro", "one"), "/srv/fstab")
    with machine.mounted("mount", "-T", "/srv/fstab", VIEW):
        assert "ro" in machine.words()
    said = machine.refused(*MOUNT, "/srv/real", VIEW, "-o", "client=one")
    assert said == "cloakfs: --client chooses an entry of an exports.d file, and needs --exports FILE"
    said = machine.refused("cloakfs", "mount", "/srv/real", VIEW, "--exports=/a", "-o", "exports=/b")
    assert said == "cloakfs: --exports /a and -o exports=/b: give one of them"


def test_the_lines_of_fstab_in_the_document(machine: Machine) -> None:
    text = (ROOT / "docs" / "local.md").read_text("utf-8")
    lines = re.findall(r"^/srv/demo (/mnt/\w+) fuse\.cloakfs .*$", text, re.MULTILINE)
    (entry,) = re.findall(r"^/srv/demo lab\.example\.org\(.*?\)$", COMMANDS, re.MULTILINE | re.DOTALL)
    machine.write("\n".join(re.findall(r"^/srv/demo /mnt/\w+ fuse\.cloakfs .*$", text, re.MULTILINE)), "/srv/fstab")
    machine.write(entry, "/srv/lab.exports")
    machine.well("sh", "-c", "sed -i s,/etc/cloakfs/,/srv/, /srv/fstab; mkdir -p /srv/demo; mkdir -p $*", "sh", *lines)
    assert lines == ["/mnt/demo", "/mnt/lab", "/mnt/tools"]
    try:
        machine.well("mount", "--all", "-T", "/srv/fstab")
        assert machine.well("findmnt", "-no", "SOURCE,VFS-OPTIONS", "/mnt/tools").split() == ["tools", "ro,relatime"]
        # Only the one whose source is not that of fstab is not recognised.
        said = machine.refused("mount", "--all", "-T", "/srv/fstab")
        assert said == "cloakfs: /mnt/tools: /srv/demo is mounted there already (cloakfs umount /mnt/tools)"
    finally:
        for path in lines:
            machine.do("umount", path)


def test_links_are_not_followed_if_the_administrator_says_so(machine: Machine) -> None:
    machine.well("ln", "-s", "one", "/srv/real/link")
    try:
        with machine.mounted(*MOUNT, "/srv/real", VIEW, "-o", "nosymfollow,lazytime,strictatime,iversion,silent"):
            assert "nosymfollow" in machine.words()
            assert machine.well("readlink", f"{VIEW}/link") == "one\n"
            assert machine.refused("cat", f"{VIEW}/link").endswith("Too many levels of symbolic links")
    finally:
        machine.well("rm", "/srv/real/link")


def test_a_mount_waits_for_its_disk(machine: Machine) -> None:
    """`mp`: the directory below a disk that is not mounted is never shown."""
    machine.well("mkdir", "/srv/disk")
    try:
        for words in ("mp", "mountpoint=/srv/disk"):
            said = machine.refused(*MOUNT, "/srv/disk", VIEW, "-o", words)
            assert said == (
                "cloakfs: /srv/disk: nothing is mounted there, and the mount is to wait for that (mp); mount it first"
            )
        machine.well("mount", "-t", "tmpfs", "tmpfs", "/srv/disk")
        with machine.mounted(*MOUNT, "/srv/disk", VIEW, "-o", "mp"):
            assert machine.well("findmnt", "-no", "FSTYPE", VIEW) == "fuse.cloakfs\n"
    finally:
        # The daemon, which pins it, may be about to end.
        until_unmounted = "while mountpoint -q /srv/disk; do umount /srv/disk 2>/dev/null || sleep 0.1; done"
        machine.well("sh", "-c", f"{until_unmounted}; rmdir /srv/disk")


NO_ATIME = "cloakfs: warning: noatime has no effect here: reading changes the real tree's times as its own mount says\n"


def check_remount(machine: Machine, *more: str) -> None:
    """Make the mount read-only and writable again, in the way that these words say."""

    def remount(words: str) -> None:
        # By the new calls of mounting, which libmount 2.39 and later has, the kernel itself remounts nothing of FUSE's.
        by_old_calls = ("env", "LIBMOUNT_FORCE_MOUNT2=always") if "-i" in more else ()
        machine.well(*by_old_calls, "mount", *more[:2], "-o", f"remount,{words}", *more[2:], VIEW)

    before = machine.words()
    remount("ro")
    assert machine.words() == before - {"rw"} | {"ro"}
    assert machine.refused("touch", f"{VIEW}/one").endswith("Read-only file system")
    remount("rw")
    assert machine.words() == before
    machine.well("sh", "-c", f"touch {VIEW}/one; rm {VIEW}/one")


def test_a_remount_makes_it_read_only_and_writable(machine: Machine) -> None:
    words = "noexec,noatime,sync,fsname=lab,no_root_squash"
    with machine.mounted(*MOUNT, "/srv/real", VIEW, "-o", words, says=NO_ATIME):
        check_remount(machine)
        check_remount(machine, "-i")  # by the kernel alone
        assert "sync" in machine.table().split()[-1].split(",")
        machine.well("mount", "-o", "remount,ro", VIEW)
        assert '"read_only": true' in machine.well("cloakfs", "explain", VIEW, "--as", "5:5", "--json")


@pytest.mark.usefixtures("by_mount_fuse")
def test_mount_fuse_remounts_as_well(machine: Machine) -> None:
    with machine.mounted(*MOUNT, "/srv/real", VIEW, "-o", "nosuid,nodev,fsname=lab,no_root_squash"):
        check_remount(machine, *MOUNT[1:], "/srv/real")
        machine.well("mount", "-o", "remount,ro", VIEW)
        assert {"ro", "nosuid", "nodev"} <= machine.words()


def test_a_remount_changes_nothing_else(machine: Machine) -> None:
    def refused(words: str, *more: str) -> str:
        before = machine.table()
        said = machine.refused("mount", *more, "-o", f"remount,{words}", VIEW)
        assert machine.table() == before
        return said

    way_out = "a remount changes only ro and rw; for anything else, unmount and mount again (cloakfs umount /mnt/view)"
    with machine.mounted(*MOUNT, "/srv/real", VIEW, "-o", "cloak_list=uid +000 5,no_root_squash"):
        assert refused("noexec") == f"cloakfs: noexec: {way_out}"
        assert refused("ro,setid,cloak_list=uid +000 6") == f"cloakfs: setid, cloak_list=uid +000 6: {way_out}"
        assert machine.refused("mount.fuse.cloakfs", "x", VIEW, "-o", "remount") == f"cloakfs: remount: {way_out}"
        said = machine.refused("sh", "-c", f"exec 3>{VIEW}/open; rm {VIEW}/open; mount -o remount,ro {VIEW}")
        assert said.startswith(f"cloakfs: {VIEW}: Device or resource busy; files are open for writing")
        machine.well("mount", "-o", "remount,ro,cloak_list=uid +000 5", VIEW)
    said = machine.refused("mount.fuse.cloakfs", "x", "/srv", "-o", "remount,ro")
    assert said == "cloakfs: /srv: not a cloakfs mount, so there is nothing to remount"


def test_set_id_bits_and_devices_by_names_that_mount8_passes_on(machine: Machine) -> None:
    """mount(8) swallowed `suid` and `dev` until 2.38."""
    version = re.search(r"util-linux (\d+)\.(\d+)", machine.well("mount", "--version"))
    assert version
    swallowed = {"nosuid", "nodev"} if tuple(map(int, version.groups())) <= (2, 38) else set[str]()
    for words, flags in (
        ("suid,dev,default_permissions", swallowed),
        ("setid,devices,default_permissions", set[str]()),
        ("nosuid,nodev,setid,devices,default_permissions", {"nosuid", "nodev"}),
        ("default_permissions", {"nosuid", "nodev"}),
    ):
        with machine.mounted(*MOUNT, "/srv/real", VIEW, "-o", words):
            assert machine.words() & {"nosuid", "nodev"} == flags, words
