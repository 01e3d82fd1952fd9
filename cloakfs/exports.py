"""The text of exports.d files: exports(5) with the options of [SZ], and back.

[SZ] is Spadavecchia & Zadok, "Enhancing NFS Cross-Administrative Domain Access", 2002. A file consists of
entries, one per logical line (a backslash at the end of a line continues it):

    PATH [-OPTION,OPTION] CLIENT[(OPTION, OPTION, ...)] ...

Whatever is not in the grammar is an error with its place; nothing is guessed.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network

from cloakfs import cloak, mapping
from cloakfs.cloak import CloakDef, Mask
from cloakfs.mapping import DEFAULT_NOBODY, MAX_ID, NOBODY, Action, IdMap, Kind, RangeDef, Squash
from cloakfs.prefetch import HEURISTICS, Limits

DEFAULT_PREFETCH = "cursors"


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a text; line and column (in characters) begin at 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class ExportsError(ValueError):
    """A text that is not in the grammar: where, what is wrong, and what was expected instead."""

    def __init__(self, location: Location, problem: str, expected: str) -> None:
        super().__init__(f"{location}: {problem}; expected {expected}")
        self.location = location
        self.problem = problem
        self.expected = expected


@dataclass(frozen=True, slots=True)
class ExportsWarning:
    """Something that is in the grammar but probably does not do what its author wants."""

    location: Location
    message: str

    def __str__(self) -> str:
        return f"{self.location}: warning: {self.message}"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one export; the defaults are those of exports(5).

    anonuid and anongid are server ids, what "nobody" means in this export. groups says where a caller's
    supplementary groups come from (``proc``, ``database``, ``none`` or gids joined by colons; None: not
    said), policy names a plug-in (``FILE.py:Class`` or ``package.module:Class``), views the identities
    that get a fixed view (user names, ``uid``, ``uid:gid:gid+gid``, ``low-high``), view_access the
    client uids that may enter any of them. prefetch is the name of a heuristic, or ``off``, and
    prefetch_limits what it keeps to. other holds the remaining options of exports(5) in the
    order given, with their values.
    """

    read_only: bool = True
    squash: Squash = "root"
    anonuid: int = DEFAULT_NOBODY
    anongid: int = DEFAULT_NOBODY
    range_map: tuple[RangeDef, ...] = ()
    cloak_list: tuple[CloakDef, ...] = ()
    no_client_cache: bool = False
    groups: str | None = None
    policy: str | None = None
    views: tuple[str, ...] = ()
    view_access: tuple[str, ...] = ()
    prefetch: str = DEFAULT_PREFETCH
    prefetch_limits: Limits = field(default_factory=Limits)
    other: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """One directory exported to one client specification; location is where the client is named."""

    path: str
    client: str
    options: Options
    location: Location = field(compare=False)


# What prefetch keeps to: options by the names of `Limits`, those in bytes, and those that are counts.
_BYTES = {"prefetch_window": "window", "prefetch_file": "file", "prefetch_total": "total"}
_COUNTS = {"prefetch_files": "files", "prefetch_cursors": "cursors"}
_LIMITS = _BYTES | _COUNTS

# Options without a value, one line for those that set the same thing.
_FLAGS = (
    "ro rw",
    "root_squash no_root_squash",
    "all_squash no_all_squash",
    "no_client_cache",
    "secure insecure",
    "sync async",
    "wdelay no_wdelay",
    "hide nohide",
    "crossmnt nocrossmnt",
    "subtree_check no_subtree_check",
    "auth_nlm secure_locks no_auth_nlm insecure_locks",
    "acl no_acl",
    "pnfs no_pnfs",
    "nordirplus",
    "security_label",
    "sign_fh",
)
_VALUES = (
    *("range_map", "cloak_list", "groups", "policy", "views", "view_access"),
    *("prefetch", *_LIMITS),
    *("anonuid", "anongid", "fsid", "sec", "xprtsec", "reexport"),
    "refer replicas",
)
_PERHAPS_VALUES = ("mountpoint mp",)  # a value is allowed, not required

_FLAG_FAMILY = {name: family for family in _FLAGS for name in family.split()}
_FAMILY = {name: family for family in (*_FLAGS, *_VALUES, *_PERHAPS_VALUES) for name in family.split()}
# exports(5) lets the last of two contradicting options win. Not so these: it adds up sec, xprtsec and fsid,
# with a meaning for each that Options cannot express, and of two lists dropping one would be a guess.
_ONCE = {*_VALUES} - {"anonuid", "anongid", "refer replicas"}

