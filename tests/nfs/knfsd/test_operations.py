"""What users do with files, as the client sees it and as it is on the server."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyfuse3
import pytest

from cloakfs import linux
from cloakfs.kernelcache.notifier import AGAIN_SECONDS
from tests.agents import User, names, read, write
from tests.mount import conftest
from tests.nfs.knfsd.fixtures import VERSIONS, Service, Share, exported, nfs_mounted, sh
from tests.waiting import wait_until

# Users 1000 and up of the client are 20000 and up on the server.
MAP = "range_map = uid 1000 1999 map 20000 gid 1000 1999 map 20000"
ANN, BOB = 1000, 1001
TEAM = 1500


@pytest.fixture(scope="module", autouse=True)
def accounts() -> None:
    """Ann's account on the server is in the team."""
    sh("groupadd", "-g", "20500", "team-of-operations")
    sh("groupadd", "-g", "20000", "ann-of-operations")
    sh("useradd", "-M", "-u", "20000", "-g", "20000", "-G", "team-of-operations", "ann-of-operations")


class Site(NamedTuple):
    """A directory of its own for each test in one tree that is exported and mounted for all of them."""

    tree: Share
    place: str
    version: str
    name: str
    ann: User
    bob: User

    def at(self, *names: str) -> str:
        return os.path.join(self.place, self.name, *names)

    def real(self, *names: str) -> str:
        return self.tree.real(self.name, *names)


