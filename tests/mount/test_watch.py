"""What the kernel reports of changes behind the mount, on every kind of file system."""

import contextlib
import errno
import itertools
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from cloakfs import linux
from cloakfs.identity import ServerId
from cloakfs.kernelcache.watch import Watch, mounts_changed
from cloakfs.linux import fanotify
from cloakfs.linux.fanotify import Event
from tests.agents import User, write
from tests.mount.conftest import Mount
from tests.mount.loopfs import attached, filesystem, require
from tests.mount.test_trees import drop_caches, handle_of

KINDS = ["ext4", "xfs", "btrfs", "tmpfs", "overlay-nfs"]
CREATE, DELETE, MODIFY, ATTRIB = fanotify.FAN_CREATE, fanotify.FAN_DELETE, fanotify.FAN_MODIFY, fanotify.FAN_ATTRIB
FROM, TO, CLOSE, ONDIR = (
    fanotify.FAN_MOVED_FROM, fanotify.FAN_MOVED_TO, fanotify.FAN_CLOSE_WRITE, fanotify.FAN_ONDIR
)  # fmt: skip


@pytest.fixture
def watch() -> Iterator[Watch]:
    with contextlib.closing(Watch()) as watch:
        yield watch


@pytest.fixture
def other(user: Callable[..., User]) -> User:
    """Somebody else; our own changes are not told."""
    return user(0)


def add(watch: Watch, path: str, flags: int = os.O_PATH) -> int:
    fd = os.open(path, flags)
    try:
        return watch.add(fd)
    finally:
        os.close(fd)


