"""Who asks for what is hidden from it is reported by `cloakfs events`, and nobody else is."""

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloakfs.state.client import Watcher
from cloakfs.state.runtime import mounted as telling
from cloakfs.tuning import Tuning
from tests.agents import User, names, read, write
from tests.mount import conftest
from tests.mount.conftest import Mount, daemons_with, run
from tests.mount.test_control import asked, connected, reload
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

PROBER, OTHER, OWNER = 1001, 1002, 1003
CLOAKED = f"cloak_list=uid +077 {OWNER} {OWNER}"
ODD = b"odd\xff\n\x1b[31m"


@pytest.fixture(autouse=True)
def counted_often() -> Iterator[None]:
    with daemons_with(tuning=Tuning(probe_seconds=0.05)):
        yield


def events(m: Mount) -> list[dict[str, Any]]:
    """Those whose notes were made some time ago."""
    time.sleep(0.3)
    (mount,) = [mount for mount in telling().values() if mount.target == m.path]
    with Watcher(mount) as watcher:
        return watcher.fetch()


def event_of(m: Mount) -> dict[str, Any]:
    wait_until(lambda: len(events(m)) > 0)
    (event,) = events(m)
    return event


def hide(tree: str, count: int) -> None:
    for number in range(count):
        path = Path(tree, f"hidden{number}")
        path.touch(0o600)
        os.chown(path, OWNER, OWNER)


def stat_all(top: str, prefix: str, count: int) -> set[int]:
    """The errors of stat(2) on so many names."""
    errors = set()
    for number in range(count):
        try:
            os.stat(f"{top}/{prefix}{number}")
        except OSError as exc:
            errors.add(exc.errno or 0)
        else:
            errors.add(0)
    return errors


def create_all(top: str, count: int) -> set[int]:
    """The errors of creating so many names that are hidden, in each way."""
    errors = set()
    for number in range(count):
        path = f"{top}/hidden{number}"
        for call, *arguments in (
            (os.mkdir,), (os.mkfifo,), (os.open, os.O_CREAT | os.O_EXCL), (os.open, os.O_CREAT | os.O_WRONLY),
        ):  # fmt: skip
            try:
                call(path, *arguments)
            except OSError as exc:
                errors.add(exc.errno or 0)
        for call_ in os.link, os.rename:
            try:
                call_(f"{top}/mine", path)
            except OSError as exc:
                errors.add(exc.errno or 0)
    return errors


def ordinary_work(top: str) -> None:
    """Listings that leave out a lot, absent names, names that are there, and a few that are hidden, again and again."""
    for _ in range(20):
        assert not [name for name in names(top) if name.startswith("hidden")]
    assert stat_all(top, "absent", 200) == {errno.ENOENT}
    for number in range(100):
        write(f"{top}/work{number}", b"text")
        assert read(f"{top}/work{number}") == b"text"
    for _ in range(50):
        assert stat_all(top, "hidden", 4) == {errno.ENOENT}
    for number in range(100):
        os.unlink(f"{top}/work{number}")


