"""The maintainer scripts of the Debian package, each in a root of its own made of bind mounts."""

import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]

ROOT = """
set -e
mount -t tmpfs tmpfs "$1"
cd "$1"
mkdir usr proc tmp var var/lib var/lib/cloakfs etc etc/alternatives etc/cloakfs run run/cloakfs home
ln -s usr/bin usr/sbin usr/lib usr/lib64 .
mount --rbind /usr usr
mount --bind /etc/alternatives etc/alternatives  # awk
mount -t proc proc proc
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


def test_purge_empties_a_state_that_is_a_file_system_of_its_own(tmp_path: Path) -> None:
    before = "mount -t tmpfs tmpfs var/lib/cloakfs; echo state >var/lib/cloakfs/nodes.sqlite"
    status, said, left = outcome(tmp_path, before=before, script="postrm")
    assert (status, said) == (0, "")
    assert left == {"home/diary"}
