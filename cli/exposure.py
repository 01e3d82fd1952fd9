"""`cloakfs exposure`: what a compromised client could do, and what a change of the configuration opens."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cloakfs.audit.accounts import accounts_of
from cloakfs.audit.assess import Assessment, assess
from cloakfs.audit.entries import Entries, of_files, of_mount
from cloakfs.audit.entry import Entry
from cloakfs.audit.identities import Accounts
from cloakfs.audit.report import difference_report, report
from cloakfs.audit.survey import Survey
from cloakfs.audit.walk import survey
from cloakfs.config.errors import ExportsError
from cloakfs.messages import printable
from cloakfs.nfs.plan import ServerKind
from cloakfs.state.client import DaemonError
from cloakfs.state.runtime import mounted

from .common import console, fail, note
from .completion import a_file
from .exits import FAILED, NEGATIVE, WRONG
from .output import echo_json

DEFAULT_PATH = "/etc/cloakfs/exports.d"
MOST_ROWS = 40
MOST_PATHS = 3

COLUMNS = {
    "sees": "sees",
    "lists": "lists",
    "reads": "reads",
    "bytes": "read_bytes",
    "changes": "changes",
    "executes": "executes",
    "owns": "owns",
    "by claimed group": "claimed",
}
"""The columns of a table, and what they are called in a report."""

_OPENED = {column: name for column, name in COLUMNS.items() if name != "claimed"}


@click.command()
@click.argument("paths", nargs=-1, metavar="[EXPORTS...|MOUNT]", shell_complete=a_file)
@click.option("--diff", nargs=2, metavar="OLD NEW", help="Show what opens and closes if OLD is replaced by NEW.")
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="N", help="Look at no more than N names of each directory."
)
@click.option(
    "--server",
    type=click.Choice(["knfsd", "ganesha"]),
    default="knfsd",
    show_default=True,
    help="With EXPORTS: the NFS server that serves them.",
)
@click.option("--all", "every", is_flag=True, help=f"Show all identities, not only the {MOST_ROWS} that read most.")
@click.option("--html", "html", metavar="FILE", help="Also write a page with a picture of who reaches what.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of tables.")
def exposure(
    paths: tuple[str, ...],
    diff: tuple[str, str] | None,
    sample: int | None,
    html: str | None,
    server: ServerKind,
    *,
    every: bool,
    as_json: bool,
) -> None:
    """Show what a client could do if it were compromised: if it claimed any uid and any gid.

    EXPORTS are exports.d files, or folders of *.exports; the default is /etc/cloakfs/exports.d. MOUNT is the mount
    point of a mount that is served on this machine.

    Exit status: 0 shown (with --diff: nothing opens), 3 with --diff only: something opens, 1 something cannot be
    assessed, 2 wrong options or a wrong configuration.
    """
    if os.geteuid() != 0:
        fail("only root can act as another user", FAILED)
    if diff is not None and (paths or html is not None):
        fail("--diff takes the two configurations to compare; no others, and no --html", WRONG)
    try:
        if diff is not None:
            status = _compare(_entries(diff[:1], server), _entries(diff[1:], server), sample, as_json=as_json)
        else:
            found = _entries(paths or (DEFAULT_PATH,), server)
            status = _show(found, sample, html, every=every, as_json=as_json)
    except ExportsError as exc:
        fail(str(exc), WRONG)
    except DaemonError as exc:
        fail(str(exc), FAILED)
    except OSError as exc:
        fail(f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc.strerror), FAILED)
    sys.exit(status)


def _show(found: Entries, sample: int | None, html: str | None, *, every: bool, as_json: bool) -> int:
    surveys, accounts = _survey_trees(found.entries, sample)
    assessments = [assess(entry, surveys[entry.source], accounts, found.entries) for entry in found.entries]
    reports = [report(assessment, accounts, None if every else MOST_ROWS) for assessment in assessments]
    if html is not None:
        from .exposurepage import page  # noqa: PLC0415

        with open(html, "w", encoding="utf-8") as file:
            file.write(page(reports))
    if as_json:
        echo_json({"entries": reports, "refused": _refused(found)})
    else:
        for number, one in enumerate(reports):
            if number:
                click.echo()
            _print(one)
    return _print_failures(surveys, found)


def _print_failures(surveys: dict[str, Survey], *of: Entries) -> int:
    """Say what cannot be assessed, and return the exit status for that."""
    said = [f"{name}: not assessed: {reason}" for found in of for name, reason in found.refused]
    said += [
        f"{source}: names that could not be examined: {found.failed}, for example {found.left_out[0][0]} "
        f"({found.left_out[0][1]})"
        for source, found in surveys.items()
        if found.failed
    ]
    for text in dict.fromkeys(said):
        note(text)
    return 1 if said else 0


def _refused(found: Entries) -> list[dict[str, str]]:
    return [{"entry": name, "reason": reason} for name, reason in found.refused]


def _entries(paths: tuple[str, ...], server: ServerKind) -> Entries:
    mounts = mounted()
    found = Entries()
    for path in paths:
        mount = mounts.get(os.path.abspath(path))
        more = of_files([path], server) if mount is None else of_mount(mount)
        found.entries += more.entries
        found.refused += more.refused
    if not found.entries and not found.refused:
        fail(f"{' '.join(paths)}: no entries", WRONG)
    return found


def _survey_trees(entries: list[Entry], sample: int | None) -> tuple[dict[str, Survey], Accounts]:
    """Look at the trees of these entries, each of them once."""
    # A descriptor is open for each directory on the way down.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    surveys = {}
    with _progress() as advance:
        for source in dict.fromkeys(entry.source for entry in entries):
            surveys[source] = survey(source, sample, partial(advance, source))
    uids = {entry.view.fixed.uid for entry in entries if entry.view.fixed is not None}
    uids |= {uid for entry in entries for uid in entry.view.policy.options.exempt}
    uids |= {mapped.server for entry in entries for mapped in entry.claims.uids if not mapped.shifts}
    gids = {mapped.server for entry in entries for mapped in entry.claims.gids if not mapped.shifts}
    return surveys, accounts_of(
        uids.union(*(of.uids() for of in surveys.values())), gids.union(*(of.gids() for of in surveys.values()))
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """Show on a terminal how many names have been looked at. How many there are is known only at the end."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    to = console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.completed:,.0f} names", markup=False),
        TimeElapsedColumn(),
        console=to,
        disable=not to.is_terminal,
        transient=True,
        auto_refresh=False,  # a thread would inherit the credentials of the thread that starts it
    )
    tasks: dict[str, Any] = {}
    shown = 0.0

    def advance(source: str, count: int) -> None:
        nonlocal shown
        if source not in tasks:
            tasks[source] = bar.add_task(printable(source), total=None)
        bar.update(tasks[source], completed=count)
        if time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            bar.refresh()

    with bar:
        yield advance


