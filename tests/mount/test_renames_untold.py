"""File systems on which a rename does not change the ctime: nobody sees any more what was moved out of sight."""

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cloakfs import linux
from cloakfs.kernelcache.cachepolicy import SHORT_SECONDS
from tests.agents import User, write
from tests.mount.conftest import Mount, is_mounted
from tests.waiting import let_expire, wait_until

SERVER = "/usr/lib/openssh/sftp-server"
OWNER, OTHER = 3001, 3002

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


@pytest.fixture
def sshfs(base: str) -> Iterator[str]:
    """The mount point of a real sshfs, whose server is at the other end of a socket. Its ctime is the mtime."""
    if not (shutil.which("sshfs") and os.path.exists(SERVER)):
        pytest.skip("needs sshfs and sftp-server (Debian: sshfs, openssh-sftp-server)")
    real, point = os.path.join(base, "there"), os.path.join(base, "sshfs")
    os.mkdir(real)
    os.mkdir(point)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen([SERVER], stdin=theirs.fileno(), stdout=theirs.fileno())
        options = "slave,allow_other,default_permissions"
        client = subprocess.Popen(
            ["sshfs", "-f", "-o", options, f":{real}", point], stdin=ours.fileno(), stdout=ours.fileno()
        )
    try:
        wait_until(lambda: is_mounted(point))
        yield point
    finally:
        linux.umount(point, linux.MNT_DETACH)
        client.wait(60)
        server.wait(60)


def is_stale(one: User, fd: int) -> bool:
    return one.error(os.stat, fd) == errno.ESTALE


def test_a_file_that_is_moved_into_a_hidden_directory(sshfs: str, mount: MakeMount, user: MakeUser) -> None:
    for name, mode in (("public", 0o755), ("private", 0o700)):
        os.mkdir(f"{sshfs}/{name}")
        os.chmod(f"{sshfs}/{name}", mode)
        os.chown(f"{sshfs}/{name}", OWNER, OWNER)
    for name in ("file", "directory/"):
        if name.endswith("/"):
            os.mkdir(f"{sshfs}/public/{name}")
        else:
            write(f"{sshfs}/public/{name}", b"x")
    m = mount("-o", "no_root_squash,cloak_list=uid +077 3000 3999", source=sshfs)
    owner, other = user(OWNER), user(OTHER)
    for name in ("file", "directory"):
        os.utime(f"{sshfs}/public/{name}", (10**9, 10**9))  # the ctime, too, is long ago
        before = os.stat(f"{sshfs}/public/{name}").st_ctime_ns
        known = {one: one.do(os.open, m.at("public", name), os.O_PATH) for one in (owner, other)}
        let_expire(SHORT_SECONDS + 0.1)  # the kernel asks again, and where it is gets looked at
        for one, fd in known.items():
            one.do(os.stat, fd)
        os.rename(f"{sshfs}/public/{name}", f"{sshfs}/private/{name}")
        assert os.stat(f"{sshfs}/private/{name}").st_ctime_ns == before
        wait_until(partial(is_stale, other, known[other]))
        owner.do(os.lstat, m.at("private", name))
        owner.do(os.stat, known[owner])
