"""What hidden means: every way to reach a hidden object, tried by real uids through a real mount.

`OWNER` owns what the cloak list hides from everybody else; all others get the same answers, root included.
"""

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cloakfs import linux
from tests.agents import User, become, names, read, write
from tests.mount.conftest import Mount, told
from tests.waiting import wait_until

OWNER, STRANGER, OTHER = 5001, 6001, 7001
OPTIONS = "no_root_squash,suid,cloak_list=uid +000 5001 5009"
AT_FDCWD = -100

Call = Callable[..., object]
MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


# -- what users do: functions of their processes ---------------------------------------------------


def opened(path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> None:
    os.close(os.open(path, flags, mode))


def execute(path: str) -> None:
    subprocess.run([path], check=True, capture_output=True, close_fds=False)


def rename(old: str, new: str, flags: int) -> None:
    linux.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def handle_of(path: str) -> bytes:
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        return linux.name_to_handle(fd)[0]
    finally:
        os.close(fd)


def open_handle(mountpoint: str, handle: bytes, flags: int = os.O_PATH) -> int:
    mount_fd = os.open(mountpoint, os.O_RDONLY)
    try:
        return linux.open_by_handle(mount_fd, handle, flags)
    finally:
        os.close(mount_fd)


def of_fd(fd: int) -> str:
    """The path by which a process reaches what it has a descriptor of."""
    return f"/proc/self/fd/{fd}"


def act_as(uid: int) -> None:
    """For a User started as root: act as somebody, and be root again after `act_as(0)`."""
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)


# -- the scene -------------------------------------------------------------------------------------


def put(path: str, owner: int, mode: int, content: bytes | None = b"content") -> str:
    """Make a file, or with content None a directory, on the real tree."""
    if content is None:
        os.mkdir(path)
    else:
        write(path, content)
    os.chown(path, owner, owner)
    os.chmod(path, mode)
    return path


@pytest.fixture
def scene(tree: str) -> str:
    """Hidden from all but OWNER: secret, program, pointer, vault and all below, empty. Visible: plain, box, open."""
    at = Path(tree)
    put(str(at / "secret"), OWNER, 0o666)
    put(str(at / "program"), OWNER, 0o777, read("/bin/true"))
    os.setxattr(at / "secret", "user.note", b"x")
    os.symlink("plain", at / "pointer")
    os.lchown(at / "pointer", OWNER, OWNER)
    put(str(at / "empty"), OWNER, 0o777, None)
    put(str(at / "vault"), OWNER, 0o777, None)
    put(str(at / "vault" / "inner"), STRANGER, 0o666)
    put(str(at / "vault" / "deep"), STRANGER, 0o777, None)
    put(str(at / "vault" / "deep" / "leaf"), STRANGER, 0o666)
    put(str(at / "plain"), OTHER, 0o666)
    put(str(at / "box"), OTHER, 0o777, None)
    put(str(at / "box" / "secret"), OWNER, 0o666)
    put(str(at / "open"), OTHER, 0o777, None)
    return tree


@pytest.fixture
def mount(request: pytest.FixtureRequest, mount: MakeMount) -> MakeMount:
    """Mounts of a file system of this machine, or ("far") of one behind another daemon, which is asked from threads."""
    if getattr(request, "param", "local") == "local":
        return mount

    def make(*arguments: str) -> Mount:
        return mount(*arguments, source=mount("-o", "no_root_squash,suid").path)

    return make


local_and_far = pytest.mark.parametrize("mount", ["local", "far"], indirect=True)

VISIBLE = ["box", "open", "plain"]
ALL = sorted(["secret", "program", "pointer", "empty", "vault", *VISIBLE])


# -- by name ---------------------------------------------------------------------------------------

BY_NAME: dict[str, tuple[str, Call, tuple[Any, ...]]] = {
    "stat": ("secret", os.stat, ()),
    "lstat": ("pointer", os.lstat, ()),
    "stat-directory": ("vault", os.stat, ()),
    "open": ("secret", opened, ()),
    "open-write": ("secret", opened, (os.O_WRONLY,)),
    "open-truncate": ("secret", opened, (os.O_WRONLY | os.O_TRUNC,)),
    "open-path": ("secret", opened, (os.O_PATH,)),
    "open-directory": ("vault", opened, (os.O_DIRECTORY,)),
    "list": ("vault", os.listdir, ()),
    "chdir": ("vault", os.chdir, ()),
    "exec": ("program", execute, ()),
    "readlink": ("pointer", os.readlink, ()),
    "access": ("secret", os.stat, ()),
    "getxattr": ("secret", os.getxattr, ("user.note",)),
    "listxattr": ("secret", os.listxattr, ()),
    "setxattr": ("secret", os.setxattr, ("user.note", b"y")),
    "removexattr": ("secret", os.removexattr, ("user.note",)),
    "chmod": ("secret", os.chmod, (0o600,)),
    "chown": ("secret", os.chown, (OWNER, OWNER)),
    "lchown": ("pointer", os.lchown, (OWNER, OWNER)),
    "truncate": ("secret", os.truncate, (1,)),
    "utimens": ("secret", os.utime, ()),
    "unlink": ("secret", os.unlink, ()),
    "rmdir": ("empty", os.rmdir, ()),
    "below": ("vault/inner", os.stat, ()),
    "far-below": ("vault/deep/leaf", opened, ()),
    "make-below": ("vault/new", os.mkdir, ()),
    "unlink-below": ("vault/inner", os.unlink, ()),
    "handle": ("secret", handle_of, ()),
}


