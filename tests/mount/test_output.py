"""The output of commands to full disks, closed pipes and narrow terminals, with long lists and odd names."""

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable

import pytest

from cloakfs.state.runtime import RUN_DIR, STATE_DIR
from tests.mount.conftest import COMMAND, Mount, run

MakeMount = Callable[..., Mount]


def ended(*arguments: str, stdout: int) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("command", [("table",), ("table", "--json"), ("explain", "--as-server", "1:1")], ids=" ".join)
def test_a_full_disk_is_told_in_one_line(mount: MakeMount, command: tuple[str, ...]) -> None:
    m = mount()
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        said = ended(command[0], m.path, *command[1:], stdout=full)
        assert said == (1, "cloakfs: standard output: No space left on device\n")
    finally:
        os.close(full)


def test_a_reader_that_has_gone_is_not_told_of(mount: MakeMount) -> None:
    m = mount()
    theirs, ours = os.pipe()
    os.close(theirs)
    try:
        for command in ("table", "status"):
            assert ended(command, m.path, stdout=ours) == (1, "")
    finally:
        os.close(ours)


def test_a_fifo_is_no_exports_file(base: str) -> None:
    fifo = os.path.join(base, "x.exports")
    os.mkfifo(fifo)
    done = run("check", base, check=False)
    assert (done.returncode, done.stdout) == (1, f"{fifo}: error: Not a regular file\n")
    done = run("mount", base, base, "--exports", fifo, check=False)
    assert done.returncode != 0
    assert "Not a regular file" in done.stderr


def test_status_of_a_thousand_definitions(mount: MakeMount) -> None:
    maps = " ".join(f"uid {number} map {number + 5000}" for number in range(1000))
    m = mount("-o", f"rw,range_map={maps},cloak_list=uid +007 1 9")
    said = run("status", m.path).stdout
    assert "range_map = (1,000 of them: see -v),cloak_list = uid +007 1 9\n" in said
    assert re.search(r"^ mounted   rw,nosuid,nodev,relatime, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d$", said, re.M)
    assert max(map(len, said.splitlines())) < 500
    assert not any(line.endswith(" ") for line in said.splitlines())
    (told,) = json.loads(run("status", m.path, "--json").stdout)
    assert told["options"].count("uid") == 1001
    assert told["words"] == "rw,nosuid,nodev,relatime"
    assert told["since"] > 0


def test_explain_cuts_nothing_on_a_narrow_terminal(mount: MakeMount, tree: str) -> None:
    deep = "a-directory-with-a-name-that-is-long/" + "x" * 120
    os.makedirs(os.path.join(tree, deep))
    m = mount("-o", "cloak_list=uid +007 0 9999")
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "explain", m.at(deep), "--as-server", "77:77"],
            stdout=theirs,
            env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
        ) as process:
            os.close(theirs)
            said = b""
            while True:
                try:
                    piece = os.read(ours, 65536)
                except OSError:
                    break
                if not piece:
                    break
                said += piece
        assert process.returncode == 0
    finally:
        os.close(ours)
    assert "…" not in said.decode()
    table = said.decode().split("permissions")[-1]
    assert table.count("x") >= 120


def test_names_of_other_bytes_make_valid_json(mount: MakeMount, tree: str) -> None:
    with open(os.path.join(os.fsencode(tree), b"odd-\xff-\xc3\xa9"), "wb"):
        pass
    m = mount()
    for command in (["table", m.path], ["explain", m.path + "/odd-\udcff-é", "--as-server", "1:1"]):
        said = subprocess.run([*COMMAND, *command, "--json"], capture_output=True, check=True, timeout=60).stdout
        said.decode()
        assert "odd-\\377-é" in str(json.loads(said)).replace("\\\\", "\\")
        assert rb"\ud" not in said


def test_who_is_expected(mount: MakeMount) -> None:
    m = mount()
    for who in ("1:2:3:4", "1-2", "x:1"):
        done = run("explain", m.path, "--as", who, check=False)
        assert (done.returncode, done.stderr) == (2, f"cloakfs: --as {who}: expected USER or UID:GID[:GID,GID…]\n")


# -- directories that cannot be written ------------------------------------------------------------


@pytest.mark.parametrize("room", [RUN_DIR, STATE_DIR])
@pytest.mark.parametrize("words", [(), ("-f",)], ids=["background", "foreground"])
def test_a_room_that_cannot_be_written_is_told_in_one_line(
    base: str, tree: str, room: str, words: tuple[str, ...]
) -> None:
    os.makedirs(room, exist_ok=True)
    target = os.path.join(base, "view")
    os.mkdir(target)
    done = with_read_only(room, "mount", tree, target, *words)
    assert (done.returncode, done.stdout) == (1, "")
    way_out = r"; its file system has to be writable \(mount -o remount,rw\)" if room == STATE_DIR else ""
    assert re.fullmatch(rf"cloakfs: {room}\S*: Read-only file system{way_out}\n", done.stderr), done.stderr


def test_export_up_without_a_room_is_told_in_one_line(base: str, tree: str) -> None:
    os.makedirs(RUN_DIR, exist_ok=True)
    file = os.path.join(base, "lab.exports")
    with open(file, "w", encoding="utf-8") as exports:
        exports.write(f"{tree} *(rw)\n")
    done = with_read_only(RUN_DIR, "export", "up", "--name", "test-room", file)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"cloakfs: {RUN_DIR}/export-test-room.lock: Read-only file system\n"


def with_read_only(room: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where `room` cannot be written, in mounts of its own."""
    script = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, room, *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
