"""Who knows of an object, and who may learn of a directory while the kernel caches names in it."""

from typing import Any

import pytest

from cloakfs import linux
from cloakfs.config.parse import parse_options
from cloakfs.exportmode import LOCAL
from cloakfs.identity import ServerId
from cloakfs.kernelcache.audience import Audiences
from cloakfs.policy import Policy
from cloakfs.tree.objects import ALL_VIEWERS, NO_VIEWER, Directory, Viewer, group_of, is_limited, members_of
from cloakfs.view import View

NOTHING: Any = None  # these questions are about the objects alone
AUDIENCES = Audiences(NOTHING, NOTHING, LOCAL)
TEAM, OTHER_TEAM = members_of(ServerId(3000), 0), members_of(ServerId(3001), 0)


def directory(audience: Viewer, above: Viewer | None = ALL_VIEWERS, **what: bool) -> Directory:
    """Return a directory with this audience, in one with another."""
    obj = Directory(2, b"handle", NOTHING)
    obj.audience = audience
    for name, value in what.items():
        setattr(obj, name, value)
    if above is not None:
        obj.parent = directory(above, None)
    return obj


@pytest.mark.parametrize(
    ("audience", "viewer", "now"),
    [
        (NO_VIEWER, NO_VIEWER, NO_VIEWER),
        (NO_VIEWER, 5, 5),
        (NO_VIEWER, ALL_VIEWERS, ALL_VIEWERS),
        (5, NO_VIEWER, 5),
        (5, 5, 5),
        (5, 6, ALL_VIEWERS),
        (5, ALL_VIEWERS, ALL_VIEWERS),
        (5, TEAM, ALL_VIEWERS),
        (NO_VIEWER, TEAM, TEAM),
        (TEAM, TEAM, TEAM),
        (TEAM, 5, ALL_VIEWERS),
        (TEAM, OTHER_TEAM, ALL_VIEWERS),
        (TEAM, NO_VIEWER, TEAM),
        (ALL_VIEWERS, NO_VIEWER, ALL_VIEWERS),
        (ALL_VIEWERS, 5, ALL_VIEWERS),
        (ALL_VIEWERS, ALL_VIEWERS, ALL_VIEWERS),
    ],
)
def test_an_audience_only_grows(audience: Viewer, viewer: Viewer, now: Viewer) -> None:
    obj = directory(audience)
    assert AUDIENCES.record(0, obj, viewer) is None  # nothing was cached for any caller
    assert obj.audience == now
    obj.audience = audience
    AUDIENCES.record(1, obj, viewer)  # in another view than the first
    assert obj.audience == audience


@pytest.mark.parametrize(
    ("audience", "viewer", "is_ready"),
    [
        (5, 5, True),
        (5, 6, False),
        (5, ALL_VIEWERS, False),
        (5, NO_VIEWER, True),
        (TEAM, TEAM, True),
        (TEAM, 5, False),
        (5, TEAM, False),
        (ALL_VIEWERS, 5, False),
        (ALL_VIEWERS, ALL_VIEWERS, False),
    ],
)
def test_only_its_audience_is_admitted_before_the_names_are_invalidated(
    audience: Viewer, viewer: Viewer, is_ready: bool
) -> None:
    """With an audience of all, they are just being invalidated."""
    obj = directory(audience, has_names_for_one=True)
    assert AUDIENCES.is_ready(0, obj, viewer) is is_ready
    assert AUDIENCES.may_list(0, obj, viewer, is_directory=True) is is_ready
    assert AUDIENCES.is_ready(1, obj, viewer)
    assert AUDIENCES.may_list(1, obj, viewer, is_directory=True)


@pytest.mark.parametrize(
    ("audience", "viewer", "is_for_others"),
    [
        (5, 5, False),
        (5, 6, True),
        (0, 6, True),
        (TEAM, TEAM, False),
        (TEAM, 6, True),
        (5, ALL_VIEWERS, True),
        (5, NO_VIEWER, False),
        (ALL_VIEWERS, 5, False),
        (ALL_VIEWERS, ALL_VIEWERS, False),
    ],
)
def test_attributes_are_cached_for_an_audience_of_one(audience: Viewer, viewer: Viewer, is_for_others: bool) -> None:
    obj = directory(audience, cached_for_one=True)
    assert AUDIENCES.may_list(0, obj, viewer, is_directory=False) is not is_for_others
    assert AUDIENCES.is_ready(0, obj, viewer)
    obj.cached_for_one = False
    assert AUDIENCES.may_list(0, obj, viewer, is_directory=False)


