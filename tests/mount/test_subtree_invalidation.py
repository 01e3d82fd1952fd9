"""When a directory is hidden from others, what is cached below it is invalidated, and nothing else."""

import errno
import os
import platform
import resource
import stat
from collections.abc import Callable

import pytest

from cloakfs.tuning import Tuning
from tests.agents import User
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.loopfs import attached
from tests.mount.test_caching import ACL_FOR_NOBODY, CLOAKED, OTHER, OWNER, STRANGER, put, requests
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

GONE = {errno.ENOENT, errno.ESTALE, errno.EACCES}

LINUX = tuple(int(number) for number in platform.release().split(".")[:2])

ACL = "system.posix_acl_access"


def make_many(directory: str, count: int, owner: int) -> None:
    os.mkdir(directory)
    for number in range(count):
        put(os.path.join(directory, str(number)), owner, 0o644)
    os.chown(directory, owner, owner)
    os.chmod(directory, 0o755)


def stat_all(directory: str, count: int) -> None:
    for number in range(count):
        os.stat(f"{directory}/{number}")


def hold_all(directory: str, count: int) -> list[int]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # otherwise 1,024, mostly
    return [os.open(f"{directory}/{number}", os.O_PATH) for number in range(count)]


def errors_of(fds: list[int]) -> set[int]:
    found = set()
    for fd in fds:
        try:
            os.fstat(fd)
        except OSError as exc:
            found.add(exc.errno or -1)
        else:
            found.add(0)
    return found


# -- nothing else ----------------------------------------------------------------------------------


def by_mode(directory: str) -> None:
    os.chmod(directory, 0o700)
    os.chmod(directory, 0o755)


def by_acl(directory: str) -> None:
    os.setxattr(directory, ACL, ACL_FOR_NOBODY)
    os.removexattr(directory, ACL)
    os.chmod(directory, 0o755)


def by_moving(directory: str) -> None:
    os.rename(directory, os.path.join(os.path.dirname(directory), "private/moved"))
    os.rename(os.path.join(os.path.dirname(directory), "private/moved"), directory)


CHANGES: dict[str, Callable[[str], None]] = {"chmod": by_mode, "setfacl": by_acl, "rename": by_moving}


def change_again_and_again(change: Callable[[str], None], directory: str, shown: str, times: int) -> None:
    """Each time when the kernel caches it, so that there is something to invalidate."""
    for _ in range(times):
        change(directory)
        os.stat(os.path.join(shown, "0"))


ROUNDS, TIMES, WARM = 5, 100, 20


