"""One user wants all that there is of something; others, on cloakfs, get their share (see `peers`)."""

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.state.runtime import STATE_DIR
from tests import processes
from tests.agents import User, read
from tests.mount import alterations
from tests.mount.conftest import daemons_with, mounted
from tests.mount.hostile import victim
from tests.mount.hostile.attacks import children, last_until
from tests.mount.hostile.conftest import OPTIONS, REPORT
from tests.mount.hostile.peers import KINDS, SECONDS, require
from tests.mount.hostile.victim import Watch
from tests.mount.test_hung import Far
from tests.mount.test_shares import read_anew
from tests.mount.test_turns import fill
from tests.waiting import wait_until

ATTACKER = 6666
FEW = 2048
MANY = 20_000
LARGE = 2 << 20


@dataclass
class Ground:
    """Where the attacks happen: on what, the real tree, and where users see it."""

    kind: str
    base: str
    tree: str
    top: str


@pytest.fixture(scope="module", params=KINDS)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    """With a file system in it of which some files never come, and a directory of files that are nobody's business."""
    kind: str = request.param
    require(kind)
    with tempfile.TemporaryDirectory(prefix="cloakfs-test-") as base, contextlib.ExitStack() as stack:
        os.chmod(base, 0o755)
        tree, point = f"{base}/real", f"{base}/mnt"
        for path in (tree, point, f"{tree}/spool", f"{tree}/mine"):
            os.mkdir(path, 0o755)
        os.chown(f"{tree}/mine", ATTACKER, ATTACKER)
        victim.furnish(tree)
        Path(tree, "victim", "large").write_bytes(bytes(LARGE))
        fill(f"{tree}/spool", MANY)
        for entry in os.scandir(f"{tree}/spool"):
            os.chown(entry.path, victim.UID, victim.GID)
        far = Far(f"{tree}/far", base)
        stack.callback(far.close)
        if kind == "cloakfs":
            mount = stack.enter_context(_mounted(tree, point))
            stack.callback(shutil.rmtree, os.path.join(STATE_DIR, mount), ignore_errors=True)
        elif kind == "bindfs":
            subprocess.run(
                ["bindfs", "-o", "allow_other", tree, point], check=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW)),
            )  # fmt: skip
            stack.callback(linux.umount, point, linux.MNT_DETACH)
        yield Ground(kind, base, tree, tree if kind == "bare" else point)
        Path(base, "flag").touch()


@contextlib.contextmanager
def _mounted(tree: str, point: str) -> Iterator[str]:
    with daemons_with(partial(alterations.limit_descriptors, FEW)), mounted(tree, point, "-o", OPTIONS) as mount:
        yield mount.key


def look_after(top: str, stop: str) -> Watch:
    """As the victim: work until the file `stop` exists, for at least one round."""
    watch = Watch()
    own = os.path.join(top, "victim")
    number = 0
    while not number or not os.path.exists(stop):
        number += 1
        name, new = f"file{number % victim.FILES}", f"{own}/new{number}"
        calls: list[tuple[Callable[[], object], object]] = [
            (lambda: len(os.listdir(own)), victim.FILES + 3),
            (partial(read, f"{own}/{name}"), victim.content(name)),
            (lambda: read_anew(f"{own}/large"), LARGE),
            (partial(Path(new).write_bytes, b"new"), 3),
            (partial(os.unlink, new), None),
        ]
        for call, expected in calls:
            victim.ask(watch, call, expected)
    return watch


def open_files_that_are_never_closed(here: str, end: float) -> int:
    """By several processes, since each may have only so many."""

    def take(number: int) -> None:
        held: list[int] = []
        while True:
            try:
                held.append(os.open(f"{here}/{number}-{len(held) % 20}", os.O_CREAT | os.O_RDWR, 0o600))
            except OSError:
                time.sleep(0.05)

    with children(6, take):
        last_until(end)
        return 6


def listings_of_what_is_hidden(here: str, end: float) -> int:
    """By several processes at a time."""
    spool = os.path.join(os.path.dirname(here), "spool")

    def look(number: int) -> None:
        while True:
            os.listdir(spool)

    with children(4, look):
        last_until(end)
        return 4


def reads_that_are_never_answered(here: str, end: float) -> int:
    """More than the kernel sends by default, twelve."""
    far = os.path.join(os.path.dirname(here), "far")

    def wait(number: int) -> None:
        read(f"{far}/{10_000 + number}")

    with children(40, wait):
        last_until(end)
        return 40


ATTACKS: list[Callable[[str, float], int]] = [
    open_files_that_are_never_closed,
    listings_of_what_is_hidden,
    reads_that_are_never_answered,  # the last one: its end is that of what does not answer
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_other_user_gets_its_share(ground: Ground, attack: Callable[[str, float], int]) -> None:
    stop = f"{ground.base}/stop-{attack.__name__}"
    with User(victim.UID, victim.GID) as watcher, User(ATTACKER) as attacker:
        attacker.start(attack, f"{ground.top}/mine", time.monotonic() + 0.3 + SECONDS)
        wait_until(lambda: processes.children(attacker.pid))
        watcher.start(look_after, ground.top, stop)
        time.sleep(SECONDS)
        if attack is reads_that_are_never_answered:  # through bindfs, nobody can be killed who waits for one
            Path(ground.base, "flag").touch()
        wait_until(attacker.has_answered)
        done = attacker.answer_within(1)
        Path(stop).touch()
        watch: Watch = watcher.answer_within(100)
    REPORT.append((f"{attack.__name__.replace('_', ' ')} ({ground.kind})", done, watch))
    if ground.kind == "cloakfs":
        assert watch.wrong == []
        assert len(watch.seconds) >= 10
        assert max(watch.seconds) < 0.7 * SECONDS + 1
