"""Any text in a file is read as the grammar says and printed back, or is an error."""

import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.cloak import CloakDef, Mask
from cloakfs.config.errors import ExportsError, Location
from cloakfs.config.options import Export, Options
from cloakfs.config.parse import parse, parse_all, parse_options
from cloakfs.config.render import format_exports, format_options
from cloakfs.config.viewitems import Ids, Range, User
from cloakfs.mapping import MAX_ID, NOBODY, Kind, RangeDef
from cloakfs.prefetch import HEURISTICS, Limits
from cloakfs.probes import Rate

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "exports.d").glob("*.exports"))
NOWHERE = Location("", 1, 1)
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

ids = st.one_of(st.integers(0, 9), st.integers(0, MAX_ID), st.sampled_from([MAX_ID - 1, MAX_ID]))
kinds: st.SearchStrategy[Kind] = st.sampled_from(["uid", "gid"])
masks = st.builds(Mask, st.booleans(), st.integers(0, 7), st.integers(0, 7), st.integers(0, 7))


@st.composite
def range_defs(draw: st.DrawFn) -> RangeDef:
    low, high = sorted((draw(ids), draw(ids)))
    if draw(st.booleans()):
        return RangeDef(draw(kinds), low, high, "squash", draw(st.one_of(ids, st.just(NOBODY))))
    return RangeDef(draw(kinds), low, high, "map", draw(st.integers(0, MAX_ID - (high - low))))


cloak_defs = st.one_of(
    st.builds(lambda kind, mask, ends: CloakDef(kind, mask, *sorted(ends)), kinds, masks, st.tuples(ids, ids)),
    st.builds(lambda kind, mask: CloakDef(kind, mask, NOBODY, NOBODY), kinds, masks),
)

# Names of files are bytes; those that are not UTF-8 become surrogates.
names = st.one_of(
    st.text('ab.é/\u2028\u00a0 \t\n\x7f"\\#(),=-', max_size=12),
    st.binary(max_size=12).map(lambda b: b.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
)
paths = names.map(lambda name: f"/{name}")
clients = st.sampled_from(["*", "host", "*.example.org", "@office", "192.0.2.0/24", "2001:db8::/64", "n[0-9]"])
groups = st.one_of(
    st.sampled_from(["proc", "database", "none"]),
    st.lists(ids, min_size=1).map(lambda gids: ":".join(map(str, gids))),
)
views = st.one_of(
    st.from_regex(r"[aZ_][bY7_.@-]{0,8}\$?", fullmatch=True).map(User),
    ids.map(str).map(User),
    st.builds(Ids, ids, ids, st.lists(ids, max_size=2).map(tuple)),
    st.tuples(ids, ids).map(sorted).map(lambda ends: Range(*ends)),
)

OTHER: list[list[tuple[str, str | None]]] = [
    [("secure", None), ("insecure", None)],
    [("sync", None), ("async", None)],
    [("hide", None), ("nohide", None)],
    [("auth_nlm", None), ("insecure_locks", None)],
    [("fsid", "0"), ("fsid", "root"), ("fsid", "11111111-2222-3333-4444-555555555555")],
    [("sec", "sys:null")],  # ids by Kerberos are not mapped
    [("mp", None), ("mountpoint", None), ("mp", "/a b"), ("mountpoint", '/,(")#=\\\n')],
    [("refer", "/a@b+c:/d@e"), ("replicas", "/a@\udcff")],
]


@st.composite
def others(draw: st.DrawFn) -> tuple[tuple[str, str | None], ...]:
    families = draw(st.lists(st.sampled_from(OTHER), unique_by=id))
    return tuple(draw(st.sampled_from(family)) for family in families)


sizes = st.builds(
    lambda number, unit: min(number * unit, 1 << 40),
    st.integers(1, 9_999_999_999),
    st.sampled_from([1, *UNITS.values()]),
)
counts = st.integers(1, 9_999_999)
limits = st.builds(Limits, window=sizes, file=sizes, total=sizes, files=counts, cursors=counts)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "read_only": st.booleans(),
    "squash": st.sampled_from(["root", "none", "all"]),
    "anonuid": ids,
    "anongid": ids,
    "range_map": st.lists(range_defs(), max_size=4).map(tuple),
    "cloak_list": st.lists(cloak_defs, max_size=4).map(tuple),
    "exempt": st.lists(ids, max_size=3, unique=True).map(tuple),
    "no_client_cache": st.booleans(),
    "groups": st.none() | groups,
    "policy": st.none() | paths.map(lambda path: f"{path}x.py:Class") | st.just("package.module:Class"),
    "prefetch": st.sampled_from(["off", *HEURISTICS]),
    "prefetch_limits": st.just(Limits()) | limits,
    "probe_alarm": st.none() | st.builds(Rate, st.integers(1, 9999), st.sampled_from([1, 60, 3600])),
    "probe_delay": st.integers(0, 5000),
    "views": st.lists(views, max_size=4, unique=True).map(tuple),
    "view_access": st.lists(ids, max_size=3, unique=True).map(tuple),
    "other": others(),
}
options = st.builds(Options, **FIELDS)


