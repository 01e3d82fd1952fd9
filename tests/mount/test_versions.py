"""What an earlier cloakfs left is taken over; what a newer one left, or a process of another version, is refused."""

import contextlib
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloakfs import index
from tests.agents import write
from tests.mount.conftest import Mount, is_mounted, run
from tests.mount.loopfs import attached, require
from tests.mount.test_trees import NULL, by_handle, handle_of, index_of, steady

DATA = Path(__file__).parent.parent / "data"
VIEWS = ("-o", "view_access=0", "--view", "1:1", "--view", "2:2")

GIVEN = {
    "file": (
        "810000000000000002000000e7f56c5c", "8100000000000100020000003cd125ec", "81000000000002000200000024cf50d3",
    ),
    "a": ("810000000000000003000000480d2378", "8100000000000100030000004461a5be", "81000000000002000300000035e61349"),
    "a/b": ("810000000000000005000000ee62c1f5", "810000000000010005000000ff76c46a", "810000000000020005000000080e49f5"),
    "a/file": (
        "8100000000000000060000006cc9c6d2", "81000000000001000600000098c88697", "81000000000002000600000013066714",
    ),
    "a/b/file": (
        "810000000000000007000000b27bbece", "810000000000010007000000a57a34c5", "810000000000020007000000c0540398",
    ),
}  # fmt: skip
"""The handles that 0.1.0 gave, when it made the index in `DATA`: without views, in view @1, and in view @2."""

CONTENT = {"0": "file", "1": "a/file", "2": "a/b/file"}

# In the order of the inodes.
TREE = """
write 0 file
mkdir a
mkdir a/b
write 1 a/file
write 2 a/b/file
set_inode_field / mode 040777
set_inode_field / generation 0x10000000
set_inode_field /file generation 0x10000001
set_inode_field /a generation 0x10000002
set_inode_field /a/b generation 0x10000003
set_inode_field /a/file generation 0x10000004
set_inode_field /a/b/file generation 0x10000005
"""


@pytest.fixture
def known_tree(base: str) -> Iterator[str]:
    """A tree on an ext4 file system whose id, inodes and generations, and so the handles, are always the same."""
    require("ext4")
    for name, content in CONTENT.items():
        Path(base, name).write_text(content)
    Path(base, "commands").write_text(TREE.lstrip())
    with open(f"{base}/img", "wb") as file:
        file.truncate(4 << 20)
    # With checksums, generations could not be set like this.
    words = ["-O", "^metadata_csum,^has_journal", "-U", "c10a4f50-0100-4100-8100-010010010010"]
    subprocess.run(["mkfs.ext4", "-q", "-F", *words, "img"], cwd=base, check=True, capture_output=True)
    subprocess.run(["debugfs", "-w", "-f", "commands", "img"], cwd=base, check=True, capture_output=True)
    with attached(f"{base}/img", f"{base}/real", "-o", "loop") as tree:
        yield tree


def make_index(m: Mount) -> None:
    """As 0.1.0 left it."""
    os.makedirs(os.path.dirname(index_of(m)))
    with contextlib.closing(sqlite3.connect(index_of(m))) as db:
        db.executescript((DATA / "index-0.1.0.sql").read_text())


def asked(m: Mount, statement: str) -> list[object]:
    with contextlib.closing(sqlite3.connect(index_of(m))) as db:
        return [row[0] for row in db.execute(statement)]


# -- the index -------------------------------------------------------------------------------------


def test_an_index_of_0_1_0_keeps_its_handles(known_tree: str, base: str) -> None:
    with steady(known_tree, base) as mount:
        make_index(Mount(known_tree, f"{base}/mnt"))
        for views, words in enumerate([("-o", NULL), VIEWS, VIEWS]):
            with mount(*words) as m:
                # First by handle: nobody has looked anything up by name.
                for path in ("a/b/file", "file", "a/file"):
                    assert by_handle(m.path, bytes.fromhex(GIVEN[path][views])) == path.encode()
                top = f"@{views}" if views else ""
                assert {path: handle_of(m.at(top, path)).hex() for path in GIVEN} == {
                    path: handles[views] for path, handles in GIVEN.items()
                }
                assert "cannot decode" not in m.log
        assert asked(m, "PRAGMA user_version") == [index.VERSION]
        # A number that was given once, to something that is gone, is not given again.
        with mount("-o", NULL) as m:
            write(m.at("new"), b"")
            assert os.stat(m.at("new")).st_ino > 8


@pytest.mark.parametrize("version", [index.VERSION + 1, 2**31 - 1, -1])
def test_an_index_of_an_unknown_version_is_refused_and_left_alone(tree: str, base: str, version: int) -> None:
    with steady(tree, base) as mount:
        with mount("-o", NULL) as m:
            os.listdir(m.path)
        with contextlib.closing(sqlite3.connect(index_of(m))) as db:
            db.execute(f"PRAGMA user_version = {version}")
            db.execute("ALTER TABLE objects RENAME TO things")
            db.commit()
        before = Path(index_of(m)).read_bytes()
        done = run("mount", tree, m.path, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"cloakfs: {index_of(m)}: version {version} is not known to this cloakfs, whose own is {index.VERSION}; "
            f"use the cloakfs that wrote it, or move {os.path.dirname(index_of(m))} away "
            "(old file handles become stale)\n"
        )
        assert not is_mounted(m.path)
        assert Path(index_of(m)).read_bytes() == before
        # The way out.
        os.rename(os.path.dirname(index_of(m)), f"{base}/away")
        with mount("-o", NULL) as m:
            os.listdir(m.path)


def test_a_migration_is_done_as_a_whole_or_not_at_all(base: str) -> None:
    path = f"{base}/nodes.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE other (name); CREATE INDEX objects ON other (name)")  # a name that is taken
    with pytest.raises(sqlite3.Error):
        index.Index(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (0,)
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("other",), ("objects",)]
