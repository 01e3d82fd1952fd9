"""What one SETATTR changes is decided as a whole, with the errors of the bare tree."""

import errno
import itertools
import os
import resource
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cloakfs import linux
from cloakfs.filesystem.attributes import NOW, OMIT, AttributeOperations, Change, Time
from cloakfs.identity import Caller, ServerId
from cloakfs.tree.actor import actor
from cloakfs.tree.objects import NO_VIEWER
from cloakfs.tree.request import Request
from tests.agents import User
from tests.mount.conftest import Mount

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

OWNER, MEMBER, NAMED, STRANGER, TEAM = 1001, 1002, 1003, 1004, 1100
BEFORE = 1_000_000_000 * 10**9
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHi", *entry) for entry in ((1, 6, -1), (2, 6, NAMED), (4, 6, -1), (16, 6, -1), (32, 4, -1))
)
MOUNTS = {
    "plain": ("-o", "no_root_squash"),
    "cloaked": ("-o", "no_root_squash", "-o", "cloak_list=uid +077 0 -1"),
    "checked by the kernel": ("-o", "no_root_squash", "-o", "default_permissions"),
}


def set_times(path: str, atime: Time, mtime: Time) -> None:
    fd = os.open(path, os.O_PATH)
    try:
        linux.utimens(fd, atime, mtime)
    finally:
        os.close(fd)


