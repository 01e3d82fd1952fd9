"""What a compromised client can become and do, in trees that are only described: the kernel is not asked."""

import itertools
import stat
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloakfs import acl
from cloakfs.audit import reach as reach_module
from cloakfs.audit.assess import Assessment, Tally, assess
from cloakfs.audit.diff import exposure_changes
from cloakfs.audit.entry import Entry
from cloakfs.audit.identities import (
    ALL,
    Accounts,
    Claims,
    IdSet,
    claims,
    effective_groups,
    fixed_claims,
    mapped_ranges,
    single,
)
from cloakfs.audit.reach import OWNS, SEES, Reach
from cloakfs.audit.report import difference_report, findings, format_ids, report
from cloakfs.audit.survey import NO_ANCESTRY, READ, WRITE, AccessAttrs, Ancestry, Bucket, BucketKey, Grants, Survey
from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller, ClientId, ServerId
from cloakfs.mapping import MAX_ID
from cloakfs.policy import Policy
from cloakfs.view import View

NOBODY = ServerId(65534)
NO_ACCOUNTS = Accounts({}, {}, {})


def server(*ids: int) -> frozenset[ServerId]:
    return frozenset(map(ServerId, ids))


class Tree:
    """A tree that is described: directories and files with owner, group and mode."""

    def __init__(self, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        self.survey = Survey("/srv/tree")
        self._ways = {"": self._add("", stat.S_IFDIR | mode, uid, gid, 0)}

    def _add(self, path: str, mode: int, uid: int, gid: int, size: int, ancestry: int = NO_ANCESTRY) -> int:
        of = AccessAttrs(mode, ServerId(uid), ServerId(gid), b"")
        survey = self.survey
        if of not in survey.kinds:
            survey.kinds.append(of)
            root = 7 if stat.S_ISDIR(mode) or mode & 0o111 else 6
            survey.grants.append(
                Grants({ServerId(0): root, of.uid: mode >> 6 & 7 if uid else root}, {of.gid: mode >> 3 & 7}, mode & 7)
            )
        kind = survey.kinds.index(of)
        top, slash, _ = path.partition("/")
        area = top if slash or stat.S_ISDIR(mode) else ""
        found = survey.found.setdefault(BucketKey(area, ancestry, kind), Bucket())
        found.names += 1
        found.size += size if stat.S_ISREG(mode) else 0
        found.example = path
        survey.names += 1
        survey.examined += 1
        if stat.S_ISDIR(mode):
            survey.ancestries.append(Ancestry(ancestry, kind))
            return len(survey.ancestries) - 1
        return kind

    def directory(self, path: str, mode: int, uid: int, gid: int) -> "Tree":
        above = path.rpartition("/")[0]
        self._ways[path] = self._add(path, stat.S_IFDIR | mode, uid, gid, 0, self._ways[above])
        return self

    def file(self, path: str, mode: int, uid: int, gid: int, size: int = 10, kind: int = stat.S_IFREG) -> "Tree":
        self._add(path, kind | mode, uid, gid, size, self._ways[path.rpartition("/")[0]])
        return self


def entry(text: str, client: str = "lab", *, by_knfsd: bool = False, fixed: Caller | None = None) -> Entry:
    options = parse_options(text)[0]
    policy = Policy(options)
    claimed = fixed_claims(fixed) if fixed is not None else claims(policy, options.groups, by_knfsd=by_knfsd)
    entrants = frozenset(options.view_access)
    view = View(policy, fixed, entrants)
    label = "" if fixed is None else f"@{fixed.uid}"
    return Entry("/srv/tree", client, label, "x:1:1", "/srv/tree", view, claimed, options.read_only, entrants)


def assessed(tree: Tree, text: str, accounts: Accounts = NO_ACCOUNTS) -> Assessment:
    one = entry(text)
    return assess(one, tree.survey, accounts, [one])


def total(assessment: Assessment, uid: int | None) -> Tally:
    (row,) = [row for row in assessment.rows if row.uid == uid]
    return row.total


def kinds(assessment: Assessment) -> list[str]:
    return [finding.kind for finding in findings(assessment, NO_ACCOUNTS)]


# -- sets of ids -----------------------------------------------------------------------------------

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda of: (of[0], of[0] + of[1])), max_size=6)


