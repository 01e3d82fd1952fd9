"""Whether two machines serve the same: each difference that clients would notice is told, and nothing else."""

import contextlib
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from cloakfs.state import handlekey
from cloakfs.state.runtime import STATE_DIR, mount_key
from cloakfs.tree.index import Index
from tests.mount.conftest import run
from tests.mount.loopfs import filesystem, require_disk
from tests.mount.test_handle_key import folder, made_key

__all__ = ["folder"]


def described(exports: Path) -> str:
    return run("export", "same-as", "--exports", str(exports)).stdout


def compared(exports: Path, other: Path) -> tuple[int, list[str]]:
    done = run("export", "same-as", str(other), "--exports", str(exports), check=False)
    assert done.stderr == ""
    as_json = run("export", "same-as", str(other), "--exports", str(exports), "--json", check=False)
    assert json.loads(as_json.stdout) == done.stdout.splitlines()
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def exports(base: str, tree: str) -> Path:
    path = Path(base, "x.exports")
    path.write_text(f"{tree} 10.1.0.0/16(rw,subtree_check,cloak_list = uid +007 1 9999)\n")
    return path


def test_what_differs_is_told(exports: Path, base: str, tree: str) -> None:
    require_disk(tree, "numbers are not computed on a tmpfs")
    made_key()
    other = Path(base, "other.json")
    other.write_text(described(exports))
    content = json.loads(other.read_text())
    assert json.loads(Path("/etc/cloakfs/key").read_text())["key"] not in other.read_text()
    assert compared(exports, other) == (0, [])
    (mount,) = content["mounts"]
    fingerprint = content["key of file handles"]
    content["key of file handles"] = None
    content["accounts"]["zoe"] = "4711:4711:27"
    other.write_text(json.dumps(content))
    assert compared(exports, other) == (
        3,
        ["accounts, zoe: none here, 4711:4711:27 there", f"key of file handles: {fingerprint} here, none there"],
    )
    other.write_text(described(exports))
    exports.write_text(exports.read_text().replace("subtree_check,", ""))
    status, lines = compared(exports, other)
    assert status == 3
    assert [line.partition(":")[0] for line in lines] == [f"mounts, {mount}, export", f"mounts, {mount}, options"]
    exports.write_text(exports.read_text().replace("10.1.0.0", "10.2.0.0"))
    status, lines = compared(exports, other)
    assert (status, len(lines)) == (3, 2)
    assert f"mounts, {mount}: none here, one there" in lines
    exports.write_text(exports.read_text().replace("10.2.0.0/16(", "10.1.0.0/16(subtree_check,"))
    os.rename(tree, f"{tree}.old")
    os.mkdir(tree)
    status, (line,) = compared(exports, other)
    assert status == 3
    assert line.startswith(f"mounts, {mount}, file system: ")


def state_of(tree: str, mount: str, *, computed: bool, secret: bytes | None) -> None:
    """The state of a mount that was made here."""
    folder = os.path.join(STATE_DIR, mount_key(tree, mount))
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    with contextlib.closing(Index(os.path.join(folder, "nodes.sqlite"), secret=secret)) as index:
        index.claim(1, bytes(16), computed=computed)


def test_handles_of_ganesha_are_not_the_same(exports: Path, base: str, tree: str) -> None:
    require_disk(tree, "numbers are not computed on a tmpfs")
    made_key()
    exports.write_text(f"{tree} 10.1.0.0/16(rw,all_squash,anonuid=1000,anongid=1000)\n")
    other = Path(base, "other.json")
    words = ("export", "same-as", "--server", "ganesha", "--exports", str(exports))
    other.write_text(run(*words).stdout)
    done = run(*words, str(other), check=False)
    assert (done.returncode, "nfs-ganesha adds a number" in done.stdout) == (3, True), done


def test_handles_that_no_other_machine_knows(exports: Path, base: str) -> None:
    other = Path(base, "other.json")
    with filesystem("ext4", base) as tree:
        exports.write_text(f"{tree} *(subtree_check)\n")
        other.write_text(described(exports))
        ((mount, said),) = json.loads(other.read_text())["mounts"].items()
        place = mount.removesuffix(" of *")
        assert "there is no key" in said["file handles"]
        made_key()
        other.write_text(described(exports))
        assert compared(exports, other) == (0, [])
        key = handlekey.read()
        assert key is not None
        secret = key.secret(mount_key(tree, place))
        state_of(tree, place, computed=True, secret=secret)
        assert compared(exports, other) == (0, [])
        for computed, own in ((True, None), (False, secret)):
            state_of(tree, place, computed=computed, secret=own)
            for _ in range(2):  # also if it is so on both
                status, (line,) = compared(exports, other)
                assert status == 3
                assert line.startswith(f"mounts, {mount}, file handles: of this machine alone: ")
                other.write_text(described(exports))
            shutil.rmtree(os.path.join(STATE_DIR, mount_key(tree, place)))
            other.write_text(described(exports))
        state_of(tree, place, computed=True, secret=secret)
        index = os.path.join(STATE_DIR, mount_key(tree, place), "nodes.sqlite")
        with contextlib.closing(sqlite3.connect(index)) as db:
            db.execute("DROP TABLE numbering")  # as in the index of an earlier version
            db.execute("PRAGMA user_version = 2")
            db.commit()
        status, (line,) = compared(exports, other)
        assert (status, "its index gives the numbers" in line) == (3, True)
        Path(index).write_bytes(b"damaged" * 1000)
        done = run("export", "same-as", "--exports", str(exports), check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert index in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[]", "is not what cloakfs export same-as prints"),
        ('{"version": 99}', "version 99 is not known to this cloakfs"),
    ],
)
def test_what_is_no_description(exports: Path, base: str, content: str, said: str) -> None:
    other = Path(base, "other.json")
    other.write_text(content)
    done = run("export", "same-as", str(other), "--exports", str(exports), check=False)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert f"{other}: {said}" in done.stderr


def test_an_entry_that_is_wrong(exports: Path) -> None:
    exports.write_text("/nowhere *(cloak_list = nonsense)\n")
    done = run("export", "same-as", "--exports", str(exports), check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(exports) in done.stderr
