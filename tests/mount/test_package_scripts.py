"""The maintainer scripts of the Debian package, each in a root of its own made of bind mounts."""

import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]

ROOT = """
set -e
mount -t tmpfs tmpfs "$1"
cd "$1"
mkdir usr dev proc tmp var var/lib var/lib/cloakfs etc etc/alternatives etc/cloakfs run run/cloakfs home
ln -s usr/bin usr/sbin usr/lib usr/lib64 .
mount --rbind /usr usr
mount --bind /etc/alternatives etc/alternatives  # awk
mount -t proc proc proc
touch dev/null
mount --bind /dev/null dev/null
cp "$2"/* tmp
echo diary >home/diary
echo state | tee var/lib/cloakfs/nodes.sqlite run/cloakfs/log >etc/cloakfs/x.exports
"""


def outcome(tmp_path: Path, *, before: str, script: str) -> tuple[int, str, set[str]]:
    """Run a maintainer script; return its exit status, what it said, and which files are left."""
    root = tmp_path / "root"
    root.mkdir()
    shell = (
        f"{ROOT}\n{before}\nstatus=0\nchroot . sh tmp/{script} purge || status=$?\n"
        'find etc var run home -path etc/alternatives -prune -o -type f -printf "left %p\\n"\nexit $status'
    )
    apart = ("unshare", "--mount", "--propagation=private", "sh", "-c", shell, "sh")
    done = subprocess.run(
        [*apart, root, TOP / "package/debian"], capture_output=True, text=True, timeout=60, check=False
    )
    left = {line.removeprefix("left ") for line in done.stdout.splitlines() if line.startswith("left ")}
    return done.returncode, done.stderr, left


def test_purge_removes_the_state(tmp_path: Path) -> None:
    status, said, left = outcome(tmp_path, before="", script="postrm")
    assert (status, said, left) == (0, "", {"home/diary"})


@pytest.mark.parametrize("place", ["var/lib/cloakfs/export-default/exports/1", "etc/cloakfs/x", "run/cloakfs/a/b"])
def test_purge_does_not_reach_into_a_bind_mount(tmp_path: Path, place: str) -> None:
    """Also where it is of the same file system, so that no st_dev tells."""
    status, said, left = outcome(tmp_path, before=f"mkdir -p {place}; mount --bind home {place}", script="postrm")
    assert status == 1
    assert said.count("\n") == 1
    assert f"/{place}" in said
    assert {"home/diary", "var/lib/cloakfs/nodes.sqlite", "etc/cloakfs/x.exports"} <= left


def test_purge_knows_a_place_by_its_real_path(tmp_path: Path) -> None:
    """/var is a symbolic link, and the table of mounts has no links."""
    before = "mv var data; ln -s data var; mkdir data/lib/cloakfs/x; mount --bind home data/lib/cloakfs/x"
    status, said, left = outcome(tmp_path, before=before, script="postrm")
    assert status == 1
    assert "/data/lib/cloakfs/x" in said
    assert "home/diary" in left


@pytest.mark.parametrize("name", ["my data", "a\\\\040b", "a\\tb"])
def test_purge_knows_a_real_path_with_blanks(tmp_path: Path, name: str) -> None:
    """The table of mounts writes them in another way."""
    place = f'"$(printf "{name}")"'
    before = f"mkdir srv srv/{place}; mv var/lib/cloakfs srv/{place}/it; ln -s /srv/{place}/it var/lib/cloakfs"
    status, said, left = outcome(
        tmp_path, before=f"{before}; mkdir srv/{place}/it/x; mount --bind home srv/{place}/it/x", script="postrm"
    )
    assert status == 1, said
    assert said.count("\n") == 1
    assert "home/diary" in left
    subprocess.run(["rm", "-rf", tmp_path / "root"], check=True)
    status, said, left = outcome(tmp_path, before=before, script="postrm")
    assert (status, said, left) == (0, "", {"home/diary"})


@pytest.mark.parametrize("place", ["var/lib/cloakfs", "etc/cloakfs", "run/cloakfs"])
def test_purge_does_not_empty_a_bind_mount(tmp_path: Path, place: str) -> None:
    """What is there belongs to another place."""
    status, said, left = outcome(tmp_path, before=f"mount --bind home {place}", script="postrm")
    assert (status, said.count("\n")) == (1, 1)
    assert f" /{place}\n" in said
    assert "home/diary" in left


def test_purge_does_not_reach_into_nested_mounts(tmp_path: Path) -> None:
    place = "run/cloakfs/a"
    before = f"mkdir {place}; mount -t tmpfs tmpfs {place}; mkdir {place}/b; mount --bind home {place}/b"
    status, said, left = outcome(tmp_path, before=before, script="postrm")
    assert status == 1
    assert "/run/cloakfs/a /run/cloakfs/a/b" in said
    assert "home/diary" in left


@pytest.mark.parametrize(
    "there",
    [
        "mkdir -p srv/cloakfs/kept",
        "mkdir -p srv/cloakfs; mount -t tmpfs tmpfs srv/cloakfs",
        "mkdir -p srv; ln -s ../home srv/cloakfs",
    ],
)
def test_purge_leaves_what_somebody_keeps_at_the_mount_points(tmp_path: Path, there: str) -> None:
    status, said, left = outcome(tmp_path, before=f"{there}; ln -s /home etc/cloakfs/link", script="postrm")
    assert (status, said, left) == (0, "", {"home/diary"})


def test_purge_empties_a_state_that_is_a_file_system_of_its_own(tmp_path: Path) -> None:
    before = "mount -t tmpfs tmpfs var/lib/cloakfs; echo state >var/lib/cloakfs/nodes.sqlite"
    status, said, left = outcome(tmp_path, before=before, script="postrm")
    assert (status, said) == (0, "")
    assert left == {"home/diary"}
