"""The command `python -m bench papers`."""

import os
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase

import click

from cli.common import console, fail, note
from cli.exits import FAILED, WRONG
from cloakfs.linux.ownfiles import replace

from ..session import interruptible, require_matplotlib
from ..sheet import Sheet
from . import report
from .experiment import Experiment, FiguresError
from .picture import svg
from .records import Records, RecordsError
from .runner import common, measure, plan, progress, session

RUNS = "runs.jsonl"
MARKDOWN = "papers.md"
PAGE = "papers.html"


@click.command()
@click.option(
    "--only",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Only this figure or experiment (see --list; `*` stands for any letters); repeatable.",
)
@click.option(
    "--out",
    default="cloakfs-papers",
    show_default=True,
    metavar="DIR",
    help="Directory of the raw runs and the reports; what is in it already is not measured again.",
)
@click.option("--runs", type=click.IntRange(1), help="Runs of each point, instead of what --list says.")
@click.option("--quick", is_flag=True, help="Few and small runs, to see whether everything works.")
@click.option("--show", is_flag=True, help="Measure nothing; write the reports from the runs that there are.")
@click.option("--list", "only_list", is_flag=True, help="Print all figures, and how long they may take.")
def papers(keys: tuple[str, ...], out: str, runs: int | None, *, quick: bool, show: bool, only_list: bool) -> None:
    """Repeat the experiments of the papers, and draw their figures beside the printed values.

    Each measurement is on disk before the next one begins: after an interruption, the same command goes on where it
    was. Needs root.

    Exit status: 0 measured (or shown), whatever the claims, 1 it cannot be measured, or something failed or was
    skipped, 2 wrong usage, or the runs in DIR are of another kind.
    """
    try:
        from .registry import EXPERIMENTS  # noqa: PLC0415  (imports what it measures)
    except FiguresError as exc:
        fail(f"bench papers: {exc}", WRONG)

    chosen = _chosen(keys, EXPERIMENTS)
    if only_list:
        _list(chosen, quick=quick, runs=runs)
        return
    require_matplotlib("bench papers")
    path = os.path.join(out, RUNS)
    try:
        os.makedirs(out, exist_ok=True)
        records = Records(path)
        if show:
            if not records.common:
                fail(f"bench papers: {path}: there are no runs", FAILED)
        else:
            if os.geteuid() != 0:
                fail("only root can measure: this mounts file systems, and acts as other users", FAILED)
            _measure(chosen, records, quick=quick, runs=runs)
        reports = report.figure_reports(chosen if keys else EXPERIMENTS, records)
        _write(out, reports, records)
    except RecordsError as exc:
        fail(f"bench papers: {exc}", WRONG)
    except OSError as exc:
        fail(f"bench papers: {exc.filename or out}: {exc.strerror or exc}", FAILED)
    _summary(reports)
    note(f"bench: papers: {os.path.join(out, PAGE)} and {os.path.join(out, MARKDOWN)} are written")
    wanted = {experiment.key for experiment in chosen}
    incomplete = wanted & (set(records.skipped) | {one.experiment for one in records.failures()})
    sys.exit(FAILED if incomplete and not show else 0)


def _chosen(keys: tuple[str, ...], known: Iterable[Experiment]) -> list[Experiment]:
    """Return the experiments that these keys name, by their own key or by that of a figure."""
    known = list(known)
    for key in keys:
        if not any(_is_named(experiment, key) for experiment in known):
            fail(f"--only {key}: no such thing; see --list", WRONG)
    return [one for one in known if not keys or any(_is_named(one, key) for key in keys)]


def _is_named(experiment: Experiment, key: str) -> bool:
    return any(fnmatchcase(name, key) for name in (experiment.key, *(figure.key for figure in experiment.figures)))


def _list(chosen: list[Experiment], *, quick: bool, runs: int | None) -> None:
    sheet = Sheet("figures", ["figure", "of", "what it shows", "experiment", "runs", "minutes"])
    for experiment in chosen:
        count, minutes = experiment.count(runs, quick=quick), experiment.minutes(runs, quick=quick)
        for at, figure in enumerate(experiment.figures):
            cells = [experiment.key, str(count), f"{minutes:.1f}"] if at == 0 else [experiment.key, "", ""]
            sheet.rows.append([figure.key, f"{figure.paper}, {figure.place}", figure.title, *cells])
    total = sum(experiment.minutes(runs, quick=quick) for experiment in chosen)
    sheet.rows.append(["all", "", "", "", "", f"{total:.1f}"])
    console().print(sheet.table())


def _measure(chosen: list[Experiment], records: Records, *, quick: bool, runs: int | None) -> None:
    steps = plan(chosen, records, quick=quick, runs=runs)
    records.begin(common(quick=quick), session())
    if steps and not quick and (load := os.getloadavg()[0]) > 1:
        note(f"bench: papers: the machine is busy (load {load:.1f}): what others do will show in the numbers")
    with interruptible("bench: papers"), progress(steps) as advance:
        measure(steps, records, quick=quick, advance=advance)


def _write(out: str, reports: list[report.FigureReport], records: Records) -> None:
    pictures = {one.figure.key: svg(one.figure, one.found) for one in reports if one.found.series}
    files = {key: f"papers-{key}.svg" for key in pictures}
    for key, picture in pictures.items():
        replace(os.path.join(out, files[key]), picture.encode())
    replace(os.path.join(out, MARKDOWN), report.markdown(reports, records, files).encode())
    replace(os.path.join(out, PAGE), report.page(reports, records, pictures).encode())


def _summary(reports: list[report.FigureReport]) -> None:
    for one in reports:
        click.echo(f"{one.figure.key}: {one.grade}. {one.verdict.sentence if one.verdict else one.why_not}")
