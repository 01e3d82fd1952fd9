"""An id without a counterpart matches no user in the kernel's check either: neither root nor a client's nobody."""

import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from cloakfs.mapping import MAX_ID
from tests.agents import User, read, write
from tests.nfs.knfsd.fixtures import VERSIONS, Service, Share, exported, nfs_mounted

ANN, BOB, SQUASHED, NOBODY = 1000, 1001, 850, 65534
# Ann's and Bob's have their numbers on the server; STRANGER has none on the client.
STRANGER = 7000
MAPPED = (
    "rw,no_client_cache,range_map = uid 1000 1999 map 1000 uid 800 999 squash 517 "
    "gid 1000 1999 map 1000 gid 800 999 squash 518"
)
PLUG_IN = """\
class P:
    def forward(self, caller):
        return caller._replace(uid=4444) if caller.uid in (0, 65534) else caller
"""
OPTIONS = {
    "mapped": MAPPED,
    "root has an identity of its own": f"{MAPPED} uid 0 map 500",
    "plug-in": "rw,no_client_cache,policy=/tree/ids.py:P",
    "plug-in, no_root_squash": "rw,no_client_cache,no_root_squash,policy=/tree/ids.py:P",
}

ACCESS = "system.posix_acl_access"


class Site(NamedTuple):
    trees: dict[str, Share]
    places: dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def site(service: Service) -> Iterator[Site]:
    os.makedirs("/tree", exist_ok=True)
    Path("/tree/ids.py").write_text(PLUG_IN)
    with ExitStack() as stack:
        trees = {name: stack.enter_context(exported(service, options)) for name, options in OPTIONS.items()}
        yield Site(
            trees,
            {
                (name, version): stack.enter_context(nfs_mounted(tree, version, "noac"))
                for name, tree in trees.items()
                for version in VERSIONS
            },
        )


def private(path: str, owner: int, group: int, mode: int) -> None:
    Path(path).write_text("private")
    os.chown(path, owner, group)
    os.chmod(path, mode)


def grant_to_stranger(path: str) -> None:
    """An ACL by which the owner may do everything, and as a named user and group the stranger, too."""
    nobody = 2**32 - 1
    entries = [(1, 7, nobody), (2, 7, STRANGER), (4, 0, nobody), (8, 7, STRANGER), (16, 7, nobody), (32, 0, nobody)]
    os.setxattr(path, ACCESS, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", [*OPTIONS, "acl", "group"])
def test_held_open(site: Site, case: str, version: str, user: Callable[..., User]) -> None:
    """Whom the daemon would refuse, the kernel does not let share a file that another holds open."""
    which = case if case in OPTIONS else "mapped"
    name = f"{case} {version}"
    real, path = site.trees[which].real(name), os.path.join(site.places[which, version], name)
    private(real, ANN, STRANGER if case == "group" else ANN, 0o660 if case == "group" else 0o600)
    if case == "acl":
        grant_to_stranger(real)
    holder = user(ANN)
    fd = holder.do(os.open, path, os.O_RDWR)
    assert holder.do(os.pread, fd, 100, 0) == b"private"
    for uid in (0, NOBODY, BOB, STRANGER, MAX_ID):
        who = user(uid, NOBODY if uid in (0, NOBODY) else uid)
        if case == "group" and uid == MAX_ID:
            continue  # a group can be claimed, see docs/nfs.md
        assert who.error(read, path) == errno.EACCES, (name, uid)
        assert who.error(write, path, b"overwritten", 0) == errno.EACCES, (name, uid)
    holder.do(os.pwrite, fd, b"changed", 0)
    holder.do(os.close, fd)
    assert Path(real).read_text() == "changed"


@pytest.mark.parametrize("version", VERSIONS)
def test_set_id_programs(site: Site, version: str, user: Callable[..., User]) -> None:
    """A program that one of a squashed range could plant does not run as another."""
    place = site.places["mapped", version]
    for name, uid, gid in (("squashed", 517, 518), ("nobodys", NOBODY, NOBODY), ("anns", ANN, ANN)):
        real, path = site.trees["mapped"].real(f"{name} {version}"), os.path.join(place, f"{name} {version}")
        shutil.copy("/usr/bin/id", real)
        os.chown(real, uid, gid)
        os.chmod(real, 0o6755)
        shown, runs_as = (0o6755, ANN) if name == "anns" else (0o755, SQUASHED)
        who = user(SQUASHED)
        assert who.do(os.stat, path).st_mode & 0o7777 == shown, name
        ids = [int(who.do(subprocess.check_output, [path, option])) for option in ("-u", "-g")]
        assert ids == [runs_as] * 2, name
    # The one who owns it keeps the bit that it is not shown.
    path, real = os.path.join(place, f"squashed {version}"), site.trees["mapped"].real(f"squashed {version}")
    user(SQUASHED).do(os.chmod, path, 0o700)
    assert os.stat(real).st_mode & 0o7777 == 0o6700
