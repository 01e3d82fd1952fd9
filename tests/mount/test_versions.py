"""The state of an earlier cloakfs is read; that of a newer one, and processes of another version, are refused."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloakfs.nfs import guard, stale
from cloakfs.state import client, runtime
from cloakfs.tree import index
from tests.agents import write
from tests.altered import Alteration
from tests.mount import alterations, conftest
from tests.mount.conftest import Mount, daemons_with, is_mounted, run
from tests.mount.guards import be_of_version, guarding
from tests.mount.loopfs import attached, require
from tests.mount.test_control import asked as answered
from tests.mount.test_plugins import plugin
from tests.mount.test_trees import NULL, by_handle, handle_of, index_of, steady
from tests.processes import kill
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]

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
            f"cloakfs: {index_of(m)}: version {version} is not known to this cloakfs, which uses {index.VERSION}; "
            f"use the cloakfs that wrote it, or move {os.path.dirname(index_of(m))} away "
            "(old file handles become stale)\n"
        )
        assert not is_mounted(m.path)
        assert Path(index_of(m)).read_bytes() == before
        # The way out.
        shutil.move(os.path.dirname(index_of(m)), f"{base}/away")  # perhaps on another file system
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


def test_a_migration_for_which_there_is_no_room_loses_nothing(base: str) -> None:
    with attached("tmpfs", f"{base}/state", "-t", "tmpfs", "-o", "size=1m") as state:
        path = f"{state}/nodes.sqlite"
        given = {number: b"\1\0\0\0\1\0\0\0" + number.to_bytes(8, "little") for number in range(100, 6100)}
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.executescript((DATA / "index-0.1.0.sql").read_text())
            db.executemany("INSERT INTO objects VALUES (?, ?, 1, x'61')", given.items())
        with pytest.raises(sqlite3.OperationalError, match="full"):
            index.Index(path)
        subprocess.run(["mount", "-o", "remount,size=100m", state], check=True)
        with contextlib.closing(index.Index(path)) as found:
            assert {number: found.find(number) for number in given} == {
                number: (handle, 1, b"a") for number, handle in given.items()
            }
            assert found.last == max(given)


# -- what daemons tell -----------------------------------------------------------------------------


def refused(*command: str, status: int = 1) -> str:
    done = run(*command, check=False)
    assert (done.returncode, done.stdout) == (status, ""), done
    assert done.stderr.startswith("cloakfs: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("cloakfs: ").rstrip()


def test_a_daemon_that_tells_in_a_newer_version(tree: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(f"{tree}/file", b"x")
    with steady(tree, base) as mount, contextlib.ExitStack() as stack:
        with daemons_with(alterations.publish_otherwise):
            m = stack.enter_context(mount("-o", NULL))
        line = (
            f"{m.path}: {runtime.state_path(m.key)}: version 7 is not known to this cloakfs, which uses "
            f"{runtime.VERSION}; use the cloakfs that mounted it (process {m.pid})"
        )
        assert refused("status", m.path) == line
        assert line in run("status", check=False).stdout.splitlines()
        assert f"{m.path}: its daemon has died" not in run("status", check=False).stdout
        (told,) = (told for told in json.loads(run("status", "--json", check=False).stdout) if told["target"] == m.path)
        assert (told["version"], told["pid"], f"{m.path}: {told['failure']}") == (7, m.pid, line)
        assert refused("explain", m.at("file"), "--as", "5:5") == line
        assert refused("table", m.path, "--as", "5:5") == line
        assert "Visible" in run("explain", m.at("file"), "--as", "5:5", "-o", "ro").stdout
        assert refused("mount", tree, m.path, "-o", NULL).startswith(f"{m.path}: {tree} is mounted there already")
        pid = m.pid
        done = run("umount", m.path)
        assert done.stderr == (
            f"cloakfs: {m.path}: its daemon (process {pid}) publishes its state in version 7, which this cloakfs "
            "does not know; unmounting is the same in every version\n"
        )
        assert not is_mounted(m.path)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd"))


def test_a_daemon_of_0_1_0_is_one_that_lives(tree: str, mount: MakeMount) -> None:
    """It tells neither a version nor the device of its mount."""
    m = mount("-o", NULL)
    place = runtime.state_path(m.key)
    told = json.loads(Path(place).read_text())
    assert told["version"] == runtime.VERSION
    for name in ("version", "device", "asked", "since"):
        del told[name]
    Path(place).write_text(json.dumps(told))
    said = run("status", m.path).stdout
    assert f"process {m.pid}, 0 reloads" in said
    assert "1970" not in said
    assert f"{m.path}: its daemon has died" not in run("status", check=False).stdout
    assert run("explain", m.path, "--as", "5:5").stderr == ""
    # The command knows for whose end it has to wait.
    pid = m.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        waiting = subprocess.Popen([*conftest.COMMAND, "umount", m.path], stderr=subprocess.PIPE, text=True)
        wait_until(lambda: not is_mounted(m.path))
        assert waiting.stderr is not None
        assert waiting.stderr.readline().endswith(f"waiting for its daemon (process {pid}) to end\n")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert waiting.wait(60) == 0
    waiting.stderr.close()


# -- the control protocol --------------------------------------------------------------------------

NONE_HIDDEN = "class P:\n    def visible(self, caller, attrs):\n        return True\n"


@pytest.mark.parametrize("newer", ["daemon", "command"])
def test_a_command_and_a_daemon_of_other_protocols(
    newer: str, base: str, mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: list[Alteration] = [alterations.speak_another_protocol]
    theirs, ours = (other, []) if newer == "daemon" else ([], other)
    with daemons_with(*theirs):
        plain = mount("-o", "cloak_list=uid +007 5")
        plugged = mount("--policy", plugin(base, NONE_HIDDEN))
    spoken, known = (client.VERSION + (which == newer) for which in ("daemon", "command"))

    def line(m: Mount) -> str:
        return (
            f"{m.path}: its daemon (process {m.pid}) cannot be asked: it speaks version {spoken} of the control "
            f"protocol, and this cloakfs {known}; use the cloakfs that mounted it, or mount the tree again"
        )

    with daemons_with(*ours):
        for command in ("explain", "table"):
            done = run(command, plain.path, "--as", "5:5")
            assert done.stdout
            assert done.stderr == f"cloakfs: {line(plain)}; using the options that it published last\n"
            said = refused(command, plugged.path, "--as", "5:5")
            assert said == f"{line(plugged)}; only the daemon can ask its plug-in (-o policy=… asks the one on disk)"
        os.mkdir(f"{base}/upper")
        assert refused("mount", plain.path, f"{base}/upper") == f"{plain.path}: {line(plain)}"
        run("umount", plain.path)


def test_before_the_version_nothing_is_answered(mount: MakeMount) -> None:
    m = mount()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(client.socket_of(m.key))
        odd: tuple[Any, ...] = ({}, [], None, {"version": None}, {"version": True}, {"method": "lie over"}, "x")
        for request in odd:
            answer = answered(connection, json.dumps(request).encode())
            assert answer.keys() == {"version", "refused"}, request
        for request in (b"\xff", b"[" * 100_000, b""):
            assert answered(connection, request).keys() == {"version", "refused"}
        assert answered(connection, b'{"version": %d}' % client.VERSION) == {"version": client.VERSION}
        assert "options" in answered(connection, b"{}")


# -- the guard of an export ------------------------------------------------------------------------


def guarded(
    tree: str, base: str, name: str, answers: int, writes: int
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A service with a real guard of these versions, and no NFS server."""
    run_dir = os.path.join(runtime.RUN_DIR, f"export-{name}")
    return guarding(tree, f"{base}/root/it", run_dir, altered=[partial(be_of_version, answers, writes)])


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(4)}"


