import pytest

from cloakfs.cloak import CloakDef, Mask
from cloakfs.config.errors import ExportsError, ExportsWarning, Location
from cloakfs.config.lint import describe_kinds
from cloakfs.config.options import Export, Options
from cloakfs.config.parse import parse, parse_all, parse_options
from cloakfs.config.render import format_export, format_exports, format_options
from cloakfs.config.viewitems import Ids, Range, User
from cloakfs.identity import ServerId
from cloakfs.mapping import MAX_ID, NOBODY, RangeDef
from cloakfs.prefetch import Limits
from cloakfs.probes import Rate


def one(text: str) -> Export:
    (export,), _ = parse(text)
    return export


def options(text: str) -> Options:
    """The options of a list in parentheses, which must not give warnings."""
    (export,), warnings = parse(f"/home host({text})")
    assert warnings == []
    return export.options


def warnings_of(text: str) -> list[str]:
    return [str(warning) for warning in parse(text, "f")[1]]


def error_of(text: str) -> str:
    with pytest.raises(ExportsError) as caught:
        parse(text, "f")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Entries, paths, clients


def test_defaults_are_those_of_exports_5() -> None:
    assert one("/home host").options == Options(read_only=True, squash="root", anonuid=65534, anongid=65534)
    assert one("/home host()").options == Options()
    assert one("/home host( )").options == Options()


def test_nothing_at_all() -> None:
    assert parse("") == ([], [])
    assert parse("\n  \t\n# only /a comment(rw)\n   # another \\\n") == ([], [])
    assert parse(" \\\n \\\n") == ([], [])


def test_one_export_per_path_and_client() -> None:
    exports, warnings = parse("/home a(rw) b\n/srv \\\n  a(ro) # comment\n", "f")
    assert [(e.path, e.client, e.options.read_only, str(e.location)) for e in exports] == [
        ("/home", "a", False, "f:1:7"),
        ("/home", "b", True, "f:1:13"),
        ("/srv", "a", True, "f:3:3"),
    ]
    assert warnings == []


def test_the_place_of_an_export_is_not_part_of_its_identity() -> None:
    assert one("/home host") == one("\n  /home   host")
    assert one("/home host") != one("/home guest")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a", "/a"),
        ('"/a b"', "/a b"),
        (r"/a\040b", "/a b"),
        (r'"/a\040b"', "/a b"),
        ('/"a b"/"c d"', "/a b/c d"),
        ('"/a#(b)"', "/a#(b)"),
        (r"/\043\042\134", '/#"\\'),
        (r"/\303\251", "/é"),
        ("/é", "/é"),
        (r"/\377", "/\udcff"),
        ("/\udcff", "/\udcff"),
        ("/a,b)=c", "/a,b)=c"),
        ("/\u2028\u00a0", "/\u2028\u00a0"),
    ],
)
def test_paths(text: str, path: str) -> None:
    export = one(f"{text} host")
    assert export.path == path
    assert one(format_export(export)) == export


@pytest.mark.parametrize(
    "client",
    [
        *("host", "host.example.org", "*.example.org", "build[0-9].example.org", "node?", "*", "a-b_c"),
        *("@trusted", "192.0.2.7", "192.0.2.0/24", "192.0.2.0/255.255.255.0", "10.1.2.3/8"),
        *("2001:db8::1", "2001:db8:9:e54::/64", "gss/krb5", "gss/krb5i", "gss/krb5p"),
    ],
)
def test_clients(client: str) -> None:
    assert one(f"/home {client}(rw)").client == client


@pytest.mark.parametrize(
    "client",
    [
        *("300.1.1.1", "192.0.2", "192.0.2.0/33", "192.0.2.0/0.0.0.255", "192.0.2.0/", "a/b", "gss/krb6"),
        *("2001:db8::g", "2001:db8::/129", "host:1", "@", "a,b", "host[", "host[]", "höst", "a=b", "..."),
    ],
)
def test_what_is_no_client(client: str) -> None:
    assert error_of(f"/home {client}(rw)") == (
        f"f:1:7: {client!r} is not a client; expected a host name, a wildcard, an address, a network, @netgroup or *"
    )


def test_options_behind_a_space_are_for_the_world_and_warned_about() -> None:
    exports, warnings = parse("/home host (rw)", "f")
    assert [(e.client, e.options.read_only) for e in exports] == [("host", True), ("*", False)]
    assert [str(w) for w in warnings] == [
        "f:1:12: warning: options without a client, so they apply to every client (*)"
    ]


@pytest.mark.parametrize(("text", "read_only"), [("/pub", True), ("/pub -rw", False)])
def test_a_path_alone_is_for_the_world_and_warned_about(text: str, read_only: bool) -> None:
    (export,), warnings = parse(text, "f")
    assert (export.client, export.options.read_only) == ("*", read_only)
    assert warnings == [
        ExportsWarning(Location("f", 1, 1), "no client is named, so this is exported to every client (*)")
    ]


