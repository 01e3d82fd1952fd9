"""The session loops of cloakfs and pyfuse3: they end when they should, and keep nobody waiting."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.tuning import STANDARD
from tests.agents import User, read, write
from tests.mount import alterations
from tests.mount.conftest import AT_ONCE_OR_NEVER, Mount, daemons_with, is_mounted, unmount
from tests.mount.loopfs import attached, filesystem
from tests.waiting import wait_until

NULL = "no_root_squash"
MNT_FORCE = 1

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


@pytest.fixture(params=[False, True], ids=["lean", "stock"])
def stock(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Have daemons that are started from now on answer with the session loop of cloakfs, or with pyfuse3's own."""
    tuning = STANDARD
    if "at_once_or_never" in request.fixturenames:
        request.getfixturevalue("at_once_or_never")  # this one comes after it
        tuning = AT_ONCE_OR_NEVER
    with daemons_with(tuning=replace(tuning, stock_loop=request.param)):
        yield request.param


def stat_of(pid: int) -> list[str]:
    """What proc(5) calls state and so on; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return []


def is_gone(pid: int) -> bool:
    return stat_of(pid)[:1] in ([], ["Z"], ["X"])  # it is for init to take it away


def processor(pid: int) -> float:
    """Seconds of processor time so far."""
    words = stat_of(pid)
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


_LOOK_SECONDS = 0.8  # many times as long as the unit in which the kernel tells how much a process has used


def rests(pid: int, most: float) -> bool:
    """Whether it uses less than this part of a processor; now and then, what others mount gives it something to do."""
    before = processor(pid)
    time.sleep(_LOOK_SECONDS)
    return processor(pid) - before < most * _LOOK_SECONDS


def stat_on_and_on(path: str) -> int:
    """Until it fails; returns the errno."""
    try:
        while True:
            os.stat(path)
    except OSError as exc:
        return exc.errno or -1


def all_sorts_on_and_on(path: str) -> int:
    """Until anything fails; returns the errno."""
    try:
        while True:
            os.stat(path)
            os.listdir(os.path.dirname(path))
            fd = os.open(path, os.O_RDWR)
            try:
                os.pwrite(fd, b"x", 0)
                os.fsync(fd)  # by a thread of the daemon
                os.pread(fd, 10, 0)
            finally:
                os.close(fd)
    except OSError as exc:
        return exc.errno or -1


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once_or_never")
def test_umount_ends_an_idle_daemon(stock: bool, tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL)
    user(2001).do(write, m.at("file"), b"x")
    pid = m.pid
    unmount(m.path)
    wait_until(lambda: is_gone(pid))


@pytest.mark.usefixtures("at_once_or_never")
@pytest.mark.parametrize("use", [stat_on_and_on, all_sorts_on_and_on])
@pytest.mark.parametrize("flags", [linux.MNT_DETACH, MNT_FORCE | linux.MNT_DETACH], ids=["lazy", "force"])
def test_umount_ends_a_daemon_under_load(
    flags: int, use: Callable[[str], int], stock: bool, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", NULL)
    users = [user(2001 + number) for number in range(8)]
    for client in users:
        client.do(write, m.at(str(client.uid)), b"x")
        client.start(use, m.at(str(client.uid)))
    pid = m.pid
    time.sleep(0.5)  # of load
    linux.umount(m.path, flags)
    wait_until(lambda: is_gone(pid))
    for client in users:
        assert client.answer_within(60) in (errno.ENOENT, errno.ENOTCONN, errno.ECONNABORTED)


@pytest.mark.usefixtures("at_once_or_never")
def test_sigterm_under_load(stock: bool, tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL)
    users = [user(2001 + number) for number in range(8)]
    for client in users:
        client.do(write, m.at(str(client.uid)), b"x")
        client.start(all_sorts_on_and_on, m.at(str(client.uid)))
    pid = m.pid
    time.sleep(0.5)  # of load
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: is_gone(pid))
    assert not is_mounted(m.path)


# -- answers that take their time ------------------------------------------------------------------


@dataclass
class Slow:
    """A tree below which FSYNC waits until `flag` is there."""

    path: str
    flag: str
    control: str

    def go_on(self) -> None:
        Path(self.flag).touch()

    def waiting(self, path: str) -> int:
        """How many requests of a FUSE mount have no answer yet."""
        return int(Path(self.control, str(os.minor(os.stat(path).st_dev)), "waiting").read_text())


@pytest.fixture
def slow(base: str) -> Iterator[Slow]:
    path, flag, control = (os.path.join(base, name) for name in ("slow", "flag", "control"))
    os.mkdir(path)
    with attached("fusectl", control, "-t", "fusectl"):
        server = subprocess.Popen([sys.executable, "-m", "tests.mount.slowfs", path, flag])
        try:
            wait_until(lambda: is_mounted(path))
            yield Slow(path, flag, control)
        finally:
            Path(flag).touch()
            linux.umount(path, linux.MNT_DETACH)
            assert server.wait(60) == 0


def sync_each(directory: str, count: int) -> list[int]:
    """fsync(2) of so many files at the same time; returns the errnos."""
    results: list[int] = []

    def sync(fd: int) -> None:
        try:
            os.fsync(fd)
            results.append(0)
        except OSError as exc:
            results.append(exc.errno or -1)

    files = [os.open(os.path.join(directory, str(number)), os.O_RDONLY) for number in range(count)]
    threads = [threading.Thread(target=sync, args=(fd,)) for fd in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in files:
        with contextlib.suppress(OSError):  # the session may be over
            os.close(fd)
    return results


@pytest.mark.usefixtures("at_once_or_never")
def test_answers_that_wait_keep_nobody_waiting(stock: bool, slow: Slow, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=slow.path)
    patient, other = user(2001), user(2002)
    count = 80 if stock else 300  # pyfuse3's own has 99 workers
    patient.start(sync_each, m.path, count)
    try:
        wait_until(lambda: slow.waiting(m.path) >= count)
        # The answers wait until they are let go; how long this takes is the bench's business.
        for number in range(20):
            other.do_within(60, os.stat, m.at("5"))
            other.do_within(60, read, m.at(str(1000 + number)))  # by a thread
        wait_until(lambda: rests(m.pid, 0.1))
        assert not patient.has_answered()
    finally:
        slow.go_on()
    assert patient.answer_within(60) == [0] * count
    pid = m.pid
    unmount(m.path)
    wait_until(lambda: is_gone(pid))


@pytest.mark.usefixtures("at_once_or_never")
def test_sigterm_while_answers_wait(stock: bool, slow: Slow, mount: MakeMount, user: MakeUser) -> None:
    """They may take all of the daemon's threads."""
    m = mount("-o", NULL, source=slow.path)
    patient = user(2001)
    patient.start(sync_each, m.path, 60)
    try:
        wait_until(lambda: slow.waiting(m.path) >= 60)
        pid = m.pid
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_mounted(m.path))
        assert not is_gone(pid)
    finally:
        slow.go_on()
    assert patient.answer_within(60) == [0] * 60
    wait_until(lambda: is_gone(pid))


