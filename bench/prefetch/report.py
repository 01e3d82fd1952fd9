"""Tables of the figures, next to the paper's own numbers, and the targets."""

import statistics

import click

from cli.common import console

from ..figures import Run, Spread
from ..peers import BARE
from ..sheet import Sheet
from .experiments import (
    ALWAYS,
    CURSORS,
    DEFAULT,
    DEVICE,
    OFF,
    READERS,
    SLOWDOWN,
    SMALL,
    SMALL_DEFAULT,
    SMALL_SLOWDOWN,
    STRIDE,
    TABLE,
    reader_case,
    stride_case,
)

PAPER = {
    "ide1 UDP": {DEFAULT: {2: 7.66, 4: 7.83, 8: 5.26}, CURSORS: {2: 11.49, 4: 14.15, 8: 12.66}},
    "scsi1 UDP": {DEFAULT: {2: 9.49, 4: 8.52, 8: 8.21}, CURSORS: {2: 15.39, 4: 15.38, 8: 14.12}},
}
"""Table 1 of Ellard & Seltzer (2003): disk -> heuristic -> stride -> MB/s."""

_RATIOS = {
    STRIDE: ((CURSORS, DEFAULT), (CURSORS, OFF), (CURSORS, BARE)),
    READERS: (
        (SLOWDOWN, ALWAYS),
        (DEFAULT, ALWAYS),
    ),
    TABLE: (
        (SMALL_SLOWDOWN, SLOWDOWN),
        (SMALL_DEFAULT, DEFAULT),
    ),
}

ENOUGH = 1.5
"""The least ratio of cursors to the default."""
EQUAL = 0.97
"""A rate of at least this share of another counts as equal."""


def mean(rates: list[float]) -> str:
    """Return mean and standard deviation, as the paper prints them."""
    deviation = f" ({statistics.stdev(rates):.2f})" if len(rates) > 1 else ""
    return f"{statistics.fmean(rates):.2f}{deviation}"


def _ratio(run: Run, setting: str, case: str, peer: str, to: str) -> Spread | None:
    return Spread.of(run.ratios(setting, case, peer, to))


def _cell(spread: Spread | None) -> str:
    return f"**{spread.middle:.2f}** ({spread.low:.2f}–{spread.high:.2f})" if spread else "–"


def _rows(run: Run, setting: str, columns: list[str]) -> list[list[str]]:
    by_case = run.rates[setting]
    peers = list(dict.fromkeys(peer for case in columns for peer in by_case[case]))
    rows = [
        [peer, *(mean(by_case[case][peer]) if by_case[case].get(peer) else "–" for case in columns)] for peer in peers
    ]
    for peer, to in _RATIOS[setting]:
        spreads = [_ratio(run, setting, case, peer, to) for case in columns]
        if any(spreads):
            rows.append([f"{peer} / {to}", *map(_cell, spreads)])
    return rows


def strides_of(run: Run) -> list[int]:
    """Return the strides of Table 1 that were measured."""
    return [int(case.split()[-1]) for case in run.rates.get(STRIDE, {})]


def readers_of(run: Run, setting: str = READERS) -> dict[int, list[int]]:
    """Return the numbers of concurrent readers that were measured, by percentage reordered."""
    found: dict[int, list[int]] = {}
    for case in run.rates.get(setting, {}):
        readers, _, percent, *_ = case.split()
        found.setdefault(int(percent), []).append(int(readers))
    return found


def stride_sheet(run: Run) -> Sheet:
    """Return Table 1 and Figure 8."""
    strides = strides_of(run)
    sheet = Sheet("Table 1, Figure 8: strides, MB/s, mean (standard deviation)", ["", *map(stride_case, strides)])
    for disk, by_peer in PAPER.items():
        for peer, rates in by_peer.items():
            sheet.rows.append([f"paper, {disk}, {peer}", *(f"{rates[s]:.2f}" if s in rates else "–" for s in strides)])
        ratios = {s: by_peer[CURSORS][s] / by_peer[DEFAULT][s] for s in by_peer[DEFAULT]}
        cells = (f"{ratios[s]:.2f}" if s in ratios else "–" for s in strides)
        sheet.rows.append([f"paper, {disk}, {CURSORS} / {DEFAULT}", *cells])
    sheet.rows += _rows(run, STRIDE, [stride_case(s) for s in strides])
    return sheet