def test_default_options_hold_for_the_clients_after_them() -> None:
    exports, warnings = parse("/srv a -rw,sync,anonuid=7,all_squash b c(ro,async,anonuid=8) -no_all_squash d")
    assert warnings == []
    assert [e.options for e in exports] == [
        Options(),
        Options(read_only=False, squash="all", anonuid=7, other=(("sync", None),)),
        Options(read_only=True, squash="all", anonuid=8, other=(("async", None),)),
        Options(read_only=False, squash="root", anonuid=7, other=(("sync", None),)),
    ]


# Options


@pytest.mark.parametrize(
    ("text", "squash"),
    [
        ("root_squash", "root"),
        ("no_root_squash", "none"),
        ("all_squash", "all"),
        ("no_all_squash", "root"),
        ("no_root_squash,all_squash", "all"),
        ("all_squash,root_squash", "all"),
        ("no_root_squash,no_all_squash", "none"),
    ],
)
def test_squash(text: str, squash: str) -> None:
    assert options(text).squash == squash


def test_white_space_and_continuation() -> None:
    assert options(" rw , \\\n\t anonuid \\\n = \\\n 5 \\\n ") == Options(read_only=False, anonuid=5)


def test_range_map() -> None:
    parsed = options("range_map=uid 1 5 map 10 \\\n gid 9 squash 4294967294 uid 7 7 squash -2,rw")
    assert parsed.range_map == (
        RangeDef("uid", 1, 5, "map", 10),
        RangeDef("gid", 9, 9, "squash", MAX_ID),
        RangeDef("uid", 7, 7, "squash", NOBODY),
    )
    assert not parsed.read_only


def test_cloak_list() -> None:
    assert options("cloak_list = uid +007 5 gid -400 0 -1 uid -002 -2").cloak_list == (
        CloakDef("uid", Mask.parse("+007"), 5, 5),
        CloakDef("gid", Mask.parse("-400"), 0, MAX_ID),
        CloakDef("uid", Mask.parse("-002"), NOBODY, NOBODY),
    )


def test_words_of_cloakfs() -> None:
    assert options(
        "no_client_cache, views = ann 1000 1001:100 1001:100:5+6 7-7 0-4294967294, view_access = 0 33"
    ) == Options(
        no_client_cache=True,
        views=(User("ann"), User("1000"), Ids(1001, 100), Ids(1001, 100, (5, 6)), Range(7, 7), Range(0, 4294967294)),
        view_access=(0, 33),
    )


def test_a_range_of_views_has_both_of_its_ends() -> None:
    assert [uid for uid in map(ServerId, range(10)) if uid in Range(3, 5)] == [3, 4, 5]


@pytest.mark.parametrize("value", ["proc", "database", "none", "0", "1001:1002:4294967294"])
def test_groups(value: str) -> None:
    assert options(f"groups={value}").groups == value


@pytest.mark.parametrize("value", ["/etc/my.py:Class", "my.py:C", "pkg.mod:C", "mod:C", "/a:b.py:_C1"])
def test_policy(value: str) -> None:
    assert options(f"policy={value}").policy == value


def test_a_quoted_value() -> None:
    assert options(r'policy="/my, (own) \042files/p.py":C').policy == '/my, (own) "files/p.py:C'


def test_other_options_keep_their_order_and_values() -> None:
    text = (
        "insecure,async,no_wdelay,nohide,crossmnt,no_subtree_check,no_auth_nlm,no_acl,pnfs,nordirplus,"
        "security_label,sign_fh,fsid=root,sec=krb5p:krb5,xprtsec=tls:mtls,reexport=none,"
        "replicas=/a@h1+h2:/b@h3,mountpoint=/mnt"
    )
    other = options(text).other
    assert ",".join(name if value is None else f"{name}={value}" for name, value in other) == text


@pytest.mark.parametrize(
    "value",
    ["root", "0", "4294967295", "11111111-2222-3333-4444-555555555555", "0123456789abcdef0123456789ABCDEF"],
)
def test_fsid(value: str) -> None:
    assert options(f"fsid={value}").other == (("fsid", value),)


@pytest.mark.parametrize(
    "text",
    [
        "host(sec=krb5,range_map=uid 1000 1999 map 5000)",
        "host(range_map=gid 5 squash 6,sec=sys:krb5p)",
        "-sec=krb5i host(range_map=uid 0 squash -2 uid 1 map 2)",
        "gss/krb5(range_map=uid 1000 1999 map 5000)",
    ],
)
def test_ids_by_kerberos_are_not_mapped_once_more(text: str) -> None:
    message = error_of(f"/a {text}")
    at = text.index("uid 1 map 2") if "uid 1 map 2" in text else text.index("id ") - 1
    assert message.startswith(f"f:1:{4 + at}: range_map maps the ids of a client, but with ")
    assert message.endswith("; expected no range_map with Kerberos, or sec=sys")