def test_the_prober_is_named_once_and_nobody_else(tree: str, mount: MakeMount, user: MakeUser) -> None:
    hide(tree, 30)
    os.rename(f"{tree}/hidden29", os.fsencode(tree) + b"/" + ODD)
    m = mount("-o", f"rw,no_root_squash,probe_alarm=10/h,exempt=0,{CLOAKED}")
    prober, other, owner = (user(uid) for uid in (PROBER, OTHER, OWNER))
    other.do(ordinary_work, m.path)
    assert stat_all(m.path, "hidden", 29) == {0}  # root is exempt
    assert owner.do(stat_all, m.path, "hidden", 29) == {0}
    assert events(m) == []
    before = time.time()
    for _ in range(2):
        assert prober.do(stat_all, m.path, "hidden", 10) == {errno.ENOENT}
    assert events(m) == []
    assert prober.error(os.stat, os.fsencode(m.path) + b"/" + ODD) == errno.ENOENT
    event = event_of(m)
    assert event["lookups"] >= 21  # the kernel may ask twice
    assert before <= event.pop("time") <= time.time()
    assert event == {
        "number": 1, "event": "probing", "client": {"uid": PROBER}, "view": None, "rate": "10/h",
        "lookups": event["lookups"], "creations": 0, "handles": 0, "path": f"{m.path}/odd\udcff\n\x1b[31m", "delay": 0,
    }  # fmt: skip
    # In words, nothing reaches the terminal or the log that would move its cursor.
    (line,) = run("events", m.path).stdout.splitlines()
    lookups = f"{event['lookups']} lookups of hidden names"
    assert f"{m.path}: client uid {PROBER}: more than 10/h: {lookups}; the last:" in line
    assert line.endswith(f"{m.path}/odd\\377\\012\\033[31m")
    said = f"{m.path}: client uid {PROBER} asks for what is hidden from it: more than 10/h"
    assert m.log.count(said) == 1
    metrics = run("metrics", m.path).stdout
    assert f'cloakfs_probe_alarms_total{{mountpoint="{m.path}",view="caller"}} 1.0' in metrics
    # Once in a period, whatever it does: also in each of the ways to create something.
    prober.do(stat_all, m.path, "hidden", 29)
    prober.do(write, f"{m.path}/mine", b"")
    assert prober.do(create_all, m.path, 2) == {errno.EEXIST, errno.EACCES}
    assert len(events(m)) == 1
    assert m.log.count("asks for what is hidden") == 1


def test_creations_are_counted(tree: str, mount: MakeMount, user: MakeUser) -> None:
    hide(tree, 20)
    m = mount("-o", f"rw,probe_alarm=10/h,{CLOAKED}")
    prober = user(PROBER)
    prober.do(write, f"{m.path}/mine", b"")
    assert prober.do(create_all, m.path, 10) == {errno.EEXIST, errno.EACCES}
    prober.do(os.mkdir, f"{m.path}/directory")
    assert prober.error(os.mkdir, f"{m.path}/directory") == errno.EEXIST  # that one is no secret
    prober.do(stat_all, m.path, "hidden", 11)
    event = event_of(m)
    assert event["creations"] == 60
    # A new rate is in force at once, without a new mount.
    with connected(m) as connection:
        assert asked(connection, b'{"method": "events", "after": 0}')["events"][0]["lookups"] == event["lookups"]
        assert asked(connection, b'{"method": "events", "after": 1}') == {"events": []}
        assert "refused" in asked(connection, b'{"method": "events", "after": "x"}')


def test_handles_that_never_existed(tree: str, mount: MakeMount) -> None:
    """Root alone can open a handle here; an old one, whose file is gone, is no guess."""
    open_by = "\n".join(
        (
            "import ctypes, os, struct, sys",
            "libc = ctypes.CDLL(None, use_errno=True)",
            "top = os.open(sys.argv[1], os.O_RDONLY)",
            "for number in map(int, sys.argv[2:]):",
            "    handle = struct.pack('=IiIII', 12, 0x81, number >> 32, number & 0xFFFFFFFF, 7)",
            "    assert libc.open_by_handle_at(top, handle, os.O_PATH) == -1",
            "    print(ctypes.get_errno())",
        )
    )
    Path(tree, "old").touch()
    m = mount("-o", f"rw,probe_alarm=2/h,{CLOAKED}")
    old = os.stat(m.at("old")).st_ino
    os.unlink(m.at("old"))

    def opened(*numbers: int) -> list[int]:
        done = subprocess.run(
            [conftest.COMMAND[0], "-c", open_by, m.path, *map(str, numbers)], capture_output=True, text=True, check=True
        )
        return [int(code) for code in done.stdout.split()]

    assert set(opened(*[old] * 3, 77, 78)) == {errno.ESTALE}
    assert events(m) == []
    assert opened(5 << 48 | 1) == [errno.ESTALE]
    event = event_of(m)
    assert (event["client"], event["handles"], event["lookups"], event["path"]) == ({"uid": 0}, 3, 0, None)
    assert f"{m.path}: client uid 0: more than 2/h: 3 file handles" in run("events", m.path).stdout


