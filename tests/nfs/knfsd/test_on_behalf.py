"""What the kernel's server does by itself is judged by the open file; and a SETATTR of several parts, as a whole."""

import itertools
import os
import stat
from collections.abc import Callable
from typing import Any

import pytest

from tests.agents import User, write
from tests.nfs import nfs3
from tests.nfs.knfsd.fixtures import Service, Share, sh
from tests.nfs.knfsd.worktable import ANN, BEN, CAROL, DAVE, MUCH, TEAM, copy, make_accounts, set_acl

CLOAK = "cloak_list = uid +077 0 -1"
MAPPED = "range_map = uid 11000 11999 map 1000 gid 11000 11999 map 1000"


def prepare(tree: str) -> None:
    """A home that only ann sees, with a file in it that others could not read either."""
    os.mkdir(f"{tree}/ann")
    with open(f"{tree}/ann/file", "wb") as file:
        file.write(os.urandom(MUCH))
    for path, mode in ((f"{tree}/ann", 0o700), (f"{tree}/ann/file", 0o600)):
        os.chown(path, ANN, ANN)
        os.chmod(path, mode)


@pytest.mark.parametrize("options", [CLOAK, f"no_root_squash, {CLOAK}", f"{MAPPED}, {CLOAK}"])
def test_a_copy_on_the_server(
    options: str, share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = share(f"rw, {options}", prepare)
    place = mount_nfs(tree, "4.2")
    ann = user(ANN + (10000 if "range_map" in options else 0))
    ann.do(copy, f"{place}/ann/file")
    with open(tree.real("ann", "file"), "rb") as file, open(tree.real("ann", "file.copy"), "rb") as made:
        assert made.read() == file.read()
    # A program loses its capabilities when it is written to, by any user.
    program = tree.real("ann", "file.copy")
    os.setxattr(program, "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    ann.do(copy, f"{place}/ann/file", False)
    assert "security.capability" not in os.listxattr(program)


def hold_open(path: str) -> int:
    return os.open(path, os.O_RDWR)


def test_an_open_file_lets_nobody_in_but_the_kernel(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """Not the client's root, although the server's threads are the kernel's; nor root on the server."""
    tree = share(f"rw, no_root_squash, {CLOAK}", prepare)
    ann = user(ANN)
    ann.do(hold_open, f"{mount_nfs(tree, '4.2')}/ann/file")
    owner, root = (nfs3.Client("127.0.0.1", uid, uid) for uid in (ANN, 0))
    try:
        handle = owner.walk(owner.mount(tree.path), "ann", "file")
        assert owner.getattr(handle)[0] == nfs3.OK
        assert root.getattr(handle)[0] == nfs3.STALE
        assert root.read(handle)[0] == nfs3.STALE
        assert root.setattr(handle, size=0) == nfs3.STALE
        assert os.stat(tree.real("ann", "file")).st_size == MUCH
        assert not os.path.exists(f"{tree.path}/ann/file")
    finally:
        owner.close()
        root.close()


# -- several parts in one SETATTR ------------------------------------------------------------------

LONG_AGO = 1_000_000_000
PARTS: dict[str, dict[str, Any]] = {
    "mode": {"mode": 0o640},
    "uid": {"uid": BEN},
    "gid": {"gid": BEN},
    "size": {"size": 3},
    "atime": {"atime": LONG_AGO - 5},
    "mtime": {"mtime": LONG_AGO - 5},
    "atime now": {"atime": nfs3.NOW},
    "mtime now": {"mtime": nfs3.NOW},
}
CHANGES = [
    parts
    for number in (1, 2, 3)
    for parts in itertools.combinations(PARTS, number)
    if len({part.split()[0] for part in parts}) == number
]
CALLERS = {"owner": (ANN, [TEAM]), "group": (BEN, [TEAM]), "ACL": (CAROL, []), "other": (DAVE, [])}


def prepare_for_all(tree: str) -> None:
    for label, number in itertools.product(CALLERS, range(len(CHANGES))):
        path = f"{tree}/{label}{number}"
        write(path, b"content")
        os.chown(path, ANN, TEAM)
        set_acl(path)
        os.utime(path, (LONG_AGO, LONG_AGO))


def changed(path: str, tree: str) -> dict[tuple[str, tuple[str, ...]], tuple[object, ...]]:
    """What came of each change by each caller, and of the file."""
    found: dict[tuple[str, tuple[str, ...]], tuple[object, ...]] = {}
    for label, (uid, groups) in CALLERS.items():
        client = nfs3.Client("127.0.0.1", uid, uid, groups)
        top = client.mount(path)
        for number, parts in enumerate(CHANGES):
            wanted: dict[str, Any] = {}
            for part in parts:
                wanted |= PARTS[part]
            status = client.setattr(client.walk(top, f"{label}{number}"), **wanted)
            info = os.stat(f"{tree}/{label}{number}")
            times = tuple(
                seconds if seconds <= LONG_AGO else "now" for seconds in (int(info.st_atime), int(info.st_mtime))
            )
            found[label, parts] = status, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_size, times
        client.close()
    return found


@pytest.mark.parametrize("options", ["rw", f"rw, {CLOAK}"])
def test_a_setattr_of_several_parts(
    options: str, share: Callable[..., Share], service: Service, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make_accounts()
    tree = share(options, prepare_for_all)
    bare = f"/tree/bare-{next(service.numbers)}"
    os.mkdir(bare)
    os.chmod(bare, 0o777)
    prepare_for_all(bare)
    sh("exportfs", "-o", "rw,insecure,no_subtree_check,fsid=4321", f"*:{bare}")
    try:
        expected = changed(bare, bare)
    finally:
        sh("exportfs", "-u", f"*:{bare}")
    found = changed(tree.path, tree.source)
    assert {key: (found[key], value) for key, value in expected.items() if found[key] != value} == {}