@pytest.mark.parametrize(
    "text",
    [
        "host(sec=krb5)",
        "host(sec=sys,range_map=uid 1000 1999 map 5000)",
        "host(sec=krb5,range_map=uid 0 squash -2)",
        "host(sec=krb5,range_map=uid 1000 1999 map 1000)",
    ],
)
def test_where_nothing_is_mapped_twice_kerberos_is_fine(text: str) -> None:
    parse(f"/a {text}", "f")


def test_refer_is_for_nfs4_alone() -> None:
    (export,), (warning,) = parse("/a host(rw,refer=/a@b)", "f")
    assert export.options.other == (("refer", "/a@b"),)
    assert str(warning).startswith("f:1:18: warning: only NFSv4 knows refer: ")
    assert parse("/a -refer=/a@b host(replicas=/c@d)", "f")[1] == []


def test_mountpoint_needs_no_value() -> None:
    assert options("mp").other == (("mp", None),)
    assert options("mountpoint ,rw").other == (("mountpoint", None),)


@pytest.mark.parametrize(
    ("text", "expected", "warning"),
    [
        ("rw,ro", Options(), "ro after rw"),
        ("rw,rw", Options(read_only=False), "rw after rw"),
        ("sync,fsid=1,async", Options(other=(("fsid", "1"), ("async", None))), "async after sync"),
        ("anonuid=1,anonuid=2", Options(anonuid=2), "anonuid after anonuid"),
        ("mp,mountpoint=/a", Options(other=(("mountpoint", "/a"),)), "mountpoint after mp"),
        ("replicas=/b@b,replicas=/a@c", Options(other=(("replicas", "/a@c"),)), "replicas after replicas"),
    ],
)
def test_the_last_of_contradicting_options_counts(text: str, expected: Options, warning: str) -> None:
    (export,), warnings = parse(f"/home host({text})", "f")
    assert export.options == expected
    assert [str(w) for w in warnings] == [
        f"f:1:{12 + text.rindex(',') + 1}: warning: {warning} in the same list: the last one counts"
    ]


@pytest.mark.parametrize("heuristic", ["off", "default", "slowdown", "cursors", "always"])
def test_what_reads_ahead(heuristic: str) -> None:
    assert options(f"prefetch={heuristic}") == Options(prefetch=heuristic)


