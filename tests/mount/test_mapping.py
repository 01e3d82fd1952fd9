"""Range-mapping by real uids through a real mount: who a caller is on the server, and what it is shown."""

import errno
import os
import pwd
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agents import User, names, read, write
from tests.mount.conftest import Mount, mounted
from tests.mount.loopfs import filesystem

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

NOBODY = 65534
# alice 11001 -> 1001, bob 11002 -> 1002, groups 12001… -> 2001…
MAP = "range_map=uid 11001 11009 map 1001 gid 12001 12009 map 2001"
ALICE, BOB, STAFF, GUESTS = 11001, 11002, 12001, 12002


def put(path: str, uid: int, gid: int, mode: int, content: bytes | None = b"content") -> str:
    """Make a file, or with content None a directory, on the real tree."""
    if content is None:
        os.mkdir(path)
    else:
        write(path, content)
    os.chown(path, uid, gid)
    os.chmod(path, mode)
    return path


def owner(path: str) -> tuple[int, int]:
    info = os.lstat(path)
    return info.st_uid, info.st_gid


def mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def opened(path: str, flags: int) -> None:
    os.close(os.open(path, flags))


def execute(path: str) -> int:
    return subprocess.run([path], check=False, capture_output=True).returncode


# -- closed kinds, squash, nobody ------------------------------------------------------------------


def test_mapped_both_ways(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", MAP)
    alice = user(ALICE, STAFF)
    alice.do(write, m.at("file"), b"x")
    assert owner(m.real("file")) == (1001, 2001)
    assert alice.do(owner, m.at("file")) == (ALICE, STAFF)
    assert user(BOB, GUESTS).do(owner, m.at("file")) == (ALICE, STAFF)


def test_a_kind_with_a_definition_is_closed(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "of-1500"), 1500, 2500, 0o644)
    m = mount("-o", f"{MAP},anonuid=4444,anongid=5555")
    for uid, gid in ((0, 0), (1001, 2001), (11010, 12010), (4444, 5555)):
        stranger = user(uid, gid)
        stranger.do(write, m.at(f"by-{uid}"), b"")
        assert owner(m.real(f"by-{uid}")) == (4444, 5555), uid
        assert stranger.do(owner, m.at("of-1500")) == (4444, 5555)


def test_kinds_are_independent(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "range_map=uid 11001 map 1001")
    user(ALICE, 777).do(write, m.at("a"), b"")
    user(BOB, 778).do(write, m.at("b"), b"")
    assert owner(m.real("a")) == (1001, 777)
    assert owner(m.real("b")) == (NOBODY, 778)


def test_a_range_squashed(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "range_map=uid 800 999 squash 517 gid 800 999 squash 518")
    first, other = user(805, 805), user(999, 999)
    first.do(write, m.at("file"), b"x")
    os.chmod(m.real("file"), 0o600)
    assert owner(m.real("file")) == (517, 518)
    assert other.do(read, m.at("file")) == b"x"
    assert other.do(owner, m.at("file")) == (800, 800)


def test_a_squash_to_nobody(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "range_map=uid 0 squash -2 uid 1 9 map 101,anonuid=4444")
    user(0).do(write, m.at("file"), b"")
    assert owner(m.real("file"))[0] == 4444


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {0: NOBODY, 500: 500}),
        ("root_squash", {0: NOBODY, 500: 500}),
        ("no_root_squash", {0: 0, 500: 500}),
        ("all_squash", {0: NOBODY, 500: NOBODY}),
        ("all_squash,anonuid=4444,anongid=4444", {0: 4444, 500: 4444}),
        ("root_squash,anonuid=4444,anongid=4444", {0: 4444, 500: 500}),
    ],
)
def test_squash_options(options: str, expected: dict[int, int], tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", options or "rw")
    for uid, server in expected.items():
        user(uid, uid).do(write, m.at(f"by-{uid}"), b"")
        assert owner(m.real(f"by-{uid}")) == (server, server)
        assert user(500).do(owner, m.at(f"by-{uid}")) == (server, server)  # shown as it is


def test_a_squashed_root_has_no_privileges(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "private"), 1001, 2001, 0o600)
    put(os.path.join(tree, "of-root"), 0, 0, 0o600)
    m = mount()
    root = user(0)
    for name in ("private", "of-root"):
        assert root.error(read, m.at(name)) == errno.EACCES
        assert root.error(os.chmod, m.at(name), 0o777) == errno.EPERM
        assert root.error(os.chown, m.at(name), 500, 500) == errno.EPERM
        assert root.error(os.truncate, m.at(name), 0) == errno.EACCES
    n = mount("-o", "no_root_squash")
    assert root.do(read, n.at("private")) == b"content"


