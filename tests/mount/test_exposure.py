"""Compares what `cloakfs exposure` says with what every single caller can do, and checks what the command prints."""

import itertools
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloakfs.audit import explain
from cloakfs.audit.identities import IdSet, claims, single
from cloakfs.audit.reach import OWNS, SEES, Reach
from cloakfs.audit.survey import EXECUTE, NO_ANCESTRY, READ, WRITE, AccessAttrs, Ancestry, Survey
from cloakfs.audit.walk import survey
from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller, ClientCaller, ClientId, ServerId
from cloakfs.policy import Policy
from cloakfs.view import View
from tests.altered import command_with
from tests.mount import alterations
from tests.mount.conftest import Mount, mounted, run
from tests.mount.randomtree import make_tree

FILES = 40
OWNERS = [(1001, 2001), (1002, 2002), (99, 2001), (0, 0), (65534, 65534)]
MODES = [0o755, 0o700, 0o750, 0o711, 0o705, 0o644, 0o640, 0o604, 0o600, 0o4755, 0o2770, 0o1777, 0o070, 0o007, 0]

MAPS = "range_map=uid 11001 11002 map 1001 uid 11003 11009 squash 99 gid 12001 12002 map 2001"
OPTIONS = {
    "as they are": "rw",
    "read-only": "ro,no_root_squash",
    "mapped": f"rw,{MAPS},cloak_list=uid +077 0 -1",
    "exempt": f"rw,{MAPS},cloak_list=uid +077 0 -1,exempt=1001 1003",
    "groups are not mapped": "rw,range_map=uid 11001 map 1001,cloak_list=uid +070 0 -1",
    "hidden from groups": "rw,cloak_list=gid -070 2001 2002",
    "no supplementary groups": "rw,groups=none,cloak_list=uid +077 0 -1",
    "one identity": "rw,all_squash,anonuid=1001,anongid=2001,cloak_list=uid +077 0 -1",
    "the same groups for all": f"rw,groups=12001,{MAPS},cloak_list=uid +007 0 -1 gid +077 2001",
}

# Client ids that lead to every uid and gid that makes a difference, and to others.
CLIENT_UIDS = [0, 99, 1001, 1002, 65534, 5, 11001, 11002, 11003]
CLIENT_GIDS = [0, 2001, 2002, 65534, 7, 12001, 12002]


def identities(view: View, options: Options) -> Iterator[Caller]:
    """Every identity on the server that somebody gets by claiming some of these ids, by what a mount does."""
    gids = [ClientId(gid) for gid in CLIENT_GIDS]
    sets = [frozenset(some) for count in range(len(gids) + 1) for some in itertools.combinations(gids, count)]
    found = set()
    for uid, gid, groups in itertools.product(CLIENT_UIDS, gids, sets):
        if options.groups is None or not groups:
            who = ClientCaller(ClientId(uid), gid, groups | {gid})
            found.add(explain.identify(view, who, options.groups).server)
    # Who differs only in the primary group may do the same.
    return iter({(who.uid, who.groups): who for who in found if who is not None}.values())


class Tried(NamedTuple):
    """What one identity may do at a path: whether it sees it, and what it is granted there and in the directory."""

    who: Caller
    visible: bool
    granted: int
    above: int


def try_all(top: str, paths: list[str], view: View, options: Options) -> dict[str, list[Tried]]:
    """What each identity may do at each path, according to `cloakfs explain`."""
    tried: dict[str, list[Tried]] = {path: [] for path in paths}
    for who in identities(view, options):
        for path in paths:
            steps = explain.walk(top, path.split("/"), view, who)
            tried[path].append(Tried(who, explain.visible(steps), steps[-1].permissions, steps[-2].permissions))
    return tried


