"""An id without a counterpart on the other side matches nobody: it enters no view, owns nothing, and runs nothing."""

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable

import pytest

from cloakfs.mapping import MAX_ID
from tests.agents import User, names, read, write
from tests.mount.conftest import Mount
from tests.mount.test_mapping import ACCESS, ALICE, BOB, GROUP, MAP, NOBODY, USER, acl, mode, opened, owner, put

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

STRANGER = 1500
"""On the server; MAP gives it no client id."""

CHECKED = pytest.mark.parametrize("checked", ["", "default_permissions,"])


# -- gates -----------------------------------------------------------------------------------------


@CHECKED
@pytest.mark.parametrize("options", [MAP, "all_squash", f"range_map=uid {STRANGER} squash -2"])
def test_a_view_of_somebody_who_is_nobody_on_the_client(
    options: str, checked: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "diary"), STRANGER, STRANGER, 0o600)
    m = mount("--view", f"{STRANGER}:{STRANGER}", "-o", f"{checked}{options}")
    for uid in (NOBODY, ALICE, STRANGER, MAX_ID):
        who = user(uid)
        assert who.error(os.listdir, m.path) == errno.EACCES, uid
        assert who.error(read, m.at("diary")) == errno.EACCES, uid
    assert user(0).do(read, m.at("diary")) == b"content"