# -- groups ----------------------------------------------------------------------------------------


def test_groups_are_mapped_one_by_one(tree: str, mount: MakeMount, user: MakeUser) -> None:
    for gid in (2001, 2002, 2003, 12002, 777):
        put(os.path.join(tree, str(gid)), 0, gid, 0o040)
    m = mount("-o", MAP)
    alice = user(ALICE, STAFF, [STAFF, GUESTS, 777])
    readable = [gid for gid in (2001, 2002, 2003, 12002, 777) if alice.error(read, m.at(str(gid))) == 0]
    assert readable == [2001, 2002]


@pytest.mark.parametrize("options", [MAP, f"{MAP},anongid=4444", "root_squash", "root_squash,anongid=4444"])
def test_nobody_is_never_granted_as_a_supplementary_group(
    options: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    nobody = 4444 if "4444" in options else NOBODY
    put(os.path.join(tree, "of-nobody"), 0, nobody, 0o060)
    m = mount("-o", options)
    primary = STAFF
    for groups in ([0], [0, STAFF], [0, 777] if MAP in options else [0]):
        member = user(ALICE, primary, groups)
        assert member.error(read, m.at("of-nobody")) == errno.EACCES, groups
    # As a primary group it is what one is.
    assert user(ALICE, 0).error(read, m.at("of-nobody")) == 0


def test_groups_none(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "for-2002"), 0, 2002, 0o040)
    put(os.path.join(tree, "for-2001"), 0, 2001, 0o040)
    m = mount("-o", f"{MAP},groups=none")
    alice = user(ALICE, STAFF, [GUESTS])
    assert alice.error(read, m.at("for-2002")) == errno.EACCES
    assert alice.error(read, m.at("for-2001")) == 0  # the primary group comes with the request


def test_groups_fixed(tree: str, mount: MakeMount, user: MakeUser) -> None:
    for gid in (2002, 2003, 777):
        put(os.path.join(tree, str(gid)), 0, gid, 0o040)
    m = mount("-o", f"{MAP},groups=12002:777")
    alice = user(ALICE, STAFF, [12003])
    readable = [gid for gid in (2002, 2003, 777) if alice.error(read, m.at(str(gid))) == 0]
    assert readable == [2002]  # client gids, mapped like any