@pytest.mark.parametrize(
    ("text", "limits", "printed"),
    [
        ("prefetch_window=65536", Limits(window=65536), "prefetch_window=64K"),
        ("prefetch_window=1536K", Limits(window=3 << 19), "prefetch_window=1536K"),
        ("prefetch_file=1000", Limits(file=1000), "prefetch_file=1000"),
        ("prefetch_file=1024M", Limits(file=1 << 30), "prefetch_file=1G"),
        ("prefetch_total=1024G", Limits(total=1 << 40), "prefetch_total=1024G"),
        ("prefetch_files=1024", Limits(files=1024), "prefetch_files=1024"),  # a count has no unit
        ("prefetch_cursors=9999999", Limits(cursors=9999999), "prefetch_cursors=9999999"),
        ("prefetch_window=2M", Limits(), ""),
    ],
)
def test_how_much_is_read_ahead(text: str, limits: Limits, printed: str) -> None:
    assert options(text) == Options(prefetch_limits=limits)
    assert format_options(options(text)) == ",".join(filter(None, ["ro", printed]))


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("home host", "f:1:1: 'home' is not an absolute path; expected a path that begins with /"),
        ('"" host', "f:1:1: '' is not an absolute path; expected a path that begins with /"),
        ('\n\n "/a', 'f:3:2: a quoted string is not closed on its line; expected a closing "'),
        ('/b"/a\n"', 'f:1:3: a quoted string is not closed on its line; expected a closing "'),
        (
            "/a\\b",
            "f:1:3: a backslash that neither ends its line nor begins an octal escape; expected three octal",
        ),
        ("/a\\400", "f:1:3: a backslash that neither"),
        ("/a\\000", "f:1:3: a NUL character; expected a string without"),
        ("/a\0", "f:1:3: a NUL character; expected a string without"),
        ("/a\ud800", "f:1:3: unexpected '\\ud800'; expected text"),
        ("/a(rw)", "f:1:3: unexpected '('; expected white space after the path"),
        ("/a#b", "f:1:3: a comment begins here; expected white space after the path"),
        ("/a \\ \nhost", "f:1:4: a backslash that neither"),
        ("/a \\\r\nhost", "f:1:4: a backslash that neither"),
        ("/a \\", "f:1:4: a backslash that neither"),
        ("/a host#b", "f:1:8: a comment begins here; expected white space after a client"),
        ("/a host(rw)b", "f:1:12: unexpected 'b'; expected white space after a client"),
        ("/a host(rw)(ro)", "f:1:12: unexpected '('; expected white space after a client"),
        ('/a "host"', "f:1:4: unexpected '\"'; expected a host name"),
        ("/a )", "f:1:4: unexpected ')'; expected a host name"),
        ("/a host(rw", "f:1:11: the text ends here; expected ',', ')' or a backslash at the end of the line"),
        ("/a host(rw,\nro)", "f:1:12: the line ends here; expected an option or a backslash at the end"),
        (
            "/a host(rw, # b\nro)",
            "f:1:13: a comment begins here; expected an option or a backslash at the end",
        ),
        ("/a host(rw ro)", "f:1:12: unexpected 'ro'; expected ',', ')' or a backslash"),
        ("/a host(rw,)", "f:1:12: unexpected ')'; expected an option"),
        ("/a host(,rw)", "f:1:9: unexpected ','; expected an option"),
        ("/a host(=rw)", "f:1:9: unexpected '='; expected an option"),
        ("/a -rw,sync= host", "f:1:12: unexpected '='; expected no value: sync takes none"),
        ("/a -rw, host", "f:1:8: unexpected ' '; expected an option"),
        ("/a -rw)", "f:1:7: unexpected ')'; expected ','"),
        ("/a - host", "f:1:5: unexpected ' '; expected an option"),
        ("/a -range_map=uid 3 map 3 host", "f:1:18: unexpected ' '; expected rm-low"),
        ("/a host(frobnicate)", "f:1:9: unknown option 'frobnicate'; expected an option of exports(5) or"),
        ("/a host(range_maps)", "f:1:9: unknown option 'range_maps'; expected perhaps range_map"),
        ("/a host(RW)", "f:1:9: unknown option 'RW'; expected perhaps rw"),
        (
            "/a host(no_subtreecheck)",
            "f:1:9: unknown option 'no_subtreecheck'; expected perhaps no_subtree_check",
        ),
        (f"/a host({'x' * 99})", f"f:1:9: unknown option '{'x' * 60}…'; expected"),
        ("/a host(rw=yes)", "f:1:11: unexpected '='; expected no value: rw takes none"),
        ("/a host(anonuid)", "f:1:16: unexpected ')'; expected '=' and the value of anonuid"),
        ("/a host(anonuid,rw)", "f:1:16: unexpected ','; expected '=' and the value of anonuid"),
        ("/a host(anonuid=)", "f:1:17: unexpected ')'; expected a number from 0 to 4294967294"),
        ("/a host(mountpoint=,rw)", "f:1:20: unexpected ','; expected an absolute path"),
        ("/a host(policy=\\\n)", "f:2:1: unexpected ')'; expected FILE.py:Class"),
        ("/a host(anonuid=5 6)", "f:1:19: unexpected '6'; expected ',', ')'"),
        (
            '/a host(policy="a.py:B)',
            'f:1:16: a quoted string is not closed on its line; expected a closing "',
        ),
        ("/a host(sec=sys,ro,sec=krb5,rw)", "f:1:20: sec is given twice; expected it once"),
        ("/a host(views=1,views=2)", "f:1:17: views is given twice; expected it once"),
        ("/a host(views=1 ann 1)", "f:1:21: '1' is in views twice; expected it once"),
        ("/a host(views=)", "f:1:15: unexpected ')'; expected a user name, uid"),
        ("/a host(exempt=root)", "f:1:16: 'root' does not belong in exempt; expected a number"),
        ("/a host(exempt=0 34 0)", "f:1:21: '0' is in exempt twice; expected it once"),
        ("/a host(view_access=root)", "f:1:21: 'root' does not belong in view_access; expected a number"),
        (
            "/a host(range_map=)",
            "f:1:19: unexpected ')'; expected a definition, which begins with uid or gid",
        ),
        ("/a host(range_map=pid 1 map 2)", "f:1:19: unexpected 'pid'; expected uid or gid"),
        ("/a host(range_map=uid)", "f:1:22: unexpected ')'; expected rm-low"),
        ("/a host(range_map=uid -1 map 2)", "f:1:23: '-1' is not an id; expected rm-low"),
        ("/a host(range_map=uid 1 -2 map 2)", "f:1:25: '-2' is not an id; expected rm-high"),
        ("/a host(range_map=uid 1 +2 map 2)", "f:1:25: '+2' is not an id; expected rm-high"),
        ("/a host(range_map=uid 01 map 2)", "f:1:23: '01' is not an id; expected rm-low"),
        ("/a host(range_map=uid 1 ١ map 2)", "f:1:25: unexpected '١'; expected map or squash"),
        ("/a host(range_map=uid 4294967295 map 2)", "f:1:23: '4294967295' is not an id; expected rm-low"),
        (
            f"/a host(range_map=uid {'9' * 9999} map 2)",
            f"f:1:23: '{'9' * 60}…' is not an id; expected rm-low",
        ),
        ("/a host(range_map=uid 1 2)", "f:1:26: unexpected ')'; expected map or squash"),
        ("/a host(range_map=uid 1 2 3 map 4)", "f:1:27: unexpected '3'; expected map or squash"),
        (
            "/a host(range_map=uid 1 map)",
            "f:1:28: unexpected ')'; expected lc-low, the first server id: a number",
        ),
        ("/a host(range_map=uid 1 map -1)", "f:1:29: '-1' is not an id; expected lc-low"),
        ("/a host(range_map=uid 1 map 2 3)", "f:1:31: unexpected '3'; expected uid or gid"),
        ("/a host(range_map=uid 1 map 2, gid 1 map 3)", "f:1:32: unknown option 'gid'; expected"),
        (
            "/a host(range_map=uid 1 map 2 uid 2 1 map 2)",
            "f:1:31: bad definition, the range 2 1 ends before it",
        ),
        (
            "/a host(range_map=uid 0 -1 map 2)",
            "f:1:19: bad definition, the server's range 2 4294967296 runs past",
        ),
        ("/a host(range_map=uid 1 2 map -2)", "f:1:19: bad definition, several ids cannot be mapped onto -2"),
        ("/a host(cloak_list=)", "f:1:20: unexpected ')'; expected a definition"),
        ("/a host(cloak_list=uid)", "f:1:23: unexpected ')'; expected a mask: + or - and three octal digits"),
        ("/a host(cloak_list=uid 007 1)", "f:1:24: '007' is not a mask; expected a mask: + or -"),
        ("/a host(cloak_list=uid −007 1)", "f:1:24: '−007' is not a mask; expected a mask: + or -"),
        ("/a host(cloak_list=uid +007)", "f:1:28: unexpected ')'; expected lc-low"),
        ("/a host(cloak_list=uid +007 -1)", "f:1:29: '-1' is not an id; expected lc-low"),
        ("/a host(cloak_list=uid +007 5 -2)", "f:1:31: '-2' is not an id; expected lc-high"),
        ("/a host(cloak_list=uid +007 5 4)", "f:1:20: bad definition, the range 5 4 ends before it begins"),
        ("/a host(cloak_list=uid +007 -2 4)", "f:1:20: bad definition, -2 is a single id"),
        ("/a host(cloak_list=uid +007 1 2 3)", "f:1:33: unexpected '3'; expected uid or gid"),
    ],
)
def test_errors_name_place_value_and_expectation(text: str, message: str) -> None:
    assert error_of(text).startswith(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("anonuid", v) for v in ("-1", "-2", "4294967295", "nobody", "0x10", "007", "99999999999")),
        *(("anongid", v) for v in ("-1", '""')),
        *(("groups", v) for v in ("all", "1:", ":1", "1::2", "proc:1", "4294967295", "1:4294967295")),
        *(("policy", v) for v in ("a.py", ":A", "a:", "a.b.:C", ".py:C", "/x/.py:C", "a b:C", "a-b:C", "a.py:C-")),
        *(("fsid", v) for v in ("4294967296", "1-2", "x", "0123456789abcdef")),
        *(("sec", v) for v in ("krb4", "sys:", "sys:krb4")),
        *(("xprtsec", v) for v in ("ssl", "none:ssl")),
        *(("reexport", v) for v in ("auto", "none:none")),
        *(("refer", v) for v in ("a@b", "/a", "/srv/cloakfs/home@10.1.0.0_16@host", "/a@", "/a@b:/c", "/a@b:/c@d@e")),
        *(("replicas", v) for v in ("a@b", "/a", "/a@b@c")),
        *(("mountpoint", v) for v in ("mnt", "./mnt")),
        *(("mp", v) for v in ("mnt", '""')),
    ],
)
def test_bad_values(name: str, value: str) -> None:
    value = value.strip('"')
    assert error_of(f'/a host({name}="{value}")').startswith(f"f:1:{10 + len(name)}: bad value of {name}, {value!r};")