@given(RANGES, st.frozensets(st.integers(0, 40)))
def test_a_set_of_ids_is_a_set(ranges: list[tuple[int, int]], avoided: frozenset[int]) -> None:
    wanted = {id_ for low, high in ranges for id_ in range(low, high + 1)}
    ids = IdSet(ranges)
    assert {id_ for id_ in range(45) if id_ in ids} == wanted
    assert len(ids) == len(wanted)
    assert ids.other_than(avoided) == min(wanted - avoided, default=None)
    assert ids == IdSet((id_, id_) for id_ in wanted)
    assert hash(ids) == hash(IdSet((id_, id_) for id_ in wanted))


def test_a_set_of_ids_knows_what_it_is() -> None:
    assert repr(IdSet([(1, 3)])) == "IdSet([(1, 3)])"
    assert "1" not in IdSet([(1, 3)])
    assert IdSet() != frozenset()
    assert len(ALL) == MAX_ID + 1


# -- who becomes whom ------------------------------------------------------------------------------

DEFINITIONS = st.lists(
    st.tuples(
        st.integers(0, 20), st.integers(0, 5), st.sampled_from(["map", "squash"]), st.sampled_from([0, 7, 50, 65534])
    ),
    max_size=4,
)
SQUASH = st.sampled_from(["root_squash", "no_root_squash", "all_squash"])


@given(DEFINITIONS, SQUASH)
def test_stretches_say_of_every_id_what_it_becomes(defs: list[tuple[int, int, str, int]], squash: str) -> None:
    words = " ".join(f"uid {low} {low + more} {action} {to}" for low, more, action, to in defs)
    policy = Policy(parse_options(f"rw,{squash}" + (f",range_map={words}" if words else ""))[0])
    ids = policy.ids["uid"]
    found = mapped_ranges(policy, "uid", by_knfsd=False)
    assert (found[0].low, found[-1].high) == (0, MAX_ID)
    assert all(one.high + 1 == other.low for one, other in itertools.pairwise(found))
    for id_ in map(ClientId, (*range(60), 65533, 65534, 65535, MAX_ID)):
        (one,) = [one for one in found if one.low <= id_ <= one.high]
        assert one.server_of(id_) == ids.forward(id_)
        assert one.counts is (ids.counterpart(id_, "forward") is not None)
        claimed = one.claims(one.server_of(id_))
        assert claimed is not None
        assert claimed[0] <= id_ <= claimed[1]
        assert one.is_unchanged is (one.server_of(one.low) == int(one.low) and (one.shifts or one.low == one.high))
        assert one.claims(ServerId(4_000_000_000)) is None or one.servers[1] >= 4_000_000_000


def test_the_kernels_server_replaces_a_clients_root() -> None:
    # uid 0 is in the range that becomes root's and others' ids; the server cannot know that root may do so.
    policy = Policy(parse_options("rw,range_map=uid 0 9 map 100 uid 10 squash 0 gid 0 9 map 100")[0])
    first, second, *_ = mapped_ranges(policy, "uid", by_knfsd=True)
    assert (first.low, first.high, second.low, second.high) == (0, 0, 1, 9)
    assert first.server == NOBODY
    assert first.rule == "the kernel's server makes it client uid 65534"
    assert mapped_ranges(policy, "uid", by_knfsd=False)[0].servers == (100, 109)
    # There is nothing to replace where root is nobody anyway, nor where it is root.
    for text in ("rw", "rw,no_root_squash"):
        policy = Policy(parse_options(text)[0])
        assert mapped_ranges(policy, "uid", by_knfsd=True) == mapped_ranges(policy, "uid", by_knfsd=False)
    policy = Policy(parse_options("rw,range_map=uid 0 map 100")[0])
    assert [one.low for one in mapped_ranges(policy, "uid", by_knfsd=True)] == [0, 1]