@local_and_far
@pytest.mark.parametrize("what", BY_NAME)
def test_by_name_it_is_absent(what: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    name, call, args = BY_NAME[what]
    m = mount("-o", OPTIONS)
    before = snapshot(scene)
    for refused in (user(STRANGER), user(OTHER), user(0)):
        assert refused.error(call, m.at(name), *args) == errno.ENOENT, refused.uid
    assert snapshot(scene) == before
    assert user(OWNER).error(call, m.at(name), *args) == 0


@local_and_far
@pytest.mark.parametrize("what", ["rename", "exchange", "noreplace", "link"])
def test_moving_and_linking_from_a_hidden_name(what: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    before = snapshot(scene)
    calls: dict[str, tuple[Call, str, str, tuple[int, ...]]] = {
        "rename": (os.rename, "secret", "open/new", ()),
        "exchange": (rename, "secret", "plain", (linux.RENAME_EXCHANGE,)),
        "noreplace": (rename, "vault", "open/new", (linux.RENAME_NOREPLACE,)),
        "link": (os.link, "secret", "open/new", ()),
    }
    call, old, new, flags = calls[what]
    for refused in (user(STRANGER), user(0)):
        assert refused.error(call, m.at(old), m.at(new), *flags) == errno.ENOENT
    assert snapshot(scene) == before
    assert user(OWNER).error(call, m.at(old), m.at(new), *flags) == 0


def snapshot(real: str) -> dict[str, tuple[int, ...]]:
    """What must not have changed where a refused caller tried something."""
    found: dict[str, tuple[int, ...]] = {}
    for path, directories, files in os.walk(real):
        for name in directories + files:
            info = os.lstat(os.path.join(path, name))
            where = os.path.relpath(os.path.join(path, name), real)
            size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
            # ctime tells of every change of the inode.
            ctime = 0 if stat.S_ISDIR(info.st_mode) else info.st_ctime_ns
            found[where] = info.st_ino, info.st_mode, info.st_uid, info.st_gid, size, ctime
    return found


# -- listings --------------------------------------------------------------------------------------


def agree(path: str) -> list[str]:
    """The names of a directory, all of which lookup must find as readdir told."""
    listed = []
    with os.scandir(path) as entries:
        for entry in entries:
            assert entry.inode() == os.lstat(entry.path).st_ino
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(os.lstat(entry.path).st_mode)
            listed.append(entry.name)
    return sorted(listed)


@local_and_far
def test_it_is_missing_from_listings(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    assert user(OWNER).do(agree, m.path) == ALL
    for uid in (STRANGER, OTHER, 0):
        refused = user(uid)
        assert refused.do(agree, m.path) == VISIBLE
        assert refused.do(names, m.at("box")) == []
        for name in set(ALL) - set(VISIBLE):
            assert refused.error(os.lstat, m.at(name)) == errno.ENOENT


@local_and_far
def test_long_listings_agree_with_lookups(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Many batches of READDIR, in which most entries or whole batches are hidden."""
    for number in range(1000):
        owner = OWNER if number % 7 and not 600 < number < 650 else OTHER
        put(os.path.join(tree, f"{number:04}-{'long-' * 10}"), owner, 0o644, b"")
    m = mount("-o", OPTIONS)
    expected = {name for name in os.listdir(tree) if os.stat(os.path.join(tree, name)).st_uid != OWNER}
    assert len(expected) > 150
    stranger = user(STRANGER)
    listed = stranger.do(agree, m.path)
    assert len(listed) == len(set(listed))
    assert set(listed) == expected
    assert len(user(OWNER).do(agree, m.path)) == 1000


# -- by handle -------------------------------------------------------------------------------------

BY_HANDLE: dict[str, tuple[str, Call, tuple[Any, ...]]] = {
    "stat": ("secret", os.stat, ()),
    "stat-directory": ("vault", os.stat, ()),
    "open": ("secret", opened, ()),
    "open-truncate": ("secret", opened, (os.O_WRONLY | os.O_TRUNC,)),
    "list": ("vault", os.listdir, ()),
    "chdir": ("vault", os.chdir, ()),
    "exec": ("program", execute, ()),
    "getxattr": ("secret", os.getxattr, ("user.note",)),
    "listxattr": ("secret", os.listxattr, ()),
    "setxattr": ("secret", os.setxattr, ("user.note", b"y")),
    "removexattr": ("secret", os.removexattr, ("user.note",)),
    "chmod": ("secret", os.chmod, (0o600,)),
    "chown": ("secret", os.chown, (OWNER, OWNER)),
    "truncate": ("secret", os.truncate, (1,)),
    "utimens": ("secret", os.utime, ()),
    "stat-below": ("vault/inner", os.stat, ()),
    "open-below": ("vault/inner", opened, ()),
    "list-far-below": ("vault/deep", os.listdir, ()),
    "open-far-below": ("vault/deep/leaf", opened, ()),
}


@pytest.mark.parametrize("what", BY_HANDLE)
def test_by_handle_it_is_stale(what: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    name, call, args = BY_HANDLE[what]
    m = mount("-o", OPTIONS)
    handle = user(OWNER).do(handle_of, m.at(name))
    before = snapshot(scene)
    for way in ("handle", "inherited"):
        for uid in (STRANGER, OTHER, 0):
            refused, fd = reached(m, user, name, handle, way)
            refused.do(become, uid, uid, [])
            told()
            # The kernel may remember attributes for the owner until it has to ask on behalf of somebody else.
            assert refused.error(os.listxattr, of_fd(fd)) == errno.ESTALE, (way, uid)
            assert refused.error(call, of_fd(fd), *args) == errno.ESTALE, (way, uid)
            assert refused.error(os.stat, fd) == errno.ESTALE
    assert snapshot(scene) == before
    permitted, fd = reached(m, user, name, handle, "handle")
    permitted.do(become, OWNER, OWNER, [])
    assert permitted.error(call, of_fd(fd), *args) == 0


def reached(m: Mount, user: MakeUser, name: str, handle: bytes, way: str) -> tuple[User, int]:
    """A user, still root, who has a descriptor of a hidden object."""
    who = user(0)
    if way == "handle":
        return who, who.do(open_handle, m.path, handle)
    who.do(act_as, OWNER)
    fd = who.do(os.open, m.at(name), os.O_PATH | os.O_NOFOLLOW)
    who.do(act_as, 0)
    return who, fd


def readlink_fd(fd: int) -> str:
    return os.readlink(b"", dir_fd=fd).decode()


def test_readlink_by_handle(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    handle = user(OWNER).do(handle_of, m.at("pointer"))
    for uid, expected in ((STRANGER, errno.ESTALE), (0, errno.ESTALE), (OWNER, 0)):
        who, fd = reached(m, user, "pointer", handle, "handle")
        who.do(become, uid, uid, [])
        assert who.error(readlink_fd, fd) == expected


def test_opening_the_handle_itself(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Not only what is done with it later: open_by_handle_at(2) for reading."""
    m = mount("-o", OPTIONS)
    for name in ("secret", "vault", "vault/deep/leaf"):
        handle = user(OWNER).do(handle_of, m.at(name))
        assert user(0).error(open_handle, m.path, handle, os.O_RDONLY) == errno.ESTALE
    visible = user(OWNER).do(handle_of, m.at("plain"))
    assert user(0).error(open_handle, m.path, visible, os.O_RDONLY) == 0


def link_in(name: str, fd: int) -> None:
    os.link(name, "new", dst_dir_fd=fd)


def rename_out(fd: int, name: str, to: str) -> None:
    os.rename(name, to, src_dir_fd=fd)


def rename_into(old: str, fd: int) -> None:
    os.rename(old, "new", dst_dir_fd=fd)


@local_and_far
@pytest.mark.parametrize("directory", ["vault", "vault/deep"])
def test_an_inherited_directory_gives_nothing(directory: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    refused = user(0)
    refused.do(act_as, OWNER)
    fd = refused.do(os.open, m.at(directory), os.O_RDONLY | os.O_DIRECTORY)
    assert refused.do(names, fd) == sorted(os.listdir(m.real(directory)))
    refused.do(os.chdir, m.at(directory))
    refused.do(act_as, 0)
    refused.do(become, STRANGER, STRANGER, [])
    before = snapshot(scene)
    inside = os.listdir(m.real(directory))[0]
    requests: list[tuple[Call, tuple[Any, ...], dict[str, Any]]] = [
        (os.listdir, (fd,), {}),
        (os.listdir, (".",), {}),
        (os.stat, (fd,), {}),
        (os.stat, (".",), {}),
        (os.stat, (inside,), {}),
        (os.stat, (inside,), {"dir_fd": fd}),
        (os.open, (inside, os.O_RDONLY), {"dir_fd": fd}),
        (os.open, ("new", os.O_RDWR | os.O_CREAT), {"dir_fd": fd}),
        (os.mkdir, ("new",), {"dir_fd": fd}),
        (os.mkfifo, ("new",), {"dir_fd": fd}),
        (os.symlink, ("x", "new"), {"dir_fd": fd}),
        (link_in, (m.at("plain"), fd), {}),
        (os.unlink, (inside,), {"dir_fd": fd}),
        (os.rmdir, (inside,), {"dir_fd": fd}),
        (rename_out, (fd, inside, m.at("open/new")), {}),
        (rename_into, (m.at("plain"), fd), {}),
    ]
    for call, args, kwargs in requests:
        assert refused.error(call, *args, **kwargs) == errno.ESTALE, (call, args)
    assert snapshot(scene) == before


def test_a_listing_begun_by_the_owner_is_not_continued(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The reader counts, not the one who opened the directory."""
    for number in range(40):
        put(os.path.join(tree, f"hidden-{number}"), OWNER, 0o644, b"")
    put(os.path.join(tree, "plain"), OTHER, 0o644)
    m = mount("-o", OPTIONS)
    who = user(0)
    who.do(act_as, OWNER)
    fd = who.do(os.open, m.path, os.O_RDONLY)
    who.do(act_as, 0)
    who.do(become, STRANGER, STRANGER, [])
    assert who.do(names, fd) == ["plain"]


# -- creating over a hidden name -------------------------------------------------------------------

OVER: dict[str, tuple[int, Callable[[Mount, str], tuple[Any, ...]]]] = {
    "mkdir": (errno.EEXIST, lambda m, name: (os.mkdir, m.at(name))),
    "mknod": (errno.EEXIST, lambda m, name: (os.mknod, m.at(name), stat.S_IFREG | 0o600)),
    "mkfifo": (errno.EEXIST, lambda m, name: (os.mkfifo, m.at(name))),
    "symlink": (errno.EEXIST, lambda m, name: (os.symlink, "x", m.at(name))),
    "link": (errno.EEXIST, lambda m, name: (os.link, m.at("mine"), m.at(name))),
    "exclusive": (errno.EEXIST, lambda m, name: (opened, m.at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL)),
    "noreplace": (errno.EEXIST, lambda m, name: (rename, m.at("mine"), m.at(name), linux.RENAME_NOREPLACE)),
    "noreplace-directory": (errno.EEXIST, lambda m, name: (rename, m.at("mydir"), m.at(name), linux.RENAME_NOREPLACE)),
    "create": (errno.EACCES, lambda m, name: (opened, m.at(name), os.O_WRONLY | os.O_CREAT)),
    "create-read": (errno.EACCES, lambda m, name: (opened, m.at(name), os.O_RDONLY | os.O_CREAT)),
    "truncate": (errno.EACCES, lambda m, name: (opened, m.at(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
    "append": (errno.EACCES, lambda m, name: (opened, m.at(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)),
    "rename": (errno.EACCES, lambda m, name: (os.rename, m.at("mine"), m.at(name))),
    "rename-directory": (errno.EACCES, lambda m, name: (os.rename, m.at("mydir"), m.at(name))),
    "exchange": (errno.ENOENT, lambda m, name: (rename, m.at("mine"), m.at(name), linux.RENAME_EXCHANGE)),
}


@local_and_far
@pytest.mark.parametrize("what", OVER)
def test_creating_over_a_hidden_name(what: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    expected, request = OVER[what]
    put(os.path.join(scene, "mine"), STRANGER, 0o666)
    put(os.path.join(scene, "mydir"), STRANGER, 0o777, None)
    m = mount("-o", OPTIONS)
    before = snapshot(scene)
    for refused in (user(STRANGER), user(0)):
        for name in ("secret", "empty", "vault", "pointer"):
            assert refused.error(*request(m, name)) == expected, (refused.uid, name)
            assert refused.error(os.lstat, m.at(name)) == errno.ENOENT
    assert snapshot(scene) == before
    assert read(os.path.join(scene, "secret")) == b"content"


def test_creating_over_a_name_that_the_kernel_knows(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """The owner uses the file meanwhile, so that the kernel has a positive dentry for the stranger to stumble on."""
    m = mount("-o", OPTIONS)
    owner, stranger = user(OWNER), user(STRANGER)
    fd = owner.do(os.open, m.at("secret"), os.O_RDWR)
    before = snapshot(scene)
    for _ in range(20):
        owner.do(os.stat, m.at("secret"))
        assert stranger.error(opened, m.at("secret"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) == errno.EACCES
        assert stranger.error(opened, m.at("secret"), os.O_WRONLY | os.O_TRUNC) == errno.ENOENT
    assert snapshot(scene) == before
    assert owner.do(os.pread, fd, 100, 0) == b"content"


@local_and_far
def test_exchange_with_a_hidden_one_moves_nothing(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    before = snapshot(scene)
    other = user(OTHER)
    for pair in (("plain", "secret"), ("secret", "plain"), ("box", "vault"), ("vault", "box")):
        assert other.error(rename, m.at(pair[0]), m.at(pair[1]), linux.RENAME_EXCHANGE) == errno.ENOENT
    assert snapshot(scene) == before


def test_rmdir_with_only_hidden_entries(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    other = user(OTHER)
    assert other.do(names, m.at("box")) == []
    assert other.error(os.rmdir, m.at("box")) == errno.ENOTEMPTY
    assert other.error(os.rename, m.at("open"), m.at("box")) == errno.ENOTEMPTY
    assert other.do(names, m.at("box")) == []
    user(OWNER).do(os.unlink, m.at("box/secret"))
    assert other.error(os.rmdir, m.at("box")) == 0


# -- link counts -----------------------------------------------------------------------------------


def test_directories_report_one_link(scene: str, mount: MakeMount, user: MakeUser) -> None:
    for name in ("a", "b"):
        put(os.path.join(scene, "open", name), OWNER, 0o755, None)
    m = mount("-o", OPTIONS)
    for uid in (OWNER, STRANGER, 0):
        who = user(uid)
        assert {who.do(os.stat, path).st_nlink for path in (m.path, m.at("open"), m.at("box"))} == {1}
        assert who.do(os.stat, m.at("plain")).st_nlink == 1
    n = mount("-o", "no_root_squash")  # nothing to give away
    assert user(STRANGER).do(os.stat, n.at("open")).st_nlink == 4


# -- what becomes hidden ---------------------------------------------------------------------------


def hide_by_chown(m: Mount) -> None:
    os.chown(m.real("plain"), OWNER, OWNER)
    told()


def hide_by_moving(m: Mount) -> None:
    os.rename(m.real("plain"), m.real("vault/plain"))
    told()


def hide_the_directory(m: Mount) -> None:
    os.chown(m.real("box"), OWNER, OWNER)
    told()


def move_the_directory(m: Mount) -> None:
    os.rename(m.real("box"), m.real("vault/box"))
    told()


def move_out(m: Mount) -> None:
    os.rename(m.real("box"), os.path.join(os.path.dirname(m.source), "outside"))
    told()


@pytest.mark.parametrize(
    ("name", "hide"),
    [
        ("plain", hide_by_chown),
        ("plain", hide_by_moving),
        ("box/file", hide_the_directory),
        ("box/file", move_the_directory),
        ("box/file", move_out),
        ("box/sub/file", move_the_directory),
        ("box/sub/file", move_out),
    ],
)
def test_a_handle_stops_when_the_file_is_hidden(
    name: str, hide: Callable[[Mount], None], scene: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(scene, "box/file"), STRANGER, 0o666)
    put(os.path.join(scene, "box/sub"), STRANGER, 0o777, None)
    put(os.path.join(scene, "box/sub/file"), STRANGER, 0o666)
    m = mount("-o", OPTIONS)
    who = user(0)
    by_handle = who.do(open_handle, m.path, who.do(handle_of, m.at(name)))
    who.do(become, STRANGER, STRANGER, [])
    data = who.do(os.open, m.at(name), os.O_RDWR)
    assert who.error(os.stat, of_fd(by_handle)) == 0
    hide(m)
    assert who.error(opened, of_fd(by_handle)) == errno.ESTALE
    assert who.error(os.stat, m.at(name)) == errno.ENOENT
    # What is open stays so, until it is closed.
    assert who.do(os.pread, data, 100, 0) == b"content"
    assert who.do(os.pwrite, data, b"C", 0) == 1
    assert who.do(os.fstat, data).st_size == 7
    # The kernel reads this before it writes, as the writer.
    assert who.error(os.getxattr, data, "security.capability") == errno.ENODATA
    who.do(os.close, data)
    wait_until(lambda: who.error(os.stat, of_fd(by_handle)) == errno.ESTALE)


def test_a_handle_stops_after_chmod(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), OWNER, 0o644)
    m = mount("-o", "no_root_squash,cloak_list=uid +004 5001")
    stranger, owner = user(STRANGER), user(OWNER)
    path = stranger.do(os.open, m.at("file"), os.O_PATH)
    data = stranger.do(os.open, m.at("file"), os.O_RDONLY)
    owner.do(os.chmod, m.at("file"), 0o640)
    assert stranger.error(opened, of_fd(path)) == errno.ESTALE
    assert stranger.error(os.stat, m.at("file")) == errno.ENOENT
    assert stranger.do(os.pread, data, 100, 0) == b"content"
    stranger.do(os.close, data)
    wait_until(lambda: stranger.error(os.stat, path) == errno.ESTALE)
    owner.do(os.chmod, m.at("file"), 0o604)  # and works again when it is shown again
    assert stranger.do(os.stat, path).st_mode == stat.S_IFREG | 0o604


def test_a_handle_stops_after_a_reload(scene: str, base: str, mount: MakeMount, user: MakeUser) -> None:
    config = os.path.join(base, "test.exports")
    entry = f"{scene} *(rw,no_root_squash,cloak_list=uid +000 %d)\n"
    Path(config).write_text(entry % OWNER)
    m = mount("--exports", config)
    stranger = user(STRANGER)
    path = stranger.do(os.open, m.at("plain"), os.O_PATH)
    data = stranger.do(os.open, m.at("plain"), os.O_RDONLY)
    assert stranger.error(os.stat, path) == 0
    Path(config).write_text(entry % OTHER)
    os.kill(m.pid, 1)
    wait_until(lambda: stranger.error(os.stat, m.at("plain")) == errno.ENOENT)
    assert stranger.error(opened, of_fd(path)) == errno.ESTALE
    assert stranger.do(os.pread, data, 100, 0) == b"content"
    assert stranger.error(os.stat, m.at("secret")) == 0


def test_a_directory_moved_below_a_hidden_one(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """By name and from within: whoever stands in it stands nowhere, its owner included."""
    put(os.path.join(scene, "open/mine"), STRANGER, 0o777, None)
    put(os.path.join(scene, "open/mine/file"), STRANGER, 0o666)
    m = mount("-o", OPTIONS)
    stranger = user(STRANGER)
    stranger.do(os.chdir, m.at("open/mine"))
    assert stranger.do(names, ".") == ["file"]
    os.rename(m.real("open/mine"), m.real("vault/mine"))
    told()
    requests: list[tuple[Call, str]] = [(os.listdir, "."), (os.stat, "file"), (os.stat, "."), (os.mkdir, "new")]
    for call, name in requests:
        assert stranger.error(call, name) == errno.ESTALE
    assert stranger.error(os.stat, m.at("open/mine")) == errno.ENOENT
    assert stranger.error(os.stat, m.at("vault/mine/file")) == errno.ENOENT
    assert user(OWNER).do(names, m.at("vault/mine")) == ["file"]
    os.rename(m.real("vault/mine"), m.real("box/mine"))
    told()
    assert stranger.do(names, m.at("box/mine")) == ["file"]
    assert stranger.do(names, ".") == ["file"]


# -- hard links ------------------------------------------------------------------------------------


def test_a_visible_and_a_hidden_place(scene: str, mount: MakeMount, user: MakeUser) -> None:
    os.link(os.path.join(scene, "plain"), os.path.join(scene, "vault", "twin"))
    m = mount("-o", OPTIONS)
    owner, root = user(OWNER), user(0)
    handle = owner.do(handle_of, m.at("vault/twin"))  # met by its hidden name first
    fd = root.do(open_handle, m.path, handle)
    assert root.error(os.stat, m.at("vault/twin")) == errno.ENOENT
    assert root.do(os.stat, m.at("plain")).st_nlink == 2
    root.do(become, STRANGER, STRANGER, [])
    assert root.do(os.stat, of_fd(fd)).st_nlink == 2  # visible by one of its names
    owner.do(os.stat, m.at("vault/twin"))
    assert root.do(read, of_fd(fd)) == b"content"
    os.unlink(m.real("plain"))
    told()
    assert root.error(os.stat, of_fd(fd)) == errno.ESTALE
    assert root.error(read, of_fd(fd)) == errno.ESTALE
    assert owner.do(os.stat, m.at("vault/twin")).st_nlink == 1


def test_the_visible_place_of_two_comes_and_goes(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    os.link(m.real("plain"), m.real("vault/twin"))
    owner, other = user(OWNER), user(OTHER)
    fd = other.do(os.open, m.at("plain"), os.O_PATH)
    owner.do(os.stat, m.at("vault/twin"))
    for _ in range(3):
        other.do(os.rename, m.at("plain"), m.at("open/plain"))
        assert other.error(os.stat, fd) == 0
        owner.do(os.rename, m.at("open/plain"), m.at("vault/plain"))
        assert other.error(os.stat, fd) == errno.ESTALE
        owner.do(os.rename, m.at("vault/plain"), m.at("plain"))
        assert other.error(os.stat, fd) == 0


# -- the permitted caller does not suffer ----------------------------------------------------------


def refuse_by_name(m: Mount, refused: User) -> None:
    assert refused.error(os.stat, m.at("vault")) == errno.ENOENT


def refuse_below(m: Mount, refused: User) -> None:
    assert refused.error(os.stat, m.at("vault/deep")) == errno.ENOENT


def refuse_creation(m: Mount, refused: User) -> None:
    assert refused.error(os.mkdir, m.at("vault")) == errno.EEXIST
    assert refused.error(os.rmdir, m.at("vault")) == errno.ENOENT


@pytest.mark.parametrize("place", ["vault", "vault/deep"])
@pytest.mark.parametrize("refuse", [refuse_by_name, refuse_below, refuse_creation])
def test_getcwd_survives(
    refuse: Callable[[Mount, User], None], place: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", OPTIONS)
    owner, stranger = user(OWNER), user(STRANGER)
    owner.do(os.chdir, m.at(place))
    refuse(m, stranger)
    wait_until(lambda: owner.error(os.getcwd) == 0)
    assert owner.do(os.getcwd) == m.at(place)


def test_getcwd_survives_a_refusal_from_within(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """By a caller who inherited the hidden directory and asks for what is in it."""
    m = mount("-o", OPTIONS)
    owner, refused = user(OWNER), user(0)
    refused.do(act_as, OWNER)
    refused.do(os.chdir, m.at("vault"))
    refused.do(act_as, 0)
    refused.do(become, STRANGER, STRANGER, [])
    owner.do(os.chdir, m.at("vault/deep"))
    assert refused.error(os.listdir, ".") == errno.ESTALE
    assert refused.error(os.stat, "deep") == errno.ESTALE
    wait_until(lambda: owner.error(os.getcwd) == 0)
    assert owner.do(os.getcwd) == m.at("vault/deep")


def test_getcwd_survives_a_caller_without_permission(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Nothing is hidden: the kernel of the real tree refuses the search of a private directory."""
    put(os.path.join(tree, "private"), OWNER, 0o700, None)
    put(os.path.join(tree, "private/sub"), OWNER, 0o700, None)
    m = mount()
    owner, stranger = user(OWNER), user(STRANGER)
    owner.do(os.chdir, m.at("private/sub"))
    assert stranger.error(os.stat, m.at("private/sub")) == errno.EACCES
    wait_until(lambda: owner.error(os.getcwd) == 0)
    assert owner.do(os.getcwd) == m.at("private/sub")


@pytest.mark.parametrize("several", [False, True])
def test_getcwd_survives_a_caller_who_may_not_enter_the_view(
    several: bool, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    views = ["--view", f"{OWNER}:{OWNER}"]
    m = mount(*views, *(["--view", f"{OTHER}:{OTHER}"] if several else []), "-o", OPTIONS)
    top = m.at(f"@{OWNER}") if several else m.path
    owner, stranger = user(OWNER), user(STRANGER)
    for place in (top, f"{top}/vault", f"{top}/vault/deep"):
        owner.do(os.chdir, place)
        for refused in (top, f"{top}/vault", f"{top}/vault/deep"):
            assert stranger.error(os.listdir, refused) == errno.EACCES
            wait_until(lambda: owner.error(os.getcwd) == 0)
            assert owner.do(os.getcwd) == place


def stat_often(path: str, times: int) -> None:
    for _ in range(times):
        try:
            os.stat(path)
        except FileNotFoundError:
            continue
        raise AssertionError(f"{path} is there")


def test_getcwd_survives_many_refusals(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """However a refusal falls together with the repair of the one before."""
    m = mount("-o", OPTIONS)
    owner, stranger = user(OWNER), user(STRANGER)
    owner.do(os.chdir, m.at("vault/deep"))
    for times in range(1, 80):
        stranger.do(stat_often, m.at("vault"), times)
        wait_until(lambda: owner.error(os.getcwd) == 0)


# -- no_client_cache -------------------------------------------------------------------------------


def times_of(path: str, ways: int = 3) -> list[tuple[int, int]]:
    """(mtime, ctime) of a directory as several answers tell it: stat, open and fstat, the parent's listing."""
    told = []
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(ways):
            for info in (os.stat(path), os.fstat(fd)):
                told.append((info.st_mtime_ns, info.st_ctime_ns))
    finally:
        os.close(fd)
    return told


def increases(values: list[int]) -> bool:
    return all(a < b for a, b in pairwise(values))


@local_and_far
def test_no_client_cache(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{OPTIONS},no_client_cache")
    real = [os.stat(path) for path in (scene, m.real("open"))]
    told = {path: [times for uid in (OWNER, STRANGER, 0) for times in user(uid).do(times_of, path)]
            for path in (m.path, m.at("open"))}  # fmt: skip
    for times in told.values():
        assert increases([mtime for mtime, _ in times])
        assert increases([ctime for _, ctime in times])
    for path, before in zip((scene, m.real("open")), real, strict=True):
        now = os.stat(path)
        assert (now.st_mtime_ns, now.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    # Files are as they are.
    assert user(OTHER).do(os.stat, m.at("plain")).st_mtime_ns == os.stat(m.real("plain")).st_mtime_ns
    assert user(OTHER).do(os.stat, m.at("plain")).st_ctime_ns == os.stat(m.real("plain")).st_ctime_ns


def test_no_client_cache_also_at_the_list_of_views(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("--view", "1:1", "--view", "2:2", "-o", "no_client_cache")
    told = user(0).do(times_of, m.path)
    assert increases([mtime for mtime, _ in told])
    assert increases([ctime for _, ctime in told])


def test_no_client_cache_is_off_by_default(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", OPTIONS)
    real = os.stat(m.real("open"))
    assert set(user(STRANGER).do(times_of, m.at("open"))) == {(real.st_mtime_ns, real.st_ctime_ns)}


# -- root, and the root ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["no_root_squash", "range_map=uid 0 -1 map 0 gid 0 -1 map 0"])
def test_root_has_no_exemption(options: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{options},cloak_list=uid +000 5001")
    root = user(0)
    root.do(os.mkdir, m.at("made-by-root"))
    assert os.stat(m.real("made-by-root")).st_uid == 0  # it is uid 0 there
    assert root.do(names, m.path) == sorted([*VISIBLE, "made-by-root"])
    assert root.error(read, m.at("secret")) == errno.ENOENT


@pytest.mark.parametrize(("mask", "expected"), [("+000", VISIBLE), ("+007", ALL), ("-777", VISIBLE)])
def test_the_root_of_the_export_is_always_visible(
    mask: str, expected: list[str], scene: str, mount: MakeMount, user: MakeUser
) -> None:
    os.chown(scene, OWNER, OWNER)
    os.chmod(scene, 0o770)
    m = mount("-o", f"no_root_squash,cloak_list=uid {mask} 5001 gid {mask} 5001")
    root, stranger = user(0), user(STRANGER)
    assert stat.S_IMODE(stranger.do(os.stat, m.path).st_mode) == 0o770
    assert root.do(names, m.path) == expected
    assert stranger.error(os.listdir, m.path) == errno.EACCES  # visible, not accessible
    os.chmod(scene, 0o705)
    assert stranger.do(names, m.path) == expected


# -- who removes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["no_root_squash", OPTIONS])
def test_whoever_may_remove_a_name_may_do_so_through_the_mount(
    options: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    caller, more = 2001, 2002  # the uid, which is also the primary group, and another group
    m = mount("-o", options)
    who, other = user(caller, caller, [more]), user(OTHER)
    ways = {}
    for owner, group, mode in [
        (caller, OTHER, 0o700), (caller, OTHER, 0o1700), (caller, more, 0o500), (caller, more, 0o077),
        (OTHER, caller, 0o770), (OTHER, caller, 0o1770), (OTHER, caller, 0o707), (OTHER, more, 0o770),
        (OTHER, more, 0o1770), (OTHER, more, 0o707), (OTHER, OTHER, 0o1777), (OTHER, OTHER, 0o777),
    ]:  # fmt: skip
        for of in (caller, OTHER):
            results = []
            for where in ("real", "shown"):
                name = f"{owner}-{group}-{mode:o}-{of}-{where}"
                directory = os.path.join(tree, name)
                os.mkdir(directory)
                write(os.path.join(directory, "file"), b"content")
                os.chown(os.path.join(directory, "file"), of, of)
                os.chown(directory, owner, group)
                os.chmod(directory, mode)
                told()
                # Somebody else asks first, so that the daemon does not act as the caller already.
                assert other.error(os.open, m.at(name, "another"), os.O_RDONLY) in (errno.ENOENT, errno.EACCES)
                path = m.at(name, "file") if where == "shown" else os.path.join(directory, "file")
                results.append(who.error(os.unlink, path))
            ways[owner, group, mode, of] = results
    assert {way: one for way, one in ways.items() if one[0] != one[1]} == {}
    assert {one[0] for one in ways.values()} == {0, errno.EACCES, errno.EPERM}