@pytest.mark.parametrize(
    "item",
    [
        *(
            "7-5",
            "0-4294967295",
            "1-",
            "-1",
            "4294967295",
            "1:4294967295",
            "1:2:",
            "1:2:3+",
            "1:2:3:4",
            "1+2",
        ),
        *("9ann", "ann/bob", "..", "@ann", "ann:1", "é"),
    ],
)
def test_bad_views(item: str) -> None:
    assert error_of(f"/a host(views={item})").startswith(f"f:1:15: {item!r} does not belong in views;")


@pytest.mark.parametrize(
    ("client", "again", "spelled"),
    [
        ("host", "/home host", ""),
        ("host", "/home/ HOST(rw)", " as host"),
        ("host", "//home/. other host", ""),
        ("10.0.0.1", "/home 10.0.0.1/32", " as 10.0.0.1"),
        ("2001:db8::/32", "/home 2001:0db8:0::/32", " as 2001:db8::/32"),
        ("@Staff", "/home @Staff", ""),
    ],
)
def test_a_client_may_be_named_once_for_a_path(client: str, again: str, spelled: str) -> None:
    message = error_of(f"/home {client}\n{again}")
    assert "is exported to" in message
    assert message.endswith(
        f"already, at f:1:7{spelled}; expected each client once for a path, so that one of the two is to be removed"
    )


