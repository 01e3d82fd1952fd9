"""One daemon for everybody: load, signals, death, and files that change while they are used."""

import errno
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloakfs.daemon import GRACE_SECONDS, RUN_DIR
from tests.agents import User, names, read, write
from tests.mount import test_limits
from tests.mount.conftest import Mount, is_mounted, mounted, run
from tests.mount.loopfs import filesystem
from tests.mount.test_limits import base_dir, drop_caches, memory

NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +077 1 9999"
LOAD_SECONDS = float(os.environ.get("CLOAKFS_LOAD_SECONDS", "60"))
CLIENTS = 64

wait_until = test_limits.wait_until


def work(directory: str, seconds: float, seed: int) -> int:
    """Everything that a client does, in a directory of its own, every byte verified; how many operations."""
    chance = random.Random(seed)
    os.mkdir(directory, 0o750)
    held: dict[str, bytes] = {}
    done = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = str(chance.randrange(30))
        path = os.path.join(directory, name)
        match chance.randrange(6):
            case 0 | 1:
                data = chance.randbytes(chance.randrange(20000))
                write(path, data)
                held[name] = data
            case 2:
                if name in held:
                    assert read(path) == held[name]
                else:
                    assert not os.path.exists(path)
            case 3:
                assert sorted(os.listdir(directory)) == sorted(held)
            case 4:
                if name in held:
                    os.rename(path, f"{path}-new")
                    os.rename(f"{path}-new", path)
                    assert os.stat(path).st_size == len(held[name])
            case _:
                if held.pop(name, None) is not None:
                    os.unlink(path)
        done += 1
    for name, data in held.items():
        assert read(os.path.join(directory, name)) == data
    return done


@pytest.mark.timeout(LOAD_SECONDS + 120)
def test_64_clients(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", CLOAKED)
    before = memory(m.pid)
    users = [user(2001 + number % 8) for number in range(CLIENTS)]
    for number, client in enumerate(users):
        client._pipe.send((work, (m.at(f"of-{number}"), LOAD_SECONDS, number), {}))
    operations = 0
    for client in users:
        ok, value = client._pipe.recv()
        assert ok, value
        operations += value
    print(f"{CLIENTS} clients, {LOAD_SECONDS:g} s: {operations} operations, {memory(m.pid, 'VmHWM'):.0f} MiB")
    assert operations > 10 * CLIENTS
    assert memory(m.pid, "VmHWM") - before < 64
    # Each user sees its own directories alone: nobody else's has a bit for others.
    assert users[0].do(names, m.path) == sorted(f"of-{number}" for number in range(CLIENTS) if number % 8 == 0)


# -- stopping --------------------------------------------------------------------------------------


def write_on_and_on(directory: str) -> tuple[int, int]:
    """Files of 8 KiB, each written and closed, until an error: (how many were acknowledged, errno)."""
    done = 0
    try:
        while True:
            write(os.path.join(directory, str(done)), bytes([done % 256]) * 8192)
            done += 1
    except OSError as exc:
        return done, exc.errno or -1


def check_acknowledged(directory: str, done: int) -> None:
    for number in range(done):
        assert read(os.path.join(directory, str(number))) == bytes([number % 256]) * 8192, number


@pytest.mark.timeout(120)
def test_sigterm_during_load(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    users = [user(2001 + number) for number in range(8)]
    for client in users:
        client.do(os.mkdir, m.at(str(client.uid)))
        client._pipe.send((write_on_and_on, (m.at(str(client.uid)),), {}))
    wait_until(lambda: all(len(os.listdir(m.real(str(client.uid)))) > 20 for client in users))
    pid = m.pid
    os.kill(pid, signal.SIGTERM)
    for client in users:
        ok, (done, code) = client._pipe.recv()
        assert ok
        # Afterwards the empty directory of the mount point is all there is.
        assert code in (errno.ENOENT, errno.ENOTCONN, errno.ECONNABORTED)
        assert done > 20
        check_acknowledged(m.real(str(client.uid)), done)
    assert not is_mounted(m.path)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), GRACE_SECONDS + 5)
    assert "still in use" not in m.log


