"""What docs/commands.md says that programs cannot do on a mount, and what it says that `noxattr` saves."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import sqlite3
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents import User, read
from tests.mount.conftest import Mount, run, told
from tests.mount.loopfs import filesystem
from tests.mount.test_caching import requests
from tests.mount.test_cli import put
from tests.mount.test_patched_pyfuse3 import HAS_PATCH

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ROOT = ("-o", "no_root_squash")
LOCAL_LOCKS = ("-o", "no_root_squash,local_locks")

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, RENAME_WHITEOUT, FAN_REPORT_FID, FAN_MARK_ADD, FAN_MARK_FILESYSTEM = -100, 4, 0x200, 1, 0x100
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200


def errno_of(result: int) -> int:
    """The error of a call of the C library, 0 if there was none."""
    return ctypes.get_errno() if result < 0 else 0


def names_of(events: bytes) -> list[str]:
    """The names in what inotify(7) reported."""
    names = []
    while events:
        length = struct.unpack_from("iIII", events)[3]
        names.append(os.fsdecode(events[16 : 16 + length].rstrip(b"\0")))
        events = events[16 + length :]
    return names


def both_get(lock: Callable[[int, int], object], first: str, second: str) -> bool:
    """Do two descriptors of one file both get an exclusive lock?"""
    one, other = os.open(first, os.O_RDWR | os.O_CREAT), os.open(second, os.O_RDWR | os.O_CREAT)
    try:
        lock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    finally:
        os.close(one)
        os.close(other)


def test_flock_with_local_locks_holds_within_one_mount_only(mount: MakeMount) -> None:
    one, other = mount(*LOCAL_LOCKS), mount(*LOCAL_LOCKS)
    assert not both_get(fcntl.flock, one.at("file"), one.at("file"))
    assert both_get(fcntl.flock, one.at("file"), other.at("file"))
    assert both_get(fcntl.flock, one.at("file"), one.real("file"))


def test_sqlite_with_local_locks_is_locked_within_one_mount_only(mount: MakeMount) -> None:
    one, other = mount(*LOCAL_LOCKS), mount(*LOCAL_LOCKS)
    writer = sqlite3.connect(one.at("data"), isolation_level=None)
    writer.execute("CREATE TABLE t (x)")

    def writes_beside_it(path: str) -> bool:
        # In a process of its own, because the locks of fcntl(2) belong to processes.
        writer.execute("BEGIN IMMEDIATE")
        code = (
            f"import sqlite3; sqlite3.connect({path!r}, timeout=0, isolation_level=None)"
            ".executescript('BEGIN IMMEDIATE; ROLLBACK')"
        )
        done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
        writer.execute("ROLLBACK")
        assert done.returncode == 0 or "database is locked" in done.stderr, done.stderr
        return done.returncode == 0

    try:
        assert not writes_beside_it(one.at("data"))
        assert writes_beside_it(other.at("data"))
        assert writes_beside_it(one.real("data"))
    finally:
        writer.close()


@contextlib.contextmanager
def attached(kind: str, path: str, options: str = "defaults") -> Iterator[subprocess.CompletedProcess[str]]:
    """Mount a file system of the kernel for the duration of a with block, if it lets itself be mounted."""
    os.mkdir(path)
    done = subprocess.run(
        ["mount", "-t", kind, "none", "-o", options, path], capture_output=True, text=True, check=False
    )
    yield done
    if done.returncode == 0:
        subprocess.run(["umount", path], check=True)


def test_a_mount_is_no_upper_directory(base: str, mount: MakeMount) -> None:
    m = mount(*ROOT)
    for path in m.at("upper"), m.at("work"), f"{base}/lower":
        os.mkdir(path)
    options = f"lowerdir={base}/lower,upperdir={m.at('upper')},workdir={m.at('work')}"
    with attached("overlay", f"{base}/overlay", options) as done:
        assert done.returncode == 32
        assert "wrong fs type, bad option" in done.stderr  # mount(8) for EINVAL


def test_over_a_lower_directory_everybody_sees_what_root_sees(base: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "cloak_list=uid +007 3001")
    put(m.real("secret"), 3001, 3001, 0o600)
    owner = user(3001)
    assert owner.do(read, m.at("secret")) == b"text"
    with attached("tmpfs", f"{base}/tmp"):
        for name in "upper", "work":
            os.mkdir(f"{base}/tmp/{name}")
        options = f"lowerdir={m.path},upperdir={base}/tmp/upper,workdir={base}/tmp/work"
        with attached("overlay", f"{base}/overlay", options) as done:
            assert done.returncode == 0, done.stderr
            assert owner.error(read, f"{base}/overlay/secret") == errno.ENOENT


@pytest.mark.usefixtures("figures_at_once")
@pytest.mark.parametrize("noxattr", [False, True])
def test_what_noxattr_saves(mount: MakeMount, tree: str, *, noxattr: bool) -> None:
    os.mkdir(os.path.join(tree, "many"))
    for number in range(20):
        with open(os.path.join(tree, "many", str(number)), "w", encoding="utf-8"):
            pass
    m = mount("-o", "no_root_squash,noxattr" if noxattr else "no_root_squash")

    def asked(work: Callable[[], object]) -> int:
        before = requests(m)
        work()
        asked = requests(m) - before
        return asked["getxattr"] + asked["listxattr"]

    def write() -> None:
        fd = os.open(m.at("file"), os.O_WRONLY | os.O_CREAT)
        for _ in range(10):
            os.write(fd, b"x" * 4096)
        os.close(fd)

    def list_all() -> None:
        subprocess.run(["ls", "-l", m.at("many")], stdout=subprocess.DEVNULL, check=True)

    write()
    list_all()  # the kernel asks once what it will not ask again
    # The patched pyfuse3 spares the request for each write: there is at most one after each change of the attributes.
    assert asked(write) in (range(1) if noxattr else range(2) if HAS_PATCH else range(10, 11))
    # coreutils 9.1 asks for the ACL of each file, and for one label; 9.7 lists what each file has.
    assert asked(list_all) in (range(1) if noxattr else range(20, 30))


def test_inotify_reports_what_is_done_through_the_mount(mount: MakeMount) -> None:
    m = mount(*ROOT)
    queue = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(queue, os.fsencode(m.path), IN_CREATE) > 0
        put(m.real("behind"), 0, 0)
        told()
        assert os.listdir(m.path) == ["behind"]
        put(m.at("through"), 0, 0)
        assert names_of(os.read(queue, 4096)) == ["through"]
    finally:
        os.close(queue)


def test_what_watches_the_real_tree_meets_another_name(mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "cloak_list=uid +077 0 -1")
    os.chmod(m.source, 0o1777)
    put(m.real("file"), 3001, 3001)
    queue = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(queue, os.fsencode(m.source), IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE) > 0
        user(3001).do(os.unlink, m.at("file"))
        old, new, removed = names_of(os.read(queue, 4096))
        assert old == "file"
        assert new == removed
        assert re.fullmatch(r"\.cloakfs-[0-9a-f]{32}", new)
    finally:
        os.close(queue)


def test_sockets_and_fifos_connect_within_one_mount(mount: MakeMount) -> None:
    m = mount(*ROOT)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(m.real("socket"))
        server.listen()
        told()
        with pytest.raises(ConnectionRefusedError):
            client.connect(m.at("socket"))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(m.at("own"))
        server.listen()
        client.connect(m.at("own"))
    os.mkfifo(m.at("fifo"))
    reader = os.open(m.real("fifo"), os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="No such device or address"):  # ENXIO: nobody reads
            os.open(m.at("fifo"), os.O_WRONLY | os.O_NONBLOCK)
    finally:
        os.close(reader)


def test_what_the_kernel_refuses(mount: MakeMount) -> None:
    m = mount(*ROOT)
    put(m.at("a"), 0, 0)
    one, other = os.fsencode(m.at("a")), os.fsencode(m.at("b"))
    assert errno_of(libc.renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_WHITEOUT)) == errno.EINVAL
    group = libc.fanotify_init(FAN_REPORT_FID, 0)
    assert group >= 0
    try:
        how, what = FAN_MARK_ADD | FAN_MARK_FILESYSTEM, ctypes.c_uint64(IN_CREATE)
        assert errno_of(libc.fanotify_mark(group, how, what, AT_FDCWD, os.fsencode(m.path))) == errno.ENODEV
    finally:
        os.close(group)
    with open(m.at("swap"), "wb") as file:
        file.write(bytes(1 << 20))
    os.chmod(m.at("swap"), 0o600)
    subprocess.run(["mkswap", "-q", m.at("swap")], check=True)
    done = subprocess.run(["swapon", m.at("swap")], capture_output=True, text=True, check=False)
    assert "swapon failed: Invalid argument" in done.stderr


def test_syncfs_writes_nothing_and_fsync_does(base: str, mount: MakeMount) -> None:
    """The kernel passes syncfs(2) on to virtiofs alone; docs/commands.md says what to do instead."""
    with filesystem("ext4", base) as disk:
        subprocess.run(["mount", "-o", "remount,commit=300", disk], check=True)
        m = mount(*ROOT, source=disk)
        device = os.stat(disk).st_dev
        figures = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")

        def written(flush: Callable[[], object]) -> float:
            """MiB that a flush writes to the disk."""
            before = int(figures.read_text().split()[6])
            flush()
            return (int(figures.read_text().split()[6]) - before) / 2048

        def put_8_mib(name: str, flags: int = 0) -> int:
            fd = os.open(m.at(name), os.O_CREAT | os.O_RDWR | flags)
            os.write(fd, os.urandom(8 << 20))
            return fd

        def sync(path: str) -> None:
            subprocess.run(["sync", "-f", path], check=True)

        sync(disk)
        fd = put_8_mib("one")
        assert written(lambda: sync(m.at("one"))) < 1
        assert written(lambda: sync(m.real("one"))) >= 8
        os.pwrite(fd, os.urandom(8 << 20), 0)
        assert written(lambda: os.fsync(fd)) >= 8
        os.pwrite(fd, os.urandom(8 << 20), 0)
        assert written(lambda: os.fdatasync(fd)) >= 8
        with mmap.mmap(fd, 8 << 20) as mapped:
            mapped[:] = os.urandom(8 << 20)
            assert written(mapped.flush) >= 8
        os.close(fd)
        assert written(lambda: os.close(put_8_mib("two", os.O_DSYNC))) >= 8
        sync(disk)
        os.mkdir(m.at("directory"))
        top = os.open(m.path, os.O_RDONLY)
        assert written(lambda: os.fsync(top)) > 0
        os.close(top)
        run("umount", m.path)


def test_a_mount_looks_like_one_file_system(mount: MakeMount) -> None:
    m = mount(*ROOT)
    with attached("tmpfs", m.real("disk"), "size=1m"):
        put(m.real("disk/file"), 0, 0)
        told()
        assert os.stat(m.real("disk")).st_dev != os.stat(m.source).st_dev
        assert os.stat(m.at("disk/file")).st_dev == os.stat(m.path).st_dev
        assert os.statvfs(m.at("disk")).f_blocks == os.statvfs(m.path).f_blocks != os.statvfs(m.real("disk")).f_blocks
        run("umount", m.path)  # it pins what is mounted in its tree


def test_a_directory_has_one_link_where_something_may_be_hidden(mount: MakeMount) -> None:
    hiding, plain = mount("-o", "cloak_list=uid +077 4000"), mount(*ROOT)
    os.makedirs(hiding.real("one/two"))
    told()
    assert os.stat(hiding.at("one")).st_nlink == 1
    assert os.stat(plain.at("one")).st_nlink == os.stat(plain.real("one")).st_nlink