_FLAVORS = ("sys", "unix", "krb5", "krb5i", "krb5p", "none", "null")
_TRANSPORTS = ("none", "tls", "mtls")
_REEXPORTS = ("auto-fsidnum", "predefined-fsidnum", "none")

_SPACE = frozenset(" \t\r\v\f")
_BLANK = re.compile(r"(?:[ \t\r\v\f]+|\\\n)*+")
_BLANK_LINES = re.compile(r"(?:[ \t\r\v\f\n]+|\\\n|#[^\n]*)*+")
_REST_OF_LOGICAL_LINE = re.compile(r"(?:[^\n]*\\\n)*+[^\n]*")
_OCTAL = re.compile(r"\\[0-3][0-7]{2}")
_WORD = re.compile(r'[^ \t\r\v\f\n,()="#\\]+')
_CLIENT = re.compile(r'[^ \t\r\v\f\n()"#\\]*')
_PLAIN = re.compile(r"[\w/.:@%+~=-]+")

_ID = r"(?:0|[1-9][0-9]{0,9})"
_NUMBER = re.compile(_ID)
_VIEW_RANGE = re.compile(rf"({_ID})-({_ID})")
_VIEW_IDS = re.compile(rf"{_ID}(?::{_ID}(?::{_ID}(?:\+{_ID})*)?)?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]*\$?")
_GIDS = re.compile(rf"{_ID}(?::{_ID})*")
_UUID = re.compile(r"(?:[:.-]*[0-9A-Fa-f]){32}[:.-]*")
_HOST = re.compile(r"(?:[A-Za-z0-9_.*?-]|\[[A-Za-z0-9_!^-]+\])+")
_NETGROUP = re.compile(r"@[!-~]+")

_KINDS: dict[str, Kind] = {"uid": "uid", "gid": "gid"}
_ACTIONS: dict[str, Action] = {"map": "map", "squash": "squash"}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([1-9][0-9]{0,9})([KMG]?)")
_MOST_BYTES = 1 << 40
_COUNT = re.compile(r"[1-9][0-9]{0,6}")
_NUMERIC = "+-0123456789"  # what a number may begin with, well-formed or not
_LARGEST = {"-1": MAX_ID}
_NOBODY = {str(NOBODY): NOBODY}

_EXPECTED_ID = f"a number from 0 to {MAX_ID}"
_EXPECTED_SIZE = "a number of bytes up to 1024G, such as 65536, 64K or 4M"
_EXPECTED_COUNT = "a number from 1 to 9999999"
_EXPECTED_MASK = "a mask: + or - and three octal digits, such as +007"
_EXPECTED_VIEW = "a user name, uid, uid:gid, uid:gid:gid+gid or low-high"
_EXPECTED_CLIENT = "a host name, a wildcard, an address, a network, @netgroup or *"


def parse(text: str, file: str = "<text>") -> tuple[list[Export], list[ExportsWarning]]:
    """Return the exports that text defines, one per path and client, and what to warn about.

    file is the name that locations carry. Raises ExportsError for the first error.
    """
    exports, warnings, errors = parse_all(text, file)
    if errors:
        raise errors[0]
    return exports, warnings


def parse_all(text: str, file: str = "<text>") -> tuple[list[Export], list[ExportsWarning], list[ExportsError]]:
    """Return exports, warnings and all errors; an entry with an error counts for nothing but that error."""
    scan = _Scanner(text, file)
    exports: list[Export] = []
    warnings: list[ExportsWarning] = []
    errors: list[ExportsError] = []
    seen: dict[tuple[str, str], Location] = {}
    while scan.next_entry():
        scan.warnings = []
        try:
            entry = _entry(scan)
            _check_repeats(entry, seen)
        except ExportsError as error:
            errors.append(error)
            scan.skip(_REST_OF_LOGICAL_LINE)
        else:
            exports += entry
            warnings += scan.warnings
    return exports, warnings, errors


