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
_LARGEST = {"-1": MAX_ID}
_NOBODY: dict[str, int] = {str(NOBODY): NOBODY}
_EXPECTED_MASK = "a mask: + or - and three octal digits, such as +007"


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
                raise ExportsError(where, f"{shown(word)} does not belong in {name}", expected)
            if item in items:
                raise ExportsError(where, f"{shown(word)} is in {name} twice", "it once")
            items[item] = None
        return tuple(items)

    def range_map(self) -> list[tuple[RangeDef, Location]]:
        """Read the definitions of a range_map, each with its place."""
        defs: list[tuple[RangeDef, Location]] = []
        while not defs or self._more():
            kind, where = self._kind()
            low = high = self._number("rm-low, the first client id", {})
            if self._more(_NUMERIC):
                high = self._number("rm-high, the last client id", _LARGEST)
            word, place = self._word("map or squash")
            action = _ACTIONS.get(word)
            if action is None:
                raise ExportsError(place, f"unexpected {shown(word)}", "map or squash")
            server = self._number("lc-low, the first server id", _NOBODY)
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
                raise ExportsError(place, f"{shown(word)} is not a mask", _EXPECTED_MASK) from None
            low = high = self._number("lc-low, the first server id", _NOBODY)
            if self._more(_NUMERIC):
                high = self._number("lc-high, the last server id", _LARGEST)
            with _located(where):
                defs.append((CloakDef(kind, mask, ServerId(low), ServerId(high)), where))
        return defs

    def _word(self, expected: str) -> tuple[str, Location]:
        """Read a term of a list."""
        self.blank()
        where = self._scan.location()
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
        word, where = self._word("a definition, which begins with uid or gid")
        kind = _KINDS.get(word)
        if kind is None:
            raise ExportsError(where, f"unexpected {shown(word)}", "uid or gid")
        return kind, where

    def _number(self, what: str, special: dict[str, int]) -> int:
        """Read an id; special holds further words that are allowed, with their values."""
        expected = f"{what}: {EXPECTED_ID}" + "".join(f", or {word}" for word in special)
        word, where = self._word(expected)
        if word in special:
            return special[word]
        if not is_id(word):
            raise ExportsError(where, f"{shown(word)} is not an id", expected)
        return int(word)


@contextmanager
def _located(where: Location) -> Iterator[None]:
    """Turn the ValueError of a definition that begins at where into an ExportsError."""
    try:
        yield
    except ValueError as error:
        expected = f"a range from 0 to {MAX_ID}, its lower end first"
        raise ExportsError(where, f"bad definition, {error}", expected) from None
