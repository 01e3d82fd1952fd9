"""A mount that the kernel's server exports admits users of clients, and no local user of the server."""

import errno
import os
from collections.abc import Callable

from tests.agents import User, names, read, write
from tests.nfs.knfsd.fixtures import VERSIONS, Share

CLIENT, SERVER = 1000, 20000


def prepare(tree: str) -> None:
    os.mkdir(os.path.join(tree, "home"))
    write(os.path.join(tree, "home", "diary"), b"private", mode=0o600)
    for name in ("home", "home/diary"):
        os.chown(os.path.join(tree, name), SERVER, SERVER)


def test_clients_get_in_and_local_users_do_not(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    mapped = f"range_map = uid {CLIENT} map {SERVER} gid {CLIENT} map {SERVER}"
    for options in (f"rw, {mapped}", f"rw, all_squash, anonuid={SERVER}, anongid={SERVER}"):
        tree = share(options, prepare)
        who = user(CLIENT)
        for version in VERSIONS:
            place = mount_nfs(tree, version, "noac")
            assert who.do(read, f"{place}/home/diary") == b"private", (options, version)
            who.do(write, f"{place}/home/new-{version}", version.encode())
            assert "diary" in who.do(names, f"{place}/home")
            who.do(os.unlink, f"{place}/home/new-{version}")
        # On the server: users with the number of the client's user, or of the server's.
        for uid in (CLIENT, SERVER, 65534):
            here = user(uid)
            assert here.error(os.stat, tree.path) == errno.EACCES
            assert here.error(names, tree.path) == errno.EACCES
            assert here.error(read, f"{tree.path}/home/diary") == errno.EACCES
            assert here.error(os.mkdir, f"{tree.path}/home/new") == errno.EACCES
