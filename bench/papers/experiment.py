"""What an experiment is, and the figures and tables of a paper that it repeats.

An experiment has *points*, each of which is measured once in every run. One measurement gives *samples*: values of one
or more figures. Everything that is reported is computed from the samples of single runs, which the runner keeps.
"""

import statistics
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Self


class Unavailable(Exception):
    """This machine cannot do an experiment; the text says why, in one line."""


class FiguresError(ValueError):
    """What defines figures and experiments (figures.toml) is wrong; the text says where, and what was expected."""


class Grade(StrEnum):
    """What became of a claim."""

    HOLDS = "holds"
    PART = "holds in part"
    FAILS = "does not hold"

    @classmethod
    def of(cls, held: Collection[bool]) -> Self:
        """Return what became of a claim of one or more parts, by whether each of them holds."""
        if all(held):
            return cls(Grade.HOLDS)
        return cls(Grade.PART if any(held) else Grade.FAILS)


class Checked(NamedTuple):
    """One part of a claim: a ratio, as it should be and as it is.

    Attributes:
        says: which ratio.
        wanted: what it should be, in words.
        ours: the mean over the runs.
        to_wanted: ours, compared with the number in `wanted`.
        spread: the standard deviation of the runs; None if there is only one.
        held: whether this part of the claim holds.
    """

    says: str
    wanted: str
    ours: float
    to_wanted: float
    spread: float | None
    held: bool


class Judgement(NamedTuple):
    """What the numbers say of a claim, and a sentence that gives the numbers that decided.

    Attributes:
        grade: what became of the claim.
        sentence: the numbers.
        checked: the parts of the claim that are ratios, for a table.
    """

    grade: Grade
    sentence: str
    checked: tuple[Checked, ...] = ()

    @classmethod
    def of(cls, checks: Mapping[str, bool], sentence: str) -> Self:
        """Return the verdict on several checks: all of them hold, some, or none.

        Args:
            checks: what was checked (one or more), and whether it is so.
            sentence: the numbers.
        """
        failed = [name for name, held in checks.items() if not held]
        return cls(Grade.of(checks.values()), f"{sentence} Not so: {'; '.join(failed)}." if failed else sentence)


@dataclass(frozen=True, slots=True)
class Point:
    """The values of one series at one place of the x axis.

    Attributes:
        x: the place: a number as text, or a name.
        values: the value of each run, by the number of the run.
        printed: the standard deviation as a paper prints it; None: it is computed from the values.
    """

    x: str
    values: Mapping[int, float]
    printed: float | None = None

    @property
    def mean(self) -> float:
        """The mean of the runs."""
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the runs; None if there are fewer than two."""
        if self.printed is not None or len(self.values) < 2:
            return self.printed
        return statistics.stdev(self.values.values())

    def ratios(self, to: "Point") -> list[float]:
        """Return the ratio of each run that both have, so that what disturbs a whole run does not count."""
        return [value / to.values[run] for run, value in self.values.items() if to.values.get(run)]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one colour of bars, of a figure."""

    name: str
    points: tuple[Point, ...]

    def at(self, x: str) -> Point | None:
        """Return the point at this place."""
        return next((point for point in self.points if point.x == x), None)


def printed(name: str, values: Mapping[str, float | tuple[float, float]]) -> Series:
    """Return a series as a paper prints it.

    Args:
        name: the same as that of ours with which it is to be compared.
        values: x -> value, or value and standard deviation.
    """
    points = []
    for x, value in values.items():
        mean, deviation = value if isinstance(value, tuple) else (value, None)
        points.append(Point(x, {0: mean}, deviation))
    return Series(name, tuple(points))


class MeasuredSeries:
    """The series of one figure that were measured, for tables and for judging.

    Attributes:
        series: by name, in the order in which they were measured.
    """

    def __init__(self, series: Mapping[str, Series]) -> None:
        self.series = series

    @property
    def xs(self) -> list[str]:
        """All places of the x axis, in order."""
        return list(dict.fromkeys(point.x for series in self.series.values() for point in series.points))

    @property
    def runs(self) -> int:
        """The least number of runs of any point."""
        return min((len(point.values) for series in self.series.values() for point in series.points), default=0)

    def at(self, name: str, x: str) -> Point | None:
        """Return a point of a series."""
        series = self.series.get(name)
        return series.at(x) if series else None

    def mean(self, name: str, x: str) -> float:
        """Return the mean at a point.

        Raises:
            LookupError: it was not measured.
        """
        point = self.at(name, x)
        if point is None:
            raise LookupError(f"{name} at {x} was not measured")
        return point.mean

    def ratio(self, name: str, to: str, x: str) -> float:
        """Return the median, over the runs, of the ratio of two series at one place.

        Raises:
            LookupError: one of them was not measured.
        """
        mine, theirs = self.at(name, x), self.at(to, x)
        ratios = mine.ratios(theirs) if mine and theirs else []
        if not ratios:
            raise LookupError(f"{name} / {to} at {x} was not measured")
        return statistics.median(ratios)