def test_a_daemon_above(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """What it looks up for itself counts for nobody, and what it looks up for a caller for that caller."""
    hide(tree, 8)
    Path(tree, "there").touch()
    lower = mount("-o", f"rw,probe_alarm=2/h,{CLOAKED}")
    upper = mount(source=lower.path)
    other = user(OTHER)
    for _ in range(3):
        assert other.do(names, upper.path) == ["there"]
    other.do(os.stat, upper.at("there"))
    other.do(write, upper.at("new"), b"text")
    assert events(lower) == []
    user(PROBER).do(stat_all, upper.path, "hidden", 8)
    assert event_of(lower)["client"] == {"uid": PROBER}
    assert events(upper) == []


def test_delay(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Who is over the rate is told of one name in a while, hidden or absent alike; nobody else has to wait."""
    hide(tree, 20)
    Path(tree, "there").touch()
    os.mkdir(f"{tree}/taken", 0o700)
    os.chown(f"{tree}/taken", OWNER, OWNER)
    m = mount("-o", f"rw,probe_alarm=10/h,probe_delay=1000,{CLOAKED}")
    prober, second, other, owner = (user(uid) for uid in (PROBER, PROBER, OTHER, OWNER))
    prober.do(stat_all, m.path, "hidden", 11)
    assert event_of(m)["delay"] == 1000
    owner.do(os.stat, m.at("taken"))  # so that the kernel has it: it then looks the name up twice
    for name in "hidden12", "absent", "taken":

        def answers(name: str = name) -> bool:
            return prober.error(os.stat, m.at(name)) == errno.ENOENT

        began = time.monotonic()
        wait_until(answers)
        refused = {prober.error(os.stat, m.at(f"{kind}{number}")) for kind in ("hidden", "absent") for number in (1, 2)}
        if time.monotonic() < began + 1:
            assert refused == {errno.EAGAIN}, name
        # What there is, it sees as ever; nor is anything refused to another caller.
        second.do(os.stat, m.at("there"))
        assert "there" in second.do(names, m.path)
        assert other.do(stat_all, m.path, "absent", 5) == other.do(stat_all, m.path, "hidden", 5) == {errno.ENOENT}
        owner.do(os.stat, m.at("taken"))


def test_reload(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    hide(tree, 8)
    entries = Path(base, "e.exports")
    entries.write_text(f"{tree} *(rw, probe_alarm=off, {CLOAKED})\n")
    m = mount("--exports", str(entries))
    prober = user(PROBER)
    prober.do(stat_all, m.path, "hidden", 8)
    entries.write_text(f"{tree} *(rw, probe_alarm=5/h, {CLOAKED})\n")
    reload(m)
    assert events(m) == []
    prober.do(stat_all, m.path, "hidden", 8)
    assert event_of(m)["rate"] == "5/h"


def test_follow_and_a_flood(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Each of many callers is in an event, but the log has few lines; the command sees events as they happen."""
    hide(tree, 2)
    m = mount("-o", f"rw,probe_alarm=1/h,{CLOAKED}")
    with subprocess.Popen(
        [*conftest.COMMAND, "events", m.path, "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            user(PROBER).do(stat_all, m.path, "hidden", 2)
            assert json.loads(process.stdout.readline())["client"] == {"uid": PROBER}
            for uid in range(2000, 2030):
                stat_all_as(uid, m.path)
            seen: set[int] = set()
            while len(seen) < 30:
                uid = json.loads(process.stdout.readline())["client"]["uid"]
                assert uid not in seen
                seen.add(uid)
            assert seen == set(range(2000, 2030))
        finally:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert 10 <= m.log.count("asks for what is hidden") <= 20  # in a minute, or two
    assert len(events(m)) == 31


def stat_all_as(uid: int, top: str) -> None:
    os.seteuid(uid)
    try:
        assert stat_all(top, "hidden", 2) == {errno.ENOENT}
    finally:
        os.seteuid(0)


def test_refusals(base: str) -> None:
    done = run("events", base, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "not a cloakfs mount" in done.stderr