def parse_options(text: str, file: str = "-o", *, read_only: bool = False) -> tuple[Options, list[ExportsWarning]]:
    """Return the options in a bare list, as given to ``mount -o``, and what to warn about.

    read_only is what holds if the list has neither ro nor rw. Raises ExportsError.
    """
    scan = _Scanner(text, file)
    draft = _Draft(read_only=read_only)
    scan.skip(_BLANK)
    if scan.pos < len(text):
        _OptionList(scan, draft, closer="", spaced=True).read()
    if scan.pos < len(text):
        raise scan.unexpected("the end of the options")
    return draft.finish(scan.warnings), scan.warnings


def format_exports(exports: Iterable[Export]) -> str:
    """Return exports as the text of a file; parsing it yields equal exports again."""
    return "".join(f"{format_export(export)}\n" for export in exports)


def format_export(export: Export) -> str:
    """Return an export as one entry, without a line break at its end."""
    options = export.options
    between, inside = ",", " "
    if options.range_map or options.cloak_list or options.views or options.view_access:
        between, inside = ", \\\n    ", " \\\n        "
    return f"{_quoted(export.path)} {export.client}({between.join(_items(options, inside))})"


def format_options(options: Options) -> str:
    """Return options as one line for ``mount -o``; parse_options yields equal options again."""
    return ",".join(_items(options, " "))


def _items(options: Options, space: str) -> list[str]:
    items = ["ro" if options.read_only else "rw"]
    if options.squash != "root":
        items.append({"none": "no_root_squash", "all": "all_squash"}[options.squash])
    if options.anonuid != DEFAULT_NOBODY:
        items.append(f"anonuid={options.anonuid}")
    if options.anongid != DEFAULT_NOBODY:
        items.append(f"anongid={options.anongid}")
    items += [name if value is None else f"{name}={_quoted(value)}" for name, value in options.other]
    for name, value in (("groups", options.groups), ("policy", options.policy)):
        if value is not None:
            items.append(f"{name}={_quoted(value)}")
    if options.no_client_cache:
        items.append("no_client_cache")
    if options.prefetch != DEFAULT_PREFETCH:
        items.append(f"prefetch={options.prefetch}")
    for name, limit in _LIMITS.items():
        value = getattr(options.prefetch_limits, limit)
        if value != getattr(Limits(), limit):
            items.append(f"{name}={_with_unit(value) if name in _BYTES else value}")
    for name in ("range_map", "cloak_list", "views", "view_access"):
        terms = getattr(options, name)
        if terms:
            items.append(space.join([f"{name} =", *map(str, terms)]))
    return items


def _with_unit(amount: int) -> str:
    for unit, factor in reversed(_UNITS.items()):
        if amount % factor == 0 and amount:
            return f"{amount // factor}{unit}"
    return str(amount)