def test_netgroups_whose_names_differ_in_case_are_two() -> None:
    assert parse("/home @Staff @staff\n")[1] == []


def test_a_client_may_not_be_named_twice_in_one_entry() -> None:
    assert error_of("/home host host(rw)").startswith("f:1:12: '/home' is exported to host already, at f:1:7")


def test_an_error_carries_its_parts() -> None:
    with pytest.raises(ExportsError) as caught:
        parse("/a host(anonuid=x)", "some file")
    assert caught.value.location == Location("some file", 1, 17)
    assert caught.value.problem == "bad value of anonuid, 'x'"
    assert caught.value.expected == "a number from 0 to 4294967294"


def test_parse_all_goes_on_at_the_next_logical_line() -> None:
    exports, warnings, errors = parse_all(
        "/a host(rww, \\\n  sync) \\\n  other\n/b host (rw)\n/c host(rw\n/d host\n/b host\n/e x(rw,ro) y(",
        "f",
    )
    assert [(e.path, e.client) for e in exports] == [("/b", "host"), ("/b", "*"), ("/d", "host")]
    assert [str(w.location) for w in warnings] == ["f:4:9"]
    assert [str(e.location) for e in errors] == ["f:1:9", "f:5:11", "f:7:4", "f:8:15"]


# Warnings about definitions


def test_shadowed_definitions_are_named_with_the_one_in_their_way() -> None:
    text = "/a host(range_map = uid 0 9 map 100 \\\n uid 5 12 map 200 \\\n uid 6 map 300 uid 50 squash 101 gid 5 map 5)"
    wins = "'uid 0 9 map 100' at f:1:21: the first definition wins"
    assert warnings_of(text) == [
        f"f:2:2: warning: 'uid 5 12 map 200' loses some of its client ids (forward mapping) to {wins}",
        f"f:3:2: warning: 'uid 6 map 300' loses all of its client ids (forward mapping) to {wins}",
        f"f:3:16: warning: 'uid 50 squash 101' loses all of its server ids (reverse mapping) to {wins}",
    ]


def test_equal_definitions_are_told_apart() -> None:
    assert warnings_of("/a host(range_map = gid 5 map 6 gid 5 map 6)") == [
        f"f:1:33: warning: 'gid 5 map 6' loses all of its {ids} to 'gid 5 map 6' at f:1:21: the first definition wins"
        for ids in ("client ids (forward mapping)", "server ids (reverse mapping)")
    ]


def test_warnings_know_the_nobody_of_the_export() -> None:
    text = "/a host(range_map = gid 5 squash -2 gid 6 map 77{})"
    assert warnings_of(text.format("")) == []
    assert warnings_of(text.format(",anonuid=77")) == []
    # What is nobody's does not come back as anybody's but by a map.
    assert warnings_of(text.format(",anongid=77")) == []
    (warning,) = warnings_of("/a host(anongid=77,range_map = gid 5 map 77 gid 6 squash 77 gid 7 map 77)")
    assert warning.startswith("f:1:61: warning: 'gid 7 map 77' loses all of its server ids")


def test_squash_options_beside_a_range_map_are_reported() -> None:
    assert warnings_of("/a -all_squash host(root_squash,range_map = uid 1 map 1)") == [
        f"f:1:{column}: warning: {option} has no effect on uids, because range_map maps uids"
        for option, column in (("all_squash", 5), ("root_squash", 21))
    ]
    assert warnings_of("/a -all_squash host(root_squash,range_map = uid 1 squash -2)") == []  # of all others


@pytest.mark.parametrize("definition", ["uid 0 map 65534", "uid 0 5 map 65534"])
def test_nobody_shown_as_root_is_reported(definition: str) -> None:
    assert warnings_of(f"/a host(range_map = {definition} gid 1 map 1)") == [
        f"f:1:21: warning: '{definition}' shows what belongs to server uid 65534 (nobody) to clients as uid 0 (root)"
    ]


