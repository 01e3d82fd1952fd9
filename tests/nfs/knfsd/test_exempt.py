"""Exempt users of a client (`exempt`) restore and back up a tree over NFS, and no other user of it sees more."""

import errno
import os
import stat
import subprocess
import time
from collections.abc import Callable

from tests.agents import User, names, read
from tests.mount.conftest import run
from tests.mount.test_caching import put
from tests.mount.test_exempt import copy, described, paths
from tests.nfs.knfsd.fixtures import EXPORTS, Share

# On the client. On the server, all but root have another one.
ANN, BEN, STRANGER, BACKUP = 1001, 1002, 1003, 1100
MORE = 2000
MAPPED = f"range_map = uid 0 map 0 uid 1000 1999 map {1000 + MORE} gid 0 map 0 gid 1000 1999 map {1000 + MORE}"
OPTIONS = f"rw,no_root_squash,{MAPPED},cloak_list = uid +077 3000 3999,exempt = 0 {BACKUP + MORE}"


def fill(top: str, acl: str) -> None:
    """Make a home and a directory of all, with links of both kinds, and a file with an ACL."""
    os.mkdir(top)
    os.chmod(top, 0o777)
    put(f"{top}/home", ANN, stat.S_IFDIR | 0o700)
    put(f"{top}/home/secret", ANN, 0o600)
    put(f"{top}/all", BEN, stat.S_IFDIR | 0o1777)
    put(f"{top}/all/private", BEN, 0o640, gid=ANN)
    put(f"{top}/all/public", ANN, 0o4755)
    os.symlink("private", f"{top}/all/symlink")
    os.lchown(f"{top}/all/symlink", ANN, ANN)
    os.link(f"{top}/home/secret", f"{top}/all/hard link")
    subprocess.run(["setfacl", "--modify", acl, f"{top}/all/private"], check=True)
    an_hour_ago = time.time_ns() - 3600 * 10**9  # for rsync, times of directories within one second are the same
    for path in [*paths(top), "."]:
        os.utime(os.path.join(top, path), ns=(an_hour_ago, an_hour_ago), follow_symlinks=False)


def owners(top: str) -> dict[str, int]:
    return {path: os.lstat(os.path.join(top, path)).st_uid for path in paths(top)}


def test_a_tree_there_and_back(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = share(OPTIONS)
    stranger, backup = user(STRANGER), user(BACKUP)
    # A Linux client has no POSIX ACLs over NFSv4.
    for version, acl, there, back in (("3", f"u:{ANN}:rx", "rsync", "cp"), ("4.2", "u::rw", "cp", "rsync")):
        archive, again = (f"/tree/{name}-{version}" for name in ("archive", "again"))
        fill(archive, acl)
        os.mkdir(again)
        place = os.path.join(mount_nfs(tree, version), version)
        os.mkdir(place)
        copy(there, archive, place)
        copy(back, place, again)
        assert described(again) == described(archive)
        assert owners(tree.real(version)) == {path: uid + MORE for path, uid in owners(archive).items()}
        # A mount of their own, because a client keeps one cache for all of its users.
        others = os.path.join(mount_nfs(tree, version, "nosharecache"), version)
        assert stranger.do(names, others) == ["all"]
        assert stranger.do(names, f"{others}/all") == ["public", "symlink"]
        for path in ("home", "all/private", "all/hard link"):
            assert stranger.error(os.stat, f"{others}/{path}") == errno.ENOENT
        # Exempt, but not root: permissions hold.
        assert backup.do(names, place) == ["all", "home"]
        assert backup.do(names, f"{place}/all") == ["hard link", "private", "public", "symlink"]
        assert backup.error(names, f"{place}/home") == errno.EACCES
        assert backup.error(read, f"{place}/all/private") == errno.EACCES
    result = run("exposure", EXPORTS).stdout
    for who in ("0 become root (0)", f"{BACKUP} become {BACKUP + MORE}"):
        assert f"exempt: client uids {who}, from whom nothing is hidden (exempt)\n" in result