def test_groups_from_the_database(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Of the mapped user, in server ids; what the process claims does not count."""
    name, group = "cloakfs-t7", "cloakfs-g7"
    subprocess.run(["groupadd", "--gid", "2777", group], check=True)
    try:
        subprocess.run(["useradd", "--no-create-home", "--uid", "4801", "--groups", group, name], check=True)
        try:
            own = pwd.getpwnam(name).pw_gid
            for gid in (2777, 2002, own):
                put(os.path.join(tree, str(gid)), 0, gid, 0o040)
            m = mount("-o", "range_map=uid 11001 11002 map 4801 gid 12001 12009 map 2001,groups=database")
            alice, bob = user(ALICE, STAFF, [GUESTS]), user(BOB, STAFF, [GUESTS])
            assert [gid for gid in (2777, 2002, own) if alice.error(read, m.at(str(gid))) == 0] == [2777, own]
            assert [gid for gid in (2777, 2002, own) if bob.error(read, m.at(str(gid))) == 0] == []
        finally:
            subprocess.run(["userdel", name], check=True, capture_output=True)
    finally:
        subprocess.run(["groupdel", group], check=False, capture_output=True)


def test_groups_of_the_process_as_they_are_now(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 0, 2002, 0o040)
    m = mount("-o", "no_root_squash,range_map=uid 11001 map 1001 gid 12001 12009 map 2001")
    root = user(0)
    root.do(os.setgroups, [GUESTS])
    root.do(os.setresgid, STAFF, STAFF, STAFF)
    root.do(os.setresuid, ALICE, ALICE, 0)
    assert root.error(read, m.at("file")) == 0
    root.do(os.setresuid, 0, 0, 0)
    root.do(os.setgroups, [])
    root.do(os.setresuid, ALICE, ALICE, 0)
    assert root.error(read, m.at("file")) == errno.EACCES


# -- chown, chgrp ----------------------------------------------------------------------------------


@pytest.mark.parametrize("anon", [NOBODY, 4444])
def test_chown_to_what_is_not_mapped(anon: int, tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 1001, 2001, 0o644)
    m = mount("-o", f"range_map=uid 0 map 0 uid 11001 11009 map 1001 gid 12001 12009 map 2001,"
                    f"anonuid={anon},anongid={anon}")  # fmt: skip
    root = user(0)
    for uid, gid in ((500, -1), (-1, 500), (500, STAFF), (ALICE, 500), (anon, -1), (-1, anon), (11010, -1)):
        assert root.error(os.chown, m.at("file"), uid, gid) == errno.EINVAL, (uid, gid)
        assert owner(m.real("file")) == (1001, 2001)
    root.do(os.chown, m.at("file"), BOB, GUESTS)
    assert owner(m.real("file")) == (1002, 2002)
    root.do(os.symlink, "x", m.at("link"))
    assert root.error(os.lchown, m.at("link"), 500, -1) == errno.EINVAL
    root.do(os.lchown, m.at("link"), ALICE, STAFF)
    assert owner(m.real("link")) == (1001, 2001)


def test_chown_of_squashed_ids(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 500, 500, 0o644)
    m = mount("-o", "range_map=uid 0 map 0 uid 7 squash -2 uid 800 999 squash 517")
    root = user(0)
    assert root.error(os.chown, m.at("file"), 7, -1) == errno.EINVAL  # would be nobody silently
    root.do(os.chown, m.at("file"), 950, -1)
    assert owner(m.real("file")) == (517, 500)
    n = mount("-o", "root_squash")
    assert user(500).error(os.chown, n.at("file"), 0, -1) == errno.EINVAL


def test_chgrp_by_the_owner(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 1001, 2001, 0o644)
    m = mount("-o", MAP)
    alice, bob = user(ALICE, STAFF, [GUESTS, 777]), user(BOB, STAFF, [GUESTS])
    assert alice.error(os.chown, m.at("file"), -1, 12003) == errno.EPERM  # mapped, but not hers
    assert alice.error(os.chown, m.at("file"), -1, 777) == errno.EINVAL
    assert alice.error(os.chown, m.at("file"), BOB, -1) == errno.EPERM
    assert bob.error(os.chown, m.at("file"), -1, GUESTS) == errno.EPERM
    assert owner(m.real("file")) == (1001, 2001)
    alice.do(os.chown, m.at("file"), -1, GUESTS)
    assert owner(m.real("file")) == (1001, 2002)


# -- what is created -------------------------------------------------------------------------------


def test_ownership_of_everything_created(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", MAP)
    for uid, gid, expected in ((ALICE, STAFF, (1001, 2001)), (500, 500, (NOBODY, NOBODY))):
        who = user(uid, gid)
        os.mkdir(m.real(str(uid)))
        os.chmod(m.real(str(uid)), 0o777)
        calls: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
            "file": (os.mknod, (0o644 | stat.S_IFREG,)),
            "created": (write, (b"",)),
            "directory": (os.mkdir, ()),
            "fifo": (os.mkfifo, ()),
            "socket": (os.mknod, (0o644 | stat.S_IFSOCK,)),
        }
        for name, (call, args) in calls.items():
            who.do(call, m.at(str(uid), name), *args)
        who.do(os.symlink, "nowhere", m.at(str(uid), "symlink"))
        for name in os.listdir(m.real(str(uid))):
            assert owner(m.real(str(uid), name)) == expected, name
        assert len(os.listdir(m.real(str(uid)))) == 6


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_devices_are_refused(kind: int, tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "root_squash")
    for who in (user(0), user(500)):  # a squashed root is as good as anybody
        assert who.error(os.mknod, m.at("device"), kind | 0o600, os.makedev(1, 3)) == errno.EPERM
    assert os.listdir(tree) == []
    n = mount("-o", "no_root_squash")
    user(0).do(os.mknod, n.at("device"), kind | 0o666, os.makedev(1, 3))
    assert user(0).error(opened, n.at("device"), os.O_RDONLY) == errno.EACCES  # nodev


def test_dev_needs_default_permissions(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Of a device the kernel asks the daemon nothing: without its own check, whoever sees it could open it."""
    os.mknod(os.path.join(tree, "zero"), stat.S_IFCHR | 0o600, os.makedev(1, 5))
    os.mkfifo(os.path.join(tree, "fifo"), 0o600)
    without = mount("-o", "no_root_squash,dev")
    for who in (user(0), user(500)):
        assert who.error(opened, without.at("zero"), os.O_RDONLY) == errno.EACCES
    checked = mount("-o", "no_root_squash,dev,default_permissions")
    user(0).do(opened, checked.at("zero"), os.O_RDONLY)
    for name in ("zero", "fifo"):
        assert user(500).error(opened, checked.at(name), os.O_RDONLY | os.O_NONBLOCK) == errno.EACCES
    user(0).do(opened, checked.at("fifo"), os.O_RDONLY | os.O_NONBLOCK)


def test_setgid_directories(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "shared"), 1002, 2005, 0o2777, None)
    m = mount("-o", MAP)
    alice = user(ALICE, STAFF)
    alice.do(write, m.at("shared/file"), b"")
    alice.do(os.mkdir, m.at("shared/directory"))
    alice.do(os.symlink, "x", m.at("shared/link"))
    for name in ("file", "directory", "link"):
        assert owner(m.real("shared", name)) == (1001, 2005)
        assert alice.do(owner, m.at("shared", name)) == (ALICE, 12005)
    assert mode(m.real("shared/directory")) == 0o2755
    # The bit cannot be had for a group one is not in: chmod(2) drops it.
    alice.do(os.chmod, m.at("shared/file"), 0o2755)
    assert mode(m.real("shared/file")) == 0o755
    user(BOB, 12005).do(write, m.at("shared/bobs"), b"")
    user(BOB, 12005).do(os.chmod, m.at("shared/bobs"), 0o2755)
    assert mode(m.real("shared/bobs")) == 0o2755


