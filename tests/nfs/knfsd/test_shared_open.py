"""The kernel's server shares an open file without asking the daemon, and must still refuse others.

NFSv4 has one state per file on the server, and on one client the page cache is that of all users.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.agents import User, read, write
from tests.nfs.knfsd.fixtures import VERSIONS, Service, Share, drop_caches, exported, nfs_mounted

ANN, BOB, NOBODY = 1000, 1001, 65534
# Ann's and Bob's have their numbers on the server; 7000 has none on the client, and is shown as nobody's.
OPTIONS = "rw,no_client_cache,range_map = uid 1000 1999 map 1000 gid 1000 1999 map 1000,cloak_list = uid +077 1000 1000"
MODES = {"read-only": os.O_RDONLY, "read-write": os.O_RDWR}


class Site(NamedTuple):
    tree: Share
    places: dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def site(service: Service) -> Iterator[Site]:
    with ExitStack() as stack:
        tree = stack.enter_context(exported(service, OPTIONS))
        yield Site(
            tree,
            {
                (version, option): stack.enter_context(nfs_mounted(tree, version, option))
                for version in VERSIONS
                for option in ("rw", "noac")
            },
        )


def prepare(path: str, owner: int, mode: int, group: int = 0) -> None:
    Path(path).write_text("private")
    os.chown(path, owner, group or owner)
    os.chmod(path, mode)


def try_all(other: User, path: str) -> set[int]:
    """How reading and writing fail, at once and after the caches were dropped."""
    errors = set()
    for _ in range(2):
        errors.add(other.error(read, path))
        errors.add(other.error(write, path, b"overwritten", 0))
        errors.add(other.error(write, path, b"appended", os.O_APPEND))
        errors.add(other.error(os.truncate, path, 0))
        drop_caches()
    return errors


@pytest.mark.parametrize("option", ["rw", "noac"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["private", "hidden", "of nobody"])
def test_held_open(site: Site, how: str, mode: str, version: str, option: str, user: Callable[..., User]) -> None:
    name = f"{how} {mode} {version} {option}"
    real, path = site.tree.real(name), os.path.join(site.places[version, option], name)
    holder, others, expected = user(ANN), [user(BOB), None], {errno.EACCES}
    if how == "private":  # Bob's, as others' files of his are not cloaked
        holder, others = user(BOB), [user(ANN), None]
        prepare(real, BOB, 0o600)
    elif how == "hidden":
        prepare(real, ANN, 0o600)
        expected = {errno.ENOENT, errno.ESTALE}
    else:
        # Who is called nobody on the client is not the owner who is shown as nobody.
        others = [user(NOBODY)]
        prepare(real, 7000, 0o660, ANN)
    fd = holder.do(os.open, path, MODES[mode])
    assert holder.do(os.pread, fd, 100, 0) == b"private"
    for other in others:
        got = try_all(other or user(0), path)
        assert got <= expected, (name, other and other.uid, got)
    if mode == "read-write":
        holder.do(os.pwrite, fd, b"changed", 0)
    holder.do(os.close, fd)
    assert Path(real).read_text() == ("changed" if mode == "read-write" else "private")
