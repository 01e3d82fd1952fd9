"""Compares permissions that are derived without asking the kernel with the kernel's answer."""

import os
import struct
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

from cloakfs import linux
from cloakfs.caller import Caller
from cloakfs.tree.door import credentials, everybody_may, subject, surely_may
from cloakfs.tree.filesystems import Filesystem
from cloakfs.tree.objects import Object

ACL = "system.posix_acl_access"
IDS = st.sampled_from([0, 2001, 2002, 2003])
PERMISSIONS = st.integers(0, 7)
NONE = 2**32 - 1
NO_ACL: tuple[int, ...] = ()


@pytest.fixture
def directory(tmp_path: os.PathLike[str]) -> Iterator[int]:
    path = os.path.join(tmp_path, "directory")
    os.mkdir(path)
    fd = os.open(path, os.O_PATH)
    yield fd
    linux.act_as_daemon()
    os.close(fd)


def acl(user: int, group: int, bits: tuple[int, ...]) -> bytes:
    tags = [(1, NONE), (2, user), (4, NONE), (8, group), (0x10, NONE), (0x20, NONE)]
    entries = (struct.pack("<HHI", tag, perm, of) for (tag, of), perm in zip(tags, bits, strict=True))
    return struct.pack("<I", 2) + b"".join(entries)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    owner=IDS,
    group=IDS,
    mode=st.integers(0, 0o777),
    named=st.tuples(IDS, IDS),
    perms=st.one_of(st.just(NO_ACL), st.tuples(*[PERMISSIONS] * 6)),
    uid=IDS,
    gid=IDS,
    groups=st.frozensets(IDS),
    bits=st.sampled_from([os.R_OK, os.X_OK]),
)
@example(2001, 2002, 0o750, (2003, 2003), (7, 0, 5, 5, 5, 0), 2003, 2002, frozenset(), os.X_OK)  # named, and denied
@example(2001, 2002, 0o750, (2003, 2003), (7, 7, 0, 7, 7, 0), 2002, 2002, frozenset(), os.X_OK)  # the mask is not it
@example(2001, 2002, 0o705, (2003, 2003), NO_ACL, 2003, 2003, frozenset({2002}), os.X_OK)  # its group alone is denied
def test_nobody_is_believed_to_have_a_permission_that_the_kernel_denies(
    directory: int, owner: int, group: int, mode: int, named: tuple[int, int], perms: tuple[int, ...],
    uid: int, gid: int, groups: frozenset[int], bits: int,
) -> None:  # fmt: skip
    linux.act_as_daemon()
    path = f"/proc/self/fd/{directory}"
    if ACL in os.listxattr(path):
        os.removexattr(path, ACL)
    os.chown(path, owner, group)
    os.chmod(path, mode)
    if perms:
        os.setxattr(path, ACL, acl(*named, perms))
    who = Caller(uid, gid, groups | {gid})
    obj = Object(2, b"", Filesystem(1, "tmpfs", "", -1))
    info = os.stat(directory)
    surely = surely_may(subject(who), bits, obj, directory, info)
    for_all = everybody_may(bits, obj, directory, info)
    linux.credentials.assume(credentials(who))
    may = linux.may_access(directory, bits)
    linux.act_as_daemon()
    if surely or for_all:
        assert may
    if uid == owner and uid:
        assert surely == may
    if not perms and uid != owner and gid == group and uid:
        assert surely == may
