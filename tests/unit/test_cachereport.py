"""The report of the kernel's cache is complete and gives its reasons, whatever the options."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cloakfs.caller import Caller
from cloakfs.config.parse import parse_options
from cloakfs.exportmode import LOCAL, ExportMode, Server
from cloakfs.filesystem.cachereport import Fact, Terms, TreeMount, facts, tree_mounts
from cloakfs.filesystem.forget import ABSENT_SECONDS
from cloakfs.filesystem.remember import BRIEF_SECONDS, LONG_SECONDS, SHORT_SECONDS
from cloakfs.ids import ServerId
from cloakfs.policy import Policy
from cloakfs.tree.filesystems import Filesystem
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


def policies() -> list[Policy]:
    cloaked = parse_options("cloak_list=uid +077 3000 3999")[0]
    return [Policy(), Policy(cloaked), Hiding(), Proving(), Forwarding(), Forwarding(cloaked)]


TREES = (
    [TreeMount("/", "ext4")],
    [TreeMount("/", "nfs4", watched=False, has_posix_rules=False)],
    [TreeMount("/", "overlay", watched=False, has_posix_rules=False), TreeMount("/a", "ext4")],
    [TreeMount("/", "ext4"), TreeMount("/a", "nfs4", watched=False, has_posix_rules=False), TreeMount("/b", "xfs")],
)

VIEWS = ((False, False, False), (True, False, False), (True, False, True), (True, True, True))
KNFSD = ExportMode(Server.KNFSD)
SERVERS = (
    LOCAL,
    KNFSD,
    replace(KNFSD, all_squash=True),
    replace(KNFSD, subtree_check=True),
    ExportMode(Server.GANESHA),
)


def all_reports() -> list[tuple[Terms, View, list[TreeMount], list[Fact]]]:
    found = []
    for policy, tree, views, server, rest in product(
        policies(), TREES, VIEWS, SERVERS, product((False, True), repeat=3)
    ):
        fixed, several, gated = views
        no_client_cache, xattrs, keeps = rest
        mode = replace(server, no_client_cache=no_client_cache, kernel_gate=gated)
        terms = Terms(fixed, several, mode, xattrs, acls=xattrs and gated, keeps_listings=keeps)
        view = View(policy)
        found.append((terms, view, tree, facts(terms, view, tree)))
    return found


REPORTS = all_reports()


def test_it_is_complete_and_each_object_is_in_one_line() -> None:
    kinds = {"names", "attributes", "absent names", "listings", "content", "extended attributes"}
    for terms, _, _, report in REPORTS:
        assert {fact.what for fact in report if not fact.where} - {"POSIX ACLs"} == kinds, terms
        assert any(fact.what == "POSIX ACLs" for fact in report) is terms.acls
        lines = [(fact.what, fact.of, fact.where) for fact in report]
        assert len(set(lines)) == len(lines), report


def test_what_is_not_remembered_for_long_has_a_reason() -> None:
    times = {0, BRIEF_SECONDS, SHORT_SECONDS, ABSENT_SECONDS, LONG_SECONDS, None}
    for _, _, _, report in REPORTS:
        for fact in report:
            assert fact.seconds in times
            short = fact.seconds in (0, BRIEF_SECONDS, SHORT_SECONDS, ABSENT_SECONDS)
            derived = fact.what == "POSIX ACLs"  # the attributes have the reason
            assert bool(fact.reason) or not short or derived, fact
            assert not fact.way_out or fact.reason, fact


def test_what_is_not_reported_is_remembered_for_a_second_at_most() -> None:
    for _, _, tree, report in REPORTS:
        if len(tree) == 1 and not tree[0].watched:
            assert all((fact.seconds or 0) <= SHORT_SECONDS for fact in report)


def test_ways_out_lead_out() -> None:
    """A fixed view is named only where it remembers names, and where the kernel's server has several callers, none."""
    for _, view, tree, report in REPORTS:
        if any("views=" in fact.way_out for fact in report):
            fixed = facts(Terms(fixed=True, mode=ExportMode(kernel_gate=True)), view, tree)
            assert any(fact.what == "names" and fact.seconds for fact in fixed)


def test_file_systems_that_are_alike_share_their_lines() -> None:
    many = [TreeMount(f"/{number}", "nfs4", watched=False, has_posix_rules=False) for number in range(5)]
    report = facts(Terms(), View(Policy()), [TreeMount("/", "ext4"), *many, TreeMount("/x", "ext4")])
    where = {fact.where for fact in report}
    assert where == {"", "/0 (nfs4), /1 (nfs4), /2 (nfs4) and 2 more"}


def test_changes_that_are_not_reported_above_are_the_reason_below() -> None:
    inner = TreeMount("/x", "ext4", watched=False, watched_above=False)
    view = View(Policy(), Caller(ServerId(1), ServerId(1), frozenset({ServerId(1)})))
    (fact,) = [
        fact
        for fact in facts(Terms(fixed=True, mode=ExportMode(kernel_gate=True)), view, [inner])
        if fact.what == "names"
    ]
    assert (fact.seconds, fact.reason) == (1.0, "changes on a file system above are not reported")


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_what_lies_below_a_file_system_depends_on_it(kind: str) -> None:
    root = Filesystem(1, "ext4", "/srv", -1, watched=True)
    middle = Filesystem(2, kind, "/srv/a", -1, watched=kind == "ext4")
    inner = Filesystem(3, "tmpfs", "/srv/a/b", -1, watched=True)
    beside = Filesystem(4, "tmpfs", "/srv/ab", -1, watched=True)
    told = {it.path: (it.watched_above, it.posix_above) for it in tree_mounts([root, middle, inner, beside])}
    plain = kind == "ext4"
    assert told == {
        "/srv": (True, True),
        "/srv/a": (True, True),
        "/srv/a/b": (plain, plain),
        "/srv/ab": (True, True),
    }