@pytest.mark.parametrize(
    "definitions",
    ["uid 0 squash -2", "uid 0 -1 squash -2", "uid 0 map -2", "uid 1 squash -2", "uid 0 -1 squash 65534 gid 1 map 1"],
)
def test_nobody_who_stays_nobody_is_not(definitions: str) -> None:
    assert warnings_of(f"/a host(range_map = {definitions})") == []


@pytest.mark.parametrize(
    ("definitions", "named"),
    [
        ("uid 7 map 0", "uid 7 map 0"),
        ("uid 7 9 map 0", "uid 7 9 map 0"),
        ("uid 0 9 squash 0", "uid 0 9 squash 0"),
        ("uid 5 squash -2,anonuid=0", "uid 5 squash -2"),
    ],
)
def test_who_becomes_root_is_reported(definitions: str, named: str) -> None:
    assert warnings_of(f"/a host(range_map = gid 1 map 1 {definitions})") == [
        f"f:1:33: warning: '{named}' makes a user who is not root on a client root on the server"
    ]


@pytest.mark.parametrize("definition", ["uid 0 map 0", "uid 0 -1 map 0", "uid 0 squash 0", "gid 7 map 0"])
def test_root_who_is_root_is_not(definition: str) -> None:
    assert warnings_of(f"/a host(range_map = gid 1 map 1 {definition})") == []


CLAIMED = (
    "uids are mapped but gids are not: whatever gid a client claims counts as the server's; map gids, too, or add "
    "gid 0 -1 squash -2"
)


@pytest.mark.parametrize("more", ["", " gid 0 squash -2", " gid 1 -1 squash -2,no_root_squash", ",no_root_squash"])
def test_claimed_gids_are_reported(more: str) -> None:
    said = warnings_of(f"/a host(range_map = uid 5 squash -2 uid 1000 1999 map 2000{more})")
    expected = [] if "gid 1 -1" in more else [f"f:1:21: warning: {CLAIMED}"]
    assert [text for text in said if "has no effect" not in text] == expected


@pytest.mark.parametrize(
    "options",
    [
        "range_map = uid 1 map 2 gid 1 map 2",
        "range_map = uid 1 map 2 gid 0 -1 squash -2",
        "range_map = uid 1 map 2,all_squash",
        "range_map = uid 1 map 2,views = 5:5",
        "range_map = uid 0 squash -2",
        "range_map = gid 1 map 2",
    ],
)
def test_gids_that_cannot_be_claimed_are_not(options: str) -> None:
    assert not any("uids are mapped" in text for text in warnings_of(f"/a host({options})"))


def test_kinds_are_described() -> None:
    assert describe_kinds(options("range_map = uid 1 map 2 gid 0 -1 squash -2")) == (
        "uids are closed: an id in no definition is nobody; "
        "gids are open: an id in no definition stays as it is, but root is nobody (root_squash)"
    )
    assert describe_kinds(options("range_map = gid 1 map 2")) == (
        "uids are open: every id stays as it is, but root is nobody (root_squash); "
        "gids are closed: an id in no definition is nobody"
    )
    assert "every id is nobody (all_squash)" in describe_kinds(options("all_squash"))


def test_cloaking_that_never_selects_is_reported() -> None:
    text = "/a host(anonuid=5,cloak_list = uid +000 0 9 uid -000 3 12 uid -000 -2 gid -000 5)"
    assert warnings_of(text) == [
        "f:1:59: warning: 'uid -000 -2' never selects a file, because 'uid +000 0 9' at f:1:32 comes before it:"
        " the first definition wins"
    ]


def test_probes() -> None:
    assert options("probe_alarm=5/s,probe_delay=200") == Options(probe_alarm=Rate(5, 1), probe_delay=200)
    assert options("probe_alarm=off,probe_delay=off") == Options(probe_alarm=None)
    assert options("probe_alarm=60/min") == Options()
    assert format_options(options("probe_alarm=100/h,probe_delay=5000")) == "ro,probe_alarm=100/h,probe_delay=5000"
    assert format_options(options("probe_alarm=off")) == "ro,probe_alarm=off"
    for wrong in "probe_alarm=60", "probe_alarm=0/min", "probe_delay=5001", "probe_delay=0", "probe_delay=1s":
        with pytest.raises(ExportsError, match=f"bad value of {wrong.partition('=')[0]}"):
            options(wrong)
    with pytest.raises(ExportsError, match="probe_alarm is given twice"):
        options("probe_alarm=off,probe_alarm=off")
    assert warnings_of("/a host(probe_delay = 5, probe_alarm = off)") == [
        "f:1:23: warning: probe_delay has no effect, because probe_alarm is off"
    ]
    assert warnings_of("/a host(probe_delay = off, probe_alarm = off)") == []


