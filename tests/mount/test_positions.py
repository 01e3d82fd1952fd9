"""Positions of directory entries (d_off, telldir(3), cookies of NFS) tell nothing of hidden entries, and lead back."""

import errno
import os
import random
from collections.abc import Callable, Iterator

import pytest

from cloakfs import linux
from tests.agents import User
from tests.mount.conftest import Mount, mounted, told
from tests.mount.loopfs import filesystem

MakeUser = Callable[..., User]

OWNER, STRANGER = 4001, 4002
OPTIONS = f"no_root_squash,cloak_list=uid +007 {OWNER} {OWNER}"
MANY = 1500
HIDDEN_EACH = 3  # every third one

Listed = list[tuple[bytes, int]]
"""Names, each with the position after it."""


@pytest.fixture(params=["tmpfs", "ext4", "btrfs"])
def real(request: pytest.FixtureRequest, base: str) -> Iterator[str]:
    with filesystem(request.param, base) as top:
        path = os.path.join(top, "real")
        os.mkdir(path)
        os.mkdir(os.path.join(path, "d"))
        os.mkdir(os.path.join(base, "mnt"))
        yield path


def make(directory: str, name: str, *, hidden: bool) -> None:
    path = os.path.join(directory, name)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.chown(path, OWNER, OWNER)
    os.chmod(path, 0o600 if hidden else 0o644)


def listed_from(path: str, position: int = 0, size: int = 32768) -> Listed:
    """All that comes after a position, by a new descriptor."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if position:
            os.lseek(fd, position, os.SEEK_SET)
        found: Listed = []
        while batch := [(name, cookie) for name, cookie, _ in linux.getdents(fd, size)]:
            found += batch
        return found
    finally:
        os.close(fd)


def page_from(path: str, position: int, size: int) -> list[tuple[str, int]]:
    """What one READDIR of an NFS server returns, which opens the directory each time."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.lseek(fd, position, os.SEEK_SET)
        return [(os.fsdecode(name), cookie) for name, cookie, _ in linux.getdents(fd, size)]
    finally:
        os.close(fd)


def test_hidden_entries_do_not_show_in_positions(real: str, base: str, user: MakeUser) -> None:
    directory = os.path.join(real, "d")
    for number in range(40):
        make(directory, f"public-{number}", hidden=False)
    with mounted(real, os.path.join(base, "mnt"), "-o", OPTIONS) as m:
        stranger = user(STRANGER)
        before = stranger.do(listed_from, m.at("d"))
        assert len(before) == 42
        for number in range(200):
            make(directory, f"secret-{number}", hidden=True)
        told()
        after = stranger.do(listed_from, m.at("d"))
        if [name for name, _ in after] == [name for name, _ in before]:  # ext4 may hash anew when a directory grows
            assert after == before
        # What the owner is told is told only by entries that others do not see.
        assert len(user(OWNER).do(listed_from, m.at("d"))) == 242
        assert not {cookie for _, cookie in after} & {cookie for _, cookie in listed_from(directory)}
        assert all(2 < cookie < 1 << 63 for _, cookie in after)


def test_the_same_names_have_other_positions_elsewhere(real: str, base: str, user: MakeUser) -> None:
    """On ext4, the real positions are hashes of the names alone."""
    os.mkdir(os.path.join(real, "own"))
    for directory in ("d", "own"):
        for number in range(20):
            make(os.path.join(real, directory), f"guess-{number}", hidden=False)
    with mounted(real, os.path.join(base, "mnt"), "-o", OPTIONS) as m:
        one, other = (user(STRANGER).do(listed_from, m.at(directory)) for directory in ("d", "own"))
        assert {name for name, _ in one} == {name for name, _ in other}
        assert not {cookie for _, cookie in one} & {cookie for _, cookie in other}


def test_each_position_leads_back_also_after_a_restart(real: str, base: str, user: MakeUser) -> None:
    directory = os.path.join(real, "d")
    for number in range(MANY):
        make(directory, f"{number}-{'x' * (number % 50)}", hidden=number % HIDDEN_EACH == 0)
    stranger = user(STRANGER)
    chance = random.Random(1)
    before: Listed = []
    for _ in range(2):
        with mounted(real, os.path.join(base, "mnt"), "-o", OPTIONS) as m:
            whole = stranger.do(listed_from, m.at("d"))
            assert len({name for name, _ in whole}) == len(whole) == 2 + MANY - MANY // HIDDEN_EACH
            assert not before or whole == before
            before = whole
            for place in [0, 1, len(whole) - 2, len(whole) - 1, *chance.sample(range(len(whole)), 20)]:
                rest = stranger.do(listed_from, m.at("d"), whole[place][1])
                assert rest == whole[place + 1 :], place


@pytest.mark.parametrize("size", [200, 1000, 5000])
def test_what_is_removed_meanwhile_neither_skips_nor_repeats(size: int, real: str, base: str, user: MakeUser) -> None:
    """As rm -r does over NFS: whatever was listed is removed before it goes on, and some of what was not yet."""
    directory = os.path.join(real, "d")
    names = [f"{number}" for number in range(MANY)]
    for number, name in enumerate(names):
        make(directory, name, hidden=number % HIDDEN_EACH == 0)
    stranger, chance = user(STRANGER), random.Random(size)
    with mounted(real, os.path.join(base, "mnt"), "-o", OPTIONS) as m:
        position, seen, gone = 0, set[str](), set[str]()
        left = [name for number, name in enumerate(names) if number % HIDDEN_EACH]
        while page := stranger.do(page_from, m.at("d"), position, size):
            position = page[-1][1]
            for name, _ in page:
                assert name not in seen
                seen.add(name)
                if name not in (".", ".."):
                    os.unlink(os.path.join(directory, name))
            unseen = [name for name in left if name not in seen | gone]
            for name in chance.sample(unseen, min(2, len(unseen))):
                os.unlink(os.path.join(directory, name))
                gone.add(name)
        assert not seen & gone
        assert seen | gone == {".", "..", *left}


def test_the_list_of_views(tree: str, mount: Callable[..., Mount], user: MakeUser) -> None:
    m = mount("-o", f"views=0:0 {OWNER}:{OWNER} {STRANGER}:{STRANGER}")
    whole = user(0).do(listed_from, m.path)
    assert {name for name, _ in whole} == {b".", b"..", b"@0", b"@%d" % OWNER, b"@%d" % STRANGER}
    for place, (_, cookie) in enumerate(whole):
        assert user(0).do(listed_from, m.path, cookie) == whole[place + 1 :]
    # Positions are those of the whole list, whoever reads.
    seen = [entry for entry in whole if entry[0] in (b".", b"..", b"@%d" % STRANGER)]
    assert user(STRANGER).do(listed_from, m.path) == seen


def test_a_position_that_was_never_given(tree: str, mount: Callable[..., Mount], user: MakeUser) -> None:
    """It may lead anywhere, or nowhere."""
    make(tree, "public", hidden=False)
    m = mount("-o", OPTIONS)
    stranger, chance = user(STRANGER), random.Random(2)
    for _ in range(50):
        position = chance.randrange(1, 1 << 63)
        error = stranger.error(listed_from, m.path, position)
        assert error in (0, errno.EINVAL)
        if not error:
            assert {name for name, _ in stranger.do(listed_from, m.path, position)} <= {b".", b"..", b"public"}
