"""Tables: of ratios, targets, requests and memory, and of what changed since an earlier run."""

from collections.abc import Callable, Mapping

import click

from cli.common import console

from ..figures import Run, Spread, compare, number
from ..homes import HOME
from ..job import Piece
from ..over_nfs import BARE_EXPORT, PLACES
from ..peers import BARE, UNCACHED
from ..sheet import Sheet
from ..tree import KINDS
from .targets import judge, judge_homes, judge_nfs

MEMORY = ("idle RSS", "idle PSS", "growth RSS", "growth PSS")
_NOTICED = 0.05
"""Requests and memory are single figures; a smaller change is none."""


def _bold(spread: Spread) -> str:
    middle, _, rest = str(spread).partition(" ")
    return f"**{middle}** {rest}"


def _by_table(run: Run, works: Mapping[str, Piece], setting: str) -> dict[str, list[Piece]]:
    tables: dict[str, list[Piece]] = {}
    for name in run.rates.get(setting, {}):
        if name in works:
            tables.setdefault(works[name].table, []).append(works[name])
    return tables


def _sheets(
    run: Run, works: Mapping[str, Piece], title: str, cell: Callable[[str, str, str], str | None], first: str | None
) -> list[Sheet]:
    """One for each setting and kind of work; without peers that have nothing to say."""
    sheets = []
    for setting in run.rates:
        for name, columns in _by_table(run, works, setting).items():
            sheet = Sheet(f"{setting}, {name}: {title}", ["", *(work.name for work in columns)])
            if first is not None:
                scale = [_scale(run, setting, work, first) for work in columns]
                sheet.rows.append([f"{first}, per second", *scale])
            for peer in run.peers():
                cells = [cell(setting, work.name, peer) for work in columns]
                if any(cells):
                    sheet.rows.append([peer, *(text or "–" for text in cells)])
            if len(sheet.rows) > (first is not None):
                sheets.append(sheet)
    return sheets


def _scale(run: Run, setting: str, work: Piece, peer: str) -> str:
    spread = Spread.of(run.rates[setting][work.name].get(peer, []))
    return f"{number(spread.middle)} {work.unit}" if spread else "–"


def ratio_sheets(run: Run, works: Mapping[str, Piece], to: str) -> list[Sheet]:
    """Rates of all peers, as ratios to those of one."""
    if to not in run.peers():
        return []

    def cell(setting: str, work: str, peer: str) -> str | None:
        spread = Spread.of(run.ratios(setting, work, peer, to)) if peer != to else None
        return _bold(spread) if spread else None

    return _sheets(run, works, f"rate / rate of {to}, median and range of the rounds", cell, to)


def target_sheet(run: Run) -> Sheet:
    """Reached, and missed."""
    sheet = Sheet("targets: median and range", ["", "wanted", *KINDS])
    for judged in judge(run):
        if "" in judged.figures:
            cells = [str(judged.figures[""]), ""]
        else:
            cells = [str(judged.figures[kind]) if kind in judged.figures else "not measured" for kind in KINDS]
        sheet.rows.append([judged.target, judged.wanted, *cells])
    return sheet


def home_target_sheet(run: Run) -> Sheet:
    """The same for private files in homes."""
    sheet = Sheet("targets for private files in homes: median and range", ["", "wanted", HOME])
    for judged in judge_homes(run):
        sheet.rows.append([judged.target, judged.wanted, str(judged.figures.get(HOME, "not measured"))])
    return sheet


def nfs_target_sheet(run: Run) -> Sheet:
    """The same for listings over NFS."""
    sheet = Sheet("targets over NFS: median and range", ["", "wanted", *PLACES])
    for judged in judge_nfs(run):
        cells = [str(judged.figures.get(kind, "not measured")) for kind in PLACES]
        sheet.rows.append([judged.target, judged.wanted, *cells])
    return sheet


