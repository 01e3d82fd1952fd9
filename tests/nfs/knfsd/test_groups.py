"""Supplementary groups: the kernel's server uses those of the request, the daemon those of the user database."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents import User, names
from tests.mount.conftest import run
from tests.nfs.knfsd.fixtures import VERSIONS, NfsHost, Share, sh

UID, GID = 6000, 6000
GIDS = range(6001, 6021)
FOREIGN = 6050


@pytest.fixture(scope="module", autouse=True)
def accounts() -> None:
    sh("groupadd", "-g", str(GID), "many-groups")
    for gid in GIDS:
        sh("groupadd", "-g", str(gid), f"group-{gid}")
    sh("useradd", "-M", "-u", str(UID), "-g", str(GID), "-G", ",".join(f"group-{gid}" for gid in GIDS), "many-groups")


def prepare(tree: str) -> None:
    for gid in (*GIDS, FOREIGN):
        path = os.path.join(tree, str(gid))
        os.mkdir(path)
        os.chown(path, 0, gid)
        os.chmod(path, 0o770)


def entered(who: User, place: str) -> list[int]:
    """The groups' directories that `who` may list and write."""
    found = []
    for gid in (*GIDS, FOREIGN):
        path = os.path.join(place, str(gid))
        error = who.error(names, path)
        assert error in (0, errno.EACCES)
        if not error:
            who.do(os.mkdir, os.path.join(path, "dir"))
            who.do(os.rmdir, os.path.join(path, "dir"))
            found.append(gid)
    return found


def test_twenty_groups(
    nfs_host: NfsHost, share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = share("rw", prepare)
    try:
        for version in VERSIONS:
            place = mount_nfs(tree, version, "noac")
            # A request has room for sixteen, and what the database does not know counts for nothing.
            many = user(UID, GID, [*GIDS, FOREIGN])
            assert entered(many, place) == list(GIDS)[:16], version
            few = user(UID, GID, [GIDS[3], FOREIGN])
            assert entered(few, place) == [GIDS[3]], version
        # The server may look groups up itself, where the ids are the same on both sides.
        nfs_host.restart_mountd(manage_gids=True)
        for version in VERSIONS:
            place = mount_nfs(tree, version, "noac", "nosharecache")
            assert entered(user(UID, GID), place) == list(GIDS), version
        # Where they are not, it would look up another user.
        Path("/tmp/mapped.exports").write_text("/tmp *(range_map = uid 1000 map 2000)\n")
        assert "manage-gids is on" in run("export", "plan", "/tmp/mapped.exports").stderr
    finally:
        nfs_host.restart_mountd()
        # So long the kernel goes on to wait for mountd's answers about groups (cache_listeners_exist).
        time.sleep(31)
    assert "manage-gids" not in run("export", "plan", "/tmp/mapped.exports").stderr
