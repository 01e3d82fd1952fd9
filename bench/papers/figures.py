"""Reads what the figures and experiments of the papers are: `figures.toml`, next to this.

That file has words, printed values, claims and numbers of runs; what measures and judges is code. In its texts,
`{name}` stands for a text of `[words]`, for one of the place (`[place.*]`), or for a constant that the code gives. In a
claim, `{x}` stands for each setting of the place in turn. A figure without claims is judged by a function.
"""

import functools
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from . import claims
from .claims import At, Claim, Sense
from .experiment import Experiment, Figure, FiguresError, Form, Judge, printed
from .sites import SETTINGS, Samples, experiment
from .trials import TRIALS

FILE = os.path.join(os.path.dirname(__file__), "figures.toml")

PLACES = {"": "local", "-nfs": "nfs"}
"""What the file calls the places where settings are measured together (`SETTINGS`)."""

_FIGURE: dict[str, type] = {
    "key": str, "paper": str, "place": str, "title": str, "claim": str, "unit": str, "x_label": str, "differs": str,
    "criterion": str, "paper_values": dict, "paper_note": str, "baseline": str, "form": str, "log_x": bool,
    "ours": str, "why": str, "claims": list, "setting_suffixes": dict,
}  # fmt: skip
_NEEDED = ("key", "paper", "place", "title", "claim", "unit", "x_label", "differs", "paper_note")
_CLAIM: dict[str, type] = {
    "says": str, "of": list, "to": list, "printed": object, "sense": str, "bound": bool, "only": str,
}  # fmt: skip
_EXPERIMENT: dict[str, type] = {"key": str, "trial": str, "local": dict, "nfs": dict}
_MEASURED: dict[str, type] = {"runs": int, "seconds": list, "quick": bool}


class Definitions:
    """What the file defines.

    Args:
        text: its content, as TOML.

    Raises:
        FiguresError: a key is unknown, missing or has a value of another type, or something is defined twice.
    """

    def __init__(self, text: str) -> None:
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as exc:
            raise FiguresError(str(exc)) from None
        _check("file", content, {"words": dict, "place": dict, "figure": list, "experiment": list})
        self._words: Mapping[str, str] = content.get("words", {})
        self._place_words: Mapping[str, Mapping[str, str]] = content.get("place", {})
        _check("place", self._place_words, dict.fromkeys(PLACES.values(), dict))
        self._figures = _by_key("figure", content.get("figure", []), _FIGURE, _NEEDED)
        self._experiments = _by_key("experiment", content.get("experiment", []), _EXPERIMENT, ("key", "trial"))
        for key, one in self._figures.items():
            for claim in one.get("claims", []):
                _check(f"figure {key}, claim", claim, _CLAIM, ("says", "of", "printed"))
            if ("claims" in one) == ("criterion" in one):
                raise FiguresError(f"figure {key}: expected either claims or a criterion")
        for key, one in self._experiments.items():
            for name in one.keys() & PLACES.values():
                _check(f"experiment {key}, {name}", one[name], _MEASURED, ("runs", "seconds"))

    def figure(
        self,
        key: str,
        suffix: str = "",
        judge: Judge | None = None,
        setting: str | None = None,
        constants: Mapping[str, object] = MappingProxyType({}),
    ) -> Figure:
        """Return a figure.

        Args:
            key: its key in the file.
            suffix: where it is measured, a key of SETTINGS, which is added to its key.
            judge: judges it if it has no claims.
            setting: the one setting that it is about, if it is about one alone: its own suffix in the file
                (`setting_suffixes`) is added to the key instead.
            constants: what its texts take from the code.

        Raises:
            FiguresError: there is none; a name in a text stands for nothing; or a number, a form or a sense is none.
        """
        entry = self._figures.get(key)
        if entry is None:
            raise FiguresError(f"figure {key}: there is none")
        where, place = f"figure {key}", PLACES[suffix]
        fill = _Texts(where, {**self._words, **self._place_words.get(place, {}), "setting": setting or "", **constants})
        checks = [_claim(where, claim, fill.with_x(x)) for x, claim in _rows(entry.get("claims", []), suffix)]
        if (judge is None) != bool(checks):
            raise FiguresError(f"{where}: expected claims, or a function that judges")
        values = tuple(
            printed(fill(series), {fill(x): _value(where, value) for x, value in points.items()})
            for series, points in entry.get("paper_values", {}).items()
        )
        texts = {name: fill(value) for name, value in entry.items() if _FIGURE[name] is str}
        return Figure(
            **{
                "criterion": claims.criterion(checks),
                **texts,
                "key": key + (suffix if setting is None else entry["setting_suffixes"][setting]),
                "form": _member(where, Form, entry.get("form", Form.LINES)),
            },
            judge=judge or partial(claims.judge, checks),
            paper_values=values,
            log_x=entry.get("log_x", False),
        )

    def experiment(self, key: str, suffix: str, figures: Sequence[Figure], samples: Samples) -> Experiment:
        """Return the experiment that does a trial in the settings of a place.

        Args:
            key: its key in the file.
            suffix: where, a key of SETTINGS.
            figures: those that the samples are for.
            samples: makes samples of the values.

        Raises:
            FiguresError: there is none, or not in this place; or there is no such trial.
        """
        entry, place = self._experiments.get(key, {}), PLACES[suffix]
        if place not in entry:
            raise FiguresError(f"experiment {key}: there is none for the place {place}")
        if entry["trial"] not in TRIALS:
            raise FiguresError(f"experiment {key}: no trial {entry['trial']!r}; expected one of {', '.join(TRIALS)}")
        measured = entry[place]
        normal, quick = measured["seconds"]
        return experiment(
            suffix,
            TRIALS[entry["trial"]],
            key,
            tuple(figures),
            measured["runs"],
            samples,
            (normal, quick),
            quick=measured.get("quick", True),
        )


