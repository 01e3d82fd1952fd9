"""Compares permissions that are derived without asking the kernel with the kernel's answer."""

import errno
import os
import struct
from collections.abc import Iterator
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

from cloakfs import linux
from cloakfs.identity import Caller
from cloakfs.tree import calls
from cloakfs.tree.actor import Actor, credentials
from cloakfs.tree.filesystems import MountedFilesystem
from cloakfs.tree.locate import is_settled
from cloakfs.tree.objects import Descriptor, Object
from cloakfs.tree.visibility import may_without_groups, uid_may, world_may
from tests.waiting import wait_until_settled

ACL = "system.posix_acl_access"
UIDS = [0, 2001, 2002, 2003]
IDS = st.sampled_from(UIDS)
ELSEWHERE = 2009  # a group that no file has, and no ACL names
PERMISSIONS = st.integers(0, 7)
NONE = 2**32 - 1
NO_ACL: tuple[int, ...] = ()
READ_AND_SEARCH = os.R_OK | os.X_OK


@pytest.fixture
def directory(tmp_path: os.PathLike[str]) -> Iterator[int]:
    path = os.path.join(tmp_path, "directory")
    os.mkdir(path)
    fd = os.open(path, os.O_PATH)
    yield fd
    linux.act_as_daemon()
    os.close(fd)


def known_as(kind: str) -> Object:
    """An object of a file system of this kind with a cached descriptor, of which nothing was found out yet."""
    obj = Object(2, b"", MountedFilesystem(1, kind, "", -1))
    obj.descriptor = Descriptor(-1, (0, 0), 0)
    return obj


def without_groups(uid: int, gid: int) -> Actor:
    """A caller whose supplementary groups must not be asked for."""

    def find() -> Caller:
        raise AssertionError("the groups were looked up")

    return Actor(uid, gid, find)


def acl(user: int, group: int, bits: tuple[int, ...]) -> bytes:
    tags = [(1, NONE), (2, user), (4, NONE), (8, group), (0x10, NONE), (0x20, NONE)]
    entries = (struct.pack("<HHI", tag, perm, of) for (tag, of), perm in zip(tags, bits, strict=True))
    return struct.pack("<I", 2) + b"".join(entries)


def answers(fd: int, bits: int, groups: tuple[int, int]) -> dict[Caller, bool]:
    """What the kernel says to callers with each uid, in and outside of these groups, primary or supplementary."""
    said = {}
    for uid, gid, first, second in product(UIDS, (*groups, ELSEWHERE), *((group, ELSEWHERE) for group in groups)):
        who = Caller(uid, gid, frozenset({gid, first, second}))
        linux.credentials.assume(credentials(who))
        said[who] = linux.may_access(fd, bits)
    linux.act_as_daemon()
    return said


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    owner=IDS,
    group=IDS,
    mode=st.integers(0, 0o7777),
    named=st.tuples(IDS, IDS),
    perms=st.one_of(st.just(NO_ACL), st.tuples(*[PERMISSIONS] * 6)),
    bits=st.sampled_from([os.R_OK, os.X_OK, READ_AND_SEARCH, os.W_OK | os.X_OK]),
)
@example(2001, 2002, 0o750, (2003, 2003), (7, 0, 5, 5, 5, 0), os.X_OK)  # named, and denied
@example(2001, 2002, 0o750, (2003, 2003), (7, 7, 0, 7, 7, 0), os.X_OK)  # the mask is not it
@example(2001, 2002, 0o755, (2003, 2003), (7, 0, 7, 7, 5, 5), os.X_OK)  # the mode alone looks as if nobody were denied
@example(2001, 2002, 0o705, (2003, 2003), NO_ACL, os.X_OK)  # its group alone is denied
@example(2001, 2002, 0o055, (2003, 2003), NO_ACL, os.X_OK)  # its owner alone is denied
@example(2001, 2002, 0o755, (2003, 2003), NO_ACL, os.X_OK)
@example(2001, 2002, 0o455, (2003, 2003), NO_ACL, READ_AND_SEARCH)  # one of the two
@example(2001, 2002, 0o745, (2003, 2003), NO_ACL, READ_AND_SEARCH)
@example(2001, 2002, 0o754, (2003, 2003), NO_ACL, READ_AND_SEARCH)
def test_what_is_derived_is_what_the_kernel_says_to_all_who_may_be_meant(
    directory: int, owner: int, group: int, mode: int, named: tuple[int, int], perms: tuple[int, ...], bits: int
) -> None:
    """Nobody is believed to have a permission that the kernel denies, and where no ACL is in doubt, the reverse.

    That root may do more than the mode says is not derived.
    """
    linux.act_as_daemon()
    path = f"/proc/self/fd/{directory}"
    if ACL in os.listxattr(path):
        os.removexattr(path, ACL)
    os.chown(path, owner, group)
    os.chmod(path, mode)
    if perms:
        os.setxattr(path, ACL, acl(*named, perms))
    obj, info = known_as("tmpfs"), os.stat(directory)
    said = answers(directory, bits, (group, named[1]))

    everybody = world_may(bits, obj, directory, info)
    assert all(said.values()) or not everybody
    if not perms and owner:
        assert everybody is all(said.values())
    for uid in UIDS:
        told = all(may for who, may in said.items() if who.uid == uid)
        with_any_groups = uid_may(uid, bits, obj, directory, info)
        assert told or not with_any_groups
        assert with_any_groups or not everybody
        if uid and uid == owner:
            assert with_any_groups is told
    for uid, gid in {who[:2] for who in said}:
        told = all(may for who, may in said.items() if who[:2] == (uid, gid))
        surely = may_without_groups(without_groups(uid, gid), bits, obj, directory, info)
        assert told or not surely
        if uid and (uid == owner or not perms):
            assert surely is told


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "nfs4", "fuse.sshfs", "vfat", "overlay"])
def test_nothing_is_derived_where_more_than_modes_and_acls_decides(kind: str, directory: int) -> None:
    os.chmod(f"/proc/self/fd/{directory}", 0o777)
    info, is_plain = os.stat(directory), kind in ("ext4", "tmpfs")
    for bits in (os.R_OK, os.X_OK, READ_AND_SEARCH):
        assert world_may(bits, known_as(kind), directory, info) is is_plain
        for uid in (info.st_uid, 2001):
            assert uid_may(uid, bits, known_as(kind), directory, info) is is_plain
            for gid in (info.st_gid, ELSEWHERE):
                assert may_without_groups(without_groups(uid, gid), bits, known_as(kind), directory, info) is is_plain


