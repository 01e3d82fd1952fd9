"""A mount for an NFS server admits that server and root, and no local user, whatever the request."""

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.identity import ServerId
from tests.agents import User, read, write
from tests.mount.conftest import Mount

CLIENT, SERVER, STRANGER = 1000, 4001, 4002
MAP = f"range_map=uid {CLIENT} map {SERVER} gid {CLIENT} map {SERVER}"

EXPORTED = {
    # What fstab says by habit (allow_other) opens nothing.
    "knfsd, caller views": ("-o", f"rw,allow_other,knfsd,{MAP}"),
    "knfsd, a fixed view": ("-o", f"rw,knfsd,{MAP}", "--view", f"{SERVER}:{SERVER}"),
    "knfsd, several fixed views": ("-o", f"rw,knfsd,views={SERVER}:{SERVER} {STRANGER}:{STRANGER}"),
    "ganesha, a fixed view": ("-o", "rw,ganesha", "--view", f"{SERVER}:{SERVER}"),
}

ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, perm, who)
    for tag, perm, who in [(1, 7, 2**32 - 1), (2, 7, CLIENT), (4, 0, 2**32 - 1), (16, 7, 2**32 - 1), (32, 0, 2**32 - 1)]
)


@pytest.fixture
def diary(tree: str) -> str:
    """A tree that belongs to one server user, with something of each kind in it."""
    Path(tree, "diary").write_text("private")
    os.chmod(os.path.join(tree, "diary"), 0o600)
    Path(tree, "program").write_text("#!/bin/sh\n")
    os.chmod(os.path.join(tree, "program"), 0o777)
    os.mkdir(os.path.join(tree, "dir"), 0o777)
    os.symlink("diary", os.path.join(tree, "link"))
    os.mkfifo(os.path.join(tree, "fifo"))
    os.setxattr(os.path.join(tree, "diary"), "user.secret", b"x")
    os.setxattr(tree, "user.secret", b"x")
    for name in ("", "diary", "program", "dir", "link", "fifo"):
        os.chown(os.path.join(tree, name), SERVER, SERVER, follow_symlinks=False)
    return tree


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(path)


def _bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