def test_an_exemption_that_does_nothing_or_too_much_is_reported() -> None:
    assert warnings_of("/a host(exempt = 0 34)") == [
        "f:1:18: warning: exempt has no effect, because there is no cloak_list"
    ]
    assert warnings_of("/a host(cloak_list = uid +007 0 -1, exempt = 0, anonuid = 34)") == []
    assert warnings_of("/a host(policy = x.py:X, exempt = 0)") == []
    assert warnings_of("/a host(cloak_list = uid +007 0 -1, exempt = 0 34, anonuid = 34)") == [
        "f:1:46: warning: server uid 34 is nobody: nothing is hidden from any caller who becomes nobody"
    ]


# Bare lists, and printing


def test_parse_options_takes_the_same_words() -> None:
    parsed, warnings = parse_options(r'range_map = gid 1 map 2, mp="/my\040mnt" ,ro')
    assert parsed == Options(range_map=(RangeDef("gid", 1, 1, "map", 2),), other=(("mp", "/my mnt"),))
    assert warnings == []


@pytest.mark.parametrize("text", ["", "  ", "sync"])
@pytest.mark.parametrize("read_only", [True, False])
def test_parse_options_lets_the_caller_say_what_is_default(text: str, read_only: bool) -> None:
    assert parse_options(text, read_only=read_only)[0].read_only is read_only
    assert parse_options(text)[0].read_only is False
    assert parse_options("rw", read_only=True)[0].read_only is False
    assert parse_options("ro")[0].read_only is True


def test_parse_options_warns() -> None:
    assert [str(w) for w in parse_options("rw,ro")[1]] == [
        "-o:1:4: warning: ro after rw in the same list: the last one counts"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rw,", "-o:1:4: the text ends here; expected an option"),
        ("rw ro", "-o:1:4: unexpected 'ro'; expected ','"),
        ("rw)", "-o:1:3: unexpected ')'; expected ','"),
        ("rw\nro", "-o:1:3: the line ends here; expected the end of the options"),
        ("\nro", "-o:1:1: the line ends here; expected an option"),
        ("#ro", "-o:1:1: a comment begins here; expected an option"),
        ("ro #", "-o:1:4: a comment begins here; expected ','"),
        ("anonuid=x", "-o:1:9: bad value of anonuid, 'x'; expected a number from 0 to 4294967294"),
    ],
)
def test_parse_options_errors(text: str, message: str) -> None:
    with pytest.raises(ExportsError) as caught:
        parse_options(text)
    assert str(caught.value) == message


FULL = Options(
    read_only=False,
    squash="none",
    anonuid=5,
    anongid=6,
    range_map=(RangeDef("uid", 0, MAX_ID, "squash", NOBODY),),
    cloak_list=(CloakDef("gid", Mask.parse("-002"), NOBODY, NOBODY),),
    exempt=(0, 34),
    no_client_cache=True,
    groups="1:2",
    policy="/a b.py:C",
    views=(User("ann"), Range(1, 2)),
    view_access=(3,),
    other=(("sync", None), ("fsid", "3"), ("mp", None)),
)


def test_the_printed_form() -> None:
    export = Export('/a "b"', "host", FULL, Location("", 1, 1))
    assert (
        format_exports([export, Export("/c", "*", Options(), Location("", 1, 1))])
        == (
            r"""
"/a \042b\042" host(rw, \
    no_root_squash, \
    anonuid=5, \
    anongid=6, \
    sync, \
    fsid=3, \
    mp, \
    groups=1:2, \
    policy="/a b.py:C", \
    no_client_cache, \
    range_map = \
        uid 0 -1 squash -2, \
    cloak_list = \
        gid -002 -2, \
    exempt = \
        0 \
        34, \
    views = \
        ann \
        1-2, \
    view_access = \
        3)
/c *(ro)
"""[1:]
        )
    )


@pytest.mark.parametrize(
    "text", ["range_map = uid 1 map 2", "cloak_list = uid +000 1", "exempt = 0", "views = ann", "view_access = 1"]
)
def test_a_list_makes_the_printed_form_go_over_several_lines(text: str) -> None:
    name, _, terms = text.partition(" = ")
    printed = format_export(one(f"/a host(sync,{text})"))
    assert printed == f"/a host(ro, \\\n    sync, \\\n    {name} = \\\n        {terms})"


def test_options_print_on_one_line() -> None:
    text = format_options(FULL)
    assert "\n" not in text
    assert parse_options(text, read_only=True)[0] == FULL
    assert format_options(Options(squash="all")) == "ro,all_squash"
