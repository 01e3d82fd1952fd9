"""Reads a list of options into a draft: their names, values that are one string, and values that are lists of terms."""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from ..cloak import CloakDef, Mask
from ..identity import ClientId, ServerId
from ..mapping import KINDS, MAX_ID, NOBODY, Action, Kind, RangeDef
from ..probes import Rate
from .draft import Draft
from .errors import ExportsError, Location, shown
from .optionnames import FAMILY, FLAG_FAMILY, LIMITS, ONCE, PERHAPS_VALUES
from .scanner import BLANK, WORD, Scanner
from .values import EXPECTED_ID, SINGLE_VALUES, amount_of, is_id, parse_client_id, parse_server_id
from .viewitems import EXPECTED_VIEW, parse_view

_T = TypeVar("_T")

_KINDS: dict[str, Kind] = {kind: kind for kind in KINDS}
_ACTIONS: dict[str, Action] = {"map": "map", "squash": "squash"}
_NUMERIC = "+-0123456789"  # what a number may begin with, well-formed or not
_EXPECTED_MASK = "a mask: + or - and three octal digits, such as +007"


class _Number:
    """An id in a definition: what may be written in its place."""

    def __init__(self, what: str, **special: int) -> None:
        self.special = special
        self.expected = f"{what}: {EXPECTED_ID}" + "".join(f", or {word}" for word in special)


_RM_LOW = _Number("rm-low, the first client id")
_RM_HIGH = _Number("rm-high, the last client id", **{"-1": MAX_ID})
_LC_LOW = _Number("lc-low, the first server id", **{str(NOBODY): NOBODY})
_LC_HIGH = _Number("lc-high, the last server id", **{"-1": MAX_ID})


class TermReader:
    """Reads one list of terms, with white space between them if spaced; otherwise it can have only one term."""

    def __init__(self, scan: Scanner, *, spaced: bool) -> None:
        self._scan = scan
        self._spaced = spaced

    def blank(self) -> None:
        """Skip white space, if it is allowed."""
        if self._spaced:
            self._scan.skip(BLANK)

    def items(self, name: str, expected: str, parse: Callable[[str], _T | None]) -> tuple[_T, ...]:
        """Read a list of distinct terms, at least one. parse returns None for a text that is no valid term."""
        items: dict[_T, None] = {}  # in order
        while not items or self._more():
            word, where = self._word(expected)
            item = parse(word)
            if item is None:
                raise ExportsError(self._scan.location(where), f"{shown(word)} does not belong in {name}", expected)
            if item in items:
                raise ExportsError(self._scan.location(where), f"{shown(word)} is in {name} twice", "it once")
            items[item] = None
        return tuple(items)

    def range_map(self) -> list[tuple[RangeDef, Location]]:
        """Read the definitions of a range_map, each with its place."""
        defs: list[tuple[RangeDef, Location]] = []
        while not defs or self._more():
            kind, where = self._kind()
            low = high = self._number(_RM_LOW)
            if self._more(_NUMERIC):
                high = self._number(_RM_HIGH)
            word, place = self._word("map or squash")
            action = _ACTIONS.get(word)
            if action is None:
                raise ExportsError(self._scan.location(place), f"unexpected {shown(word)}", "map or squash")
            server = self._number(_LC_LOW)
            with _located(where):
                defs.append((RangeDef(kind, ClientId(low), ClientId(high), action, ServerId(server)), where))
        return defs

    def cloak_list(self) -> list[tuple[CloakDef, Location]]:
        """Read the definitions of a cloak_list, each with its place."""
        defs: list[tuple[CloakDef, Location]] = []
        while not defs or self._more():
            kind, where = self._kind()
            word, place = self._word(_EXPECTED_MASK)
            try:
                mask = Mask.parse(word)
            except ValueError:
                at = self._scan.location(place)
                raise ExportsError(at, f"{shown(word)} is not a mask", _EXPECTED_MASK) from None
            low = high = self._number(_LC_LOW)
            if self._more(_NUMERIC):
                high = self._number(_LC_HIGH)
            with _located(where):
                defs.append((CloakDef(kind, mask, ServerId(low), ServerId(high)), where))
        return defs

    def _word(self, expected: str) -> tuple[str, int]:
        """Read a term of a list; return it and its position."""
        self.blank()
        where = self._scan.pos
        word = self._scan.skip(WORD)
        if not word:
            raise self._scan.unexpected(expected)
        return word, where

    def _more(self, begin: str = "") -> bool:
        """Return whether another term follows that begins with one of these characters, if any are given."""
        self.blank()
        match = WORD.match(self._scan.text, self._scan.pos)
        return match is not None and (not begin or match.group()[0] in begin)

    def _kind(self) -> tuple[Kind, Location]:
        word, pos = self._word("a definition, which begins with uid or gid")
        where = self._scan.location(pos)
        kind = _KINDS.get(word)
        if kind is None:
            raise ExportsError(where, f"unexpected {shown(word)}", "uid or gid")
        return kind, where

    def _number(self, number: _Number) -> int:
        word, where = self._word(number.expected)
        if word in number.special:
            return number.special[word]
        if not is_id(word):
            raise ExportsError(self._scan.location(where), f"{shown(word)} is not an id", number.expected)
        return int(word)


@contextmanager
def _located(where: Location) -> Iterator[None]:
    """Turn the ValueError of a definition that begins at where into an ExportsError."""
    try:
        yield
    except ValueError as error:
        expected = f"a range from 0 to {MAX_ID}, its lower end first"
        raise ExportsError(where, f"bad definition, {error}", expected) from None