def place(export: Export) -> tuple[list[str], str]:
    return [part for part in export.path.split("/") if part not in ("", ".")], export.client


exports = st.lists(
    st.builds(Export, paths, clients, options, st.just(NOWHERE)),
    max_size=4,
    unique_by=lambda export: str(place(export)),
)


@given(exports)
def test_what_is_printed_is_read_back(defined: list[Export]) -> None:
    assert parse(format_exports(defined))[0] == defined


@given(options, st.booleans())
def test_options_are_read_back_from_one_line(given_: Options, read_only: bool) -> None:
    assert parse_options(format_options(given_), read_only=read_only)[0] == given_


def check_reading(text: str) -> None:
    """A text is either wrong in places that it has, or means what its printed form means."""
    lines = text.split("\n")
    defined, warnings, errors = parse_all(text, "f")
    for location in (*(w.location for w in warnings), *(e.location for e in errors)):
        assert 1 <= location.line <= len(lines)
        assert 1 <= location.column <= len(lines[location.line - 1]) + 1
    for error in errors:
        assert "\n" not in str(error)
    assert parse(format_exports(defined))[0] == defined
    if errors:
        try:
            parse(text, "f")
        except ExportsError as error:
            assert str(error) == str(errors[0])  # noqa: PT017 (the text decides whether there is one)
        else:
            raise AssertionError("parse() overlooked an error")
    else:
        assert parse(text, "f") == (defined, warnings)


@given(st.text(st.characters()))
def test_any_text_is_read_or_refused(text: str) -> None:
    check_reading(text)
    check_reading(f"/a host({text})")
    try:
        parsed, _ = parse_options(text)
    except ExportsError:
        return
    assert parse_options(format_options(parsed))[0] == parsed


FRAGMENTS = [
    *(
        " ",
        "\n",
        "\\\n",
        "\\",
        "\t",
        ",",
        "=",
        "(",
        ")",
        "#",
        '"',
        "-",
        "\\040",
        "\r",
        "\0",
        "\ud800",
        "é",
        "/",
    ),
    *(
        "/home",
        " host",
        "host(",
        "*",
        "@g",
        "10.0.0.0/8",
        "ro",
        "rw",
        "sync",
        "-1",
        "-2",
        "0",
        "5",
        "99999999999",
    ),
    *(
        "range_map",
        "cloak_list",
        "uid",
        "gid",
        "map",
        "squash",
        "+007",
        "views",
        "groups",
        "policy",
        "anonuid",
    ),
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join))
def test_any_heap_of_words_is_read_or_refused(text: str) -> None:
    check_reading(text)


@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    texts = [path.read_text("utf-8") for path in EXAMPLES]
    text = data.draw(st.one_of(st.sampled_from(texts), exports.map(format_exports)))
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 4)))
        text = text[:begin] + data.draw(st.sampled_from(["", *FRAGMENTS])) + text[end:]
    check_reading(text)


NUMBER = r"0|[1-9][0-9]*"
DEFINITION = re.compile(rf"(uid|gid) ({NUMBER})(?: ({NUMBER}|-1))? (map|squash) ({NUMBER}|-2) ?")


def independent_reading(terms: list[str]) -> list[tuple[str, int, int, str, int]] | None:
    """The definitions in a range_map by regular expression; None if it is wrong."""
    text = " ".join(terms)
    found: list[tuple[str, int, int, str, int]] = []
    at = 0
    while at < len(text) or not found:
        match = DEFINITION.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end() - 1] != " "):
            return None
        at = match.end()
        low, server = int(match[2]), int(match[5])
        high = low if match[3] is None else MAX_ID if match[3] == "-1" else int(match[3])
        size = high - low if match[4] == "map" else 0
        if not low <= high <= MAX_ID or server + size > MAX_ID or (server == -2 and size):
            return None
        found.append((match[1], low, high, match[4], server))
    return found


def check_terms(terms: list[str]) -> None:
    try:
        parsed, _ = parse_options(f"range_map = {' '.join(terms)}")
    except ExportsError:
        assert independent_reading(terms) is None
    else:
        found = [(d.kind, d.rm_low, d.rm_high, d.action, d.lc_low) for d in parsed.range_map]
        assert found == independent_reading(terms)


@given(st.lists(range_defs(), min_size=1, max_size=4))
def test_without_any_one_of_its_words_a_range_map_is_wrong_or_means_something_else(
    defs: list[RangeDef],
) -> None:
    terms = " ".join(map(str, defs)).split()
    check_terms(terms)
    for left_out in range(len(terms)):
        check_terms(terms[:left_out] + terms[left_out + 1 :])


TERMS = [
    "uid",
    "gid",
    "map",
    "squash",
    "0",
    "1",
    "5",
    "-1",
    "-2",
    "4294967294",
    "4294967295",
    "07",
    "+1",
    "x",
]


@given(st.lists(st.one_of(st.sampled_from(TERMS), range_defs().map(str)), max_size=10))
def test_a_range_map_means_what_the_grammar_says(pieces: list[str]) -> None:
    check_terms(" ".join(pieces).split())