# -- ACLs ------------------------------------------------------------------------------------------

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
UNDEFINED = 2**32 - 1
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32


def acl(*named: tuple[int, int, int], mask: int = 7) -> bytes:
    """An ACL with named entries (tag, permissions, id) beside rwx for the owner and nothing for the others."""
    entries = [(USER_OBJ, 7, UNDEFINED), *named, (GROUP_OBJ, 0, UNDEFINED), (MASK, mask, UNDEFINED)]
    entries.append((OTHER, 0, UNDEFINED))
    entries.sort(key=lambda entry: (entry[0], entry[2]))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize("which", [ACCESS, DEFAULT])
def test_acl_ids_are_mapped_both_ways(which: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "directory"), 1001, 2001, 0o700, None)
    m = mount("-o", MAP)
    alice = user(ALICE, STAFF)
    mine = acl((USER, 5, BOB), (GROUP, 4, GUESTS))
    alice.do(os.setxattr, m.at("directory"), which, mine)
    assert os.getxattr(m.real("directory"), which) == acl((USER, 5, 1002), (GROUP, 4, 2002))
    assert alice.do(os.getxattr, m.at("directory"), which) == mine
    assert which in alice.do(os.listxattr, m.at("directory"))
    os.setxattr(m.real("directory"), which, acl((USER, 7, 1500), (GROUP, 7, 1501)))
    assert alice.do(os.getxattr, m.at("directory"), which) == acl((USER, 7, NOBODY), (GROUP, 7, NOBODY))
    alice.do(os.removexattr, m.at("directory"), which)
    assert which not in os.listxattr(m.real("directory"))


