"""Who checks permissions, in words."""

from typing import Any

import pytest

from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller, ClientId, ServerId
from cloakfs.mapping import IdMap, RangeDef
from cloakfs.policy import Attrs, Policy
from cloakfs.reasons import difference, who_checks
from cloakfs.view import View


class Unmapped(Policy):
    """Shows the ids that files have on the server."""

    def show(self, attrs: Attrs) -> Attrs:
        return attrs


class Shifted(Policy):
    """Has a mapping of its own."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.ids["uid"] = IdMap([RangeDef("uid", ClientId(1000), ClientId(1000), "map", ServerId(2000))])


ANN = Caller(ServerId(1000), ServerId(1000), frozenset())


class Lower:
    """Stands for the lower mount, which is not queried for this."""

    path = "/lower"

    def contains(self, info: Any) -> bool:
        raise NotImplementedError

    def is_visible_to(self, who: Any, fd: int, info: Any) -> bool:
        raise NotImplementedError

    def owner_of_new(self, credentials: Any, fd: int) -> tuple[ServerId, ServerId]:
        raise NotImplementedError

    def query(self, credentials: Any, fd: int) -> bytes:
        raise NotImplementedError


def view(
    words: str = "", *, fixed: Caller | None = None, plugin: type[Policy] = Policy, lower: Lower | None = None
) -> View:
    return View(plugin(parse_options(words)[0]), fixed, lower=lower)


@pytest.mark.parametrize("words", ["", "cloak_list=uid +077 1000 1999", "no_root_squash,anonuid=1000"])
def test_the_kernel_comes_to_the_same_result_where_ids_stay(words: str) -> None:
    assert difference(view(words), None) == difference(view(words), "proc") == ""
    assert "(default_permissions)" in who_checks(view(words), None, by_kernel=False, exported=False)
    assert who_checks(view(words), None, by_kernel=True, exported=False).endswith("by the same ids and groups")


@pytest.mark.parametrize(
    ("seen", "groups", "why"),
    [
        (view("range_map=uid 0 99 map 0"), None, "ids are mapped"),
        (view("range_map=gid 5 9 squash -2"), None, "ids are mapped"),
        (view("all_squash"), None, "ids are mapped"),
        (view(plugin=Shifted), None, "ids are mapped"),
        (view(), "database", "groups=database"),
        (view(), "none", "groups=none"),
        (view(fixed=ANN), None, "a fixed view"),
        (view(plugin=Unmapped), None, "the plug-in"),
        (view(lower=Lower()), None, "the lower mount has ids of its own"),
    ],
)
def test_what_makes_a_difference_is_named(seen: View, groups: str | None, why: str) -> None:
    assert why in difference(seen, groups)
    for by_kernel in (True, False):
        said = who_checks(seen, groups, by_kernel=by_kernel, exported=False)
        assert why in said
        assert "default_permissions" not in said


def test_of_an_exported_mount_no_option_is_suggested() -> None:
    assert who_checks(view(), None, by_kernel=True, exported=True).endswith("for its NFS server")
    assert who_checks(view(), None, by_kernel=False, exported=True) == "checked by the daemon"


def test_callers_that_the_daemon_cannot_see_are_named() -> None:
    text = "callers in other pid namespaces"
    assert text in who_checks(view(), None, by_kernel=True, exported=False, has_unseen=True)
    assert text not in who_checks(view(), None, by_kernel=True, exported=True, has_unseen=True)
    assert text not in who_checks(view(), None, by_kernel=True, exported=False)
