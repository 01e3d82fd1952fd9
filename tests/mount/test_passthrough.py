"""Files that the kernel reads and writes by itself (FUSE passthrough), beside the same calls on the bare tree."""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyfuse3
import pytest

from tests.agents import User, read, write
from tests.mount.conftest import Mount, mounted, run, told
from tests.mount.loopfs import attached, filesystem
from tests.mount.test_caching import CLOAKED, requests
from tests.mount.test_hung import Far
from tests.mount.test_locks import lock
from tests.mount.test_metrics import parsed
from tests.mount.test_own_directory import taken
from tests.waiting import wait_until, wait_until_settled

OWNER, MEMBER, STRANGER = 3001, 3002, 3003
LARGE = 1 << 20

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

NEEDS_PASSTHROUGH = [
    pytest.mark.skipif(
        not hasattr(pyfuse3, "open_backing"), reason="this pyfuse3 is not patched (scripts/setup --patched-pyfuse3)"
    ),
    pytest.mark.skipif(
        tuple(map(int, os.uname().release.split(".")[:2])) < (6, 9), reason="the kernel has no passthrough (Linux 6.9)"
    ),
]
pytestmark = [pytest.mark.usefixtures("figures_at_once"), *NEEDS_PASSTHROUGH]


@pytest.fixture(params=["ext4", "tmpfs"])
def tree(request: pytest.FixtureRequest, base: str) -> Iterator[str]:
    with filesystem(request.param, base) as top:
        os.chmod(top, 0o755)
        home = Path(top, "home")
        home.mkdir(0o755)
        for name, mode in (("log", 0o644), ("shared", 0o666), ("private", 0o600)):
            (home / name).write_text("begins\n")
            (home / name).chmod(mode)
            os.chown(home / name, OWNER, OWNER)
        os.chown(home, OWNER, OWNER)
        yield top


def write_many(path: str, flags: int, count: int) -> None:
    fd = os.open(path, flags)
    for _ in range(count):
        os.write(fd, b"a line\n")
    os.close(fd)


def gauge(m: Mount, *words: str) -> int:
    """The value of the metric that has these words in its name and labels."""
    values = parsed(run("metrics", m.path).stdout)
    return int(next(value for sample, value in values.items() if all(word in str(sample) for word in words)))


def passing(m: Mount) -> int:
    """How many files the kernel reads and writes by itself now."""
    return gauge(m, "passthrough_files")


