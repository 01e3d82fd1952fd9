"""What one caller takes of a bounded resource leaves something to the others, and the administrator is told."""

import contextlib
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs.fuse import connection, loop
from cloakfs.linux import mountinfo
from tests.agents import User, read
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, run
from tests.mount.loopfs import filesystem
from tests.mount.test_hung import Far
from tests.mount.test_limits import hold_many, let_go, mounted_with_few_descriptors
from tests.waiting import wait_until

ANN, BEN, EVE = 2001, 2002, 2003
OPTIONS = "rw,cloak_list=uid +007 1 9999"

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
PAGE = mmap.PAGESIZE

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def limit_of(there: Mount, name: str) -> int:
    device = next(place.device for place in mountinfo.by_id().values() if place.path == there.path)
    with open(connection.open_control(device, name, os.O_RDONLY), "rb", buffering=0) as file:
        return int(file.read(32))


def refused(there: Mount) -> dict[str, int]:
    told: list[dict[str, dict[str, int]]] = json.loads(run("status", "--json", there.path).stdout)
    return told[0]["refused"]


def waiting(there: Mount) -> int:
    line = next(
        line
        for line in run("metrics").stdout.splitlines()
        if line.startswith("cloakfs_waiting_requests{") and f'"{there.path}"' in line
    )
    return int(float(line.split()[-1]))


def read_anew(path: str) -> int:
    """Read a file that the kernel has nothing of; return its length."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return sum(len(part) for part in iter(lambda: os.read(fd, 1 << 20), b""))
    finally:
        os.close(fd)


def test_the_administrator_is_told_who_wants_too_much(tree: str, base: str, user: MakeUser) -> None:
    for number in range(400):
        Path(tree, str(number)).touch()
    os.mkdir(f"{base}/few")
    with mounted_with_few_descriptors(tree, f"{base}/few", 512, OPTIONS) as there:
        ann = user(ANN)
        assert not any(refused(there).values())
        held, _ = ann.do(hold_many, [there.at(str(number)) for number in range(400)])
        assert held < 400
        for _ in range(3):
            ann.error(os.listdir, there.path)
        assert there.log.count(f"server uid {ANN} has {held} files and directories open") == 1
        wait_until(lambda: refused(there).get("open files") == 4)
        assert "refused   open files 4," in run("status", there.path).stdout
        ann.do(let_go)


def test_the_kernel_sends_more_than_twelve_requests_in_the_background(mount: MakeMount) -> None:
    there = mount("-o", "rw")
    assert limit_of(there, "max_background") == loop.MOST_BACKGROUND > loop.SHARE
    assert limit_of(there, "congestion_threshold") < loop.MOST_BACKGROUND
    assert not json.loads(run("status", "--json", there.path).stdout)[0]["lacking"]


@pytest.fixture
def far(tree: str, base: str) -> Iterator[str]:
    """Mounted inside of the tree: the files from `10000` on have contents that do not come."""
    place = Far(os.path.join(tree, "far"), base)
    try:
        yield place.path
    finally:
        Path(base, "flag").touch()
        place.close()


@pytest.mark.usefixtures("far")
def test_readers_of_what_does_not_answer_keep_nobody_from_reading(
    tree: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    """There are more of them than the kernel would send requests by itself, twelve."""
    with open(f"{tree}/large", "wb") as file:
        file.write(bytes(32 << 20))
    os.chmod(f"{tree}/large", 0o644)
    there = mount("-o", "rw,no_root_squash")
    ben = user(BEN)
    assert ben.do(read_anew, there.at("large")) == 32 << 20
    readers = [user(ANN) for _ in range(40)]
    for number, one in enumerate(readers):
        one.start(read, there.at("far", str(10_000 + number)))
    wait_until(lambda: waiting(there) >= len(readers))
    for _ in range(3):
        ben.do_within(20, read_anew, there.at("large"))
    Path(base, "flag").touch()
    for one in readers:
        assert one.finish_within(60)


def write_mapped(path: str, pages: int) -> None:
    """Write every second page of a file through a mapping, so that each takes a request."""
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 2 * pages * PAGE) as area:
        for number in range(pages):
            area[2 * number * PAGE] = number % 255 + 1
        area.flush()
    os.close(fd)


@contextlib.contextmanager
def frozen(path: str) -> Iterator[None]:
    """Nobody can write to the file system (fsfreeze(8))."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, FITHAW, 0)
    finally:
        os.close(fd)


def test_nothing_that_was_mapped_is_lost_because_much_waits_to_be_written(
    tree: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    """More requests wait than one caller may have: those that write what was mapped are not refused."""
    pages = 3 * loop.SHARE
    with (
        filesystem("ext4", tree, "disk", images=base) as disk,
        daemons_with(alterations.no_room_for_dirty_pages),  # so that threads write
    ):
        for name in ("mapped", "other"):
            Path(disk, name).write_bytes(bytes(2 * pages * PAGE))
            os.chown(f"{disk}/{name}", ANN, ANN)
        there = mount("-o", "rw,passthrough=off")
        ann, ben = user(ANN), user(BEN)
        ann.do(write_mapped, there.at("disk", "other"), 1)  # this file system takes a thread to write to
        os.chmod(tree, 0o777)
        with frozen(disk):
            ann.start(write_mapped, there.at("disk", "mapped"), pages)
            wait_until(lambda: waiting(there) > loop.SHARE + 50)
            ben.do_within(20, os.listdir, there.path)
            ben.do_within(20, Path(there.at("of-ben")).write_bytes, b"x")
        assert ann.finish_within(60)
        written = Path(disk, "mapped").read_bytes()
    assert [written[2 * number * PAGE] for number in range(pages)] == [number % 255 + 1 for number in range(pages)]


@pytest.mark.parametrize(("change", "argument"), [(Path.write_bytes, b""), (Path.chmod, 0o640)], ids=[">", "chmod"])
def test_who_changes_a_file_while_a_thread_writes_keeps_nobody_waiting(
    tree: str, base: str, mount: MakeMount, user: MakeUser, change: Callable[..., object], argument: object
) -> None:
    """The thread may have the file locked for as long as the disk takes; so the change is made in a thread, too."""
    with (
        filesystem("ext4", tree, "disk", images=base) as disk,
        daemons_with(alterations.no_room_for_dirty_pages),  # so that a thread writes
    ):
        for name, owner in (("written", ANN), ("changed", BEN)):
            Path(disk, name).write_bytes(bytes(2 * PAGE))
            os.chown(f"{disk}/{name}", owner, owner)
        there = mount("-o", "rw,passthrough=off")
        ann, ben, eve = user(ANN), user(BEN), user(EVE)
        ann.do(write_mapped, there.at("disk", "written"), 1)  # this file system takes a thread to write to
        with frozen(disk):
            ann.start(write_mapped, there.at("disk", "written"), 1)
            wait_until(lambda: waiting(there) >= 1)
            ben.start(change, Path(there.at("disk", "changed")), argument)
            wait_until(lambda: waiting(there) >= 2)
            eve.do_within(20, os.listdir, there.path)
        assert ann.finish_within(60)
        assert ben.finish_within(60)
