"""Who writes keeps nobody else waiting, and does not wait either where it need not; and writes as itself."""

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.linux.dirtypages import DirtyPages
from cloakfs.state.runtime import mounted
from tests.agents import User
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with
from tests.mount.loopfs import filesystem
from tests.mount.test_patched_pyfuse3 import with_patch
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("figures_at_once")

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN, BOB = 3001, 3002
GROUP = 4001
LONG_SECONDS = 60.0


def rewrite(path: str, mib: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for _ in range(mib):
        os.write(fd, b"x" * (1 << 20))
    os.close(fd)


@pytest.mark.parametrize("passthrough", ["off", "auto"])
def test_a_close_that_takes_long(passthrough: str, base: str, mount: MakeMount, user: MakeUser) -> None:
    """ext4 sends a file that was emptied and written again to the disk when it is closed, whoever has written it."""
    marks = os.path.join(base, "marks")
    os.mkdir(marks)
    os.chmod(marks, 0o777)  # whoever the daemon acts as
    begun, go = os.path.join(marks, "begun"), os.path.join(marks, "go")
    with filesystem("ext4", base) as tree, daemons_with(partial(alterations.close_slowly, begun, go)):
        os.mkdir(os.path.join(tree, "own"))
        for name in ("own/file", "own/large"):  # what is made anew does not pass
            Path(tree, name).touch()
        for name in ("own", "own/large"):
            os.chown(os.path.join(tree, name), ANN, ANN)
        m = mount("-o", f"no_root_squash,passthrough={passthrough}", source=tree)
        ann, bob = user(ANN), user(BOB)
        try:
            ann.do(rewrite, m.at("own/large"), 3)
            while not os.path.exists(begun):
                pass
            bob.do_within(LONG_SECONDS, os.stat, m.at("own/file"))
            ann.do_within(LONG_SECONDS, rewrite, m.at("own/small"), 1)
            assert not os.path.exists(go)
        finally:
            Path(go).touch()


def make_set_gid_and_write(path: str) -> int:
    """S_ISGID says nothing of execution here, and stays if whoever writes is in the group (chmod(2))."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.chown(path, -1, GROUP)
        os.chmod(path, 0o2664)
        os.write(fd, b"content")
        return stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def test_a_write_by_a_member_of_the_group_leaves_set_gid(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("tmpfs", base) as tree:  # where files are made without the caller's groups
        os.mkdir(os.path.join(tree, "own"), 0o755)
        os.chown(os.path.join(tree, "own"), ANN, ANN)
        m, ann = mount("-o", "no_root_squash", source=tree), user(ANN, ANN, [GROUP])
        expected = ann.do(make_set_gid_and_write, os.path.join(tree, "own/bare"))
        assert ann.do(make_set_gid_and_write, m.at("own/file")) == expected == 0o2664


def append(path: str, sizes: list[int], flags: int = 0) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o600)
    try:
        for size in sizes:
            assert os.write(fd, b"x" * size) == size
    finally:
        os.close(fd)


def fallocate_new(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        linux.fallocate(fd, 0, 0, 1 << 20)
    finally:
        os.close(fd)


def written(m: Mount, count: int) -> tuple[int, int]:
    """Return how many WRITEs the loop has made at once, and how many threads have made, once that are so many."""

    def now() -> tuple[int, int]:
        reading = mounted()[m.path].prefetch
        return reading.get("written_at_once", 0), reading.get("written_by_threads", 0)

    wait_until(lambda: sum(now()) >= count)
    return now()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_small_writes_to_a_disk_take_no_thread(base: str, mount: MakeMount, user: MakeUser, kind: str) -> None:
    with filesystem(kind, base) as tree:
        m, ann = mount("-o", "no_root_squash,passthrough=off", source=tree), user(ANN)
        ann.do(append, m.at("log"), [100, 5000, 100_000])
        ann.do(append, m.at("log"), [100] * 50)
        if kind == "tmpfs":  # where there is nothing to decide
            assert written(m, 0) == (0, 0)
        else:
            at_once, by_threads = written(m, 53)
            assert at_once >= 53  # the kernel makes several requests of one
            assert by_threads == 0
        assert os.path.getsize(f"{tree}/log") == 105_100 + 50 * 100


def test_writes_that_may_wait_are_made_by_threads(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("ext4", base) as tree:
        m, ann = mount("-o", "no_root_squash,passthrough=off", source=tree), user(ANN)
        ann.do(append, m.at("large"), [1 << 20])
        assert written(m, 1) == (0, 1)
        for flag in (os.O_SYNC, os.O_DSYNC):
            ann.do(append, m.at("journal"), [100], flag)
        assert written(m, 3) == (0, 3)
        subprocess.run(["mount", "-o", "remount,sync", tree], check=True)
        ann.do(append, m.at("log"), [100] * 3)
        assert written(m, 6) == (0, 6)


def test_on_a_disk_that_is_nearly_full_threads_write(base: str, mount: MakeMount, user: MakeUser) -> None:
    """There, the file system may wait for the disk to find room."""
    with filesystem("ext4", base) as tree:
        m, ann = mount("-o", "no_root_squash,passthrough=off", source=tree), user(ANN)
        with open(f"{tree}/filler", "wb") as filler:
            there = os.statvfs(tree)
            os.posix_fallocate(filler.fileno(), 0, there.f_bavail * there.f_frsize - (10 << 20))
        ann.do(append, m.at("log"), [4096] * 10)
        assert written(m, 10) == (0, 10)
        assert ann.error(append, m.at("log"), [4096] * 4000) == errno.ENOSPC


def test_while_there_are_many_dirty_pages_threads_write(base: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel then has those who write wait; the others of this mount must not wait with them."""
    with filesystem("ext4", base) as tree, daemons_with(alterations.no_room_for_dirty_pages):
        m, ann = mount("-o", "no_root_squash,passthrough=off", source=tree), user(ANN)
        ann.do(append, m.at("log"), [100] * 20)
        assert written(m, 20) == (0, 20)


def test_a_write_that_waits_makes_threads_write(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("ext4", base) as tree, daemons_with(alterations.writes_wait_in_the_loop):
        m, ann = mount("-o", "no_root_squash,passthrough=off", source=tree), user(ANN)
        ann.do(append, m.at("log"), [100] * 20)
        assert written(m, 20) == (1, 19)


@with_patch
def test_while_a_thread_allocates_threads_write(base: str, mount: MakeMount, user: MakeUser) -> None:
    """It may hold the lock of the file, for which a write in the session loop would wait."""
    marks = os.path.join(base, "marks")
    os.mkdir(marks)
    os.chmod(marks, 0o777)  # whoever the daemon acts as
    begun, go = os.path.join(marks, "begun"), os.path.join(marks, "go")
    with filesystem("ext4", base) as tree, daemons_with(partial(alterations.allocate_slowly, begun, go)):
        m, ann, bob = mount("-o", "no_root_squash,passthrough=off", source=tree), user(ANN), user(BOB)
        try:
            ann.start(fallocate_new, m.at("large"))
            wait_until(lambda: os.path.exists(begun))
            bob.do(append, m.at("log"), [100] * 5)
            assert written(m, 5) == (0, 5)
        finally:
            Path(go).touch()
        assert ann.finish_within(60)
        bob.do(append, m.at("log"), [100] * 5)
        assert written(m, 10) == (5, 5)


def test_room_for_dirty_pages() -> None:
    there = Path("/proc/vmstat").read_text().split()
    threshold = int(there[there.index("nr_dirty_threshold") + 1])
    assert 0 <= DirtyPages().room() <= threshold * os.sysconf("SC_PAGE_SIZE")


def test_room_in_a_control_group(tmp_path: Path) -> None:
    """A group with a limit of memory has dirty pages of its own, and so have the groups above it."""
    inner = tmp_path / "system.slice/cloakfs.service"
    inner.mkdir(parents=True)
    for group, limit in ((inner, "max"), (tmp_path / "system.slice", str(100 << 20))):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.high").write_text("max\n")
        (group / "memory.stat").write_text(f"anon {20 << 20}\nfile_dirty {1 << 20}\nfile_writeback 0\n")
    own = tmp_path / "own"
    own.write_text("0::/system.slice/cloakfs.service\n")
    dirty_pages = DirtyPages(str(tmp_path), str(own))
    assert dirty_pages.room() == 3 << 20
    (tmp_path / "system.slice/memory.stat").write_text(f"anon {20 << 20}\nfile_dirty {9 << 20}\nfile_writeback 0\n")
    assert dirty_pages.room() == 0
