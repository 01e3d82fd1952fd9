"""The watcher is stopped, or replaced, or overwhelmed: changes are still seen, and nobody waits for it."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cloakfs.kernelcache.cachepolicy import SHORT_SECONDS
from cloakfs.kernelcache.sharedwatch import watcher_path
from cloakfs.kernelcache.watcherprocess import ChangeWatcher
from cloakfs.linux import sockets
from cloakfs.state.runtime import RUN_DIR
from cloakfs.tree import calls
from cloakfs.tuning import Tuning
from tests.agents import User
from tests.mount.conftest import Mount, daemons_with, told, watchers
from tests.mount.loopfs import filesystem
from tests.mount.test_caching import requests
from tests.mount.test_limits import drop_caches
from tests.mount.test_watcher import is_seen, log_what_is_heard, several, the_watcher, watching
from tests.processes import kill
from tests.waiting import let_expire, wait_until

MOUNTS = 3
OTHER = 3001
OF_A_MOMENT = 2.0  # for which a request may wait for a watcher that does not answer


@pytest.fixture
def mounts(base: str, tree: str) -> Iterator[list[Mount]]:
    """Mounts of one tree."""
    with several(base, tree, MOUNTS) as made:
        yield made


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def mounted_inside(path: str) -> Iterator[None]:
    """Mount a file system of its own there, with a file in it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", path], check=True)
    try:
        Path(path, "file").touch()
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def exists_soon(path: str) -> bool:
    """Whether there is such a file; the answer may not take longer than a moment."""
    began = time.monotonic()
    exists = os.path.exists(path)
    assert time.monotonic() - began < OF_A_MOMENT
    return exists


def is_cached_for_long(m: Mount, paths: list[str]) -> bool:
    """Whether a look at these takes no request, more than a second after the last one."""
    for path in paths:
        os.stat(path)
    let_expire(SHORT_SECONDS + 0.1)
    before = requests(m)
    for path in paths:
        os.stat(path)
    counts = requests(m) - before
    return not counts["lookup"] + counts["getattr"]


def test_one_that_stands_still_is_replaced(tree: str, mounts: list[Mount]) -> None:
    Path(tree, "file").touch()
    os.chmod(f"{tree}/file", 0o644)
    wait_until(is_seen(mounts, "file", mode=0o644))
    old = the_watcher()
    with stopped(old):
        os.chmod(f"{tree}/file", 0o600)
        wait_until(is_seen(mounts, "file", mode=0o600), 10)
        wait_until(lambda: set(watchers()) - {old})
    wait_until(lambda: old not in watchers(), 30)  # it does not end the new one
    assert os.path.exists(watcher_path(RUN_DIR))
    told()
    os.chmod(f"{tree}/file", 0o640)
    wait_until(is_seen(mounts, "file", mode=0o640), 5)


def test_what_is_mounted_while_it_stands_still(tree: str, mounts: list[Mount]) -> None:
    """The answer about the one file system is not taken for that about the other."""
    names = [f"inside-{number}" for number in range(2)]
    for name in names:
        os.mkdir(f"{tree}/{name}")
    for m in mounts:
        os.listdir(m.path)
    with contextlib.ExitStack() as stack:
        with stopped(the_watcher()):
            for name in names:
                stack.enter_context(mounted_inside(f"{tree}/{name}"))
                for m in mounts:
                    wait_until(partial(exists_soon, m.at(name, "file")))
        for mode in (0o600, 0o640):
            for name in names:
                os.chmod(f"{tree}/{name}/file", mode)
                wait_until(is_seen(mounts, name, "file", mode=mode), 10)
    assert not any("(tmpfs): changes" in m.log for m in mounts)