def test_an_acl_grants_to_the_mapped(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 1001, 2001, 0o600)
    m = mount("-o", MAP)
    user(ALICE, STAFF).do(os.setxattr, m.at("file"), ACCESS, acl((USER, 4, BOB), (GROUP, 6, GUESTS)))
    bob, guest, other = user(BOB, 777), user(11003, STAFF, [GUESTS]), user(11003, STAFF)
    assert bob.error(read, m.at("file")) == 0
    assert bob.error(opened, m.at("file"), os.O_WRONLY) == errno.EACCES
    assert guest.error(opened, m.at("file"), os.O_RDWR) == 0
    assert other.error(read, m.at("file")) == errno.EACCES


def acts_as(pid: int) -> int:
    """Return the uid with which the main thread of a process uses files."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        return next(int(line.split()[4]) for line in status if line.startswith("Uid:"))


def test_an_acl_is_read_without_becoming_the_caller(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Nobody needs a permission for that, and an NFS server's kernel asks for ACLs at every check of a permission."""
    granted = acl((USER, 4, 1002))
    os.setxattr(put(os.path.join(tree, "file"), 1001, 2001, 0o600), ACCESS, granted)
    m = mount("-o", MAP)
    alice, bob = user(ALICE, STAFF), user(BOB, GUESTS)
    file = alice.do(os.open, m.at("file"), os.O_RDONLY)
    bob.do(write, m.at("another"), b"")
    assert acts_as(m.pid) != 1001
    assert alice.do(os.getxattr, file, ACCESS) == acl((USER, 4, BOB))
    assert acts_as(m.pid) != 1001


@pytest.mark.parametrize("which", [ACCESS, DEFAULT])
@pytest.mark.parametrize("entry", [(USER, 7, 500), (GROUP, 7, 500), (USER, 7, NOBODY), (GROUP, 7, NOBODY)])
def test_an_unmapped_acl_entry(
    which: str, entry: tuple[int, int, int], tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "directory"), 1001, 2001, 0o700, None)
    m = mount("-o", MAP)
    assert user(ALICE, STAFF).error(os.setxattr, m.at("directory"), which, acl(entry)) == errno.EINVAL
    assert os.listxattr(m.real("directory")) == []


def test_acl_entries_that_become_one(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 1001, 0, 0o600)
    m = mount("-o", "range_map=uid 11001 map 1001 uid 800 999 squash 517")
    two = acl((USER, 0, 801), (USER, 7, 802))
    assert user(ALICE).error(os.setxattr, m.at("file"), ACCESS, two) == errno.EINVAL
    user(ALICE).do(os.setxattr, m.at("file"), ACCESS, acl((USER, 4, 802)))
    assert os.getxattr(m.real("file"), ACCESS) == acl((USER, 4, 517))


# -- umask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o027])
def test_the_umask_of_the_caller(umask: int, tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "plain"), 0, 0, 0o777, None)
    put(os.path.join(tree, "acl"), 0, 0, 0o777, None)
    os.setxattr(os.path.join(tree, "acl"), DEFAULT, acl((USER, 7, 1002)))
    put(os.path.join(tree, "expected"), 0, 0, 0o777, None)
    os.setxattr(os.path.join(tree, "expected"), DEFAULT, acl((USER, 7, 1002)))
    m = mount("-o", MAP)
    alice = user(ALICE, STAFF)
    alice.do(os.umask, umask)
    for directory in (m.at("plain"), m.at("acl"), m.real("expected")):
        who = alice if directory != m.real("expected") else user(1001, 2001)
        who.do(os.umask, umask)
        who.do(write, f"{directory}/file", b"", os.O_CREAT, 0o666)
        who.do(os.mkdir, f"{directory}/directory", 0o777)
        who.do(os.mkfifo, f"{directory}/fifo", 0o666)
        who.do(os.mknod, f"{directory}/node", 0o640 | stat.S_IFREG)
    plain = {name: mode(m.real("plain", name)) for name in ("file", "directory", "fifo", "node")}
    assert plain == {
        "file": 0o666 & ~umask,
        "directory": 0o777 & ~umask,
        "fifo": 0o666 & ~umask,
        "node": 0o640 & ~umask,
    }
    # A default ACL takes the place of the umask, as it does on the server.
    for name in ("file", "directory", "fifo", "node"):
        assert mode(m.real("acl", name)) == mode(m.real("expected", name)), name
        assert os.getxattr(m.real("acl", name), ACCESS) == os.getxattr(m.real("expected", name), ACCESS)
    assert mode(m.real("acl", "file")) == 0o660


