"""What is mounted and exported for which entries, and what is refused."""

import ipaddress
import json
import os
from dataclasses import replace
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloakfs.config.lint import repeats
from cloakfs.config.parse import parse
from cloakfs.config.render import format_options
from cloakfs.config.viewitems import Ids, Range, User, ViewItem
from cloakfs.nfs import ganesha, ganesha_server, knfsd
from cloakfs.nfs.ganesha_server import exports_of, pseudo_path
from cloakfs.nfs.plan import Plan, ServerKind, absolute, hints, mount_name, plan
from cloakfs.nfs.server import ServerError

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples" / "exports.d"


def planned(text: str, server: ServerKind = "knfsd") -> Plan:
    entries, _ = parse(text, "x.exports")
    return plan(entries, server, "/srv/cloakfs", identities=identities)


def identities(item: ViewItem) -> list[User | Ids]:
    return [User("ann"), User("bob")] if isinstance(item, Range) else [item]


def rendered(text: str) -> str:
    return knfsd.render(planned(text).mounts)


@pytest.mark.parametrize(
    ("path", "client", "name"),
    [
        ("/home", "*", "home"),
        ("/srv/real", "10.1.0.0/16", "srv-real@10.1.0.0_16"),
        ("/", "host.example.org", "root@host.example.org"),
        ("/srv/Field Data", "*.example.com", "srv-Field_Data@any.example.com"),
        ("/x", "@office", "x@office"),
        ("/x", "2001:db8::/32", "x@2001_db8___32"),
    ],
)
def test_names(path: str, client: str, name: str) -> None:
    assert mount_name(path, client) == name


def test_two_of_one_name_are_refused() -> None:
    (problem,) = planned("/a/b *(rw)\n/a-b *(rw)\n").problems
    assert str(problem) == (
        "x.exports:2:6: /a-b for * and /a/b for * (x.exports:1:6) would both be /srv/cloakfs/a-b; give one of the "
        "trees another name, for example by a bind mount"
    )


@pytest.mark.parametrize("text", ["/a h(fsid=0)\n/b h(rw)\n", "/b h(rw)\n/a h(fsid=root)\n"])
def test_the_root_of_nfs4_is_not_exported_beside_others(text: str) -> None:
    (problem,) = planned(text).problems
    assert problem.location.line == 1 + text[:-1].partition("fsid")[0].count("\n")
    assert problem.message.startswith("fsid=0 makes this the root of all NFSv4 exports, and /b for h could ")
    assert planned("/a h(rw,fsid=0)\n").problems == ()
    assert planned("/a h(all_squash,fsid=0)\n/b h(all_squash)\n", "ganesha").problems == ()


def test_an_fsid_is_given_once() -> None:
    problems = planned("/a -fsid=7 h(rw) i(rw) j(rw,fsid=8)\n/b h(fsid=7)\n").problems
    assert [str(problem.location) for problem in problems] == ["x.exports:1:18", "x.exports:2:4"]
    assert problems[0].message == "fsid=7 is that of /a for h, too (x.exports:1:12): give each its own, or none"
    assert [problem.location.column for problem in planned("/a h(fsid=0) i(fsid=root)\n").problems] == [4, 14]


