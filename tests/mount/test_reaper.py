"""The process that outlives the daemon of a local mount, and unmounts the mount if the daemon could not."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs.linux import mountinfo, process
from cloakfs.mount.reaperprocess import NAME
from cloakfs.state.client import socket_of
from cloakfs.state.runtime import state_path
from tests.processes import waits
from tests.waiting import wait_until

from .conftest import COMMAND, Mount, is_mounted, mounted, run
from .fuseconnections import nobody_waits_for_ever
from .test_on_top import ended, kinds_at

NULL = "rw,no_root_squash"


@pytest.fixture(autouse=True)
def _released(base: str) -> Iterator[None]:
    with nobody_waits_for_ever(base):
        yield


@pytest.fixture
def killable(base: str, tree: str) -> Mount:
    """A mount that need not be there in the end, over a directory that is not empty."""
    path = os.path.join(base, "view")
    os.mkdir(path)
    Path(path, "below").touch()
    run("mount", tree, path, "-o", NULL)
    return Mount(tree, path)


def kill(mount: Mount) -> None:
    """SIGKILL the daemon, and wait until everything has ended that belongs to it."""
    pid, reaper = mount.pid, mount.reaper
    assert reaper
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    assert ended(reaper)


def facts(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_daemon_that_dies_leaves_nothing(killable: Mount, tree: str, number: signal.Signals) -> None:
    m = killable
    assert not os.path.exists(m.at("below"))
    pid, reaper = m.pid, m.reaper
    os.kill(pid, number)
    assert ended(pid)
    assert ended(reaper)
    assert not is_mounted(m.path)
    assert not os.path.exists(state_path(m.key))
    assert not os.path.exists(socket_of(m.key))
    assert os.listdir(m.path) == ["below"]
    os.mkdir(m.at("usable"))
    assert m.path not in run("status", check=False).stdout
    assert run("mount", tree, m.path, "-o", NULL).stderr == ""
    assert os.listdir(m.path) == []
    run("umount", m.path)


def test_who_is_in_it_when_the_daemon_dies_gets_errors_and_keeps_nobody(killable: Mount) -> None:
    m = killable
    fd = os.open(m.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kill(m)
        assert os.listdir(m.path) == ["below"]
        with pytest.raises(OSError) as raised:  # noqa: PT011  (the number is looked at)
            os.stat("x", dir_fd=fd)
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    finally:
        os.close(fd)


def test_an_orderly_end_leaves_no_process(killable: Mount) -> None:
    reaper = killable.reaper
    assert reaper
    run("umount", killable.path)
    assert ended(reaper)
    assert os.listdir(killable.path) == ["below"]


def test_a_mount_that_is_refused_leaves_no_process(base: str, tree: str) -> None:
    path = os.path.join(base, "view")
    os.mkdir(path)
    # A file in the place of the directory for what daemons tell; the mount itself has been made by then.
    told = state_path(Mount(tree, path).key)
    os.makedirs(f"{told}.new")
    try:
        assert run("mount", tree, path, check=False).returncode == 1
    finally:
        os.rmdir(f"{told}.new")
    assert not is_mounted(path)
    called = b"\0".join((NAME.encode(), os.fsencode(path)))
    wait_until(lambda: not any(words.startswith(called) for words in command_lines()))


def command_lines() -> Iterator[bytes]:
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield words.read_bytes()


def test_it_holds_nothing_and_is_small(base: str, tree: str, mount: Callable[..., Mount]) -> None:
    lock = os.open(f"{base}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(lock, True)
    path = os.path.join(base, "view")
    os.mkdir(path)
    done = subprocess.run([*COMMAND, "mount", tree, path], pass_fds=[lock], check=True, timeout=60)
    os.close(lock)
    assert done.returncode == 0
    m = Mount(tree, path)
    try:
        reaper = m.reaper
        _, device = identity_of(path)
        only = [f"/{device.removeprefix('0:')}/abort", *[os.devnull] * 3, "anon_inode:[pidfd]"]
        wait_until(lambda: opened_by(reaper) == only)
        assert os.readlink(f"/proc/{reaper}/cwd") == "/"
        it, daemon = facts(reaper), facts(m.pid)
        assert it["Name"] == NAME
        assert it["PPid"] != daemon["Pid"]
        assert it["NSsid"] != daemon["NSsid"]
        assert int(it["Threads"]) == 1
        assert own_memory(reaper) < 12 * 1024 < own_memory(m.pid)
        assert not zombies_of(m.pid)
    finally:
        run("umount", path)


def opened_by(pid: int) -> list[str]:
    opened = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(os.readlink(fd))
    return sorted(opened)


def own_memory(pid: int) -> int:
    """What nobody shares, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def zombies_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_it_is_no_second_daemon(killable: Mount) -> None:
    told = json.loads(run("status", "--json", check=False).stdout)
    assert [mount["pid"] for mount in told if mount["target"] == killable.path] == [killable.pid]
    run("umount", killable.path)


