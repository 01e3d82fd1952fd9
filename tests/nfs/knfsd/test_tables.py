"""The papers' tables over NFS, by real uids on one client."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cloakfs.linux import statx
from cloakfs.mapping import DEFAULT_NOBODY as NOBODY
from cloakfs.mapping import MAX_ID
from tests.agents import User
from tests.mount.test_tables import CELLS, FIGURE_1, FILES, FORWARD, GIDS, GROUPS, MASKS, REVERSE, UIDS, look
from tests.nfs.knfsd.fixtures import VERSIONS, Share, requests, sh
from tests.waiting import wait_until

ACCOUNTS = "range_map = uid 0 -1 map 0 gid 0 -1 map 0"


@pytest.fixture(scope="module")
def accounts() -> None:
    """ezk and joe have accounts on the server, from which their groups come."""
    for group, gid in GIDS.items():
        sh("groupadd", "-g", str(gid), f"{group}-of-table-2")
    for name, uid in UIDS.items():
        groups = [f"{group}-of-table-2" for group in GROUPS[name]]
        sh("useradd", "-M", "-u", str(uid), "-g", groups[0], "-G", ",".join(groups), name)


def test_table_2(
    accounts: None,
    share: Callable[..., Share],
    mount_nfs: Callable[..., str],
    user: Callable[..., User],
) -> None:
    """All masks in turn on one export, by reloading; each user has a mount, so that the client keeps them apart."""

    def prepare(tree: str) -> None:
        for file in FILES:
            path = os.path.join(tree, file["file"])
            Path(path).write_text("")
            os.chown(path, UIDS[file["user"]], GIDS[file["group"]])
            os.chmod(path, int(file["mode"], 8))

    # Reloading does not change directories, whose listings clients would go on to believe.
    tree = share("rw,no_client_cache", prepare)
    places = {
        (name, version): mount_nfs(tree, version, "nosharecache", "noac", "lookupcache=none")
        for name in UIDS
        for version in VERSIONS
    }
    callers = {name: user(UIDS[name], GIDS[GROUPS[name][0]], [GIDS[group] for group in GROUPS[name]]) for name in UIDS}
    wrong = []
    for mask in MASKS:
        tree.set(f"rw,no_client_cache,{ACCOUNTS},cloak_list = uid {mask} 3001 3002")
        for (name, version), place in places.items():
            cells = {cell["file"]: cell for cell in CELLS if cell["mask"] == mask and cell["caller"] == name}
            listed = callers[name].do(os.listdir, place)
            for path, cell in cells.items():
                seen = callers[name].do(look, os.path.join(place, path))
                if seen != cell["algorithm"] or (path in listed) != (seen != "-"):
                    wrong.append((mask, name, version, path, seen, cell["algorithm"], path in listed))
    assert not wrong


def test_figure_1(share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]) -> None:
    def prepare(tree: str) -> None:
        for server in REVERSE:
            path = os.path.join(tree, f"owned-by-{server}")
            Path(path).write_text("")
            os.chown(path, server, 0)

    tree = share(f"rw,{FIGURE_1}", prepare)
    for version in VERSIONS:
        place = mount_nfs(tree, version, "noac")
        for client, server in FORWARD.items():
            name = f"made-by-{client}-{version}"
            user(client, 7).do(os.mkdir, os.path.join(place, name))
            assert os.stat(tree.real(name)).st_uid == server, (client, version)
        someone = user(12345, 7)
        for server, client in REVERSE.items():
            # A user may be 65534 on a client, where the kernel checks by what is shown.
            shown = MAX_ID if client == NOBODY else client
            assert someone.do(os.stat, os.path.join(place, f"owned-by-{server}")).st_uid == shown, (server, version)


def test_a_squashed_caller_owns_its_files(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """The kernel checks by what is shown: 850 is not the 800 that stands for the range (`view.KernelCheckedCaller`)."""
    tree = share(f"rw,{FIGURE_1}")
    for version in VERSIONS:
        place = mount_nfs(tree, version, "noac")
        for uid, others in ((800, 850), (850, 800), (999, 100)):
            path = os.path.join(place, f"{uid}-{version}")
            owner = user(uid, 7)
            owner.do(Path(path).write_text, "mine")
            owner.do(os.chmod, path, 0o600)
            assert owner.do(Path(path).read_text) == "mine"
            assert owner.do(os.stat, path).st_uid == uid
            other = user(others, 7)
            if others >= 800:
                # Until the server has the first one's CLOSE, the second one may be refused (docs/nfs.md).
                wait_until(partial(can_read, other, path))
            else:
                assert other.error(Path(path).read_text) == 13, (uid, others, version)
            assert os.stat(tree.real(f"{uid}-{version}")).st_uid == 517


def can_read(who: User, path: str) -> bool:
    return who.error(Path(path).read_text) == 0


def test_what_the_daemon_asks_does_not_change_whom_the_kernel_takes_for_the_owner(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """A change behind the mount makes the daemon open the file in its own mount (`recall`), while 850 works with it."""
    tree = share(f"rw,{FIGURE_1}")
    path = os.path.join(mount_nfs(tree, "4.2", "noac"), "file")
    owner = user(850, 7)
    opened = owner.do(os.open, path, os.O_CREAT | os.O_RDWR)  # with a delegation, the daemon would not get as far
    known = os.open(os.path.join(tree.path, "file"), os.O_PATH)
    try:
        # Root has looked it up in between, as what makes the file changes it, too.
        wait_until(lambda: owner.do(os.fstat, opened).st_uid == statx(known)[0].st_uid == 850)
        before = requests(tree)["open"]
        Path(tree.real("file")).write_text("changed")
        wait_until(lambda: requests(tree)["open"] > before)
        assert statx(known)[0].st_uid == 850
    finally:
        os.close(known)