# -- whether there is an ACL -----------------------------------------------------------------------

GRANTS_ALL = acl(2003, 2003, (7,) * 6)


class Looks:
    """Counts how often an ACL is looked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._look = calls.peek_xattr
        monkeypatch.setattr(calls, "peek_xattr", self._counted)

    def _counted(self, who: linux.Credentials, fd: int, name: bytes | str) -> bytes:
        self.count += 1
        return self._look(who, fd, name)


def settled(fd: int) -> os.stat_result:
    wait_until_settled(fd)
    return os.stat(fd)


def test_an_acl_is_looked_for_once_after_each_change(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, obj = f"/proc/self/fd/{directory}", known_as("tmpfs")
    os.chmod(path, 0o777)
    for _ in range(2):
        looks, info = Looks(monkeypatch), settled(directory)
        assert [world_may(os.X_OK, obj, directory, info) for _ in range(3)] == [True] * 3
        assert looks.count == 1
        os.setxattr(path, ACL, GRANTS_ALL)
        assert not world_may(os.X_OK, obj, directory, settled(directory))
        os.removexattr(path, ACL)


def test_an_acl_that_a_ctime_may_not_show_is_found(directory: int) -> None:
    """Right after a change, another one may still result in the same ctime."""
    path, obj = f"/proc/self/fd/{directory}", known_as("tmpfs")
    while True:
        os.chmod(path, 0o777)
        info = os.stat(directory)
        assert world_may(os.X_OK, obj, directory, info)
        if not is_settled(info):
            break
    os.setxattr(path, ACL, GRANTS_ALL)
    assert not world_may(os.X_OK, obj, directory, info)


def test_there_is_no_acl_where_there_are_none() -> None:
    """Like those of a ramfs, the files of /proc cannot have any."""
    fd = os.open("/proc/self/status", os.O_PATH)
    with pytest.raises(OSError, match="not supported") as raised:
        os.getxattr(f"/proc/self/fd/{fd}", ACL)
    assert raised.value.errno == errno.EOPNOTSUPP
    assert world_may(os.R_OK, known_as("ramfs"), fd, os.stat(fd))
    os.close(fd)


def test_an_acl_that_cannot_be_looked_for_may_be_there(directory: int) -> None:
    os.chmod(f"/proc/self/fd/{directory}", 0o777)
    assert world_may(os.X_OK, known_as("tmpfs"), directory, os.stat(directory))
    assert not world_may(os.X_OK, known_as("tmpfs"), -1, os.stat(directory))