def test_a_guard_that_answers_in_a_newer_version(tree: str, base: str, name: str) -> None:
    with guarded(tree, base, name, guard.VERSION + 6, stale.VERSION + 6) as process:
        pid = process.pid
        for order in ("status", "reload", "down"):
            assert refused("export", order, "--name", name) == (
                f"service {name}: its guard (process {pid}): version 7 is not known to this cloakfs, which uses "
                f"{guard.VERSION}; use the cloakfs that runs it, or end it (kill {pid}), which unmounts everything"
            )
        done = run("status", check=False)
        assert done.returncode == 3, "nobody knows whether it is healthy"
        assert f"service {name}: its guard (process {pid}): version 7 is not known to this cloakfs" in done.stdout
        assert is_mounted(f"{base}/root/it")
        process.terminate()
        assert process.wait(60) == 0
        assert not is_mounted(f"{base}/root/it")


def test_what_a_killed_guard_of_a_newer_version_wrote_down(tree: str, base: str, name: str) -> None:
    with guarded(tree, base, name, guard.VERSION, stale.VERSION + 6) as process:
        kill(process.pid)
        place = os.path.join(runtime.RUN_DIR, f"export-{name}", "service.json")
        line = f"{place}: version 7 is not known to this cloakfs, which uses {stale.VERSION}; "
        Path(base, "x.exports").write_text(f"{tree} *(rw)\n")
        up = ("export", "up", f"{base}/x.exports", "--name", name, "--root", f"{base}/root")
        for command in (("export", "status", "--name", name), ("export", "down", "--name", name), up):
            said = refused(*command)
            assert line in said
            assert "use the cloakfs that wrote it for export status and down" in said
        done = run("status", check=False)
        assert (done.returncode, f"service {name}: {line}" in done.stdout) == (3, True), done
        assert is_mounted(f"{base}/root/it")
        # The one that wrote it takes it down.
        told = json.loads(Path(place).read_text())
        Path(place).write_text(json.dumps({**told, "version": stale.VERSION}))
        run("export", "down", "--name", name)
        assert not is_mounted(f"{base}/root/it")


def test_a_guard_that_lives_is_taken_down_whatever_it_wrote_down(tree: str, base: str, name: str) -> None:
    with guarded(tree, base, name, guard.VERSION, stale.VERSION + 6) as process:
        run("export", "down", "--name", name)
        assert process.wait(60) == 0
        assert not is_mounted(f"{base}/root/it")
