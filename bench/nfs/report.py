"""Tables: time as ratios to the bare export, requests to the daemon, and what changed since an earlier run."""

from collections.abc import Iterator, Mapping

from ..figures import number
from ..sheet import Sheet
from .plan import BARE, OPTIONS
from .results import Case, NfsRun
from .work import NfsWork

_CHANGED = 0.05
"""The least change that is reported, of a ratio; repeats differ by less."""

_NONE = "–"


def ratio_sheet(run: NfsRun, works: Mapping[str, NfsWork], kernel: str) -> Sheet:
    """Return the times on this Linux: a row for each work, a column for each export, a figure for each NFS version."""
    cases = [case for case in run.measured if case.kernel == kernel]
    versions = sorted({case.version for case in cases})
    exports = [name for name in OPTIONS if name != BARE and name in {case.export for case in cases}]
    title = f"Linux {kernel}: time / time of the bare export, {' and '.join(f'NFSv{version}' for version in versions)}"
    sheet = Sheet(title, ["", "bare, µs", *exports])
    measured = {case.work for case in cases}
    for work in (work for name, work in works.items() if name in measured):
        bare = (run.seconds(Case(kernel, work.name, version, BARE)) for version in versions)
        cells = [_joined(None if seconds is None else seconds * 1e6 / work.units for seconds in bare)]
        for export in exports:
            cells.append(_joined(run.ratio(Case(kernel, work.name, version, export)) for version in versions))
        sheet.rows.append([f"{work.name}, 1 {work.unit}", *cells])
    return sheet


def request_sheet(run: NfsRun, works: Mapping[str, NfsWork], kernel: str) -> Sheet:
    """Return the requests to the daemon for one unit on this Linux."""
    sheet = Sheet(f"Linux {kernel}: requests to the daemon", ["", "NFS", "export", "all", "by operation"])
    for case in run.measured:
        if case.kernel != kernel or case.work not in works or not (asked := _requests(run, works, case)):
            continue
        several = sorted(asked.items(), key=lambda one: -one[1])
        shown = ", ".join(f"{operation} {number(value)}" for operation, value in several if value >= 0.1)
        name = f"{case.work}, for 1 {works[case.work].unit}"
        sheet.rows.append([name, case.version, case.export, number(sum(asked.values())), shown or _NONE])
    return sheet


def against_sheet(run: NfsRun, old: NfsRun, works: Mapping[str, NfsWork]) -> Sheet:
    """Return which ratios, and which requests for one unit, have changed since an earlier run."""
    sheet = Sheet("what changed: before → now", ["", "Linux", "NFS", "export", "time / bare", "requests"])
    for case in run.measured:
        if case.work not in works or case not in old.measured:
            continue
        time = _change(old.ratio(case), run.ratio(case))
        before, now = (sum(_requests(one, works, case).values()) for one in (old, run))
        requests = _change(before, now)
        if time or requests:
            sheet.rows.append([case.work, case.kernel, case.version, case.export, time or _NONE, requests or _NONE])
    return sheet


def doubts(run: NfsRun, most: float = 0.03) -> Iterator[str]:
    """Give the cases whose two least repeats differ by more than this."""
    for case in run.measured:
        if (spread := run.spread(case)) > most:
            yield f"{case.work}, Linux {case.kernel}, NFSv{case.version}, {case.export}: repeats differ by {spread:.0%}"


def _requests(run: NfsRun, works: Mapping[str, NfsWork], case: Case) -> dict[str, float]:
    least = run.least(case)
    units = works[case.work].units
    return {} if least is None else {operation: count / units for operation, count in least.requests.items()}


def _change(before: float | None, now: float | None) -> str:
    """Return both if they differ by enough to say so, or ""."""
    if before is None or now is None or abs(now - before) <= _CHANGED * max(before, now):
        return ""
    return f"{number(before)} → {number(now)}"


def _joined(values: Iterator[float | None]) -> str:
    """Return the figures, one for each version of NFS."""
    cells = [_NONE if value is None else number(value) for value in values]
    return _NONE if set(cells) == {_NONE} else ", ".join(cells)
