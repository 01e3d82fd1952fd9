"""What the kernel caches for the one caller that knows of it, and that no other caller learns of it from that.

Each rule has a test here that fails without it. Arbitrary sequences are in `test_stateful.py`.
"""

import contextlib
import ctypes
import errno
import os
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from tests.agents import User, become, names, read, write
from tests.mount import alterations
from tests.mount.conftest import FIGURES_AT_ONCE, Mount, daemons_with, told
from tests.mount.test_caching import CLOAKED, OTHER, OWNER, STRANGER, many, put, requests
from tests.mount.test_hidden import AT_FDCWD
from tests.mount.test_hung import Far
from tests.mount.test_invalidation import has_let_go, hold, kernel, stalled
from tests.waiting import let_expire, wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

GROUP = 3900
MANY = 300

AN_INSTANT = 0.03
"""Longer than any attributes are cached that are neither for all callers nor for one alone."""

_kept: list[int] = []


@pytest.fixture
def scene(tree: str) -> str:
    """homes/owner is its owner's alone, and so is what is in it, except for homes/owner/public and .../work."""
    os.mkdir(os.path.join(tree, "homes"))
    home = put(os.path.join(tree, "homes/owner"), OWNER, stat.S_IFDIR | 0o700)
    put(os.path.join(home, "secret"), OWNER, 0o600)
    put(os.path.join(home, "public"), OWNER, 0o644)
    put(os.path.join(home, "work"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(home, "work/secret"), OWNER, 0o600)
    put(os.path.join(home, "work/vault"), OWNER, stat.S_IFDIR | 0o700)
    put(os.path.join(home, "work/vault/file"), OWNER, 0o644)
    return tree


__all__ = ["kernel", "stalled"]  # fixtures

INSIDE = ("secret", "public", "work", "work/secret", "work/vault", "work/vault/file")


def look(at: str, inside: tuple[str, ...] = INSIDE) -> None:
    """Have the kernel cache all there is, and hold some of it as a shell or an editor does."""
    os.chdir(at)
    for _ in range(3):
        for path in inside:
            os.stat(path)
            os.listdir(os.path.dirname(path) or ".")
    _kept.extend(os.open(path, os.O_PATH) for path in inside)


def asked(m: Mount, before: Counter[str]) -> int:
    now = requests(m) - before
    return now["lookup"] + now["getattr"]


# -- what is cached ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["", ",default_permissions"])
@pytest.mark.usefixtures("figures_at_once")
def test_a_private_home_is_cached_for_its_owner(words: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED + words)
    owner = user(OWNER)
    told()
    owner.do(look, m.at("homes/owner"))
    before = requests(m)
    for path in INSIDE:
        owner.do(many, os.stat, path)
    assert asked(m, before) <= 5
    before = requests(m)
    for path in INSIDE:
        owner.do(many, os.stat, m.at("homes/owner", path))
    assert asked(m, before) <= 100 * len(INSIDE) + 5  # the name of the home, which others may not know


@pytest.mark.usefixtures("figures_at_once")
def test_what_depends_on_groups_is_not_cached(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """One uid is not one identity: with the group it sees the directory, and without it does not."""
    shared = put(os.path.join(scene, "shared"), OTHER, stat.S_IFDIR | 0o770, gid=GROUP)
    put(os.path.join(shared, "file"), OTHER, 0o660, gid=GROUP)
    put(os.path.join(shared, "own"), OWNER, 0o600)
    m = mount("-o", CLOAKED)
    member, former = user(OWNER, OWNER, [GROUP]), user(OWNER)
    told()
    member.do(os.chdir, m.at("shared"))
    for _ in range(3):
        for path in ("file", "own"):
            member.do(os.stat, path)
            member.do(os.stat, m.at("shared", path))
            assert former.error(os.stat, m.at("shared", path)) == errno.ENOENT
        assert member.do(names, ".") == ["file", "own"]
        assert former.do(names, m.path) == ["homes"]
    before = requests(m)
    member.do(many, os.stat, "own")
    assert asked(m, before) >= 100


TEAM = ("file", "work", "work/file")


@pytest.fixture
def team(tree: str) -> str:
    """team is a group's directory, and so is what is in it; one file in it is one member's alone."""
    put(os.path.join(tree, "team"), STRANGER, stat.S_IFDIR | 0o2770, gid=GROUP)
    put(os.path.join(tree, "team/file"), OWNER, 0o660, gid=GROUP)
    put(os.path.join(tree, "team/work"), OTHER, stat.S_IFDIR | 0o2770, gid=GROUP)
    put(os.path.join(tree, "team/work/file"), OTHER, 0o640, gid=GROUP)
    put(os.path.join(tree, "team/own"), OWNER, 0o600, gid=GROUP)
    return tree


@pytest.mark.parametrize("words", ["", ",default_permissions"])
@pytest.mark.usefixtures("figures_at_once")
def test_a_directory_of_a_group_is_cached_for_its_members(
    words: str, team: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", CLOAKED + words)
    one, two, former, other = user(OWNER, OWNER, [GROUP]), user(OTHER, GROUP), user(OWNER), user(STRANGER + 1)
    told()
    for member in (one, two):
        member.do(look, m.at("team"), TEAM)
    before = requests(m)
    for member in (one, two):
        for path in TEAM:
            member.do(many, os.stat, path)
    assert asked(m, before) <= 5
    for stranger in (former, other):  # who are refused, and change nothing for the members
        assert stranger.error(os.stat, m.at("team")) == errno.ENOENT
        assert stranger.error(os.stat, m.at("team/file")) == errno.ENOENT
        assert stranger.do(names, m.path) == []
    assert two.error(os.stat, "own") == errno.ENOENT  # a file may be hidden from members, too
    assert one.do(names, ".") == ["file", "own", "work"]
    assert two.do(names, ".") == ["file", "work"]
    before = requests(m)
    two.do(many, os.stat, "file")
    one.do(many, os.stat, "work/file")
    assert asked(m, before) <= 5


def _chmod_through(m: Mount, one: User) -> None:
    one.do(os.chmod, m.at("team/file"), 0o600)


def _chmod_behind(m: Mount, _: User) -> None:
    os.chmod(m.real("team/file"), 0o600)


def _chgrp_behind(m: Mount, _: User) -> None:
    os.chown(m.real("team/file"), -1, STRANGER)


def _close_the_directory(m: Mount, _: User) -> None:
    os.chmod(m.real("team"), 0o2700)


def _give_the_directory_away(m: Mount, _: User) -> None:
    os.chown(m.real("team"), -1, STRANGER)


def _move_it_away(m: Mount, _: User) -> None:
    put(m.real("elsewhere"), STRANGER, stat.S_IFDIR | 0o700)
    os.rename(m.real("team/file"), m.real("elsewhere/file"))


HIDDEN_FROM_MEMBERS = (
    _chmod_through, _chmod_behind, _chgrp_behind, _close_the_directory, _give_the_directory_away, _move_it_away,
)  # fmt: skip


@pytest.mark.parametrize("hide", HIDDEN_FROM_MEMBERS)
@pytest.mark.usefixtures("kernel")
def test_what_becomes_hidden_from_members(
    hide: Callable[[Mount, User], None], team: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", CLOAKED)
    one, two = user(OWNER, OWNER, [GROUP]), user(OTHER, GROUP)
    told()
    for member in (one, two):
        member.do(look, m.at("team"), TEAM)
    hide(m, one)
    if hide is not _chmod_through:
        told()
    assert two.error(os.stat, "file") in (errno.ENOENT, errno.ESTALE)
    assert two.error(os.stat, m.at("team/file")) == errno.ENOENT


def test_what_one_member_makes_for_itself(team: str, mount: MakeMount, user: MakeUser) -> None:
    """Once a member has listed it, absent names are cached. What another one makes for itself looks absent."""
    os.unlink(os.path.join(team, "team/own"))
    m = mount("-o", CLOAKED)
    one, two = user(OWNER, OWNER, [GROUP]), user(OTHER, GROUP)
    told()
    for member in (one, two):
        member.do(look, m.at("team"), TEAM)
        assert member.error(os.stat, "new") == errno.ENOENT
    one.do(write, "new", b"mine")
    one.do(os.chmod, "new", 0o600)
    assert two.do(names, ".") == ["file", "work"]
    assert two.error(os.stat, "new") == errno.ENOENT
    assert one.do(names, ".") == ["file", "new", "work"]
    one.do(os.chown, "new", -1, GROUP)
    one.do(os.chmod, "new", 0o640)
    assert two.do(names, ".") == ["file", "new", "work"]
    assert two.do(read, "new") == b"mine"


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.usefixtures("kernel", "figures_at_once")
def test_others_who_get_to_know_the_directory_of_a_group(
    through: bool, team: str, mount: MakeMount, user: MakeUser
) -> None:
    """What is cached in it is invalidated before they learn of it, and what they must not see is not cached again."""
    m = mount("-o", CLOAKED)
    leader, one, other = user(STRANGER, GROUP), user(OWNER, OWNER, [GROUP]), user(STRANGER + 1)
    told()
    for member in (leader, one):
        member.do(look, m.at("team"), TEAM)
    if through:
        leader.do(os.chmod, m.at("team"), 0o2775)
    else:
        os.chmod(m.real("team"), 0o2775)
    for path in TEAM:
        assert other.error(os.stat, m.at("team", path)) == errno.ENOENT
    other.do(os.chdir, m.at("team"))
    one.do(many, os.stat, "work/file")
    assert other.error(os.stat, "file") == errno.ENOENT
    assert other.error(os.stat, "work") == errno.ENOENT
    assert other.do(names, ".") == []


def test_a_file_that_leaves_the_directory_of_a_group(team: str, mount: MakeMount, user: MakeUser) -> None:
    """Others may learn of the file by another name, so it is not cached for the group alone any more."""
    m = mount("-o", CLOAKED)
    one, other = user(OWNER, OWNER, [GROUP]), user(STRANGER + 1)
    told()
    one.do(look, m.at("team"), TEAM)
    os.link(m.real("team/file"), m.real("published"))
    os.chmod(m.real("published"), 0o664)
    told()
    other.do(os.stat, m.at("published"))
    os.unlink(m.real("published"))
    one.do(os.chmod, "file", 0o660)
    one.do(many, os.stat, "file")
    assert other.error(os.stat, m.at("team/file")) == errno.ENOENT
    assert other.error(os.stat, m.at("published")) == errno.ENOENT


@pytest.mark.usefixtures("figures_at_once")
def test_a_home_is_not_the_directory_of_its_owners_group(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """What only the owner sees there is cached, as in any home."""
    put(os.path.join(tree, "home"), OWNER, stat.S_IFDIR | 0o750, gid=GROUP)
    put(os.path.join(tree, "home/own"), OWNER, 0o600, gid=GROUP)
    m = mount("-o", CLOAKED)
    owner = user(OWNER, GROUP)
    told()
    owner.do(os.chdir, m.at("home"))
    owner.do(many, os.stat, "own")
    before = requests(m)
    owner.do(many, os.stat, "own")
    assert asked(m, before) <= 5


def test_an_absent_name_is_not_cached(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Something could be hidden there, since no caller has listed the directory (`test_listings`)."""
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    owner.do(os.chdir, m.at("homes/owner"))
    assert owner.error(os.stat, "new") == errno.ENOENT
    put(m.real("homes/owner/new"), OWNER, 0o600)
    assert owner.do(read, "new") == b"content"


# -- an audience grows before the reply -------------------------------------------------------


def give_away(path: str) -> None:
    os.chown(path, 99, 99)
    os.chmod(path, 0o755)


WIDENED: dict[str, Callable[[User, Mount], object]] = {
    "through the mount": lambda owner, m: owner.do(os.chmod, m.at("homes/owner"), 0o755),
    "behind the mount": lambda owner, m: os.chmod(m.real("homes/owner"), 0o755),
    "by another owner": lambda owner, m: give_away(m.real("homes/owner")),
}


@pytest.mark.parametrize("looks_first", [False, True])
@pytest.mark.parametrize("how", WIDENED)
@pytest.mark.usefixtures("kernel")
def test_a_directory_that_becomes_visible(
    how: str, looks_first: bool, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """What its owner has there is known to no other caller by what the kernel caches for the owner."""
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    assert other.error(os.stat, m.at("homes/owner/secret")) == errno.ENOENT
    owner.do(os.stat, "secret")
    WIDENED[how](owner, m)
    if looks_first:
        owner.do(os.stat, m.at("homes/owner"))
    assert other.error(os.open, m.at("homes/owner/secret"), os.O_PATH) == errno.ENOENT
    for path, expected in {
        "secret": errno.ENOENT,
        "work/secret": errno.ENOENT,
        "work/vault": errno.ENOENT,
        "work/vault/file": errno.ENOENT,
        "public": 0,
        "work": 0,
    }.items():
        assert other.error(os.stat, m.at("homes/owner", path)) == expected, path
        assert other.error(os.lstat, m.at("homes/owner", path)) == expected, path
    assert other.do(names, m.at("homes/owner")) == ["public", "work"]
    other.do(os.chdir, m.at("homes/owner/work"))
    assert other.error(os.stat, "vault") == errno.ENOENT
    owner.do(os.chdir, "/")
    owner.do(os.stat, m.at("homes/owner/work/vault/file"))
    assert other.error(os.stat, "vault/file") == errno.ENOENT


def test_a_name_that_the_kernel_cannot_be_made_to_invalidate(
    kernel: str, scene: str, base: str, stalled: Far, mount: MakeMount, user: MakeUser
) -> None:
    """The owner holds the lock of the directory. No other caller learns of it while names in it are cached."""
    m = mount("-o", CLOAKED)
    owner, holder, other = user(OWNER), user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    holder.do(hold, m.at("homes/owner"), os.path.join(stalled.path, "10000"))
    wait_until(lambda: os.path.exists(os.path.join(base, "flag.asked")))
    os.chmod(m.real("homes/owner"), 0o755)
    told()
    other.start(os.open, m.at("homes/owner/secret"), os.O_PATH)
    time.sleep(1)  # longer than the daemon waits for the lock
    assert user(OTHER).error(os.stat, m.at("homes")) == 0
    Path(base, "flag").touch()
    wait_until(lambda: holder.do(has_let_go))
    # Until then it was refused, or waited for the same lock, as any request for this very directory does.
    assert not other.finish_within(60)
    wait_until(lambda: other.error(os.stat, m.at("homes/owner/public")) == 0)
    assert other.error(os.open, m.at("homes/owner/secret"), os.O_PATH) == errno.ENOENT


@pytest.mark.usefixtures("figures_at_once")
def test_a_listing_enlarges_no_audience(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Or else one `ls` by another caller would cost the owner its cache."""
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    os.chmod(m.real("homes/owner"), 0o744)
    told()
    for _ in range(3):
        assert other.do(names, m.at("homes")) == ["owner"]
    before = requests(m)
    owner.do(many, os.stat, "secret")
    assert asked(m, before) <= 5


@pytest.mark.parametrize("reload", [False, True])
def test_a_hard_link_that_was_public(reload: bool, scene: str, base: str, mount: MakeMount, user: MakeUser) -> None:
    """Others know of the file, and may have kept it open: its attributes are not cached for its owner."""
    config = os.path.join(base, "exports")
    with open(config, "w", encoding="utf-8") as file:
        file.write(f"{scene} *({CLOAKED.replace(',', ', ')})\n")
    m = mount("--exports", config)
    os.mkdir(m.real("public"))
    os.chmod(m.real("public"), 0o777)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    owner.do(os.link, "public", m.at("public/link"))
    told()
    fd = other.do(os.open, m.at("public/link"), os.O_PATH)
    path = f"/proc/self/fd/{fd}"
    owner.do(os.unlink, m.at("public/link"))
    if reload:
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda: ": reloaded" in m.log)
        told(m.path)
    for _ in range(3):
        owner.do(os.stat, "public")
        owner.do(os.stat, m.at("homes/owner/public"))
        let_expire(AN_INSTANT)
        assert other.error(os.stat, path) == errno.ESTALE


@pytest.mark.parametrize("how", ["through the mount", "behind the mount"])
@pytest.mark.parametrize("deep", [1, 3])
def test_dot_dot_of_a_directory_that_was_moved(
    deep: int, how: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """Who stands in it gets at its new parent without a request for a name."""
    moved = put(os.path.join(scene, "moved"), OWNER, stat.S_IFDIR | 0o755)
    inner = moved
    for _ in range(deep - 1):
        inner = put(os.path.join(inner, "deeper"), OWNER, stat.S_IFDIR | 0o755)
    m = mount("-o", CLOAKED)
    os.chmod(m.source, 0o777)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    inside = os.path.relpath(inner, scene)
    other.do(os.chdir, m.at(inside))
    other.do(os.stat, "..")
    if how == "through the mount":
        owner.do(os.rename, m.at("moved"), m.at("homes/owner/moved"))
    else:
        os.rename(m.real("moved"), m.real("homes/owner/moved"))
        told()
        owner.do(os.stat, m.at("homes/owner", inside))  # from now on the kernel knows where it is
    above = "/".join([".."] * deep)
    for _ in range(3):
        for path in INSIDE:
            owner.do(os.stat, m.at("homes/owner", path))
        let_expire(AN_INSTANT)
        assert other.error(os.stat, above) in (errno.ESTALE, errno.ENOENT, errno.EACCES)
        for path in ("secret", "public", "work/vault/file"):
            assert other.error(os.stat, f"{above}/{path}") in (errno.ESTALE, errno.ENOENT, errno.EACCES), path


def exchange(old: str, new: str) -> None:
    linux.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), linux.RENAME_EXCHANGE)


@pytest.mark.parametrize("call", [os.rename, exchange])
@pytest.mark.parametrize("what", ["secret", "work", "work/vault"])
def test_what_is_moved_out_of_a_private_directory(
    what: str, call: Callable[[str, str], None], kernel: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel moves the name with it, for as long as it was to be cached; but now others would get there."""
    public = put(os.path.join(scene, "open"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(public, "moved"), OWNER, stat.S_IFDIR | 0o755)
    if call is os.rename:
        os.rmdir(os.path.join(public, "moved"))
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    other.do(names, m.at("open"))
    owner.do(call, what, m.at("open/moved"))
    inside = [path.removeprefix(what) for path in INSIDE if path.startswith(what)]
    hidden = [path for path in inside if what != "work" or path not in ("", "/public")]
    for _ in range(3):
        for path in inside:
            owner.do(os.stat, m.at(f"open/moved{path}"))
    for path in reversed(hidden):
        assert other.error(os.stat, m.at(f"open/moved{path}")) == errno.ENOENT, path


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.usefixtures("kernel")
def test_what_is_moved_out_after_its_directory_was_opened(
    group: int | None, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """All callers may know of the directory by then, and not of what is cached in it for its former audience."""
    put(os.path.join(tree, "closed"), OWNER, stat.S_IFDIR | (0o2770 if group else 0o700), gid=group)
    put(os.path.join(tree, "closed/moved"), OWNER, stat.S_IFDIR | 0o755, gid=group)
    put(os.path.join(tree, "closed/moved/secret"), OWNER, 0o660 if group else 0o600, gid=group)
    put(os.path.join(tree, "open"), OWNER, stat.S_IFDIR | 0o755)
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER, OWNER, [GROUP]), user(STRANGER)
    told()
    owner.do(os.chdir, m.at("closed"))
    owner.do(many, os.stat, "moved/secret")
    owner.do(os.chmod, m.at("closed"), 0o755)
    owner.do(os.utime, "moved")  # from now on, its attributes are cached for all
    owner.do(os.rename, "moved", m.at("open/moved"))
    for _ in range(3):
        assert other.error(os.stat, m.at("open/moved/secret")) == errno.ENOENT
        owner.do(os.stat, m.at("open/moved/secret"))


@pytest.mark.usefixtures("figures_at_once")
@pytest.mark.parametrize("call", [os.rename, exchange])
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_nothing_is_cached_below_a_name_that_is_still_pending(
    mode: int, call: Callable[[str, str], None], scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """It leads others to what was moved, where everything else that led there was invalidated in time."""
    os.chmod(os.path.join(scene, "homes/owner/work"), mode)
    public = put(os.path.join(scene, "open"), OWNER, stat.S_IFDIR | 0o755)
    if call is exchange:
        put(os.path.join(public, "moved"), OWNER, stat.S_IFDIR | 0o755)
    with daemons_with(
        partial(alterations.never_invalidate, b"moved"), tuning=replace(FIGURES_AT_ONCE, notify_threads=32)
    ):
        m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    other.do(names, m.at("open"))
    owner.do(call, "work", m.at("open/moved"))
    told()
    for _ in range(3):
        for path in ("", "/secret", "/vault", "/vault/file"):
            owner.do(os.stat, m.at(f"open/moved{path}"))
            owner.do(os.listdir, m.at("open/moved"))
            assert owner.error(os.stat, m.at("open/moved/absent")) == errno.ENOENT
    before = requests(m)
    assert other.error(os.stat, m.at("open/moved/absent")) == errno.ENOENT
    of_absent = asked(m, before)
    for path in ("/vault/file", "/vault", "/secret"):
        assert other.error(os.stat, m.at(f"open/moved{path}")) == errno.ENOENT, path
    assert of_absent


def test_dot_dot_after_the_daemon_itself_has_looked(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """A caller is refused the directory that was moved, and the daemon looks it up again for those in it."""
    put(os.path.join(scene, "moved"), OTHER, stat.S_IFDIR | 0o700)
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(os.chdir, m.at("homes/owner"))
    other.do(os.chdir, m.at("moved"))
    assert other.do(os.stat, "..").st_uid != OWNER
    os.rename(m.real("moved"), m.real("homes/owner/moved"))
    told()
    assert other.error(os.stat, ".") == errno.ESTALE  # now the daemon knows where it is
    assert owner.error(os.stat, m.at("homes/owner/moved")) == errno.ENOENT
    for path in ("homes/owner/moved", "moved"):
        assert other.error(os.stat, m.at(path)) == errno.ENOENT
    told(m.path)  # the daemon looks several times
    for _ in range(3):
        owner.do(os.stat, ".")
        owner.do(os.stat, m.at("homes/owner"))
        let_expire(AN_INSTANT)
        with contextlib.suppress(OSError):
            assert other.do(os.stat, "..").st_uid != OWNER


@pytest.mark.usefixtures("kernel")
def test_what_is_hidden_from_its_former_owner(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner, within = user(OWNER), user(OWNER)
    told()
    owner.do(look, m.at("homes/owner"))
    within.do(os.chdir, m.at("homes/owner/work/vault"))
    within.do(os.stat, "file")
    os.chown(m.real("homes/owner/secret"), OTHER, OTHER)
    told()
    assert owner.error(os.stat, "secret") == errno.ENOENT
    assert owner.do(names, ".") == ["public", "work"]
    os.chown(m.real("homes/owner/work"), OTHER, OTHER)
    os.chmod(m.real("homes/owner/work"), 0o700)
    told()
    assert owner.error(os.stat, "work/vault/file") == errno.ENOENT
    assert within.error(os.stat, "file") in (errno.ENOENT, errno.ESTALE)
    assert within.error(os.stat, ".") in (errno.ENOENT, errno.ESTALE)


def test_what_is_cached_for_its_former_owner_is_refused_at_once(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """The daemon reads what has been reported before it relies on what the kernel caches for one caller."""
    m = mount("-o", CLOAKED)
    work, vault = m.real("homes/owner/work"), m.at("homes/owner/work/vault")
    within = user(OWNER)
    told()
    within.do(look, m.at("homes/owner"))
    for _ in range(10):
        within.do(os.chdir, vault)
        assert within.do(names, ".") == ["file"]
        within.do(os.stat, "file")
        os.chmod(work, 0o700)
        os.chown(work, OTHER, OTHER)
        assert within.error(os.open, ".", os.O_RDONLY) in (errno.ENOENT, errno.ESTALE)
        os.chown(work, OWNER, OWNER)
        told()


def test_an_owner_without_search(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    owner = user(OWNER)
    told()
    owner.do(look, m.at("homes/owner"))
    owner.do(os.chmod, "work", 0o600)
    # The names in it that a process has open are invalidated a moment after the answer:
    # docs/decisions/invalidation.md.
    wait_until(lambda: owner.error(os.stat, "work/secret") == errno.EACCES)
    os.chmod(m.real("homes/owner/work"), 0o700)
    told()
    owner.do(os.stat, "work/secret")
    os.chmod(m.real("homes/owner/work"), 0o600)
    told()
    assert owner.error(os.stat, "work/secret") == errno.EACCES


def test_a_public_directory_in_a_home_that_is_closed(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """What all callers knew rests on the home's being open, whatever else is cached of the home."""
    os.chmod(os.path.join(scene, "homes/owner"), 0o755)
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(OTHER)
    told()
    owner.do(look, m.at("homes/owner"))
    other.do(os.chdir, m.at("homes/owner/work"))
    fd = other.do(os.open, m.at("homes/owner/public"), os.O_PATH)
    other.do(os.stat, ".")
    owner.do(look, m.at("homes/owner"))
    owner.do(os.chmod, m.at("homes/owner"), 0o700)
    for _ in range(3):
        owner.do(os.stat, m.at("homes/owner/public"))
        let_expire(AN_INSTANT)
        assert other.error(os.stat, ".") in (errno.ESTALE, errno.ENOENT)
        assert other.error(os.stat, f"/proc/self/fd/{fd}") == errno.ESTALE
        assert other.error(os.stat, m.at("homes/owner/public")) == errno.ENOENT


# -- what remains ----------------------------------------------------------------------------------


def enter_as(uid: int, path: str) -> None:
    """For a User started as root: stand in a directory that only `uid` may enter."""
    os.setegid(uid)
    os.seteuid(uid)
    os.chdir(path)
    os.seteuid(0)
    os.setegid(0)


def test_who_is_handed_a_working_directory(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """It gets at what is cached, as documented, and at nothing that the daemon is asked for; that ends it."""
    m = mount("-o", CLOAKED)
    owner, handed = user(OWNER), user(0)
    told()
    owner.do(look, m.at("homes/owner"))
    handed.do(enter_as, OWNER, m.at("homes/owner"))
    handed.do(become, OTHER, OTHER, [])
    owner.do(os.stat, "secret")
    handed.error(os.stat, "secret")  # whether the kernel still caches it is not said
    refused = (errno.ENOENT, errno.ESTALE, errno.EACCES)
    assert handed.error(read, "secret") in refused
    assert handed.error(os.listdir, ".") in refused
    told()
    owner.do(os.stat, "secret")
    let_expire(AN_INSTANT)
    for path in INSIDE:
        assert handed.error(os.stat, path) in refused, path


def be_dumpable() -> None:
    """Be to others as a process that was executed, and did not only change its ids."""
    assert not ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


@pytest.mark.usefixtures("kernel")
def test_who_follows_the_links_of_a_member(team: str, mount: MakeMount, user: MakeUser) -> None:
    """It gets at what is cached, as documented, and at nothing that the daemon is asked for; that ends it."""
    m = mount("-o", CLOAKED)
    member, former = user(OWNER, OWNER, [GROUP]), user(OWNER)
    told()
    member.do(be_dumpable)
    member.do(look, m.at("team"), TEAM)
    there = f"/proc/{member.do(os.getpid)}/cwd"
    former.error(os.stat, f"{there}/file")  # whether the kernel still caches it is not said
    refused = (errno.ENOENT, errno.ESTALE, errno.EACCES)
    assert former.error(read, f"{there}/file") in refused
    assert former.error(os.listdir, there) in refused
    told()
    member.do(many, os.stat, "file")
    let_expire(AN_INSTANT)
    for path in (*TEAM, "own"):
        assert former.error(os.stat, f"{there}/{path}") in refused, path


# -- no caller has others pay -------------------------------------------------------------------------


@pytest.mark.usefixtures("figures_at_once")
def test_who_grows_his_own_audience_costs_others_nothing(scene: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(scene, "homes/other"), OTHER, stat.S_IFDIR | 0o700)
    m = mount("-o", CLOAKED)
    owner, other, stranger = user(OWNER), user(OTHER), user(STRANGER)
    told()
    owner.do(look, m.at("homes/owner"))
    other.do(os.chdir, m.at("homes/other"))
    before = requests(m)
    for number in range(MANY // 10):
        other.do(os.mkdir, f"{number}", 0o700)
        other.do(write, f"{number}/file", b"")
        other.do(os.stat, f"{number}/file")
        other.do(os.chmod, ".", 0o755)
        other.do(os.chmod, f"{number}", 0o755)
        stranger.do(os.stat, m.at(f"homes/other/{number}"))
        other.do(os.chmod, ".", 0o700)
    assert requests(m)["mkdir"] - before["mkdir"] == MANY // 10
    before = requests(m)
    for path in INSIDE:
        owner.do(many, os.stat, path)
    assert asked(m, before) <= 5
