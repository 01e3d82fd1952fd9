"""The raw runs: one line of JSON for each measurement, on disk before the next one begins."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from .experiment import MeasuredSeries, Measurement, Point, Sample, Series

FORMAT = 1


class RecordsError(ValueError):
    """A file is not one of raw runs, or not of the runs that are wanted; the message is one line."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One measurement.

    Attributes:
        experiment, point, run: what was measured.
        seconds: how long it took.
        date: when it ended.
        samples: the values; empty if it failed.
        proof: what shows that it measured what it should.
        failed: why it failed; empty if it did not.
    """

    experiment: str
    point: str
    run: int
    seconds: float
    date: str
    samples: tuple[Sample, ...] = ()
    proof: Mapping[str, object] = field(default_factory=dict)
    failed: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the record that a line of the file is."""
        return cls(**{**fields, "samples": tuple(Sample(*sample) for sample in fields["samples"])})


class Records:
    """The file of raw runs, to which each measurement is added when it is done.

    Its first line says what all runs have in common: the kind of run, and the version of cloakfs. A line `session` says
    on which machine those after it were made. A last line that was not written to its end is dropped.

    Args:
        path: the file.

    Attributes:
        common: what all runs have in common; empty if there is no file yet.
        sessions: the circumstances of each time that the command ran.
        records: the measurements, in order.
        skipped: experiments that the machine could not do in the last session that tried, and why.

    Raises:
        RecordsError: the file is not one of raw runs.
        OSError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.common: dict[str, Any] = {}
        self.sessions: list[dict[str, Any]] = []
        self.records: list[RunRecord] = []
        self.skipped: dict[str, str] = {}
        self._complete = 0  # bytes of whole lines
        try:
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                self._take(json.loads(line), first=number == 1)
            except (ValueError, TypeError, KeyError, AttributeError) as exc:
                raise RecordsError(f"{path}:{number}: not a line of raw runs: {exc}") from exc
        self._complete = content.rfind(b"\n") + 1

    def _take(self, fields: dict[str, Any], *, first: bool) -> None:
        if first:
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']}, expected {FORMAT}")
            self.common = fields
        elif "session" in fields:
            self.sessions.append(fields["session"])
        elif "skipped" in fields:
            self.skipped[fields["skipped"]] = fields["why"]
        else:
            record = RunRecord.of(fields)
            self.records.append(record)
            self.skipped.pop(record.experiment, None)

    def begin(self, common: Mapping[str, object], session: Mapping[str, object]) -> None:
        """Begin the file, or go on with it.

        Raises:
            RecordsError: its runs differ in what they should have in common.
            OSError: it cannot be written.
        """
        wanted = {"format": FORMAT, **common}
        if not self.common:
            self._complete = 0
        with open(self.path, "ab") as file:
            file.truncate(self._complete)
        if not self.common:
            self._append(wanted)
            self.common = wanted
        for name, value in wanted.items():
            if self.common.get(name) != value:
                raise RecordsError(
                    f"{self.path}: the runs in it have {name} {self.common.get(name)}, not {value}; "
                    "remove the file, or use another --out"
                )
        self._append({"session": dict(session)})
        self.sessions.append(dict(session))

    def add(self, record: RunRecord) -> None:
        """Add a measurement."""
        self._append(asdict(record))
        self.records.append(record)
        self.skipped.pop(record.experiment, None)

    def skip(self, experiment: str, why: str) -> None:
        """Note that the machine cannot do an experiment."""
        self._append({"skipped": experiment, "why": why})
        self.skipped[experiment] = why

    def _append(self, line: Mapping[str, object]) -> None:
        with open(self.path, "ab") as file:
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self) -> set[tuple[str, str, int]]:
        """Return what has been measured: experiment, point and run."""
        return {(record.experiment, record.point, record.run) for record in self.records if not record.failed}

    def failures(self) -> list[RunRecord]:
        """Return what has failed, and has not been measured since."""
        done = self.done()
        last = {(record.experiment, record.point, record.run): record for record in self.records if record.failed}
        return [record for key, record in last.items() if key not in done]

    def of(self, experiments: Iterable[str]) -> list[RunRecord]:
        """Return the measurements of these experiments that did not fail."""
        wanted = set(experiments)
        return [record for record in self.records if record.experiment in wanted and not record.failed]


def measured(records: Iterable[RunRecord], figure: str) -> MeasuredSeries:
    """Return the series of a figure."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for record in records:
        for sample in record.samples:
            if sample.figure == figure:
                found.setdefault(sample.series, {}).setdefault(sample.x, {})[record.run] = sample.value
    xs = in_order(x for points in found.values() for x in points)
    return MeasuredSeries(
        {
            name: Series(name, tuple(Point(x, dict(sorted(points[x].items()))) for x in xs if x in points))
            for name, points in found.items()
        }
    )


def in_order(xs: Iterable[str]) -> list[str]:
    """Return each once: numbers by size, and names as they were met."""
    once = list(dict.fromkeys(xs))
    try:
        return sorted(once, key=float)
    except ValueError:
        return once


def result(outcome: Measurement) -> dict[str, Any]:
    """Return what an outcome contributes to a record.

    Raises:
        TypeError, ValueError: it cannot be written as JSON, or a value is no number.
    """
    for sample in outcome.samples:
        if not isinstance(sample.value, int | float) or sample.value != sample.value:
            raise ValueError(f"{sample.figure}, {sample.series} at {sample.x}: {sample.value!r} is no number")
    proof = dict(outcome.proof)
    json.dumps(proof)
    return {"samples": outcome.samples, "proof": proof}