class Form(StrEnum):
    """How a figure is drawn. LINES needs numbers as x."""

    LINES = "lines"
    BARS = "bars"


Judge = Callable[[MeasuredSeries], Judgement]
"""Judges a claim by the numbers. It may raise LookupError where a number is missing; nothing is judged then."""


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A figure or table of a paper.

    Attributes:
        key: a word for it, such as `ellard-6`, unique among all papers.
        paper: authors and year.
        place: where it is in the paper, such as `Figure 6`.
        title: what it shows.
        claim: what the paper concludes from it.
        unit: of its values.
        x_label: what the x axis is.
        differs: what differs from the paper's set-up, and why.
        criterion: when the claim holds, in words: the rule that `judge` computes.
        judge: computes the verdict.
        paper_values: the printed values; empty where the paper has only a picture, or the text is garbled.
        paper_note: where the printed values come from, or why there are none.
        baseline: the series to which ratios are taken, in the paper and here; empty: none.
        form: how it is drawn.
        log_x: whether the x axis is logarithmic (base 2).
        ours: what our values are of, if not of cloakfs.
        why: what the reason is if the claim does not hold, or holds in part; empty: it is in the verdict.
    """

    key: str
    paper: str
    place: str
    title: str
    claim: str
    unit: str
    x_label: str
    differs: str
    criterion: str
    judge: Judge
    paper_values: tuple[Series, ...] = ()
    paper_note: str = ""
    baseline: str = ""
    form: Form = Form.LINES
    log_x: bool = False
    ours: str = "cloakfs"
    why: str = ""

    @property
    def command(self) -> str:
        """The command that measures it."""
        return f"python -m bench papers --only {self.key}"


class Sample(NamedTuple):
    """A value of one run: of which figure and series, and where on the x axis."""

    figure: str
    series: str
    x: str
    value: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one measurement gave.

    Attributes:
        samples: its values.
        proof: what shows that it measured what it should: pages in memory before, bytes that came from the disk, …
    """

    samples: tuple[Sample, ...]
    proof: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


RunOnce = Callable[[str, int], Measurement]
"""Measures a point (its name) once, in the run of this number, which also seeds whatever is random.

It measures all that is compared, so that ratios within a run mean something, and changes the order with the run. It
raises an exception if the measurement failed: the runner notes that, goes on, and tries again when it is called again.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """Something that is measured, for one or more figures.

    Attributes:
        key: a word for it, unique among all experiments.
        figures: those it has samples for.
        runs: how often each point is measured.
        points: names of the points; the argument says whether only a few are wanted (`--quick`).
        site: makes everything that the measurements need (mounts, files), and removes it at the end, also after errors;
            the argument is `quick` again. Raises Unavailable if this machine cannot do it.
        seconds: how long a measurement of a point may take, for the progress bar: point, quick.
        quick_runs: the same as `runs`, for `--quick`.
        same: whether each run gives the same, so that one is enough, however many are wanted.
    """

    key: str
    figures: tuple[Figure, ...]
    runs: int
    points: Callable[[bool], list[str]]
    site: Callable[[bool], AbstractContextManager[RunOnce]]
    seconds: Callable[[str, bool], float]
    quick_runs: int = 1
    same: bool = False

    def count(self, runs: int | None, *, quick: bool) -> int:
        """Return how often each point is measured, if so many runs are wanted."""
        return 1 if self.same else runs or (self.quick_runs if quick else self.runs)

    def minutes(self, runs: int | None, *, quick: bool) -> float:
        """Return how long that may take."""
        return self.count(runs, quick=quick) * sum(self.seconds(point, quick) for point in self.points(quick)) / 60
