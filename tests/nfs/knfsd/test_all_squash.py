"""Entries with all_squash: the server makes all callers one, so that what is private is cached for this caller."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents import User, read, write
from tests.mount import conftest
from tests.nfs.knfsd.fixtures import VERSIONS, Share, requests, sh

ANN, BOB = 1000, 1001
CLOAK = "cloak_list = uid +077 1 6000"
SQUASHED = f"rw,all_squash,anonuid={ANN},anongid={ANN},{CLOAK}"

MakeShare = Callable[..., Share]
MakeUser = Callable[..., User]
MountNfs = Callable[..., str]


def fill(tree: str) -> None:
    """A home for each of them, which is its owner's alone."""
    for name, uid in (("ann", ANN), ("bob", BOB)):
        home = Path(tree, "home", name)
        home.mkdir(parents=True)
        (home / "letter").write_text(name)
        for path, mode in ((home / "letter", 0o600), (home, 0o700)):
            os.chown(path, uid, uid)
            path.chmod(mode)


def look(path: str) -> int:
    for _ in range(20):
        os.stat(path)
    return os.stat(path).st_uid


@pytest.mark.parametrize("version", VERSIONS)
def test_everybody_is_the_same_user(version: str, share: MakeShare, mount_nfs: MountNfs, user: MakeUser) -> None:
    tree = share(SQUASHED, fill)
    at = mount_nfs(tree, version, "noac,lookupcache=none")
    for who in (user(ANN), user(BOB), user(0)):
        assert (
            who.do(look, f"{at}/home/ann/letter") == ANN
        )  # as they are stored, since no caller is distinguished from another
        assert who.error(os.stat, f"{at}/home/bob") == errno.ENOENT
    # The client's own check is by these numbers (NFSv3 asks the server instead).
    assert user(ANN).do(read, f"{at}/home/ann/letter") == b"ann"
    user(ANN).do(write, f"{at}/home/ann/new", b"x")
    assert os.stat(tree.real("home/ann/new")).st_uid == ANN
    assert user(ANN).error(os.chown, f"{at}/home/ann/new", BOB, -1) in (errno.EPERM, errno.EINVAL)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_private_is_remembered_for_the_one_caller(
    version: str, share: MakeShare, mount_nfs: MountNfs, user: MakeUser
) -> None:
    tree = share(SQUASHED, fill)
    at = mount_nfs(tree, version, "noac")  # so the client asks for the attributes each time
    user(BOB).do(look, f"{at}/home/ann/letter")
    before = requests(tree)
    for who in (user(ANN), user(BOB)):
        who.do(look, f"{at}/home/ann/letter")
    counts = requests(tree) - before
    assert counts["lookup"] + counts["getattr"] <= 10, counts


@pytest.mark.parametrize("version", VERSIONS)
def test_a_change_behind_the_export_is_seen_at_once(
    version: str, share: MakeShare, mount_nfs: MountNfs, user: MakeUser
) -> None:
    tree = share(SQUASHED, fill)
    at = mount_nfs(tree, version, "noac,lookupcache=none")
    bob = user(BOB)
    letter = f"{at}/home/ann/letter"
    assert bob.do(look, letter) == ANN
    os.chmod(tree.real("home/ann/letter"), 0o640)
    conftest.told()
    assert bob.do(os.stat, letter).st_mode & 0o777 == 0o640
    os.chown(tree.real("home/ann/letter"), BOB, BOB)
    conftest.told()
    assert bob.error(os.stat, letter) in (errno.ENOENT, errno.ESTALE)
    assert bob.do(os.stat, f"{at}/home/ann").st_uid == ANN
    os.chown(tree.real("home/ann"), BOB, BOB)
    conftest.told()
    assert bob.error(os.stat, f"{at}/home/ann") in (errno.ENOENT, errno.ESTALE)


def words_of(tree: Share) -> list[str]:
    """The options that the server itself has for the export."""
    line = next(line for line in Path("/var/lib/nfs/etab").read_text().splitlines() if line.startswith(tree.path))
    return line.partition("(")[2].rstrip(")").split(",")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reload_makes_one_caller_of_all_or_tells_them_apart_again(
    version: str, share: MakeShare, mount_nfs: MountNfs, user: MakeUser
) -> None:
    tree = share(SQUASHED, fill)
    assert {"all_squash", f"anonuid={ANN}", f"anongid={ANN}"} <= set(words_of(tree))
    at = mount_nfs(tree, version, "noac,lookupcache=none")
    ann, bob = user(ANN), user(BOB)
    assert bob.do(look, f"{at}/home/ann/letter") == ANN
    result = tree.set(f"rw,{CLOAK}")
    assert result["renewed"] == [tree.path]
    assert "no_all_squash" in words_of(tree)
    assert bob.error(os.stat, f"{at}/home/ann") == errno.ENOENT
    assert ann.do(look, f"{at}/home/ann/letter") == ANN
    assert bob.error(os.stat, f"{at}/home/ann/letter") == errno.ENOENT
    result = tree.set(SQUASHED.replace(f"{ANN}", f"{BOB}"))
    assert result["renewed"] == [tree.path]
    assert ann.error(os.stat, f"{at}/home/ann") == errno.ENOENT
    assert ann.do(look, f"{at}/home/bob/letter") == BOB
    result = tree.set(SQUASHED)  # another identity for all
    assert result["renewed"] == [tree.path]
    assert ann.error(os.stat, f"{at}/home/bob") == errno.ENOENT
    assert ann.do(look, f"{at}/home/ann/letter") == ANN


def test_local_root_does_not_end_what_is_remembered(share: MakeShare, mount_nfs: MountNfs, user: MakeUser) -> None:
    tree = share(SQUASHED, fill)
    at = mount_nfs(tree, "4.2", "noac")
    user(BOB).do(look, f"{at}/home/ann/letter")
    sh("ls", "-lR", tree.path)
    user(BOB).do(look, f"{at}/home/ann/letter")
    before = requests(tree)
    user(BOB).do(look, f"{at}/home/ann/letter")
    counts = requests(tree) - before
    assert counts["lookup"] + counts["getattr"] <= 5, counts