@pytest.mark.parametrize(
    ("groups", "optional", "given", "by_account"),
    [
        (None, True, server(), False),
        ("proc", True, server(), False),
        ("none", False, server(), False),
        ("database", False, server(), True),
        ("12:13", False, server(1012, 1013), False),
    ],
)
def test_which_groups_are_believed(
    groups: str | None, optional: bool, given: frozenset[ServerId], by_account: bool
) -> None:
    policy = Policy(parse_options("rw,range_map=gid 10 19 map 1010")[0])
    found = claims(policy, groups, by_knfsd=False)
    # Nobody's group can be had as the primary one only.
    assert (found.optional, found.primary) == (
        IdSet([(1010, 1019)] if optional else []), IdSet([(1010, 1019), (NOBODY, NOBODY)]),
    )  # fmt: skip
    assert (found.given, found.by_account) == (given, by_account)


def test_the_kernels_server_takes_groups_from_the_database() -> None:
    options = parse_options("rw")[0]
    assert effective_groups(options, by_knfsd=True) == "database"
    assert effective_groups(options, by_knfsd=False) is None
    assert effective_groups(parse_options("rw,groups=none")[0], by_knfsd=True) == "none"


def test_names_are_told_with_ids() -> None:
    accounts = Accounts({}, {ServerId(5): "ann"}, {ServerId(6): "staff"})
    assert [accounts.user(ServerId(id_)) for id_ in (5, 6)] == ["ann (5)", "6"]
    assert [accounts.group(ServerId(id_)) for id_ in (5, 6)] == ["5", "staff (6)"]
    assert (
        format_ids([(ClientId(5), ClientId(9)), (ClientId(0), ClientId(0)), (ClientId(10), ClientId(10))]) == "0, 5-10"
    )


def test_the_ids_that_an_acl_names() -> None:
    none = 2**32 - 1
    entries = [(1, none), (2, 1001), (4, none), (8, 2001), (8, 2002), (0x10, none), (0x20, none)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, 7, of) for tag, of in entries)
    assert acl.named(value) == (frozenset({1001}), frozenset({2001, 2002}))
    assert acl.named(b"") == (frozenset(), frozenset())


# -- what can be done ------------------------------------------------------------------------------


def reach(tree: Tree, text: str, uid: int | None, claimed: Claims | None = None) -> dict[str, int]:
    """What can be done by path, as one uid, or as all together."""
    one = entry(text)
    of = Reach(tree.survey, one.view, claimed or one.claims, {}, read_only=one.read_only)
    uids = one.claims.uid_set if uid is None else single(ServerId(uid))
    return {found.example: of.at(place.ancestry, place.kind, uids).bits for place, found in tree.survey.found.items()}


def test_the_only_group_that_can_be_claimed_is_tried_as_the_primary_one() -> None:
    # Every caller has exactly one primary group. Here there is no other to choose than that of the file.
    tree = Tree().file("sevens", 0o040, 2, 7)
    seven = replace(entry("rw").claims, primary=single(ServerId(7)), optional=single(ServerId(7)))
    assert reach(tree, "rw", 1, seven)["sevens"] == SEES | READ


def test_each_request_may_be_made_by_another_identity() -> None:
    # Only ann searches her directory, and only ben reads the file in it.
    tree = Tree().directory("ann", 0o700, 1, 1).file("ann/bens", 0o600, 2, 2)
    assert reach(tree, "rw", 1)["ann/bens"] == SEES
    assert reach(tree, "rw", 2)["ann/bens"] == 0
    assert reach(tree, "rw", None)["ann/bens"] == SEES | READ | WRITE | OWNS
    # But each of them must see all of it.
    assert reach(tree, "rw,cloak_list=uid +077 0 -1", None)["ann/bens"] == 0


