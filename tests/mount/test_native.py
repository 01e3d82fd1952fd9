"""Why a directory of a view is never replaced by an idmapped clone of the real one (docs/decisions/native.md).

These are the attacks that decided it. Where one of them fails on a new kernel, the decision is to be looked at again.
"""

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.linux.libc import AT_EMPTY_PATH, NR, check, libc, syscall
from tests.agents import User, become, names, read, write
from tests.mount.conftest import Mount, told
from tests.mount.loopfs import attached, filesystem
from tests.mount.test_documented_limits import IN_CREATE, IN_MOVED_TO, names_of
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ALICE, BOB = 4001, 4002  # users of this machine
FIRST, REAL_ALICE, REAL_BOB = 20000, 24001, 24002  # on disk
VIEW = ("--view", f"{REAL_ALICE}:{REAL_ALICE}")

_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1
_NR_MOVE_MOUNT = ctypes.c_long(429)
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 2, 4, 0x100000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE, _MS_SHARED = 0x4000, 1 << 18, 1 << 20
_PR_SET_DUMPABLE = 4


def options(first: int = FIRST) -> str:
    """Users of this machine are those from `first` on; each sees what is its own, and nothing of the others."""
    return f"range_map=uid 0 9999 map {first} gid 0 9999 map {first},cloak_list=uid +000 20000 49999"


def leave(namespaces: int) -> None:
    check(libc.unshare(namespaces))


@contextlib.contextmanager
def clone_at(source: str, target: str, count: int = 10000, propagation: int = 0) -> Iterator[None]:
    """Have an idmapped clone of `source` at `target`: the trial of a home at the speed of the disk."""
    with User(0) as inside:
        inside.do(leave, _CLONE_NEWUSER)
        first = FIRST if count > 1 else REAL_ALICE
        for kind in "uid_map", "gid_map":
            Path(f"/proc/{inside.pid}/{kind}").write_text(f"{first} {first - FIRST} {count}")
        mapped = os.open(f"/proc/{inside.pid}/ns/user", os.O_RDONLY)
    how = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    fd = check(syscall(NR["open_tree"], ctypes.c_long(_AT_FDCWD), os.fsencode(source), how))
    try:
        flags = _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
        attributes = struct.pack("QQQQ", flags, 0, propagation, mapped)
        size, empty = ctypes.c_size_t(len(attributes)), ctypes.c_uint(AT_EMPTY_PATH)
        try:
            check(syscall(NR["mount_setattr"], ctypes.c_long(fd), b"", empty, attributes, size))
        except OSError as exc:
            pytest.skip(f"this kernel maps no ids for mounts of this file system: {exc}")
        where = ctypes.c_long(_AT_FDCWD), os.fsencode(target), ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
        check(syscall(_NR_MOVE_MOUNT, ctypes.c_long(fd), b"", *where))
    finally:
        os.close(fd)
        os.close(mapped)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            withdraw(target)


def withdraw(target: str) -> None:
    linux.umount(target, linux.MNT_DETACH)


def is_cloned(target: str) -> bool:
    """Whether something is mounted there; unlike a lookup, to ask changes nothing."""
    return f" {target} " in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


@pytest.fixture
def disk(base: str) -> Iterator[str]:
    """A file system with a home for each, which others may enter, and a file of bob's in his."""
    with filesystem("ext4", base) as path:
        os.chmod(path, 0o755)
        for home, uid in ("alice", REAL_ALICE), ("alice/work", REAL_ALICE), ("bob", REAL_BOB):
            os.mkdir(os.path.join(path, home), 0o755)
            os.chown(os.path.join(path, home), uid, uid)
        for name in "letter", "diary":
            write(os.path.join(path, "bob", name), b"of bob")
            os.chown(os.path.join(path, "bob", name), REAL_BOB, REAL_BOB)
        os.chmod(os.path.join(path, "bob", "diary"), 0o600)
        yield path


def bring(m: Mount, name: str) -> None:
    """Behind the mount, move a file of bob's into alice's home."""
    os.rename(m.real("bob", name), m.real("alice/work", name))
    told()


_KEPT: dict[str, int] = {}  # descriptors, in the process of a user