def expected(paths: list[str], tried: dict[str, list[Tried]], uids: set[int], withheld: int) -> dict[str, int]:
    """What somebody can do who may act as all of these users, in turn."""
    has_handle = {"": True}
    found = {}
    for path in paths:
        seeing = [one for one in tried[path] if one.visible and one.who.uid in uids]
        can_get = has_handle[os.path.dirname(path)]
        has_name = can_get and any(one.above & (READ | EXECUTE) for one in seeing)
        has_handle[path] = can_get and any(one.above & EXECUTE for one in seeing)
        bits = SEES if has_name else 0
        if has_handle[path]:
            for one in seeing:
                bits |= one.granted & ~withheld
        found[path] = bits
    return found


def said(of: Survey, reach: Reach, top: str, path: str, uids: IdSet) -> int:
    """What `Reach` says about a path."""
    ancestry = kind = NO_ANCESTRY
    at = top
    for name in ("", *path.split("/")):
        at = os.path.join(at, name) if name else at
        if kind != NO_ANCESTRY:
            ancestry = of.ancestries.index(Ancestry(ancestry, kind))
        info = os.lstat(at)
        try:
            acl = os.getxattr(at, "system.posix_acl_access")
        except OSError:
            acl = b""
        kind = of.kinds.index(AccessAttrs(info.st_mode, ServerId(info.st_uid), ServerId(info.st_gid), acl))
    return reach.at(ancestry, kind, uids).bits & ~OWNS


@pytest.mark.parametrize("name", OPTIONS)
def test_it_says_what_every_identity_can_do_and_all_together(tree: str, name: str) -> None:
    options = parse_options(OPTIONS[name])[0]
    view = View(Policy(options))
    paths = make_tree(tree, random.Random(name), files=FILES, owners=OWNERS, modes=MODES, named_groups=(2001, 2002))
    found = survey(tree, None, lambda count: None)
    assert found.examined == found.names == FILES
    assert not found.left_out
    claimed = claims(view.policy, options.groups, by_knfsd=False)
    reach = Reach(found, view, claimed, {}, read_only=options.read_only)
    withheld = WRITE if options.read_only else 0
    tried = try_all(tree, paths, view, options)
    uids = {one.who.uid for one in tried[paths[0]]}
    assert all(uid in claimed.uid_set for uid in uids)
    met = 0
    for some in ({uid} for uid in uids):
        wanted = expected(paths, tried, set(some), withheld)
        for path in paths:
            assert said(found, reach, tree, path, single(*some)) == wanted[path], (name, some, path)
            met |= wanted[path]
    assert met == SEES | READ | EXECUTE | (WRITE & ~withheld)
    # And as all of them together.
    wanted = expected(paths, tried, set(uids), withheld)
    for path in paths:
        assert said(found, reach, tree, path, claimed.uid_set) == wanted[path], (name, path)


# -- the command -----------------------------------------------------------------------------------

MakeMount = Callable[..., Mount]


def put(path: str, uid: int, gid: int, mode: int, size: int = 4) -> None:
    Path(path).write_bytes(b"x" * size)
    os.chown(path, uid, gid)
    os.chmod(path, mode)


def exports(base: str, *entries: str, name: str = "x") -> str:
    path = os.path.join(base, f"{name}.exports")
    Path(path).write_text("".join(f"{entry}\n" for entry in entries))
    return path


def told(*arguments: str, status: int = 0) -> Any:
    done = run("exposure", "--json", *arguments, check=False)
    assert done.returncode == status, done
    return json.loads(done.stdout)


def kinds(report: Any, entry: int = 0) -> set[str]:
    return {finding["kind"] for finding in report["entries"][entry]["findings"]}


def shared(report: Any) -> list[str]:
    """What is said of set-id programs of identities that several client ids have."""
    found = report["entries"][0]["findings"]
    return [finding["text"].rpartition(" as ")[2] for finding in found if finding["kind"] == "shared set-id"]


def finding(report: Any, kind: str, entry: int = 0) -> Any:
    (found,) = [finding for finding in report["entries"][entry]["findings"] if finding["kind"] == kind]
    return found


