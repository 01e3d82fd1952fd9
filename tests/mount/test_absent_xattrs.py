"""What the kernel asks for before every write, and ls(1) of every file: that there is none is answered as known.

ls(1) of coreutils 9.7 lists the attributes of each file instead.
"""

import errno
import os
import signal
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.agents import User, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.test_caching import requests

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

NAME = "security.capability"
CAPABILITY = struct.pack("<IIIII", 0x02000000, 1 << 7, 0, 0, 0)  # VFS_CAP_REVISION_2, cap_setuid permitted
NOBODY = 0xFFFFFFFF
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in ((1, 6, NOBODY), (2, 4, 3000), (4, 0, NOBODY), (0x10, 4, NOBODY), (0x20, 4, NOBODY))
)
VALUES = {NAME: CAPABILITY, "security.selinux": b"label", "system.posix_acl_access": ACL}
NONE = dict.fromkeys(VALUES, errno.ENODATA) | {"security.selinux": errno.EOPNOTSUPP}
"""What is said where there is none."""
OPTIONS = ("-o", "no_root_squash,cloak_list=uid +077 3000 3999")
ANN, BOB = 3001, 3002


def append(path: str, times: int = 1) -> None:
    """Write one byte at a time to the end; the kernel asks before each."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for _ in range(times):
        os.write(fd, b"x")
    os.close(fd)


def listed() -> list[str]:
    return subprocess.run(["ls", "-l"], capture_output=True, check=True, text=True).stdout.splitlines()


def has_capability(path: str) -> bool:
    return NAME in os.listxattr(path)


@pytest.fixture
def questions(base: str) -> Callable[..., int]:
    """Counts how often daemons that are started in the test read an attribute of a file."""
    path = os.path.join(base, "questions")
    Path(path).touch()
    os.chmod(path, 0o666)  # whoever the daemon acts as
    return lambda name=NAME: Path(path).read_text().splitlines().count(name)


@pytest.fixture
def home(tree: str) -> str:
    path = os.path.join(tree, "ann")
    os.mkdir(path, 0o700)
    os.chown(path, ANN, ANN)
    return path


def test_files_just_made_are_not_asked(
    base: str, home: str, mount: MakeMount, user: MakeUser, questions: Callable[..., int]
) -> None:
    with daemons_with(partial(alterations.note_xattrs_read, os.path.join(base, "questions"))):
        m, ann = mount(*OPTIONS), user(ANN)
        for number in range(5):
            ann.do(write, m.at("ann", f"{number}"), b"new")
        assert questions() == 0


@pytest.mark.parametrize("where", ["ann/file", "file"])
def test_files_that_were_there_are_asked_once(
    where: str, base: str, tree: str, home: str, mount: MakeMount, user: MakeUser, questions: Callable[..., int]
) -> None:
    path = os.path.join(tree, where)
    Path(path).touch()
    os.chown(path, ANN, ANN)
    with daemons_with(partial(alterations.note_xattrs_read, os.path.join(base, "questions"))):
        m, ann = mount(*OPTIONS), user(ANN)
        ann.do(os.stat, m.at(where))
        ann.do(append, m.at(where), 5)
        assert questions() == 1


@pytest.mark.parametrize("through", [False, True], ids=["behind the mount", "through the mount"])
def test_set_by_root(through: bool, mount: MakeMount, user: MakeUser) -> None:
    m, ann, root = mount(*OPTIONS), user(ANN), user(0)
    file, real = m.at("file"), m.real("file")
    ann.do(write, file, b"new")
    ann.do(os.open, file, os.O_RDONLY)  # so that the kernel keeps it, whatever it is made to forget
    for _ in range(3):
        assert ann.error(os.getxattr, file, NAME) == errno.ENODATA
        root.do(os.setxattr, file if through else real, NAME, CAPABILITY)
        if not through:
            told(m.path)
            ann.do(os.stat, file)  # so that its attributes are remembered again
        assert ann.do(os.getxattr, file, NAME) == os.getxattr(real, NAME)
        ann.do(append, file)
        assert not has_capability(real), "a write removes it"
        assert ann.error(os.getxattr, file, NAME) == errno.ENODATA
        root.do(os.setxattr, file if through else real, NAME, CAPABILITY)
        root.do(os.removexattr, file if through else real, NAME)


@pytest.mark.parametrize("where", ["ann", "all"])
def test_what_ls_asks_of_each_file_is_read_once(
    where: str, base: str, tree: str, home: str, mount: MakeMount, user: MakeUser, questions: Callable[..., int]
) -> None:
    os.mkdir(os.path.join(tree, "all"), 0o755)
    for name in ("ann", "all"):
        for number in range(3):
            path = Path(tree, name, f"{number}")
            path.touch()
            os.chown(path, ANN, ANN)
    with daemons_with(partial(alterations.note_xattrs_read, os.path.join(base, "questions"))):
        m, ann = mount(*OPTIONS), user(ANN)
        for _ in range(3):
            for number in range(3):
                file = m.at(where, f"{number}")
                ann.do(os.stat, file)
                assert {name: ann.error(os.getxattr, file, name) for name in VALUES} == NONE
        assert {name: questions(name) for name in VALUES} == dict.fromkeys(VALUES, 3)


@pytest.mark.usefixtures("figures_at_once")
@pytest.mark.parametrize(
    ("view", "each"),
    [((), 1), (("default_permissions",), 0), (("default_permissions", f"views={ANN}:{ANN}"), 0)],
    ids=["caller view", "the kernel checks", "fixed view"],
)
def test_ls_asks_for_one_label(view: tuple[str, ...], each: int, home: str, mount: MakeMount, user: MakeUser) -> None:
    """ls -l asks no further file for a label, and for each ACL only where the kernel cannot remember it.

    That of coreutils 9.7 lists what each file has, and asks for nothing.
    """
    for number in range(20):
        Path(home, f"{number}").touch()
        os.chown(os.path.join(home, f"{number}"), ANN, ANN)
    m, ann = mount("-o", ",".join((OPTIONS[1], *view))), user(ANN)
    ann.do(os.chdir, m.at("ann"))
    for _ in range(2):
        before = requests(m)
        assert len(ann.do(listed)) == 21
    asked = requests(m) - before
    assert asked["listxattr"] in (0, 20)
    if asked["listxattr"]:
        each = 0
    assert 20 * each <= asked["getxattr"] <= 20 * each + 4


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(
    ("where", "through"),
    [("ann/file", False), ("file", False), ("file", True)],
    ids=["private, behind the mount", "behind the mount", "through the mount"],
)
def test_what_is_set_is_shown(
    name: str, where: str, through: bool, home: str, mount: MakeMount, user: MakeUser
) -> None:
    m, ann, root = mount(*OPTIONS), user(ANN), user(0)
    file, real = m.at(where), m.real(where)
    ann.do(write, file, b"new")
    ann.do(os.open, file, os.O_RDONLY)  # so that the kernel keeps it, whatever it is made to forget
    for _ in range(3):
        assert {asked: ann.error(os.getxattr, file, asked) for asked in VALUES} == NONE
        root.do(os.setxattr, file if through else real, name, VALUES[name])
        told(m.path)
        ann.do(os.stat, file)  # so that its attributes are remembered again
        for asked in VALUES:
            if asked == name:
                assert ann.do(os.getxattr, file, asked) == os.getxattr(real, asked)
            else:
                assert ann.error(os.getxattr, file, asked) == NONE[asked]
        root.do(os.removexattr, real, name)
        told(m.path)


def test_set_by_root_at_another_place_of_the_mount(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The same file is an object of its own where its file system is mounted once more."""
    for name in ("a", "b"):
        os.mkdir(os.path.join(tree, name), 0o755)
    root, ann = user(0), user(ANN)
    os.chmod(os.path.join(tree, "a"), 0o777)
    subprocess.run(["mount", "--bind", os.path.join(tree, "a"), os.path.join(tree, "b")], check=True)
    try:
        m = mount(*OPTIONS)
        ann.do(write, m.at("a", "file"), b"new")
        for name in ("a", "b"):
            assert ann.error(os.getxattr, m.at(name, "file"), NAME) == errno.ENODATA
        root.do(os.setxattr, m.at("b", "file"), NAME, CAPABILITY)
        assert ann.do(os.getxattr, m.at("a", "file"), NAME) == os.getxattr(m.real("a", "file"), NAME)
    finally:
        subprocess.run(["umount", "-l", os.path.join(tree, "b")], check=True)