def test_a_name_that_is_listed_is_seen_without_more() -> None:
    tree = Tree().directory("d", 0o744, 0, 0).file("d/f", 0o666, 0, 0)
    assert reach(tree, "rw", 5)["d/f"] == SEES
    tree = Tree().directory("d", 0o711, 0, 0).file("d/f", 0o666, 0, 0)
    assert reach(tree, "rw", 5)["d/f"] == SEES | READ | WRITE
    tree = Tree().directory("d", 0o700, 0, 0).file("d/f", 0o666, 0, 0)
    assert reach(tree, "rw", 5)["d/f"] == 0


def test_a_group_can_take_away() -> None:
    tree = Tree().file("f", 0o604, 0, 50)
    for text in ("rw", "rw,groups=none"):
        assert reach(tree, text, 5)["f"] == SEES | READ
    assert reach(tree, "rw,groups=50", 5)["f"] == SEES
    # A mask that hides from the group what the group may do.
    tree = Tree().file("f", 0o640, 0, 50)
    assert reach(tree, "rw,cloak_list=gid -070 50", 5)["f"] == SEES


def test_a_way_may_need_more_groups_than_a_caller_without_supplementary_ones_has() -> None:
    tree = Tree().directory("a", 0o750, 0, 51).directory("a/b", 0o750, 0, 52).file("a/b/f", 0o640, 0, 53)
    text = "cloak_list=uid +070 0 -1"
    assert reach(tree, f"rw,{text}", 5)["a/b/f"] == SEES | READ
    assert reach(tree, f"rw,groups=none,{text}", 5)["a/b/f"] == 0
    assert reach(tree, f"rw,groups=51:52,{text}", 5)["a/b/f"] == SEES | READ


def test_nothing_is_hidden_from_exempt_uids() -> None:
    tree = Tree().directory("ann", 0o711, 1, 1).file("ann/f", 0o604, 1, 1)
    text = "rw,cloak_list=uid +000 0 -1,exempt=5"
    assert reach(tree, text, 5)["ann/f"] == SEES | READ
    assert reach(tree, text, 6)["ann/f"] == 0
    found = assessed(tree, text)
    assert (total(found, 5).reads, total(found, None).reads) == (1, 0)
    (finding,) = [of for of in findings(found, NO_ACCOUNTS) if of.kind == "exempt"]
    assert finding.text == "client uids 5 become 5, from whom nothing is hidden (exempt)"
    assert "exempt" not in kinds(assessed(tree, f"{text},range_map=uid 1 map 7"))
    # A change is found both by what it opens now, and where the tree has nothing that is hidden.
    before, after = (assessed(tree, of) for of in ("rw,cloak_list=uid +000 0 -1", text))
    (opened,) = exposure_changes(before, after)
    assert (opened.low, opened.high, opened.opened) == (5, 5, ["ann", "ann/f"])
    empty = Tree()
    before, after = (assessed(empty, of) for of in ("rw,cloak_list=uid +000 0 -1", text))
    assert difference_report("x", before, after, NO_ACCOUNTS)["opens"]


def test_a_read_only_export_cannot_be_changed() -> None:
    tree = Tree().file("f", 0o600, 5, 5)
    assert reach(tree, "ro", 5)["f"] == SEES | READ
    assert reach(tree, "rw", 5)["f"] == SEES | READ | WRITE | OWNS


def test_what_is_forgotten_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree().directory("d", 0o750, 0, 7).file("d/f", 0o604, 0, 0)
    before = reach(tree, "rw", None)
    monkeypatch.setattr(reach_module, "_MOST_ACCESSES", 1)
    assert reach(tree, "rw", None) == before


def test_every_uid_can_be_known() -> None:
    # Nobody is left who could stand for all others, but what others could do is still known.
    tree = Tree().file("f", 0o604, 7, 7)
    found = assessed(tree, "rw,all_squash,anonuid=7,anongid=8")
    assert [(row.uid, format_ids(row.claimed)) for row in found.rows] == [(7, f"0-{MAX_ID}")]
    assert (found.rows[0].total.reads, found.rows[0].total.sees) == (1, 2)


# -- what an entry gives ---------------------------------------------------------------------------