def request_sheet(run: Run, works: Mapping[str, Piece]) -> Sheet:
    """Return a table of the requests that the daemon gets for one unit of warm (or cold, where it says so) work."""
    peers = list(dict.fromkeys(peer for by_peer in run.requests.values() for peer in by_peer))
    sheet = Sheet("requests that reach the daemon", ["", *peers])
    for name, by_peer in run.requests.items():
        unit = works[name].unit if name in works else "units"
        cells = []
        for peer in peers:
            counts = sorted(by_peer.get(peer, {}).items(), key=lambda item: -item[1])
            parts = [f"{operation} {number(count)}" for operation, count in counts if count >= 0.005]
            cells.append((", ".join(parts) or "none") if peer in by_peer else "–")
        sheet.rows.append([f"{name}, for 1 {unit.removesuffix('s')}", *cells])
    return sheet


def memory_sheet(run: Run) -> Sheet:
    """Of daemons."""
    sheet = Sheet(
        "memory of the daemon, MiB; growth is for 100,000 files that the kernel knows", ["", *MEMORY, "known"]
    )
    for peer, figures in run.memory.items():
        cells = [f"{figures[what]:.1f}" if what in figures else "–" for what in MEMORY]
        sheet.rows.append([peer, *cells, f"{figures['known']:.0%}" if "known" in figures else "–"])
    return sheet


def _change(change: float, verdict: int) -> str:
    mark = {-1: " **worse**", 0: "", 1: " better"}[verdict]
    return f"{change:+.0%}{mark}"


def against_sheets(run: Run, old: Run, works: Mapping[str, Piece]) -> list[Sheet]:
    """How the ratios of this run differ from those of an earlier one."""
    common = [name for name in run.peers() if name in old.peers()]
    local = [name for name in (BARE, UNCACHED) if name in common][:1]
    sheets = []
    for to in [*local, *([BARE_EXPORT] if BARE_EXPORT in common else [])]:

        def cell(setting: str, work: str, peer: str, to: str = to) -> str | None:
            spreads = [Spread.of(each.ratios(setting, work, peer, to)) for each in (old, run)]
            before, now = spreads
            return _change(*compare(before, now)) if before and now and peer != to else None

        title = f"change of rate / rate of {to} since {old.about.get('cloakfs')} of {old.about.get('date')}"
        sheets += _sheets(run, works, title, cell, None)
    flat = [
        (what, _flat(old, what), _flat(run, what)) for what in ("requests", "memory") if _flat(old, what)
    ]  # less is better
    for what, before, now in flat:
        sheet = Sheet(f"{what}: what changed by more than {_NOTICED:.0%}", ["", "before", "now", "change"])
        for name in now.keys() & before.keys():
            ratio = (now[name] + 0.01) / (before[name] + 0.01)  # of nothing to something, too
            if abs(ratio - 1) > _NOTICED:
                verdict = -1 if ratio > 1 else 1
                sheet.rows.append([name, number(before[name]), number(now[name]), _change(ratio - 1, verdict)])
        sheet.rows.sort()
        sheets += [sheet] if sheet.rows else []
    return sheets


def _flat(run: Run, what: str) -> dict[str, float]:
    if what == "requests":
        return {
            f"{work}, {peer}": sum(counts.values())
            for work, by_peer in run.requests.items()
            for peer, counts in by_peer.items()
        }
    return {
        f"{peer}, {name}": mib
        for peer, figures in run.memory.items()
        for name, mib in figures.items()
        if name in MEMORY
    }


def worse(sheets: list[Sheet]) -> int:
    """How many figures got worse by more than the spread."""
    return sum("worse" in cell for sheet in sheets for row in sheet.rows for cell in row)


def show(run: Run, works: Mapping[str, Piece], old: Run | None, *, markdown: bool) -> None:
    """Print everything."""
    sheets = [sheet for to in (BARE, UNCACHED, BARE_EXPORT) for sheet in ratio_sheets(run, works, to)]
    sheets += [sheet for sheet in (request_sheet(run, works), memory_sheet(run)) if sheet.rows]
    changes = against_sheets(run, old, works) if old else []
    click.echo(", ".join(f"{key} {value}" for key, value in run.about.items()))
    for sheet in [target_sheet(run), home_target_sheet(run), nfs_target_sheet(run), *sheets, *changes]:
        if markdown:
            click.echo(sheet.markdown())
        else:
            console().print(sheet.table())
    if old:
        click.echo(f"\n{worse(changes) or 'Nothing'} got worse by more than the spread.")
    for name, why in run.skipped.items():
        click.echo(f"\nskipped {name}: {why}")
    for failure in run.failed:
        click.echo(f"\nfailed: {failure}")