def test_what_ends_the_daemon_in_an_orderly_way_does_not_end_it(killable: Mount) -> None:
    m = killable
    reaper = m.reaper
    assert reaper
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(reaper, number)
    kill(m)
    assert not is_mounted(m.path)


def test_without_it_the_dead_mount_stays_and_the_next_takes_it_off(killable: Mount, tree: str) -> None:
    m = killable
    pid = m.without_reaper()
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    assert is_mounted(m.path)
    assert f"{m.path}: its daemon has died" in run("status", check=False).stdout
    assert "unmounted a mount whose daemon had died" in run("mount", tree, m.path).stderr
    run("umount", m.path)
    assert not is_mounted(m.path)


def test_its_end_does_nothing_to_the_mount(killable: Mount) -> None:
    m = killable
    m.without_reaper()
    assert os.listdir(m.path) == []
    run("umount", m.path)
    assert not is_mounted(m.path)


# -- nothing but the dead mount --------------------------------------------------------------------


def test_what_is_mounted_on_top_stays(killable: Mount) -> None:
    m = killable
    subprocess.run(["mount", "-t", "tmpfs", "none", m.path], check=True)
    kill(m)
    assert kinds_at(m.path) == ["fuse.cloakfs", "tmpfs"]
    assert not os.path.exists(state_path(m.key))


def test_what_lies_below_stays(base: str, tree: str, killable: Mount) -> None:
    other = os.path.join(base, "other")
    os.mkdir(other)
    Path(other, "above").touch()
    run("mount", other, killable.path, "-o", NULL)
    kill(Mount(other, killable.path))
    assert kinds_at(killable.path) == ["fuse.cloakfs"]
    assert os.listdir(killable.path) == []
    run("umount", killable.path)


