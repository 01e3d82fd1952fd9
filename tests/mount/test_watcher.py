"""Several mounts of one tree: one process reads what is changed, and tells those whom it concerns."""

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.kernelcache.interest import ANY_FILE, COLUMNS, InterestTable
from cloakfs.kernelcache.sharedwatch import SharedWatch, watcher_path
from cloakfs.linux.fanotify import Event
from cloakfs.state.runtime import RUN_DIR
from tests.altered import replace
from tests.mount.conftest import Mount, daemons_with, mounted, told, watchers
from tests.mount.loopfs import filesystem
from tests.mount.test_limits import drop_caches
from tests.processes import kill
from tests.waiting import wait_until

MOUNTS = 3
CHANGES = 500
SHARES = "cloakfs-watcher reads the changes"  # in the log


@pytest.fixture
def mounts(base: str, tree: str) -> Iterator[list[Mount]]:
    """Mounts of one tree."""
    with several(base, tree, MOUNTS) as made:
        yield made


@contextlib.contextmanager
def several(base: str, source: str, number: int) -> Iterator[list[Mount]]:
    with contextlib.ExitStack() as stack:
        made = []
        for count in range(number):
            path = os.path.join(base, f"mount-{count}")
            os.mkdir(path)
            made.append(stack.enter_context(mounted(source, path, "-o", "no_root_squash")))
        yield made


def the_watcher() -> int:
    wait_until(watchers)
    (pid,) = watchers()
    return pid


def is_seen(mounts: list[Mount], *names: str, mode: int) -> Callable[[], bool]:
    return lambda: all(os.stat(m.at(*names)).st_mode & 0o7777 == mode for m in mounts)


def test_one_mount_needs_none(base: str, tree: str) -> None:
    before = watchers()  # of the last test
    with several(base, tree, 1):
        assert set(watchers()) <= set(before)


def test_all_mounts_see_what_is_changed(tree: str, mounts: list[Mount]) -> None:
    os.makedirs(f"{tree}/known/deep")
    os.mkdir(f"{tree}/elsewhere")
    Path(tree, "known/deep/file").write_text("before")
    Path(tree, "known/deep/linked").write_text("before")
    for m in mounts:
        for _ in range(2):
            assert sorted(os.listdir(m.at("known/deep"))) == ["file", "linked"]
            assert Path(m.at("known/deep/file")).read_text() == "before"
            os.stat(m.at("known/deep/linked"))
    Path(tree, "known/deep/file").write_text("afterwards")
    told()
    assert {Path(m.at("known/deep/file")).read_text() for m in mounts} == {"afterwards"}
    # By a name in a directory that no mount knows.
    os.link(f"{tree}/known/deep/linked", f"{tree}/elsewhere/other")
    os.chmod(f"{tree}/elsewhere/other", 0o600)
    wait_until(is_seen(mounts, "known/deep/linked", mode=0o600), 5)
    # By a handle.
    directory = os.open(tree, os.O_RDONLY)
    file = os.open(f"{tree}/known/deep/linked", os.O_PATH)
    handle, _ = linux.name_to_handle(file)
    again = linux.open_by_handle(directory, handle, os.O_RDWR)
    os.fchmod(again, 0o640)
    for fd in (directory, file, again):
        os.close(fd)
    wait_until(is_seen(mounts, "known/deep/linked", mode=0o640), 5)
    # Of a directory, which says nothing of the one above.
    os.chmod(f"{tree}/known", 0o750)
    wait_until(is_seen(mounts, "known", mode=0o750), 5)
    os.rename(f"{tree}/known", f"{tree}/renamed")
    told()
    for m in mounts:
        assert sorted(os.listdir(m.path)) == ["elsewhere", "renamed"]
        assert not os.path.exists(m.at("known"))


def test_what_one_mount_changes_the_others_see(mounts: list[Mount]) -> None:
    first, *others = mounts
    Path(first.at("file")).write_text("1")
    for number in range(2, 6):
        for m in others:
            assert Path(m.at("file")).read_text() == str(number - 1)
        Path(first.at("file")).write_text(str(number))
        told()


def log_what_is_heard() -> None:
    parse = SharedWatch.parse

    def logging_it(self: SharedWatch, raw: bytes) -> list[Event]:
        logging.getLogger("cloakfs").info("heard of %d bytes", len(raw))
        return parse(self, raw)

    replace(SharedWatch, "parse", logging_it)


