"""The report says what the raw runs say; verdicts follow from the numbers; what was measured is not measured again."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.papers import report
from bench.papers.claims import At, Claim, Sense
from bench.papers.claims import judge as claims_judge
from bench.papers.experiment import (
    Experiment,
    Figure,
    Grade,
    Judgement,
    MeasuredSeries,
    Measurement,
    Point,
    RunOnce,
    Sample,
    Series,
    Unavailable,
    printed,
)
from bench.papers.records import Records, RecordsError, RunRecord, in_order, measured
from bench.papers.registry import EXPERIMENTS
from bench.papers.runner import PlannedRun, common, measure, plan
from bench.speed.command import bench
from bench.workers import running_on

FIGURES = {figure.key: figure for experiment in EXPERIMENTS for figure in experiment.figures}


def test_every_key_is_known_once() -> None:
    keys = [figure.key for experiment in EXPERIMENTS for figure in experiment.figures]
    assert len(keys) == len(set(keys))
    assert len({experiment.key for experiment in EXPERIMENTS}) == len(EXPERIMENTS)


def test_a_quick_run_measures_less() -> None:
    for experiment in EXPERIMENTS:
        assert len(experiment.points(True)) <= len(experiment.points(False)) > 0  # some take too long to be quick
        assert all(experiment.seconds(point, True) > 0 for point in experiment.points(True))


# -- verdicts ----------------------------------------------------------------------------------------------


def figures(**series: dict[str, float]) -> MeasuredSeries:
    """Measured series; names have `_` for what a keyword cannot have."""
    return MeasuredSeries(
        {
            name: Series(name, tuple(Point(x, {0: value}) for x, value in values.items()))
            for name, values in series.items()
        }
    )


def flat(key: str) -> MeasuredSeries:
    """Every series of a figure, the same everywhere."""
    names = {
        "ellard-1": ["outer", "inner"],
        "ellard-2": [f"{queue} ({zone})" for queue in ("elevator", "tagged queue") for zone in ("outer", "inner")],
        "ellard-3": ["elevator", "N-CSCAN", "tagged queue"],
        "ellard-6": [f"{name} ({client})" for name in ("always", "default") for client in ("idle", "busy")],
        "ellard-7": [
            "always",
            *(f"{name}, {table} table" for name in ("default", "slowdown") for table in ("new", "old")),
        ],
        "ellard-nfsheur": ["default", "cursors"],
        "ellard-table1": ["default", "cursors", "bare"],
        "ellard-mix": ["off", "default", "slowdown", "cursors", "always"],
        "ellard-mix-changes": ["off", "default", "slowdown", "cursors", "always"],
        "ellard-fast": ["off", "off, kernel 2048 KiB", "cursors", "always"],
        "ellard-fast-nfs": ["off", "knfsd", "off, kernel 2048 KiB", "knfsd, kernel 2048 KiB", "cursors", "always"],
    }
    names["ellard-4"] = names["ellard-5"] = names["ellard-2"]
    xs = {
        "ellard-table1": ["2", "4", "8"],
        "ellard-nfsheur": ["64", "65", "96"],
        "ellard-mix": ["0", "4"],
        "ellard-mix-changes": ["4"],
        "ellard-fast": ["6 % reordered", "4 strides", "random"],
        "ellard-fast-nfs": ["NFSv3, in order", "NFSv3, 6 % reordered"],
        "ellard-3": [str(number) for number in range(1, 9)],
    }.get(key, ["1", "4", "16"])
    return figures(**{name: dict.fromkeys(xs, 10.0) for name in names[key]})


ELLARD = [key for key in FIGURES if key.startswith("ellard-")]

HOLDS_WHEN_EQUAL = {"ellard-mix-changes", "ellard-fast", "ellard-fast-nfs"}
"""Claims that nothing is lost."""


@pytest.mark.parametrize("key", ELLARD)
def test_numbers_that_are_all_the_same_show_no_effect(key: str) -> None:
    grade = FIGURES[key].judge(flat(key)).grade
    assert (grade is Grade.HOLDS) == (key in HOLDS_WHEN_EQUAL)


@pytest.mark.parametrize("key", ELLARD)
def test_what_was_not_measured_is_not_judged(key: str) -> None:
    name, *_ = flat(key).series.values()
    with pytest.raises(LookupError):
        FIGURES[key].judge(MeasuredSeries({name.name: name}))


def test_the_papers_own_numbers_hold() -> None:
    """For the one table that is printed whole."""
    table = FIGURES["ellard-table1"]
    assert table.judge(MeasuredSeries({series.name: series for series in table.paper_values})).grade is Grade.HOLDS
    slow = figures(default={"2": 7.66, "4": 7.83, "8": 5.26}, cursors={"2": 11.49, "4": 8.0, "8": 5.3})
    assert table.judge(slow).grade is Grade.PART


def test_a_verdict_names_what_is_not_so() -> None:
    assert Judgement.of({"a": True, "b": True}, "1.") == Judgement(Grade.HOLDS, "1.")
    assert Judgement.of({"a": True, "b": False}, "1.") == Judgement(Grade.PART, "1. Not so: b.")
    assert Judgement.of({"a": False, "b": False}, "1.") == Judgement(Grade.FAILS, "1. Not so: a; b.")


def test_ratios_are_taken_within_a_run() -> None:
    mine, theirs = Point("1", {0: 2.0, 1: 30.0, 3: 1.0}), Point("1", {0: 1.0, 1: 10.0, 2: 7.0})
    assert mine.ratios(theirs) == [2.0, 3.0]
    assert (Point("1", {0: 1.0}).deviation, Point("1", {0: 1.0}, 0.5).deviation) == (None, 0.5)


# -- raw runs ----------------------------------------------------------------------------------------------


def judge(found: MeasuredSeries) -> Judgement:
    return Judgement.of({"b is twice as much": found.ratio("b", "a", "1") > 1.9}, f"{found.mean('b', '1'):.1f}.")


FIGURE = Figure("fig", "Somebody 2001", "Figure 1", "a <title>", "b is more", "MB/s", "x", "all", "twice", judge,
                paper_values=(printed("a", {"1": 1.0}), printed("b", {"1": (2.0, 0.25)})), baseline="a")  # fmt: skip


def experiment(run_once: RunOnce, *, key: str = "exp") -> Experiment:
    @contextlib.contextmanager
    def site(_quick: bool) -> Iterator[RunOnce]:
        yield run_once

    return Experiment(key, (FIGURE,), 3, lambda _: ["1", "2"], site, lambda _point, _quick: 1.0)


def values(point: str, run: int) -> Measurement:
    return Measurement((Sample("fig", "a", point, 1.0 + run), Sample("fig", "b", point, 2.0 + 2 * run)), {"pages": 0})


def silent(_step: PlannedRun | None, _what: str) -> None:
    pass


def begun(path: Path) -> Records:
    records = Records(str(path))
    records.begin(common(quick=True), {"kernel": "6"})
    return records


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    seen: list[tuple[str, int]] = []

    def run_once(point: str, run: int) -> Measurement:
        seen.append((point, run))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return values(point, run)

    one = experiment(run_once)
    records = begun(path)
    with pytest.raises(KeyboardInterrupt):
        measure(plan([one], records, quick=False), records, quick=False, advance=silent)
    with path.open("a") as file:
        file.write('{"experiment": "exp", "po')  # it was killed in the middle of a line
    again = begun(path)
    assert len(again.records) == 3
    measure(plan([one], again, quick=False), again, quick=False, advance=silent)
    assert seen == [("1", 0), ("2", 0), ("1", 1), ("2", 1), ("2", 1), ("1", 2), ("2", 2)]
    last = Records(str(path))
    assert plan([one], last, quick=False) == []
    assert len(last.sessions) == 2


def test_what_gives_the_same_again_is_measured_once(tmp_path: Path) -> None:
    records = begun(tmp_path / "runs")
    steps = plan([replace(experiment(values), same=True)], records, quick=False, runs=3)
    assert [(step.point, step.run) for step in steps] == [("1", 0), ("2", 0)]


def test_a_failure_is_noted_and_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [True]

    def run_once(point: str, run: int) -> Measurement:
        if broken[0] and point == "2":
            raise OSError("the disk is gone")
        return values(point, run)

    one, records = experiment(run_once), begun(tmp_path / "runs")
    measure(plan([one], records, quick=False), records, quick=False, advance=silent)
    assert [(record.point, record.run) for record in records.failures()] == [("2", 0), ("2", 1), ("2", 2)]
    assert "OSError: the disk is gone (test_papers.py:" in capsys.readouterr().err
    broken.clear()
    broken.append(False)
    assert [step.point for step in plan([one], records, quick=False)] == ["2"] * 3
    measure(plan([one], records, quick=False), records, quick=False, advance=silent)
    assert records.failures() == []


def test_what_is_broken_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    seen = []

    def fails(point: str, run: int) -> Measurement:
        seen.append(point)
        raise OSError("no")

    @contextlib.contextmanager
    def no_site(_quick: bool) -> Iterator[RunOnce]:
        raise Unavailable("no such machine")
        yield fails

    absent = Experiment("absent", (), 1, lambda _: ["1"], no_site, lambda _point, _quick: 1.0)
    chosen = [experiment(fails), absent, experiment(values, key="good")]
    records = begun(tmp_path / "runs")
    measure(plan(chosen, records, quick=False), records, quick=False, advance=silent)
    assert len(seen) == 3
    assert Records(str(tmp_path / "runs")).skipped == {"absent": "no such machine"}
    assert len(records.of(["good"])) == 6


def test_a_value_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    def run_once(point: str, run: int) -> Measurement:
        return Measurement((Sample("fig", "a", point, float("nan")),))

    records = begun(tmp_path / "runs")
    measure(plan([experiment(run_once)], records, quick=False), records, quick=False, advance=silent)
    assert all(record.failed for record in records.records)


def test_runs_of_another_kind_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    begun(path)
    with pytest.raises(RecordsError, match="the runs in it have quick True, not False; remove the file"):
        Records(str(path)).begin(common(quick=False), {})
    for text in ("[]\n", '{"format": 2}\n', path.read_text() + '{"experiment": 1}\n', "\xff\n"):
        path.write_text(text)
        with pytest.raises(RecordsError, match=r"runs:\d: not a line of raw runs"):
            Records(str(path))


def test_numbers_are_in_order_and_names_as_they_were_met() -> None:
    assert in_order(["16", "2", "1", "2"]) == ["1", "2", "16"]
    assert in_order(["b", "a", "1"]) == ["b", "a", "1"]


# -- the report --------------------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path: Path) -> Records:
    found = begun(tmp_path / "runs")
    for run in range(2):
        for x in ("1", "10", "2"):
            found.add(RunRecord("exp", x, run, 1.0, "today", values(x, run).samples, {"pages": 0, "ratio": 1 + run}))
    return found


def test_the_report_says_what_the_runs_say(records: Records) -> None:
    (one,) = report.figure_reports([experiment(values)], records)
    rows = {row[0]: row[1:] for row in [report.sheet(one).head, *report.sheet(one).rows]}
    assert rows == {
        "": ["1", "2", "10"],
        "paper: a": ["1.00", "–", "–"],
        "paper: b": ["2.00 (0.25)", "–", "–"],
        "cloakfs: a": ["1.50 (0.71)"] * 3,
        "cloakfs: b": ["3.00 (1.41)"] * 3,
        "paper: b / a": ["**2.00**", "–", "–"],
        "cloakfs: b / a": ["**2.00** (2.00–2.00)"] * 3,
        "a: cloakfs / paper": ["1.50", "–", "–"],
        "b: cloakfs / paper": ["1.50", "–", "–"],
    }
    assert one.proof == ("pages: 0 (6 measurements)", "ratio: 1 to 2 (6 measurements)")
    text = report.markdown([one], records, {"fig": "fig.svg"})
    page = report.page([one], records, {"fig": "<svg></svg>"})
    for said in ("1.50 (0.71)", "3.00 (1.41)", "python -m bench papers --only fig", "2 of each point", "kernel: 6"):
        assert said in text
        assert said in page
    assert "**Holds.** 3.0." in text
    assert '<b class="holds">holds</b>. 3.0.' in page
    assert "a &lt;title&gt;" in page
    assert "quick runs" in text
    assert "<script" not in page


def test_parts_of_a_claim_are_a_table(records: Records) -> None:
    """Somebody who has five minutes sees what was claimed, what is, how much runs differ, and whether it is so."""
    claims = [
        Claim("a cost", At("b", "1"), At("a", "1"), 1.6),
        Claim("a gain", At("a", "1"), At("b", "1"), 0.4, Sense.BELOW_ONE),
        Claim("ours", At("a", "1"), None, 3.0, bound=True),
    ]
    figure = replace(FIGURE, judge=partial(claims_judge, claims))
    (one,) = report.figure_reports([replace(experiment(values), figures=(figure,))], records)
    assert one.verdict
    assert report.checks(one.verdict).rows == [
        ["a cost", "printed: 1.6", "2", "± 0", "1.25", "**no**"],
        ["a gain", "printed: 0.4, that is below 1", "0.50", "± 0", "1.25", "yes"],
        ["ours", "bound: 3", "1.50", "± 0.71", "0.50", "yes"],
    ]
    sentence = "As claimed: 2 of 3 ratios; farthest from it is a cost: 2 (printed: 1.6)."
    text, page = report.markdown([one], records, {}), report.page([one], records, {})
    assert f"| **holds in part** | {sentence} |" in text
    assert "| a cost | printed: 1.6 | 2 | ± 0 | 1.25 | **no** |" in text
    assert "<td>a cost<td>printed: 1.6<td>2<td>± 0<td>1.25<td><b>no</b>" in page
    for said in (sentence, "Of 1 claims, 1 hold in part.", "--only fig --runs 2 --quick", "took 0.1 minutes"):
        assert said in text
        assert said in page


def test_the_reason_is_given_only_where_a_claim_fails(records: Records) -> None:
    for wanted, shown in ((2.0, False), (1.0, True)):
        claims = [Claim("a cost", At("b", "1"), At("a", "1"), wanted)]
        figure = replace(FIGURE, judge=partial(claims_judge, claims), why="The reason.")
        reports = report.figure_reports([replace(experiment(values), figures=(figure,))], records)
        assert ("- *Why*: The reason." in report.markdown(reports, records, {})) is shown
        assert ("<dt>Why<dd>The reason." in report.page(reports, records, {})) is shown


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    records = begun(tmp_path / "runs")
    (one,) = report.figure_reports([experiment(values)], records)
    assert (one.grade, one.why_not) == ("not judged", "not measured yet")
    records.skip("exp", "no disk")
    records.add(RunRecord("exp", "1", 0, 1.0, "today", failed="it broke"))
    records.skip("exp", "no disk")
    (one,) = report.figure_reports([experiment(values)], records)
    assert one.why_not == "no disk"
    text, page = report.markdown([one], records, {}), report.page([one], records, {})
    for said in ("no disk", "failed: exp, 1, run 1: it broke"):
        assert said in text
        assert said in page
    records.add(RunRecord("exp", "1", 1, 1.0, "today", (Sample("fig", "a", "1", 1.0),)))
    (one,) = report.figure_reports([experiment(values)], records)
    assert one.why_not == "too little was measured: b / a at 1 was not measured"


def test_series_are_made_of_single_runs(records: Records) -> None:
    found = measured(records.records, "fig")
    assert [dict(point.values) for point in found.series["b"].points] == [{0: 2.0, 1: 4.0}] * 3
    assert (found.runs, found.xs) == (2, ["1", "2", "10"])
    with pytest.raises(LookupError):
        found.mean("c", "1")
    assert json.loads(Path(records.path).read_text().splitlines()[0])["format"] == 1


# -- the command -------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    (tmp_path / "file").touch()
    for status, said, arguments in (
        (2, "--only x: no such thing; see --list", ["--only", "x"]),
        (1, f"bench papers: {tmp_path}/out/runs.jsonl: there are no runs", ["--show", "--out", f"{tmp_path}/out"]),
        (1, f"bench papers: {tmp_path}/file: File exists", ["--out", f"{tmp_path}/file"]),
    ):
        done = CliRunner().invoke(bench, ["papers", *arguments])
        assert (done.exit_code, done.output) == (status, f"cloakfs: {said}\n")


def test_list() -> None:
    listed = CliRunner().invoke(bench, ["papers", "--list"])
    assert all(key in listed.output for key in FIGURES)
    some = CliRunner().invoke(bench, ["papers", "--list", "--only", "ellard-6"])
    assert "ellard-7" in some.output  # the same experiment
    assert "ellard-1" not in some.output
    behind = CliRunner().invoke(bench, ["papers", "--list", "--only", "*-nfs", "--only", "ellard-1"])
    assert "zadok-6-nfs3" in behind.output  # of an experiment that is named
    assert "ellard-1" in behind.output
    assert "ellard-4" not in behind.output
    minutes = [line.split()[-1] for line in some.output.splitlines() if line.split()[-1:] and "." in line.split()[-1]]
    assert minutes[0] == minutes[-1] != "0.0"


def test_a_guest_stays_on_the_processor_on_which_it_is_started() -> None:
    every = os.sched_getaffinity(0)
    with running_on({max(every)}), subprocess.Popen(["sleep", "60"]) as guest:
        ran_on = os.sched_getaffinity(guest.pid)
        guest.kill()
    assert ran_on == {max(every)}
    assert os.sched_getaffinity(0) == every