# -- comparing -------------------------------------------------------------------------------------


def _compare(old: Entries, new: Entries, most: int | None, *, as_json: bool) -> int:
    surveys, accounts = _survey_trees([*old.entries, *new.entries], most)
    before, after = (_assessed(of, surveys, accounts) for of in (old, new))
    reports = [
        difference_report(name, before.get(name), after.get(name), accounts)
        for name in dict.fromkeys([*before, *after])
    ]
    opens = any(one["opens"] for one in reports)
    is_sample = any(of.is_sample for of in surveys.values())
    if as_json:
        echo_json(
            {"opens": opens, "sample": is_sample, "entries": reports, "refused": [*_refused(old), *_refused(new)]}
        )
    else:
        for one in reports:
            _print_difference(one)
        within = " in the sample" if is_sample else ""
        click.echo(f"Something opens{within}." if opens else f"Nothing opens{within}.")
    status = _print_failures(surveys, old, new)
    return NEGATIVE if opens else status


def _assessed(found: Entries, surveys: dict[str, Survey], accounts: Accounts) -> dict[str, Assessment]:
    assessed = {entry.name: assess(entry, surveys[entry.source], accounts, found.entries) for entry in found.entries}
    if len(assessed) < len(found.entries):
        names = [entry.name for entry in found.entries]
        fail(f"two entries, which cannot be told apart: {next(name for name in names if names.count(name) > 1)}", WRONG)
    return assessed


# -- printing --------------------------------------------------------------------------------------


def _print(of: dict[str, Any]) -> None:
    out = console()
    tree = of["tree"]
    out.print(Text(printable(f"{of['entry']} ({'ro' if of['read_only'] else 'rw'}, {of['place']})"), "bold"))
    looked = f"{tree['examined']:,} of {tree['names']:,} names" if tree["sample"] else f"{tree['names']:,} names"
    size = sum(area["bytes"] for area in tree["areas"].values())
    out.print(Text(printable(f"Tree {tree['source']}: {looked}, {size:,} bytes in files.")))
    ids = Table()
    for name in ("client ids", "become", "rule"):
        ids.add_column(name, overflow="fold")
    for kind in ("uid", "gid"):
        for mapped in of[f"{kind}s"]:
            ids.add_row(f"{kind} {_range(mapped['client'])}", _range(mapped["server"]), Text(printable(mapped["rule"])))
    out.print(ids)
    table = Table()
    table.add_column("who", overflow="fold")
    table.add_column("client uids", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in (of["anybody"], *of["identities"]):
        cells = (f"{row['total'][name]:,}" for name in COLUMNS.values())
        table.add_row(Text(printable(row["name"])), row["client_uids"], *cells)
    out.print(table)
    if of["identities_left_out"]:
        out.print(Text(f"{of['identities_left_out']} more identities, which read less: --all shows them."))
    for finding in of["findings"]:
        out.print(Text(printable(f"{finding['kind']}: {finding['text']}")))
        for path in finding["paths"][:MOST_PATHS]:
            out.print(Text(printable(f"    /{path}")))


def _range(ends: list[int]) -> str:
    low, high = ends
    return str(low) if low == high else f"{low}-{high}"


def _print_difference(of: dict[str, Any]) -> None:
    if not (of["differences"] or of["new_findings"]):
        return
    out = console()
    out.print(Text(printable(of["entry"]), "bold"))
    table = Table()
    for name in ("client uids", "before", "after", "", *_OPENED, "for example"):
        table.add_column(name, justify="right" if name in _OPENED else "left", overflow="fold")
    for difference in of["differences"]:
        for what, example in (("opens", "opened"), ("closes", "closed")):
            tally = difference[what]
            if not any(tally.values()):
                continue
            table.add_row(
                difference["client_uids"],
                Text(printable(difference["before"] or "-")),
                Text(printable(difference["after"] or "-")),
                Text(what, "red" if what == "opens" else "green"),
                *(f"{tally[name]:,}" for name in _OPENED.values()),
                Text(printable(" ".join(difference[example]))),
            )
    if of["differences"]:
        out.print(table)
    for finding in of["new_findings"]:
        out.print(Text(printable(f"opens: {finding['kind']}: {finding['text']}")))