def test_writes_take_no_request(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    assert (
        "passes    files opened only for writing, and large ones opened for reading\n" in run("status", m.path).stdout
    )
    found = taken(m, owner, write_many, m.at("home/log"), os.O_WRONLY | os.O_APPEND, 100)
    assert found["open"] == found["release"] == 1
    assert found["write"] == 0
    assert Path(tree, "home/log").read_text() == "begins\n" + 100 * "a line\n"
    found = taken(m, owner, write_many, m.at("home/new"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 100)
    assert found["create"] == found["release"] == 1
    assert found["write"] == 0
    # What is made at one go is left to the daemon: most of it is small.
    assert taken(m, owner, write_many, m.at("home/small"), os.O_WRONLY | os.O_CREAT, 2)["write"] == 2


def read_all(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(partial(os.read, fd, 1 << 16), b""))
    finally:
        os.close(fd)


def test_large_files_are_read_without_a_request(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    for size, passes in ((LARGE - 1, False), (LARGE, True)):
        os.truncate(f"{tree}/home/log", size)
        told(m.path)
        found = taken(m, owner, read_all, m.at("home/log"))
        assert found["open"] == 1
        assert (found["read"] == 0) is passes
    assert owner.do(read_all, m.at("home/log")) == read(f"{tree}/home/log")


def test_a_reader_does_not_decide_for_those_who_write(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Neither for the owner, nor for others who may write."""
    m, owner, member = mount("-o", CLOAKED), user(OWNER), user(MEMBER)
    for name, reader in (("log", member), ("shared", member), ("shared", owner)):
        os.truncate(f"{tree}/home/{name}", LARGE)
        told(m.path)
        fd = reader.do(os.open, m.at(f"home/{name}"), os.O_RDONLY)
        assert passing(m) == 0
        reader.do(os.close, fd)


def test_who_reads_a_large_file_sees_what_is_written_meanwhile(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """By a program that opens it later, by one on the real tree, and by another mount."""
    os.truncate(f"{tree}/home/log", LARGE)
    m, owner, reader = mount("-o", CLOAKED), user(OWNER), user(OWNER)
    fd = reader.do(os.open, m.at("home/log"), os.O_RDONLY)
    assert passing(m) == 1
    other = mount("-o", CLOAKED)
    for number, path in enumerate((m.at("home/log"), f"{tree}/home/log", other.at("home/log"))):
        writer = owner.do(os.open, path, os.O_WRONLY)
        owner.do(os.pwrite, writer, b"%d" % number, LARGE - 1)
        assert reader.do(os.pread, fd, 10, LARGE - 1) == b"%d" % number
        owner.do(os.close, writer)
    assert reader.do(os.fstat, fd).st_atime_ns == os.stat(f"{tree}/home/log").st_atime_ns
    reader.do(os.close, fd)
    wait_until(lambda: passing(m) == 0)
    os.chmod(f"{tree}/home/log", 0o600)
    told(m.path)
    assert user(MEMBER).error(read_all, m.at("home/log")) == errno.ENOENT


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("passthrough=off", "passthrough=off"),
        ("record=/dev/null", "reads are recorded"),
        ("knfsd", "a server exports the mount"),
        ("views=3001:3001 3002:3002", "views share their files"),
    ],
)
def test_where_it_is_off_the_daemon_writes_and_reads(
    options: str, reason: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    m, owner = mount("-o", f"{CLOAKED},{options}"), user(OWNER)
    said = f"no file ({reason})"
    assert f"passes    {said}\n" in run("status", m.path).stdout
    (status,) = json.loads(run("status", "--json", m.path).stdout)
    assert status["passthrough"] == said
    if options == "knfsd":
        return  # it serves nobody but the server: tests/nfs/knfsd/test_served.py
    home = m.at("@3001/home") if "views" in options else m.at("home")
    assert taken(m, owner, write_many, f"{home}/log", os.O_WRONLY | os.O_APPEND, 100)["write"] == 100
    os.truncate(f"{tree}/home/log", LARGE)
    told(m.path)
    assert taken(m, owner, read_all, f"{home}/log")["read"] > 0
    assert passing(m) == 0


def test_several_views_see_what_one_of_them_writes(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """At once, in large files as well, while each has the file open."""
    os.truncate(f"{tree}/home/shared", LARGE)
    m = mount("-o", f"{CLOAKED},views={OWNER}:{OWNER} {MEMBER}:{MEMBER}")
    callers = [(user(uid), m.at(f"@{uid}/home/shared")) for uid in (OWNER, MEMBER)]
    fds = [(caller, caller.do(os.open, path, os.O_RDONLY)) for caller, path in callers]
    for number in range(20):
        writer, path = callers[number % 2]
        expected = b"%02d" % number
        fd = writer.do(os.open, path, os.O_WRONLY | (os.O_APPEND if number % 4 > 1 else 0))
        writer.do(os.pwrite, fd, expected, LARGE)
        writer.do(os.close, fd)
        told(m.path)
        size = os.stat(f"{tree}/home/shared").st_size
        for reader, reading in fds:
            assert reader.do(os.fstat, reading).st_size == size
            assert reader.do(os.pread, reading, 2, size - 2 if number % 4 > 1 else LARGE) == expected
        assert passing(m) == 0
    assert callers[0][0].do(read_all, callers[0][1]) == read(f"{tree}/home/shared")


def test_a_wrong_word_is_refused(tree: str, base: str) -> None:
    os.mkdir(f"{base}/mnt")
    done = run("mount", tree, f"{base}/mnt", "-o", "passthrough=on", check=False)
    assert done.returncode == 2
    assert "passthrough=on" in done.stderr
    assert "expected passthrough=auto or passthrough=off" in done.stderr


def test_root_is_left_to_the_daemon(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Root may use blocks that are reserved for it."""
    m, root = mount("-o", f"{CLOAKED},no_root_squash"), user(0)
    assert taken(m, root, write_many, m.at("home/log"), os.O_WRONLY | os.O_APPEND, 10)["write"] == 10


def test_a_file_that_was_open_briefly_is_left_to_the_daemon(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    for _ in range(50):
        owner.do(write_many, m.at("home/log"), os.O_WRONLY, 1)
    assert taken(m, owner, write_many, m.at("home/log"), os.O_WRONLY, 10)["write"] == 10


def test_a_file_that_grows_much_at_once_passes_again(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    for _ in range(3):
        found = taken(m, owner, write, m.at("home/log"), bytes(LARGE), os.O_APPEND)
        assert (found["open"], found["write"]) == (1, 0)


def test_a_large_file_that_is_read_at_once_passes_again(tree: str, mount: MakeMount, user: MakeUser) -> None:
    os.truncate(f"{tree}/home/log", LARGE)
    m, owner = mount("-o", CLOAKED), user(OWNER)
    for _ in range(3):
        assert taken(m, owner, read_all, m.at("home/log"))["read"] == 0


def test_a_program_that_is_traced_is_seen_writing(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED, "--debug"), user(OWNER)
    assert taken(m, owner, write_many, m.at("home/log"), os.O_WRONLY, 10)["write"] == 10


def test_others_read_what_is_written_at_once(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner, member = mount("-o", CLOAKED), user(OWNER), user(MEMBER)
    path = m.at("home/log")
    assert member.do(read, path) == b"begins\n"
    early = member.do(os.open, path, os.O_RDONLY)  # goes by the kernel's pages, and so does whoever comes later
    fd = owner.do(os.open, path, os.O_WRONLY | os.O_APPEND)
    assert passing(m) == 0
    owner.do(os.write, fd, b"one\n")
    assert member.do(os.pread, early, 100, 0) == b"begins\none\n"
    member.do(os.close, early)
    owner.do(os.close, fd)
    wait_until(lambda: gauge(m, "'cloakfs_descriptors'", "clients") == 0)
    fd = owner.do(os.open, path, os.O_WRONLY | os.O_APPEND)
    assert passing(m) == 1
    for number in range(50):
        owner.do(os.write, fd, b"%d\n" % number)
        assert member.do(read, path).endswith(b"\n%d\n" % number)
        assert member.do(os.stat, path).st_size == os.stat(m.real("home/log")).st_size
    owner.do(os.close, fd)
    wait_until(lambda: passing(m) == 0)
    assert member.do(read, path) == read(m.real("home/log"))


def test_a_second_mount_sees_it_when_it_is_told(tree: str, mount: MakeMount, user: MakeUser) -> None:
    first, second = mount("-o", CLOAKED), mount("-o", CLOAKED)
    owner, member = user(OWNER), user(MEMBER)
    fd = owner.do(os.open, first.at("home/log"), os.O_WRONLY | os.O_APPEND)
    for number in range(10):
        assert member.do(read, second.at("home/log")).count(b"\n") == number + 1
        owner.do(os.write, fd, b"%d\n" % number)
        told()
    owner.do(os.close, fd)


def _modes(user: User, path: str, mode: int, *, first: bool) -> int:
    """The mode after a write by a file that is opened before, or after, the bits are set."""
    fds = [] if first else [user.do(os.open, path, os.O_WRONLY)]
    os.chmod(path, mode)
    fds = fds or [user.do(os.open, path, os.O_WRONLY)]
    user.do(os.write, fds[0], b"x")
    user.do(os.close, fds[0])
    return stat.S_IMODE(os.stat(path).st_mode)


def test_in_a_single_fixed_view(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", f"rw,views={OWNER}:{OWNER}"), user(OWNER)
    assert taken(m, owner, write_many, m.at("home/log"), os.O_WRONLY | os.O_APPEND, 100)["write"] == 0


@pytest.mark.parametrize("first", [True, False], ids=["set before", "set while open"])
@pytest.mark.parametrize("mode", [0o4777, 0o2777, 0o2767, 0o6777])
def test_what_is_written_drops_set_id_bits_as_on_the_bare_tree(
    mode: int, first: bool, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    m, member = mount("-o", f"{CLOAKED},no_root_squash"), user(MEMBER)
    expected = _modes(member, f"{tree}/home/shared", mode, first=first)
    os.chmod(f"{tree}/home/shared", 0o666)
    told()
    assert _modes(member, m.at("home/shared"), mode, first=first) == expected
    assert stat.S_IMODE(os.stat(f"{tree}/home/shared").st_mode) == expected


CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep (capabilities(7))


def test_what_is_written_drops_capabilities(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    fd = owner.do(os.open, m.at("home/log"), os.O_WRONLY)
    os.setxattr(m.real("home/log"), "security.capability", CAPABILITY)
    assert passing(m) == 1
    owner.do(os.write, fd, b"x")
    assert "security.capability" not in os.listxattr(m.real("home/log"))
    owner.do(os.close, fd)


def test_set_gid_without_execution_goes_with_a_write_by_a_member(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Which keeps it on the bare tree, if it is set while the file is open (docs/limits.md)."""
    m, member = mount("-o", CLOAKED), user(OWNER, OWNER, [MEMBER])
    found = []
    for path in (f"{tree}/home/log", m.at("home/shared")):
        os.chown(path, OWNER, MEMBER)
        told()
        fd = member.do(os.open, path, os.O_WRONLY)
        member.do(os.chmod, path, 0o2664)
        member.do(os.write, fd, b"x")
        member.do(os.close, fd)
        found.append(stat.S_IMODE(os.stat(path).st_mode))
    assert found == [0o2664, 0o664]


def test_mapped_files_hold_what_is_written(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner, member = mount("-o", CLOAKED), user(OWNER), user(MEMBER)
    path = m.at("home/log")
    os.truncate(m.real("home/log"), 8192)
    told()
    assert taken(m, owner, _through_a_mapping, path)["read"] > 0  # mappings are left to the daemon
    fd = owner.do(os.open, path, os.O_WRONLY)
    found = taken(m, owner, _through_a_mapping, path)  # but for who comes later
    assert (found["open"], found["read"], found["write"]) == (1, 0, 0)
    owner.do(os.close, fd)
    assert member.do(read, path)[:6] == b"mapped"
    assert read(m.real("home/log"))[4096:4100] == b"more"


def test_what_may_be_mapped_and_closed_is_left_to_the_daemon(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """A mapping outlives the descriptor: others must see what is written through it, as where the daemon writes."""
    m, owner, member = mount("-o", CLOAKED), user(OWNER), user(MEMBER)
    os.truncate(m.real("home/log"), LARGE)
    told()
    fd = owner.do(os.open, m.at("home/log"), os.O_RDWR)
    assert passing(m) == 0
    assert member.do(read_all, m.at("home/log")) == read(m.real("home/log"))
    owner.do(os.close, fd)


def test_who_reads_roots_files_keeps_root_from_no_reserved_blocks(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("ext4", base, "reserving", mkfs=("-m", "20")) as top:
        Path(top, "log").write_bytes(bytes(LARGE))
        m, root, member = mount("-o", "no_root_squash", source=top), user(0), user(MEMBER)
        fresh = os.statvfs(top)
        reader = member.do(os.open, m.at("log"), os.O_RDONLY)
        assert passing(m) == 0
        assert root.error(_fill, m.at("log")) == errno.ENOSPC
        assert os.statvfs(top).f_bfree < (fresh.f_bfree - fresh.f_bavail) / 2
        member.do(os.close, reader)
        run("umount", m.path)


def _through_a_mapping(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 8192) as mapped:
        mapped[:6] = b"mapped"
        mapped[4096:4100] = b"more"
        assert os.pread(fd, 6, 0) == b"mapped"
        os.pwrite(fd, b"written", 100)
        assert mapped[100:107] == b"written"
    os.close(fd)


def test_what_is_hidden_meanwhile_stays_open_and_nothing_else(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """As where the daemon writes: whoever has a file open keeps it, and nobody gets it anew."""
    m, member = mount("-o", CLOAKED), user(MEMBER)
    fd = member.do(os.open, m.at("home/shared"), os.O_WRONLY)
    assert passing(m) == 1
    os.chmod(m.real("home/shared"), 0o600)
    told()
    member.do(os.write, fd, b"still")
    assert member.error(os.stat, m.at("home/shared")) == errno.ENOENT
    assert member.error(os.open, m.at("home/shared"), os.O_WRONLY) == errno.ENOENT
    assert member.error(os.open, f"/proc/self/fd/{fd}", os.O_WRONLY)
    member.do(os.close, fd)
    wait_until(lambda: passing(m) == 0)


def test_opens_of_one_file_never_exclude_each_other(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel fails (EIO) an open that passes through beside one that does not: however they follow each other."""
    m = mount("-o", CLOAKED)
    users = [user(OWNER), user(MEMBER), user(STRANGER)]
    chance = random.Random(35)
    paths = [m.at("home/shared"), m.at("home/second name"), m.at("home/log")]
    os.link(m.real("home/shared"), m.real("home/second name"))
    flags = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_APPEND, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC)
    held: list[tuple[User, int]] = []
    passed = 0
    for step in range(600):
        if held and chance.random() < 0.5:
            who, fd = held.pop(chance.randrange(len(held)))
            who.do(os.close, fd)
            continue
        who, path, how = chance.choice(users), chance.choice(paths), chance.choice(flags)
        try:
            fd = who.do(os.open, path, how)
        except PermissionError:
            assert path.endswith("log")
            assert how != os.O_RDONLY
            continue
        held.append((who, fd))
        if how & os.O_ACCMODE != os.O_RDONLY:
            who.do(os.pwrite, fd, b"%d" % step, 0)
        if step % 20 == 0:
            passed = max(passed, passing(m))
    assert passed > 0
    for who, fd in held:
        who.do(os.close, fd)
    wait_until(lambda: passing(m) == 0)


def test_what_is_removed_or_renamed_goes_on_until_it_is_closed(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    fd = owner.do(os.open, m.at("home/log"), os.O_RDWR)
    owner.do(os.rename, m.at("home/log"), m.at("home/old"))
    owner.do(os.pwrite, fd, b"renamed", 0)
    assert read(m.real("home/old")) == b"renamed"
    owner.do(os.unlink, m.at("home/old"))
    owner.do(os.pwrite, fd, b"removed", 0)
    assert owner.do(os.pread, fd, 7, 0) == b"removed"
    owner.do(write, m.at("home/log"), b"another")
    assert owner.do(read, m.at("home/log")) == b"another"
    owner.do(os.close, fd)


def test_appends_after_it_go_to_the_real_end(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The daemon has not seen how long the file has become."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    path = m.at("home/log")
    fd = owner.do(os.open, path, os.O_WRONLY)
    owner.do(os.pwrite, fd, b"x" * 1000, 0)
    owner.do(os.close, fd)
    for number in range(5):
        owner.do(write_many, path, os.O_WRONLY | os.O_APPEND, 1)
        with open(m.real("home/log"), "ab") as behind:
            behind.write(b"behind\n")
        told()
        lines = read(m.real("home/log")).removeprefix(b"x" * 1000)
        assert lines == (number + 1) * b"a line\nbehind\n"


def _write_and_leave_open(path: str) -> list[int]:
    """Write, and close the file, which a socket has open then; return the descriptors with which that ends.

    That sends RELEASE alone, without FLUSH, which a process would wait for.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"by the kernel\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)
    return [ours.detach(), theirs.detach()]


def test_an_append_goes_to_the_real_end_after_a_late_release(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """What others append after close(2) is in the size that the daemon finds at RELEASE; the kernel does not know."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    log = m.at("home/log")
    sockets = owner.do(_write_and_leave_open, log)
    os.kill(m.pid, signal.SIGSTOP)
    try:
        for fd in sockets:
            owner.do(os.close, fd)
        with open(m.real("home/log"), "ab") as behind:
            behind.write(b"behind\n")
    finally:
        os.kill(m.pid, signal.SIGCONT)
    told()
    assert taken(m, owner, write_many, log, os.O_RDWR | os.O_APPEND, 1)["write"] == 1
    assert read(m.real("home/log")) == b"begins\nby the kernel\nbehind\na line\n"


def test_a_write_beyond_the_limit_of_the_process_fails(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m, owner = mount("-o", CLOAKED), user(OWNER)
    for top in (tree, m.path):
        assert owner.do(_beyond_the_limit, f"{top}/home/log") == errno.EFBIG


def _beyond_the_limit(path: str) -> int:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, b"x", 5000)
    except OSError as exc:
        return exc.errno or -1
    finally:
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return 0


def test_the_daemon_is_killed_while_a_program_writes(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The program goes on with the file, and everything that it has written is there; only the daemon's part fails."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    fd = owner.do(os.open, m.at("home/log"), os.O_WRONLY | os.O_APPEND)
    owner.do(os.write, fd, b"before\n")
    os.kill(m.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.ismount(m.path))
    owner.do(os.write, fd, b"after\n")
    assert owner.error(os.fsync, fd) == errno.ENOTCONN
    owner.error(os.close, fd)
    assert read(f"{tree}/home/log") == b"begins\nbefore\nafter\n"


@pytest.mark.parametrize(("size", "flags", "kind"), [(0, os.O_WRONLY, "flock"), (LARGE, os.O_RDONLY, "fcntl")])
def test_a_daemon_that_is_killed_leaves_no_locks(
    size: int, flags: int, kind: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel goes on with the file for those who have it open, but not with what the daemon had locked."""
    os.truncate(f"{tree}/home/log", size)
    m, owner, other = mount("-o", CLOAKED), user(OWNER), user(OWNER)
    fd, behind = owner.do(os.open, m.at("home/log"), flags), other.do(os.open, m.real("home/log"), os.O_RDWR)
    assert passing(m) == 1
    owner.do(lock, fd, kind, fcntl.F_RDLCK if flags == os.O_RDONLY else fcntl.F_WRLCK)
    assert other.error(lock, behind, kind, fcntl.F_WRLCK) == errno.EAGAIN
    os.kill(m.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.ismount(m.path))
    assert other.error(lock, behind, kind, fcntl.F_WRLCK) == 0
    owner.error(os.close, fd)


@pytest.mark.parametrize("kind", ["overlay", "overlay-nfs"])
def test_a_file_system_that_is_stacked_is_left_to_the_daemon(
    kind: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    with filesystem(kind, base) as top:
        Path(top, "file").touch()
        os.chown(f"{top}/file", OWNER, OWNER)
        m, owner = mount("-o", "no_root_squash", source=top), user(OWNER)
        assert taken(m, owner, write_many, m.at("file"), os.O_WRONLY, 10)["write"] == 10
        run("umount", m.path)


@pytest.mark.parametrize(("word", "most"), [("auto", 1), ("off", 2)])
def test_how_many_overlays_lie_on_a_mount(word: str, most: int, base: str, tree: str, mount: MakeMount) -> None:
    lower = mount("-o", f"{CLOAKED},passthrough={word}").path
    with filesystem("tmpfs", base, "layers") as layers, contextlib.ExitStack() as stack:
        found = 0
        with contextlib.suppress(subprocess.CalledProcessError):
            for number in (1, 2):
                for name in ("upper", "work", "merged"):
                    os.mkdir(f"{layers}/{name}{number}")
                words = f"lowerdir={lower},upperdir={layers}/upper{number},workdir={layers}/work{number}"
                lower = stack.enter_context(
                    attached("overlay", f"{layers}/merged{number}", "-t", "overlay", "-o", words)
                )
                found = number
        assert found == most


def test_a_file_that_may_only_be_appended_to_is_left_to_the_daemon(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel would write wherever the client says, once it has no O_APPEND any more, or a mapping."""
    m, owner, member = mount("-o", CLOAKED), user(OWNER), user(MEMBER)
    with open(f"{tree}/home/log", "a", encoding="ascii") as log:
        log.write("x" * LARGE)
    told(m.path)
    subprocess.run(["chattr", "+a", m.real("home/log")], check=True)
    reader = member.do(os.open, m.at("home/log"), os.O_RDONLY)  # which does not make it pass, either
    try:
        assert owner.error(_overwrite_by_mapping, f"{tree}/home/log") == errno.EACCES
        owner.error(_overwrite_by_mapping, m.at("home/log"))
        owner.error(_overwrite, m.at("home/log"))
        assert read(m.real("home/log")).startswith(b"begins\n")
        member.do(os.close, reader)
    finally:
        subprocess.run(["chattr", "-a", m.real("home/log")], check=True)


def test_what_passes_and_becomes_append_only_cannot_be_opened_for_writing(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """By the kernel, it could be overwritten, and the kernel does not let the daemon write it as well."""
    os.truncate(f"{tree}/home/log", LARGE)
    m, owner, other = mount("-o", CLOAKED), user(OWNER), user(OWNER)
    reader = other.do(os.open, m.at("home/log"), os.O_RDONLY)
    assert passing(m) == 1
    subprocess.run(["chattr", "+a", m.real("home/log")], check=True)
    try:
        assert owner.error(_overwrite, m.at("home/log")) == errno.EIO
        assert read(m.real("home/log")).startswith(b"begins\n")
        other.do(os.close, reader)
        wait_until(lambda: gauge(m, "'cloakfs_descriptors'", "clients") == 0)
        owner.do(write_many, m.at("home/log"), os.O_WRONLY | os.O_APPEND, 1)
    finally:
        subprocess.run(["chattr", "-a", m.real("home/log")], check=True)


def test_who_opened_a_file_to_append_goes_on_appending(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel keeps the flag for the real file that it has opened, whatever becomes of the client's."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    for path, expected in ((f"{tree}/home/log", b"XXXXns\n"), (m.at("home/log"), b"XXXXns\nXXXX")):
        owner.do(_overwrite, path)
        assert read(f"{tree}/home/log") == expected


def _overwrite(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.pwrite(fd, b"XXXX", 0)
    finally:
        os.close(fd)


def _overwrite_by_mapping(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        with mmap.mmap(fd, 4) as mapped:
            mapped[:] = b"XXXX"
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("how", ["opened", "made"])
def test_the_time_of_what_a_mapping_writes_is_seen(
    how: str, mode: int, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """Nothing reports it, and in a home the kernel caches attributes for an hour."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    os.chmod(f"{tree}/home", mode)
    if how == "opened":
        os.truncate(m.real("home/private"), mmap.PAGESIZE)
    told()
    for _ in range(2):
        owner.error(os.stat, m.at("home/private"))
    path = m.at("home/private" if how == "opened" else "home/new")
    flags = os.O_WRONLY | (os.O_APPEND | os.O_CREAT if how == "made" else 0)
    seen, real = owner.do(_times_of_mapped_writes, path, flags, m.real(os.path.relpath(path, m.path)))
    assert seen == real


def _times_of_mapped_writes(path: str, flags: int, real: str) -> tuple[list[int], list[int]]:
    """The mtime after each write by a mapping that has been synchronized before, by this path and on the real tree."""
    first = os.open(path, flags, 0o600)
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, mmap.PAGESIZE)
    seen, there = [], []
    with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
        for number in range(3):
            mapped[0] = number
            wait_until_settled(real)
            seen.append(os.stat(path).st_mtime_ns)
            there.append(os.stat(real).st_mtime_ns)
            mapped.flush()
    os.close(fd)
    os.close(first)
    return seen, there


def test_blocks_that_are_reserved_for_root_stay_reserved(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("ext4", base, "reserving", mkfs=("-m", "50")) as top:
        Path(top, "file").touch()
        os.chown(f"{top}/file", OWNER, OWNER)
        m, owner = mount("-o", CLOAKED, source=top), user(OWNER)
        fresh = os.statvfs(top)
        before = requests(m)
        assert owner.error(_fill, m.at("file")) == errno.ENOSPC
        assert (requests(m) - before)["write"] == 0
        assert os.statvfs(top).f_bfree >= fresh.f_bfree - fresh.f_bavail
        run("umount", m.path)


def test_a_quota_holds(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("btrfs", base, "limited") as top:
        subprocess.run(["btrfs", "quota", "enable", top], check=True)
        subprocess.run(["btrfs", "qgroup", "limit", "4M", top], check=True, capture_output=True)
        Path(top, "file").touch()
        os.chown(f"{top}/file", OWNER, OWNER)
        m, owner = mount("-o", CLOAKED, source=top), user(OWNER)
        assert owner.error(_fill, m.at("file")) == errno.EDQUOT
        assert os.stat(m.real("file")).st_size <= 4 << 20
        run("umount", m.path)


def _fill(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        while True:
            os.write(fd, bytes(1 << 20))
            os.fsync(fd)
    finally:
        os.close(fd)


def write_mapped(fd: int, source: str) -> None:
    """Write what is mapped of another file, MiB by MiB; the kernel reads that while it has the file locked."""
    with open(source, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        for at in range(0, len(content), LARGE):
            os.pwrite(fd, memoryview(content)[at : at + LARGE], 0)


def empty(path: str, times: int) -> None:
    for _ in range(times):
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


_kept: list[object] = []  # by a user


def _begin(call: Callable[[int, list[memoryview]], int], path: str, flags: int, page: str) -> None:
    """Begin to write, or to read, by a mapping of a file that cannot be read: it ends when that can be."""
    fd, file = os.open(path, flags), os.open(page, os.O_RDWR)
    content = mmap.mmap(file, mmap.PAGESIZE)
    _kept.append(content)
    threading.Thread(target=call, args=(fd, [memoryview(content)]), daemon=True).start()


def _rename_onto(path: str) -> None:
    os.rename(f"{os.path.dirname(path)}/private", path)


def _link(path: str) -> None:
    os.link(path, f"{path}.linked")


def _rename(path: str) -> None:
    os.rename(path, f"{path}.renamed")


def _empty(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def _work(directory: str) -> None:
    os.listdir(directory)
    path = f"{directory}/new"
    write(path, b"x", os.O_CREAT)
    os.rename(path, f"{path}er")
    assert read(f"{path}er") == b"x"
    os.unlink(f"{path}er")


@contextlib.contextmanager
def _client_that_does_not_end(
    m: Mount, base: str, user: MakeUser, call: Callable[[int, list[memoryview]], int], flags: int
) -> Iterator[Path]:
    """A client reads or writes `home/log`, which passes, until there is the file that this returns."""
    client, far, flag = user(OWNER), Far(f"{base}/far", base), Path(base, "flag")
    try:
        client.do(_begin, call, m.at("home/log"), flags, f"{far.path}/10000")
        assert passing(m) == 1
        wait_until(Path(base, "flag.asked").exists)
        yield flag
    finally:
        flag.touch()
        client.close()
        far.close()


def _others_work_on(m: Mount, user: MakeUser, change: Callable[[str], None], flag: Path) -> None:
    """Who changes the file, or its name, waits, and so does who then uses its directory; nobody else."""
    changer, looker, other = user(OWNER), user(MEMBER), user(STRANGER)
    other.do(_work, m.at("team"))
    changer.start(change, m.at("home/log"))
    assert not changer.has_answered(0.3)
    looker.start(os.path.exists, m.at("home/absent"))
    looker.has_answered(0.3)
    for _ in range(10):
        other.do_within(5, _work, m.at("team"))
    flag.touch()
    changer.answer_within(30)
    assert looker.answer_within(30) is False
    other.do_within(5, _work, m.at("team"))


CHANGES = [os.unlink, _link, _rename, _rename_onto, _empty]


@pytest.mark.parametrize("change", CHANGES)
def test_others_do_not_wait_for_a_write_that_does_not_end(
    change: Callable[[str], None], base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    make_team(tree)
    m = mount("-o", CLOAKED)
    with _client_that_does_not_end(m, base, user, os.writev, os.O_WRONLY) as flag:
        _others_work_on(m, user, change, flag)


@pytest.mark.parametrize("change", CHANGES)
def test_others_do_not_wait_for_a_read_that_does_not_end(
    change: Callable[[str], None], base: str, mount: MakeMount, user: MakeUser
) -> None:
    """On xfs, where the kernel holds the lock of the real file while it copies what is read."""
    with filesystem("xfs", base) as tree:
        os.chmod(tree, 0o755)
        make_team(tree)
        os.mkdir(f"{tree}/home")
        for name in ("log", "private"):
            Path(tree, "home", name).write_bytes(bytes(LARGE))
            os.chown(f"{tree}/home/{name}", OWNER, OWNER)
        os.chown(f"{tree}/home", OWNER, OWNER)
        m = mount("-o", CLOAKED, source=tree)
        try:
            with _client_that_does_not_end(m, base, user, os.readv, os.O_RDONLY) as flag:
                _others_work_on(m, user, change, flag)
        finally:
            run("umount", m.path)


def make_team(tree: str) -> None:
    os.mkdir(f"{tree}/team")
    os.chmod(f"{tree}/team", 0o777)


def test_no_file_passes_that_the_tree_shows_twice(tree: str, mount: MakeMount, user: MakeUser) -> None:
    os.mkdir(f"{tree}/again")
    subprocess.run(["mount", "--bind", f"{tree}/home", f"{tree}/again"], check=True)
    try:
        m, owner = mount("-o", CLOAKED), user(OWNER)
        fd = owner.do(os.open, m.at("home/log"), os.O_WRONLY)
        assert passing(m) == 0
        owner.do(os.close, fd)
        run("umount", m.path)
    finally:
        subprocess.run(["umount", "--lazy", f"{tree}/again"], check=True)


def _says_that_another_shows_it(m: Mount) -> bool:
    return "another mount shows the same file system" in run("status", m.path).stdout


def test_no_file_passes_while_another_mount_shows_the_file_system(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """Its daemon would wait for what the kernel writes by itself, whoever keeps it from ending."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    second = Path(base, "second")
    second.mkdir()
    with mounted(f"{tree}/home", str(second)) as other:
        for it in (m, other):
            wait_until(partial(_says_that_another_shows_it, it), 30)
        for path in (m.at("home/log"), other.at("log")):
            fd = owner.do(os.open, path, os.O_WRONLY)
            assert passing(m) == passing(other) == 0
            owner.do(os.close, fd)
    fd = owner.do(os.open, m.at("home/log"), os.O_WRONLY)
    assert passing(m) == 1
    owner.do(os.close, fd)


def test_a_write_that_needs_the_daemon(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """It comes from a mapping of another file of the mount; who empties the file waits for it, and nobody else."""
    with open(f"{tree}/home/shared", "wb") as file:  # others may write to it, so that it does not pass
        file.truncate(50 * LARGE)
    m = mount("-o", CLOAKED)
    writer, changer, other = user(OWNER), user(OWNER), user(MEMBER)
    fd = writer.do(os.open, m.at("home/log"), os.O_WRONLY)
    assert passing(m) == 1
    writer.start(write_mapped, fd, m.at("home/shared"))
    changer.start(empty, m.at("home/log"), 100)
    for _ in range(20):
        other.do_within(30, os.listdir, m.at("home"))
    changer.answer_within(30)
    writer.answer_within(30)
    writer.do(os.close, fd)