def test_it_finds_that_a_client_reads_a_groups_files_because_gids_are_not_mapped(base: str, tree: str) -> None:
    put(os.path.join(tree, "salaries"), 0, 3042, 0o640, size=1000)
    hole = "range_map=uid 1000 1999 map 20000"
    found = told(exports(base, f"{tree} lab(rw,{hole})"))
    claimed = finding(found, "claimed groups")
    assert claimed["text"].endswith(
        "who claims their group: 1 (1000 bytes); gids are not mapped, so that a claimed gid counts as the server's"
    )
    assert claimed["paths"] == ["salaries"]
    (example,) = found["entries"][0]["anybody"]["examples"][:1]
    assert example["by_claimed_group"] is True
    assert 3042 in (example["as"]["gid"], *example["as"]["groups"])
    # It is what a real caller can do.
    who = f"{example['as']['uid']}:{example['as']['gid']}"
    assert run("explain", tree + "/salaries", "-o", "rw", "--source", tree, "--as-server", who).stdout.endswith(
        "Visible; accessible to read.\n"
    )
    for closed in (f"{hole} gid 0 -1 squash -2", f"{hole} gid 1000 1999 map 20000"):
        found = told(exports(base, f"{tree} lab(rw,{closed})"))
        assert "claimed groups" not in kinds(found)
        assert found["entries"][0]["anybody"]["total"]["reads"] == 0


