"""Who a request is served as, what that costs, and what a policy gets to know of an object."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.identity import Caller
from cloakfs.tree.actor import DAEMON, Actor, actor, credentials, with_group
from cloakfs.tree.visibility import attrs_of

FEW, MANY = linux.FEW_GROUPS, linux.FEW_GROUPS + 1


def caller(number: int, groups: int) -> Caller:
    """One of many callers, each of which has other groups."""
    return Caller(number, number, frozenset(range(number, number + groups)))


# -- as whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), tuple(range(100, 100 + MANY))])
def test_one_identity_has_one_form(more: tuple[int, ...]) -> None:
    """Then a thread need not switch between two callers with the same ids."""
    groups = frozenset({4, 3, 9, *more})
    expected = linux.Credentials(1, 3, (4, 9, *more))
    assert credentials(Caller(1, 3, groups)) == credentials(Caller(1, 3, groups - {3})) == expected
    assert actor(Caller(1, 3, groups)).credentials == expected


@pytest.mark.parametrize("number", [FEW - 1, FEW, MANY])
def test_a_group_is_added_unless_it_is_there(number: int) -> None:
    groups = frozenset(range(100, 100 + number))
    assert with_group(groups, 7) == groups | {7}
    assert with_group(groups, 100) is groups


def test_the_groups_are_looked_up_once_and_only_if_they_matter() -> None:
    lookups = []

    def find() -> Caller:
        lookups.append(1)
        return Caller(1, 2, frozenset({2, 3}))

    who = Actor(1, 2, find)
    assert (who.uid, who.gid) == (1, 2)
    assert who.has_group(2)
    assert not lookups
    assert who.has_group(3)
    assert not who.has_group(1)
    assert who.caller == Caller(1, 2, frozenset({2, 3}))
    assert who.credentials == linux.Credentials(1, 2, (3,))
    assert len(lookups) == 1


@pytest.mark.parametrize("groups", [FEW, MANY])
def test_a_known_caller_is_who_it_is(groups: int) -> None:
    known = caller(1, groups)
    who = actor(known._replace(gid=2))
    assert (who.uid, who.gid, who.caller) == (1, 2, known._replace(gid=2))
    assert actor(known).caller == known


def test_the_daemon_is_not_a_caller_with_its_ids() -> None:
    assert DAEMON.caller == Caller(0, 0, frozenset({0}))
    assert (DAEMON.uid, DAEMON.gid) == (0, 0)
    assert DAEMON.credentials is linux.ROOT
    assert actor(DAEMON.caller) is not DAEMON
    assert actor(DAEMON.caller).credentials is not linux.ROOT


# -- what it costs ---------------------------------------------------------------------------------


def test_who_asks_again_is_known() -> None:
    first, others = caller(1, FEW), [caller(number, FEW) for number in range(2, 300)]
    known = credentials(first), actor(first)
    for other in others:
        assert credentials(other) != known[0]
        assert actor(other).caller == other
    assert credentials(first) is known[0]
    assert actor(first) is known[1]


def test_many_groups_are_not_gone_through_again() -> None:
    first = caller(1, MANY)
    known = credentials(first), with_group(first.groups, 0)
    for number in range(2, 1 + linux.MOST_LONG):
        credentials(caller(number, MANY))
        with_group(caller(number, MANY).groups, 0)
    for number in range(1000, 1100):  # what costs little displaces nothing
        credentials(caller(number, FEW))
        with_group(caller(number, FEW).groups, 0)
    assert credentials(first) is known[0]
    assert with_group(first.groups, 0) is known[1]


def with_one_more(who: Caller) -> frozenset[int]:
    return with_group(who.groups, 7)


def use(function: Callable[[Caller], object], callers: int, groups: int) -> int:
    """Have a function serve so many callers; return of how many it keeps the groups."""
    kept = []
    for number in range(callers):
        who = caller(10_000 + number, groups)
        kept.append(weakref.ref(who.groups))
        function(who)
        del who
    return sum(ref() is not None for ref in kept)


@pytest.mark.parametrize("function", [credentials, actor, with_one_more])
def test_what_is_known_of_callers_is_bounded(function: Callable[[Caller], object]) -> None:
    """Clients choose the identities that they have, and how many."""
    assert use(function, 3000, FEW) <= 2000
    assert use(function, 200, MANY) <= linux.MOST_LONG


# -- what a policy gets to know --------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1234)
    os.link(path, tmp_path / "other")
    os.chown(path, 4001, 4002)
    os.chmod(path, 0o640)
    os.utime(path, ns=(5, 6_000_000_007))
    return path


def identity() -> tuple[int, int]:
    """As whom this thread acts: the last number in the lines Uid and Gid of /proc is that for files."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    uid, gid = (int(line.split()[-1]) for line in lines if line.startswith(("Uid:", "Gid:")))
    return uid, gid


def test_a_policy_is_told_what_the_file_is(file: Path) -> None:
    fd = os.open(file, os.O_PATH)
    attrs = attrs_of(b"na\xffme-\xc3\xa9", os.stat(fd), fd)
    assert attrs.name == "na\udcffme-é"
    assert (attrs.mode, attrs.uid, attrs.gid) == (0o100640, 4001, 4002)
    assert (attrs.size, attrs.nlink, attrs.mtime_ns) == (1234, 2, 6_000_000_007)
    os.close(fd)


def test_the_kernel_says_whether_it_is_accessible_and_the_policy_continues_as_the_daemon(file: Path) -> None:
    fd = os.open(file, os.O_PATH)
    attrs = attrs_of(b"file", os.stat(fd), fd)
    for who, mode, expected in (
        (Caller(4001, 4001, frozenset({4001})), os.R_OK | os.W_OK, True),
        (Caller(4001, 4001, frozenset({4001})), os.X_OK, False),
        (Caller(4003, 4003, frozenset({4002, 4003})), os.R_OK, True),
        (Caller(4003, 4003, frozenset({4002, 4003})), os.W_OK, False),
        (Caller(4003, 4003, frozenset({4003})), os.R_OK, False),
    ):
        assert attrs.accessible(who, mode) is expected
        assert identity() == (0, 0)
    os.close(fd)


def test_a_policy_that_asks_about_nobody_continues_as_the_daemon(file: Path) -> None:
    """4294967295 is not an id. By the time that the kernel refuses it, the thread has the group."""
    fd = os.open(file, os.O_PATH)
    attrs = attrs_of(b"file", os.stat(fd), fd)
    with pytest.raises(PermissionError):
        attrs.accessible(Caller(2**32 - 1, 4003, frozenset({4003})), os.R_OK)
    assert identity() == (0, 0)
    os.close(fd)