def test_who_knows_nothing_there_hears_nothing(base: str) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemons_with(log_what_is_heard))
        tree = stack.enter_context(filesystem("tmpfs", base))
        os.mkdir(f"{tree}/known")
        mounts = stack.enter_context(several(base, tree, MOUNTS))
        _, idle, knows = mounts  # the first one is older than the watcher, and reads by itself
        os.listdir(knows.at("known"))
        for number in range(CHANGES):
            path = f"{tree}/known/{number}"
            Path(path).write_text("x")
            os.rename(path, f"{path}-renamed")
            os.link(f"{path}-renamed", path)
            os.unlink(path)
            os.unlink(f"{path}-renamed")
        wait_until(lambda: "heard" in knows.log)
        told()
        assert "heard" not in idle.log


def test_a_watcher_that_was_killed_is_replaced(tree: str, mounts: list[Mount]) -> None:
    Path(tree, "file").write_text("0")
    for number in range(1, 6):
        for m in mounts:
            os.stat(m.at("file"))
        kill(the_watcher())
        os.chmod(f"{tree}/file", 0o600 + number)  # nobody hears of it
        wait_until(is_seen(mounts, "file", mode=0o600 + number), 10)
        wait_until(watchers)
    for m in mounts[1:]:
        wait_until(lambda m=m: "connecting again" in m.log)  # type: ignore[misc]


@contextlib.contextmanager
def changing_modes(paths: list[str]) -> Iterator[None]:
    """Change the modes of files all the time; none is changed any more afterwards."""
    is_over = threading.Event()

    def change() -> None:
        for number in itertools.count():
            for path in paths:
                os.chmod(path, 0o600 + number % 8)
            if is_over.is_set():
                return

    with ThreadPoolExecutor() as executor:
        load = executor.submit(change)
        try:
            yield
        finally:
            is_over.set()
        load.result()


def test_nothing_is_lost_when_it_is_killed_under_load(tree: str, mounts: list[Mount]) -> None:
    names = [f"file-{number}" for number in range(20)]
    for name in names:
        Path(tree, name).touch()
    with changing_modes([f"{tree}/{name}" for name in names]):
        for _ in range(5):
            for m in mounts:
                for name in names:
                    os.stat(m.at(name))
            for pid in watchers():
                kill(pid)
            wait_until(watchers)
    for name in names:
        wait_until(is_seen(mounts, name, mode=os.stat(f"{tree}/{name}").st_mode & 0o7777), 10)


def test_the_first_mount_shares_it_later(tree: str, mounts: list[Mount]) -> None:
    first = mounts[0]
    names = [f"file-{number}" for number in range(20)]
    for name in names:
        Path(tree, name).touch()

    def looks_at_all() -> bool:
        for name in names:
            os.stat(first.at(name))
        return SHARES in first.log

    with changing_modes([f"{tree}/{name}" for name in names]):
        assert SHARES not in first.log
        wait_until(looks_at_all, 20)
    for name in names:
        wait_until(is_seen(mounts, name, mode=os.stat(f"{tree}/{name}").st_mode & 0o7777), 10)
    opened = [os.readlink(fd) for fd in Path(f"/proc/{first.pid}/fd").iterdir()]
    assert opened.count("anon_inode:[fanotify]") == 1  # that of the watcher


def test_a_daemon_that_does_not_read_keeps_nobody_waiting(tree: str, mounts: list[Mount]) -> None:
    _, stopped, goes_on = mounts
    Path(tree, "file").touch()
    for m in (stopped, goes_on):
        os.listdir(m.path)
        os.stat(m.at("file"))
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        for number in range(60_000):  # more than its socket has room for
            os.chmod(f"{tree}/file", 0o600 + number % 8)
            if number % 1000 == 0:
                wait_until(is_seen([goes_on], "file", mode=0o600 + number % 8), 10)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    os.chmod(f"{tree}/file", 0o755)
    wait_until(is_seen([stopped, goes_on], "file", mode=0o755), 10)


@contextlib.contextmanager
def watching(directory: str, tree: str, number: int) -> Iterator[list[SharedWatch]]:
    """So many that watch the file system of `tree`; of their own changes, too."""
    with contextlib.ExitStack() as stack:
        top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, top)
        watches = []
        for _ in range(number):
            watches.append(SharedWatch(directory, own=True))
            stack.callback(watches[-1].close)
            watches[-1].add(top)
        yield watches