def watch(path: str) -> None:
    _KEPT["queue"] = check(libc.inotify_init1(os.O_NONBLOCK))
    check(libc.inotify_add_watch(_KEPT["queue"], os.fsencode(path), IN_CREATE | IN_MOVED_TO))


def watched() -> list[str]:
    return names_of(os.read(_KEPT["queue"], 4096))


def send(path: str, channel: str) -> None:
    """Send a descriptor of a directory, and keep none."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
            ours.connect(channel)
            socket.send_fds(ours, [b"x"], [fd])
    finally:
        os.close(fd)


@contextlib.contextmanager
def channel(base: str, owner: int) -> Iterator[tuple[str, socket.socket]]:
    """A socket that this user may send descriptors to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        path = os.path.join(base, "channel")
        ours.bind(path)
        os.chown(path, owner, owner)
        yield path, ours


def received(ours: socket.socket) -> int:
    return socket.recv_fds(ours, 1, 1)[1][0]


def test_who_stands_in_it_goes_on_seeing_what_the_view_hides(disk: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount(*VIEW, "-o", options(), source=disk)
    served, native = user(ALICE), user(ALICE)
    served.do(os.chdir, m.at("alice/work"))
    with clone_at(m.real("alice"), m.at("alice")):
        native.do(os.chdir, m.at("alice/work"))
        withdraw(m.at("alice"))
    for name in "letter", "diary":
        bring(m, name)
    assert served.do(names, ".") == []
    assert served.error(read, "letter") == errno.ENOENT
    assert native.do(names, ".") == ["diary", "letter"]
    assert native.do(os.stat, "diary").st_uid == BOB
    assert native.do(read, "letter") == b"of bob"
    assert native.error(read, "diary") == errno.EACCES  # permissions hold


def test_a_reload_takes_nothing_from_who_stands_in_it(base: str, disk: str, mount: MakeMount, user: MakeUser) -> None:
    """The uid has another counterpart from then on, so that it is nobody in this view."""
    entries = Path(base, "entries")
    entries.write_text(f"{disk} host(rw,{options()})\n")
    m = mount(*VIEW, "--exports", str(entries), "--client", "host", source=disk)
    served, native = user(ALICE), user(ALICE)
    served.do(os.chdir, m.at("alice"))
    with clone_at(m.real("alice"), m.at("alice")):
        native.do(os.chdir, m.at("alice"))
        entries.write_text(f"{disk} host(rw,{options(30000)})\n")
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda: "reloaded" in m.log)
        with contextlib.suppress(OSError):  # a refused caller may have detached it already
            withdraw(m.at("alice"))
    assert served.error(write, "after", b"") == errno.EACCES
    native.do(write, "after", b"")
    assert os.stat(m.real("alice/after")).st_uid == REAL_ALICE
    for caller in served, native:
        caller.close()


def copy_mounts() -> None:
    """In a process of a user, without privileges: get a mount namespace of its own, cut off from the first one."""
    uid, gid = os.getuid(), os.getgid()
    check(libc.prctl(_PR_SET_DUMPABLE, 1))
    leave(_CLONE_NEWUSER | _CLONE_NEWNS)
    for kind, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
        Path("/proc/self", kind).write_text(text)
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))


@pytest.mark.parametrize("propagation", [_MS_PRIVATE, _MS_SHARED], ids=["private", "shared"])
def test_a_copy_in_a_namespace_of_a_user_stays(disk: str, mount: MakeMount, user: MakeUser, propagation: int) -> None:
    m = mount(*VIEW, "-o", options(), source=disk)
    check(libc.mount(b"none", os.fsencode(m.path), None, ctypes.c_ulong(propagation), None))
    alice = user(ALICE)
    with clone_at(m.real("alice"), m.at("alice"), propagation=propagation):
        try:
            alice.do(copy_mounts)
        except OSError as exc:
            pytest.skip(f"users may make no namespaces here: {exc}")
        withdraw(m.at("alice"))
        assert not is_cloned(m.at("alice"))
    bring(m, "diary")
    assert alice.do(names, m.at("alice/work")) == ["diary"]
    alice.close()  # it has the mount of cloakfs as well