@pytest.mark.timeout(120)
def test_sigterm_gives_open_files_time(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    fd = someone.do(os.open, m.at("file"), os.O_CREAT | os.O_RDWR, 0o600)
    pid = m.pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_mounted(m.path))
    assert someone.do(os.write, fd, b"after") == 5
    someone.do(os.fsync, fd)
    someone.do(os.close, fd)
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}")) < GRACE_SECONDS / 2
    assert read(m.real("file")) == b"after"


@pytest.mark.timeout(120)
def test_sigterm_does_not_wait_for_ever(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    fd = someone.do(os.open, m.at("file"), os.O_CREAT | os.O_RDWR, 0o600)
    pid = m.pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), GRACE_SECONDS + 10)
    assert someone.error(os.write, fd, b"late") in (errno.ENOTCONN, errno.ECONNABORTED)


@pytest.mark.timeout(120)
def test_sigkill(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    users = [user(2001 + number) for number in range(4)]
    for client in users:
        client.do(os.mkdir, m.at(str(client.uid)))
        client._pipe.send((write_on_and_on, (m.at(str(client.uid)),), {}))
    wait_until(lambda: all(len(os.listdir(m.real(str(client.uid)))) > 5 for client in users))
    os.kill(m.pid, signal.SIGKILL)
    for client in users:
        assert client._pipe.poll(10), "a client hangs"
        ok, (done, code) = client._pipe.recv()
        assert ok
        assert code in (errno.ENOTCONN, errno.ECONNABORTED)
        check_acknowledged(m.real(str(client.uid)), done)
    # A stale status file must not have umount wait for whoever has the pid now.
    status = os.path.join(RUN_DIR, f"{m.key}.json")
    told = json.loads(Path(status).read_text())
    Path(status).write_text(json.dumps(told | {"pid": os.getpid()}))
    # Never the raw tree: the dead mount stays until somebody takes it away.
    assert users[0].error(os.listdir, m.path) == errno.ENOTCONN
    again = run("mount", m.source, m.path, check=False)
    assert again.returncode == 1
    assert f"cloakfs umount {m.path}" in again.stderr
    assert again.stderr.count("\n") == 1
    run("umount", m.path)
    run("mount", m.source, m.path, "-o", NULL)
    assert users[0].do(names, m.path) == sorted(str(client.uid) for client in users)


# -- surprises -------------------------------------------------------------------------------------

BROKEN = """
import os
from cloakfs.filesystem.attributes import Attributes
from cloakfs.policy import Policy

class Broken(Policy):
    pass

async def readlink(self, inode, ctx):
    raise LookupError("the surprise of inode %d" % inode)

# What a bug in an operation would do: below its boundary, above the system calls.
from cloakfs.filesystem.core import answers
Attributes.readlink = answers(readlink)
"""


def test_any_exception_is_eio_and_logged_once(
    tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    plugin = os.path.join(base, "broken.py")
    Path(plugin).write_text(BROKEN)
    m = mount("--policy", f"{plugin}:Broken", "-o", NULL)
    m.expect_errors = True
    someone = user(2001)
    someone.do(os.symlink, "target", m.at("link"))
    assert someone.error(os.readlink, m.at("link")) == errno.EIO
    assert len(re.findall(r"readlink\(.*failed", m.log)) == 1
    assert m.log.count("LookupError: the surprise of inode") == 1
    assert someone.do(names, m.path) == ["link"]


def test_a_mount_point_inside_the_source_is_refused(tree: str) -> None:
    inside = os.path.join(tree, "mnt")
    os.mkdir(inside)
    done = run("mount", tree, inside, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cloakfs: {inside}: inside of {tree}")
    assert done.stderr.count("\n") == 1


def test_a_mount_over_its_own_source(tree: str, user: Callable[..., User]) -> None:
    write(os.path.join(tree, "file"), b"x")
    run("mount", tree, tree, "-o", NULL)
    try:
        assert user(2001).do(read, os.path.join(tree, "file")) == b"x"
        user(2001).do(write, os.path.join(tree, "new"), b"y")
    finally:
        run("umount", tree)
    assert read(os.path.join(tree, "new")) == b"y"


def test_the_daemon_does_not_look_into_its_own_mount(
    tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """A directory that somebody stands in is moved out of the tree, to beside the mount point."""
    m = mount("-o", CLOAKED)
    someone = user(2001)
    someone.do(os.mkdir, m.at("there"))
    someone.do(os.chdir, m.at("there"))
    os.rename(m.real("there"), os.path.join(base, "out"))
    someone._pipe.send((os.stat, (".",), {}))
    assert someone._pipe.poll(10), "the daemon waits for itself"
    ok, value = someone._pipe.recv()
    assert not ok
    assert value.errno in (errno.ESTALE, errno.ENOENT)
    shutil.rmtree(os.path.join(base, "out"))


# -- files that change while they are used ---------------------------------------------------------


def test_content_changed_behind_the_mount(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    for number in range(20):
        data = f"content {number}".encode() * (number * 700 + 1)
        write(m.real("file"), data)
        assert someone.do(read, m.at("file")) == data
    # Nothing that the kernel looks at tells of this one: it must not keep pages over an open.
    before = os.stat(m.real("file"))
    write(m.real("file"), data[::-1])
    os.utime(m.real("file"), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert someone.do(read, m.at("file")) == data[::-1]


def append(path: str, line: bytes, count: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for _ in range(count):
        os.write(fd, line)
    os.close(fd)


def test_appending_from_both_sides_loses_nothing(
    tree: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    m = mount("-o", NULL)
    write(m.real("log"), b"")
    os.chmod(m.real("log"), 0o666)
    sides = [(user(2001), m.at("log")), (user(2002), m.at("log")), (user(2003), m.real("log"))]
    for number, (client, path) in enumerate(sides):
        client._pipe.send((append, (path, f"line of {number}\n".encode(), 500), {}))
    for client, _ in sides:
        ok, value = client._pipe.recv()
        assert ok, value
    lines = read(m.real("log")).splitlines()
    assert {line: lines.count(line) for line in set(lines)} == {f"line of {n}".encode(): 500 for n in range(3)}


def through_memory(path: str, data: bytes) -> bytes:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 0) as memory_:
        before = bytes(memory_)
        memory_[: len(data)] = data
        memory_.flush()
    os.close(fd)
    return before


def test_mmap(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    someone.do(write, m.at("file"), b"0123456789" * 1000)
    assert someone.do(through_memory, m.at("file"), b"abc") == b"0123456789" * 1000
    assert read(m.real("file"))[:5] == b"abc34"
    assert someone.do(read, m.at("file"))[:5] == b"abc34"


def test_fsync(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    fd = someone.do(os.open, m.at("file"), os.O_CREAT | os.O_RDWR, 0o600)
    someone.do(os.write, fd, b"x")
    someone.do(os.fsync, fd)
    someone.do(os.fdatasync, fd)
    directory = someone.do(os.open, m.path, os.O_RDONLY)
    someone.do(os.fsync, directory)


def replace_by_another(path: str) -> None:
    write(f"{path}-other", b"other")
    os.rename(f"{path}-other", path)


def test_open_files_outlive_their_names(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", CLOAKED)
    someone = user(2001)
    for take_away in (os.unlink, replace_by_another):
        someone.do(write, m.at("file"), b"first")
        fd = someone.do(os.open, m.at("file"), os.O_RDWR)
        take_away(m.real("file"))
        drop_caches()
        assert someone.do(os.fstat, fd).st_nlink == 0
        assert someone.do(os.pread, fd, 10, 0) == b"first"
        assert someone.do(os.pwrite, fd, b"F", 0) == 1
        someone.do(os.fchmod, fd, 0o600)
        someone.do(os.ftruncate, fd, 3)
        assert someone.do(os.pread, fd, 10, 0) == b"Fir"
        someone.do(os.close, fd)
    assert read(m.real("file")) == b"other"


@pytest.mark.timeout(90)
def test_space_of_a_file_deleted_behind_the_mount_is_freed(base: str, user: Callable[..., User]) -> None:
    with filesystem("ext4", base) as source, mounted(source, base_dir(base), "-o", NULL) as m:
        before = os.statvfs(source).f_bfree
        user(2001).do(write, m.at("big"), b"x" * (8 << 20))
        os.unlink(m.real("big"))
        wait_until(lambda: os.statvfs(source).f_bfree >= before - 16, 20)


def test_sigusr1_tells_where_the_daemon_is(tree: str, mount: Callable[..., Mount]) -> None:
    m = mount("-o", NULL)
    m.expect_errors = True
    os.kill(m.pid, signal.SIGUSR1)
    wait_until(lambda: "most recent call first" in m.log)
    subprocess.run(["ls", m.path], check=True, capture_output=True)