def _from_top(top: str, call: Callable[[str], object]) -> None:
    """A descriptor of the top itself can be had (O_PATH asks nobody); nothing can be done with it."""
    fd = os.open(top, os.O_PATH)
    try:
        call(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _inode_flags(path: str) -> None:
    """file_getattr(2), of Linux 6.17; the same number everywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.create_string_buffer(24)
    result = libc.syscall(
        ctypes.c_long(468), ctypes.c_long(-100), os.fsencode(path), flags, ctypes.c_long(24), ctypes.c_long(0)
    )
    if result and ctypes.get_errno() != errno.ENOSYS:
        raise OSError(ctypes.get_errno(), "file_getattr")
    _require(result == 0)


def _execute(path: str) -> None:
    os.posix_spawn(path, [path], {})


def _at_top(top: str) -> dict[str, Callable[[], object]]:
    """What can be asked of a directory."""
    return {
        "stat": lambda: os.stat(top),
        "readdir": lambda: os.listdir(top),
        "access": lambda: _require(os.access(top, os.X_OK)),
        "chdir": lambda: os.chdir(top),
        "open": lambda: os.open(top, os.O_RDONLY | os.O_DIRECTORY),
        "tmpfile": lambda: os.open(top, os.O_TMPFILE | os.O_RDWR),
        "chmod": lambda: os.chmod(top, 0o777),
        "chown": lambda: os.chown(top, CLIENT, CLIENT),
        "utimes": lambda: os.utime(top),
        "touch": lambda: os.utime(top, (1, 1)),
        "getxattr": lambda: os.getxattr(top, "user.secret"),
        "getxattr security": lambda: os.getxattr(top, "security.secret"),
        "get ACL": lambda: os.getxattr(top, "system.posix_acl_access"),
        "listxattr": lambda: os.listxattr(top),
        "setxattr": lambda: os.setxattr(top, "user.new", b"x"),
        "setxattr security": lambda: os.setxattr(top, "security.new", b"x"),
        "set ACL": lambda: os.setxattr(top, "system.posix_acl_access", ACL),
        "set default ACL": lambda: os.setxattr(top, "system.posix_acl_default", ACL),
        "removexattr": lambda: os.removexattr(top, "user.secret"),
        "remove ACL": lambda: os.removexattr(top, "system.posix_acl_access"),
        "by descriptor": lambda: _from_top(top, os.listdir),
        "create": lambda: write(f"{top}/new", b"x"),
        "mkdir": lambda: os.mkdir(f"{top}/new"),
        "mknod": lambda: os.mkfifo(f"{top}/new"),
        "symlink": lambda: os.symlink("x", f"{top}/new"),
        "bind": lambda: _bind(f"{top}/new"),
        "lookup of what is not there": lambda: os.stat(f"{top}/absent"),
        "inode flags": lambda: _inode_flags(top),
        "dot": lambda: os.stat(f"{top}/."),
        "dotdot": lambda: os.stat(f"{top}/.."),
    }


def _inside(top: str) -> dict[str, Callable[[], object]]:
    """What can be asked of what is in one."""
    return {
        "stat": lambda: os.stat(f"{top}/diary"),
        "lstat": lambda: os.lstat(f"{top}/link"),
        "read": lambda: read(f"{top}/diary"),
        "write": lambda: write(f"{top}/diary", b"x", 0),
        "truncate": lambda: os.truncate(f"{top}/diary", 0),
        "readlink": lambda: os.readlink(f"{top}/link"),
        "follow": lambda: read(f"{top}/link"),
        "execute": lambda: _execute(f"{top}/program"),
        "readdir": lambda: os.listdir(f"{top}/dir"),
        "mkdir": lambda: os.mkdir(f"{top}/dir/new"),
        "rmdir": lambda: os.rmdir(f"{top}/dir"),
        "unlink": lambda: os.unlink(f"{top}/diary"),
        "rename": lambda: os.rename(f"{top}/diary", f"{top}/other"),
        "exchange": lambda: linux.renameat2(
            -1, os.fsencode(f"{top}/diary"), -1, os.fsencode(f"{top}/program"), linux.RENAME_EXCHANGE
        ),
        "link": lambda: os.link(f"{top}/diary", f"{top}/other"),
        "connect": lambda: _connect(f"{top}/fifo"),
        "chmod": lambda: os.chmod(f"{top}/diary", 0o666),
        "chown": lambda: os.chown(f"{top}/diary", CLIENT, CLIENT),
        "getxattr": lambda: os.getxattr(f"{top}/diary", "user.secret"),
        "set ACL": lambda: os.setxattr(f"{top}/diary", "system.posix_acl_access", ACL),
        "open to name": lambda: os.open(f"{top}/diary", os.O_PATH),
    }


def _require(allowed: bool) -> None:
    if not allowed:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _answer(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "done"


def _refused(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Which were not answered with EACCES, and how instead.

    About ACLs and `security.` names the kernel says no by itself to whoever is not the owner that is shown, or where it
    knows none; which way, depends on its version. What it knows of the top's ACL it tells.
    """
    answers = {name: _answer(call) for name, call in calls.items()}
    return {
        name: said
        for name, said in answers.items()
        if said != "EACCES" and not (name in _BY_THE_KERNEL and said in ("EPERM", "ENODATA", "EOPNOTSUPP"))
    }


_BY_THE_KERNEL = ("get ACL", "set ACL", "set default ACL", "remove ACL", "setxattr security")


def _let_in(path: str) -> dict[str, str]:
    """Every kind of request that was not refused as one of somebody who may not enter."""
    found = _refused(_at_top(path)) | {f"{name} inside": a for name, a in _refused(_inside(path)).items()}
    for view in (f"{path}/@{SERVER}", f"{path}/@{STRANGER}"):
        found |= {f"{name} in {view}": a for name, a in _refused(_at_top(view) | _inside(view)).items()}
    return found


def _with_ids(real: int, effective: int, saved: int) -> None:
    """What a program is that root has lent its id to: begun as one user, and running as another."""
    os.setgroups([])
    os.setresuid(real, effective, saved)


def _with_gid(gid: int) -> None:
    os.setresgid(gid, gid, gid)


LOCALS: dict[str, Callable[[], None]] = {
    "the client's number": partial(_with_ids, CLIENT, CLIENT, CLIENT),
    "the server's number": partial(_with_ids, SERVER, SERVER, SERVER),
    "somebody": partial(_with_ids, STRANGER, STRANGER, STRANGER),
    "nobody": partial(_with_ids, 65534, 65534, 65534),
    "a set-user-ID program of root's": partial(_with_ids, CLIENT, 0, 0),
    "root, who was somebody": partial(_with_ids, 0, 0, CLIENT),
    "root for the time being": partial(_with_ids, 0, CLIENT, 0),
    "root in a user's group": partial(_with_gid, CLIENT),
}


@pytest.mark.parametrize("words", EXPORTED.values(), ids=EXPORTED)
def test_no_local_user_gets_in(
    words: tuple[str, ...], mount: Callable[..., Mount], diary: str, user: Callable[..., User]
) -> None:
    before = _state(diary)
    there = mount(*words)
    assert os.listdir(there.path)  # it does answer, and the kernel remembers some of it
    for name, become in LOCALS.items():
        who = user(0)
        who.do(become)
        assert who.do(_let_in, there.path) == {}, name
    assert _state(diary) == before


def _state(tree: str) -> dict[str, tuple[object, ...]]:
    """All that could have been changed."""
    found: dict[str, tuple[object, ...]] = {}
    for name in ("", *sorted(os.listdir(tree))):
        path = os.path.join(tree, name)
        info = os.lstat(path)
        names = sorted(os.listxattr(path, follow_symlinks=False))
        found[name] = (info.st_mode, info.st_uid, info.st_gid, info.st_size, info.st_nlink, info.st_mtime_ns, names)
    return found


def _as_server(uid: int, gid: int, call: Callable[[], object]) -> str:
    """As a thread of a server: root's process, with somebody's file-system ids."""
    linux.credentials.assume(linux.Credentials(ServerId(uid), ServerId(gid), ()))
    try:
        return _answer(call)
    finally:
        linux.act_as_daemon()


def test_the_server_gets_in(mount: Callable[..., Mount], diary: str, user: Callable[..., User]) -> None:
    there = mount(*EXPORTED["knfsd, caller views"])
    server = user(0)
    assert server.do(_as_server, CLIENT, CLIENT, partial(read, there.at("diary"))) == "done"
    assert server.do(_as_server, CLIENT, CLIENT, partial(write, there.at("new"), b"x")) == "done"
    assert os.stat(there.real("new")).st_uid == SERVER
    assert server.do(_as_server, STRANGER, STRANGER, partial(read, there.at("diary"))) == "EACCES"
    set_acl = partial(os.setxattr, there.at("new"), "system.posix_acl_access", ACL)
    assert server.do(_as_server, STRANGER, STRANGER, set_acl) == "EPERM"


def test_an_ordinary_mount_is_for_everybody(mount: Callable[..., Mount], diary: str, user: Callable[..., User]) -> None:
    there = mount("-o", f"rw,{MAP}")
    assert user(CLIENT).do(read, there.at("diary")) == b"private"


def test_an_open_directory_of_root_is_no_way_in(
    mount: Callable[..., Mount], diary: str, user: Callable[..., User]
) -> None:
    """A working directory or a descriptor of root's."""
    there = mount(*EXPORTED["knfsd, caller views"])
    who = user(0)
    who.do(os.chdir, there.path)
    fd = who.do(os.open, there.path, os.O_RDONLY | os.O_DIRECTORY)
    who.do(_with_ids, CLIENT, CLIENT, CLIENT)
    assert who.error(read, "diary") == errno.EACCES
    assert who.error(os.stat, ".") == errno.EACCES
    assert who.error(os.stat, "dir", dir_fd=fd) == errno.EACCES
    with contextlib.suppress(OSError):
        who.do(os.fstat, fd)
        raise AssertionError("attributes by descriptor")