def top_of_btrfs(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return linux.btrfs_top(fd)
    finally:
        os.close(fd)


def fsid_of(path: str) -> int:
    fd = os.open(path, os.O_PATH)
    try:
        return os.fstatvfs(fd).f_fsid
    finally:
        os.close(fd)


# -- what somebody does ----------------------------------------------------------------------------


_held: list[Any] = []


def map_and_write(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    _held.append(mmap.mmap(fd, 4))
    os.close(fd)
    _held[0][:4] = b"mmap"
    _held[0].flush()


def unmap() -> None:
    _held.pop().close()


def set_acl(path: str) -> None:
    subprocess.run(["setfacl", "-m", "u:7:r", path], check=True)


def set_time(which: str, path: str) -> None:
    # -h: not by opening the file to write.
    subprocess.run(["touch", "-h", which, "-d", "2001-01-01", path], check=True)


def exchange(top: str, one: bytes, two: bytes) -> None:
    fd = os.open(top, os.O_RDONLY)
    linux.renameat2(fd, one, fd, two, linux.RENAME_EXCHANGE)
    os.close(fd)


def write_unlinked(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.unlink(path)
    os.write(fd, b"still there")
    os.close(fd)


def write_by_handle(mountpoint: str, handle: bytes) -> None:
    mount_fd = os.open(mountpoint, os.O_RDONLY)
    fd = linux.open_by_handle(mount_fd, handle, os.O_WRONLY)
    os.write(fd, b"by handle")
    os.close(fd)
    os.close(mount_fd)


def read_it(path: str) -> None:
    Path(path).read_bytes()


def table(top: str) -> Iterator[tuple[Callable[..., object], tuple[object, ...], list[tuple[int, str, bytes, str]]]]:
    """(call, its arguments, the events: mask, path of the directory, name, path of the target before or after it)."""
    d, e = f"{top}/d", f"{top}/e"
    file = f"{d}/file"
    of_file, of_d = (d, b"file", file), (d, b".", d)
    unknown = ("", b"")
    yield os.chmod, (file, 0o600), [(ATTRIB, *of_file)]
    yield os.chown, (file, 5, 6), [(ATTRIB, *of_file)]
    yield set_acl, (file,), [(ATTRIB, *of_file)]
    yield os.setxattr, (file, "trusted.x", b"1"), [(ATTRIB, *of_file)]
    yield os.utime, (file, (1, 2)), [(ATTRIB, *of_file)]
    yield set_time, ("-m", file), [(MODIFY, *of_file)]
    yield set_time, ("-a", file), []
    yield read_it, (file,), []
    yield os.chmod, (d, 0o711), [(ATTRIB | ONDIR, *of_d)]
    yield os.chown, (d, 5, 6), [(ATTRIB | ONDIR, *of_d)]
    yield set_acl, (d,), [(ATTRIB | ONDIR, *of_d)]
    yield set_time, ("-m", d), [(MODIFY | ONDIR, *of_d)]
    yield os.chmod, (top, 0o755), [(ATTRIB | ONDIR, top, b".", top)]
    yield write, (file, b"mark", 0), [(MODIFY | CLOSE, *of_file)]
    yield os.truncate, (file, 8), [(MODIFY, *of_file)]
    yield map_and_write, (file,), []
    yield unmap, (), [(CLOSE, *of_file)]
    yield write, (f"{d}/new", b""), [(CREATE | CLOSE, d, b"new", f"{d}/new")]
    yield write, (f"{d}/new", b""), [(MODIFY | CLOSE, d, b"new", f"{d}/new")]  # O_TRUNC
    yield os.mkfifo, (f"{d}/fifo",), [(CREATE, d, b"fifo", f"{d}/fifo")]
    yield os.symlink, ("x", f"{d}/symlink"), [(CREATE, d, b"symlink", f"{d}/symlink")]
    yield os.lchown, (f"{d}/symlink", 5, 6), [(ATTRIB, d, b"symlink", f"{d}/symlink")]
    yield os.mkdir, (f"{d}/dir",), [(CREATE | ONDIR, d, b"dir", f"{d}/dir")]
    yield os.rmdir, (f"{d}/dir",), [(DELETE | ONDIR, d, b"dir", f"{d}/dir")]
    yield os.link, (file, f"{e}/link"), [(ATTRIB, *unknown, file), (CREATE, e, b"link", file)]
    # The directory is the one it was done through; the target is the same.
    yield os.chmod, (f"{e}/link", 0o644), [(ATTRIB, e, b"link", file)]
    yield write, (f"{e}/link", b"x", 0), [(MODIFY | CLOSE, e, b"link", file)]
    yield os.unlink, (f"{e}/link",), [(ATTRIB, *unknown, file), (DELETE, e, b"link", file)]
    new = f"{d}/new"
    yield os.rename, (new, f"{d}/renamed"), [(FROM, d, b"new", new), (TO, d, b"renamed", new)]
    new = f"{d}/renamed"
    yield os.rename, (new, f"{e}/moved"), [(FROM, d, b"renamed", new), (TO, e, b"moved", new)]
    new, over = f"{e}/moved", f"{d}/over"
    yield write, (over, b""), [(CREATE | CLOSE, d, b"over", over)]
    yield os.rename, (new, over), [(FROM, e, b"moved", new), (TO, d, b"over", new), (ATTRIB, *unknown, over)]
    yield os.unlink, (over,), [(ATTRIB, *unknown, over), (DELETE, d, b"over", over)]
    one, two = f"{d}/one", f"{e}/two"
    yield os.mkdir, (one,), [(CREATE | ONDIR, d, b"one", one)]
    yield write, (f"{one}/inside", b""), [(CREATE | CLOSE, one, b"inside", f"{one}/inside")]
    yield os.rename, (one, two), [(FROM | ONDIR, d, b"one", one), (TO | ONDIR, e, b"two", one)]
    yield os.mkdir, (one,), [(CREATE | ONDIR, d, b"one", one)]
    yield os.rename, (two, one), [
        (FROM | ONDIR, e, b"two", two), (TO | ONDIR, d, b"one", two), (ATTRIB | ONDIR, one, b".", one)
    ]  # fmt: skip
    yield exchange, (top, b"d/one", b"d/file"), [
        (FROM | ONDIR, d, b"one", one), (TO | ONDIR, d, b"file", one),
        (FROM, *of_file), (TO, d, b"one", file),
    ]  # fmt: skip
    deleted = f"{d}/deleted"
    yield write, (deleted, b""), [(CREATE | CLOSE, d, b"deleted", deleted)]
    yield write_unlinked, (deleted,), [
        (ATTRIB, *unknown, deleted), (DELETE | MODIFY | CLOSE, d, b"deleted", deleted)
    ]  # fmt: skip


class _Handles:
    """Handles of what is in a tree, by path, as `linux.name_to_handle` gives them."""

    def __init__(self, top: str) -> None:
        self._top = top
        self._paths: dict[bytes, set[str]] = {}

    def look(self) -> None:
        for directory, _, files in os.walk(self._top):
            for path in [directory, *(os.path.join(directory, file) for file in files)]:
                self._paths.setdefault(handle_of(path), set()).add(path)

    def fits(self, handle: bytes, path: str) -> bool:
        return path in self._paths.get(handle, ()) if path else not handle


def check_table(top: str, watch: Watch, other: User, *, without_target: int = 0) -> None:
    os.mkdir(f"{top}/d")
    os.mkdir(f"{top}/e")
    write(f"{top}/d/file", b"content")
    fsid = add(watch, top)
    assert watch.read() == []
    for call, arguments, expected in table(top):
        handles = _Handles(top)  # of this moment: paths are used again
        handles.look()
        other.do(call, *arguments)
        handles.look()
        events = watch.read()
        told = f"{call.__name__}{arguments}: {events}"
        if without_target:
            _merge(events)
        assert len(events) == len(expected), told
        for event, (mask, directory, name, target) in zip(events, expected, strict=True):
            assert (event.mask, event.fsid, event.name) == (mask, fsid, name), told
            assert handles.fits(event.directory, directory), told
            assert handles.fits(event.target, target) or (mask & without_target and not event.target), told


def _merge(events: list[Event]) -> None:
    """Take two events of one name for one if only one of them bears a target."""
    for before, event in list(itertools.pairwise(events)):
        same = (before.directory, before.name) == (event.directory, event.name)
        if same and bool(before.target) != bool(event.target):
            events[events.index(before)] = event._replace(mask=before.mask | event.mask, target=b"")
            events.remove(event)


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_told(kind: str, base: str, watch: Watch, other: User) -> None:
    with filesystem(kind, base) as top:
        check_table(top, watch, other, without_target=0 if tells_what_is_deleted(top, other) else DELETE)


def tells_what_is_deleted(top: str, other: User) -> bool:
    """Whether the target of a DELETE is reported, which older kernels (6.1) do not do on overlayfs."""
    with contextlib.closing(Watch()) as watch:
        add(watch, top)
        os.mkdir(f"{top}/deleted")
        other.do(os.rmdir, f"{top}/deleted")
        (event,) = watch.read()
        return bool(event.target)


def test_before_linux_5_17(base: str, other: User, monkeypatch: pytest.MonkeyPatch) -> None:
    init = fanotify.init

    def refuse(flags: int) -> int:
        if flags & fanotify.FAN_REPORT_TARGET_FID:
            raise OSError(errno.EINVAL, "unknown flag")
        return init(flags)

    monkeypatch.setattr(fanotify, "init", refuse)
    with contextlib.closing(Watch()) as watch, filesystem("ext4", base) as top:
        check_table(top, watch, other, without_target=CREATE | DELETE | FROM | TO)


def test_a_lower_file_of_an_overlay(base: str, watch: Watch, other: User) -> None:
    """Its handle stays when the first change copies it up."""
    with filesystem("overlay-nfs", base) as top:
        lower = f"{base}/overlay-nfs-layers/lower"
        subprocess.run(["umount", top], check=True)
        os.mkdir(f"{lower}/dir")
        write(f"{lower}/dir/file", b"below")
        layers = [f"{name}dir={base}/overlay-nfs-layers/{name}" for name in ("lower", "upper", "work")]
        options = ",".join([*layers, "index=on", "nfs_export=on"])
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, top], check=True)
        add(watch, top)
        handles = handle_of(f"{top}/dir"), b"file", handle_of(f"{top}/dir/file")
        other.do(write, f"{top}/dir/file", b"above", 0)
        (event,) = watch.read()
        assert (event.mask, *event[2:5]) == (MODIFY | CLOSE, *handles)
        assert handle_of(f"{top}/dir") == handles[0]
        assert handle_of(f"{top}/dir/file") == handles[2]


@pytest.mark.parametrize("cached", [True, False])
def test_a_write_by_handle(cached: bool, base: str, watch: Watch, other: User) -> None:
    """As NFS servers do it, which need not know any name."""
    with filesystem("ext4", base) as top:
        write(f"{top}/file", b"")
        handle = handle_of(f"{top}/file")
        add(watch, top)
        if not cached:
            drop_caches()
        other.do(write_by_handle, top, handle)
        (event,) = watch.read()
        assert (event.mask, event.target) == (MODIFY | CLOSE, handle)
        place = (handle_of(top), b"file")
        # (In between, anybody may have had the kernel look up the name.)
        assert (event.directory, event.name) in ([place] if cached else [place, (b"", b"")])


def test_names_of_every_byte_and_length(base: str, watch: Watch, other: User) -> None:
    names = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    names += [b"x" * length for length in range(2, 256)]
    with filesystem("tmpfs", base) as top:
        add(watch, top)
        for name in names:
            other.do(os.symlink, "x", os.path.join(os.fsencode(top), name))
        events = []
        parts = []
        while batch := watch.read():
            events += batch
            parts.append((watch.has_read_all(), watch.is_silent()))
        assert parts[0] == (False, False)  # there are too many for one read
        assert parts[-1] == (True, True)
        assert (True, False) not in parts
        assert [(event.mask, event.name) for event in events] == [(CREATE, name) for name in names]
        assert {event.directory for event in events} == {handle_of(top)}
        paths = [os.path.join(top, os.fsdecode(name)) for name in names]
        assert [event.target for event in events] == [handle_of(path) for path in paths]


# -- file systems ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_id_is_that_of_statvfs(kind: str, base: str, watch: Watch) -> None:
    with filesystem(kind, base) as top:
        assert add(watch, top) == add(watch, top, os.O_RDONLY) == fsid_of(top) != 0


def test_subvolumes_bear_the_id_of_the_top(base: str, watch: Watch, other: User) -> None:
    with filesystem("btrfs", base) as top:
        assert top_of_btrfs(top) == handle_of(top)
        for name in ("sub", "sub/nested"):
            subprocess.run(["btrfs", "-q", "subvolume", "create", f"{top}/{name}"], check=True)
    # As it mostly is, the top itself is mounted nowhere.
    with attached(f"{base}/btrfs.img", f"{base}/on", "-o", "loop,subvol=sub") as place:
        nested = f"{place}/nested"
        assert top_of_btrfs(place) == top_of_btrfs(nested)
        fsid = add(watch, place)
        assert add(watch, nested) == add(watch, place, os.O_RDONLY) == fsid
        assert len({fsid, fsid_of(place), fsid_of(nested)}) == 3
        for directory in (place, nested):
            other.do(write, f"{directory}/file", b"")
            handles = handle_of(directory), b"file", handle_of(f"{directory}/file")
            assert watch.read() == [Event(CREATE | CLOSE, fsid, *handles)]
        # Two objects that have the same inode number.
        assert handle_of(place) != handle_of(nested)
        other.do(subprocess.run, ["btrfs", "-q", "subvolume", "snapshot", nested, f"{place}/snapshot"], check=True)
        snapshot = handle_of(f"{place}/snapshot")
        other.do(subprocess.run, ["btrfs", "-q", "subvolume", "delete", f"{place}/snapshot"], check=True)
        told = [(event.mask, event.name, event.target) for event in watch.read()]
        assert told == [(CREATE | DELETE | ONDIR, b"snapshot", snapshot)] or told == [
            (CREATE | ONDIR, b"snapshot", snapshot), (DELETE | ONDIR, b"snapshot", snapshot)
        ]  # fmt: skip


def test_what_is_changed_elsewhere_or_has_no_handles_is_refused(
    base: str, watch: Watch, mount: Callable[..., Mount]
) -> None:
    m = mount("-o", "no_root_squash")
    for path in ("/proc", "/sys", m.path):
        with pytest.raises(OSError, match="not supported"):
            add(watch, path)
    with filesystem("overlay", base) as top, pytest.raises(OSError, match="not supported"):
        add(watch, top)


def test_several_file_systems_one_queue(base: str, watch: Watch, other: User) -> None:
    with filesystem("tmpfs", base, "one") as one, filesystem("ext4", base, "two") as two:
        ids = [add(watch, one), add(watch, two)]
        assert ids[0] != ids[1]
        for top in (two, one):
            other.do(os.chmod, top, 0o700)
        assert [event.fsid for event in watch.read()] == ids[::-1]


def test_a_watched_file_system_can_be_unmounted(base: str, watch: Watch, other: User) -> None:
    require("tmpfs")
    for _ in range(2):
        with filesystem("tmpfs", base, "top") as top:
            add(watch, top)
            other.do(os.chmod, top, 0o700)
            assert len(watch.read()) == 1
    assert watch.read() == []


# -- who -------------------------------------------------------------------------------------------


def test_only_what_other_processes_do(base: str, watch: Watch, other: User) -> None:
    with filesystem("tmpfs", base) as top:
        add(watch, top)
        os.chmod(top, 0o701)
        thread = threading.Thread(target=os.chmod, args=(top, 0o702))
        thread.start()
        thread.join()
        assert watch.read() == []
        # Neither is what others do merged with it.
        os.chmod(top, 0o703)
        other.do(os.chmod, top, 0o704)
        os.chmod(top, 0o705)
        assert [event.mask for event in watch.read()] == [ATTRIB | ONDIR]
        subprocess.run(["chmod", "700", top], check=True)
        assert [event.mask for event in watch.read()] == [ATTRIB | ONDIR]


def test_privileges_are_raised_only_to_add(base: str, watch: Watch, other: User) -> None:
    before = linux.effective_capabilities()
    without = before & ~(1 << linux.CAP_SYS_ADMIN)
    with filesystem("tmpfs", base, "one") as one, filesystem("tmpfs", base, "two") as two:
        add(watch, one)
        os.chmod(two, 0o700)
        fd = os.open(two, os.O_PATH)
        linux.set_effective_capabilities(without)
        try:
            served_last = linux.Credentials(ServerId(2001), ServerId(2001), ())
            linux.credentials.assume(served_last)
            watch.add(fd)
            assert linux.effective_capabilities() == without
            other.do(os.chmod, one, 0o777)
            other.do(os.chmod, two, 0o777)
            write(f"{two}/own", b"")
            assert [(event.mask, event.name) for event in watch.read()] == [(ATTRIB | ONDIR, b".")] * 2
        finally:
            linux.act_as_daemon()
            linux.set_effective_capabilities(before)
            os.close(fd)


def watch_it(path: str) -> None:
    with contextlib.closing(Watch()) as watch:
        add(watch, path)


def test_without_the_privilege_there_is_an_error(base: str, user: Callable[..., User]) -> None:
    with filesystem("tmpfs", base) as top:
        assert user(0).error(watch_it, top) == 0
        assert user(2001).error(watch_it, top) == errno.EPERM


# -- the queue -------------------------------------------------------------------------------------


def make_links(top: str, count: int) -> None:
    fd = os.open(top, os.O_RDONLY)
    for number in range(count):
        os.symlink("x", str(number), dir_fd=fd)
    os.close(fd)


def test_what_is_lost_is_told(base: str, watch: Watch, other: User) -> None:
    room = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    if room > 100_000:
        pytest.skip(f"fs.fanotify.max_queued_events is {room}")
    with filesystem("tmpfs", base) as top:
        add(watch, top)
        other.do(make_links, top, room + 100)
        events = []
        while batch := watch.read():
            events += batch
        assert len(events) == room + 1
        assert {event.mask for event in events[:-1]} == {CREATE}
        assert events[-1] == Event(fanotify.FAN_Q_OVERFLOW, 0, b"", b"", b"")
        # And it goes on.
        other.do(os.chmod, top, 0o700)
        assert [event.mask for event in watch.read()] == [ATTRIB | ONDIR]
        # What this process does itself is lost like the rest.
        for number in range(room):
            os.unlink(os.path.join(top, str(number)))
        events = []
        for _ in range(room // 100):
            events += watch.read()
        assert events == [Event(fanotify.FAN_Q_OVERFLOW, 0, b"", b"", b"")]


def test_the_same_again_takes_no_room(base: str, watch: Watch, other: User) -> None:
    with filesystem("tmpfs", base) as top:
        write(f"{top}/file", b"")
        add(watch, top)
        for mode in range(0o600, 0o700):
            other.do(os.chmod, f"{top}/file", mode)
            other.do(write, f"{top}/file", b"x")
        (event,) = watch.read()
        assert event.mask == ATTRIB | MODIFY | CLOSE


def test_another_version_is_refused() -> None:
    with pytest.raises(OSError, match="version"):
        fanotify.parse(bytes(24), 0)


# -- waiting ---------------------------------------------------------------------------------------


def test_changes_arrive_while_waiting(base: str, watch: Watch, other: User) -> None:
    times: list[float] = []

    async def main(top: str) -> None:
        with trio.fail_after(60):
            for number in range(50):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive, f"{number}".encode())
                    await wait_all_tasks_blocked()
                    changed.append(time.monotonic())
                    other.do(os.mkdir, f"{top}/{number}")

    async def receive(name: bytes) -> None:
        (event,) = await watch.changes()
        times.append(time.monotonic() - changed.pop())
        assert (event.mask, event.name) == (CREATE | ONDIR, name)

    changed: list[float] = []
    with filesystem("tmpfs", base) as top:
        add(watch, top)
        trio.run(main, top)
    # On a busy machine, most wait for a processor. If it looked only now and then, each would wait for that.
    assert sorted(times)[4] < 0.02, times


def test_own_changes_wake_nobody_and_cost_little(base: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read = watch.read

    def count() -> list[Event]:
        nonlocal reads
        reads += 1
        return read()

    async def main(top: str) -> tuple[int, float]:
        monkeypatch.setattr(watch, "read", count)
        changes = 0
        began = time.monotonic()
        with trio.move_on_after(0.5) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.changes)
                while True:
                    os.chmod(top, 0o700)
                    changes += 1
                    await trio.sleep(0)
        assert scope.cancelled_caught
        return changes, time.monotonic() - began

    with filesystem("tmpfs", base) as top:
        add(watch, top)
        changes, seconds = trio.run(main, top)
    assert 0 < reads <= seconds / 0.002 + 1
    assert changes > reads


def test_what_is_mounted_while_nobody_waits_is_told(base: str) -> None:
    """Whoever is told goes away for a while to look at the table of mounts."""
    place = os.path.join(base, "place")
    os.mkdir(place)

    async def main() -> None:
        async with contextlib.aclosing(mounts_changed()) as changes:
            await anext(changes)
            for _ in range(3):
                linux.mount("none", place, "tmpfs", 0, "size=1m")
                with trio.fail_after(10):
                    await anext(changes)
                linux.umount(place)
                with trio.fail_after(10):
                    await anext(changes)

    try:
        trio.run(main)
    finally:
        with contextlib.suppress(OSError):
            linux.umount(place)
