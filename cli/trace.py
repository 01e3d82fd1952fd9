"""`cloakfs trace`: prints the requests that a mount answers, as they are answered."""

import contextlib
import glob
import math
import os
import pwd
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cloakfs.messages import printable
from cloakfs.state.client import DaemonError, traced
from cloakfs.state.runtime import Mounted, mounted
from cloakfs.tracerecords import OPERATIONS, Record, TraceFilter, described, ids

from .common import console, fail, note
from .completion import a_mount_point
from .exits import FAILED, WRONG
from .output import echo_json, echo_json_line

TOP_CALLERS = 10
"""How many callers a summary shows."""

PERCENTILES = (50, 90, 99)


@click.command()
@click.argument("mountpoint", metavar="MOUNT", shell_complete=a_mount_point)
@click.option("--user", "users", multiple=True, metavar="USER", help="Only requests of this client user or uid.")
@click.option(
    "--path",
    "paths",
    multiple=True,
    metavar="GLOB",
    help="Only this path, and what is below; relative paths begin at MOUNT.",
)
@click.option(
    "--op", "operations", multiple=True, metavar="NAME", type=click.Choice(OPERATIONS), help="Only this operation."
)
@click.option("--errors", is_flag=True, help="Only requests that are answered with an error.")
@click.option("--hidden", is_flag=True, help="Only requests from whose caller something is hidden.")
@click.option("--count", type=click.IntRange(1), help="Stop after this many requests.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after this time.")
@click.option(
    "--summary", is_flag=True, help="Print counts and times by operation, and the busiest callers, at the end."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line; with --summary, one object.")
def trace(
    mountpoint: str,
    users: tuple[str, ...],
    paths: tuple[str, ...],
    operations: tuple[str, ...],
    count: int | None,
    seconds: float | None,
    *,
    errors: bool,
    hidden: bool,
    summary: bool,
    as_json: bool,
) -> None:
    """Print each request that the daemon of MOUNT answers, until the command is interrupted (^C).

    A line has the time, the caller (client ids → server ids, command and thread), the operation and its path, the
    answer as the client gets it, how long it took, what the kernel may cache, and why something was hidden or
    refused. --user, --path and --op may be repeated.

    Exit status: 0 traced, 1 MOUNT is not served, its daemon cannot be asked, or has ended, 2 wrong options.
    """
    if os.geteuid() != 0:
        fail("only root may see what others do", FAILED)
    mount = _mount(mountpoint)
    interrupted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: interrupted.append(number))
    patterns = tuple(_pattern(path, mountpoint, mount.target) for path in paths)
    wanted = TraceFilter(tuple(map(_uid, users)), patterns, operations, errors, hidden)
    found = _Summary()
    failure = None
    try:
        for record, dropped in _records(mount, wanted, count or math.inf, seconds or math.inf, interrupted):
            if record is None:
                found.dropped += dropped
                note(f"{dropped:,} requests are left out here: they came faster than they could be printed")
            elif summary:
                found.add(record)
            elif as_json:
                echo_json_line(record)
            else:
                click.echo(line(record))
    except DaemonError as exc:
        failure = str(exc)
    if summary:
        found.print(as_json=as_json)
    if failure is not None:
        fail(failure, FAILED)


def _mount(mountpoint: str) -> Mounted:
    path = os.path.realpath(mountpoint)
    mount = mounted().get(path)
    if mount is None:
        fail(f"{path}: not a cloakfs mount, or its daemon has died (cloakfs status lists all)", FAILED)
    if mount.unknown:
        fail(f"{path}: {mount.unknown}", FAILED)
    return mount


def _uid(user: str) -> int:
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        fail(f"--user {user}: no such user in the user database; expected a name or a uid", WRONG)


def _pattern(path: str, mountpoint: str, target: str) -> str:
    """Return the pattern for `--path`: relative to the mount, or below it, by whichever name the user calls it."""
    named = os.path.abspath(mountpoint)
    whole = os.path.normpath(os.path.join(named, path))
    top = next((top for top in (named, target) if whole == top or whole.startswith(os.path.join(top, ""))), None)
    if top is None:
        fail(f"--path {path}: not in the mount at {target}", WRONG)
    return os.path.join(glob.escape(target), os.path.relpath(whole, top)).removesuffix("/.")


