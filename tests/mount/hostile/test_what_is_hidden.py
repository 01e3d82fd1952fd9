"""What an attacker is told or given although it is none of its business, on cloakfs, on bindfs and on the bare tree.

Meanwhile another user works, and has to get right answers. Only cloakfs hides anything, so that what the attacker finds
out on the others is for the report. Attacks on directories' locks, on depth and on what is bounded are in the other
modules.
"""

import contextlib
import ctypes
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.linux.libc import NR, syscall
from cloakfs.state.runtime import STATE_DIR
from tests.agents import User, read, write
from tests.mount.conftest import mounted
from tests.mount.hostile import victim
from tests.mount.hostile.attacks import make, rounds
from tests.mount.hostile.conftest import OPTIONS, REPORT
from tests.mount.hostile.peers import KINDS, SECONDS, require
from tests.mount.hostile.test_shares_of_all import Ground
from tests.mount.hostile.victim import Watch
from tests.mount.loopfs import filesystem
from tests.mount.test_rights import ALL, drop, set_thread_groups
from tests.waiting import wait_until

ATTACKER = 6666
TEAM = 7100
GUESSES = 200

Attack = Callable[[Ground, User, User, float], tuple[int, int]]
"""Of the ground, the attacker, the victim, and the time at which it has to end: how much it did, and how often the
attacker got what it must not."""


@pytest.fixture(scope="module", params=KINDS)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    """On ext4, where positions of directory entries are hashes of names."""
    kind: str = request.param
    require(kind)
    with tempfile.TemporaryDirectory(prefix="cloakfs-test-") as base, contextlib.ExitStack() as stack:
        os.chmod(base, 0o755)
        disk = stack.enter_context(filesystem("ext4", base))
        tree, point = f"{disk}/real", f"{base}/mnt"
        for path, mode in ((tree, 0o755), (point, 0o755), (f"{tree}/shared", 0o777), (f"{tree}/mine", 0o777)):
            os.mkdir(path)
            os.chmod(path, mode)
        victim.furnish(tree)
        write(f"{tree}/of the team", b"team")
        os.chown(f"{tree}/of the team", victim.UID, TEAM)
        os.chmod(f"{tree}/of the team", 0o640)
        if kind == "cloakfs":
            mount = stack.enter_context(mounted(tree, point, "-o", f"{OPTIONS},exempt=0"))
            stack.callback(shutil.rmtree, os.path.join(STATE_DIR, mount.key), ignore_errors=True)
        elif kind == "bindfs":
            subprocess.run(["bindfs", "-o", "allow_other", tree, point], check=True)
            stack.callback(linux.umount, point, linux.MNT_DETACH)
        yield Ground(kind, base, tree, tree if kind == "bare" else point)


def names_that_are_made_again_and_hidden(ground: Ground, attacker: User, owner: User, end: float) -> tuple[int, int]:
    """A public file, which the attacker keeps open, is removed behind the mount, and its name is made again."""
    told = 0
    here = f"{ground.top}/shared"
    for number in rounds(end):
        name = f"again{number % 7}"
        behind = f"{ground.tree}/shared/{name}"
        owner.do(make, behind)
        wait_until(lambda name=name: attacker.do(os.path.exists, f"{here}/{name}"))  # type: ignore[misc]
        kept = attacker.do(os.open, f"{here}/{name}", (os.O_PATH, os.O_RDONLY)[number % 2])
        attacker.do(os.listdir, here)
        if number % 3:
            owner.do(os.unlink, behind)
            owner.do(make, behind, mode=0o600)
        else:
            owner.do(make, f"{behind}-new", mode=0o600)
            owner.do(os.replace, f"{behind}-new", behind)
        told += name in attacker.do(os.listdir, here)
        attacker.do(os.close, kept)
        owner.do(os.unlink, behind)
    return number + 1, told


def what_is_closed_through_the_mount(ground: Ground, attacker: User, owner: User, end: float) -> tuple[int, int]:
    """The attacker knows a directory and keeps it open; its owner closes it, and the call has returned."""
    told = 0
    path = f"{ground.top}/shared/closed"
    owner.do(os.mkdir, path)
    owner.do(make, f"{path}/file")
    done = 0
    for number in rounds(end):
        done = number + 1
        owner.do(os.chmod, path, 0o755)
        wait_until(lambda: not attacker.error(os.stat, f"{path}/file"))
        kept = attacker.do(os.open, path, os.O_PATH)
        owner.do(os.chmod, path, 0o700)
        told += not attacker.error(os.stat, f"{path}/file")
        told += not attacker.error(read, f"{path}/file")
        told += not attacker.error(os.listdir, f"/proc/self/fd/{kept}")
        attacker.do(os.close, kept)
    owner.do(shutil.rmtree, path)
    return done, told