@pytest.mark.parametrize("other", ["01234567-89ab-cdef-0123-456789abcdef", "0123456789ABCDEF0123456789ABCDEF"])
def test_a_uuid_is_given_once_however_it_is_written(other: str) -> None:
    text = f"/a h(fsid=0123456789abcdef0123456789abcdef)\n/b h(fsid={other})\n"
    (problem,) = planned(text).problems
    assert "is that of /a for h, too" in problem.message


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What the machine exports, apart from what is planned."""
    for name in ("_ETAB", "_EXPORTS", "_EXPORTS_D"):
        monkeypatch.setattr(knfsd, name, str(tmp_path / name))
    (tmp_path / "_EXPORTS_D").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_ETAB", "/home\t*(rw,sync,fsid=5)\n"),
        ("_EXPORTS", "/home *(rw)\n"),
        ("_EXPORTS_D/a.exports", "/home *(rw)\n"),
    ],
)
def test_the_root_of_nfs4_is_not_exported_beside_the_administrators_exports(
    exported: Path, name: str, text: str
) -> None:
    made = planned("/a h(fsid=0)\n")
    (exported / "_ETAB").write_text("/srv/cloakfs/a@h\th(rw,fsid=0)\n")  # this service's own
    assert knfsd.conflicts_with_others(made) == []
    (exported / name).write_text(text)
    assert [problem.message.split(", ")[1] for problem in knfsd.conflicts_with_others(made)] == [
        "and /home could no longer be mounted over NFSv4; leave fsid out"
    ]
    assert knfsd.conflicts_with_others(planned("/a h(rw)\n")) == []


@pytest.mark.parametrize("words", ["*(rw,fsid=00)", "*(rw,new_option)", "-rw,new_option *", "*(rw"])
def test_so_it_is_beside_exports_that_cloakfs_cannot_read(exported: Path, words: str) -> None:
    (exported / "_EXPORTS").write_text(f"/home {words}\n")
    (problem,) = knfsd.conflicts_with_others(planned("/a h(fsid=root)\n"))
    assert f"what {exported}/_EXPORTS:1:" in problem.message
    assert knfsd.conflicts_with_others(planned("/a h(rw)\n")) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_ETAB", "/home\t*(rw,sync,fsid=7,sec=sys)\n/home\t*(rw,fsid=01234567:89abcdef:01234567:89ABCDEF)\n"),
        ("_EXPORTS", "/home *(rw,fsid=7) h(fsid=01234567-89abcdef-01234567-89abcdef)\n"),
    ],
)
def test_an_fsid_is_not_that_of_an_export_of_the_administrator(exported: Path, name: str, text: str) -> None:
    (exported / name).write_text(text)
    for fsid in ("7", "0123456789abcdef0123456789abcdef"):
        (problem,) = knfsd.conflicts_with_others(planned(f"/a h(fsid={fsid})\n"))
        assert problem.message.startswith(f"fsid={fsid} is that of /home, too")
    assert knfsd.conflicts_with_others(planned("/a h(rw) i(fsid=77)\n")) == []


def test_so_it_is_beside_another_service_of_the_same_folder(exported: Path) -> None:
    (exported / "_ETAB").write_text("/srv/cloakfs/a@h\th(rw,fsid=0)\n/srv/cloakfs/b\t*(rw,fsid=6)\n")
    made = planned("/a h(fsid=0)\n")
    assert len(knfsd.conflicts_with_others(made)) == 1
    assert (
        knfsd.conflicts_with_others(made, ["/srv/cloakfs/b"]) == []
    )  # it is this service's, and about to be withdrawn
    assert len(knfsd.remarks(planned("/c h(rw)\n"))) >= 1


@pytest.mark.parametrize(("top", "warnings"), [("/export", 1), ("/srv", 0), ("/srv/cloakfs", 0), ("/", 0)])
def test_below_another_root_of_nfs4_nothing_else_is_reached(exported: Path, top: str, warnings: int) -> None:
    (exported / "_EXPORTS").write_text(f"{top} *(ro,fsid=root,crossmnt)\n")
    said = [remark for remark in knfsd.remarks(planned("/a h(rw)\n")) if "manage-gids" not in remark.message]
    assert len(said) == warnings
    assert all(remark.message.startswith(f"{top} is the root of this machine's NFSv4 exports") for remark in said)


@pytest.mark.parametrize("server", ["knfsd", "ganesha"])
def test_two_views_of_one_name_are_refused(server: ServerKind) -> None:
    (problem,) = planned("/x *(views = eve 1001:100 1001:200)\n", server).problems
    assert (
        str(problem) == "x.exports:1:4: views 1001:100 and 1001:200 would both be @1001; give each an entry of its own"
    )


def test_a_tree_that_is_called_like_a_view_is_refused() -> None:
    text = "/home *(views = daemon eve)\n/home+daemon *(views = eve)\n"
    (problem,) = planned(text, "ganesha").problems
    assert str(problem) == (
        "x.exports:2:14: /home+daemon for * and /home for *, view daemon, (x.exports:1:7) would both be "
        "/srv/cloakfs/home+daemon; give one of the trees another name, for example by a bind mount"
    )
    assert planned(text).problems == ()


def test_an_account_that_is_named_and_in_a_range_has_one_view() -> None:
    assert [mount.view for mount in planned("/x *(views = ann 10-12)\n", "ganesha").mounts] == ["ann", "bob"]


@pytest.mark.parametrize(
    "value",
    ["/a,no_root_squash@host", "/a@host no_root_squash", "/a)@h", "/a@h#", "/a\\042@h", "/a\\012b@h", "/a\\134@h"],
)
def test_a_value_that_would_be_read_as_more_is_refused(value: str) -> None:
    for option in ("refer", "replicas"):
        (problem,) = planned(f'/x *(rw,{option}="{value}")\n').problems
        assert str(problem).startswith(f"x.exports:1:4: {option}=")
        assert "would be read as more than one option" in str(problem)


def test_a_client_with_a_colon_is_an_address() -> None:
    assert planned("/x 2001:db8::/32(rw) fe80::1(rw)\n").problems == ()
    (problem,) = planned("/x @office:/etc(rw)\n").problems
    assert "a client with a colon" in str(problem)


def test_whose_views_it_shows() -> None:
    text = (
        "/x a(all_squash,anonuid=7,anongid=8) b(rw) c(views = eve) d(views = eve ann) "
        "e(all_squash,range_map = uid 1 map 2)\n"
    )
    assert [mount.kind for mount in planned(text).mounts] == [
        "fixed: 7:8", "per caller", "fixed: eve", "fixed: @eve @ann", "per caller",
    ]  # fmt: skip


@pytest.mark.parametrize("user", ["www-data", "systemd-network", "a-1", "_1-2"])
def test_a_user_with_a_hyphen_in_the_name_is_no_range(user: str) -> None:
    (mount,) = planned(f"/x *(views = {user})\n").mounts
    assert mount.kind == f"fixed: {user}"
    made = planned(f"/x *(views = {user})\n", "ganesha")
    assert [(mount.path, mount.kind) for mount in made.mounts] == [("/srv/cloakfs/x", f"fixed: {user}")]
    assert made.warnings == ()


def test_where_something_must_be_mounted() -> None:
    text = "/x a(rw) b(mp) c(mountpoint) d(mp=/disk) e(mountpoint=/a\\054b)\n"
    assert [mount.condition for mount in planned(text).mounts] == [None, "/x", "/x", "/disk", "/a,b"]


@pytest.mark.skipif(not os.path.exists("/usr/sbin/exportfs"), reason="needs exportfs (apt install nfs-kernel-server)")
def test_what_exportfs_does_not_know_is_refused() -> None:
    (mount,) = planned("/x *(rw,insecure,sec=krb5:sys,refer=/a@b)\n").mounts
    assert knfsd.unknown_options([mount]) == []
    more = (*mount.options.other, ("of_tomorrow", None), ("reexports", "none"))
    tomorrow = replace(mount, options=replace(mount.options, other=more))
    assert {str(remark) for remark in knfsd.unknown_options([mount, tomorrow])} == {
        "x.exports:1:4: of_tomorrow: the exportfs of this machine does not know this option",
        "x.exports:1:4: reexports=none: the exportfs of this machine does not know this option",
    }


@pytest.mark.parametrize("example", sorted(os.listdir(EXAMPLES)))
def test_knfsd_configuration_of_the_examples(example: str) -> None:
    """Reproducible text; `CLOAKFS_GOLDEN=write` writes it anew."""
    text = (EXAMPLES / example).read_text()
    golden = GOLDEN / f"knfsd-{example.removesuffix('.exports')}.txt"
    if os.environ.get("CLOAKFS_GOLDEN") == "write":
        golden.write_text(rendered(text))
    assert rendered(text) == golden.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # Root is nobody: so is 65534, who cannot have files opened by being root.
        ("rw", "rw,mp,root_squash,anonuid=65534,anongid=65534,no_subtree_check"),
        ("ro,no_root_squash", "ro,mp,no_root_squash,no_subtree_check"),
        ("rw,range_map = uid 0 -1 map 0", "rw,mp,no_root_squash,no_subtree_check"),
        # 65534 is somebody here, and so is 1: the first of whom nothing is said is 2000.
        (
            "range_map = uid 1 1999 map 1 uid 65534 map 5",
            "ro,mp,root_squash,anonuid=2000,anongid=65534,no_subtree_check",
        ),
        ("range_map = uid 0 9 squash 500", "ro,mp,root_squash,anonuid=1,anongid=65534,no_subtree_check"),
        # Its group is root's here, too.
        ("range_map = uid 1 map 1 gid 0 map 0", "ro,mp,root_squash,anonuid=65534,anongid=0,no_subtree_check"),
        # Root has an identity of its own, which nobody else has: a stranger's has to do.
        ("range_map = uid 0 map 500", "ro,mp,root_squash,anonuid=65534,anongid=65534,no_subtree_check"),
        ("all_squash,anonuid=7", "ro,mp,all_squash,anonuid=7,anongid=65534,no_subtree_check"),
        ("all_squash,range_map = gid 7 map 7", "ro,mp,root_squash,anonuid=65534,anongid=65534,no_subtree_check"),
        # Nobody can prove what a plug-in makes of root.
        ("policy=p.py:P", "ro,mp,root_squash,anonuid=65534,anongid=65534,no_subtree_check"),
        ("policy=p.py:P,no_root_squash", "ro,mp,root_squash,anonuid=65534,anongid=65534,no_subtree_check"),
        ("views = eve", "ro,mp,no_root_squash,no_subtree_check"),
        (
            "subtree_check,mp=/elsewhere,insecure",
            "ro,mp,root_squash,anonuid=65534,anongid=65534,subtree_check,insecure",
        ),
    ],
)
def test_root_and_nobody(options: str, words: str) -> None:
    (mount,) = planned(f"/x *({options})\n").mounts
    assert knfsd.export_options(mount).rpartition(",fsid=")[0] == words


def test_the_fsid_is_that_of_tree_and_client() -> None:
    def fsid(text: str) -> str:
        return rendered(text).rpartition("fsid=")[2]

    assert fsid("/x *(rw)\n") == fsid("/x *(ro,no_client_cache)\n") != fsid("/x host(rw)\n") != fsid("/y *(rw)\n")
    assert fsid("/x *(fsid=7)\n") == "7)\n"


def test_groups_come_from_the_database() -> None:
    assert planned("/x *(rw)\n").mounts[0].options.groups == "database"
    assert planned("/x *(groups=none)\n").mounts[0].options.groups == "none"
    (problem,) = planned("/x *(groups=proc)\n").problems
    assert "show no groups; use groups=database" in str(problem)


def test_ganesha_serves_fixed_views_alone() -> None:
    (problem,) = planned("/x *(rw,range_map = uid 0 9 map 0)\n", "ganesha").problems
    assert "looks files up as root" in str(problem)
    assert "--server knfsd" in str(problem)
    assert "views = USER" in str(problem)
    assert "all_squash,anonuid=,anongid=" in str(problem)


def test_what_ganesha_is_not_told_is_said() -> None:
    (said,) = planned("/x *(views = eve,sync,async,insecure,sec=sys,fsid=7,nohide)\n", "ganesha").warnings
    assert str(said) == "x.exports:1:4: not passed on to nfs-ganesha: async, fsid, nohide"
    assert planned("/x *(views = eve,sync,insecure,sec=sys)\n", "ganesha").warnings == ()


def test_ganesha_has_a_mount_for_each_view() -> None:
    made = planned(
        "/x *(rw,views = eve 10-12 7:7:8)\n/y a(all_squash,anonuid=5,anongid=6)\n/z b(views = eve)\n", "ganesha"
    )
    assert [(mount.path, format_options(mount.options), pseudo_path(mount)) for mount in made.mounts] == [
        ("/srv/cloakfs/x+eve", "rw,views = eve", "/x/@eve"),
        ("/srv/cloakfs/x+ann", "rw,views = ann", "/x/@ann"),
        ("/srv/cloakfs/x+bob", "rw,views = bob", "/x/@bob"),
        ("/srv/cloakfs/x+7", "rw,views = 7:7:8", "/x/@7"),
        ("/srv/cloakfs/y@a", "ro,all_squash,anonuid=5,anongid=6,views = 5:6", "/y@a"),
        ("/srv/cloakfs/z@b", "ro,views = eve", "/z@b"),
    ]
    (warning,) = made.warnings
    assert "one export for each of its accounts" in str(warning)


def test_numbers_of_exports_that_0_1_0_gave_stay_and_it_can_read_the_file_again(tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    (mount,) = planned("/y 10.1.0.0/16(all_squash,anonuid=5,anongid=6)\n", "ganesha").mounts
    (added,) = planned("/new *(views = 7:7)\n", "ganesha").mounts
    key = "\0".join((mount.source, mount.client, mount.view))
    ids.write_text(json.dumps({key: 41}))
    assert [export.export_id for export in exports_of([mount, added], str(ids))] == [41, 42]
    written = json.loads(ids.read_text())
    assert (written[key], written["version"]) == (41, ganesha_server.VERSION)
    assert max(written.values()) == 42  # as 0.1.0 finds the next one
    assert all(type(number) is int for number in written.values())


def test_numbers_of_exports_in_an_unknown_version_are_refused(tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    made = planned("/y 10.1.0.0/16(all_squash,anonuid=5,anongid=6)\n", "ganesha")
    ids.write_text(json.dumps({"version": ganesha_server.VERSION + 1, "exports": []}))
    before = ids.read_bytes()
    with pytest.raises(ServerError) as raised:
        exports_of(made.mounts, str(ids))
    assert str(raised.value) == (
        f"{ids}: version {ganesha_server.VERSION + 1} is not known to this cloakfs, which uses "
        f"{ganesha_server.VERSION}; use the cloakfs that wrote it, or remove it (clients then have to mount again)"
    )
    assert ids.read_bytes() == before


def test_ganesha_configuration(tmp_path: Path) -> None:
    made = planned(
        "/x *(rw,sec=krb5:sys,views = eve 7:7:8)\n/y 10.1.0.0/16(all_squash,anonuid=5,anongid=6)\n", "ganesha"
    )
    ids = str(tmp_path / "ids.json")
    exports = exports_of(made.mounts, ids)
    assert exports == exports_of(made.mounts, ids, store=False)
    # Numbers stay, whatever comes and goes.
    fewer = planned("/new *(views = eve)\n/y 10.1.0.0/16(all_squash,anonuid=5,anongid=6)\n", "ganesha")
    assert [export.export_id for export in exports_of(fewer.mounts, ids)] == [4, 3]
    text = ganesha.render(exports, state_dir="/state", port=2049, bind_addr=None, protocols=(4,))
    golden = GOLDEN / "ganesha-plan.conf"
    if os.environ.get("CLOAKFS_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/x *(cloak_list = uid +007 0 -1)\n", "one cache for all of them"),
        ("/x *(cloak_list = uid +007 0 -1, no_client_cache)\n", "at the very same moment"),
        ("/x *(range_map = uid 0 map 500)\n", "root is therefore nobody"),
        (
            "/x *(rw)\n/x 10.0.0.0/8(rw)\n",
            "clients that match 10.0.0.0/8 may also mount /srv/cloakfs/x, which is for *, instead of",
        ),
        ("/x 10.0.0.0/8(rw)\n/x 10.1.0.0/16(rw)\n", "clients that match 10.0.0.0/8 may also mount"),
        (
            "/x *(cloak_list = uid +000 0 -1,all_squash,exempt = 0 34)\n",
            "nothing is hidden from server uid 0, 34 (exempt)",
        ),
        ("/x *(cloak_list = uid +000 0 -1,views = eve)\n", "the kernel checks the caller's own id"),
    ],
)
def test_warnings(text: str, said: str) -> None:
    (warning,) = planned(text).warnings
    assert said in str(warning)


@pytest.mark.parametrize(
    ("text", "server", "is_said"),
    [
        ("/a 10.1.0.0/16(rw)", "knfsd", True),
        ("/a 10.1.0.0/16(rw, views = ann)", "knfsd", True),
        ("/a 10.1.0.0/16(rw, views = ann)", "ganesha", False),
        ("/a 10.1.0.0/16(rw, subtree_check)", "knfsd", False),
        ("/a 10.1.0.0/16(rw, no_subtree_check)", "knfsd", False),
        # All callers are one: nothing is gained.
        ("/a 10.1.0.0/16(rw, all_squash, anonuid=1000, anongid=1000)", "knfsd", False),
    ],
)
def test_what_subtree_check_would_gain_is_said_until_decided(text: str, server: ServerKind, is_said: bool) -> None:
    said = [str(hint) for hint in hints(planned(text, server))]
    assert [hint.startswith("x.exports:1:4: without subtree_check, ") for hint in said] == [True] * is_said


def test_warnings_of_a_plug_in() -> None:
    cache, root = map(str, planned("/x *(policy=p.py:P)\n").warnings)
    assert "one cache for all of them" in cache
    assert "cloakfs cannot know whether p.py:P does, too; client uid 65534 is used in place of root" in root


@pytest.mark.parametrize(
    "text",
    [
        "/x *(rw,range_map = uid 0 9 map 0)\n",
        # One user on each client, or one identity for all.
        "/x *(cloak_list = uid +000 0 -1,range_map = uid 1000 map 2000)\n",
        "/x *(cloak_list = uid +000 0 -1,range_map = uid 1000 map 2000 uid 0 squash 2000)\n",
        "/x *(cloak_list = uid +000 0 -1,all_squash)\n",
        "/x a(rw)\n/x b(rw)\n/x 10.0.0.0/8(rw)\n/x 2001:db8::/32(rw)\n",
    ],
)
def test_no_warnings(text: str) -> None:
    assert planned(text).warnings == ()


@pytest.mark.parametrize(
    ("one", "other", "warned"),
    [
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("10.0.0.0/16", "10.1.0.0/16", False),
        ("2001:db8::/32", "2001:db8:1::/48", True),
        ("2001:db8::/32", "2001:db9::/32", False),
        ("0.0.0.0/0", "::/0", False),
        ("10.1.0.7", "10.1.0.0/16", True),
        ("lab.example.com", "*.example.com", True),
        ("LAB.example.com", "*.Example.com", True),
        ("a.b.example.com", "*.example.com", True),  # a wildcard of exports(5) matches dots
        ("example.com", "*.example.com", False),
        ("n3.example.com", "n[0-9].example.com", True),
        ("n3.example.com", "n[^0-4].example.com", False),
        ("*.example.com", "n?.example.com", True),
        ("a*.example.com", "b*.example.com", False),
        ("*.example.com", "*.example.org", False),
        ("*.example.com", "10.0.0.0/8", False),  # only DNS knows
        ("*.example.com", "@office", False),
    ],
)
def test_a_client_of_two_specifications_may_choose(one: str, other: str, warned: bool) -> None:
    for text in (f"/x {one}(rw)\n/x {other}(rw)\n", f"/x {one}(rw)\n/x/ {other}(rw)\n"):
        said = [str(warning) for warning in planned(text).warnings]
        assert [f"clients that match {one} may also mount" in text for text in said] == [True] * warned
    if "/" not in one + other:
        (text,) = [str(warning) for warning in planned(f"/x {other}(rw)\n/x {one}(rw)\n").warnings] or [""]
        assert ("may also mount" in text) == warned


@pytest.mark.parametrize(
    ("policy", "means"),
    [
        ("p.py:P", "/etc/cloakfs/p.py:P"),
        ("lib/p.py:P", "/etc/cloakfs/lib/p.py:P"),
        ("/opt/p.py:P", "/opt/p.py:P"),
        ("site.policies:P", "site.policies:P"),
    ],
)
def test_a_plug_in_is_named_independently_of_where_the_entry_stands(policy: str, means: str) -> None:
    (entry,), _ = parse(f"/x *(anonuid=5,policy={policy})\n", "/etc/cloakfs/x.exports")
    assert absolute(entry) == replace(entry, options=replace(entry.options, policy=means))
    assert absolute(entry).location == entry.location


def test_an_entry_without_a_plug_in_stays_as_it_is() -> None:
    (entry,), _ = parse("/x *\n", "/etc/cloakfs/x.exports")
    assert absolute(entry) is entry


def test_a_client_in_other_words_is_the_same() -> None:
    one, two = parse("/a 10.1.0.0/16(rw)\n", "x")[0] + parse("//a/. 10.1.2.3/255.255.0.0(ro)\n", "y")[0]
    (error,) = repeats([one, two])
    assert str(error.location) == "y:1:7"
    assert repeats([one, *parse("/a 10.2.0.0/16(rw) gss/krb5(rw)\n", "y")[0]]) == []


@pytest.mark.parametrize("server", ["knfsd", "ganesha"])
@pytest.mark.parametrize(
    ("client", "again"),
    [("10.1.0.0/16", "10.1.0.0/16"), ("10.1.0.0/8", "10.0.0.0/255.0.0.0"), ("h1", "H1"), ("::1", "0::1/128")],
)
def test_the_same_client_in_two_files_is_refused_in_the_words_of_check(
    client: str, again: str, server: ServerKind
) -> None:
    one, two = parse(f"/a {client}(views=eve)\n", "x")[0] + parse(f"/a {again}(views=eve)\n", "y")[0]
    made = plan([one, two], server, "/srv/cloakfs")
    (problem,), (error,) = made.problems, repeats([one, two])
    assert (problem.location, problem.message) == (error.location, error.message)
    assert str(problem.location) == "y:1:4"
    assert "already, at x:1:4" in problem.message
    assert "one of the two is to be removed" in problem.message
    assert [mount.client for mount in made.mounts] == [client]
    assert not any("may also mount" in warning.message for warning in made.warnings)


def test_a_client_within_another_one_is_warned_of() -> None:
    one, two = parse("/a 10.0.0.0/8(rw)\n", "x")[0] + parse("/a 10.1.0.0/16(rw)\n", "y")[0]
    made = plan([one, two], "knfsd", "/srv/cloakfs")
    assert made.problems == ()
    assert any("may also mount" in warning.message for warning in made.warnings)


NETWORKS = st.one_of(
    st.tuples(st.integers(0, 15), st.integers(24, 32)).map(
        lambda it: str(ip_network(f"10.0.{it[0] % 3}.{it[0] * 16}/{it[1]}", strict=False))
    ),
    st.integers(0, 8).map(lambda third: f"fd00:0:{third}::/48"),
    st.just("fd00::/16"),
)


@given(st.lists(NETWORKS, min_size=2, max_size=8, unique=True))
def test_whoever_is_in_two_networks_is_warned_of(clients: list[str]) -> None:
    made = planned("".join(f"/x {client}(rw)\n" for client in clients))
    networks = [ip_network(client) for client in clients]
    expected = [
        f"clients that match {narrow} may also mount /srv/cloakfs/{mount_name('/x', wide)},"
        for later, wide in enumerate(clients)
        for earlier, narrow in enumerate(clients[:later])
        if networks[later].version == networks[earlier].version and networks[later].overlaps(networks[earlier])
    ]
    said = [warning.message for warning in made.warnings if "may also mount" in warning.message]
    assert [text.partition(" which is for")[0] for text in said] == expected


def test_a_plan_of_thousands_of_networks_compares_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    class Counted(IPv4Network):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal made
            made += 1
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(ipaddress, "IPv4Network", Counted)
    planned("".join(f"/x 10.{number // 250}.{number % 250}.0/24(rw)\n" for number in range(300)))
    assert 300 <= made < 10 * 300