def reader_sheets(run: Run) -> list[Sheet]:
    """Return Figures 6 and 7, a table for each percentage reordered; and the same with a small table of files."""
    sheets = []
    for setting, what in ((READERS, "Figures 6 and 7"), (TABLE, f"a table of {SMALL} files")):
        for percent, readers in readers_of(run, setting).items():
            title = f"{what}: {percent} % reordered, MB/s, mean (standard deviation)"
            sheet = Sheet(title, ["readers", *map(str, readers)])
            sheet.rows = _rows(run, setting, [reader_case(number, percent) for number in readers])
            sheets.append(sheet)
    return sheets


def device_sheet(run: Run) -> Sheet:
    """Return what reading ahead costs where nothing can be gained."""
    sheet = Sheet("devices: MB/s, mean (standard deviation)", ["", OFF, CURSORS, f"{CURSORS} / {OFF}"])
    for case, rates in run.rates.get(DEVICE, {}).items():
        cells = (mean(rates[peer]) if rates.get(peer) else "–" for peer in (OFF, CURSORS))
        sheet.rows.append([case, *cells, _cell(_ratio(run, DEVICE, case, CURSORS, OFF))])
    return sheet


def _groups(run: Run, setting: str) -> dict[str, list[str]]:
    """Group the cases by number of readers, and again by percentage reordered: a single case has too few runs."""
    groups: dict[str, list[str]] = {}
    for percent, numbers in readers_of(run, setting).items():
        for number in numbers:
            case = reader_case(number, percent)
            groups.setdefault(case.partition(",")[0], []).append(case)
            groups.setdefault(case.partition(", ")[2], []).append(case)
    return groups


def targets(run: Run) -> Sheet:
    """Return the targets, and whether they are reached: the worst median decides."""
    readers = _groups(run, READERS)
    crowded = {
        reader_case(number, percent): [reader_case(number, percent)]
        for percent, numbers in readers_of(run, TABLE).items()
        for number in numbers
        if number > SMALL
    }
    devices = {case: [case] for case in run.rates.get(DEVICE, {})}
    wanted: list[tuple[str, str, dict[str, list[str]], str, str, float, bool]] = [
        *((case, STRIDE, {case: [case]}, CURSORS, DEFAULT, ENOUGH, True) for case in run.rates.get(STRIDE, {})),
        ("any readers, any order", READERS, readers, SLOWDOWN, ALWAYS, EQUAL, True),
        ("it falls behind", READERS, readers, DEFAULT, ALWAYS, EQUAL, False),
        (f"more than {SMALL} readers", TABLE, crowded, SMALL_SLOWDOWN, SLOWDOWN, EQUAL, False),
        ("any device", DEVICE, devices, CURSORS, OFF, EQUAL, True),
    ]
    sheet = Sheet("what was to be shown, by the lowest median", ["", "wanted", "found", "where", ""])
    for what, setting, groups, peer, to, bound, at_least in wanted:
        found = []
        for name, names in groups.items():
            ratios = [ratio for case in names for ratio in run.ratios(setting, case, peer, to)]
            if ratios:
                found.append((statistics.median(ratios), name))
        if not found:
            continue
        lowest, name = min(found)
        reached = lowest >= bound if at_least else lowest < bound
        sign = "≥" if at_least else "<"
        verdict = "reached" if reached else "**missed**"
        sheet.rows.append([f"{what}: {peer} / {to}", f"{sign} {bound:.2f}", f"{lowest:.2f}", name, verdict])
    return sheet


def show(run: Run, *, markdown: bool) -> None:
    """Print all tables."""
    click.echo("; ".join(f"{key}: {value}" for key, value in run.about.items()))
    sheets = [targets(run), *([stride_sheet(run)] if STRIDE in run.rates else []), *reader_sheets(run)]
    sheets += [device_sheet(run)] if DEVICE in run.rates else []
    for sheet in sheets:
        if markdown:
            click.echo(sheet.markdown())
        else:
            console().print(sheet.table())
    for failure in run.failed:
        click.echo(f"\nfailed: {failure}")
