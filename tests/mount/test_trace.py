"""`cloakfs trace` reports every request, with the words of `explain`, and delays nobody."""

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
from click.testing import CliRunner

from cli import trace as command
from cloakfs.filesystem import trace
from cloakfs.state import client
from cloakfs.state.runtime import Mounted
from cloakfs.state.runtime import mounted as telling
from cloakfs.tracerecords import OPERATIONS, Record, TraceFilter
from cloakfs.tuning import Tuning
from tests.agents import User, names, read, write
from tests.altered import command_with
from tests.mount import alterations, conftest
from tests.mount.conftest import Mount, daemons_with, run, told
from tests.mount.test_cli import explained
from tests.mount.test_control import asked, connected, sockets
from tests.mount.test_plugins import plugin
from tests.processes import kill
from tests.waiting import wait_until, wait_until_settled

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN, BEN = 1001, 1002
MAPPED = "range_map=uid 1000 1999 map 20000 gid 1000 1999 map 20000"
CLOAKED = f"{MAPPED},cloak_list=uid +077 20000 20999"
HIDES = "uid +077 20000 20999 hides it (no bit of the mask met)"


class Watching:
    """Traces a mount, from when this object is made."""

    def __init__(self, m: Mount, **wanted: Any) -> None:
        (mount,) = [mount for mount in telling().values() if mount.target == m.path]
        self.batches = client.traced(mount, TraceFilter(**wanted))
        next(self.batches)

    def records(self) -> list[Record]:
        """Those of all requests that are answered by now. (RELEASE comes after close(2) has returned.)"""
        records, dropped = next(self.batches)
        assert not dropped
        return records

    def of(self, operation: str) -> Record:
        """The last record of this operation."""
        return [record for record in self.records() if record["operation"] == operation][-1]


@pytest.fixture
def watching() -> Iterator[Callable[..., Watching]]:
    with contextlib.ExitStack() as stack:

        def make(m: Mount, **wanted: Any) -> Watching:
            made = Watching(m, **wanted)
            stack.callback(made.batches.close)
            return made

        yield make


MakeWatching = Callable[..., Watching]