def test_rows_add_up_what_each_can_do_alone() -> None:
    tree = (
        Tree()
        .file("public", 0o644, 0, 0, 1)
        .file("link", 0o777, 0, 0, 5, stat.S_IFLNK)
        .directory("ann", 0o700, 1001, 1001)
        .file("ann/program", 0o755, 1001, 1001, 100)
        .directory("ben", 0o755, 1002, 1002)
        .file("ben/not for ann", 0o604, 1002, 1001, 1000)
    )
    found = assessed(tree, "rw,groups=database", Accounts({ServerId(1001): server(1001)}, {ServerId(1001): "ann"}, {}))
    assert total(found, None) == Tally(sees=6, lists=2, reads=2, read_bytes=1001)
    ann = total(found, 1001)
    assert ann == Tally(sees=7, lists=3, reads=2, read_bytes=101, changes=2, changed_bytes=100, executes=1, owns=2)
    ben = total(found, 1002)
    assert (ben.reads, ben.read_bytes, ben.owns) == (2, 1001, 2)
    assert found.whole.total.read_bytes == 1101
    assert {row.uid: row.plants for row in found.rows} == {1001: True, 1002: True, 65534: False, None: False}
    assert found.rows[0].areas.keys() == {"", "ann", "ben"}
    assert found.root == []
    told = report(found, NO_ACCOUNTS, 1)
    assert (len(told["identities"]), told["identities_left_out"]) == (1, 3)
    told = report(found, NO_ACCOUNTS)
    assert (len(told["identities"]), told["identities_left_out"]) == (4, 0)
    assert told["tree"]["owners"][0] == {"uid": 0, "name": "0", "names": 3, "files": 1, "bytes": 1}
    assert told["tree"]["areas"]["ann"] == {"names": 2, "files": 1, "bytes": 100}
    (row,) = [row for row in told["identities"] if row["uid"] == 1001]
    assert row["owners"]["1001"]["reads"] == 1
    assert row["worst"]["ann"]["steps"][0] == {
        "path": "/", "mode": "drwxr-xr-x", "uid": 0, "gid": 0, "acl": False, "permissions": "r-x",
        "why": "the root of an export is always visible",
    }  # fmt: skip
    assert [step["path"] for step in row["worst"]["ann"]["steps"]][-1] == row["worst"]["ann"]["path"]


def test_what_is_read_by_a_claimed_group_alone_is_found() -> None:
    tree = Tree().file("salaries", 0o640, 0, 50, 1000)
    found = assessed(tree, "rw")
    (finding,) = [finding for finding in findings(found, NO_ACCOUNTS) if finding.kind == "claimed groups"]
    assert finding.text.endswith("1 (1000 bytes); gids are not mapped, so that a claimed gid counts as the server's")
    assert finding.paths == ("salaries",)
    assert report(found, NO_ACCOUNTS)["anybody"]["examples"][0]["by_claimed_group"]
    # What can only be written to by claiming a group is no example of what can be read.
    found = assessed(Tree().file("salaries", 0o640, 0, 50).file("letters", 0o620, 0, 50), "rw")
    examples = report(found, NO_ACCOUNTS)["anybody"]["examples"]
    assert [example["path"] for example in examples if example["by_claimed_group"]] == ["/salaries"]
    # Mapped gids can be claimed, too.
    (finding, *_) = findings(assessed(tree, "rw,range_map=gid 1 9 map 50"), NO_ACCOUNTS)
    assert finding.text.endswith("; gids can be claimed")
    # A member may read it without claiming anything.
    members = Accounts({ServerId(1001): server(1001, 50)}, {}, {})
    found = assessed(tree, "rw", members)
    assert total(found, 1001).claimed == 0
    assert total(found, None).claimed == 1
    assert "claimed groups" not in kinds(found)


class ShowsSetIdBits(View):
    """A view as 0.1.0 had it."""

    def shown_mode(self, mode: int, *ids: int) -> int:
        return mode