def test_a_write_removes_what_was_just_set_behind_the_mount(home: str, mount: MakeMount, user: MakeUser) -> None:
    """Whatever the kernel is told, the real file system removes it."""
    m, ann = mount(*OPTIONS), user(ANN)
    ann.do(write, m.at("ann", "file"), b"new")
    for _ in range(20):
        os.setxattr(m.real("ann", "file"), NAME, CAPABILITY)
        ann.do(append, m.at("ann", "file"))
        assert not has_capability(m.real("ann", "file"))


def test_lost_events(home: str, mount: MakeMount, user: MakeUser) -> None:
    """Whatever is known is void if it is not known what has changed."""
    m, ann = mount(*OPTIONS), user(ANN)
    ann.do(write, m.at("ann", "file"), b"new")
    ann.do(os.open, m.at("ann", "file"), os.O_RDONLY)
    assert ann.error(os.getxattr, m.at("ann", "file"), NAME) == errno.ENODATA
    most = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    os.kill(m.pid, signal.SIGSTOP)
    try:
        for number in range(most + 1):
            Path(m.real(f"{number}")).touch()
        os.setxattr(m.real("ann", "file"), NAME, CAPABILITY)
    finally:
        os.kill(m.pid, signal.SIGCONT)
    told(m.path)
    ann.do(os.stat, m.at("ann", "file"))
    assert ann.do(os.getxattr, m.at("ann", "file"), NAME) == os.getxattr(m.real("ann", "file"), NAME)