class _Texts:
    """Fills in what the names in braces stand for; the texts that they stand for may have such names, too."""

    def __init__(self, where: str, words: Mapping[str, object]) -> None:
        self._where = where
        self._words = words

    def with_x(self, x: str) -> "_Texts":
        return _Texts(self._where, {**self._words, "x": x})

    def __call__(self, text: str) -> str:
        return re.sub(r"\{(\w*)\}", lambda found: self(str(self._word(found[1]))), text)

    def _word(self, name: str) -> object:
        try:
            return self._words[name]
        except KeyError:
            raise FiguresError(f"{self._where}: {{{name}}} stands for nothing") from None


def _check(where: str, table: Any, known: Mapping[str, type], needed: Sequence[str] = ()) -> None:
    """Check that a table has the keys that it needs, no others, and values of the right types."""
    if not isinstance(table, dict):
        raise FiguresError(f"{where}: expected a table, not {table!r}")
    for key, value in table.items():
        if key not in known:
            raise FiguresError(f"{where}: unknown key {key!r}; expected one of {', '.join(known)}")
        if not isinstance(value, known[key]):
            raise FiguresError(f"{where}: {key} is {value!r}; expected a {known[key].__name__}")
    for key in needed:
        if key not in table:
            raise FiguresError(f"{where}: there is no {key}")


def _by_key(
    kind: str, tables: list[Any], known: Mapping[str, type], needed: Sequence[str]
) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for number, table in enumerate(tables, 1):
        key = str(table.get("key", number) if isinstance(table, dict) else number)
        _check(f"{kind} {key}", table, known, needed)
        if key in found:
            raise FiguresError(f"{kind} {key}: it is there twice")
        found[key] = table
    return found


def _rows(rows: list[dict[str, Any]], suffix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the claims of a figure, with the setting that `{x}` stands for: all of one setting, then of the next."""
    of_each = any("{x}" in text for row in rows for text in (row["says"], *row["of"]))
    for x in SETTINGS[suffix] if of_each else ("",):
        yield from ((x, row) for row in rows if row.get("only", PLACES[suffix]) == PLACES[suffix])


def _claim(where: str, row: Mapping[str, Any], fill: Callable[[str], str]) -> Claim:
    says = fill(row["says"])
    points = [At(*map(fill, row[name])) if name in row else None for name in ("of", "to")]
    return Claim(
        says,
        points[0] or At("", ""),
        points[1],
        _number(where, row["printed"]),
        _member(where, Sense, row.get("sense", Sense.NO_MORE)),
        row.get("bound", False),
    )


def _member(where: str, kind: type[Any], value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise FiguresError(f"{where}: {value!r}: expected one of {', '.join(repr(str(one)) for one in kind)}") from None


def _value(where: str, value: object) -> float | tuple[float, float]:
    """Return a printed value, or a pair of it and its standard deviation."""
    if isinstance(value, list) and len(value) == 2:
        mean, deviation = (_number(where, one) for one in value)
        return mean, deviation
    return _number(where, value)


def _number(where: str, value: object) -> float:
    """Return a number; text stands for a product or quotient of numbers, from left to right: `1 / 1.0005 * 2`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    first, *others = re.split(r" ([*/]) ", value) if isinstance(value, str) else [""]
    try:
        result = float(first)
        for sign, number in zip(others[::2], others[1::2], strict=True):
            result = result * float(number) if sign == "*" else result / float(number)
    except ValueError:
        raise FiguresError(f"{where}: {value!r}: expected a number, or a product such as '1.05 * 1.2'") from None
    return result


@functools.cache
def definitions() -> Definitions:
    """Return what `figures.toml` defines.

    Raises:
        FiguresError: the file is wrong; the text begins with its name.
    """
    with open(FILE, encoding="utf-8") as file:
        text = file.read()
    try:
        return Definitions(text)
    except FiguresError as exc:
        raise FiguresError(f"{FILE}: {exc}") from None
