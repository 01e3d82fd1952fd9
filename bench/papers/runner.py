"""Does what is left of the chosen experiments, and notes each measurement as soon as it is done."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from cli.common import console, note

from ..lab.guest import kernel_version as guest_kernel
from ..workers import undisturbed
from .experiment import Experiment, RunOnce, Unavailable
from .records import Records, RunRecord, result

_MOST_FAILURES = 3
"""After so many failures in a row, an experiment is given up: what it stands on is broken."""


class PlannedRun(NamedTuple):
    """A measurement that is to be made, and how long it may take."""

    experiment: Experiment
    point: str
    run: int
    seconds: float


def plan(
    experiments: Iterable[Experiment], records: Records, *, quick: bool, runs: int | None = None
) -> list[PlannedRun]:
    """Return what is left to measure: run by run, so that an interrupted experiment has as many runs everywhere.

    Args:
        experiments: those wanted.
        records: what has been measured.
        quick: whether only a few points are wanted, in few runs.
        runs: how many runs, instead of what each experiment says.
    """
    done = records.done()
    steps = []
    for experiment in experiments:
        count = experiment.count(runs, quick=quick)
        points = experiment.points(quick)
        steps += [
            PlannedRun(experiment, point, run, experiment.seconds(point, quick))
            for run in range(count)
            for point in points
            if (experiment.key, point, run) not in done
        ]
    return steps


def measure(
    steps: list[PlannedRun], records: Records, *, quick: bool, advance: Callable[[PlannedRun | None, str], None]
) -> None:
    """Measure, and note each result before the next measurement begins.

    Args:
        steps: what to do, those of one experiment in a row.
        records: where the results go.
        quick: as for `plan`.
        advance: called with each step that is done (None: none is), and with what is next.
    """
    for experiment in dict.fromkeys(step.experiment for step in steps):
        todo = [step for step in steps if step.experiment is experiment]
        advance(None, f"{experiment.key}: setting up")
        try:
            with contextlib.ExitStack() as stack:
                try:
                    run_once = stack.enter_context(experiment.site(quick))
                    _measure(todo, run_once, records, advance)
                finally:
                    with undisturbed():
                        stack.close()
        except Unavailable as exc:
            note(f"bench: papers: {experiment.key}: skipped: {exc}")
            records.skip(experiment.key, str(exc))
        except Exception as exc:  # an experiment that cannot be set up must not keep others from being done
            note(f"bench: papers: {experiment.key}: cannot be set up, or removed: {_line(exc)}")
            records.skip(experiment.key, _line(exc))


def _measure(
    todo: list[PlannedRun], run_once: RunOnce, records: Records, advance: Callable[[PlannedRun | None, str], None]
) -> None:
    failures = 0
    for step in todo:
        advance(None, f"{step.experiment.key}: run {step.run + 1}, {step.point}")
        began = time.monotonic()
        try:
            outcome = result(run_once(step.point, step.run))
            failures = 0
        except Exception as exc:  # it is noted, and done again when the command is called again
            note(f"bench: papers: {step.experiment.key}, {step.point}, run {step.run + 1}: {_line(exc)}")
            outcome = {"failed": _line(exc)}
            failures += 1
        records.add(
            RunRecord(
                step.experiment.key,
                step.point,
                step.run,
                round(time.monotonic() - began, 3),
                time.strftime("%Y-%m-%d %H:%M:%S %z"),
                **outcome,
            )
        )
        advance(step, "")
        if failures == _MOST_FAILURES:
            note(f"bench: papers: {step.experiment.key}: given up after {failures} failures in a row")
            return


def _line(exc: BaseException) -> str:
    """Return an error as one line, with the place in the code where it came from."""
    *_, last = traceback.extract_tb(exc.__traceback__)
    return " ".join(f"{type(exc).__name__}: {exc} ({os.path.basename(last.filename)}:{last.lineno})".split())


def session() -> dict[str, object]:
    """Return the circumstances under which something is measured."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "CPUs": len(os.sched_getaffinity(0)),
        "memory, MiB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "Python": platform.python_version(),
        "pyfuse3": importlib.metadata.version("pyfuse3"),
        "libfuse": _says("fusermount3", "--version"),
        "bindfs": _says("bindfs", "--version"),
        "nfs-utils": f"{_says('/sbin/mount.nfs', '-V')}, in a guest with Linux {guest_kernel()}, in user mode",
        "guest": "on one processor",
        "load before": round(os.getloadavg()[0], 2),
    }


def _says(*command: str) -> str:
    """Return the version that a program says it has."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return "none"
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else "unknown"


def common(*, quick: bool) -> dict[str, object]:
    """Return what all runs of a report must have in common."""
    return {"cloakfs": importlib.metadata.version("cloakfs"), "quick": quick}


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return " ".join(line.partition(":")[2].split())
    return "unknown"


@contextlib.contextmanager
def progress(steps: list[PlannedRun]) -> Iterator[Callable[[PlannedRun | None, str], None]]:
    """Show how much is left: a bar on a terminal, otherwise a line each minute."""
    total = sum(step.seconds for step in steps)
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

    left = _Left(total)
    text = partial(TextColumn, markup=False)
    columns = (
        text("{task.percentage:>3.0f} %"),
        BarColumn(),
        text("{task.fields[left]} left"),
        text("{task.description}"),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, left=left.summary())

        def advance(step: PlannedRun | None, what: str) -> None:
            left.passed(step)
            bar.update(task, advance=step.seconds if step else 0, left=left.summary())
            if what:
                bar.update(task, description=what)

        yield advance


class _Left:
    """How much time is left: what the steps may take, by how long those before took compared with that."""

    def __init__(self, total: float) -> None:
        self._left = total
        self._done = 0.0
        self._began = time.monotonic()

    def passed(self, step: PlannedRun | None) -> None:
        if step is not None:
            self._left -= step.seconds
            self._done += step.seconds

    def seconds(self) -> float:
        pace = (time.monotonic() - self._began) / self._done if self._done else 1.0
        return max(0.0, self._left * pace)

    def summary(self) -> str:
        minutes, seconds = divmod(round(self.seconds()), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


def _lines(total: float) -> Callable[[PlannedRun | None, str], None]:
    left, last = _Left(total), [time.monotonic()]

    def advance(step: PlannedRun | None, what: str) -> None:
        left.passed(step)
        if what and time.monotonic() > last[0] + 60:
            last[0] = time.monotonic()
            note(f"bench: papers: {left.summary()} left; {what}")

    return advance