def _positions(path: str) -> set[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        found = set()
        while batch := {position for _, position, _ in linux.getdents(fd)}:
            found |= batch
        return found
    finally:
        os.close(fd)


def positions_of_names_that_are_guessed(ground: Ground, attacker: User, owner: User, end: float) -> tuple[int, int]:
    """The attacker makes the names in a directory of its own, and compares positions."""
    told = done = 0
    hidden, own = f"{ground.tree}/shared/names", f"{ground.top}/mine/names"
    owner.do(os.mkdir, hidden)
    attacker.do(os.mkdir, own)
    for number in range(GUESSES):
        owner.do(make, f"{hidden}/name{number}", mode=0o600 if number % 2 else 0o644)
        if number % 2:
            attacker.do(make, f"{own}/name{number}")
    for number in rounds(end):
        done = number + 1
        told += len(attacker.do(_positions, f"{ground.top}/shared/names") & attacker.do(_positions, own))
    owner.do(shutil.rmtree, hidden)
    attacker.do(shutil.rmtree, own)
    return done, told


def _opens_in_an_older_thread(path: str, end: float) -> tuple[int, int]:
    """As root in the group: drop it, and open by a thread that was there before and still has it."""
    told = done = 0
    has_dropped = threading.Event()

    def work() -> None:
        nonlocal told, done
        _become_attacker()
        has_dropped.wait()
        for number in rounds(end):
            done = number + 1
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY))
                told += 1

    thread = threading.Thread(target=work)
    thread.start()
    set_thread_groups()
    _become_attacker()
    has_dropped.set()
    thread.join()
    return done, told


def _become_attacker() -> None:
    """Only the thread that calls, and only for files."""
    syscall(NR["setfsgid"], ctypes.c_uint32(ATTACKER))
    syscall(NR["setfsuid"], ctypes.c_uint32(ATTACKER))


def files_by_a_group_that_the_process_dropped(
    ground: Ground, attacker: User, owner: User, end: float
) -> tuple[int, int]:
    with User(0, 0, [TEAM]) as former:
        return former.do(_opens_in_an_older_thread, f"{ground.top}/of the team", end)


def _takes(top: str, end: float) -> tuple[int, int]:
    told = done = 0
    for number in rounds(end):
        done = number + 1
        for call in (
            lambda: read(f"{top}/victim/private"),
            lambda: write(f"{top}/victim/private", b"", 0),
            lambda: os.listdir(f"{top}/homes/another"),
            lambda: os.chmod(f"{top}/victim/public", 0o600),
            lambda: os.unlink(f"{top}/victim/public"),
            lambda: os.rename(f"{top}/victim/public", f"{top}/shared/taken"),
        ):
            with contextlib.suppress(OSError):
                call()
                told += 1
    return done, told


def files_of_others_by_root_without_capabilities(
    ground: Ground, attacker: User, owner: User, end: float
) -> tuple[int, int]:
    """While root with all of them uses the same files."""
    with User(0) as confined, User(0) as root:
        confined.do(drop, *ALL)
        root.start(_reads_until, f"{ground.top}/victim/private", end)
        got = confined.do(_takes, ground.top, end)
        assert root.finish_within(60)
    return got


def _reads_until(path: str, end: float) -> None:
    for _ in rounds(end):
        assert read(path) == victim.content("private")


def _exchanges(here: str, end: float) -> int:
    done = 0
    for number in rounds(end):
        done = number + 1
        with contextlib.suppress(OSError):
            linux.renameat2(-100, os.fsencode(f"{here}/bait"), -100, os.fsencode(f"{here}/name"), linux.RENAME_EXCHANGE)
    return done


def _puts_hidden_files(there: str, end: float) -> int:
    """As the victim, behind the mount: a hidden file takes the name at which a public one was, again and again."""
    moved = 0
    for number in rounds(end):
        make(f"{there}/new", mode=0o600)
        os.rename(f"{there}/new", f"{there}/name")
        time.sleep(0.0002)
        moved += not _has_hidden_file(f"{there}/name")
        make(f"{there}/new", mode=0o644)
        os.rename(f"{there}/new", f"{there}/name")
        time.sleep(0.0002 * (number % 3))
    return moved


def _has_hidden_file(path: str) -> bool:
    """Whether it has one within 50 ms: what an exchange took is put back a moment later."""
    for _ in rounds(time.monotonic() + 0.05):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_mode & 0o777 == 0o600:
                return True
    return False


def hidden_files_in_the_way_of_an_exchange(ground: Ground, attacker: User, owner: User, end: float) -> tuple[int, int]:
    here, there = f"{ground.top}/mine", f"{ground.tree}/mine"
    owner.do(make, f"{there}/name")
    attacker.do(make, f"{here}/bait")
    owner.start(_puts_hidden_files, there, end)
    done = attacker.do(_exchanges, here, end)
    moved: int = owner.answer_within(60)
    return done, moved


ATTACKS: list[Attack] = [
    names_that_are_made_again_and_hidden,
    what_is_closed_through_the_mount,
    positions_of_names_that_are_guessed,
    files_by_a_group_that_the_process_dropped,
    files_of_others_by_root_without_capabilities,
    hidden_files_in_the_way_of_an_exchange,
]

MOST: dict[Attack, float] = {hidden_files_in_the_way_of_an_exchange: 0.01}
"""Of what the attacker does, the part that may succeed on cloakfs: such a race cannot be closed (docs/limits.md)."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attacker_is_told_nothing(ground: Ground, attack: Attack) -> None:
    stop = f"{ground.base}/stop-{attack.__name__}"
    with User(victim.UID, victim.GID) as watcher, User(victim.UID, victim.GID) as owner, User(ATTACKER) as attacker:
        watcher.start(victim.look_after, ground.top, stop, None)
        try:
            done, told = attack(ground, attacker, owner, time.monotonic() + SECONDS)
        finally:
            Path(stop).touch()
        watch: Watch = watcher.answer_within(100)
    watch.told = told
    REPORT.append((f"{attack.__name__.replace('_', ' ')} ({ground.kind})", done, watch))
    assert watch.wrong == []
    if ground.kind == "cloakfs":
        assert told <= math.ceil(MOST.get(attack, 0) * done)
