"""One daemon for everybody: load, signals, death, and files that change while they are used."""

import contextlib
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.mount.daemon import STILL_IN_USE
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key
from cloakfs.tuning import Tuning
from tests.agents import User, names, read, write
from tests.altered import command_with
from tests.mount import alterations
from tests.mount.conftest import AT_ONCE_OR_NEVER, Mount, daemons_with, is_mounted, mounted, run, told
from tests.mount.loopfs import attached, filesystem
from tests.mount.test_limits import base_dir, drop_caches, memory
from tests.processes import kill
from tests.waiting import wait_until

NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +077 1 9999"
LOAD_SECONDS = float(os.environ.get("CLOAKFS_LOAD_SECONDS", "8"))
CLIENTS = 64


def work(top: str, seconds: float, seed: int) -> tuple[int, dict[str, bytes]]:
    """Everything that a client does, in a directory of its own and in one that all share.

    Every byte is read back before it is overwritten or removed. Returns how many operations, and what is left
    (path below `top` -> content).
    """
    chance = random.Random(seed)
    me = str(os.getuid())
    own, shared = f"of-{seed}", "shared"
    os.mkdir(os.path.join(top, own), 0o750)
    held: dict[str, bytes] = {}
    done = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        directory = chance.choice((own, shared))
        name = f"{directory}/{me}-{seed}-{chance.randrange(15)}"
        path = os.path.join(top, name)
        match chance.randrange(7):
            case 0 | 1:
                assert name not in held or read(path) == held[name]
                held[name] = chance.randbytes(chance.randrange(20000))
                write(path, held[name], mode=0o640)
            case 2:
                if name in held:
                    assert read(path) == held[name]
                else:
                    assert not os.path.exists(path)
            case 3:
                listed = {f"{directory}/{entry}" for entry in os.listdir(os.path.join(top, directory))}
                mine = {entry for entry in listed if entry.startswith(f"{directory}/{me}-{seed}-")}
                assert mine == {entry for entry in held if entry.startswith(f"{directory}/")}
                # Of other users nothing is seen; those of the same uid may be here, too.
                assert all(entry.startswith(f"{directory}/{me}-") for entry in listed)
            case 4 if name in held:
                other = f"{shared if directory == own else own}/{os.path.basename(name)}"
                assert other not in held or read(os.path.join(top, other)) == held[other]
                os.rename(path, os.path.join(top, other))
                held[other] = held.pop(name)
                assert os.stat(os.path.join(top, other)).st_size == len(held[other])
            case 5 if name in held:
                data = chance.randbytes(500)
                write(path, data, os.O_APPEND)
                held[name] += data
            case _ if name in held:
                assert read(path) == held.pop(name)
                os.unlink(path)
        done += 1
    for name, data in held.items():
        assert read(os.path.join(top, name)) == data
    return done, held