def test_set_id_programs_behind_several_ids_are_found_where_their_bits_are_shown() -> None:
    tree = Tree(0o777)
    now = entry("rw,range_map=uid 800 999 squash 517 gid 5 6 squash 7 gid 8 map 50")
    before = replace(now, view=ShowsSetIdBits(now.view.policy))
    (text, *_) = [
        finding.text for finding in findings(assess(before, tree.survey, NO_ACCOUNTS, [before]), NO_ACCOUNTS)
        if finding.kind == "shared set-id"
    ]  # fmt: skip
    assert text == (
        "client uids 800-999 all become 517, and each of them can plant a set-user-ID program that other users of a "
        "client run as client uid 800"
    )
    shared = [program for program in assess(before, tree.survey, NO_ACCOUNTS, [before]).planted if program.is_shared]
    assert {(program.kind, program.server_id) for program in shared} == {
        ("uid", 517), ("uid", 65534), ("gid", 7), ("gid", 65534),
    }  # fmt: skip
    found = assess(now, tree.survey, NO_ACCOUNTS, [now])
    assert [program for program in found.planted if program.is_shared] == []
    assert kinds(found) == ["planted set-id"]
    # Clients of another entry, to which the owner is one user, run the program.
    other = entry("rw", "office")
    (finding,) = findings(assess(now, tree.survey, NO_ACCOUNTS, [now, other]), NO_ACCOUNTS)
    assert finding.text.endswith("for those who start it on the server, or on clients of /srv/tree for office")


def test_many_users_whose_programs_can_be_planted_are_not_all_named() -> None:
    tree = Tree()
    for uid in range(1, 9):
        tree.file(str(uid), 0o600, uid, 0)
    (finding, *_) = findings(assessed(tree, "rw"), NO_ACCOUNTS)
    assert " and 3 more, " in finding.text


def test_in_a_fixed_view_only_those_who_are_let_in_besides_share_an_identity() -> None:
    who = Caller(ServerId(1001), ServerId(1001), server(1001))
    tree = Tree(0o777)
    both = ["shared set-id", "shared set-id"]  # of the user, and of the group
    opened = entry("rw,views=1001:1001,view_access=1002", fixed=who)
    before = replace(opened, view=ShowsSetIdBits(opened.view.policy, who, opened.entrants))
    for one, shared in ((entry("rw", fixed=who), []), (before, both), (opened, [])):
        found = assess(one, tree.survey, NO_ACCOUNTS, [one])
        assert [(row.uid, row.claimed) for row in found.rows] == [(1001, [(0, MAX_ID)])]
        assert [kind for kind in kinds(found) if kind == "shared set-id"] == shared
        assert one.name == "/srv/tree for lab, view @1001"


def test_root_and_set_id_programs_are_found() -> None:
    tree = (
        Tree(0o755)
        .file("su", 0o4755, 1001, 7)
        .file("copy", 0o4755, 1001, 7)
        .directory("bin", 0o755, 0, 0)
        .file("bin/su", 0o4755, 1001, 7)
        .file("write", 0o2755, 1001, 7)
        .file("not for others", 0o4700, 1002, 0)
        .file("roots", 0o4755, 0, 0)
    )
    texts = [finding.text for finding in findings(assessed(tree, "rw,no_root_squash"), NO_ACCOUNTS)]
    assert texts[0] == "client uid 0 becomes root on the server, who may read and change everything"
    assert [text.partition(";")[2] for text in texts if text.startswith("set-id programs of 1001")] == [
        " it runs them as client uid 1001", " it runs them as client gid 7",
    ]  # fmt: skip
    texts = [finding.text for finding in findings(assessed(tree, "ro,range_map=uid 1 2 squash 1001"), NO_ACCOUNTS)]
    starter = " it runs them as the user who starts them: their set-id bits are not shown"
    assert {text.partition(";")[2] for text in texts if "group 7 " in text and ": 3" in text} == {starter}
    assert not any("1002" in text for text in texts)
    found = findings(assessed(tree, "ro,no_root_squash"), NO_ACCOUNTS)
    assert found[0].text.endswith("who may read everything")


