"""Values that are lists of terms: definitions, views, uids."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..cloak import CloakDef, Mask
from ..ids import ClientId, ServerId
from ..mapping import KINDS, MAX_ID, NOBODY, Action, Kind, RangeDef
from .errors import ExportsError, Location, shown
from .scanner import BLANK, WORD, Scanner
from .values import EXPECTED_ID, is_id

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


class Terms:
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