def test_umasks_of_several_callers(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", MAP)
    open_, closed = user(ALICE, STAFF), user(BOB, GUESTS)
    open_.do(os.umask, 0)
    closed.do(os.umask, 0o077)
    for number in range(5):
        open_.do(write, m.at(f"o{number}"), b"")
        closed.do(write, m.at(f"c{number}"), b"")
        assert (mode(m.real(f"o{number}")), mode(m.real(f"c{number}"))) == (0o666, 0o600)


# -- extended attributes of root -------------------------------------------------------------------

# VFS_CAP_REVISION_2, cap_setuid permitted.
CAPABILITY = struct.pack("<IIIII", 0x02000000, 1 << 7, 0, 0, 0)


@pytest.mark.parametrize("name", ["trusted.x", "security.x", "security.capability"])
def test_privileged_attributes_of_a_squashed_root(name: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    """It owns nobody's files, but may not make them privileged on the server."""
    value = CAPABILITY if name == "security.capability" else b"x"
    put(os.path.join(tree, "marked"), NOBODY, NOBODY, 0o777)
    os.setxattr(os.path.join(tree, "marked"), name, value)
    m = mount("-o", "root_squash")
    root = user(0)
    root.do(write, m.at("file"), b"")
    assert owner(m.real("file")) == (NOBODY, NOBODY)
    assert root.error(os.setxattr, m.at("file"), name, value) == errno.EPERM
    assert os.listxattr(m.real("file")) == []
    assert root.error(os.removexattr, m.at("marked"), name) == errno.EPERM
    assert os.listxattr(m.real("marked")) == [name]
    assert root.error(os.setxattr, m.at("file"), "user.x", b"x") == 0
    n = mount("-o", "no_root_squash")
    root.do(os.setxattr, n.at("file"), name, value)
    assert os.getxattr(n.real("file"), name)
    # Who comes after root on the same mount has none of its privileges.
    user(500).do(write, n.at("other"), b"")
    assert user(500).error(os.setxattr, n.at("other"), name, value) == errno.EPERM
    assert root.error(os.setxattr, m.at("file"), name, value) == errno.EPERM


def test_trusted_attributes_are_not_listed_to_others(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 500, 500, 0o666)
    os.setxattr(os.path.join(tree, "file"), "trusted.x", b"x")
    m = mount("-o", "root_squash")
    for who in (user(0), user(500)):
        assert who.do(os.listxattr, m.at("file")) == []
        assert who.error(os.getxattr, m.at("file"), "trusted.x") == errno.ENODATA
    n = mount("-o", "no_root_squash")
    assert user(0).do(os.listxattr, n.at("file")) == ["trusted.x"]


# -- set-id bits, programs -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["write", "truncate", "open-truncate"])
def test_a_foreign_write_drops_set_id_bits(how: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "tool"), 1001, 2001, 0o6777)
    m = mount("-o", f"{MAP},suid")
    bob = user(BOB, GUESTS)
    match how:
        case "write":
            bob.do(write, m.at("tool"), b"evil", 0)
        case "truncate":
            bob.do(os.truncate, m.at("tool"), 1)
        case _:
            bob.do(opened, m.at("tool"), os.O_WRONLY | os.O_TRUNC)
    assert mode(m.real("tool")) == 0o777
    assert bob.do(mode, m.at("tool")) == 0o777


@pytest.mark.parametrize("checked", ["", ",default_permissions"])
def test_truncate_drops_set_id_bits_and_no_others(checked: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel asks for the sticky bit as well, of which it knows nothing without default_permissions."""
    for name, permissions in (("all", 0o7777), ("group", 0o3777), ("unwritable", 0o7755), ("unwritable-too", 0o6755)):
        put(os.path.join(tree, name), 1001, 2001, permissions)
    m = mount("-o", f"{MAP},suid{checked}")
    alice, bob = user(ALICE, STAFF), user(BOB, GUESTS)
    for name in ("unwritable", "unwritable-too"):
        assert bob.error(os.truncate, m.at(name), 1) == errno.EACCES
        assert bob.error(opened, m.at(name), os.O_WRONLY | os.O_TRUNC) == errno.EACCES
    assert [mode(m.real(name)) for name in ("unwritable", "unwritable-too")] == [0o7755, 0o6755]
    for who in (bob, alice):
        for name, permissions in (("all", 0o7777), ("group", 0o3777)):
            for how in (partial(os.truncate, length=1), partial(opened, flags=os.O_WRONLY | os.O_TRUNC)):
                os.chmod(m.real(name), permissions)
                who.do(how, m.at(name))
                assert mode(m.real(name)) == 0o1777, (who, name)
                assert who.do(mode, m.at(name)) == 0o1777


def test_a_foreign_write_keeps_the_sticky_bit(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "tool"), 1001, 2001, 0o7777)
    m = mount("-o", f"{MAP},suid")
    user(BOB, GUESTS).do(write, m.at("tool"), b"evil", 0)
    assert mode(m.real("tool")) == 0o1777


def test_only_set_id_bits_can_be_dropped_by_a_writer(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "tool"), 1001, 2001, 0o6776)
    put(os.path.join(tree, "read-only"), 1001, 2001, 0o6775)
    put(os.path.join(tree, "directory"), 1001, 2001, 0o2777, None)
    put(os.path.join(tree, "sticky"), 1001, 2001, 0o1777)
    m = mount("-o", f"{MAP},suid")
    bob = user(BOB, GUESTS)
    assert bob.error(os.chmod, m.at("sticky"), 0o777) == errno.EPERM
    for new in (0o777, 0o6777, 0o6776, 0o772, 0o4775, 0o0):
        assert bob.error(os.chmod, m.at("tool"), new) == errno.EPERM, oct(new)
    assert bob.error(os.chmod, m.at("read-only"), 0o775) == errno.EPERM
    assert bob.error(os.chmod, m.at("directory"), 0o777) == errno.EPERM
    for name, expected in (("tool", 0o6776), ("read-only", 0o6775), ("directory", 0o2777)):
        assert mode(m.real(name)) == expected


@pytest.mark.parametrize(
    ("before", "permitted", "refused"),
    [
        (0o6775, (0o775,), (0o2775, 0o4775, 0o1775, 0o6774)),
        (0o7775, (0o775, 0o1775), (0o2775, 0o3775, 0o4775, 0o6775)),
        (0o6765, (0o2765,), (0o765, 0o4765)),
        (0o2765, (), (0o765,)),
        (0o2775, (0o775,), (0o2774,)),
    ],
)
def test_a_writer_can_drop_by_chmod_what_writing_drops_and_no_part_of_it(
    before: int, permitted: tuple[int, ...], refused: tuple[int, ...], tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """Such a chmod(2) looks like what the kernel asks for before a write; all others are refused, as on the tree."""
    path = os.path.join(tree, "tool")
    put(path, 1001, 2001, before)
    m = mount("-o", f"{MAP},suid")
    bob = user(BOB, STAFF)
    for new in (*refused, *permitted):
        os.chmod(path, before)
        assert user(1002, 2001).error(os.chmod, path, new) == errno.EPERM
        if new in refused:
            assert bob.error(os.chmod, m.at("tool"), new) == errno.EPERM, oct(new)
            assert mode(path) == before
        else:
            bob.do(os.chmod, m.at("tool"), new)
            assert mode(path) == new | before & stat.S_ISVTX
    os.chmod(path, before)
    bob.do(write, m.at("tool"), b"x", 0)
    assert mode(path) == (permitted[0] if permitted else before) | before & stat.S_ISVTX


def test_programs(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Execute-only ones run and cannot be read; readable ones that are not executable do not run."""
    for name, permissions in (("execute-only", 0o711), ("read-only", 0o744)):
        shutil.copy("/bin/true", os.path.join(tree, name))
        os.chown(os.path.join(tree, name), 1001, 2001)
        os.chmod(os.path.join(tree, name), permissions)
    m = mount("-o", MAP)
    bob = user(BOB, GUESTS)
    assert bob.do(execute, m.at("execute-only")) == 0
    assert bob.error(read, m.at("execute-only")) == errno.EACCES
    assert bob.error(execute, m.at("read-only")) == errno.EACCES
    assert bob.do(read, m.at("read-only")) == read("/bin/true")
    assert user(ALICE, STAFF).do(execute, m.at("read-only")) == 0


def test_a_program_one_class_may_not_run(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The group's bits count for a member even if they are less than the others'."""
    shutil.copy("/bin/true", os.path.join(tree, "tool"))
    os.chown(os.path.join(tree, "tool"), 1001, 2002)
    os.chmod(os.path.join(tree, "tool"), 0o705)
    m = mount("-o", MAP)
    assert user(BOB, GUESTS).error(execute, m.at("tool")) == errno.EACCES
    assert user(BOB, STAFF, [GUESTS]).error(execute, m.at("tool")) == errno.EACCES
    assert user(BOB, STAFF).do(execute, m.at("tool")) == 0


# -- times -----------------------------------------------------------------------------------------


def test_touch_of_a_writable_foreign_file(tree: str, mount: MakeMount, user: MakeUser) -> None:
    path = put(os.path.join(tree, "file"), 1001, 2001, 0o666)
    os.utime(path, (1, 1))
    m = mount("-o", MAP)
    bob = user(BOB, GUESTS)
    bob.do(os.utime, m.at("file"))
    assert os.stat(path).st_mtime > 1_000_000
    assert os.stat(path).st_atime > 1_000_000
    for times in ((1, 1), (2**31, 2**31), (0, 0)):
        assert bob.error(os.utime, m.at("file"), times) == errno.EPERM
    os.chmod(path, 0o644)
    assert bob.error(os.utime, m.at("file")) == errno.EACCES
    user(ALICE, STAFF).do(os.utime, m.at("file"), (3, 4))
    assert (os.stat(path).st_atime, os.stat(path).st_mtime) == (3, 4)


def test_names_are_the_same_for_all(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Mapping alone hides nothing: nobody sees what all see, with real link counts."""
    Path(tree, "file").write_text("x")
    os.mkdir(os.path.join(tree, "directory"))
    os.mkdir(os.path.join(tree, "directory", "sub"))
    m = mount("-o", MAP)
    for uid in (ALICE, BOB, 0, 500):
        assert user(uid).do(names, m.path) == ["directory", "file"]
        assert user(uid).do(os.stat, m.at("directory")).st_nlink == 3


def test_a_program_that_runs_is_not_emptied(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel refuses to write to it, but not to open it with O_RDONLY | O_TRUNC before the daemon is asked."""
    m = mount("-o", MAP)
    alice = user(ALICE, STAFF)
    program = m.at("program")
    alice.do(shutil.copy, shutil.which("sleep"), program)
    with subprocess.Popen([program, "1000"]) as running:
        try:
            for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                assert alice.error(opened, program, access | os.O_TRUNC) == errno.ETXTBSY
            assert os.path.getsize(m.real("program")) > 0
        finally:
            running.kill()
    for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        alice.do(shutil.copy, shutil.which("sleep"), program)
        alice.do(opened, program, access | os.O_TRUNC)
        assert os.path.getsize(m.real("program")) == 0


def create(path: str, mode: int) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, mode))


def test_a_file_keeps_the_bit_of_a_group_that_its_maker_is_only_a_further_member_of(base: str, user: MakeUser) -> None:
    with filesystem("tmpfs", base) as top:
        own = put(os.path.join(top, "own"), 3001, 3002, 0o2755, None)
        os.mkdir(os.path.join(base, "mnt"))
        with mounted(top, os.path.join(base, "mnt"), "-o", "no_root_squash,cloak_list=uid +077 3000 3999") as m:
            user(3001, 3001, (3002,)).do(create, m.at("own", "file"), 0o2770)
        assert owner(os.path.join(own, "file")) == (3001, 3002)
        assert mode(os.path.join(own, "file")) & stat.S_ISGID