def heard(watches: list[SharedWatch]) -> list[bool]:
    """Which of them have heard of anything."""
    has_heard = [False] * len(watches)

    def has_read_all() -> bool:
        for number, watch in enumerate(watches):
            has_heard[number] |= bool(watch.read())
        return all(watch.is_silent() for watch in watches)

    wait_until(has_read_all)
    return has_heard


def handle_of(path: str) -> bytes:
    fd = os.open(path, os.O_PATH)
    try:
        return linux.name_to_handle(fd)[0]
    finally:
        os.close(fd)


def test_more_mounts_than_a_table_has_columns(base: str) -> None:
    with filesystem("tmpfs", base) as tree, watching(base, tree, COLUMNS + 2) as watches:
        Path(tree, "file").touch()
        for watch in (watches[0], watches[-1]):
            watch.note(handle_of(f"{tree}/file"))
        heard(watches)
        os.chmod(f"{tree}/file", 0o600)
        assert heard(watches) == [True, *[False] * COLUMNS, True]


def test_who_hears_of_a_file_that_is_changed_without_its_name(base: str) -> None:
    with filesystem("ext4", base) as tree, watching(base, tree, 3) as watches:
        Path(tree, "file").touch()
        handle = handle_of(f"{tree}/file")
        watches[0].note(handle)
        watches[1].note(ANY_FILE)
        heard(watches)
        os.link(f"{tree}/file", f"{tree}/link")
        assert heard(watches) == [True, True, False]
        os.chmod(f"{tree}/link", 0o600)
        assert heard(watches) == [True, False, False]
        drop_caches()  # so that the kernel does not know the name
        directory = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        file = linux.open_by_handle(directory, handle, os.O_RDWR)
        try:
            os.write(file, b"written")
            assert heard(watches) == [True, False, False]
            os.fchmod(file, 0o640)
            assert heard(watches) == [True, True, False]
        finally:
            os.close(directory)
            os.close(file)


def test_a_directory_that_is_mounted_elsewhere_too(base: str) -> None:
    """A change of it is told to who knows the directory above, whichever of the two mounts the watcher looks at."""
    with filesystem("ext4", base) as tree, contextlib.ExitStack() as stack:
        inside, elsewhere = f"{tree}/inside", f"{tree}/elsewhere/again"
        for path in (inside, elsewhere):
            os.makedirs(path)
        subprocess.run(["mount", "--bind", inside, elsewhere], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", elsewhere], check=True)
        watches = [stack.enter_context(watching(base, path, 1))[0] for path in (elsewhere, tree, elsewhere, tree)]
        watches[1].note(handle_of(tree))
        watches[3].note(handle_of(f"{tree}/elsewhere"))
        heard(watches)
        os.chmod(inside, 0o700)
        assert heard(watches) == [False, True, False, True]


def test_it_ends_after_the_last_mount(base: str, tree: str) -> None:
    with several(base, tree, 2):
        pid = the_watcher()
    wait_until(lambda: pid not in watchers(), 30)
    assert not os.path.exists(watcher_path(RUN_DIR))


def test_the_file_system_can_be_unmounted_afterwards(base: str) -> None:
    place = os.path.join(base, "place")
    os.mkdir(place)
    with filesystem("ext4", base) as top:
        subprocess.run(["mount", "--bind", top, place], check=True)
        with several(base, place, 2) as made:
            os.stat(made[1].path)
        subprocess.run(["umount", place], check=True)


def test_columns_of_a_table_are_apart() -> None:
    """Nobody gets another one's events, and whoever leaves leaves nothing behind."""
    table = InterestTable()
    again = InterestTable(os.dup(table.fd))
    for column in range(COLUMNS):
        again.note(column, b"%d" % (column % 7))
    assert {len(table.wanted_by(b"%d" % number)) for number in range(7)} == {COLUMNS // 7, COLUMNS // 7 + 1}
    table.clear(3)
    again.note(3, b"other")
    assert 3 not in table.wanted_by(b"3")
    assert table.wanted_by(b"other") == [3]
    table.begin()
    assert again.count == 1
    table.end()
    assert again.count == 2
    table.close()
    again.close()