@pytest.mark.usefixtures("figures_at_once")
def test_what_is_mounted_while_it_is_replaced(base: str, tree: str) -> None:
    names = [f"inside-{number}" for number in range(4)]
    for name in names:
        os.mkdir(f"{tree}/{name}")
    with contextlib.ExitStack() as stack:
        mounts = stack.enter_context(several(base, tree, MOUNTS))
        for name in names:
            kill(the_watcher())
            stack.enter_context(mounted_inside(f"{tree}/{name}"))
            for m in mounts:
                wait_until(partial(os.path.exists, m.at(name, "file")))
            wait_until(watchers)
        for name in names:
            os.chmod(f"{tree}/{name}/file", 0o600)
            wait_until(is_seen(mounts, name, "file", mode=0o600), 5)
        assert not any("(tmpfs): changes" in m.log for m in mounts)
        for m in mounts:
            wait_until(partial(is_cached_for_long, m, [m.at(name, "file") for name in names]))


def test_nothing_is_cached_for_long_while_there_is_none(
    tree: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    os.chmod(tree, 0o755)
    Path(tree, "file").touch()
    made = [mount("-o", "cloak_list=uid +077 0 -1") for _ in range(2)]
    other = user(OTHER)
    with contextlib.ExitStack() as stack:
        lock = os.open(f"{watcher_path(RUN_DIR)}.lock", os.O_RDWR)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        kill(the_watcher())
        wait_until(lambda: "connecting again" in made[1].log)
        os.chmod(f"{tree}/file", 0o644)

        def looks_at_all() -> bool:
            for m in made:
                other.do(os.stat, m.at("file"))
            return time.monotonic() > begun + 0.5

        begun = time.monotonic()
        wait_until(looks_at_all)  # until all that was known has been forgotten, and much is known again
        os.chmod(f"{tree}/file", 0o600)
        for m in made:
            wait_until(lambda m=m: other.error(os.stat, m.at("file")), 2)  # type: ignore[misc]
    wait_until(watchers, 10)


def heard(m: Mount) -> int:
    """How many bytes the watcher has told this mount."""
    return sum(map(int, re.findall("heard of ([0-9]+) bytes", m.log)))


def test_it_forgets_what_the_kernel_has_forgotten(base: str) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemons_with(log_what_is_heard, tuning=Tuning(housekeeping_seconds=0.05)))
        tree = stack.enter_context(filesystem("tmpfs", base))
        os.mkdir(f"{tree}/elsewhere")
        _, knows, _ = stack.enter_context(several(base, tree, MOUNTS))
        os.mkdir(f"{tree}/many")
        for number in range(9000):
            Path(tree, f"many/{number}").touch()
        for entry in os.scandir(knows.at("many")):
            entry.stat()
        drop_caches()

        def hears_nothing() -> bool:
            told()
            before = heard(knows)
            for number in range(200):
                Path(tree, f"elsewhere/{number}").touch()
            for number in range(200):
                os.unlink(f"{tree}/elsewhere/{number}")
            told()
            return heard(knows) <= before + 2000  # some rows are shared

        wait_until(hears_nothing, 30)


def test_what_a_directory_takes_does_not_depend_on_the_number_of_mounts(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of a change of a directory itself does not name the directory above."""
    taken: Counter[str] = Counter()
    find_handle = calls.find_handle

    def counted(mount: int, handle: bytes, flags: int = 0) -> int:
        taken[threading.current_thread().name] += 1
        return find_handle(mount, handle, flags)

    monkeypatch.setattr(calls, "find_handle", counted)
    with filesystem("ext4", base) as tree:
        sources = [f"{tree}/source-{number}" for number in range(10)]
        others = [f"{tree}/other-{number}" for number in range(10)]
        for path in (*sources, *others):
            os.mkdir(path)
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(sockets.listen(watcher_path(base), kind=socket.SOCK_SEQPACKET))
            watcher = ChangeWatcher(listening, f"{base}/lock", idle_seconds=1)
            thread = threading.Thread(target=watcher.run, name="watcher")
            thread.start()
            stack.callback(thread.join)
            for source in sources:
                stack.enter_context(watching(base, source, 1))
            taken.clear()
            for other in others:
                os.chmod(other, 0o700)
            (last,) = stack.enter_context(watching(base, tree, 1))
            wait_until(last.is_silent)
            assert taken["watcher"] == len(others)
