"""Directories of which one caller is shown everything: absent names, and entries that the kernel keeps.

Each rule has a test here that fails without it. Arbitrary sequences are in `test_stateful.py`.
"""

import errno
import os
import signal
import stat
import subprocess
from collections import Counter
from collections.abc import Callable

import pyfuse3
import pytest

from tests.agents import User, become, names
from tests.mount.conftest import Mount, told
from tests.mount.test_audience import GROUP, enter_as, scene
from tests.mount.test_caching import CLOAKED, OTHER, OWNER, put, requests
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

HAS_PATCH = hasattr(pyfuse3.FileInfo, "cache_readdir")
with_patch = pytest.mark.skipif(not HAS_PATCH, reason="this pyfuse3 is not patched (scripts/setup --patched-pyfuse3)")
without_patch = pytest.mark.skipif(HAS_PATCH, reason="this pyfuse3 is patched (scripts/setup --released-pyfuse3)")

MANY = 2000

__all__ = ["scene"]  # a fixture

_held: list[int] = []


def hold_open(path: str) -> None:
    _held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def names_held() -> list[str]:
    return names(_held[-1])


def list_in_part(path: str) -> str:
    with os.scandir(path) as entries:
        return next(entries).name


def fails(path: str) -> int:
    """How often it is not there, of a hundred times."""
    count = 0
    for _ in range(100):
        try:
            os.stat(path)
        except FileNotFoundError:
            count += 1
    return count


def asked(m: Mount, user: User, call: Callable[..., object], *args: object) -> Counter[str]:
    """How many requests of each kind a call makes."""
    before = requests(m)
    user.do(call, *args)
    return requests(m) - before


def keeps_entries(m: Mount, user: User) -> bool:
    """Whether a listing makes no request for entries.

    After a change it may make one, because what has changed is forgotten once more some time after the daemon heard of
    it.
    """
    return asked(m, user, names, ".")["readdir"] == 0


def know(user: User, path: str) -> None:
    """Have the daemon find out that everything in it is shown, and the kernel keep the entries."""
    told()
    user.do(os.chdir, path)
    for _ in range(3):
        user.do(names, ".")


def know_all(m: Mount, user: User, path: str) -> None:
    """Do so until the daemon knows it: a hard link that anybody makes on the same file system ends all proofs."""
    for _ in range(10):
        know(user, path)
        if is_known(m, user):
            return
    pytest.fail("the daemon never knows that everything is shown")


def is_known(m: Mount, user: User) -> bool:
    """Whether the daemon knows that everything is shown in the directory where this user stands."""
    count = asked(m, user, fails, "absent")["lookup"]
    assert count <= 2 or count >= 100
    return count <= 2


pytestmark = pytest.mark.usefixtures("figures_at_once")


# -- absent names ----------------------------------------------------------------------------------