def told_before(*arguments: str) -> Any:
    """What is said if the views show set-id bits as 0.1.0 did."""
    command = [*command_with(alterations.show_set_id_bits), "exposure", "--json", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


@pytest.mark.parametrize("ids", ["uid 800 999 squash 517", "uid 5 map 517 uid 6 map 517"])
def test_it_finds_that_a_client_plants_a_set_user_id_program_behind_several_ids(base: str, tree: str, ids: str) -> None:
    path = exports(base, f"{tree} lab(rw,range_map={ids} gid 0 -1 squash -2)")
    first = ids.split()[1]
    texts = [of["text"] for of in told_before(path)["entries"][0]["findings"] if of["kind"] == "shared set-id"]
    (text,) = (text for text in texts if " all become 517," in text)
    assert f"can plant a set-user-ID program that other users of a client run as client uid {first}" in text
    # Set-id bits that would mean that are no longer shown.
    found = told(path)
    assert "shared set-id" not in kinds(found)
    assert "517" in finding(found, "planted set-id")["text"]


def test_it_finds_whoever_may_enter_a_fixed_view_and_plant_a_program_of_its_identity(base: str, tree: str) -> None:
    view = "views=3001:3001"
    assert "shared set-id" not in kinds(told(exports(base, f"{tree} lab(rw,{view})")))
    path = exports(base, f"{tree} lab(rw,{view},view_access=3002)")
    assert shared(told_before(path)) == ["client uid 3001", "client gid 3001"]
    assert "shared set-id" not in kinds(told(path))  # the bits are no longer shown


def test_behind_nfs_ganesha_everybody_has_the_identity_of_a_fixed_view(base: str, tree: str) -> None:
    path = exports(
        base, f"{tree} a(rw,views=3001:3001)", f"{tree} b(rw)", f"{tree} c(rw,all_squash,anonuid=3001,anongid=3001)"
    )
    found = told("--server", "ganesha", path, status=1)
    assert [entry["view"] for entry in found["entries"]] == ["@3001", "@3001"]
    assert "shared set-id" not in kinds(found)
    assert shared(told_before("--server", "ganesha", path)) == ["client uid 3001", "client gid 3001"]
    assert "shared set-id" not in kinds(found, 1)
    assert found["refused"][0]["reason"] == "nfs-ganesha cannot give every caller a view of its own"


def test_two_entries_that_cannot_be_told_apart_are_not_compared(base: str, tree: str) -> None:
    for name in ("one", "two"):
        exports(base, f"{tree} lab(ro)", name=name)
    done = run("exposure", "--diff", base, base, check=False)
    assert (done.returncode, done.stderr) == (
        2, f"cloakfs: two entries, which cannot be told apart: {tree} for lab\n",
    )  # fmt: skip


def test_a_program_that_is_planted_runs_where_others_are_shown_its_set_id_bit(base: str, tree: str) -> None:
    entries = f"{tree} lab(rw,range_map=uid 800 999 squash 517)", f"{tree} office(rw)"
    found = told(exports(base, *entries))
    text = finding(found, "planted set-id")["text"]
    assert text.endswith(f"for those who start it on the server, or on clients of {tree} for office")


def test_it_finds_root_and_set_id_programs(base: str, tree: str) -> None:
    put(os.path.join(tree, "su"), 3001, 3001, 0o4755)
    found = told(exports(base, f"{tree} lab(ro,no_root_squash)", f"{tree} office(rw)"))
    assert finding(found, "root")["text"] == "client uid 0 becomes root on the server, who may read everything"
    assert finding(found, "set-id program")["text"].endswith(
        "that a client can run: 1; it runs them as client uid 3001"
    )
    assert "root" not in kinds(found, 1)


def test_what_opens_and_what_closes_is_told_with_a_status(base: str, tree: str) -> None:
    os.chmod(tree, 0o755)
    put(os.path.join(tree, "salaries"), 0, 3042, 0o640)
    put(os.path.join(tree, "public"), 0, 0, 0o644)
    closed = exports(base, f"{tree} lab(rw,range_map=uid 1000 1999 map 20000 gid 0 -1 squash -2)", name="closed")
    opened = exports(base, f"{tree} lab(rw,range_map=uid 1000 1999 map 20000)", name="opened")
    assert told("--diff", closed, closed)["opens"] is False
    found = told("--diff", closed, opened, status=3)
    assert found["opens"] is True
    for difference in found["entries"][0]["differences"]:
        assert (difference["opens"]["reads"], difference["opened"]) == (1, ["/salaries"])
        assert not any(difference["closes"].values())
    assert [one["client_uids"] for one in found["entries"][0]["differences"]] == [
        "0-999", "1000-1999", "2000-4294967294",
    ]  # fmt: skip
    found = told("--diff", opened, closed)
    assert found["entries"][0]["differences"][0]["closed"] == ["/salaries"]
    # An entry that is new opens all that it shows, and one that is gone closes it.
    none = exports(base, f"{base} nobody(ro)", name="none")
    assert told("--diff", none, closed, status=3)["entries"][1]["differences"][0]["opens"]["reads"] == 1
    done = run("exposure", "--diff", opened, closed)
    assert done.stdout.endswith("Nothing opens.\n")
    assert "│ closes │" in done.stdout


def test_a_user_who_becomes_another_one_is_told(base: str, tree: str) -> None:
    os.chmod(tree, 0o755)
    for uid in (3001, 3002):
        put(os.path.join(tree, str(uid)), uid, uid, 0o600)
    old = exports(base, f"{tree} lab(rw,range_map=uid 1001 1002 map 3001 gid 0 -1 squash -2)", name="old")
    new = exports(base, f"{tree} lab(rw,range_map=uid 1002 map 3001 uid 1001 map 3002 gid 0 -1 squash -2)", name="new")
    found = told("--diff", old, new, status=3)["entries"][0]["differences"]
    assert [(one["client_uids"], one["opened"], one["closed"]) for one in found] == [
        ("1001", ["/3002"], ["/3001"]),
        ("1002", ["/3001"], ["/3002"]),
    ]


def test_a_mount_is_assessed_with_the_groups_that_its_callers_may_claim(mount: MakeMount, tree: str) -> None:
    put(os.path.join(tree, "file"), 0, 3042, 0o640)
    m = mount("-o", "rw")
    (of,) = told(m.path)["entries"]
    assert (of["client"], of["anybody"]["total"]["claimed"]) == (m.path, 1)
    m = mount("-o", "groups=none,ro")
    (of,) = told(m.path)["entries"]
    assert of["read_only"] is True


def test_what_cannot_be_assessed_is_told(base: str, tree: str) -> None:
    path = exports(base, f"{tree} a(rw,policy=x.py:X)", f"{base}/absent b(rw)", f"{tree} c(rw)")
    done = run("exposure", path, check=False)
    assert done.returncode == 1
    assert f"{tree} for c" in done.stdout
    assert done.stderr.splitlines() == [
        f"cloakfs: {tree} for a: not assessed: policy=x.py:X is code, and no table that could be taken apart",
        f"cloakfs: {base}/absent for b: not assessed: {base}/absent: No such file or directory",
    ]
    assert len(told(path, status=1)["refused"]) == 2
    # In doubt, a script that asks whether anything opens gets no.
    assert run("exposure", "--diff", path, path, check=False).returncode == 1


def test_a_tree_below_another_mount_is_not_assessed(base: str, mount: MakeMount) -> None:
    m = mount("-o", "rw")
    assert told(exports(base, f"{m.path} a(rw)"), status=1)["refused"][0]["reason"].endswith("which decides as well")


def test_wrong_options_are_told(base: str, tree: str) -> None:
    for status, arguments, says in (
        (2, [exports(base, f"{tree} a(rwx)")], "unknown option 'rwx'"),
        (1, [f"{base}/absent"], f"{base}/absent: No such file or directory"),
        (2, ["--diff", tree, tree, tree], "--diff takes the two configurations to compare"),
        (2, [tree], "no entries"),
    ):
        done = run("exposure", *arguments, check=False)
        assert (done.returncode, done.stdout) == (status, "")
        assert says in done.stderr


def test_names_of_any_bytes_are_printed(base: str, tree: str) -> None:
    put(os.fsdecode(os.path.join(os.fsencode(tree), b"\xff\x1b[31m<b>")), 0, 3042, 0o640)
    path = exports(base, f"{tree} a(rw)")
    assert "/\\377\\033[31m<b>" in run("exposure", path).stdout
    assert finding(told(path), "claimed groups")["paths"] == ["\\377\x1b[31m<b>"]


def test_what_cannot_be_examined_is_told_with_a_status(base: str, tree: str) -> None:
    os.makedirs(os.path.join(tree, *("deep" for _ in range(60))))
    path = exports(base, f"{tree} a(ro)")
    assert told(path)["entries"][0]["tree"]["names"] == 60
    few = partial(alterations.limit_descriptors, 40)
    for arguments in (["exposure", path], ["exposure", "--diff", path, path]):
        done = subprocess.run([*command_with(few), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "names that could not be examined: 1, for example deep/deep/" in done.stderr
        assert "(Too many open files)" in done.stderr


def test_a_sample_is_called_a_sample(base: str, tree: str) -> None:
    for number in range(50):
        put(os.path.join(tree, str(number)), 0, 0, 0o644)
    found = told("--sample", "10", exports(base, f"{tree} a(ro)"))
    assert found["entries"][0]["anybody"]["total"]["reads"] == 10
    text = "only a sample: 10 of 50 names were looked at, and nothing below those that were not"
    assert finding(found, "inexact")["text"] == text
    path = exports(base, f"{tree} a(ro)")
    assert run("exposure", "--sample", "10", "--diff", path, path).stdout == "Nothing opens in the sample.\n"
    assert told("--sample", "10", "--diff", path, path)["sample"] is True


def test_a_mount_of_cloakfs_in_the_tree_is_left_out(base: str, tree: str) -> None:
    source, inner = os.path.join(base, "elsewhere"), os.path.join(tree, "inner")
    os.mkdir(source)
    os.mkdir(inner)
    with mounted(source, inner):
        assert finding(told(exports(base, f"{tree} a(ro)")), "inexact")["paths"] == ["inner"]


def test_an_immutable_file_is_not_taken_for_others_like_it(base: str) -> None:
    top = os.path.join(base, "real")
    os.mkdir(top)
    path = os.path.join(top, "a")
    put(path, 3001, 3001, 0o644)
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("the file system has no immutable files")
    try:
        put(os.path.join(top, "b"), 3001, 3001, 0o644)
        total = told(exports(base, f"{top} a(rw)"))["entries"][0]["anybody"]["total"]
        assert (total["reads"], total["changes"]) == (2, 1)
    finally:
        subprocess.run(["chattr", "-i", path], check=True)