def test_no_list_of_processes_shows_who_has_it(base: str, disk: str, mount: MakeMount, user: MakeUser) -> None:
    """A watch needs no descriptor in it, and a descriptor that is being sent belongs to no process."""
    m = mount(*VIEW, "-o", options(), source=disk)
    alice = user(ALICE)
    with channel(base, ALICE) as (path, ours):
        with clone_at(m.real("alice"), m.at("alice")):
            alice.do(watch, m.at("alice/work"))
            alice.do(send, m.at("alice/work"), path)
            withdraw(m.at("alice"))
        device = os.stat(disk).st_dev
        links = [link for link in Path(f"/proc/{alice.pid}/fd").iterdir() if link.exists()]
        assert device not in [link.stat().st_dev for link in links]
        bring(m, "diary")
        assert alice.do(watched) == ["diary"]
        fd = received(ours)
        assert names(fd) == ["diary"]
        os.close(fd)


def test_a_stranger_can_use_what_is_handed_over(disk: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount(*VIEW, "-o", options(), source=disk)
    os.mkdir(m.real("alice/box"))
    os.chown(m.real("alice/box"), REAL_ALICE, REAL_ALICE)
    os.chmod(m.real("alice/box"), 0o777)
    served, native, alone = user(0), user(0), user(0)
    served.do(os.chdir, m.at("alice"))
    with clone_at(m.real("alice"), m.at("alice")):
        native.do(os.chdir, m.at("alice"))
    with clone_at(m.real("alice"), m.at("alice"), count=1):
        alone.do(os.chdir, m.at("alice"))
    for handed in served, native, alone:
        handed.do(become, BOB, BOB, [])
    assert served.error(os.listdir, ".") == errno.EACCES
    for handed in native, alone:
        assert handed.do(names, ".") == ["box", "work"]
    native.do(write, "box/new", b"")
    assert os.stat(m.real("alice/box/new")).st_uid == REAL_BOB
    assert alone.error(write, "box/other", b"") == errno.EOVERFLOW  # alice alone has an id in it


def test_each_refusal_detaches_it(disk: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount(*VIEW, "-o", options(), source=disk)
    with clone_at(m.real("alice"), m.at("alice")):
        assert user(ALICE).do(os.stat, m.at("alice")).st_dev == os.stat(disk).st_dev
        assert user(BOB).error(os.stat, m.at("alice")) == errno.EACCES
        assert not is_cloned(m.at("alice"))


def test_a_change_of_the_home_detaches_it(disk: str, mount: MakeMount, user: MakeUser) -> None:
    """Where the kernel keeps strangers out."""
    m = mount(*VIEW, "-o", f"default_permissions,{options()}", source=disk)
    with clone_at(m.real("alice"), m.at("alice")):
        assert user(BOB).error(os.stat, m.at("alice")) == errno.EACCES
        assert is_cloned(m.at("alice"))
        os.chown(m.real("alice"), REAL_BOB, REAL_BOB)
        told()
        assert user(ALICE).error(os.stat, m.at("alice")) == errno.ENOENT
        assert not is_cloned(m.at("alice"))


def test_it_outlives_the_daemon_for_who_stands_in_it(disk: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount(*VIEW, "-o", options(), source=disk)
    served, native = user(ALICE), user(ALICE)
    served.do(os.chdir, m.at("alice/work"))
    with clone_at(m.real("alice"), m.at("alice")):
        native.do(os.chdir, m.at("alice/work"))
        os.kill(m.pid, signal.SIGKILL)
        wait_until(lambda: not is_cloned(m.path))
        assert not is_cloned(m.at("alice"))
    os.rename(m.real("bob/diary"), m.real("alice/work/diary"))
    assert served.error(os.listdir, ".") == errno.ENOTCONN
    assert native.do(names, ".") == ["diary"]


def test_it_shows_what_mounts_cover(disk: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount(*VIEW, "-o", options(), source=disk)
    os.rename(m.real("bob/diary"), m.real("alice/work/diary"))
    with attached("none", m.real("alice/work"), "-t", "tmpfs", "-o", f"uid={REAL_ALICE}"):
        told()
        assert user(ALICE).do(names, m.at("alice/work")) == []
        with clone_at(m.real("alice"), m.at("alice")):
            assert user(ALICE).do(names, m.at("alice/work")) == ["diary"]