def test_a_list_of_views_shows_nobody_those_of_strangers(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("--view", f"{STRANGER}:{STRANGER}", "--view", "1001:2001", "-o", MAP)
    assert user(NOBODY).do(names, m.path) == []
    assert user(NOBODY).error(os.stat, m.at(f"@{STRANGER}")) == errno.EACCES
    assert user(ALICE).do(names, m.path) == ["@1001"]
    assert user(0).do(names, m.path) == ["@1001", f"@{STRANGER}"]


# -- what the kernel decides alone -----------------------------------------------------------------


def fifo(path: str, uid: int, gid: int, permissions: int, access: bytes | None = None) -> None:
    os.mkfifo(path)
    os.chown(path, uid, gid)
    os.chmod(path, permissions)
    if access is not None:
        os.setxattr(path, ACCESS, access)


def test_the_kernel_takes_nobody_for_a_stranger(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """A FIFO is opened by the kernel alone, by what it is shown."""
    fifo(os.path.join(tree, "owner"), STRANGER, 2001, 0o600)
    fifo(os.path.join(tree, "group"), 1001, STRANGER, 0o060)
    fifo(os.path.join(tree, "user-acl"), 1001, 2001, 0o600, acl((USER, 6, STRANGER)))
    fifo(os.path.join(tree, "group-acl"), 1001, 2001, 0o600, acl((GROUP, 6, STRANGER)))
    m = mount("-o", f"default_permissions,{MAP}")
    for name in ("owner", "group", "user-acl", "group-acl"):
        for uid in (NOBODY, BOB, STRANGER, MAX_ID):
            if (name, uid) in (("owner", MAX_ID), ("group", MAX_ID)):
                continue  # by this number they are shown, and on this machine only root can take it
            who = user(uid, uid)
            assert who.error(opened, m.at(name), os.O_RDWR | os.O_NONBLOCK) == errno.EACCES, (name, uid)
    assert user(BOB).do(owner, m.at("owner"))[0] == MAX_ID
    assert user(BOB).do(owner, m.at("group"))[1] == MAX_ID
    # What an entry grants to a stranger is granted to nobody here.
    shown = user(BOB).do(os.getxattr, m.at("user-acl"), ACCESS)
    assert shown == acl((USER, 0, MAX_ID))
    # Who has a counterpart gets what it is granted.
    os.setxattr(m.real("user-acl"), ACCESS, acl((USER, 6, 1002)))
    user(BOB).do(opened, m.at("user-acl"), os.O_RDWR | os.O_NONBLOCK)
    user(ALICE).do(opened, m.at("group-acl"), os.O_RDWR | os.O_NONBLOCK)


def test_the_kernel_takes_nobody_for_whom_an_open_table_makes_nobody(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    fifo(os.path.join(tree, "fifo"), STRANGER, STRANGER, 0o600)
    fifo(os.path.join(tree, "of-root"), 0, 0, 0o600)
    m = mount("-o", "default_permissions,range_map=uid 1000 1999 squash -2 gid 1000 1999 squash -2,root_squash")
    for uid in (STRANGER, NOBODY):
        for name in ("fifo", "of-root"):
            assert user(uid).error(opened, m.at(name), os.O_RDWR | os.O_NONBLOCK) == errno.EACCES, (name, uid)
    assert user(7).do(owner, m.at("of-root")) == (0, 0)


# -- set-id programs -------------------------------------------------------------------------------


def program(path: str, uid: int, gid: int, permissions: int) -> str:
    """A copy of id(1), which says who runs it."""
    shutil.copy("/usr/bin/id", path)
    os.chown(path, uid, gid)
    os.chmod(path, permissions)
    return path


def runs_as(path: str, option: str = "-u") -> int:
    return int(subprocess.run([path, option], check=True, capture_output=True, text=True).stdout)


@CHECKED
def test_a_set_id_program_behind_a_squash_runs_as_who_runs_it(
    checked: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    program(os.path.join(tree, "squashed"), 517, 518, 0o6755)
    program(os.path.join(tree, "nobodys"), 65534, 65534, 0o6755)
    program(os.path.join(tree, "one"), 1001, 2001, 0o6755)
    m = mount(
        "-o",
        f"{checked}suid,range_map=uid 0 squash -2 uid 800 999 squash 517 uid {ALICE} map 1001 "
        "gid 800 999 squash 518 gid 12001 map 2001",
    )
    who = user(850, 850)
    for name in ("squashed", "nobodys"):
        assert who.do(mode, m.at(name)) == 0o755, name
        assert who.do(runs_as, m.at(name)) == 850, name
        assert who.do(runs_as, m.at(name), "-g") == 850, name
    # Whose owner is one client id, that is who runs it there.
    assert who.do(mode, m.at("one")) == 0o6755
    assert (who.do(runs_as, m.at("one")), who.do(runs_as, m.at("one"), "-g")) == (ALICE, 12001)


def test_who_is_let_into_a_fixed_view_plants_no_program_of_its_identity(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """Another user of the view, or of its clients, would run it as the identity."""
    program(os.path.join(tree, "other"), 1001, 2001, 0o6755)
    m = mount("-o", "suid,rw,views=3001:3002,view_access=850")
    entrant = user(850)
    entrant.do(shutil.copy, "/usr/bin/id", m.at("planted"))
    entrant.do(os.chmod, m.at("planted"), 0o6755)
    assert (mode(m.real("planted")), owner(m.real("planted"))) == (0o6755, (3001, 3002))
    own = user(3001, 3002)
    for who in (entrant, own):
        assert who.do(mode, m.at("planted")) == 0o755
        assert who.do(mode, m.at("other")) == 0o6755
        assert who.do(runs_as, m.at("planted")) == who.uid
    # Where nobody else is let in, they are the identity's own.
    m = mount("-o", "suid,rw,views=3001:3002")
    assert own.do(mode, m.at("planted")) == 0o6755


def test_a_program_of_nobodys_is_not_roots(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The paper's root squashing: what client root plants as nobody must not run as the client's root."""
    m = mount("-o", "suid,range_map=uid 0 squash -2 gid 0 squash -2")
    root = user(0)
    root.do(shutil.copy, "/usr/bin/id", m.at("planted"))
    root.do(os.chmod, m.at("planted"), 0o6755)
    assert owner(m.real("planted")) == (NOBODY, NOBODY)
    assert mode(m.real("planted")) == 0o6755
    who = user(500)
    assert who.do(owner, m.at("planted")) == (NOBODY, NOBODY)
    assert who.do(runs_as, m.at("planted")) == 500
    # All others are who they are.
    who.do(write, m.at("mine"), b"")
    assert owner(m.real("mine")) == (500, 500)


@CHECKED
def test_chmod_keeps_the_bits_that_are_not_shown(checked: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    path = program(os.path.join(tree, "tool"), 517, 5, 0o6755)
    m = mount("-o", f"{checked}suid,no_root_squash,range_map=uid 0 map 0 uid 800 999 squash 517 uid 1000 map 1000")
    who = user(0)
    assert who.do(mode, m.at("tool")) == 0o2755
    who.do(os.chmod, m.at("tool"), 0o2711)
    assert (mode(path), who.do(mode, m.at("tool"))) == (0o6711, 0o2711)
    who.do(os.chmod, m.at("tool"), 0o711)  # takes away what is shown
    assert (mode(path), who.do(mode, m.at("tool"))) == (0o4711, 0o711)
    who.do(os.chmod, m.at("tool"), 0o6711)  # asks for what is there, and for what is not
    assert (mode(path), who.do(mode, m.at("tool"))) == (0o6711, 0o2711)
    # Another owner does not inherit them.
    who.do(os.chown, m.at("tool"), 1000, -1)
    assert (mode(path), who.do(mode, m.at("tool"))) == (0o711, 0o711)
    assert stat.S_ISREG(os.stat(path).st_mode)


# -- groups ----------------------------------------------------------------------------------------


def test_a_group_that_really_is_nobodys_number(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 500, 500, 0o640)
    put(os.path.join(tree, "nogroup's"), 0, NOBODY, 0o640)
    m = mount()
    member = user(500, 500, [NOBODY])
    member.do(os.chown, m.at("file"), -1, NOBODY)
    assert owner(m.real("file")) == (500, NOBODY)
    assert member.do(read, m.at("nogroup's")) == b"content"
    assert user(501, 501).error(read, m.at("nogroup's")) == errno.EACCES
    # Who becomes nobody by a definition is granted nothing.
    squashed = mount("-o", "range_map=gid 7 squash -2")
    assert user(501, 501, [7]).error(read, squashed.at("nogroup's")) == errno.EACCES
    assert user(501, 501, [NOBODY]).do(read, squashed.at("nogroup's")) == b"content"