def open_and_truncate(path: str, size: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def empty(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def make_file(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"content")
    os.chown(path, OWNER, TEAM)
    os.setxattr(path, "system.posix_acl_access", ACL)
    os.utime(path, ns=(BEFORE, BEFORE))


@pytest.fixture
def callers(user: MakeUser) -> list[User]:
    return [
        user(OWNER, OWNER, [TEAM]),
        user(MEMBER, MEMBER, [TEAM]),
        user(NAMED),
        user(STRANGER),
        user(0),
    ]


def both(tree: str) -> tuple[str, str]:
    """Make two places in the tree: what is done in one is compared with what is done to the other through the mount."""
    for place in ("bare", "seen"):
        os.mkdir(f"{tree}/{place}")
        os.chmod(f"{tree}/{place}", 0o777)
    return f"{tree}/bare", f"{tree}/seen"


def is_new(ns: int) -> bool:
    return ns > BEFORE + 10**9


@pytest.mark.parametrize("options", MOUNTS.values(), ids=MOUNTS)
def test_times_are_set_by_whom_the_bare_tree_lets(
    options: tuple[str, ...], tree: str, mount: MakeMount, callers: list[User]
) -> None:
    places = *both(tree), os.path.join(mount(*options).path, "seen")
    near = time.time_ns() - 200_000_000
    wrong = []
    combinations = itertools.product(callers, itertools.product((NOW, OMIT, near, BEFORE - 1), repeat=2))
    for number, (caller, times) in enumerate(combinations):
        bare, seen, path = (os.path.join(place, str(number)) for place in places)
        make_file(bare)
        make_file(seen)
        expected, found = caller.error(set_times, bare, *times), caller.error(set_times, path, *times)
        theirs, ours = os.stat(bare), os.stat(seen)
        same = [
            ours_ns == theirs_ns or (is_new(ours_ns) and is_new(theirs_ns))
            for ours_ns, theirs_ns in (
                (ours.st_atime_ns, theirs.st_atime_ns),
                (ours.st_mtime_ns, theirs.st_mtime_ns),
            )
        ]
        if found != expected or not all(same):
            wrong.append((caller.uid, times, same, errno.errorcode.get(found), errno.errorcode.get(expected)))
    assert not wrong


@pytest.mark.parametrize("options", MOUNTS.values(), ids=MOUNTS)
def test_sizes_are_set_by_whom_the_bare_tree_lets(
    options: tuple[str, ...], tree: str, mount: MakeMount, callers: list[User]
) -> None:
    places = *both(tree), os.path.join(mount(*options).path, "seen")
    calls: list[tuple[Callable[..., object], tuple[int, ...]]] = [
        (os.truncate, (0,)),
        (os.truncate, (3,)),
        (os.truncate, (70_000,)),
        (open_and_truncate, (3,)),
        (empty, ()),
    ]
    for number, (caller, (call, size)) in enumerate(itertools.product(callers, calls)):
        bare, seen, path = (os.path.join(place, str(number)) for place in places)
        make_file(bare)
        make_file(seen)
        found = caller.error(call, path, *size), os.stat(seen).st_size, is_new(os.stat(seen).st_mtime_ns)
        expected = caller.error(call, bare, *size), os.stat(bare).st_size, is_new(os.stat(bare).st_mtime_ns)
        assert found == expected, (caller.uid, call, size)


def test_a_handle_is_judged_by_the_file_that_it_is_of(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """A process that was handed the descriptor of a file that is hidden from it truncates it, as on the bare tree."""
    path = os.path.join(tree, "file")
    make_file(path)
    os.chmod(path, 0o600)
    os.removexattr(path, "system.posix_acl_access")
    m = mount("-o", "cloak_list=uid +077 0 -1")
    fd = user(0).do(truncate_as_somebody_else, m.at("file"))
    assert fd == (errno.ENOENT, 0)
    assert os.stat(path).st_size == 2


def truncate_as_somebody_else(path: str) -> tuple[int, int]:
    """Open as the owner, and truncate as a stranger; return the errors of the stranger's stat and truncation."""
    os.setresuid(OWNER, OWNER, 0)
    fd = os.open(path, os.O_RDWR)
    os.setresuid(0, 0, 0)
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    errors = []
    for call in (lambda: os.stat(path), lambda: os.ftruncate(fd, 2)):
        try:
            call()
            errors.append(0)
        except OSError as exc:
            errors.append(exc.errno or -1)
    return errors[0], errors[1]


# -- several parts at once: the kernel's NFS server sends them -------------------------------------


class Changer(AttributeOperations):
    """Only what makes the system calls of a SETATTR, on a real file."""

    def __init__(self) -> None:
        self.exported = self.knfsd = True
        descriptors = SimpleNamespace(with_descriptor=lambda call, *args: call(*args))
        nodes = SimpleNamespace(descriptors=descriptors)
        self.nodes = cast(Any, nodes)

    def make(self, path: str, who: Caller, change: Change) -> None:
        fd = os.open(path, os.O_PATH)
        try:
            view = cast(Any, SimpleNamespace(show=lambda attrs: None))
            obj = cast(Any, SimpleNamespace(name=b"", filesystem=SimpleNamespace(has_posix_rules=True)))
            at = Request(0, view, actor(who), obj, fd, linux.fstat(fd), NO_VIEWER)
            linux.act_as_daemon()
            self._change(at, change, None)
        finally:
            linux.act_as_daemon()
            os.close(fd)


def caller(uid: int, *groups: int) -> Caller:
    gids = frozenset(map(ServerId, (uid, *groups)))
    return Caller(ServerId(uid), ServerId(uid), gids)


UNCHANGED = Change(None, None, None, None, OMIT, OMIT)
PARTS: dict[str, dict[str, Any]] = {
    "uid": {"uid": MEMBER},
    "gid": {"gid": MEMBER},
    "mode": {"mode": 0o640},
    "size": {"size": 3},
    "atime": {"atime": BEFORE - 5},
    "mtime": {"mtime": BEFORE - 5},
    "atime now": {"atime": NOW},
    "mtime now": {"mtime": NOW},
}


@pytest.fixture
def small_files() -> Iterator[int]:
    """Keep this process from making a file larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def state(path: str) -> tuple[int, int, int, int, int, int]:
    info = os.stat(path)
    return info.st_uid, info.st_gid, info.st_mode, info.st_size, info.st_atime_ns, info.st_mtime_ns


@pytest.mark.parametrize("who", [OWNER, MEMBER, NAMED, STRANGER, 0])
def test_several_parts_are_changed_or_none(who: int, tree: str) -> None:
    path = os.path.join(tree, "file")
    groups = [TEAM] if who in (OWNER, MEMBER) else []
    changer = Changer()
    for parts in itertools.chain.from_iterable(itertools.combinations(PARTS, n) for n in (1, 2, 3)):
        if {"atime", "atime now"} <= {*parts} or {"mtime", "mtime now"} <= {*parts}:
            continue
        make_file(path)
        before = state(path)
        wanted: dict[str, Any] = {}
        for part in parts:
            wanted |= PARTS[part]
        is_owner = who in (OWNER, 0)
        writes = who != STRANGER
        privileged = {"uid", "gid"} & {*parts} and who != 0
        only_present = {*parts} <= {"size", "atime now", "mtime now"}
        may = not privileged and (is_owner or (writes and only_present))
        try:
            changer.make(path, caller(who, *groups), UNCHANGED._replace(**wanted))
        except PermissionError:
            assert not may, parts
            assert state(path) == before, parts
        else:
            assert may, parts
            after = os.stat(path)
            for field, value in wanted.items():
                found = {
                    "uid": after.st_uid,
                    "gid": after.st_gid,
                    "mode": stat.S_IMODE(after.st_mode),
                    "size": after.st_size,
                    "atime": after.st_atime_ns,
                    "mtime": after.st_mtime_ns,
                }[field]
                assert is_new(found) if value is NOW else found == value, (parts, field)
        os.unlink(path)


def test_what_fails_late_undoes_what_was_done(tree: str, small_files: int) -> None:
    path = os.path.join(tree, "file")
    make_file(path)
    os.chmod(path, 0o6775)
    before = state(path)
    change = UNCHANGED._replace(uid=ServerId(MEMBER), gid=ServerId(MEMBER), mode=0o600, size=small_files + 1, atime=NOW)
    with pytest.raises(OSError, match="File too large"):
        Changer().make(path, caller(0), change)
    assert state(path) == before


def test_a_directory_has_no_size(tree: str) -> None:
    for change in (UNCHANGED._replace(size=0), UNCHANGED._replace(size=0, mode=0o700)):
        os.chmod(tree, 0o755)
        with pytest.raises(OSError) as caught:  # noqa: PT011  (the errno is what counts)
            Changer().make(tree, caller(0), change)
        assert caught.value.errno == errno.EISDIR
        assert stat.S_IMODE(os.stat(tree).st_mode) == 0o755