def test_what_is_mounted_there_instead_stays(base: str, tree: str, killable: Mount) -> None:
    """The old mount was detached while somebody was in it, so that its daemon lives on."""
    m = killable
    fd = os.open(m.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        run("umount", "--lazy", m.path)
        other = os.path.join(base, "other")
        os.mkdir(other)
        run("mount", other, m.path, "-o", NULL)
        kill(m)
        assert kinds_at(m.path) == ["fuse.cloakfs"]
        assert os.listdir(m.path) == []
        assert os.path.exists(state_path(Mount(other, m.path).key))
    finally:
        os.close(fd)
        run("umount", m.path)


def test_a_new_daemon_of_the_same_mount_keeps_its_state(killable: Mount, tree: str) -> None:
    """The reaper comes late: by then the dead mount was taken off, and made again."""
    m = killable
    pid, late = m.pid, m.reaper
    os.kill(late, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
        run("mount", tree, m.path, "-o", NULL)
    finally:
        os.kill(late, signal.SIGCONT)
    try:
        assert ended(late)
        assert kinds_at(m.path) == ["fuse.cloakfs"]
        assert os.listdir(m.path) == []
        assert m.pid != pid
    finally:
        run("umount", m.path)


# Has a reaper for the mount that it is told of; is then a zombie, of which a thread lives on for a while.
_DYING = """
import ctypes, os, sys, threading, time
from cloakfs.mount.reaper import Reaper
from cloakfs.linux.mountinfo import Place
from cloakfs.fuse.attach import Attached
number, device = input().split()
reaper = Reaper("test-dying", sys.argv[1])
reaper.assign(Attached(-1, sys.argv[1], int(number), device))
input()
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit(2): of this thread alone
"""


def identity_of(path: str) -> tuple[int, str]:
    """The id and the device of a mount, which a later one may get."""
    ((number, device),) = [(n, place.device) for n, place in mountinfo.by_id().items() if place.path == path]
    return number, device


def reaper_of(path: str, daemon: int) -> int:
    found = subprocess.run(["pgrep", "-f", f"^{NAME} {path} {daemon}"], capture_output=True, text=True, check=False)
    return int(found.stdout or 0)


def test_a_mount_that_gets_the_numbers_of_one_that_is_gone_lives_on(base: str, tree: str) -> None:
    """The daemon of the one that is gone takes long to end: a thread of it waits."""
    Path(tree, "file").touch()
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", _DYING, path], stdin=subprocess.PIPE, text=True) as dying:
            try:
                assert dying.stdin is not None
                with mounted(tree, path):
                    gone = identity_of(path)
                    dying.stdin.write(f"{gone[0]} {gone[1]}\n")
                    dying.stdin.flush()
                    wait_until(lambda dying=dying: reaper_of(path, dying.pid) > 0)  # type: ignore[misc]
                    reaper = reaper_of(path, dying.pid)
                    stdin = f"/proc/{reaper}/fd/0"
                    wait_until(lambda stdin=stdin: os.readlink(stdin) == os.devnull)  # type: ignore[misc]  # it was told
                with mounted(tree, path):
                    is_same = identity_of(path) == gone
                    if is_same:
                        looked = waits(reaper)  # it looks once a second
                        dying.stdin.write("\n")
                        dying.stdin.flush()
                        wait_until(lambda dying=dying: process.start_time(dying.pid) is None)  # type: ignore[misc]
                        wait_until(lambda reaper=reaper, looked=looked: waits(reaper) > looked)  # type: ignore[misc]
                    dying.kill()
                    assert ended(reaper)
                    assert os.listdir(path) == ["file"]
            finally:
                dying.kill()
        if is_same:
            return
    pytest.skip("other mounts, that somebody else makes here, get the numbers")


def test_a_bind_mount_elsewhere_stays(base: str, killable: Mount) -> None:
    """It was made by somebody else, who may not expect to see what is below it."""
    bound = os.path.join(base, "bound")
    os.mkdir(bound)
    subprocess.run(["mount", "--bind", killable.path, bound], check=True)
    kill(killable)
    assert not is_mounted(killable.path)
    assert is_mounted(bound)
    assert f"{bound}: its daemon has died" in run("status", check=False).stdout
    run("umount", bound)


@pytest.mark.parametrize("place", ["itself", "above", "bound"])
def test_a_mount_over_its_own_source_stays_dead(base: str, tree: str, place: str) -> None:
    """Else everybody would see all of the tree."""
    Path(tree, "inside").mkdir()
    source, path = tree, tree
    if place == "above":
        source = os.path.join(tree, "inside")
    elif place == "bound":
        path = os.path.join(base, "bound")
        os.mkdir(path)
        subprocess.run(["mount", "--bind", tree, path], check=True)
    run("mount", source, path, "-o", NULL)
    m = Mount(source, path)
    pid = m.pid
    assert not m.reaper
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    with pytest.raises(OSError) as raised:  # noqa: PT011
        os.listdir(path)
    assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    run("umount", path)


def test_what_a_server_exports_has_none(tree: str, mount: Callable[..., Mount]) -> None:
    """Its guard mounts again; and the server would export what lies below."""
    assert not mount("-o", "knfsd").reaper


# -- in the foreground -----------------------------------------------------------------------------


def test_in_the_foreground_it_is_the_same(base: str, tree: str) -> None:
    path = os.path.join(base, "view")
    os.mkdir(path)
    command = [*COMMAND, "mount", "-f", tree, path, "-o", NULL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"cloakfs: {path}: serving {tree}\n"
        reaper = Mount(tree, path).reaper
        process.kill()
        process.stderr.read()  # ends with the daemon: nobody else has it
    assert ended(reaper)
    assert not is_mounted(path)
