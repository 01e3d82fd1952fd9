"""`cloakfs prune` removes the state that no mount can use any more, and nothing else."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloakfs.linux import ownfiles
from cloakfs.state import persistent
from cloakfs.state.runtime import RUN_DIR, STATE_DIR
from tests.agents import User
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, is_mounted, mounted, run
from tests.mount.test_cli import refused, run_here
from tests.processes import kill

MakeUser = Callable[..., User]


def was_mounted(base: str, *arguments: str, name: str = "one") -> Mount:
    """A mount that was made and unmounted again."""
    mount = Mount(os.path.join(base, name, "real"), os.path.join(base, name, "mnt"))
    os.makedirs(mount.source)
    os.makedirs(mount.path)
    with mounted(mount.source, mount.path, *arguments):
        pass
    assert has_state(mount)
    return mount


def has_state(mount: Mount) -> bool:
    return os.path.exists(os.path.join(STATE_DIR, mount.key))


def pruned(*arguments: str) -> dict[str, dict[str, Any]]:
    """What `cloakfs prune --json` says of each state, by mount point (or name)."""
    told = json.loads(run("prune", "--json", *arguments).stdout)
    return {one["target"] or os.path.basename(one["state"]): one for one in told}


@pytest.fixture(autouse=True)
def own_state(base: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory for the state of these mounts alone: that of others on this machine is not for tests to remove."""
    path = os.path.join(base, "state")
    monkeypatch.setattr(sys.modules[__name__], "STATE_DIR", path)
    with daemons_with(partial(alterations.keep_state_in, path)):
        yield path


def attach(disk: str, place: str) -> None:
    subprocess.run(["mount", "-o", "loop", disk, place], check=True)


@pytest.fixture
def disk(base: str) -> Iterator[str]:
    """The place of a disk, which is mounted there."""
    place = os.path.join(base, "disk")
    os.mkdir(place)
    for name in "a", "b":
        with open(f"{base}/{name}.img", "wb") as file:
            file.truncate(4 << 20)
        subprocess.run(["mkfs.ext4", "-q", f"{base}/{name}.img"], check=True)
    attach(f"{base}/a.img", place)
    yield place
    subprocess.run(["umount", place], check=True)


def test_only_root_prunes(user: MakeUser) -> None:
    assert user(3001).do(run_here, "prune") == (1, "cloakfs: only root may remove the state of mounts\n")


def test_state_goes_with_its_source(base: str) -> None:
    gone, there = was_mounted(base, name="gone"), was_mounted(base, name="there")
    os.rmdir(gone.source)
    assert pruned("--dry-run") == {
        gone.path: {
            "state": f"{STATE_DIR}/{gone.key}",
            "source": gone.source,
            "target": gone.path,
            "bytes": pytest.approx(100_000, abs=90_000),
            "removable": True,
            "removed": False,
            "reason": f"{gone.source} is gone",
        },
        there.path: {
            "state": f"{STATE_DIR}/{there.key}",
            "source": there.source,
            "target": there.path,
            "bytes": pytest.approx(100_000, abs=90_000),
            "removable": False,
            "removed": False,
            "reason": "not mounted, but it can be mounted again",
        },
    }
    assert has_state(gone)
    assert pruned()[gone.path]["removed"]
    assert not has_state(gone)
    assert not os.path.exists(f"{RUN_DIR}/{gone.key}.log")
    assert has_state(there)
    assert os.path.exists(f"{RUN_DIR}/{there.key}.log")
    assert gone.path not in pruned()


def test_text_says_what_was_done(base: str) -> None:
    gone, there = was_mounted(base, name="gone"), was_mounted(base, name="there")
    os.rmdir(gone.source)

    def said(*arguments: str) -> list[str]:
        lines = run("prune", *arguments).stdout.splitlines()
        return [line.partition("): ")[2] for line in lines]

    kept = "kept: not mounted, but it can be mounted again"
    assert said("-n") == [f"would be removed: {gone.source} is gone", kept]
    assert said() == [f"removed: {gone.source} is gone", kept]
    assert said() == [kept]
    assert has_state(there)


def test_state_of_a_local_mount_goes_with_its_mount_point(base: str) -> None:
    local = was_mounted(base, name="local")
    exported = was_mounted(base, "-o", "knfsd", name="exported")
    for mount in local, exported:
        os.rmdir(mount.path)
    told = pruned()
    assert told[local.path]["reason"] == f"{local.path} is gone"
    # `export down` removes mount points, and clients go on with their handles after the next `export up`.
    assert not told[exported.path]["removable"]
    assert (has_state(local), has_state(exported)) == (False, True)
    os.rmdir(exported.source)
    assert pruned()[exported.path]["removed"]
    assert not has_state(exported)


def test_what_is_mounted_is_kept(base: str) -> None:
    mount = was_mounted(base)
    with mounted(mount.source, mount.path):
        os.rmdir(mount.source)
        assert pruned()[mount.path]["reason"] == "mounted"
        assert has_state(mount)
        done = run("prune", mount.path, check=False)
        assert (done.returncode, done.stdout.partition("): ")[2]) == (1, "kept: mounted\n")
        assert has_state(mount)


