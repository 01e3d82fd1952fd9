"""What docs/commands.md says that programs cannot do on a mount, and what it says that `noxattr` saves."""

import contextlib
import errno
import fcntl
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.agents import User, read
from tests.mount.conftest import Mount
from tests.mount.test_caching import requests
from tests.mount.test_cli import put

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ROOT = ("-o", "no_root_squash")


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


def test_flock_holds_within_one_mount_only(mount: MakeMount) -> None:
    one, other = mount(*ROOT), mount(*ROOT)
    assert not both_get(fcntl.flock, one.at("file"), one.at("file"))
    assert both_get(fcntl.flock, one.at("file"), other.at("file"))
    assert both_get(fcntl.flock, one.at("file"), one.real("file"))


def test_sqlite_locks_hold_within_one_mount_only(mount: MakeMount) -> None:
    one, other = mount(*ROOT), mount(*ROOT)
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
        return (requests(m) - before)["getxattr"]

    def write() -> None:
        fd = os.open(m.at("file"), os.O_WRONLY | os.O_CREAT)
        for _ in range(10):
            os.write(fd, b"x" * 4096)
        os.close(fd)

    def list_all() -> None:
        subprocess.run(["ls", "-l", m.at("many")], stdout=subprocess.DEVNULL, check=True)

    write()
    list_all()  # the kernel asks once what it will not ask again
    assert asked(write) == (0 if noxattr else 10)
    # coreutils 9.1 asks for the ACL of each file, and for one label.
    assert asked(list_all) in (range(1) if noxattr else range(20, 30))
