"""A file system in the tree that does not report changes, as CephFS and NFS: what clients are told of it."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs.fuse.compatibility import offers_noflush
from tests.agents import User
from tests.nfs.knfsd.fixtures import Share, sh
from tests.nfs.knfsd.test_delegations import ANN, FOR_LONG, OPTIONS, delegations
from tests.waiting import wait_until


@pytest.fixture
def tree(share: Callable[..., Share]) -> Iterator[Share]:
    """Yield a tree with two directories: changes are reported in one alone."""

    def prepare(top: str) -> None:
        for name in ("reported", "unreported"):
            os.mkdir(f"{top}/{name}")
        sh("mount", "-t", "ramfs", "-o", "mode=777", "ramfs", f"{top}/unreported")
        for name in ("reported", "unreported"):
            Path(top, name, "file").write_text("old")
        shutil.copy("/bin/true", f"{top}/unreported/program")

    made = share("rw", prepare)
    yield made
    sh("umount", "-l", made.real("unreported"))


@pytest.mark.skipif(not offers_noflush, reason="this pyfuse3 is not patched (scripts/setup --patched-pyfuse3)")
def test_no_delegation_is_granted(tree: Share, mount_nfs: Callable[..., str], user: Callable[..., User]) -> None:
    """It would never be recalled: two clients of two servers of one distributed file system would go on for ever."""
    place, who = mount_nfs(tree, "4.2", OPTIONS), user(ANN)

    def use(name: str) -> int:
        path = os.path.join(place, name, "file")
        fds = [who.do(os.open, path, os.O_RDONLY) for _ in range(3)]
        found = delegations(tree)
        for fd in fds:
            who.do(os.close, fd)
        return found

    assert use("unreported") == 0
    wait_until(lambda: use("reported") == 1, FOR_LONG)
    assert use("unreported") == 1


def test_programs_can_be_executed_on_the_server(tree: Share) -> None:
    sh(os.path.join(tree.path, "unreported", "program"))


@pytest.mark.parametrize("version", ["4.0", "4.2"])
def test_a_removed_file_is_made_anew(
    tree: Share, mount_nfs: Callable[..., str], user: Callable[..., User], version: str
) -> None:
    """A client that knows the old file opens it by handle. What it writes to that is lost."""
    place, who = mount_nfs(tree, version, "actimeo=600"), user(ANN)
    real, path = tree.real("unreported/shared"), os.path.join(place, "unreported/shared")
    Path(real).write_text("old")
    os.chmod(real, 0o666)
    assert who.do(os.stat, path).st_size == 3
    os.unlink(real)
    fd = who.do(os.open, path, os.O_RDWR | os.O_CREAT, 0o644)
    who.do(os.write, fd, b"new")
    who.do(os.close, fd)
    assert Path(real).read_bytes() == b"new"
    who.do(os.unlink, path)


def test_what_is_removed_while_it_is_open_can_be_read(
    tree: Share, mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    place, who = mount_nfs(tree, "4.2", OPTIONS), user(ANN)
    path = os.path.join(place, "unreported/file")
    fd = who.do(os.open, path, os.O_RDONLY)
    os.unlink(tree.real("unreported/file"))
    assert who.do(os.pread, fd, 3, 0) == b"old"
    who.do(os.close, fd)
