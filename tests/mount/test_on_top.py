"""Mounts on top of each other: of the same tree, of others, of something else, and of themselves."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import mounts
from tests.agents import User, names, write

from .conftest import Mount, is_mounted, run
from .fuseconnections import nobody_waits_for_ever

NULL = "rw,no_root_squash"
SECONDS = 20.0
"""So long nothing may take; each of it takes milliseconds."""


@pytest.fixture(autouse=True)
def _released(base: str) -> Iterator[None]:
    with nobody_waits_for_ever(base):
        yield


def kinds_at(path: str) -> list[str]:
    return [place.kind for place in mounts.by_id().values() if place.path == path]


def ended(pid: int) -> bool:
    """Wait for a daemon's end."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def stop(mount: Mount) -> None:
    """SIGTERM, and once that was heard, another one: what is still in use is cut off."""
    pid = mount.pid
    os.kill(pid, signal.SIGTERM)
    assert until(lambda: "asked to stop" in mount.log)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)


@pytest.fixture
def two(base: str, tree: str) -> tuple[Mount, Mount]:
    """Two mounts at one place: the second, of another tree, on top of the first."""
    path = os.path.join(base, "view")
    other = os.path.join(base, "other")
    os.mkdir(path)
    os.mkdir(other)
    write(os.path.join(tree, "below"), b"")
    write(os.path.join(other, "above"), b"")
    run("mount", tree, path, "-o", NULL)
    run("mount", other, path, "-o", NULL)
    return Mount(tree, path), Mount(other, path)


# -- the end of a daemon touches nothing but its own mount -----------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_one_below_ends_and_the_one_above_stays(
    two: tuple[Mount, Mount], user: Callable[..., User], number: signal.Signals
) -> None:
    below, above = two
    if number == signal.SIGTERM:
        stop(below)
    else:
        pid = below.pid
        os.kill(pid, number)
        assert ended(pid)
    assert kinds_at(above.path) == ["fuse.cloakfs", "fuse.cloakfs"]
    someone = user(2001)
    someone.do_within(SECONDS, names, above.path)
    assert someone.do(names, above.path) == ["above"]
    if number == signal.SIGTERM:
        assert "fuse.cloakfs is mounted on top and stays" in below.log
    run("umount", above.path)
    assert kinds_at(above.path) == ["fuse.cloakfs"]


def test_the_one_above_ends_and_the_one_below_is_seen(two: tuple[Mount, Mount], user: Callable[..., User]) -> None:
    below, above = two
    pid = above.pid
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)
    assert kinds_at(below.path) == ["fuse.cloakfs"]
    someone = user(2001)
    someone.do_within(SECONDS, names, below.path)
    assert someone.do(names, below.path) == ["below"]


def test_umount_waits_for_the_daemon_of_the_one_on_top(two: tuple[Mount, Mount]) -> None:
    below, above = two
    pids = above.pid, below.pid
    for pid, left in zip(pids, (1, 0), strict=True):
        run("umount", below.path)
        assert not os.path.exists(f"/proc/{pid}") or ended(pid)
        assert len(kinds_at(below.path)) == left


def test_another_file_system_on_top_stays(base: str, mount: Callable[..., Mount]) -> None:
    m = mount("-o", NULL)
    subprocess.run(["mount", "-t", "tmpfs", "none", m.path], check=True)
    try:
        stop(m)
        assert kinds_at(m.path) == ["fuse.cloakfs", "tmpfs"]
        assert "tmpfs is mounted on top and stays" in m.log
    finally:
        subprocess.run(["umount", m.path], check=True)
        subprocess.run(["umount", m.path], check=True)


def test_what_was_mounted_there_after_an_unmount_stays(base: str, tree: str, user: Callable[..., User]) -> None:
    """Somebody unmounts it lazily and mounts something else, while a file is still open: the daemon lives on."""
    path = os.path.join(base, "view")
    os.mkdir(path)
    run("mount", tree, path, "-o", NULL)
    m = Mount(tree, path)
    pid = m.pid
    someone = user(2001)
    someone.do(write, os.path.join(path, "file"), b"x")
    fd = someone.do(os.open, os.path.join(path, "file"), os.O_RDONLY)
    run("umount", "--lazy", path)
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    try:
        os.kill(pid, signal.SIGTERM)
        someone.do(os.close, fd)
        assert ended(pid)
        assert kinds_at(path) == ["tmpfs"]
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_mount_that_was_moved_is_found(base: str, tree: str) -> None:
    path, elsewhere = os.path.join(base, "view"), os.path.join(base, "elsewhere")
    os.mkdir(path)
    os.mkdir(elsewhere)
    run("mount", tree, path, "-o", NULL)
    pid = Mount(tree, path).pid
    # Below a shared mount, as systemd has them, the kernel moves nothing: in a namespace of its own, then.
    if subprocess.run(["mount", "--move", path, elsewhere], check=False, capture_output=True).returncode:
        pytest.skip("mounts are shared here: they cannot be moved")
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)
    assert not is_mounted(elsewhere)


# -- what umount says ------------------------------------------------------------------------------


def test_umount_with_a_bind_mount_left_over_says_so_at_once(base: str, tree: str) -> None:
    path, bound = os.path.join(base, "view"), os.path.join(base, "bound")
    os.mkdir(path)
    os.mkdir(bound)
    run("mount", tree, path, "-o", NULL)
    pid = Mount(tree, path).pid
    subprocess.run(["mount", "--bind", path, bound], check=True)
    done = run("umount", path, check=False)
    assert done.returncode == 1
    why = f"its daemon (process {pid}) goes on: the same view is mounted at {bound}, too"
    assert done.stderr == f"cloakfs: {path}: unmounted, but {why}\n"
    assert not is_mounted(path)
    again = run("mount", tree, path, "-o", NULL, check=False)
    assert again.returncode == 1
    assert f"(process {pid}) still serves {bound}; unmount that first" in again.stderr
    assert run("umount", bound).stderr == ""
    assert ended(pid)


def test_umount_lazy_says_who_goes_on_and_mount_why_it_cannot(base: str, tree: str, user: Callable[..., User]) -> None:
    path = os.path.join(base, "view")
    os.mkdir(path)
    run("mount", tree, path, "-o", NULL)
    pid = Mount(tree, path).pid
    someone = user(2001)
    someone.do(os.chdir, path)
    said = run("umount", "--lazy", path).stderr
    assert f"detached; its daemon (process {pid}) serves those who still use it" in said
    again = run("mount", tree, path, "-o", NULL, check=False)
    assert again.returncode == 1
    assert f"(process {pid}) still serves those who have files open" in again.stderr
    someone.do(os.chdir, "/")
    assert ended(pid)
    assert run("umount", path, check=False).stderr == f"cloakfs: {path}: not a cloakfs mount\n"
