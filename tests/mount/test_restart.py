"""A local mount with `restart` is mounted again when its daemon has died, and not when somebody unmounted it."""

import contextlib
import errno
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.state.runtime import state_path, waiting_path
from tests.mount import alterations
from tests.waiting import wait_until

from .conftest import Mount, daemons_with, is_mounted, run
from .fuseconnections import nobody_waits_for_ever
from .test_on_top import ended

WORDS = "no_root_squash,restart"


@pytest.fixture
def again(base: str, tree: str) -> Iterator[Mount]:
    """A mount with `restart`."""
    path = os.path.join(base, "view")
    os.mkdir(path)
    Path(tree, "file").write_text("text")
    run("mount", tree, path, "-o", WORDS)
    m = Mount(tree, path)
    with nobody_waits_for_ever(base):
        yield m
        run("umount", "--lazy", path, check=False)
        assert not is_mounted(path)
        assert not os.path.exists(waiting_path(m.key))


def numbered(mount: Mount) -> int:
    """How many objects have a permanent number."""
    with contextlib.closing(sqlite3.connect(f"/var/lib/cloakfs/{mount.key}/nodes.sqlite")) as index:
        (count,) = index.execute("SELECT count(*) FROM objects").fetchone()
        return int(count)


def told(mount: Mount) -> list[dict[str, object]]:
    return [one for one in json.loads(run("status", "--json", check=False).stdout) if one["target"] == mount.path]


def kill(mount: Mount) -> None:
    pid = mount.pid
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)


def is_served_anew(mount: Mount, before: int) -> bool:
    try:
        return mount.pid != before and os.path.exists(mount.at("file"))
    except OSError:
        return False


def test_it_is_mounted_again_each_time_and_handles_stay_valid(again: Mount) -> None:
    m = again
    there = os.open(m.at("file"), os.O_RDONLY)
    handle, _ = linux.name_to_handle(there)
    wait_until(lambda: numbered(m) > 0)  # on disk, within a second
    try:
        for restart in (1, 2):
            pid, reaper = m.pid, m.reaper
            assert reaper
            kill(m)
            wait_until(lambda pid=pid: is_served_anew(m, pid))  # type: ignore[misc]
            assert f"{m.path}: its daemon died; mounting it again\n" in m.log
            wait_until(lambda r=restart: f"mounted again, as its daemon had died (restart {r})\n" in m.log)  # type: ignore[misc]
            assert ended(reaper)
            assert Path(m.at("file")).read_text() == "text"
        fd = os.open(m.at("file"), os.O_RDONLY)
        assert linux.name_to_handle(fd)[0] == handle
        os.close(fd)
        with pytest.raises(OSError) as raised:  # noqa: PT011
            os.read(there, 1)
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    finally:
        with contextlib.suppress(OSError):  # close(2) reports it, too
            os.close(there)
    reaper = m.reaper
    run("umount", m.path)
    assert ended(reaper)
    assert not is_mounted(m.path)


@pytest.mark.parametrize("how", ["SIGTERM", "lazy"])
def test_who_ends_it_in_an_orderly_way_ends_it_for_good(again: Mount, how: str) -> None:
    m = again
    pid, reaper = m.pid, m.reaper
    there = os.open(m.path, os.O_RDONLY) if how == "lazy" else None
    if how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        run("umount", "--lazy", m.path)
        os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    assert ended(reaper)
    assert not is_mounted(m.path)
    assert not os.path.exists(state_path(m.key))
    if there is not None:
        os.close(there)


def test_it_is_tried_again_until_it_succeeds_or_somebody_gives_up(again: Mount, tree: str) -> None:
    m = again
    pid = m.pid
    os.rename(tree, f"{tree}-away")
    kill(m)
    why = f"{m.path}: not mounted again yet: cloakfs: {tree}: No such file or directory\n"
    wait_until(lambda: why in m.log)
    assert [one["failure"] for one in told(m)] == ["its daemon has died, and it is being mounted again"]
    assert (
        f"{m.path}: its daemon has died, and it is being mounted again (process " in run("status", check=False).stdout
    )
    os.rename(f"{tree}-away", tree)
    wait_until(lambda: is_served_anew(m, pid))
    assert m.log.count(why) == 1
    os.rename(tree, f"{tree}-away")
    kill(m)
    wait_until(lambda: m.log.count(why) == 2)
    said = run("umount", m.path).stderr
    assert said == f"cloakfs: {m.path}: its daemon had died; it will not be mounted again\n"
    assert told(m) == []
    os.rename(f"{tree}-away", tree)


def test_what_is_mounted_on_top_or_meanwhile_stays_alone(again: Mount, tree: str) -> None:
    m = again
    reaper = m.reaper
    subprocess.run(["mount", "-t", "tmpfs", "none", m.path], check=True)
    try:
        kill(m)
        assert ended(reaper)
        assert f"{m.path}: not mounted again: something else is mounted on top of the dead mount\n" in m.log
        assert os.listdir(m.path) == []
    finally:
        subprocess.run(["umount", m.path], check=True)
    run("mount", tree, m.path, "-o", WORDS)
    reaper = m.reaper
    os.rename(tree, f"{tree}-away")
    kill(m)
    wait_until(lambda: "not mounted again yet" in m.log)
    subprocess.run(["mount", "-t", "tmpfs", "none", m.path], check=True)
    try:
        os.rename(f"{tree}-away", tree)
        assert ended(reaper)
        assert "not mounted again: meanwhile, something else was mounted or unmounted there\n" in m.log
        assert os.listdir(m.path) == []
    finally:
        subprocess.run(["umount", m.path], check=True)


def test_a_daemon_that_dies_as_soon_as_it_is_ready_is_mounted_again(base: str, tree: str) -> None:
    path = os.path.join(base, "view")
    os.mkdir(path)
    Path(tree, "file").touch()
    m = Mount(tree, path)
    with daemons_with(partial(alterations.die_when_ready, os.path.join(base, "flag"))):
        run("mount", tree, path, "-o", WORDS)
        try:
            wait_until(lambda: "mounted again, as its daemon had died (restart 1)\n" in m.log)
            wait_until(lambda: is_served_anew(m, 0))
        finally:
            run("umount", "--lazy", path, check=False)


def test_a_daemon_that_fails_is_mounted_again_and_a_mount_that_fails_is_not(base: str, tree: str) -> None:
    path, flag = os.path.join(base, "view"), os.path.join(base, "flag")
    os.mkdir(path)
    Path(tree, "file").touch()
    m = Mount(tree, path)
    with daemons_with(partial(alterations.fail_on_flag, flag)):
        run("mount", tree, path, "-o", WORDS)
    try:
        pid = m.pid
        Path(flag).touch()
        wait_until(lambda: is_served_anew(m, pid))
        assert "MemoryError" in m.log
    finally:
        run("umount", path)
    # A file in the place of the directory for what daemons tell; the mount itself has been made by then.
    os.makedirs(f"{state_path(m.key)}.new")
    try:
        assert run("mount", tree, path, "-o", WORDS, check=False).returncode == 1
    finally:
        os.rmdir(f"{state_path(m.key)}.new")
    assert not is_mounted(path)
    assert not os.path.exists(waiting_path(m.key))


def test_a_mount_over_its_own_source_stays_dead(tree: str) -> None:
    """Else everybody would see all of the tree until it is mounted again."""
    run("mount", tree, tree, "-o", WORDS)
    m = Mount(tree, tree)
    assert f"{tree}: restart has no effect: " in m.log
    assert not m.reaper
    run("umount", tree)