@pytest.mark.parametrize("where", ["through the mount", "behind the mount"])
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.usefixtures("figures_at_once")
def test_who_changes_his_own_directory_makes_no_other_caller_ask(
    how: str, where: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    os.chmod(tree, 0o755)
    top = put(os.path.join(tree, "top"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(top, "private"), OWNER, stat.S_IFDIR | 0o700)
    make_many(os.path.join(top, "mine"), 5, OWNER)
    make_many(os.path.join(tree, "theirs"), WARM, OTHER)
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(STRANGER)
    changed = (m.at if where == "through the mount" else m.real)("top", "mine")
    told()
    for _ in range(3):
        other.do(stat_all, m.at("theirs"), WARM)
    asked = 0
    for _ in range(ROUNDS):
        owner.do(change_again_and_again, CHANGES[how], changed, m.at("top/mine"), TIMES)
        told()
        before = requests(m)
        other.do(stat_all, m.at("theirs"), WARM)
        made = requests(m) - before
        asked += made["lookup"] + made["getattr"]
    assert asked <= 2, f"{asked} requests"


@pytest.mark.usefixtures("figures_at_once")
def test_what_changes_nothing_for_anybody_makes_nobody_ask(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Who may write in a directory may set its times: behind the mount, too."""
    make_many(os.path.join(tree, "shared"), WARM, OTHER)
    os.chmod(os.path.join(tree, "shared"), 0o777)
    m = mount("-o", CLOAKED)
    owner, other = user(OWNER), user(STRANGER)
    told()
    for _ in range(3):
        other.do(stat_all, m.at("shared"), WARM)
    asked = 0
    for _ in range(ROUNDS):
        owner.do(os.utime, m.real("shared"))
        told()
        before = requests(m)
        other.do(stat_all, m.at("shared"), WARM)
        made = requests(m) - before
        asked += made["lookup"] + made["getattr"]
    assert asked <= 2 * ROUNDS, f"{asked} requests"  # of the directory itself there is something new


# -- all of that -----------------------------------------------------------------------------------

MANY = 3000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["through the mount", "behind the mount"])
@pytest.mark.parametrize("how", ["chmod", "rename"])
def test_all_that_is_below_is_invalidated(how: str, where: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Also what lies deeper, is held by those who lose it, and takes longer than others may be kept waiting."""
    put(os.path.join(tree, "private"), OWNER, stat.S_IFDIR | 0o700)
    above = put(os.path.join(tree, "above"), OWNER, stat.S_IFDIR | 0o755)
    make_many(os.path.join(above, "many"), MANY, OWNER)
    deep = put(os.path.join(above, "many/deep"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(deep, "file"), OWNER, 0o644)
    m = mount("-o", CLOAKED)
    owner, stranger = user(OWNER), user(STRANGER)
    told()
    stranger.do(os.chdir, m.at("above/many/deep"))
    fds = stranger.do(hold_all, m.at("above/many"), MANY)
    for _ in range(2):
        assert stranger.do(errors_of, fds) == {0}
        stranger.do(os.stat, "file")
    at = m.at if where == "through the mount" else m.real
    if how == "chmod":
        owner.do(os.chmod, at("above"), 0o700)
    else:
        owner.do(os.rename, at("above"), at("private/above"))
    if where == "behind the mount":
        # Soon; how soon, depends on how busy the machine is.
        wait_until(lambda: stranger.do(errors_of, fds) == {errno.ESTALE})
    assert stranger.error(os.stat, "file") in GONE
    assert stranger.do(errors_of, fds[-1:]) == {errno.ESTALE}
    assert stranger.do(errors_of, fds) == {errno.ESTALE}
    told()
    assert stranger.error(os.open, "file", os.O_PATH) in GONE
    assert stranger.error(os.open, f"/proc/self/fd/{fds[0]}", os.O_RDONLY) in GONE


@pytest.mark.parametrize("where", ["through the mount", "behind the mount"])
@pytest.mark.parametrize("how", ["chmod", "rename"])
def test_the_name_of_a_directory_comes_after_those_below_it(
    how: str, where: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """With a name, the kernel drops all that it knows below, and others who need the same directory have to wait."""
    put(os.path.join(tree, "private"), OWNER, stat.S_IFDIR | 0o700)
    above = put(os.path.join(tree, "above"), OWNER, stat.S_IFDIR | 0o755)
    for name in ("many", "more"):
        make_many(os.path.join(above, name), 500, OWNER)
    with daemons_with(alterations.log_names_invalidated):
        m = mount("-o", CLOAKED)
    owner = user(OWNER)
    told()
    for _ in range(2):
        for name in ("many", "more"):
            owner.do(stat_all, m.at("above", name), 500)
    at = m.at if where == "through the mount" else m.real
    if how == "chmod":
        owner.do(os.chmod, at("above"), 0o700)
    else:
        owner.do(os.rename, at("above"), at("private/above"))

    def names() -> list[str]:
        return [line.rpartition(" ")[2] for line in m.log.splitlines() if " NAME " in line]

    wait_until(lambda: {"above", "many", "more"} <= set(names()))
    # (During a chmod(2) through the mount, the kernel holds the lock of the directory that has these two.)
    assert set(names()[names().index("above") + 1 :]) <= {"many", "more"}
    assert len(set(names())) == 500 + 3


WAITING = Tuning(notify_threads=1, notify_wait_seconds=5.0, notify_patience_seconds=1000.0)
"""Another thread begins when the only one has waited for a lock for long."""


@pytest.mark.parametrize("count", [3, 500])
@pytest.mark.parametrize("how", CHANGES)
def test_no_change_of_a_directory_waits_for_its_own_lock(
    how: str, count: int, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel holds the lock of the directory until it is answered."""
    top = put(os.path.join(tree, "top"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(top, "private"), OWNER, stat.S_IFDIR | 0o700)
    make_many(os.path.join(top, "many"), count, OWNER)
    with daemons_with(alterations.log_waiting_threads, tuning=WAITING):
        m = mount("-o", CLOAKED)
    owner = user(OWNER)
    told()
    for _ in range(3):
        owner.do(stat_all, m.at("top/many"), count)
        owner.do(CHANGES[how], m.at("top/many"))
    assert "A THREAD WAITS" not in m.log


@pytest.mark.skipif(LINUX < (6, 2), reason="before Linux 6.2, the kernel cannot be made to ask about a name")
@pytest.mark.parametrize("how", ["chmod", "rename"])
def test_a_name_is_asked_about_before_all_below_it_is_invalidated(
    how: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """However long that takes: here, it is never done."""
    put(os.path.join(tree, "private"), OWNER, stat.S_IFDIR | 0o700)
    above = put(os.path.join(tree, "above"), OWNER, stat.S_IFDIR | 0o755)
    make_many(os.path.join(above, "many"), 100, OWNER)
    with daemons_with(alterations.never_invalidate_subtrees, tuning=Tuning(names_at_once=1)):
        m = mount("-o", CLOAKED)
    owner, stranger = user(OWNER), user(STRANGER)
    told()
    for _ in range(2):
        stranger.do(stat_all, m.at("above/many"), 100)
    if how == "chmod":
        owner.do(os.chmod, m.real("above"), 0o700)
    else:
        owner.do(os.rename, m.real("above"), m.real("private/above"))
    told()
    # First what is still cached: asking for the directory itself, whose attributes are not, drops the name.
    assert stranger.error(os.stat, m.at("above/many/0")) == errno.ENOENT
    assert stranger.error(os.stat, m.at("above")) == errno.ENOENT


@pytest.mark.parametrize("where", ["through the mount", "behind the mount"])
def test_each_name_of_a_hard_link_is_invalidated(where: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    here = put(os.path.join(tree, "here"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(tree, "there"), OWNER, stat.S_IFDIR | 0o755)
    os.link(put(os.path.join(here, "first"), OWNER, 0o644), os.path.join(tree, "there/second"))
    m = mount("-o", CLOAKED)
    owner, stranger = user(OWNER), user(STRANGER)
    told()
    stranger.do(os.chdir, m.at("here"))
    stranger.do(os.open, "first", os.O_PATH)
    stranger.do(os.open, m.at("there/second"), os.O_PATH)
    for _ in range(3):
        stranger.do(os.stat, m.at("there/second"))
    owner.do(os.chmod, (m.at if where == "through the mount" else m.real)("here"), 0o700)
    told()
    assert stranger.error(os.open, "first", os.O_PATH) in GONE
    assert stranger.do(os.stat, m.at("there/second")).st_size == 7


def test_a_file_that_is_mounted_twice_is_invalidated_where_it_is_known(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """It is changed where no other caller knows of it."""
    put(os.path.join(tree, "home"), OWNER, stat.S_IFDIR | 0o700)
    shared = put(os.path.join(tree, "home/shared"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(shared, "file"), OWNER, 0o644)
    os.mkdir(os.path.join(tree, "twin"))
    with attached(shared, os.path.join(tree, "twin"), "--bind"):
        m = mount("-o", CLOAKED)
        owner, stranger = user(OWNER), user(STRANGER)
        told()
        for _ in range(3):
            owner.do(os.stat, m.at("home/shared/file"))
            assert stranger.do(os.stat, m.at("twin/file")).st_mode & 0o777 == 0o644
        owner.do(os.chmod, m.at("home/shared/file"), 0o604)
        assert stranger.do(os.stat, m.at("twin/file")).st_mode & 0o777 == 0o604
        owner.do(os.chmod, m.at("home/shared/file"), 0o600)
        assert stranger.error(os.stat, m.at("twin/file")) == errno.ENOENT


def test_a_directory_that_is_mounted_twice_is_invalidated_twice(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "open"), OWNER, stat.S_IFDIR | 0o755)
    directory = put(os.path.join(tree, "open/directory"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(directory, "file"), OWNER, 0o644)
    with attached(os.path.join(tree, "open"), os.path.join(tree, "twin"), "--bind"):
        m = mount("-o", CLOAKED)
        owner, stranger = user(OWNER), user(STRANGER)
        told()
        for place in ("open", "twin"):
            for _ in range(3):
                stranger.do(os.stat, m.at(place, "directory/file"))
        fd = stranger.do(os.open, m.at("twin/directory/file"), os.O_PATH)
        owner.do(os.chmod, m.at("open/directory"), 0o700)
        for place in ("open", "twin"):
            assert stranger.error(os.stat, m.at(place, "directory/file")) == errno.ENOENT
        assert stranger.do(errors_of, [fd]) == {errno.ESTALE}