@contextlib.contextmanager
def tracing(m: Mount, *options: str, at: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command, which has begun to trace when this returns."""
    begun, pipe = os.pipe()
    with subprocess.Popen(
        [*command_with(partial(alterations.report_when_traced, pipe)), "trace", at or m.path, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[pipe],
    ) as process:  # fmt: skip
        os.close(pipe)
        try:
            assert os.read(begun, 1) == b""
            yield process
        finally:
            os.close(begun)
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def owned(path: str, uid: int, mode: int) -> str:
    """A file with this server uid and mode."""
    Path(path).write_text("text\n")
    os.chown(path, uid, uid)
    os.chmod(path, mode)
    return path


# -- what is told ----------------------------------------------------------------------------------


def work(top: str) -> None:
    """One call of each kind."""
    write(f"{top}/file", b"12345")
    read(f"{top}/file")
    os.chmod(f"{top}/file", 0o640)
    os.link(f"{top}/file", f"{top}/linked")
    os.rename(f"{top}/linked", f"{top}/renamed")
    os.unlink(f"{top}/renamed")
    os.symlink("file", f"{top}/symbolic")
    os.readlink(f"{top}/symbolic")
    os.mkdir(f"{top}/directory")
    os.listdir(top)
    os.rmdir(f"{top}/directory")
    os.mkfifo(f"{top}/fifo")
    os.setxattr(f"{top}/file", "user.note", b"value")
    os.getxattr(f"{top}/file", "user.note")
    os.listxattr(f"{top}/file")
    os.removexattr(f"{top}/file", "user.note")
    os.access(f"{top}/file", os.W_OK)
    os.statvfs(top)
    fd = os.open(f"{top}/file", os.O_RDWR | os.O_APPEND)
    os.fsync(fd)
    fcntl.lockf(fd, fcntl.LOCK_SH, 10, 5)
    fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)
    fd = os.open(f"{top}/file", os.O_RDWR)
    os.copy_file_range(fd, fd, 2, 0, 100)
    os.close(fd)


def test_every_operation(mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    m = mount("-o", MAPPED)
    ann = user(ANN)
    seen = watching(m)
    ann.do(work, m.path)
    records = seen.records()
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record["operation"], []).append(record)
        assert record["client"] == {"uid": ANN, "gid": ANN}
        # Nobody has to be identified for statfs(2).
        assert record["server"] == (None if record["operation"] == "statfs" else {"uid": 20001, "gid": 20001})
        assert (record["pid"], record["inside"]) == (ann.pid, False)
        assert record["command"] == Path(f"/proc/{ann.pid}/comm").read_text().rstrip("\n")
        assert (record["hidden"], record["refused"]) == ([], None)
        assert 0 <= time.time() - record["time"] < 300
        assert 0 < record["microseconds"] < 60_000_000
    untold = {"fallocate", "flush", "fsyncdir", "lseek", "getattr", "release", "releasedir"}  # perhaps
    untold |= set() if hasattr(pyfuse3, "FileLock") else {"getlk", "setlk", "flock", "unlock"}
    untold |= set() if hasattr(pyfuse3.Operations, "copy_file_range") else {"copy_file_range"}
    assert set(OPERATIONS) - by_name.keys() <= untold

    def told_of(operation: str) -> tuple[Any, ...]:
        record = by_name[operation][0]
        return record["path"], record["request"], record["answer"]

    file = m.at("file")
    assert told_of("create") == (file, "O_WRONLY|O_CREAT|O_TRUNC 0666", f"-rw-r--r-- {ANN}:{ANN}")
    assert told_of("write") == (file, "5 at 0", "5")
    assert (told_of("read")[0], told_of("read")[2]) == (file, "5")
    assert told_of("setattr") == (file, "mode 0640", f"-rw-r----- {ANN}:{ANN}")
    assert (told_of("link")[0], by_name["link"][0]["new_path"]) == (file, m.at("linked"))
    assert (told_of("rename")[0], by_name["rename"][0]["new_path"]) == (m.at("linked"), m.at("renamed"))
    assert told_of("unlink") == (m.at("renamed"), None, "0")
    assert told_of("symlink")[:2] == (m.at("symbolic"), "file")
    assert told_of("readlink") == (m.at("symbolic"), None, "file")
    assert told_of("mkdir")[0] == m.at("directory")
    assert told_of("opendir") == (m.path, None, "0")
    assert told_of("rmdir")[0] == m.at("directory")
    assert told_of("setxattr")[:2] == (file, "user.note")
    assert told_of("statfs")[0] == m.path
    assert told_of("access") == (file, "w", "0")
    if hasattr(pyfuse3, "FileLock"):
        assert told_of("setlk") == (file, "read 10 bytes from 5", "0")
        assert told_of("getlk") == (file, "write all from 0", "0")
        assert told_of("flock") == (file, "exclusive", "0")
        assert told_of("unlock") == (file, None, "0")
    assert [record["request"] for record in by_name["open"]][-2:] == ["O_RDWR|O_APPEND", "O_RDWR"]


def test_what_the_kernel_may_remember(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    Path(tree, "file").touch()
    m = mount()
    ann = user(ANN)
    wait_until_settled(tree, f"{tree}/file")
    seen = watching(m)
    ann.do(os.stat, m.at("file"))
    assert seen.of("lookup")["remembers"].keys() == {"name", "attributes"}
    told_ = [record["remembers"] for record in lookups_until_kept(ann, m, seen)]
    assert told_[-1] == {"name": 3600, "attributes": 3600}
    assert ann.error(os.stat, m.at("absent")) == errno.ENOENT
    absent = seen.of("lookup")
    assert (absent["error"], absent["remembers"]) == ("ENOENT", {"name": 10})


def lookups_until_kept(who: User, m: Mount, seen: Watching) -> list[Record]:
    """The lookups of a file until the kernel may remember it, so that it asks no more."""
    records: list[Record] = []
    deadline = time.monotonic() + 60
    while not records or not records[-1]["remembers"]["name"]:
        assert time.monotonic() < deadline
        Path(m.real("file")).rename(m.real("other"))
        Path(m.real("other")).rename(m.real("file"))
        told(m.path)
        who.do(os.stat, m.at("file"))
        records += [record for record in seen.records() if record["operation"] == "lookup"]
    return records


def test_who_opened_a_file_counts_as_who_reads_it(
    tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching
) -> None:
    owned(f"{tree}/file", 20001, 0o600)
    m = mount("-o", f"{MAPPED},passthrough=off")
    ann = user(ANN)
    fd = ann.do(os.open, m.at("file"), os.O_RDWR)
    seen = watching(m)
    ann.do(os.pwrite, fd, b"x", 0)
    record = seen.of("write")  # nobody traced when it was opened
    assert (record["path"], record["client"], record["pid"]) == (m.at("file"), None, None)
    assert record["server"] == {"uid": 20001}
    fd = ann.do(os.open, m.at("file"), os.O_RDWR)
    ann.do(os.pwrite, fd, b"x", 0)
    record = seen.of("write")
    assert (record["client"], record["pid"]) == ({"uid": ANN, "gid": ANN}, ann.pid)


# -- why -------------------------------------------------------------------------------------------


def test_hidden_names(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    # A tmpfs lists what is new first. A hidden name at the end would be read once more at the next position.
    owned(f"{tree}/shown", 20001, 0o604)
    owned(f"{tree}/secret", 20001, 0o600)
    m = mount("-o", CLOAKED)
    ben = user(BEN)
    expected = [{"path": m.at("secret"), "reason": HIDES}]
    reason = explained(m.at("secret"), "--as", f"{BEN}:{BEN}")["steps"][-1]["reason"]
    assert reason == HIDES
    seen = watching(m)
    assert ben.error(os.stat, m.at("secret")) == errno.ENOENT
    record = seen.of("lookup")
    assert (record["path"], record["error"], record["hidden"]) == (m.at("secret"), "ENOENT", expected)
    assert record["server"] == {"uid": 20002, "gid": 20002}
    assert ben.do(names, m.path) == ["shown"]
    listings = [record for record in seen.records() if record["operation"] == "readdir"]
    assert [record["hidden"] for record in listings if record["hidden"]] == [expected]
    assert ben.error(write, m.at("secret"), b"") == errno.EACCES
    assert [record["hidden"] for record in seen.records() if record["operation"] == "create"] == [expected]
    ben.do(write, m.at("mine"), b"")
    seen.records()
    assert ben.error(os.rename, m.at("mine"), m.at("secret")) == errno.EACCES
    assert seen.of("rename")["hidden"] == expected
    user(ANN).do(os.stat, m.at("secret"))
    assert [record["hidden"] for record in seen.records()] == [[]] * 1


def test_hidden_objects_and_what_is_above(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    os.makedirs(f"{tree}/home/inner")
    os.chown(f"{tree}/home", 20001, 20001)
    m = mount("-o", CLOAKED)
    ben = user(BEN)
    fd = ben.do(os.open, m.at("home", "inner"), os.O_RDONLY)
    seen = watching(m)
    os.chmod(m.real("home"), 0o700)
    told(m.path)
    seen.records()
    assert ben.error(os.listdir, fd) == errno.ESTALE
    record = next(record for record in seen.records() if record["error"] == "ESTALE")
    assert record["path"] == m.at("home", "inner")
    assert record["hidden"] == [{"path": m.at("home"), "reason": HIDES}]


def test_many_hidden_names_are_counted(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    for number in range(50):
        owned(f"{tree}/{number}", 20001, 0o600)
    m = mount("-o", CLOAKED)
    seen = watching(m, hidden=True)
    assert user(BEN).do(names, m.path) == []
    # On a busy machine, the listing takes more than one request.
    hidden = [(len(record["hidden"]), record["more_hidden"]) for record in seen.records()]
    assert all(listed == 20 or not more for listed, more in hidden)
    assert sum(listed + more for listed, more in hidden) == 50


def test_what_its_maker_would_not_see(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    os.mkdir(f"{tree}/set-gid")
    os.chmod(f"{tree}/set-gid", 0o2777)
    m = mount(
        "--policy",
        plugin(
            os.path.dirname(tree),
            "class P:\n    def visible(self, who, attrs):\n        return 'x' not in attrs.name\n",
        ),
    )
    ben = user(BEN)
    seen = watching(m)
    assert ben.error(os.mkdir, m.at("x")) == errno.EACCES
    record = seen.of("mkdir")
    (hidden,) = record["hidden"]
    assert hidden["path"] == m.at("x")
    assert hidden["reason"].startswith("plug-in ")


def test_a_plug_in(base: str, tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    owned(f"{tree}/secret", 7, 0o644)
    owned(f"{tree}/failing", 7, 0o644)
    code = (
        "class P(Policy):\n"
        "    def forward(self, caller):\n        return caller.uid + 5, caller.gid + 6, [9]\n"
        "    def visible(self, caller, attrs):\n        return attrs.name != 'secret'\n"
        "    def show(self, attrs):\n"
        "        if attrs.name == 'failing':\n            raise ValueError('odd')\n        return attrs\n"
    )
    m = mount("--policy", plugin(base, code))
    m.expect_errors = True
    seen = watching(m)
    ben = user(BEN)
    reasons = {}
    for name in ("secret", "failing"):
        assert ben.error(os.stat, m.at(name)) == errno.ENOENT
        record = seen.of("lookup")
        assert record["server"] == {"uid": BEN + 5, "gid": BEN + 6}
        (hidden,) = record["hidden"]
        done = run("explain", m.at(name), "--as", f"{BEN}:{BEN}", "--json", check=False)
        reasons[name] = json.loads(done.stdout)["steps"][-1]["reason"]
        assert hidden["reason"] == reasons[name]
    assert reasons["failing"] == reasons["secret"] + " failed"


def test_fixed_views(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    owned(f"{tree}/secret", 3001, 0o600)
    m = mount("-o", "cloak_list=uid +077 3000 3999", "--view", "3001:3001", "--view", "3002:3002")
    seen = watching(m)
    other = user(3002)
    view = m.at("@3002")
    assert other.error(os.stat, f"{view}/secret") == errno.ENOENT
    record = next(record for record in seen.records() if record["path"] == f"{view}/secret")
    assert record["server"] == {"uid": 3002, "gid": 3002}
    assert record["hidden"][0]["path"] == f"{view}/secret"
    assert other.error(os.stat, m.at("@3001")) == errno.EACCES
    record = next(record for record in seen.records() if record["error"] == "EACCES")
    assert record["refused"] == "there is no such view, or it does not let this caller in"


def test_the_mount_below(base: str, tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    owned(f"{tree}/secret", 20001, 0o600)
    lower = mount("-o", CLOAKED)
    upper = mount(source=lower.path)
    seen, below = watching(upper), watching(lower)
    ben = user(BEN)
    assert not ben.do(names, upper.path)
    expected = [{"path": upper.at("secret"), "reason": f"hidden by the lower mount, {lower.path}"}]
    assert expected in [record["hidden"] for record in seen.records() if record["operation"] == "readdir"]
    below.records()
    assert ben.error(os.stat, upper.at("secret")) == errno.ENOENT
    records = below.records()
    assert {"path": lower.at("secret"), "reason": HIDES} in [one for record in records for one in record["hidden"]]
    assert any(record["inside"] for record in records)


def test_what_the_real_tree_refuses(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    owned(f"{tree}/file", 20001, 0o600)
    m = mount("-o", MAPPED)
    seen = watching(m)
    assert user(BEN).error(read, m.at("file")) == errno.EACCES
    record = seen.of("open")
    assert record["error"] == "EACCES"
    assert record["refused"] == f"the real tree refuses it ({m.at('file')} is -rw------- 20001:20001 there)"


# -- filters ---------------------------------------------------------------------------------------


def test_filters(tree: str, mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    os.makedirs(f"{tree}/a/b")
    for name in ("a/b/file", "a/text.txt", "other"):
        owned(f"{tree}/{name}", 20001, 0o644)
    owned(f"{tree}/a/secret", 20001, 0o600)
    m = mount("-o", CLOAKED)
    watch = {
        "everything": watching(m),
        "ben": watching(m, users=(BEN,)),
        "below a": watching(m, paths=(m.at("a"),)),
        "texts": watching(m, paths=(m.at("*.txt"),)),
        "opens": watching(m, operations=("open", "opendir")),
        "errors": watching(m, errors=True),
        "hidden": watching(m, hidden=True),
    }
    ann, ben = user(ANN), user(BEN)
    for who in (ann, ben):
        for name in ("a/b/file", "a/text.txt", "other"):
            who.do(read, m.at(name))
        who.error(os.stat, m.at("absent"))
        who.error(os.stat, m.at("a/secret"))
    found = {what: seen.records() for what, seen in watch.items()}

    def by(condition: Callable[[Record], bool]) -> list[Record]:
        return [record for record in found["everything"] if condition(record)]

    def same(what: str, condition: Callable[[Record], bool]) -> None:
        # RELEASE may come while the records are fetched.
        records = [record for record in found[what] if record["operation"] != "release"]
        assert records == [record for record in by(condition) if record["operation"] != "release"]
        assert records

    same("ben", lambda record: record["client"]["uid"] == BEN)
    same("below a", lambda record: f"{record['path']}/".startswith(f"{m.at('a')}/"))
    same("texts", lambda record: record["path"].endswith(".txt"))
    same("opens", lambda record: record["operation"] == "open")
    same("errors", lambda record: record["error"] is not None)
    same("hidden", lambda record: record["path"] == m.at("a/secret") and record["client"]["uid"] == BEN)
    assert {record["path"] for record in found["hidden"]} == {m.at("a/secret")}


def test_odd_requests_to_trace_are_refused(mount: MakeMount) -> None:
    m = mount()
    with connected(m) as connection:
        for odd in (
            {},
            {"wanted": 5},
            {"wanted": {"users": ["x"]}},
            {"wanted": {"colour": 1}},
            {"wanted": {"paths": "x"}},
        ):
            assert "refused" in asked(connection, json.dumps({"method": "trace", **odd}).encode()), odd
        assert "refused" in asked(connection, b'{"method": "fetch"}')
        begin = b'{"method": "trace", "wanted": {}}'
        assert asked(connection, begin) == {}
        assert "refused" in asked(connection, begin)
        assert "options" in asked(connection, b"{}")
        os.statvfs(m.path)
        assert len(asked(connection, b'{"method": "fetch"}')["records"]) == 1


# -- the command -----------------------------------------------------------------------------------


def test_lines(tree: str, mount: MakeMount, user: MakeUser) -> None:
    owned(f"{tree}/secret", 20001, 0o600)
    m = mount("-o", CLOAKED)
    ben = user(BEN)
    with tracing(m, "--op", "lookup", "--op", "statfs", "--user", str(BEN)) as process:
        assert ben.error(os.stat, m.at("secret")) == errno.ENOENT
        ben.do(os.statvfs, m.path)
        process.send_signal(signal.SIGINT)
        status, out, err = ended(process)
    assert (status, err) == (0, "")
    *_, hidden, other = out.splitlines()
    who = f"{BEN}:{BEN} → 20002:20002 {Path(f'/proc/{ben.pid}/comm').read_text().rstrip()}[{ben.pid}]"
    assert f" {who} lookup {m.at('secret')} = ENOENT " in hidden
    assert hidden.endswith(f" µs; hidden: {HIDES}")
    assert f" {who} statfs {m.path} = 0 " in other.replace("→ -", "→ 20002:20002")


def call_this_thread(name: bytes) -> None:
    """See prctl(2)."""
    assert ctypes.CDLL(None).prctl(15, name) == 0


def test_odd_bytes(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    ben = user(BEN)
    name = b"odd\xff\n\x1b[31m"
    owned(os.fsdecode(os.path.join(os.fsencode(tree), name)), 20001, 0o600)
    ben.do(call_this_thread, b"c\xfe\n\x1bx")
    path = os.path.join(os.fsencode(m.path), name)
    shown = rf"{m.path}/odd\377\012\033[31m"
    with tracing(m, "--op", "lookup", "--count", "1") as process:
        assert ben.error(os.stat, path) == errno.ENOENT
        status, out, _ = ended(process)
    assert status == 0
    assert out.count("\n") == 1
    assert rf" c\376\012\033x[{ben.pid}] lookup {shown} = ENOENT" in out
    with tracing(m, "--op", "lookup", "--count", "1", "--json") as process:
        assert ben.error(os.stat, path) == errno.ENOENT
        _, out, _ = ended(process)
    record = json.loads(out)
    assert out.count("\n") == 1
    assert record["path"].startswith(rf"{m.path}/odd\377")
    assert record["command"].startswith(r"c\376")
    with tracing(m, "--path", os.fsdecode(path), "--count", "1") as process:
        ben.do(os.statvfs, m.path)
        assert ben.error(os.stat, path) == errno.ENOENT
        _, out, _ = ended(process)
    assert "lookup" in out


def test_ways_to_name_a_path(base: str, tree: str, mount: MakeMount) -> None:
    os.mkdir(f"{tree}/[a]")
    Path(tree, "[a]", "text.txt").touch()
    m = mount()
    link = f"{base}/link"
    os.symlink(m.path, link)
    for words in (
        [m.path, "--path", m.at("[[]a]")],
        [m.path, "--path", "[[]a]"],
        [m.path, "--path", "*.txt"],
        [link, "--path", f"{link}/*/text.txt"],
        [link, "--path", m.path],
        [link, "--path", "."],
    ):
        with tracing(m, *words[1:], "--json", "--count", "1", at=words[0]) as process:
            os.statvfs(m.path)
            read(m.at("[a]", "text.txt"))
            status, out, _ = ended(process)
        assert status == 0, words
        assert (json.loads(out)["operation"] == "statfs") is (words[-1] in (m.path, ".")), words
    done = run("trace", m.path, "--path", "/elsewhere", check=False)
    assert (done.returncode, done.stderr) == (2, f"cloakfs: --path /elsewhere: not in the mount at {m.path}\n")


def test_summary(tree: str, mount: MakeMount, user: MakeUser) -> None:
    owned(f"{tree}/secret", 20001, 0o600)
    m = mount("-o", CLOAKED)
    ben, ann = user(BEN), user(ANN)

    def play() -> None:
        for _ in range(20):
            assert ben.error(os.stat, m.at("secret")) == errno.ENOENT
        ann.do(os.statvfs, m.path)

    with tracing(m, "--summary", "--json") as process:
        play()
        process.send_signal(signal.SIGINT)
        status, out, err = ended(process)
    assert (status, err) == (0, "")
    summary = json.loads(out)
    rows = {row["operation"]: row for row in summary["operations"]}
    lookups = rows["lookup"]["count"]
    assert 20 <= lookups <= 21  # the first time, the kernel may ask twice
    assert [rows["lookup"][name] for name in ("errors", "hidden")] == [lookups, lookups]
    assert [rows["statfs"][name] for name in ("count", "errors", "hidden")] == [1, 0, 0]
    times = rows["lookup"]["microseconds"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"] <= times["sum"]
    assert [(row["client"], row["count"]) for row in summary["callers"]] == [
        (f"{BEN}:{BEN}", lookups),
        (f"{ANN}:{ANN}", 1),
    ]
    assert summary["dropped"] == 0
    with tracing(m, "--summary") as process:
        play()
        process.send_signal(signal.SIGINT)
        status, out, _ = ended(process)
    assert status == 0
    assert any(line.split()[1::2][:4] == ["lookup", "20", "20", "20"] for line in out.splitlines())


def test_what_was_answered_before_the_interrupt_is_told(mount: MakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the interrupt arrives when the records before it have just been sent."""
    m = mount()
    (mounted,) = [one for one in telling().values() if one.target == m.path]
    interrupted: list[int] = []

    def interrupted_at_first(mount: Mounted, wanted: TraceFilter) -> Iterator[tuple[list[Record], int]]:
        for batch in client.traced(mount, wanted):
            if not interrupted:
                os.statvfs(m.path)
                interrupted.append(signal.SIGINT)
            yield batch

    monkeypatch.setattr(command, "traced", interrupted_at_first)
    records = [record for record, _ in command._records(mounted, TraceFilter(), math.inf, math.inf, interrupted)]
    assert [record["operation"] for record in records if record is not None] == ["statfs"]


def test_a_tracer_that_is_killed_is_forgotten(mount: MakeMount) -> None:
    m = mount()
    before = sockets(m)
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for _ in range(trace.MOST_TRACERS):
                connection = stack.enter_context(connected(m))
                assert asked(connection, b'{"method": "trace", "wanted": {}}') == {}
            done = run("trace", m.path, "--seconds", "1", check=False)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.endswith(f"{trace.MOST_TRACERS} others trace this mount already\n")
        wait_until(lambda: sockets(m) == before)
    with tracing(m) as process:
        kill(process.pid)
        os.statvfs(m.path)
        wait_until(lambda: sockets(m) == before)
    assert "Traceback" not in m.log


def test_a_slow_tracer_delays_nobody(
    base: str, mount: MakeMount, user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemons_with(tuning=Tuning(trace_bytes=50_000)):
        m = mount()
    ben = user(BEN)
    with tracing(m, "--json", "--op", "statfs", "--op", "access") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGSTOP)
        for _ in range(1000):
            ben.do_within(60, os.statvfs, m.path)
        process.send_signal(signal.SIGCONT)
        printed = [json.loads(process.stdout.readline())]
        asked_now = 0
        while printed[-1]["operation"] == "statfs":  # it has caught up when it prints what is asked now
            ben.do_within(60, os.access, m.path, os.R_OK)
            asked_now += 1
            printed.append(json.loads(process.stdout.readline()))
        ben.do_within(60, os.access, m.path, os.X_OK)
        while printed[-1]["request"] != "x":
            printed.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        status, _, err = ended(process)
    assert status == 0
    assert 10 < sum(record["operation"] == "statfs" for record in printed) < 500
    dropped = sum(int(line.split()[1].replace(",", "")) for line in err.splitlines())
    assert dropped > 0
    assert err.endswith(" requests are left out here: they came faster than they could be printed\n")
    assert len(printed) + dropped == 1000 + asked_now + 1


def test_the_mount_ends(base: str, tree: str) -> None:
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    with conftest.mounted(tree, path) as m, tracing(m) as process:
        run("umount", path)
        status, _, err = ended(process)
    assert status == 1
    assert err.endswith("does not answer: it has ended\n")
    assert err.count("\n") == 1


def invoked(*words: str) -> tuple[int, str]:
    """Exit status and output of the command in this process."""
    done = CliRunner().invoke(command.trace, words)
    return done.exit_code, done.output


def test_who_may_not_trace_or_what(mount: MakeMount, user: MakeUser, tree: str) -> None:
    m = mount()
    ben = user(BEN)
    assert ben.do(invoked, m.path) == (1, "cloakfs: only root may see what others do\n")
    for status, words in ((1, [tree]), (2, [m.path, "--op", "forget"]), (2, [m.path, "--user", "no-such-user"])):
        done = run("trace", *words, check=False)
        assert (done.returncode, done.stdout) == (status, "")
        assert "Traceback" not in done.stderr


def test_a_failure_to_trace_is_no_failure_of_the_request(
    mount: MakeMount, user: MakeUser, watching: MakeWatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemons_with(alterations.fail_to_name_callers):
        m = mount()
    m.expect_errors = True
    seen = watching(m)
    ben = user(BEN)
    for _ in range(3):
        ben.do(os.statvfs, m.path)
    assert seen.records() == []
    assert m.log.count("a request cannot be traced") == 1


# -- in the log ------------------------------------------------------------------------------------


def test_debug_logs_each_request(mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    m = mount("--debug", "-o", CLOAKED)
    owned(m.real("secret"), 20001, 0o600)
    ann, ben = user(ANN), user(BEN)
    assert ann.do(read, m.at("secret")) == b"text\n"
    assert ben.error(os.stat, m.at("secret")) == errno.ENOENT
    hidden = rf" DEBUG cloakfs\.filesystem\.core: 1002:1002 → 20002:20002 \S+\[{ben.pid}\] lookup {m.at('secret')} = "
    assert re.search(rf"{hidden}ENOENT \d+ µs; hidden: {re.escape(HIDES)}$", m.log, re.MULTILINE), m.log
    assert re.search(rf": 1001:1001 → 20001:20001 \S+\[{ann.pid}\] open {m.at('secret')} .* \d+ µs", m.log), m.log

    # Somebody who traces comes and goes: each request is logged once, then as well as afterwards.
    watch = watching(m, operations=("lookup",))
    ben.error(os.stat, m.at("traced"))
    assert watch.of("lookup")["path"] == m.at("traced")
    watch.batches.close()
    ben.error(os.stat, m.at("afterwards"))
    for name in ("traced", "afterwards"):
        assert len(re.findall(f"lookup {m.at(name)} = ENOENT", m.log)) == 1, m.log


def test_without_debug_no_request_is_logged(mount: MakeMount, user: MakeUser, watching: MakeWatching) -> None:
    m = mount("-o", CLOAKED)
    watch = watching(m)
    user(BEN).error(os.stat, m.at("traced"))
    assert watch.of("lookup")["path"] == m.at("traced")
    assert "lookup" not in m.log