def test_what_is_mounted_but_dead_is_kept(base: str) -> None:
    mount = was_mounted(base)
    with mounted(mount.source, mount.path):
        kill(mount.without_reaper())
        os.rmdir(mount.source)
        assert pruned()[mount.path]["reason"] == "its daemon has died, but the mount is still there"
        assert has_state(mount)
        assert is_mounted(mount.path)
    assert pruned()[mount.path]["removed"]


def test_a_source_whose_disk_is_not_there_is_not_gone(base: str, disk: str) -> None:
    mount = was_mounted(disk)

    def is_kept() -> bool:
        assert not os.path.exists(mount.source)
        return pruned()[mount.path]["reason"] == f"{mount.source} cannot be reached" and has_state(mount)

    subprocess.run(["umount", disk], check=True)
    assert is_kept()
    attach(f"{base}/b.img", disk)  # another one
    assert is_kept()
    subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
    assert is_kept()
    subprocess.run(["umount", disk], check=True)
    subprocess.run(["umount", disk], check=True)
    attach(f"{base}/a.img", disk)
    os.rmdir(mount.source)
    assert pruned()[mount.path]["removed"]


def test_a_source_on_a_new_tmpfs_is_gone(base: str) -> None:
    place = os.path.join(base, "tmp")
    os.mkdir(place)
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    try:
        mount = was_mounted(place)
        subprocess.run(["umount", place], check=True)
        assert pruned()[mount.path]["reason"] == f"{mount.source} cannot be reached"
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    try:
        assert pruned()[mount.path]["removed"]
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_source_that_does_not_answer_is_not_gone(base: str) -> None:
    hung = os.path.join(base, "hung")
    os.mkdir(hung)
    lower = was_mounted(base, name="lower")
    with mounted(lower.source, lower.path, "-o", "no_root_squash"):
        os.mkdir(lower.real("tree"))
        upper = Mount(lower.at("tree"), hung)
        with mounted(upper.source, upper.path):
            pass
        daemon = lower.pid
        os.kill(daemon, signal.SIGSTOP)
        try:
            told = pruned()[upper.path]
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert told["reason"] == f"{upper.source} cannot be reached"
        # Nor one that the lower mount may merely hide.
        os.rmdir(lower.real("tree"))
        assert pruned()[upper.path]["reason"] == f"{upper.source} cannot be reached"
        assert has_state(upper)


def test_named_mount_points_are_pruned_alone_and_whatever_is_there(base: str) -> None:
    gone, named, other = (was_mounted(base, name=name) for name in ("gone", "named", "other"))
    os.rmdir(gone.source)
    assert list(pruned("--dry-run", named.path)) == [named.path]
    assert has_state(named)
    assert pruned(named.path)[named.path]["removed"]
    assert [has_state(mount) for mount in (gone, named, other)] == [True, False, True]
    assert refused(1, "prune", named.path) == f"{named.path}: there is no state of a mount at this place"
    os.rmdir(other.path)
    assert pruned(other.path)[other.path]["removed"]  # also by a name that leads nowhere any more


def test_what_other_versions_wrote_is_kept(base: str) -> None:
    old, new = was_mounted(base, name="old"), was_mounted(base, name="new")
    os.rmdir(old.source)
    os.rmdir(new.source)
    os.unlink(f"{STATE_DIR}/{old.key}/mount.json")  # 0.1.0 wrote none
    record = Path(f"{STATE_DIR}/{new.key}/mount.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 99}))
    told = pruned()
    assert told[old.key]["reason"] == "it has no record of its mount; a mount by this version writes one"
    assert told[new.key]["reason"] == (
        f"{record}: version 99 is not known to this cloakfs, which uses 1; use the cloakfs that wrote it"
    )
    assert not any(one["removable"] for one in told.values())
    assert has_state(old)
    assert has_state(new)


def test_what_is_not_the_state_of_a_mount_is_left_alone(base: str) -> None:
    mount = was_mounted(base)
    os.rmdir(mount.source)
    Path(f"{STATE_DIR}/{mount.key}/notes").write_text("what an administrator put there")
    os.mkdir(f"{STATE_DIR}/export-default")
    Path(f"{STATE_DIR}/export-default/exports.json").write_text("{}")
    assert pruned() == {}
    assert sorted(os.listdir(STATE_DIR)) == sorted(["export-default", mount.key])


def test_a_mount_that_starts_meanwhile_gets_a_directory_of_its_own(
    own_state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon may have opened the directory just before it is removed."""
    key = "mnt-0123456789ab"
    monkeypatch.setattr(persistent, "STATE_DIR", own_state)
    lock = ownfiles.lock
    tries = 0

    def after_removal(state: int) -> bool:
        nonlocal tries
        tries += 1
        if tries == 1:
            os.rmdir(os.path.join(own_state, key))
        return lock(state)

    monkeypatch.setattr(ownfiles, "lock", after_removal)
    state = persistent.lock(key)
    assert state is not None
    try:
        assert tries == 2
        assert os.path.samestat(os.fstat(state), os.stat(os.path.join(own_state, key)))
        assert persistent.lock(key) is None
    finally:
        os.close(state)
