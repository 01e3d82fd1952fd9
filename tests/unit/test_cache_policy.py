"""The table of what the kernel may cache: what it says of each mount, completely and with reasons."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cloakfs.config.parse import parse_options
from cloakfs.exportmode import LOCAL, ExportMode, Server
from cloakfs.identity import Caller, ClientId, ServerId
from cloakfs.kernelcache.cachepolicy import (
    ABSENT_SECONDS,
    BRIEF_SECONDS,
    LONG_SECONDS,
    SHORT_SECONDS,
    CacheCase,
    Fact,
    MountTraits,
    RuleTimeouts,
    TreeMount,
    evaluate,
    facts,
    tree_mount,
)
from cloakfs.policy import Policy
from cloakfs.tree.filesystems import MountedFilesystem
from cloakfs.view import View


class Hiding(Policy):
    def visible(self, caller: object, attrs: object) -> bool:
        return True


class Proving(Hiding):
    def same_for_all(self, attrs: object) -> bool:
        return True


class Forwarding(Policy):
    def forward(self, caller: Any) -> Any:
        return caller


OPTIONS = parse_options("cloak_list=uid +077 3000 3999")[0]
CLOAKED = Policy(OPTIONS)
ME = Caller(ServerId(1), ServerId(1), frozenset({ServerId(1)}))
LOWER: Any = object()
POLICIES = [Policy(), CLOAKED, Hiding(), Proving(), Forwarding(), Forwarding(OPTIONS)]

TREES = (
    [TreeMount("/", "ext4")],
    [TreeMount("/", "nfs4", watched=False, has_posix_rules=False)],
    [TreeMount("/", "overlay", watched=False, has_posix_rules=False), TreeMount("/a", "ext4", posix_above=False)],
    [TreeMount("/", "ext4"), TreeMount("/a", "nfs4", watched=False, has_posix_rules=False), TreeMount("/b", "xfs")],
)

VIEWS = ((False, False, False), (True, False, False), (True, False, True), (True, True, True))
KNFSD = ExportMode(Server.KNFSD)
SQUASHED, CHECKED = replace(KNFSD, all_squash=True), replace(KNFSD, subtree_check=True)
GATED = ExportMode(kernel_gate=True)
SERVERS = (LOCAL, KNFSD, SQUASHED, CHECKED, ExportMode(Server.GANESHA))


def view_of(policy: Policy, *, fixed: bool = False, below: bool = False) -> View:
    return View(policy, ME if fixed else None, lower=LOWER if below else None)


# -- what it says ----------------------------------------------------------------------------------


def of(mode: ExportMode, view: View, mounted: TreeMount = TREES[0][0], **traits: bool) -> RuleTimeouts:
    return evaluate(CacheCase(MountTraits(view.fixed is not None, mode=mode, **traits), view, mounted))


HOUR, SECOND, BRIEF, ABSENT = LONG_SECONDS, SHORT_SECONDS, BRIEF_SECONDS, ABSENT_SECONDS


@pytest.mark.parametrize(
    ("mode", "names", "attributes", "briefly"),
    [
        # for all, for one, at the top
        (LOCAL, (HOUR, HOUR, HOUR), (HOUR, HOUR, HOUR), BRIEF),
        (ExportMode(Server.GANESHA), (HOUR, HOUR, HOUR), (HOUR, HOUR, HOUR), BRIEF),
        (KNFSD, (HOUR, 0, HOUR), (HOUR, 0, HOUR), 0),
        (SQUASHED, (HOUR, HOUR, HOUR), (HOUR, HOUR, HOUR), 0),
        (CHECKED, (HOUR, HOUR, HOUR), (HOUR, HOUR, HOUR), 0),
        (ExportMode(no_client_cache=True), (HOUR, HOUR, HOUR), (HOUR, HOUR, HOUR), 0),
    ],
)
def test_a_view_for_each_caller(
    mode: ExportMode, names: tuple[float, ...], attributes: tuple[float, ...], briefly: float
) -> None:
    found = of(mode, view_of(CLOAKED))
    assert (found.names, found.names_for_one, found.names_at_top) == names
    assert (found.attributes, found.attributes_for_one, found.attributes_of_top) == attributes
    assert found.briefly == briefly
    assert found.of_directories is not mode.no_client_cache
    assert (found.negative, found.negative_at_top) == (0, 0)
    assert found.negative_if_complete == (0 if mode.knfsd else ABSENT)
    assert found.content is not mode.ganesha


@pytest.mark.parametrize("mode", SERVERS)
def test_members_of_a_group(mode: ExportMode) -> None:
    """Where a server makes the requests, it says which groups their callers have."""
    found = of(mode, view_of(CLOAKED), process_groups=True)
    seconds = 0 if mode.is_exported else HOUR
    assert (found.names_for_members, found.attributes_for_members) == (seconds, seconds)
    for none in (of(mode, view_of(CLOAKED)), of(mode, view_of(Proving()), process_groups=True)):
        assert (none.names_for_members, none.attributes_for_members) == (0, 0)


@pytest.mark.parametrize(
    ("mode", "several", "at_top", "attributes", "of_top"),
    [
        (LOCAL, False, 0, HOUR, 0),
        (LOCAL, True, HOUR, HOUR, HOUR),
        (GATED, False, HOUR, HOUR, HOUR),
        (ExportMode(Server.GANESHA), False, HOUR, HOUR, HOUR),
        (KNFSD, False, 0, 0, 0),
        (KNFSD, True, HOUR, 0, 0),
        (CHECKED, False, 0, HOUR, 0),
        (CHECKED, True, HOUR, HOUR, 0),
        (replace(CHECKED, kernel_gate=True), False, HOUR, HOUR, HOUR),
    ],
)
def test_a_fixed_view(mode: ExportMode, several: bool, at_top: float, attributes: float, of_top: float) -> None:
    found = of(mode, view_of(CLOAKED, fixed=True), several=several)
    assert (found.names, found.names_at_top, found.names_for_one) == (HOUR, at_top, 0)
    assert (found.attributes, found.attributes_of_top, found.attributes_for_one) == (attributes, of_top, 0)
    assert (found.negative, found.negative_at_top, found.negative_if_complete) == (ABSENT, min(at_top, ABSENT), 0)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("policy", "below", "of_top", "negative_at_top"),
    [(Hiding(), False, HOUR, 0), (Forwarding(), False, HOUR, ABSENT), (CLOAKED, True, 0, 0), (Proving(), True, 0, 0)],
)
def test_what_may_change_with_the_caller(
    policy: Policy, below: bool, of_top: float, negative_at_top: float, fixed: bool
) -> None:
    """Whether a plug-in forwards callers in its own way does not matter to a view that has but one."""
    is_steady = fixed and isinstance(policy, Forwarding)
    found = of(GATED if fixed else LOCAL, view_of(policy, fixed=fixed, below=below))
    assert (found.names, found.attributes, found.negative) == ((HOUR, HOUR, ABSENT) if is_steady else (0, 0, 0))
    assert (found.names_for_one, found.attributes_for_one, found.negative_if_complete) == (0, 0, 0)
    assert (found.attributes_of_top, found.negative_at_top) == (of_top, negative_at_top)


def test_a_plug_in_that_says_what_all_see() -> None:
    found = of(LOCAL, view_of(Proving()))
    assert (found.names, found.attributes, found.negative) == (HOUR, HOUR, 0)
    assert (found.names_for_one, found.attributes_for_one) == (0, 0)


def test_a_view_that_hides_nothing() -> None:
    found = of(LOCAL, view_of(Policy()))
    assert (found.names, found.attributes, found.negative, found.negative_at_top) == (HOUR, HOUR, ABSENT, ABSENT)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("watched", "posix", "posix_above"), [*product((False, True), repeat=3)])
def test_file_systems(watched: bool, posix: bool, posix_above: bool, fixed: bool) -> None:
    mounted = TreeMount("/", "ext4", watched, posix, posix_above=posix_above)
    found = of(GATED if fixed else LOCAL, view_of(CLOAKED, fixed=fixed), mounted)
    lasting = HOUR if watched else SECOND
    for_all = lasting if fixed or (posix and posix_above) else 0
    for_one = HOUR if watched and not fixed else 0
    assert found.lasting == lasting
    assert (found.names, found.attributes) == (for_all, for_all)
    assert (found.names_for_one, found.attributes_for_one) == (for_one if posix else 0, for_one)
    assert found.negative == (min(ABSENT, lasting) if fixed else 0)
    assert found.negative_if_complete == (ABSENT if for_one and posix else 0)
    assert found.attributes_of_top == lasting
    assert found.content is posix


def test_listings_are_kept_where_nothing_can_be_hidden_in_them() -> None:
    """And where pyfuse3 can say so."""
    for mode, fixed, keeps in product((LOCAL, KNFSD, ExportMode(no_client_cache=True)), (False, True), (False, True)):
        found = of(mode, view_of(CLOAKED, fixed=fixed), keeps_listings=keeps)
        assert found.listings is (keeps and not fixed and mode is LOCAL)


# -- what users are shown ---------------------------------------------------------------------------


def all_reports() -> list[tuple[MountTraits, View, list[TreeMount], list[Fact]]]:
    found = []
    policies = [*((policy, False) for policy in POLICIES), (CLOAKED, True)]
    for (policy, below), tree, views, server, no_client_cache, xattrs in product(
        policies, TREES, VIEWS, SERVERS, (False, True), (False, True)
    ):
        fixed, several, gated = views
        mode = replace(server, no_client_cache=no_client_cache, kernel_gate=gated)
        traits = MountTraits(
            fixed, several, mode, xattrs, acls=xattrs and gated, keeps_listings=xattrs, process_groups=xattrs
        )
        view = view_of(policy, fixed=fixed, below=below)
        found.append((traits, view, tree, facts(traits, view, tree)))
    return found


REPORTS = all_reports()


def test_what_is_said_is_what_the_answers_are_given_by() -> None:
    """Both come from one table. Here, each line is compared with what it says about the answers."""
    columns = {
        ("names", "in directories known to one"): "names_for_one",
        ("names", "in directories known to members"): "names_for_members",
        ("attributes", "of what is known to members"): "attributes_for_members",
        ("attributes", "of the top"): "attributes_of_top",
        ("absent names", "in directories known to one"): "negative_if_complete",
        ("names", "at the top"): "names_at_top",
        ("absent names", "at the top"): "negative_at_top",
    }
    seen = set()
    for traits, view, tree, report in REPORTS:
        found = evaluate(CacheCase(traits, view, tree[0]))
        for fact in report:
            for (what, of_), column in columns.items():
                if not fact.where and fact.what == what and fact.of.startswith(of_):
                    seen.add(column)
                    assert fact.seconds == getattr(found, column), (fact, found)
    assert seen == {*columns.values()}


def test_it_is_complete_and_each_object_is_in_one_line() -> None:
    kinds = {"names", "attributes", "absent names", "listings", "content", "extended attributes"}
    for traits, _, _, report in REPORTS:
        assert {fact.what for fact in report if not fact.where} - {"POSIX ACLs"} == kinds, traits
        assert any(fact.what == "POSIX ACLs" for fact in report) is traits.acls
        lines = [(fact.what, fact.of, fact.where) for fact in report]
        assert len(set(lines)) == len(lines), report


def test_what_is_not_cached_for_long_has_a_reason() -> None:
    allowed = {0, BRIEF_SECONDS, SHORT_SECONDS, ABSENT_SECONDS, LONG_SECONDS, None}
    for _, _, _, report in REPORTS:
        for fact in report:
            assert fact.seconds in allowed
            short = fact.seconds in (0, BRIEF_SECONDS, SHORT_SECONDS, ABSENT_SECONDS)
            derived = fact.what == "POSIX ACLs"  # the attributes have the reason
            assert bool(fact.reason) or not short or derived, fact
            assert not fact.hint or fact.reason, fact


def test_what_is_not_reported_is_cached_for_a_second_at_most() -> None:
    for _, _, tree, report in REPORTS:
        if len(tree) == 1 and not tree[0].watched:
            assert all((fact.seconds or 0) <= SHORT_SECONDS for fact in report)


def test_hints_help() -> None:
    """A fixed view is named only where it caches names, and where the kernel's server has several callers, none."""
    for _, view, tree, report in REPORTS:
        if any("views=" in fact.hint for fact in report):
            fixed = facts(MountTraits(fixed=True, mode=GATED), view_of(view.policy, fixed=True), tree)
            assert any(fact.what == "names" and fact.seconds for fact in fixed)