@pytest.mark.timeout(LOAD_SECONDS + 120)
def test_64_clients(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", CLOAKED)
    pid = m.pid
    before = memory(pid)
    os.mkdir(m.real("shared"))
    os.chmod(m.real("shared"), 0o777)
    users = [user(2001 + number % 8) for number in range(CLIENTS)]
    for number, client in enumerate(users):
        client.start(work, m.path, LOAD_SECONDS, number)
    operations = []
    left: dict[str, bytes] = {}
    for client in users:
        done, held = client.answer_within(LOAD_SECONDS + 100)
        operations.append(done)
        left |= held
    most = memory(pid, "VmHWM")
    total = sum(operations)
    print(f"{CLIENTS} clients, {LOAD_SECONDS:g} s: {total} operations ({min(operations)} at least), {most:.0f} MiB")
    assert total > 10 * CLIENTS
    assert min(operations) > 0
    assert m.pid == pid
    assert most - before < 64
    # The real tree holds all of it, and nothing else.
    assert {name: read(m.real(name)) for name in left} == left
    found = {f"{directory}/{name}" for directory in os.listdir(m.source) for name in os.listdir(m.real(directory))}
    assert found == set(left)
    # Each user sees its own directories alone: nobody else's has a bit for others.
    assert users[0].do(names, m.path) == sorted(
        ["shared", *(f"of-{number}" for number in range(CLIENTS) if number % 8 == 0)]
    )


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


@pytest.mark.usefixtures("at_once_or_never")
def test_sigterm_during_load(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    users = [user(2001 + number) for number in range(8)]
    for client in users:
        client.do(os.mkdir, m.at(str(client.uid)))
        client.start(write_on_and_on, m.at(str(client.uid)))
    wait_until(lambda: all(len(os.listdir(m.real(str(client.uid)))) > 20 for client in users))
    pid = m.pid
    os.kill(pid, signal.SIGTERM)
    for client in users:
        done, code = client.answer_within(60)
        # Afterwards the empty directory of the mount point is all there is.
        assert code in (errno.ENOENT, errno.ENOTCONN, errno.ECONNABORTED)
        assert done > 20
        check_acknowledged(m.real(str(client.uid)), done)
    assert not is_mounted(m.path)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert STILL_IN_USE not in m.log


@contextlib.contextmanager
def in_foreground(source: str, path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that is a child of the test, which can see how and when it ends; it ends well, silently, at once."""
    said = Path(f"{path}.log")
    command = command_with(tuning=AT_ONCE_OR_NEVER)
    with said.open("wb") as log:
        daemon = subprocess.Popen([*command, "mount", "-f", source, path, "-o", NULL], stderr=log)
    try:
        wait_until(lambda: "serving" in said.read_text())
        yield daemon
    finally:
        daemon.terminate()
        try:
            status = daemon.wait(60)
        finally:
            daemon.kill()
    text = said.read_text()
    assert status == 0, text
    assert "Traceback" not in text
    assert "failed with" not in text
    assert STILL_IN_USE not in text


_held: list[int] = []  # of the User whose process this is


def hold(directory: str, count: int) -> None:
    _held.extend(os.open(directory, os.O_RDONLY | os.O_DIRECTORY) for _ in range(count))


def let_go() -> None:
    while _held:
        os.close(_held.pop())


def test_the_last_user_goes_while_the_daemon_is_busy(tree: str, base: str, user: Callable[..., User]) -> None:
    """Nobody waits for RELEASEDIR: when the last descriptor is closed, the session ends in the middle of many.

    What the daemon is doing just then differs: reading one (three times in four), answering one, or nothing.
    """
    path = base_dir(base)
    someone = user(2001)
    for _ in range(8):
        with in_foreground(tree, path) as daemon:
            someone.do(hold, path, 100)
            daemon.terminate()
            wait_until(lambda: not is_mounted(path))
            someone.do(let_go)
            wait_until(lambda: daemon.poll() is not None)


def use_on_and_on(directory: str, seed: int) -> int:
    """Whatever a client does, until an error, whose number is returned."""
    chance = random.Random(seed)
    path = os.path.join(directory, str(seed))
    try:
        write(path, b"x" * 8192)
        while True:
            match chance.randrange(6):
                case 0:
                    write(path, b"x" * 8192)
                case 1:
                    os.stat(path)
                case 2:
                    os.listdir(directory)
                case 3:
                    read(path)
                case 4:
                    os.close(os.open(path, os.O_RDWR))
                case 5:
                    os.mkdir(f"{path}-directory")
                    os.rmdir(f"{path}-directory")
    except OSError as exc:
        return exc.errno or -1


def test_sigterm_during_mixed_load(tree: str, base: str, user: Callable[..., User]) -> None:
    path = base_dir(base)
    users = [user(2001 + number) for number in range(24)]
    for _ in range(3):
        with in_foreground(tree, path) as daemon:
            for client in users:
                client.start(use_on_and_on, path, client.uid)
            wait_until(lambda: len(os.listdir(tree)) >= len(users))
            time.sleep(0.5)  # of all sorts of requests
            daemon.terminate()
            for client in users:
                # Afterwards the empty directory of the mount point is all there is.
                assert client.answer_within(60) in (errno.ENOENT, errno.EACCES, errno.ENOTCONN, errno.ECONNABORTED)
            wait_until(lambda: daemon.poll() is not None)
        for name in os.listdir(tree):
            (os.rmdir if name.endswith("-directory") else os.unlink)(os.path.join(tree, name))


def sync_on_and_on(path: str, count: int) -> None:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    for _ in range(count):
        os.write(fd, b"x")
        os.fsync(fd)
    os.close(fd)


def test_sigterm_unmounts_where_callers_may_not_go(tree: str, base: str, user: Callable[..., User]) -> None:
    """The threads that the daemon starts for its callers' requests begin as those callers."""
    path = base_dir(base)
    users = [user(2001 + number) for number in range(8)]
    with in_foreground(tree, path) as daemon:
        for client in users:
            client.do(os.chdir, path)
        os.chmod(base, 0o700)
        for client in users:
            client.start(sync_on_and_on, str(client.uid), 50)
        for client in users:
            client.answer_within(60)
        daemon.terminate()
        wait_until(lambda: not is_mounted(path))
        for client in users:
            client.do(os.chdir, "/")
        wait_until(lambda: daemon.poll() is not None)


@pytest.mark.usefixtures("at_once_or_never")
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
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert read(m.real("file")) == b"after"


def test_sigterm_does_not_wait_for_ever(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    with daemons_with(tuning=Tuning(stop_seconds=1)):
        m = mount("-o", NULL)
    someone = user(2001)
    fd = someone.do(os.open, m.at("file"), os.O_CREAT | os.O_RDWR, 0o600)
    pid = m.pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert someone.error(os.write, fd, b"late") in (errno.ENOTCONN, errno.ECONNABORTED)


def test_sigkill(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    users = [user(2001 + number) for number in range(4)]
    for client in users:
        client.do(os.mkdir, m.at(str(client.uid)))
        client.start(write_on_and_on, m.at(str(client.uid)))
    wait_until(lambda: all(len(os.listdir(m.real(str(client.uid)))) > 5 for client in users))
    # Callers get an error some milliseconds before the daemon lets go of what tells that it lives.
    kill(m.without_reaper())
    for client in users:
        done, code = client.answer_within(60)
        assert code in (errno.ENOTCONN, errno.ECONNABORTED)
        check_acknowledged(m.real(str(client.uid)), done)
    # A stale status file must not have umount wait for whoever has the pid now.
    status = os.path.join(RUN_DIR, f"{m.key}.json")
    told = json.loads(Path(status).read_text())
    Path(status).write_text(json.dumps(told | {"pid": os.getpid()}))
    # Never the raw tree: the dead mount stays until somebody takes it away.
    assert users[0].error(os.listdir, m.path) == errno.ENOTCONN
    run("umount", m.path)
    run("mount", m.source, m.path, "-o", NULL)
    assert users[0].do(names, m.path) == sorted(str(client.uid) for client in users)


# -- surprises -------------------------------------------------------------------------------------


def test_any_exception_is_eio_and_logged_once(
    tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    with daemons_with(partial(alterations.fail_at_readlink, LookupError, "a surprise")):
        m = mount("-o", NULL)
    m.expect_errors = True
    someone = user(2001)
    someone.do(os.symlink, "target", m.at("link"))
    assert someone.error(os.readlink, m.at("link")) == errno.EIO
    assert len(re.findall(r"readlink\(.*failed", m.log)) == 1
    assert m.log.count("LookupError: a surprise") == 1
    assert someone.do(names, m.path) == ["link"]


def test_a_mount_point_inside_the_source_is_refused(tree: str) -> None:
    inside = os.path.join(tree, "mnt")
    os.mkdir(inside)
    done = run("mount", tree, inside, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cloakfs: {inside}: inside {tree}, where")
    assert done.stderr.count("\n") == 1


def test_a_mount_point_that_is_inside_by_another_name_is_refused(base: str) -> None:
    """With mounts that propagate, as systemd sets them up, the daemon waited for itself, and `mount` for the daemon."""
    shared, view = os.path.join(base, "shared"), os.path.join(base, "view")
    with attached("tmpfs", shared, "-t", "tmpfs"):
        subprocess.run(["mount", "--make-shared", shared], check=True)
        inside = os.path.join(shared, "real", "mnt")
        os.makedirs(inside)
        with attached(os.path.dirname(inside), view, "--bind"):
            try:
                done = run("mount", view, inside, check=False)
                assert done.returncode == 1
                assert done.stderr.startswith(f"cloakfs: {inside}: also appears as {view}/mnt, inside {view}")
                assert done.stderr.count("\n") == 1
                assert not is_mounted(inside)
                assert not is_mounted(f"{view}/mnt")
            finally:
                shutil.rmtree(os.path.join(STATE_DIR, mount_key(view, inside)), ignore_errors=True)
                if is_mounted(inside):
                    linux.umount(inside, linux.MNT_DETACH)


def test_a_mount_over_its_own_source(tree: str, user: Callable[..., User]) -> None:
    write(os.path.join(tree, "file"), b"x")
    run("mount", tree, tree, "-o", NULL)
    try:
        assert user(2001).do(read, os.path.join(tree, "file")) == b"x"
        user(2001).do(write, os.path.join(tree, "new"), b"y")
    finally:
        run("umount", tree)
    assert read(os.path.join(tree, "new")) == b"y"


def error_of_stat(path: str) -> int:
    try:
        os.stat(path)
    except OSError as exc:
        return exc.errno or -1
    return 0


def test_the_daemon_does_not_look_into_its_own_mount(
    tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """A directory that somebody stands in is moved out of the tree, to beside the mount point."""
    m = mount("-o", CLOAKED)
    someone = user(2001)
    someone.do(os.mkdir, m.at("there"))
    someone.do(os.chdir, m.at("there"))
    os.rename(m.real("there"), os.path.join(base, "out"))
    told()
    someone.start(error_of_stat, ".")
    assert someone.answer_within(60) in (errno.ESTALE, errno.ENOENT)  # or the daemon waits for itself
    shutil.rmtree(os.path.join(base, "out"))


# -- files that change while they are used ---------------------------------------------------------


def test_content_changed_behind_the_mount(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    for number in range(20):
        data = f"content {number}".encode() * (number * 700 + 1)
        write(m.real("file"), data)
        told()
        assert someone.do(read, m.at("file")) == data
        assert someone.do(os.stat, m.at("file")).st_size == len(data)
    write(m.real("file"), bytes(8000))
    told()
    for number in range(200):  # of the same length, many within one tick of the clock
        data = b"%08d" % number * 1000
        write(m.real("file"), data, flags=0)
        assert someone.do(read, m.at("file")) == data
    # Nothing that the kernel looks at tells of this one.
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
        client.start(append, path, f"line of {number}\n".encode(), 500)
    for client, _ in sides:
        client.answer_within(60)
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


_mapped: list[mmap.mmap] = []  # of the User whose process this is


def map_shared(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    _mapped.append(mmap.mmap(fd, 0))
    os.close(fd)


def poke(offset: int, data: bytes) -> None:
    _mapped[-1][offset : offset + len(data)] = data


def peek(offset: int, size: int) -> bytes:
    return _mapped[-1][offset : offset + size]


def unmap() -> None:
    _mapped.pop().close()


def test_two_processes_share_memory(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    one, two = user(2001), user(2002)
    write(m.real("file"), bytes(3 * mmap.PAGESIZE))
    os.chmod(m.real("file"), 0o666)
    for client in (one, two):
        client.do(map_shared, m.at("file"))
    for offset in (0, mmap.PAGESIZE - 2, 3 * mmap.PAGESIZE - 4):
        one.do(poke, offset, b"from")
        assert two.do(peek, offset, 4) == b"from"
        two.do(poke, offset, b"back")
        assert one.do(peek, offset, 4) == b"back"
    # That it is unmapped is enough: nobody has to ask for it to be written.
    for client in (one, two):
        client.do(unmap)
    data = read(m.real("file"))
    assert (data[:4], data[-4:], data.count(b"back")) == (b"back", b"back", 3)


def write_and_sync(path: str, data: bytes, sync: Callable[[int], None]) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(fd, data)
    sync(fd)
    os.close(fd)


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def holds(image: str, data: bytes) -> bool:
    with open(image, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        return content.find(data) >= 0


@pytest.mark.parametrize("sync", [os.fsync, os.fdatasync])
def test_what_was_synced_is_on_the_disk(sync: Callable[[int], None], base: str, user: Callable[..., User]) -> None:
    with filesystem("ext4", base) as source, mounted(source, base_dir(base), "-o", NULL) as m:
        someone = user(2001)
        for _ in range(5):
            data = os.urandom(2 * mmap.PAGESIZE)
            someone.do(write_and_sync, m.at("file"), data, sync)
            assert holds(f"{source}.img", data)


def test_a_synced_directory_is_on_the_disk(base: str, user: Callable[..., User]) -> None:
    with filesystem("ext4", base) as source, mounted(source, base_dir(base), "-o", NULL) as m:
        someone = user(2001)
        for _ in range(5):
            name = f"made-{os.urandom(16).hex()}"
            someone.do(os.mkdir, m.at(name))
            someone.do(sync_directory, m.path)
            assert holds(f"{source}.img", name.encode())  # in the journal


def replace_by_another(path: str) -> None:
    write(f"{path}-other", b"other")
    os.rename(f"{path}-other", path)


def has_no_name(someone: User, fd: int) -> bool:
    return someone.do(os.fstat, fd).st_nlink == 0


@pytest.mark.parametrize("through_the_mount", [True, False])
def test_open_files_outlive_their_names(
    through_the_mount: bool, tree: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    m = mount("-o", CLOAKED)
    someone = user(2001)
    for take_away in (os.unlink, replace_by_another):
        someone.do(write, m.at("file"), b"first")
        fd = someone.do(os.open, m.at("file"), os.O_RDWR)
        someone.do(take_away, (m.at if through_the_mount else m.real)("file"))
        drop_caches()
        if through_the_mount:
            assert someone.do(os.fstat, fd).st_nlink == 0
        else:  # what happens behind the mount is seen within milliseconds
            wait_until(partial(has_no_name, someone, fd))
        assert someone.do(os.pread, fd, 10, 0) == b"first"
        assert someone.do(os.pwrite, fd, b"F", 0) == 1
        someone.do(os.fchmod, fd, 0o600)
        someone.do(os.ftruncate, fd, 3)
        assert someone.do(os.pread, fd, 10, 0) == b"Fir"
        someone.do(os.close, fd)
    assert read(m.real("file")) == b"other"


def test_space_of_a_file_deleted_behind_the_mount_is_freed(base: str, user: Callable[..., User]) -> None:
    with filesystem("ext4", base) as source, mounted(source, base_dir(base), "-o", NULL) as m:
        before = os.statvfs(source).f_bfree
        user(2001).do(write, m.at("big"), b"x" * (8 << 20))
        os.unlink(m.real("big"))
        wait_until(lambda: os.statvfs(source).f_bfree >= before - 16)


def test_sigusr1_tells_where_the_daemon_is(tree: str, mount: Callable[..., Mount]) -> None:
    m = mount("-o", NULL)
    m.expect_errors = True
    os.kill(m.pid, signal.SIGUSR1)
    wait_until(lambda: "most recent call first" in m.log)
    subprocess.run(["ls", m.path], check=True, capture_output=True)