def test_absent_names_are_remembered_where_nothing_is_hidden(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    told()
    owner.do(os.chdir, m.at("homes/owner"))
    assert not is_known(m, owner)  # nobody has looked
    know_all(m, owner, m.at("homes/owner"))
    owner.do(os.mkdir, "new")  # it is the caller's own
    assert is_known(m, owner)
    owner.do(os.rmdir, "new")
    assert owner.error(os.stat, "new") == errno.ENOENT


def link_twice(path: str) -> None:
    put(path, OWNER, 0o644)
    os.link(path, os.path.join(os.path.dirname(path), "work/link"))


NOT_SURELY_SHOWN: dict[str, Callable[[str], object]] = {
    "hidden": lambda path: put(path, OTHER, 0o600),
    "shown to a group": lambda path: put(path, OTHER, 0o640, gid=GROUP),
    "a hidden directory": lambda path: put(path, OTHER, stat.S_IFDIR | 0o700),
    "with another name": link_twice,
}


@pytest.mark.parametrize("what", NOT_SURELY_SHOWN)
def test_a_directory_with_an_entry_that_is(what: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    NOT_SURELY_SHOWN[what](os.path.join(scene, "homes/owner/entry"))
    m = mount("-o", CLOAKED)
    owner = user(OWNER, OWNER, [GROUP])
    know(owner, m.at("homes/owner"))
    assert not is_known(m, owner)
    assert asked(m, owner, names, ".")["readdir"] >= 1


@pytest.mark.parametrize("what", NOT_SURELY_SHOWN)
def test_such_an_entry_is_made_behind_the_mount(what: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    """What was remembered to be absent must not differ from it by the time of an answer."""
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know_all(m, owner, m.at("homes/owner"))
    NOT_SURELY_SHOWN[what](m.real("homes/owner/entry"))
    told()
    assert not is_known(m, owner)
    assert owner.error(os.stat, "entry") == (errno.ENOENT if "hidden" in what or "group" in what else 0)


def test_a_directory_in_which_something_is_mounted(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """What becomes of that, its file system need not report."""
    place = put(os.path.join(scene, "homes/owner/place"), OWNER, stat.S_IFDIR | 0o755)
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True)
    try:
        os.chown(place, OTHER, OTHER)
        os.chmod(place, 0o755)
        m = mount("-o", CLOAKED)
        owner = user(OWNER)
        know(owner, m.at("homes/owner"))
        assert owner.do(names, ".") == ["place", "public", "secret", "work"]
        assert not is_known(m, owner)
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_where_only_some_with_that_uid_may_search(scene: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(scene, "homes/owner/odd"), OTHER, stat.S_IFDIR | 0o705, gid=GROUP)
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner/odd"))
    assert not is_known(m, owner)
    assert user(OWNER, OWNER, [GROUP]).error(os.stat, m.at("homes/owner/odd/absent")) == errno.EACCES


def test_an_absent_name_that_appears(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    assert owner.do(fails, "new") == 100
    put(m.real("homes/owner/new"), OWNER, 0o600)
    told()
    owner.do(os.stat, "new")
    os.rename(m.real("homes/owner/public"), m.real("homes/owner/absent"))
    told()
    owner.do(os.stat, "absent")


def test_others_are_asked_for_what_is_absent_for_one(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    know_all(m, owner, m.at("homes/owner"))
    os.chmod(m.real("homes/owner"), 0o755)
    told()
    assert owner.do(fails, "absent") == 100
    other.do(os.chdir, m.at("homes/owner"))
    assert not is_known(m, other)
    assert not is_known(m, owner)


@pytest.mark.parametrize("how", ["through the mount", "behind the mount"])
def test_an_entry_becomes_hidden(how: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Its owner, who never was told of the directory, has had it open since it was elsewhere."""
    put(os.path.join(scene, "homes/theirs"), OTHER, 0o644)
    for path in ("homes", "homes/owner"):
        os.chmod(os.path.join(scene, path), 0o701)  # visible, and not everybody's to search
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    fd = other.do(os.open, m.at("homes/theirs"), os.O_RDONLY)
    os.rename(m.real("homes/theirs"), m.real("homes/owner/theirs"))
    know(owner, m.at("homes/owner"))
    owner.do(hold_open, ".")
    assert is_known(m, owner)
    assert owner.do(names_held) == owner.do(names, ".") == ["public", "secret", "theirs", "work"]
    if how == "through the mount":
        other.do(os.fchmod, fd, 0o600)
    else:
        os.chmod(m.real("homes/owner/theirs"), 0o600)
        told()
    assert owner.do(names_held) == owner.do(names, ".") == ["public", "secret", "work"]
    assert not is_known(m, owner)


def drop_what_is_below(m: Mount, user: User, directory: str) -> None:
    """Have the kernel forget what is in a directory that this user may not know of, and wait until the daemon knows."""
    assert user.error(os.stat, m.at(directory)) == errno.ENOENT
    requests(m)  # the kernel asks for this after it has said what it has dropped


def test_a_directory_becomes_hidden_that_the_kernel_does_not_know(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    know(owner, m.at("homes/owner"))
    drop_what_is_below(m, other, "homes/owner")
    assert is_known(m, owner)
    os.chown(m.real("homes/owner/work"), OTHER, OTHER)
    os.chmod(m.real("homes/owner/work"), 0o700)
    told()
    assert owner.do(names, ".") == ["public", "secret"]
    assert not is_known(m, owner)


def test_a_file_becomes_hidden_by_another_name(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Nothing that is reported names the directory."""
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    know(owner, m.at("homes/owner"))
    drop_what_is_below(m, other, "homes/owner")
    assert is_known(m, owner)
    os.link(m.real("homes/owner/public"), m.real("link"))
    os.chown(m.real("link"), OTHER, OTHER)
    os.chmod(m.real("link"), 0o600)
    os.unlink(m.real("link"))
    told()
    assert owner.do(names, ".") == ["secret", "work"]
    assert not is_known(m, owner)


def test_a_directory_that_is_in_the_tree_twice(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """What is done by the one path is not reported for the other."""
    os.mkdir(os.path.join(scene, "again"))
    subprocess.run(["mount", "--bind", os.path.join(scene, "homes"), os.path.join(scene, "again")], check=True)
    try:
        m = mount("-o", CLOAKED)
        owner = user(OWNER)
        owner.do(os.stat, m.at("again"))
        know(owner, m.at("homes/owner"))
        assert not is_known(m, owner)
    finally:
        subprocess.run(["umount", "--lazy", os.path.join(scene, "again")], check=True)


# -- the entries -----------------------------------------------------------------------------------


@without_patch
def test_without_the_patch_listings_are_asked_for(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    assert asked(m, owner, names, ".")["readdir"] >= 1


@with_patch
def test_the_kernel_keeps_the_entries_for_their_only_reader(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    for _ in range(3):
        now = asked(m, owner, names, ".")
        assert (now["opendir"], now["readdir"]) == (1, 0)
    assert owner.do(names, ".") == ["public", "secret", "work"]
    owner.do(os.mkdir, "new")
    assert owner.do(names, ".") == ["new", "public", "secret", "work"]
    wait_until(lambda: keeps_entries(m, owner))
    owner.do(os.rename, "new", "newer")
    assert owner.do(names, ".") == ["newer", "public", "secret", "work"]
    owner.do(os.rmdir, "newer")
    assert owner.do(names, ".") == ["public", "secret", "work"]


@with_patch
def test_whoever_may_not_read_the_directory_is_refused(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    os.chmod(m.real("homes/owner"), 0o300)
    assert owner.error(names, ".") == errno.EACCES


@with_patch
def test_listings_of_directories_for_more_than_one_are_asked_for(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    know(owner, m.at("homes"))
    assert asked(m, owner, names, ".")["readdir"] >= 1
    know(owner, m.at("homes/owner"))
    wait_until(lambda: keeps_entries(m, owner))
    os.chmod(m.real("homes/owner"), 0o755)
    told()
    assert other.do(names, m.at("homes/owner")) == ["public", "work"]
    assert asked(m, owner, names, ".")["readdir"] >= 1
    assert owner.do(names, ".") == ["public", "secret", "work"]
    assert other.do(names, m.at("homes/owner")) == ["public", "work"]


@with_patch
def test_with_no_client_cache_listings_are_asked_for(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},no_client_cache")
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    assert asked(m, owner, names, ".")["readdir"] >= 1


BEHIND: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "made": (lambda home: put(f"{home}/new", OWNER, 0o600), ["new", "public", "secret", "work"]),
    "removed": (lambda home: os.unlink(f"{home}/secret"), ["public", "work"]),
    "renamed": (lambda home: os.rename(f"{home}/secret", f"{home}/moved"), ["moved", "public", "work"]),
    "moved away": (lambda home: os.rename(f"{home}/secret", f"{home}/work/secret"), ["public", "work"]),
    "given away": (lambda home: os.chown(f"{home}/secret", OTHER, OTHER), ["public", "work"]),
    "mounted over": (
        lambda home: subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"mode=700,uid={OTHER}", "none", f"{home}/work"], check=True
        ),
        ["public", "secret"],
    ),
}


@with_patch
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("what", BEHIND)
def test_an_entry_changes_behind_the_mount(
    what: str, holds: bool, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    owner.do(hold_open, ".")
    assert owner.do(names_held) == ["public", "secret", "work"]
    change, expected = BEHIND[what]
    change(m.real("homes/owner"))
    try:
        told()
        listed = names_held if holds else names
        wait_until(lambda: owner.do(listed, *([] if holds else ["."])) == expected)
        for _ in range(4):
            assert owner.do(names, ".") == owner.do(names_held) == expected
    finally:
        if what == "mounted over":
            subprocess.run(["umount", "--lazy", m.real("homes/owner/work")], check=True)


@with_patch
@pytest.mark.parametrize("words", [CLOAKED, "rw,no_root_squash"])
def test_a_listing_right_after_a_change(words: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Whoever opens the directory after a change behind the mount gets what is there."""
    m = mount("-o", words)
    owner = user(OWNER)
    for number in range(10):
        know(owner, m.at("homes/owner/work"))
        put(m.real(f"homes/owner/work/new-{number}"), OWNER, 0o600)
        assert f"new-{number}" in owner.do(names, ".")


@with_patch
@pytest.mark.parametrize("above", [False, True])
def test_a_directory_becomes_hidden_while_it_is_open(above: bool, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    know(owner, m.at("homes/owner/work"))
    owner.do(hold_open, ".")
    assert owner.do(names_held) == ["secret", "vault"]
    hidden = m.real("homes/owner" if above else "homes/owner/work")
    os.chown(hidden, OTHER, OTHER)
    os.chmod(hidden, 0o700)
    told()
    wait_until(lambda: owner.error(names_held) == errno.ESTALE)


@with_patch
def test_a_reload_ends_it(scene: str, base: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(scene, "homes/owner/theirs"), OTHER, 0o600)
    config = os.path.join(base, "exports")

    def configure(first: int) -> None:
        with open(config, "w", encoding="utf-8") as file:
            file.write(f"{scene} *(rw, no_root_squash, cloak_list=uid +077 {first} 3999)\n")

    configure(3900)
    m = mount("--exports", config)
    owner = user(OWNER)
    know(owner, m.at("homes/owner"))
    owner.do(hold_open, ".")
    assert owner.do(names_held) == ["public", "secret", "theirs", "work"]
    configure(3000)
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: owner.do(names_held) == ["public", "secret", "work"])
    assert owner.do(names, ".") == ["public", "secret", "work"]


@with_patch
def test_whoever_is_handed_a_descriptor_does_not_list_for_others(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """What is answered to it is what it sees, and nobody else gets that."""
    os.chmod(os.path.join(scene, "homes/owner"), 0o755)
    os.chmod(os.path.join(scene, "homes"), 0o701)
    os.chown(os.path.join(scene, "homes"), OWNER, OWNER)
    m = mount("-o", CLOAKED)
    owner, handed = user(OWNER), user(0)
    know(owner, m.at("homes/owner"))
    owner.do(hold_open, ".")
    handed.do(enter_as, OWNER, m.at("homes/owner"))
    handed.do(open_as, OWNER, ".")
    handed.do(become, OTHER, OTHER, [])
    put(m.real("homes/owner/theirs"), OTHER, 0o600)
    told()
    for _ in range(20):
        assert handed.do(names_held) == ["public", "theirs", "work"]
    wait_until(lambda: owner.do(names_held) == ["public", "secret", "work"])
    assert owner.do(names, ".") == ["public", "secret", "work"]


def open_as(uid: int, path: str) -> None:
    os.setegid(uid)
    os.seteuid(uid)
    hold_open(path)
    os.seteuid(0)
    os.setegid(0)


@with_patch
def test_a_long_directory(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """It takes many answers, of which readers may want a part."""
    large = put(os.path.join(scene, "homes/owner/large"), OWNER, stat.S_IFDIR | 0o700)
    for number in range(MANY):
        put(f"{large}/{number}", OWNER, 0o600)
    m = mount("-o", CLOAKED)
    owner, second = user(OWNER), user(OWNER)
    expected = sorted(str(number) for number in range(MANY))
    told()
    owner.do(os.chdir, m.at("homes/owner/large"))
    second.do(os.chdir, m.at("homes/owner/large"))
    for _ in range(3):
        assert owner.do(list_in_part, ".") in expected
        assert second.do(names, ".") == owner.do(names, ".") == expected
    wait_until(lambda: keeps_entries(m, owner))
    owner.do(hold_open, ".")
    for number in range(0, MANY, 400):
        os.unlink(f"{large}/{number}")
        expected.remove(str(number))
        told()
        assert owner.do(list_in_part, ".") in expected
        assert owner.do(names_held) == second.do(names, ".") == owner.do(names, ".") == expected