@pytest.fixture(scope="module")
def places(service: Service) -> Iterator[tuple[Share, dict[str, str]]]:
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(exported(service, f"rw,{MAP}"))
        yield tree, {version: stack.enter_context(nfs_mounted(tree, version)) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def site(request: pytest.FixtureRequest, places: tuple[Share, dict[str, str]], user: Callable[..., User]) -> Site:
    tree, at = places
    made = Site(tree, at[request.param], request.param, request.node.name, user(ANN, groups=[TEAM]), user(BOB))
    os.mkdir(made.real())
    os.chmod(made.real(), 0o777)
    return made


def run_in(place: str, *command: str) -> str:
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, env={**os.environ, "HOME": place}
    )
    if done.returncode:
        raise AssertionError(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def test_files_and_directories(site: Site) -> None:
    real, ann, bob = site.real, site.ann, site.bob
    ann.do(write, site.at("file"), b"content")
    ann.do(os.mkdir, site.at("dir"))
    ann.do(os.mkfifo, site.at("fifo"), 0o600)
    ann.do(os.symlink, "file", site.at("symlink"))
    ann.do(os.link, site.at("file"), site.at("link"))
    for name in ("file", "dir", "fifo", "symlink", "link"):
        there, seen = os.lstat(real(name)), bob.do(os.lstat, site.at(name))
        assert (there.st_uid, there.st_gid) == (20000, 20000), name
        assert (seen.st_uid, seen.st_gid, seen.st_mode) == (ANN, ANN, there.st_mode), name
    assert bob.do(read, site.at("link")) == b"content"
    assert bob.do(os.readlink, site.at("symlink")) == "file"
    assert bob.do(os.lstat, site.at("file")).st_nlink == 2
    assert ann.error(write, site.at("file"), b"", os.O_CREAT | os.O_EXCL) == errno.EEXIST
    # The umask is the client's.
    assert stat.S_IMODE(os.lstat(real("file")).st_mode) == 0o644

    ann.do(os.rename, site.at("link"), site.at("dir", "moved"))
    assert bob.do(names, site.at("dir")) == ["moved"]
    assert os.path.exists(real("dir", "moved"))
    assert bob.error(os.unlink, site.at("dir", "moved")) == errno.EACCES
    ann.do(os.unlink, site.at("dir", "moved"))
    ann.do(os.rmdir, site.at("dir"))
    ann.do(os.unlink, site.at("fifo"))
    ann.do(os.unlink, site.at("symlink"))
    ann.do(os.unlink, site.at("file"))
    assert os.listdir(real()) == []
    assert bob.do(names, site.at()) == []


def write_parts(path: str) -> None:
    """Writes at several places, a hole between, through a descriptor that outlives the name."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    os.pwrite(fd, b"x" * 300_000, 0)
    os.pwrite(fd, b"far", 1_000_000)
    os.ftruncate(fd, 1_000_001)
    os.fsync(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, f"{path}.renamed")
    assert os.pread(fd, 3, 999_999) == b"\0f"
    os.lseek(fd, 0, os.SEEK_END)
    os.write(fd, b"end")
    os.close(fd)


def test_writing_at_places(site: Site) -> None:
    site.ann.do(write_parts, site.at("file"))
    assert Path(site.real("file.renamed")).read_bytes() == b"x" * 300_000 + b"\0" * 700_000 + b"fend"
    assert site.bob.error(read, site.at("file.renamed")) == errno.EACCES


def allocate_and_punch(path: str) -> None:
    """Allocate a MiB, and make a hole in it."""
    punch_hole_and_keep_size = 2 | 1
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    os.pwrite(fd, b"x" * 300_000, 0)
    os.fsync(fd)
    linux.fallocate(fd, 0, 0, 1 << 20)
    linux.fallocate(fd, punch_hole_and_keep_size, 1 << 16, 1 << 17)
    assert os.pread(fd, 300_000, 0) == b"x" * (1 << 16) + bytes(1 << 17) + b"x" * (300_000 - 3 * (1 << 16))
    os.close(fd)


def first_hole(path: str) -> int:
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_HOLE)


def test_allocating(site: Site) -> None:
    """NFSv4.2 can do this, and so can pyfuse3 with the patch in contrib/pyfuse3."""
    if site.version == "3" or not hasattr(pyfuse3.Operations, "fallocate"):
        assert site.ann.error(allocate_and_punch, site.at("file")) == errno.EOPNOTSUPP
        return
    site.ann.do(allocate_and_punch, site.at("file"))
    assert os.stat(site.real("file")).st_size == 1 << 20
    assert os.stat(site.real("file")).st_blocks * 512 == (1 << 20) - (1 << 17)

    with open(site.real("sparse"), "wb") as file:
        file.write(b"x" * (1 << 16))
        file.truncate(1 << 20)
    os.chown(site.real("sparse"), 20000, 20000)
    assert site.ann.do(first_hole, site.at("sparse")) == 1 << 16


def test_changing_owner_and_mode(site: Site) -> None:
    real, ann, bob = site.real, site.ann, site.bob
    ann.do(write, site.at("file"), b"")
    ann.do(os.chmod, site.at("file"), 0o600)
    assert stat.S_IMODE(os.stat(real("file")).st_mode) == 0o600
    assert bob.error(os.chmod, site.at("file"), 0o666) == errno.EPERM
    assert bob.error(os.chown, site.at("file"), BOB, -1) == errno.EPERM
    assert ann.error(os.chown, site.at("file"), BOB, -1) == errno.EPERM
    ann.do(os.chown, site.at("file"), -1, TEAM)
    assert os.stat(real("file")).st_gid == 20500
    assert bob.do(os.stat, site.at("file")).st_gid == TEAM
    ann.do(os.utime, site.at("file"), (1_000_000_000, 1_100_000_000))
    assert os.stat(real("file")).st_mtime == 1_100_000_000
    # Client root is nobody.
    assert os.stat(site.at("file")).st_uid == ANN
    for refused in (lambda: os.chmod(site.at("file"), 0o666), lambda: os.chown(site.at("file"), BOB, BOB),
                    lambda: read(site.at("file")), lambda: write(site.at("file"), b"")):  # fmt: skip
        with pytest.raises(PermissionError):
            refused()
    Path(site.at("of-root")).write_text("")
    assert os.stat(real("of-root")).st_uid == 65534


def test_a_file_created_read_only_can_be_written(site: Site) -> None:
    """The client sends CREATE and WRITE; to the server they are separate requests."""
    fd = site.ann.do(os.open, site.at("file"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    site.ann.do(os.write, fd, b"content")
    site.ann.do(os.fsync, fd)
    site.ann.do(os.close, fd)
    assert Path(site.real("file")).read_bytes() == b"content"
    assert site.ann.error(write, site.at("file"), b"again") == errno.EACCES
    fd = site.ann.do(os.open, site.at("file"), os.O_RDONLY)
    site.ann.do(os.chmod, site.at("file"), 0)
    if site.version == "3":  # by 4, the server has it open
        site.ann.do(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert site.ann.do(os.pread, fd, 100, 0) == b"content"
    assert site.bob.error(read, site.at("file")) == errno.EACCES


def test_what_may_only_be_executed(site: Site) -> None:
    shutil.copy("/bin/true", site.real("program"))
    os.chmod(site.real("program"), 0o711)
    assert site.bob.do(os.spawnv, os.P_WAIT, site.at("program"), ["program"]) == 0
    shutil.copy("/bin/true", site.real("private"))
    os.chmod(site.real("private"), 0o700)
    assert site.bob.do(os.spawnv, os.P_WAIT, site.at("private"), ["private"]) == 127


def lock(fd: int, kind: int) -> None:
    fcntl.lockf(fd, kind if kind == fcntl.LOCK_UN else kind | fcntl.LOCK_NB)


def test_locks(site: Site, mount_nfs: Callable[..., str], client_host: str, user: Callable[..., User]) -> None:
    """Between two users of a client, and between two clients (by version 4)."""
    site.ann.do(write, site.at("file"), b"")
    os.chmod(site.real("file"), 0o666)
    mine = site.ann.do(os.open, site.at("file"), os.O_RDWR)
    others = [(site.bob, site.bob.do(os.open, site.at("file"), os.O_RDWR))]
    if site.version != "3":  # there, locks are for a daemon of each client host, and the guest has one
        elsewhere = mount_nfs(site.tree, site.version, host="10.9.0.1", netns=client_host)
        carol = user(BOB + 1)
        others.append((carol, carol.do(os.open, os.path.join(elsewhere, site.name, "file"), os.O_RDWR)))
    site.ann.do(lock, mine, fcntl.LOCK_EX)
    for other, fd in others:
        assert other.error(lock, fd, fcntl.LOCK_EX) in (errno.EAGAIN, errno.EACCES)
        assert other.error(lock, fd, fcntl.LOCK_SH) in (errno.EAGAIN, errno.EACCES)
    site.ann.do(lock, mine, fcntl.LOCK_UN)
    for other, fd in others:
        other.do(lock, fd, fcntl.LOCK_EX)
        assert site.ann.error(lock, mine, fcntl.LOCK_EX) in (errno.EAGAIN, errno.EACCES)
        other.do(lock, fd, fcntl.LOCK_UN)
        other.do(os.close, fd)


def test_acls(site: Site) -> None:
    ann, bob = site.ann, site.bob
    ann.do(write, site.at("file"), b"content")
    ann.do(os.chmod, site.at("file"), 0o600)
    assert bob.error(read, site.at("file")) == errno.EACCES
    if site.version == "3":
        ann.do(run_in, site.at(), "setfacl", "-m", f"u:{BOB}:r", "file")
    else:
        ann.do(run_in, site.at(), "nfs4_setfacl", "-a", f"A::{BOB}:r", "file")
    assert f"user:{20000 + BOB - 1000}:r--" in sh("getfacl", "-n", "-p", site.real("file"))
    # The daemon makes the kernel forget the attributes twice. If the second time crosses a GETATTR, it seems that the
    # kernel discards the answer, and checks the former mode: one open is refused, the next is not:
    # docs/decisions/kernel-checks-exports.md.
    time.sleep(2 * AGAIN_SECONDS)
    conftest.told()
    assert bob.do(read, site.at("file")) == b"content"
    assert bob.error(write, site.at("file"), b"") == errno.EACCES
    if site.version == "3":
        assert f"user:{BOB}:r--" in bob.do(run_in, site.at(), "getfacl", "-n", "file")
        assert "Operation not permitted" in bob_fails(bob, site, "setfacl", "-b", "file")
        # One without a counterpart on the server is refused, not stored as nobody's.
        assert "Invalid argument" in ann_fails(ann, site, "setfacl", "-m", "u:5000:r", "file")
    else:
        assert f"A::{BOB}:r" in bob.do(run_in, site.at(), "nfs4_getfacl", "file")
    # What is made in a directory with a default ACL has it, whatever the umask.
    os.mkdir(site.real("dir"))
    os.chown(site.real("dir"), 20000, 20000)
    sh("setfacl", "-d", "-m", "u:20001:rw", site.real("dir"))
    ann.do(write, site.at("dir", "new"), b"", os.O_CREAT, 0o660)
    assert "user:20001:rw-" in sh("getfacl", "-n", "-p", site.real("dir", "new"))
    bob.do(write, site.at("dir", "new"), b"bob's", 0)


def bob_fails(who: User, site: Site, *command: str) -> str:
    try:
        who.do(run_in, site.at(), *command)
    except AssertionError as exc:
        return str(exc)
    return ""


ann_fails = bob_fails


def test_extended_attributes(site: Site) -> None:
    """NFSv3 has none, and of FUSE the kernel's server does not know that it has (`xattr_supported_namespace`)."""
    site.ann.do(write, site.at("file"), b"")
    assert site.ann.error(os.setxattr, site.at("file"), "user.colour", b"red") == errno.EOPNOTSUPP


def test_an_open_file_that_is_removed(site: Site) -> None:
    site.ann.do(write, site.at("file"), b"content")
    fd = site.ann.do(os.open, site.at("file"), os.O_RDWR)
    site.ann.do(os.unlink, site.at("file"))
    assert site.ann.error(os.stat, site.at("file")) == errno.ENOENT
    assert site.ann.do(os.pread, fd, 10, 0) == b"content"
    site.ann.do(os.pwrite, fd, b"more", 7)
    site.ann.do(os.close, fd)
    wait_until(lambda: os.listdir(site.real()) == [])  # the client removes it a little later


def test_git(site: Site) -> None:
    """Creates files read-only, links and renames them, and locks by O_EXCL."""
    site.ann.do(os.mkdir, site.at("repository"))
    place = site.at("repository")
    site.ann.do(run_in, place, "git", "init", "-q", ".")
    site.ann.do(write, site.at("repository", "file"), b"content\n")
    site.ann.do(run_in, place, "git", "add", "file")
    site.ann.do(run_in, place, "git", "-c", "user.name=Ann", "-c", "user.email=ann@localhost", "commit", "-qm", "First")
    assert site.ann.do(run_in, place, "git", "status", "--porcelain") == ""
    site.ann.do(run_in, place, "git", "fsck", "--strict")
    owners = {os.lstat(os.path.join(at, name)).st_uid for at, _, files in os.walk(site.real()) for name in files}
    assert owners == {20000}