def test_file_systems_that_are_alike_share_their_lines() -> None:
    many = [TreeMount(f"/{number}", "nfs4", watched=False, has_posix_rules=False) for number in range(5)]
    report = facts(MountTraits(), View(Policy()), [TreeMount("/", "ext4"), *many, TreeMount("/x", "ext4")])
    where = {fact.where for fact in report}
    assert where == {"", "/0 (nfs4), /1 (nfs4), /2 (nfs4) and 2 more"}


def test_changes_that_are_not_reported_above_are_the_reason_below() -> None:
    inner = TreeMount("/x", "ext4", watched=False, watched_above=False)
    report = facts(MountTraits(fixed=True, mode=GATED), view_of(Policy(), fixed=True), [inner])
    (names,) = [fact for fact in report if fact.what == "names"]
    assert (names.seconds, names.reason) == (SECOND, "changes on a file system above are not reported")


@pytest.mark.parametrize(
    ("entrants", "reason"),
    [((), "the daemon checks there who may enter"), ((5,), "view_access lets others enter, too")],
)
def test_why_a_fixed_view_is_asked_for_at_its_top(entrants: tuple[int, ...], reason: str) -> None:
    view = View(CLOAKED, ME, frozenset(map(ClientId, entrants)))
    report = facts(MountTraits(fixed=True), view, TREES[0])
    assert {fact.reason for fact in report if fact.of in ("at the top", "of the top")} == {reason}


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_what_lies_below_a_file_system_depends_on_it(kind: str) -> None:
    root = MountedFilesystem(1, "ext4", "/srv", -1, watched=True)
    middle = MountedFilesystem(2, kind, "/srv/a", -1, watched=kind == "ext4")
    inner = MountedFilesystem(3, "tmpfs", "/srv/a/b", -1, watched=True)
    beside = MountedFilesystem(4, "tmpfs", "/srv/ab", -1, watched=True)
    tree = [root, middle, inner, beside]
    told = {it.path: (it.watched_above, it.posix_above) for it in (tree_mount(it, tree) for it in tree)}
    plain = kind == "ext4"
    assert told == {
        "/srv": (True, True),
        "/srv/a": (True, True),
        "/srv/a/b": (plain, plain),
        "/srv/ab": (True, True),
    }
