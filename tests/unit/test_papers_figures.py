"""figures.toml defines the figures of the papers; what is wrong in it is told in one line."""

import re
import tomllib
from pathlib import Path

import pytest

from bench.papers.claims import At, Claim, Sense
from bench.papers.experiment import FiguresError, Judgement, MeasuredSeries
from bench.papers.figures import FILE, PLACES, Definitions
from bench.papers.registry import EXPERIMENTS

TEXT = Path(FILE).read_text(encoding="utf-8")
CONTENT = tomllib.loads(TEXT)

FIGURE = """\
[words]
both = "{here} and everywhere"
[place.local]
here = "on this machine"
[place.nfs]
here = "behind NFS"

[[figure]]
key = "one"
paper = "Somebody 2002"
place = "Figure 1"
title = "files, {both}"
claim = "It costs nothing."
unit = "s"
x_label = "setting"
differs = "{number} files"
paper_note = ""
claims = [
    { says = "A / B, {x}", of = ["A", "{x}"], to = ["B", "{x}"], printed = "1.5 / 2 * 4" },
    { says = "B, {x}", of = ["B", "{x}"], printed = 1, sense = "above 1", only = "nfs" },
]
[figure.paper_values]
"A" = { "x" = [1, 0.5] }

[[experiment]]
key = "all"
trial = "build"
local = { runs = 2, seconds = [3, 4] }
"""


def test_texts_claims_and_values() -> None:
    found = Definitions(FIGURE).figure("one", "-nfs", constants={"number": 3})
    assert (found.key, found.title, found.differs) == ("one-nfs", "files, behind NFS and everywhere", "3 files")
    assert [(point.x, point.mean, point.deviation) for point in found.paper_values[0].points] == [("x", 1.0, 0.5)]
    assert list(found.judge.args[0]) == [  # type: ignore[attr-defined]
        claim
        for x in ("NFSv3", "NFSv4.2")
        for claim in (
            Claim(f"A / B, {x}", At("A", x), At("B", x), 3.0),
            Claim(f"B, {x}", At("B", x), None, 1.0, Sense.ABOVE_ONE),
        )
    ]
    local = Definitions(FIGURE).figure("one", constants={"number": 3})
    assert "A / B, local (3)" in local.criterion


def judged(_: MeasuredSeries) -> Judgement:
    raise AssertionError


AGAIN = f"[[figure]]{FIGURE.partition('[[figure]]')[2].partition('claims')[0]}criterion = ''\n[[experiment]]"

WRONG = {
    "bad TOML": ("key = ", "key == ", "Invalid value"),
    "unknown key": ("unit = ", "units = ", "figure one: unknown key 'units'; expected one of key, paper, "),
    "missing key": ('unit = "s"\n', "", "figure one: there is no unit"),
    "wrong type": ('unit = "s"', "unit = 7", "figure one: unit is 7; expected a str"),
    "unknown table": ("[words]", "[word]", "file: unknown key 'word'; expected one of words, place, "),
    "unknown place": ("[place.nfs]", "[place.here]", "place: unknown key 'here'; expected one of local, nfs"),
    "no key": ('key = "one"\n', "", "figure 1: there is no key"),
    "twice": ("[[experiment]]", AGAIN, "figure one: it is there twice"),
    "in a claim": ("sense =", "sence =", "figure one, claim: unknown key 'sence'; expected one of says, "),
    "a criterion, too": ('unit = "s"', 'unit = "s"\ncriterion = "all"', "figure one: expected either claims or "),
    "in runs": ("runs = 2", "run = 2", "experiment all, local: unknown key 'run'; expected one of runs, "),
    "no such word": ("{here}", "{there}", "figure one: {there} stands for nothing"),
    "no number": ("1.5 / 2", "1.5 + 2", "figure one: '1.5 + 2 * 4': expected a number, or a product such as "),
    "no sense": ('"above 1"', '"above 2"', "figure one: 'above 2': expected one of 'no more than printed', "),
    "no form": ('unit = "s"', 'unit = "s"\nform = "cake"', "figure one: 'cake': expected one of 'lines', 'bars'"),
    "no trial": ('"build"', '"built"', "experiment all: no trial 'built'; expected one of build, "),
}


@pytest.mark.parametrize(("old", "new", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told(old: str, new: str, told: str) -> None:
    make(FIGURE)
    assert old in FIGURE
    with pytest.raises(FiguresError, match=f"^{re.escape(told)}"):
        make(FIGURE.replace(old, new, 1))


def make(text: str) -> None:
    found = Definitions(text)
    for suffix in PLACES:
        found.figure("one", suffix, constants={"number": 3})
    found.experiment("all", "", [], lambda *_: ())


def test_what_is_not_there_is_told() -> None:
    found = Definitions(FIGURE)
    for key, told in (("two", "figure two: there is none"), ("one", "figure one: {number} stands for nothing")):
        with pytest.raises(FiguresError, match=f"^{re.escape(told)}$"):
            found.figure(key)
    with pytest.raises(FiguresError, match=r"^figure one: expected claims, or a function that judges$"):
        found.figure("one", judge=judged, constants={"number": 3})
    with pytest.raises(FiguresError, match=r"^experiment all: there is none for the place nfs$"):
        found.experiment("all", "-nfs", [], lambda *_: ())


def test_everything_is_used() -> None:
    keys = {figure.key for experiment in EXPERIMENTS for figure in experiment.figures}
    assert {figure["key"] for figure in CONTENT["figure"]} <= keys
    experiments = {experiment.key for experiment in EXPERIMENTS}
    for one in CONTENT["experiment"]:
        assert {one["key"] + suffix for suffix, place in PLACES.items() if place in one} <= experiments
    named = set(re.findall(r"\{(\w+)\}", TEXT))
    assert CONTENT["words"].keys() | CONTENT["place"]["local"].keys() <= named
    assert CONTENT["place"]["local"].keys() == CONTENT["place"]["nfs"].keys()


def test_reasons_have_no_results() -> None:
    """They are printed with every later run; docs/papers-causes.md has what was measured, and when."""
    reasons = [figure.why for experiment in EXPERIMENTS for figure in experiment.figures]
    assert any(reasons)
    assert [why for why in reasons if re.search(r"\b\d+\.\d+\b|\b\d+ %", why)] == []