@pytest.mark.parametrize(
    ("audience", "above", "is_ready"),
    [
        (5, 5, True),
        (5, 6, False),
        (5, ALL_VIEWERS, True),
        (5, NO_VIEWER, False),
        (ALL_VIEWERS, 5, False),
        (ALL_VIEWERS, ALL_VIEWERS, True),
        (NO_VIEWER, 5, True),
        (NO_VIEWER, NO_VIEWER, True),
        (5, None, True),
    ],
)
def test_no_caller_learns_of_a_directory_that_others_know_without_knowing_where_it_is(
    audience: Viewer, above: Viewer | None, is_ready: bool
) -> None:
    """It was moved, and ".." leads them there."""
    obj = directory(audience, above)
    assert AUDIENCES.is_ready(0, obj, Viewer(5)) is is_ready
    assert AUDIENCES.is_ready(0, obj, NO_VIEWER) is is_ready  # the daemon tells the kernel where it is
    assert AUDIENCES.is_ready(1, obj, Viewer(5))


class Forwarding(Policy):
    def forward(self, caller: Any) -> Any:
        return super().forward(caller)


class Judging(Policy):
    def visible(self, caller: Any, attrs: Any) -> bool:
        return super().visible(caller, attrs)


OPTIONS = parse_options("no_root_squash,cloak_list=uid +007 4001 4002")[0]
LOWER: Any = object()
ANN = Viewer(4002)


def test_what_depends_on_groups_or_on_code_is_not_surely_seen() -> None:
    def stat(mode: int, uid: int) -> linux.Stat:
        return linux.Stat((mode, 2, 3, 1, uid, 7001, 0, 0, 0, 0))

    own, public, others = stat(0o40700, 4002), stat(0o40705, 4001), stat(0o40700, 4001)
    view = View(Policy(OPTIONS))
    assert [AUDIENCES.is_visible_to(view, ANN, ServerId(4002), info) for info in (own, public, others)] == [
        True,
        True,
        False,
    ]
    in_group = View(Policy(parse_options("cloak_list=uid +070 4001")[0]))
    assert not AUDIENCES.is_visible_to(in_group, ANN, ServerId(4002), stat(0o40770, 4001))
    for other in (View(Forwarding(OPTIONS)), View(Judging(OPTIONS)), View(Policy(OPTIONS), lower=LOWER)):
        assert not AUDIENCES.is_visible_to(other, ANN, ServerId(4002), own)


@pytest.mark.parametrize(
    ("audience", "above", "mode", "holds"),
    [
        (4002, ALL_VIEWERS, 0o100600, True),
        (4002, None, 0o100600, True),
        (4001, 4002, 0o100600, False),  # whom its attributes are cached for, not whom the name is
        (ALL_VIEWERS, 4002, 0o100600, True),
        (NO_VIEWER, 4002, 0o100600, True),
        (ALL_VIEWERS, 4001, 0o100600, False),
        (0, 4001, 0o100604, True),  # root is a caller like any other
        (ALL_VIEWERS, 0, 0o100604, True),
        (0, ALL_VIEWERS, 0o100600, False),
        (0, 4002, 0o100600, False),
        (ALL_VIEWERS, ALL_VIEWERS, 0o100604, False),
        (ALL_VIEWERS, NO_VIEWER, 0o100604, False),
        (ALL_VIEWERS, None, 0o100604, False),
    ],
)
def test_what_is_cached_for_one_caller_holds_as_long_as_it_surely_sees_it(
    audience: Viewer, above: Viewer | None, mode: int, holds: bool
) -> None:
    obj = directory(audience, above, cached_for_one=True)
    info = linux.Stat((mode, 2, 3, 1, 4002, 4002, 0, 0, 0, 0))
    view = View(Policy(parse_options("no_root_squash,cloak_list=uid +007 4002")[0]))
    assert AUDIENCES.is_still_visible(view, obj, -1, info) is holds


# -- groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [0, 1, 1 << 40])
@pytest.mark.parametrize("gid", [0, 1, 3000, (1 << 32) - 2])
def test_a_group_as_an_audience(gid: int, policy: int) -> None:
    audience = members_of(ServerId(gid), policy)
    assert group_of(audience) == gid
    assert is_limited(audience)
    assert audience not in (members_of(ServerId(gid + 1), policy), members_of(ServerId(gid), policy + 1))
    assert [is_limited(viewer) for viewer in (Viewer(0), NO_VIEWER, ALL_VIEWERS)] == [True, False, False]


class Member:
    """A caller in the group 3000 alone."""

    def has_group(self, gid: int) -> bool:
        return gid == 3000


MEMBER: Any = Member()


def test_who_stands_for_a_group() -> None:
    audiences = Audiences(NOTHING, NOTHING, LOCAL, of_groups=True)
    assert audiences.viewer_of(directory(TEAM), Viewer(5), MEMBER) == TEAM
    assert audiences.viewer_of(directory(OTHER_TEAM), Viewer(5), MEMBER) == 5
    assert audiences.viewer_of(directory(Viewer(6)), Viewer(5), MEMBER) == 5
    assert audiences.viewer_of(directory(TEAM), NO_VIEWER, MEMBER) == NO_VIEWER
    assert audiences.viewer_of(directory(TEAM), ALL_VIEWERS, MEMBER) == ALL_VIEWERS
    audiences.reset()  # by another policy, whoever got to know the directory need not be a member
    assert audiences.viewer_of(directory(TEAM), Viewer(5), MEMBER) == 5