def open_as(uid: int, path: str) -> int:
    os.seteuid(uid)
    try:
        return os.open(path, os.O_RDONLY)
    finally:
        os.seteuid(0)


def test_who_may_not_see_the_file_learns_nothing(home: str, mount: MakeMount, user: MakeUser) -> None:
    """A descriptor that was handed on does not help: whoever uses it is asked for."""
    m, ann = mount(*OPTIONS), user(ANN)
    ann.do(write, m.at("ann", "file"), b"new")
    assert ann.error(os.getxattr, m.at("ann", "file"), NAME) == errno.ENODATA
    fd = open_as(ANN, m.at("ann", "file"))
    try:
        assert user(ANN).error(os.getxattr, fd, NAME) == errno.ENODATA
        assert user(BOB).error(os.getxattr, fd, NAME) == errno.ESTALE
    finally:
        os.close(fd)


@pytest.mark.parametrize("who", [0, ANN])
def test_only_a_write_of_the_unprivileged_removes_it(who: int, tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel also asks for its removal before a write. The file is theirs, and root is nobody special."""
    real = os.path.join(tree, "file")
    Path(real).touch()
    owner = who or 65534
    os.chown(real, owner, owner)
    m = mount("-o", "root_squash")
    os.setxattr(real, NAME, CAPABILITY)
    assert user(who).error(os.removexattr, m.at("file"), NAME) == errno.EPERM
    assert has_capability(real)
    user(who).do(append, m.at("file"))
    assert not has_capability(real)


# -- what smbd(8) reads of each file ------------------------------------------------------------------

OF_SAMBA = "user.DOSATTRIB"


def test_what_samba_reads_of_each_file_is_read_once(
    base: str, home: str, mount: MakeMount, user: MakeUser, questions: Callable[..., int]
) -> None:
    with daemons_with(partial(alterations.note_xattrs_read, os.path.join(base, "questions"))):
        m, ann = mount(*OPTIONS), user(ANN)
        for number in range(5):
            ann.do(write, m.at("ann", f"{number}"), b"new")
        for _ in range(3):
            for number in range(5):
                assert ann.error(os.getxattr, m.at("ann", f"{number}"), OF_SAMBA) == errno.ENODATA
                assert ann.error(os.getxattr, m.at("ann", f"{number}"), "system.posix_acl_default") == errno.ENODATA
        assert (questions(OF_SAMBA), questions("system.posix_acl_default")) == (5, 5)


@pytest.mark.parametrize("where", ["ann/file", "file"])
def test_what_samba_reads_is_for_those_who_may_read_the_file(
    where: str, home: str, mount: MakeMount, user: MakeUser
) -> None:
    m, ann, bob = mount(*OPTIONS), user(ANN), user(BOB)
    file, real = m.at(where), m.real(where)
    ann.do(write, file, b"new")

    def said(who: User, path: str) -> int:
        return who.error(os.getxattr, path, OF_SAMBA)

    for mode in (0o644, 0o200, 0o640, 0o000, 0o604, 0o244, 0o400):
        ann.do(os.chmod, file, mode)
        for _ in range(2):
            for who in (ann, bob):
                seen = said(who, file)
                if seen not in (errno.ENOENT, errno.ESTALE):  # hidden from Bob
                    assert seen == said(who, real), (oct(mode), who.uid)
    ann.do(os.chmod, file, 0o644)
    for _ in range(3):
        assert said(ann, file) == errno.ENODATA
        os.setxattr(real, OF_SAMBA, b"0x20")
        assert ann.do(os.getxattr, file, OF_SAMBA) == b"0x20", "though it was set just now"
        os.removexattr(real, OF_SAMBA)
        assert said(ann, file) == errno.ENODATA
        ann.do(os.setxattr, file, OF_SAMBA, b"0x10")
        assert ann.do(os.getxattr, file, OF_SAMBA) == b"0x10"
        ann.do(os.removexattr, file, OF_SAMBA)


# -- listed ------------------------------------------------------------------------------------------

CASES = {  # where, who asks, and whether root, which does not see what is private, sets something through the mount
    "private, behind the mount": ("ann/file", ANN, False),
    "behind the mount": ("file", ANN, False),
    "through the mount": ("file", ANN, True),
    "behind the mount, as root": ("file", 0, False),
    "through the mount, as root": ("file", 0, True),
}
VIEWS = [(), ("views=3001:3001",), ("default_permissions", "views=3001:3001")]
SHOWN = {"user.x": b"1", **VALUES}
"""What every user may list."""


@pytest.fixture
def lists(base: str) -> Callable[[], int]:
    """Counts how often daemons that are started in the test list the attributes of a file."""
    path = os.path.join(base, "lists")
    Path(path).touch()
    os.chmod(path, 0o666)
    return lambda: len(Path(path).read_text().splitlines())


def made(tree: str, *names: str) -> None:
    for name in names:
        path = os.path.join(tree, name)
        Path(path).touch()
        os.chown(path, ANN, ANN)


@pytest.mark.parametrize("view", VIEWS, ids=["caller view", "fixed view", "the kernel checks"])
def test_a_file_without_attributes_is_listed_once(
    view: tuple[str, ...],
    base: str,
    tree: str,
    home: str,
    mount: MakeMount,
    user: MakeUser,
    lists: Callable[[], int],
) -> None:
    made(tree, *(f"ann/{number}" for number in range(3)))
    with daemons_with(partial(alterations.note_xattrs_listed, os.path.join(base, "lists"))):
        m, ann = mount("-o", ",".join((OPTIONS[1], *view))), user(ANN)
        for _ in range(3):
            for number in range(3):
                file = m.at("ann", f"{number}")
                ann.do(os.stat, file)
                assert ann.do(os.listxattr, file) == []
        assert lists() == 3


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize(("where", "uid", "through"), CASES.values(), ids=CASES)
def test_what_is_set_is_listed_at_once(
    where: str, uid: int, through: bool, name: str, tree: str, home: str, mount: MakeMount, user: MakeUser
) -> None:
    """A program that copies attributes must not miss one, whoever waits for the report of the change."""
    made(tree, where)
    m, who, root = mount(*OPTIONS), user(uid), user(0)
    file, real = m.at(where), m.real(where)
    for _ in range(3):
        for _ in range(2):
            who.do(os.stat, file)
            assert who.do(os.listxattr, file) == []
        root.do(os.setxattr, file if through else real, name, SHOWN[name])
        assert who.do(os.listxattr, file) == [name]
        who.do(os.stat, file)
        assert who.do(os.listxattr, file) == [name]
        root.do(os.removexattr, real, name)


@pytest.mark.parametrize("through", [False, True], ids=["behind the mount", "through the mount"])
def test_what_is_set_by_another_name_is_listed_at_once(
    through: bool, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    os.mkdir(os.path.join(tree, "directory"), 0o755)
    made(tree, "directory/file")
    os.link(os.path.join(tree, "directory/file"), os.path.join(tree, "link"))
    m, ann, root = mount(*OPTIONS), user(ANN), user(0)
    names = ("directory/file", "link")
    for set_by, asked_by in (names, names[::-1]):
        for _ in range(2):
            for name in names:
                ann.do(os.stat, m.at(name))
                assert ann.do(os.listxattr, m.at(name)) == []
        root.do(os.setxattr, m.at(set_by) if through else m.real(set_by), "user.x", b"1")
        for name in (asked_by, set_by):
            assert ann.do(os.listxattr, m.at(name)) == ["user.x"]
        root.do(os.removexattr, m.at(set_by) if through else m.real(set_by), "user.x")


@pytest.mark.parametrize("through", [False, True], ids=["behind the mount", "through the mount"])
def test_what_is_set_at_another_place_of_the_tree_is_listed_at_once(
    through: bool, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """The same file is an object of its own where its file system is mounted once more."""
    for name in ("a", "b"):
        os.mkdir(os.path.join(tree, name), 0o755)
    made(tree, "a/file")
    subprocess.run(["mount", "--bind", os.path.join(tree, "a"), os.path.join(tree, "b")], check=True)
    try:
        m, root, ann = mount(*OPTIONS), user(0), user(ANN)
        for _ in range(2):
            for name in ("a", "b"):
                ann.do(os.stat, m.at(name, "file"))
                assert ann.do(os.listxattr, m.at(name, "file")) == []
        root.do(os.setxattr, m.at("b", "file") if through else m.real("b", "file"), "user.x", b"1")
        for name in ("a", "b"):
            assert ann.do(os.listxattr, m.at(name, "file")) == ["user.x"]
    finally:
        subprocess.run(["umount", "-l", os.path.join(tree, "b")], check=True)


def test_what_root_alone_may_list_is_listed_for_root(tree: str, home: str, mount: MakeMount, user: MakeUser) -> None:
    """That others are shown nothing says nothing about what root is shown."""
    made(tree, "file")
    m, ann, root = mount(*OPTIONS), user(ANN), user(0)
    os.setxattr(m.real("file"), "trusted.x", b"1")
    for _ in range(2):
        for who, names in ((ann, []), (root, ["trusted.x"])):
            who.do(os.stat, m.at("file"))
            assert who.do(os.listxattr, m.at("file")) == names
    os.removexattr(m.real("file"), "trusted.x")
    for _ in range(2):
        root.do(os.stat, m.at("file"))
        assert root.do(os.listxattr, m.at("file")) == []
    os.setxattr(m.real("file"), "trusted.x", b"1")
    assert root.do(os.listxattr, m.at("file")) == ["trusted.x"]


def test_a_new_file_has_what_it_inherits(tree: str, mount: MakeMount, user: MakeUser) -> None:
    os.chmod(tree, 0o777)
    m, ann = mount(*OPTIONS), user(ANN)
    ann.do(os.mkdir, m.at("directory"))
    ann.do(os.setxattr, m.at("directory"), "system.posix_acl_default", ACL)
    ann.do(write, m.at("directory", "file"), b"new")
    for _ in range(2):
        assert ann.do(os.listxattr, m.at("directory", "file")) == ["system.posix_acl_access"]


def test_who_may_not_see_the_file_is_told_no_names(home: str, mount: MakeMount, user: MakeUser) -> None:
    m, ann = mount(*OPTIONS), user(ANN)
    ann.do(write, m.at("ann", "file"), b"new")
    assert ann.do(os.listxattr, m.at("ann", "file")) == []
    fd = open_as(ANN, m.at("ann", "file"))
    try:
        assert user(ANN).do(os.listxattr, fd) == []
        assert user(BOB).error(os.listxattr, fd) == errno.ESTALE
    finally:
        os.close(fd)