class OptionList:
    """Reads one list of options into a draft.

    The list ends at closer, or at the end of the line if closer is "". If spaced, white space is allowed inside;
    otherwise, it ends the list, too.
    """

    def __init__(self, scan: Scanner, draft: Draft, *, closer: str, spaced: bool) -> None:
        self._scan = scan
        self._draft = draft
        self._closer = closer
        self._spaced = spaced
        self._terms = TermReader(scan, spaced=spaced)
        self._given: dict[str, str] = {}

    def read(self) -> None:
        """Read the whole list. Raises ExportsError."""
        scan = self._scan
        while True:
            self._terms.blank()
            where = scan.location()
            name = scan.skip(WORD)
            if not name:
                raise scan.unexpected("an option" + (" or a backslash at the end of the line" if self._closer else ""))
            self._option(name, where)
            self._terms.blank()
            if self._closed():
                return
            if scan.peek() != ",":
                raise scan.unexpected(self._continuation())
            scan.pos += 1

    def _closed(self) -> bool:
        if self._closer:
            return self._scan.peek() == self._closer
        return self._scan.peek() in ("", "\n") or (not self._spaced and self._scan.at_space())

    def _continuation(self) -> str:
        return "',', ')' or a backslash at the end of the line" if self._closer else "','"

    def _option(self, name: str, where: Location) -> None:
        """Read the rest of the option whose name has just been read."""
        family = FAMILY.get(name)
        if family is None:
            near = difflib.get_close_matches(name[:40].lower(), FAMILY)
            expected = f"perhaps {' or '.join(near)}" if near else "an option of exports(5) or of cloakfs"
            raise ExportsError(where, f"unknown option {shown(name)}", expected)
        self._terms.blank()
        has_value = self._scan.peek() == "="
        if has_value and name in FLAG_FAMILY:
            raise self._scan.unexpected(f"no value: {name} takes none")
        before = self._given.get(family)
        if before:
            if name in ONCE:
                raise ExportsError(where, f"{name} is given twice", "it once")
            self._scan.warn(where, f"{name} after {before} in the same list: the last one counts")
        self._given[family] = name
        if not has_value and name not in FLAG_FAMILY and family not in PERHAPS_VALUES:
            raise self._scan.unexpected(f"'=' and the value of {name}")
        if has_value:
            self._scan.pos += 1
            self._terms.blank()
            self._value(name, family)
        else:
            self._flag(name, family, where)

    def _flag(self, name: str, family: str, where: Location) -> None:
        draft = self._draft
        match name:
            case "ro" | "rw":
                draft.options = replace(draft.options, read_only=name == "ro")
            case "root_squash" | "no_root_squash":
                draft.root_squash = name == "root_squash"
                draft.places[name] = where
            case "all_squash" | "no_all_squash":
                draft.all_squash = name == "all_squash"
                draft.places[name] = where
            case "no_client_cache":
                draft.options = replace(draft.options, no_client_cache=True)
            case _:
                self._other(name, family, None)

    def _other(self, name: str, family: str, value: str | None) -> None:
        self._draft.other.pop(family, None)  # so that it moves to the end
        self._draft.other[family] = name, value

    def _value(self, name: str, family: str) -> None:  # noqa: C901, PLR0912  (a table: one case for each option)
        draft = self._draft
        match name:
            case "range_map":
                draft.range_map = self._terms.range_map()
            case "cloak_list":
                draft.cloak_list = self._terms.cloak_list()
            case "exempt":
                draft.places[name] = self._scan.location()
                draft.options = replace(draft.options, exempt=self._terms.items(name, EXPECTED_ID, parse_server_id))
            case "views":
                draft.options = replace(draft.options, views=self._terms.items(name, EXPECTED_VIEW, parse_view))
            case "view_access":
                draft.options = replace(
                    draft.options, view_access=self._terms.items(name, EXPECTED_ID, parse_client_id)
                )
            case "anonuid":
                draft.options = replace(draft.options, anonuid=ServerId(int(self._single(name))))
            case "anongid":
                draft.options = replace(draft.options, anongid=ServerId(int(self._single(name))))
            case "groups":
                draft.options = replace(draft.options, groups=self._single(name))
            case "policy":
                draft.options = replace(draft.options, policy=self._single(name))
            case "prefetch":
                draft.options = replace(draft.options, prefetch=self._single(name))
            case "probe_alarm":
                draft.options = replace(draft.options, probe_alarm=Rate.parse(self._single(name)))
            case "probe_delay":
                draft.places[name] = self._scan.location()
                value = self._single(name)
                draft.options = replace(draft.options, probe_delay=0 if value == "off" else int(value))
            case "refer":
                draft.places[name] = self._scan.location()
                self._other(name, family, self._single(name))
            case _ if name in LIMITS:
                limits = replace(draft.options.prefetch_limits, **{LIMITS[name]: amount_of(self._single(name))})
                draft.options = replace(draft.options, prefetch_limits=limits)
            case _:
                self._other(name, family, self._single(name))

    def _single(self, name: str) -> str:
        """Read a value that is one string."""
        scan = self._scan
        where = scan.location()
        valid, expected = SINGLE_VALUES[name]
        value = scan.string(",()#")
        if scan.location() == where:
            raise scan.unexpected(expected)
        if not valid(value):
            raise ExportsError(where, f"bad value of {name}, {shown(value)}", expected)
        return value