@pytest.mark.usefixtures("at_once_or_never")
def test_the_session_is_aborted_while_answers_wait(stock: bool, slow: Slow, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=slow.path)
    patient = user(2001)
    patient.start(sync_each, m.path, 30)
    try:
        wait_until(lambda: slow.waiting(m.path) >= 30)
        pid = m.pid
        linux.umount(m.path, MNT_FORCE | linux.MNT_DETACH)
        assert patient.answer_within(60) == [errno.ECONNABORTED] * 30
    finally:
        slow.go_on()
    wait_until(lambda: is_gone(pid))


def test_a_request_that_is_gone_keeps_nobody_waiting(base: str, slow: Slow, mount: MakeMount, user: MakeUser) -> None:
    """Its process was killed after the kernel had told of the request, and before that was read."""
    flag = os.path.join(base, "doomed")
    with daemons_with(partial(alterations.kill_before_read, flag)):
        m = mount("-o", NULL, source=slow.path)
    patient = user(2001)
    patient.start(sync_each, m.path, 1)
    try:
        wait_until(lambda: slow.waiting(m.path) >= 1)
        script = 'echo $$ > "$1.new"; mv "$1.new" "$1"; exec stat "$2"'
        doomed = subprocess.run(["sh", "-c", script, "sh", flag, m.at("5")], capture_output=True, check=False)
        assert doomed.returncode == -signal.SIGKILL
    finally:
        slow.go_on()
    assert patient.answer_within(60) == [0]


# -- time for everything else ----------------------------------------------------------------------


def test_an_idle_daemon_uses_no_processor(stock: bool, base: str, mount: MakeMount, user: MakeUser) -> None:
    # Where nobody else works: of that, too, the daemon is told.
    with filesystem("tmpfs", base) as tree, contextlib.ExitStack() as stack:
        m = mount("-o", NULL, source=tree)
        stack.callback(linux.umount, m.path, linux.MNT_DETACH)
        someone = user(2001)
        someone.do(write, m.at("file"), b"x")
        someone.do(os.stat, m.at("file"))
        wait_until(lambda: rests(m.pid, 0.03))


def test_sighup_under_load(stock: bool, base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    exports = Path(base, "lab.exports")
    exports.write_text(f"{tree} *(rw,{NULL})\n")
    m = mount("--exports", str(exports))
    users = [user(2001 + number) for number in range(8)]
    owner, other = user(3001), user(3002)
    owner.do(write, m.at("private"), b"x", mode=0o600)
    for client in users:
        client.do(write, m.at(str(client.uid)), b"x")
        client.start(stat_on_and_on, m.at(str(client.uid)))
    other.do(os.stat, m.at("private"))
    exports.write_text(f"{tree} *(rw,{NULL},cloak_list=uid +077 1 9999)\n")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: other.error(os.stat, m.at("private")) == errno.ENOENT)
    owner.do(os.stat, m.at("private"))
    assert not any(client.has_answered() for client in users)
    for client in users:
        client.close()