def _quoted(text: str) -> str:
    """Return text so that _Scanner.string reads it back: in quotes and with octal escapes if need be."""
    if _PLAIN.fullmatch(text):
        return text
    parts = ['"']
    for character in text:
        if character.isprintable() and character not in '"\\':
            parts.append(character)
        else:
            parts += [f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape")]
    return "".join([*parts, '"'])


def _shown(text: str) -> str:
    """Return text for a message: quoted, on one line, and cut off where it gets long."""
    return repr(text if len(text) <= 60 else text[:60] + "…")


class _Scanner:
    """A position in a text, and the ways of moving it forward."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.pos = 0
        self.warnings: list[ExportsWarning] = []
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def location(self) -> Location:
        line = bisect_right(self._lines, self.pos)
        return Location(self.file, line, self.pos - self._lines[line - 1] + 1)

    def warn(self, location: Location, message: str) -> None:
        self.warnings.append(ExportsWarning(location, message))

    def peek(self) -> str:
        """Return the next character, "" at the end of the text."""
        return self.text[self.pos : self.pos + 1]

    def at_end(self) -> bool:
        """Return whether the logical line ends here, perhaps with a comment."""
        return self.peek() in ("", "\n", "#")

    def at_space(self) -> bool:
        return self.peek() in _SPACE or self.text.startswith("\\\n", self.pos)

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Move behind what matches pattern here, and return it."""
        match = pattern.match(self.text, self.pos)
        if match is None:
            return ""
        self.pos = match.end()
        return match.group()

    def next_entry(self) -> bool:
        """Move to the next logical line that has something on it; return whether there is one."""
        self.skip(_BLANK_LINES)
        return self.pos < len(self.text)

    def unexpected(self, expected: str) -> ExportsError:
        """Return the error that something else stands here."""
        at = self.peek()
        if at == "":
            problem = "the text ends here"
        elif at == "\n":
            problem = "the line ends here"
        elif at == "#":
            problem = "a comment begins here"
        elif at == "\\":
            problem = "a backslash that neither ends its line nor begins an octal escape"
        else:
            word = _WORD.match(self.text, self.pos)
            problem = f"unexpected {_shown(word.group() if word else at)}"
        return ExportsError(self.location(), problem, expected)

    def string(self, stops: str) -> str:
        """Return the string that begins here and goes on to white space or one of stops.

        As in exports(5), double quotes may surround any part of it and ``\\040`` stands for a byte.
        Bytes that are not UTF-8 become lone surrogates, as file names do elsewhere in Python.
        """
        data = bytearray()
        quoted = False
        opened = self.location()
        while True:
            character = self.peek()
            if character in ("", "\n") or (quoted and self.text.startswith("\\\n", self.pos)):
                if quoted:
                    raise ExportsError(opened, "a quoted string is not closed on its line", 'a closing "')
                break
            if not quoted and (character in stops or self.at_space()):
                break
            escape = _OCTAL.match(self.text, self.pos)
            if character == "\0" or (escape and escape.group() == "\\000"):
                raise ExportsError(self.location(), "a NUL character", "a string without")
            if escape:
                data.append(int(escape.group()[1:], 8))
                self.pos = escape.end()
            elif character == "\\":
                raise self.unexpected("three octal digits behind it, such as \\040")
            elif character == '"':
                quoted = not quoted
                opened = self.location()
                self.pos += 1
            else:
                try:
                    data += character.encode("utf-8", "surrogateescape")
                except UnicodeEncodeError:
                    raise self.unexpected("text") from None
                self.pos += 1
        return data.decode("utf-8", "surrogateescape")


def _check_repeats(entry: list[Export], seen: dict[tuple[str, str], Location]) -> None:
    """Raise ExportsError if an export is in seen already, else add those of the entry to it."""
    added: dict[tuple[str, str], Location] = {}
    for export in entry:
        path = "/".join(part for part in export.path.split("/") if part not in ("", "."))
        key = path, export.client.lower()
        before = seen.get(key) or added.get(key)
        if before:
            problem = f"{_shown(export.path)} is exported to {export.client} already, at {before}"
            raise ExportsError(export.location, problem, "each client once for a path")
        added[key] = export.location
    seen |= added


def _entry(scan: _Scanner) -> list[Export]:
    """Read one logical line."""
    start = scan.location()
    path = scan.string("(#")
    if not path.startswith("/"):
        raise ExportsError(start, f"{_shown(path)} is not an absolute path", "a path that begins with /")
    if scan.peek() in ("(", "#"):
        raise scan.unexpected("white space behind the path, or quotes around it")
    exports = []
    defaults = _Draft()
    while True:
        scan.skip(_BLANK)
        if scan.at_end():
            break
        where = scan.location()
        if scan.peek() == "-":
            scan.pos += 1
            _OptionList(scan, defaults, closer="", spaced=False).read()
            continue
        client = scan.skip(_CLIENT)
        options = defaults.copy()
        if client:
            _check_client(client, where)
        elif scan.peek() == "(":
            scan.warn(where, "options without a client, so they hold for every client (*)")
            client = "*"
        else:
            raise scan.unexpected(_EXPECTED_CLIENT)
        if scan.peek() == "(":
            scan.pos += 1
            scan.skip(_BLANK)
            if scan.peek() != ")":
                _OptionList(scan, options, closer=")", spaced=True).read()
            scan.pos += 1
        if not (scan.at_space() or scan.peek() in ("", "\n")):
            raise scan.unexpected("white space behind a client and its options")
        exports.append(Export(path, client, options.finish(scan.warnings), where))
    if not exports:
        scan.warn(start, "no client is named, so this is exported to every client (*)")
        exports.append(Export(path, "*", defaults.finish(scan.warnings), start))
    return exports


def _check_client(client: str, where: Location) -> None:
    """Raise ExportsError unless client is in the form of exports(5), "Machine Name Formats"."""
    if client.startswith("@"):
        good = _NETGROUP.fullmatch(client) is not None
    elif "/" in client:
        good = client in ("gss/krb5", "gss/krb5i", "gss/krb5p") or _is_network(client)
    elif ":" in client or client.strip("0123456789.") == "":
        good = _is_address(client)
    else:
        good = _HOST.fullmatch(client) is not None
    if not good:
        raise ExportsError(where, f"{_shown(client)} is not a client", _EXPECTED_CLIENT)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_network(text: str) -> bool:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return False
    mask = text.partition("/")[2]
    # Python would also take an inverted mask such as 0.0.0.255, which exports(5) applies as it stands.
    return mask.isdigit() or mask == str(network.netmask)


@dataclass
class _Draft:
    """Options in the making."""

    read_only: bool = True
    root_squash: bool = True
    all_squash: bool = False
    ids: dict[str, int] = field(default_factory=dict)
    range_map: list[tuple[RangeDef, Location]] = field(default_factory=list)
    cloak_list: list[tuple[CloakDef, Location]] = field(default_factory=list)
    no_client_cache: bool = False
    groups: str | None = None
    policy: str | None = None
    views: tuple[str, ...] = ()
    view_access: tuple[str, ...] = ()
    prefetch: str = DEFAULT_PREFETCH
    limits: dict[str, int] = field(default_factory=dict)
    other: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    squash_options: dict[str, Location] = field(default_factory=dict)

    def copy(self) -> _Draft:
        """Return options that begin with these and can be changed on their own."""
        return replace(
            self,
            ids=dict(self.ids),
            limits=dict(self.limits),
            other=dict(self.other),
            squash_options=dict(self.squash_options),
        )

    def finish(self, warnings: list[ExportsWarning]) -> Options:
        """Return the options, and add to warnings what only their combination shows."""
        warnings += self._warnings()
        return Options(
            read_only=self.read_only,
            # all_squash outdoes no_root_squash, as in the kernel's server.
            squash="all" if self.all_squash else "root" if self.root_squash else "none",
            anonuid=self.ids.get("anonuid", DEFAULT_NOBODY),
            anongid=self.ids.get("anongid", DEFAULT_NOBODY),
            range_map=tuple(definition for definition, _ in self.range_map),
            cloak_list=tuple(definition for definition, _ in self.cloak_list),
            no_client_cache=self.no_client_cache,
            groups=self.groups,
            policy=self.policy,
            views=self.views,
            view_access=self.view_access,
            prefetch=self.prefetch,
            prefetch_limits=Limits(**self.limits),
            other=tuple(self.other.values()),
        )

    def _warnings(self) -> list[ExportsWarning]:
        """[SZ] is silent on overlaps; the first definition wins, so say what that makes of the others."""
        found = []
        anonymous = {kind: self.ids.get(f"anon{kind}", DEFAULT_NOBODY) for kind in _KINDS}
        # Equal definitions may stand in several places; identity tells them apart.
        places = {id(definition): where for definition, where in (*self.range_map, *self.cloak_list)}
        for kind in _KINDS:
            defs = [definition for definition, _ in self.range_map if definition.kind == kind]
            if not defs:
                continue
            nobody = anonymous[kind]
            closed = mapping.is_closed(defs)
            for option, where in self.squash_options.items() if closed else ():
                message = f"{option} plays no part for {kind}s, because range_map maps {kind}s"
                found.append(ExportsWarning(where, message))
            for later, earlier, direction, completely in mapping.shadowed(defs, nobody):
                ids = "client ids" if direction == "forward" else "server ids"
                taken = "all" if completely else "some"
                message = (
                    f"'{later}' loses {taken} of its {ids} ({direction} mapping) to '{earlier}'"
                    f" at {places[id(earlier)]}: the first definition wins"
                )
                found.append(ExportsWarning(places[id(later)], message))
            table = IdMap(defs, nobody=nobody)
            shown_as_root = table.reverse_definition_of(nobody)
            if shown_as_root and table.reverse(nobody) == 0:
                message = (
                    f"'{shown_as_root}' shows what belongs to server {kind} {nobody} (nobody) to clients as"
                    f" {kind} 0 (root)"
                )
                found.append(ExportsWarning(places[id(shown_as_root)], message))
            if kind == "uid":
                found += [
                    ExportsWarning(
                        places[id(d)], f"'{d}' makes somebody who is not root on a client root on the server"
                    )
                    for d in defs
                    if _makes_root(d, nobody)
                ]
        found += self._claimed_gids(places)
        selections = [definition for definition, _ in self.cloak_list]
        for hidden, first in cloak.shadowed(selections, nobody_uid=anonymous["uid"], nobody_gid=anonymous["gid"]):
            message = (
                f"'{hidden}' never selects a file, '{first}' at {places[id(first)]}"
                " comes before it: the first definition wins"
            )
            found.append(ExportsWarning(places[id(hidden)], message))
        return found

    def _claimed_gids(self, places: dict[int, Location]) -> list[ExportsWarning]:
        """Where a client's users are somebody else here, and its groups are not."""
        uids = [definition for definition, _ in self.range_map if definition.kind == "uid"]
        gids = [definition for definition, _ in self.range_map if definition.kind == "gid"]
        if not mapping.is_closed(uids) or mapping.is_closed(gids) or self.all_squash or self.views:
            return []
        if not any(IdMap(gids).counterpart(gid, "forward") for gid in (1, *(d.rm_high + 1 for d in gids))):
            return []
        message = (
            "uids are mapped but gids are not: whatever gid a client claims counts as the server's;"
            " map gids, too, or add gid 0 -1 squash -2"
        )
        return [ExportsWarning(places[id(uids[0])], message)]


def _makes_root(definition: RangeDef, nobody: int) -> bool:
    """Does it make root of a client id that is not root's?"""
    low, _ = definition.server_range(nobody)
    return low == 0 and (definition.rm_high if definition.action == "squash" else definition.rm_low) != 0


def describe_kinds(options: Options) -> str:
    """Return what becomes of ids that no definition names: for each kind, whether it is open or closed."""
    said = []
    for kind in _KINDS:
        defs = [definition for definition in options.range_map if definition.kind == kind]
        if mapping.is_closed(defs):
            said.append(f"{kind}s are closed: who is in no definition is nobody")
        else:
            becomes = {
                "root": "stays as it is, but root is nobody (root_squash)",
                "none": "stays as it is (no_root_squash)",
                "all": "is nobody (all_squash)",
            }[options.squash]
            said.append(f"{kind}s are open: {'who is in no definition' if defs else 'everybody'} {becomes}")
    return "; ".join(said)


class _OptionList:
    """Reads one list of options into a draft.

    It ends at closer, or if that is "", at the end of the line. White space inside is allowed if spaced,
    and else ends it too.
    """

    def __init__(self, scan: _Scanner, draft: _Draft, *, closer: str, spaced: bool) -> None:
        self.scan = scan
        self.draft = draft
        self.closer = closer
        self.spaced = spaced
        self.given: dict[str, str] = {}

    def read(self) -> None:
        scan = self.scan
        while True:
            self.blank()
            where = scan.location()
            name = scan.skip(_WORD)
            if not name:
                raise scan.unexpected("an option" + (" or a backslash at the end of the line" if self.closer else ""))
            self.option(name, where)
            self.blank()
            if self.closed():
                return
            if scan.peek() != ",":
                raise scan.unexpected(self.continuation())
            scan.pos += 1

    def blank(self) -> None:
        if self.spaced:
            self.scan.skip(_BLANK)

    def closed(self) -> bool:
        if self.closer:
            return self.scan.peek() == self.closer
        return self.scan.peek() in ("", "\n") or (not self.spaced and self.scan.at_space())

    def continuation(self) -> str:
        return "',', ')' or a backslash at the end of the line" if self.closer else "','"

    def option(self, name: str, where: Location) -> None:
        """Read the rest of the option whose name has just been read."""
        family = _FAMILY.get(name)
        if family is None:
            near = difflib.get_close_matches(name[:40].lower(), _FAMILY)
            expected = f"perhaps {' or '.join(near)}" if near else "an option of exports(5) or of cloakfs"
            raise ExportsError(where, f"unknown option {_shown(name)}", expected)
        self.blank()
        has_value = self.scan.peek() == "="
        if has_value and name in _FLAG_FAMILY:
            raise self.scan.unexpected(f"no value: {name} takes none")
        before = self.given.get(family)
        if before:
            if name in _ONCE:
                raise ExportsError(where, f"{name} is given twice", "it once")
            self.scan.warn(where, f"{name} after {before} in the same list: the last one counts")
        self.given[family] = name
        if not has_value and name not in _FLAG_FAMILY and family not in _PERHAPS_VALUES:
            raise self.scan.unexpected(f"'=' and the value of {name}")
        if has_value:
            self.scan.pos += 1
            self.blank()
            self.value(name, family)
        else:
            self.flag(name, family, where)

    def flag(self, name: str, family: str, where: Location) -> None:
        draft = self.draft
        match name:
            case "ro" | "rw":
                draft.read_only = name == "ro"
            case "root_squash" | "no_root_squash":
                draft.root_squash = name == "root_squash"
                draft.squash_options[name] = where
            case "all_squash" | "no_all_squash":
                draft.all_squash = name == "all_squash"
                draft.squash_options[name] = where
            case "no_client_cache":
                draft.no_client_cache = True
            case _:
                self.other(name, family, None)

    def other(self, name: str, family: str, value: str | None) -> None:
        self.draft.other.pop(family, None)  # so that it moves to the end
        self.draft.other[family] = name, value

    def value(self, name: str, family: str) -> None:
        draft = self.draft
        match name:
            case "range_map":
                draft.range_map = self.range_map()
            case "cloak_list":
                draft.cloak_list = self.cloak_list()
            case "views":
                draft.views = self.items(name, _EXPECTED_VIEW, _is_view)
            case "view_access":
                draft.view_access = self.items(name, _EXPECTED_ID, _is_id)
            case "anonuid" | "anongid":
                draft.ids[name] = int(self.single(name))
            case "groups":
                draft.groups = self.single(name)
            case "policy":
                draft.policy = self.single(name)
            case "prefetch":
                draft.prefetch = self.single(name)
            case _ if name in _LIMITS:
                draft.limits[_LIMITS[name]] = _amount(self.single(name))
            case _:
                self.other(name, family, self.single(name))

    def single(self, name: str) -> str:
        """Read a value that is one string."""
        scan = self.scan
        where = scan.location()
        valid, expected = _SINGLE_VALUES[name]
        value = scan.string(",()#")
        if scan.location() == where:
            raise scan.unexpected(expected)
        if not valid(value):
            raise ExportsError(where, f"bad value of {name}, {_shown(value)}", expected)
        return value

    def word(self, expected: str) -> tuple[str, Location]:
        """Read a term of a list."""
        self.blank()
        where = self.scan.location()
        word = self.scan.skip(_WORD)
        if not word:
            raise self.scan.unexpected(expected)
        return word, where

    def more(self, begin: str = "") -> bool:
        """Return whether another term follows, and begins with one of these characters if given any."""
        self.blank()
        match = _WORD.match(self.scan.text, self.scan.pos)
        return match is not None and (not begin or match.group()[0] in begin)

    def items(self, name: str, expected: str, valid: Callable[[str], bool]) -> tuple[str, ...]:
        """Read a list of distinct terms, at least one."""
        items: list[str] = []
        while not items or self.more():
            word, where = self.word(expected)
            if not valid(word):
                raise ExportsError(where, f"{_shown(word)} does not belong into {name}", expected)
            if word in items:
                raise ExportsError(where, f"{_shown(word)} is in {name} twice", "it once")
            items.append(word)
        return tuple(items)

    def kind(self) -> tuple[Kind, Location]:
        word, where = self.word("a definition, which begins with uid or gid")
        kind = _KINDS.get(word)
        if kind is None:
            raise ExportsError(where, f"unexpected {_shown(word)}", "uid or gid")
        return kind, where

    def number(self, what: str, special: dict[str, int]) -> int:
        """Read an id; special are the further words for it."""
        expected = f"{what}: {_EXPECTED_ID}" + "".join(f", or {word}" for word in special)
        word, where = self.word(expected)
        if word in special:
            return special[word]
        if not _is_id(word):
            raise ExportsError(where, f"{_shown(word)} is not an id", expected)
        return int(word)

    def range_map(self) -> list[tuple[RangeDef, Location]]:
        defs: list[tuple[RangeDef, Location]] = []
        while not defs or self.more():
            kind, where = self.kind()
            low = high = self.number("rm-low, the first client id", {})
            if self.more(_NUMERIC):
                high = self.number("rm-high, the last client id", _LARGEST)
            word, place = self.word("map or squash")
            action = _ACTIONS.get(word)
            if action is None:
                raise ExportsError(place, f"unexpected {_shown(word)}", "map or squash")
            server = self.number("lc-low, the first server id", _NOBODY)
            with _located(where):
                defs.append((RangeDef(kind, low, high, action, server), where))
        return defs

    def cloak_list(self) -> list[tuple[CloakDef, Location]]:
        defs: list[tuple[CloakDef, Location]] = []
        while not defs or self.more():
            kind, where = self.kind()
            word, place = self.word(_EXPECTED_MASK)
            try:
                mask = Mask.parse(word)
            except ValueError:
                raise ExportsError(place, f"{_shown(word)} is not a mask", _EXPECTED_MASK) from None
            low = high = self.number("lc-low, the first server id", _NOBODY)
            if self.more(_NUMERIC):
                high = self.number("lc-high, the last server id", _LARGEST)
            with _located(where):
                defs.append((CloakDef(kind, mask, low, high), where))
        return defs


@contextmanager
def _located(where: Location) -> Iterator[None]:
    """Turn the ValueError of a definition that begins at where into an ExportsError."""
    try:
        yield
    except ValueError as error:
        expected = f"a range from 0 to {MAX_ID}, its lower end first"
        raise ExportsError(where, f"bad definition, {error}", expected) from None


def _is_id(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and int(text) <= MAX_ID


def _are_ids(text: str) -> bool:
    return all(_is_id(part) for part in re.split("[:+]", text))


def _is_view(text: str) -> bool:
    ends = _VIEW_RANGE.fullmatch(text)
    if ends:
        return int(ends[1]) <= int(ends[2]) <= MAX_ID
    if _VIEW_IDS.fullmatch(text):
        return _are_ids(text)
    return _USER.fullmatch(text) is not None


def _is_groups(text: str) -> bool:
    return text in ("proc", "database", "none") or (_GIDS.fullmatch(text) is not None and _are_ids(text))


def _amount(text: str) -> int:
    match = _SIZE.fullmatch(text)
    return int(match[1]) * _UNITS.get(match[2], 1) if match else 0


def _is_size(text: str) -> bool:
    return 0 < _amount(text) <= _MOST_BYTES


def _is_count(text: str) -> bool:
    return _COUNT.fullmatch(text) is not None


def _is_policy(text: str) -> bool:
    module, _, name = text.rpartition(":")
    stem = module.rpartition("/")[2].removesuffix(".py")
    is_file = module.endswith(".py") and stem != ""
    return name.isidentifier() and (is_file or all(part.isidentifier() for part in module.split(".")))


def _is_fsid(text: str) -> bool:
    if text == "root" or _UUID.fullmatch(text):
        return True
    return _NUMBER.fullmatch(text) is not None and int(text) < 2**32


def _all_in(words: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda text: all(part in words for part in text.split(":"))


def _is_location(text: str) -> bool:
    return text.startswith("/") and "@" in text


def _is_absolute(text: str) -> bool:
    return text.startswith("/")


_SINGLE_VALUES: dict[str, tuple[Callable[[str], bool], str]] = {
    "anonuid": (_is_id, _EXPECTED_ID),
    "anongid": (_is_id, _EXPECTED_ID),
    "groups": (_is_groups, "proc, database, none or gids joined by colons"),
    "policy": (_is_policy, "FILE.py:Class or package.module:Class"),
    "prefetch": (lambda text: text in ("off", *HEURISTICS), f"one of {', '.join(HEURISTICS)}, off"),
    **dict.fromkeys(_BYTES, (_is_size, _EXPECTED_SIZE)),
    **dict.fromkeys(_COUNTS, (_is_count, _EXPECTED_COUNT)),
    "fsid": (_is_fsid, "a number, root or a UUID of 32 hexadecimal digits"),
    "sec": (_all_in(_FLAVORS), f"some of {', '.join(_FLAVORS)}, joined by colons"),
    "xprtsec": (_all_in(_TRANSPORTS), f"some of {', '.join(_TRANSPORTS)}, joined by colons"),
    "reexport": (lambda text: text in _REEXPORTS, " or ".join(_REEXPORTS)),
    "refer": (_is_location, "/path@host"),
    "replicas": (_is_location, "/path@host"),
    "mountpoint": (_is_absolute, "an absolute path"),
    "mp": (_is_absolute, "an absolute path"),
}
