"""Parses the text of exports.d files.

A file consists of entries, one per logical line (a backslash at the end of a line continues it):

    PATH [-OPTION,OPTION] CLIENT[(OPTION, OPTION, ...)] ...

Everything that violates the grammar is an error with its place; nothing is guessed.
"""

import re

from .draft import Draft
from .errors import ExportsError, ExportsWarning, shown
from .lint import exported_already, key_of, refuse_contradictions, warnings_about
from .optionlist import OptionList
from .options import Export, Options
from .scanner import BLANK, Scanner
from .values import EXPECTED_CLIENT, is_client

_CLIENT = re.compile(r'[^ \t\r\v\f\n()"#\\]*')
_REST_OF_LOGICAL_LINE = re.compile(r"(?:[^\n]*\\\n)*+[^\n]*")


def parse(text: str, file: str = "<text>") -> tuple[list[Export], list[ExportsWarning]]:
    """Return the exports that text defines, one per path and client, and the warnings.

    file is the file name for locations. Raises ExportsError for the first error.
    """
    exports, warnings, errors = parse_all(text, file)
    if errors:
        raise errors[0]
    return exports, warnings


def parse_all(text: str, file: str = "<text>") -> tuple[list[Export], list[ExportsWarning], list[ExportsError]]:
    """Return exports, warnings and all errors; an entry with an error contributes nothing but that error."""
    scan = Scanner(text, file)
    exports: list[Export] = []
    warnings: list[ExportsWarning] = []
    errors: list[ExportsError] = []
    seen: dict[tuple[str, str], Export] = {}
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
    """Return the options in a bare list, as given to ``mount -o``, and the warnings.

    read_only applies if the list has neither ro nor rw. Raises ExportsError.
    """
    scan = Scanner(text, file)
    draft = Draft(Options(read_only=read_only))
    scan.skip(BLANK)
    if scan.pos < len(text):
        OptionList(scan, draft, closer="", spaced=True).read()
    if scan.pos < len(text):
        raise scan.unexpected("the end of the options")
    return _finished(draft, scan), scan.warnings


def _finished(draft: Draft, scan: Scanner, client: str = "") -> Options:
    refuse_contradictions(draft, client)
    scan.warnings += warnings_about(draft)
    return draft.finish()


def _check_repeats(entry: list[Export], seen: dict[tuple[str, str], Export]) -> None:
    """Raise ExportsError if an export is already in seen; otherwise add the exports of the entry to it."""
    added: dict[tuple[str, str], Export] = {}
    for export in entry:
        key = key_of(export)
        before = seen.get(key) or added.get(key)
        if before:
            raise exported_already(export, before)
        added[key] = export
    seen |= added


def _entry(scan: Scanner) -> list[Export]:
    """Read one logical line."""
    start = scan.location()
    path = _path(scan)
    exports = []
    defaults = Draft()
    while True:
        scan.skip(BLANK)
        if scan.at_end():
            break
        where = scan.location()
        if scan.peek() == "-":
            scan.pos += 1
            OptionList(scan, defaults, closer="", spaced=False).read()
        else:
            client = _client(scan)
            options = _options_of_client(scan, defaults)
            exports.append(Export(path, client, _finished(options, scan, client), where))
    if not exports:
        scan.warn(start, "no client is named, so this is exported to every client (*)")
        exports.append(Export(path, "*", _finished(defaults, scan), start))
    return exports


def _path(scan: Scanner) -> str:
    """Read the path at the beginning of a line."""
    start = scan.location()
    path = scan.string("(#")
    if not path.startswith("/"):
        raise ExportsError(start, f"{shown(path)} is not an absolute path", "a path that begins with /")
    if scan.peek() in ("(", "#"):
        raise scan.unexpected("white space after the path, or quotes around it")
    return path


def _client(scan: Scanner) -> str:
    """Read a client; options without one are for every client."""
    where = scan.location()
    client = scan.skip(_CLIENT)
    if client:
        if not is_client(client):
            raise ExportsError(where, f"{shown(client)} is not a client", EXPECTED_CLIENT)
        return client
    if scan.peek() != "(":
        raise scan.unexpected(EXPECTED_CLIENT)
    scan.warn(where, "options without a client, so they apply to every client (*)")
    return "*"


def _options_of_client(scan: Scanner, defaults: Draft) -> Draft:
    """Read the options in parentheses after a client, if there are any; they are added to those of the line."""
    options = defaults.copy()
    if scan.peek() == "(":
        scan.pos += 1
        scan.skip(BLANK)
        if scan.peek() != ")":
            OptionList(scan, options, closer=")", spaced=True).read()
        scan.pos += 1
    if not (scan.at_space() or scan.peek() in ("", "\n")):
        raise scan.unexpected("white space after a client and its options")
    return options