def test_what_makes_an_answer_inexact_is_told() -> None:
    tree = Tree().file("f", 0o644, 0, 0)
    tree.survey.names = 10
    assert kinds(assessed(tree, "ro"))[-1:] == ["inexact"]
    tree.survey.names = 3
    tree.survey.missing = 1
    tree.survey.left_out = [("away", "Input/output error")]
    tree.survey.by_mode_alone = False
    texts = [finding.text for finding in findings(assessed(tree, "ro"), NO_ACCOUNTS)]
    assert texts[0] == "names that are left out: 1, for example away (Input/output error)"
    assert texts[1].startswith("a part of the tree is on a file system")


# -- what a change opens ---------------------------------------------------------------------------


def compared(tree: Tree, old: str | None, new: str | None) -> list[tuple[str, list[str], list[str]]]:
    sides = [None if text is None else assessed(tree, text) for text in (old, new)]
    return [(format_ids([(of.low, of.high)]), of.opened, of.closed) for of in exposure_changes(*sides)]


HOMES = Tree().file("1001", 0o600, 1001, 1001).file("1002", 0o600, 1002, 1002).file("public", 0o644, 0, 0)


def test_the_same_configuration_opens_nothing() -> None:
    for text in ("rw", "rw,range_map=uid 1 9 map 1001", "ro,all_squash"):
        assert compared(HOMES, text, text) == []
    assert exposure_changes(None, None) == []


def test_a_change_is_told_for_those_whom_it_concerns() -> None:
    assert compared(HOMES, "ro", "ro,range_map=uid 1 9 map 1001 gid 0 -1 squash -2") == [
        ("1", ["1001"], []),
        ("2", ["1002"], []),
        ("1001", [], ["1001"]),
        ("1002", [], ["1002"]),
    ]
    # Several client uids become one user.
    assert compared(HOMES, "ro,range_map=uid 1 map 5", "ro,range_map=uid 1 9 squash 1001") == [
        ("1", ["1001"], []),
        ("2-9", ["1001"], []),
    ]


def test_an_entry_that_is_new_or_gone_opens_or_closes_all() -> None:
    opened = compared(HOMES, None, "ro,range_map=uid 1 2 map 1001")
    everybody = ["", "1001", "1002"]  # the names alone, except for the root and what is public
    assert opened == [
        ("0", everybody, []),
        ("1", ["1001"], []),
        ("1-2", everybody, []),
        ("2", ["1002"], []),
        (f"3-{MAX_ID}", everybody, []),
    ]
    assert compared(HOMES, "ro,range_map=uid 1 2 map 1001", None) == [(of, [], paths) for of, paths, _ in opened]


def test_the_report_on_a_change_names_both_sides() -> None:
    old, new = assessed(HOMES, "ro,range_map=uid 1 9 map 1001"), assessed(HOMES, "ro,range_map=uid 1 9 map 1000")
    told = difference_report("x", old, new, Accounts({}, {ServerId(1001): "ann"}, {}))
    assert told["opens"] is True
    assert [(of["client_uids"], of["before"], of["after"]) for of in told["differences"]] == [
        ("1", "ann (1001)", "1000"),
        ("2", "1002", "ann (1001)"),
        ("3", "1003", "1002"),
    ]
    told = difference_report("x", new, None, NO_ACCOUNTS)
    assert (told["opens"], told["differences"][0]["after"]) == (False, None)
    assert [of["before"] for of in told["differences"]] == ["65534", "1000-1008", "1001", "1002", "65534"]


def test_a_client_that_becomes_root_is_an_opening_even_if_nothing_else_is() -> None:
    tree = Tree(0o777).file("public", 0o666, 5, 5)
    text = "ro,range_map=uid 1 map 7"
    told = difference_report("x", assessed(tree, text), assessed(tree, text + " uid 2 map 0"), NO_ACCOUNTS)
    assert [finding["kind"] for finding in told["new_findings"]] == ["root"]
    assert told["opens"] is True