def _records(
    mount: Mounted, wanted: TraceFilter, count: float, seconds: float, interrupted: list[int]
) -> Iterator[tuple[Record | None, int]]:
    """Yield records; in place of those that were dropped, None and their number.

    After an interrupt, the requests that were answered before are still fetched, which takes less than a second.
    """
    until = time.monotonic() + seconds
    is_last = False
    with contextlib.closing(traced(mount, wanted)) as batches:
        for records, dropped in batches:
            for record in records:
                yield record, 0
                count -= 1
                if count <= 0:
                    return
            if dropped:
                yield None, dropped
            sys.stdout.flush()
            if is_last or time.monotonic() >= until:
                return
            # These records may have been sent before the interrupt, so there may be more.
            is_last = bool(interrupted)


# -- one line for each request ---------------------------------------------------------------------


def line(record: Record) -> str:
    """Return the line that describes a request; colours mark errors and what was hidden."""
    when = datetime.fromtimestamp(record["time"]).strftime("%H:%M:%S.%f")
    return f"{when} {described(record, partial(click.style, fg='red'), partial(click.style, fg='yellow'))}"


# -- the summary -----------------------------------------------------------------------------------


class _Summary:
    """What was traced, added up."""

    def __init__(self) -> None:
        self.dropped = 0
        self._times: defaultdict[str, list[int]] = defaultdict(list)  # by operation, in µs
        self._errors: Counter[str] = Counter()
        self._hidden: Counter[str] = Counter()
        self._callers: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)

    def add(self, record: Record) -> None:
        operation = record["operation"]
        self._times[operation].append(record["microseconds"])
        self._errors[operation] += record["error"] is not None
        self._hidden[operation] += bool(record["hidden"])
        who = "cloakfs itself" if record["inside"] else ids(record["client"])
        self._callers[who, record["command"]].append(record["microseconds"])

    def _plain(self) -> dict[str, Any]:
        operations = [
            {
                "operation": operation,
                "count": len(times),
                "errors": self._errors[operation],
                "hidden": self._hidden[operation],
                "microseconds": {f"p{percent}": percentile(times, percent) for percent in PERCENTILES}
                | {"max": max(times), "sum": sum(times)},
            }
            for operation, times in sorted(self._times.items(), key=lambda item: -sum(item[1]))
        ]
        callers = [
            {"client": who, "command": command, "count": len(times), "microseconds": sum(times)}
            for (who, command), times in sorted(self._callers.items(), key=lambda item: -len(item[1]))[:TOP_CALLERS]
        ]
        return {"operations": operations, "callers": callers, "dropped": self.dropped}

    def print(self, *, as_json: bool) -> None:
        totals = self._plain()
        if as_json:
            echo_json(totals)
            return
        out = console()
        times = [*(f"p{percent}" for percent in PERCENTILES), "max"]
        operations = Table()
        operations.add_column("operation")
        for name in ("count", "errors", "hidden", *(f"{name} µs" for name in times)):
            operations.add_column(name, justify="right")
        for row in totals["operations"]:
            numbers = [row["count"], row["errors"], row["hidden"], *(row["microseconds"][name] for name in times)]
            operations.add_row(row["operation"], *(f"{number:,}" for number in numbers))
        out.print(operations)
        callers = Table("caller", "command")
        for name in ("count", "sum µs"):
            callers.add_column(name, justify="right")
        for row in totals["callers"]:
            command = Text(printable(row["command"] or "?"))
            callers.add_row(row["client"], command, f"{row['count']:,}", f"{row['microseconds']:,}")
        out.print(callers)


def percentile(times: list[int], percent: int) -> int:
    """Return the smallest of the times that is not exceeded by this share of them (the nearest rank)."""
    return sorted(times)[math.ceil(len(times) * percent / 100) - 1]
