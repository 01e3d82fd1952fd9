"""`cloakfs status`: the mounts of this machine, and how they fare."""

import json
import os
from dataclasses import asdict

import click
from rich.filesize import decimal
from rich.table import Table

from cloakfs.mounted import Mounted, dead, mounted

from .common import console, fail, printable

_DIED = "its daemon has died, and nobody gets an answer"


@click.command()
@click.argument("mountpoints", nargs=-1, metavar="[MOUNTPOINT]…")
@click.option("--json", "as_json", is_flag=True, help="Print it for a program to read.")
def status(mountpoints: tuple[str, ...], *, as_json: bool) -> None:
    """Tell of the mounts that are served on this machine: requests, reads, and whether reading ahead pays.

    Figures are up to five seconds old. Mounts whose daemon has died are told last.

    Exit status: 0 told, 1 a MOUNTPOINT is none that is served.
    """
    if os.geteuid() != 0:
        fail("only root may know how others' views are made", 1)
    there = mounted()
    wanted = [os.path.realpath(path) for path in mountpoints] or sorted(there)
    for path in wanted:
        if path not in there:
            fail(f"{path}: no cloakfs mount, or one whose daemon has died (cloakfs status lists all)", 1)
    mounts = [there[path] for path in wanted]
    left = [] if mountpoints else [place.path for place in dead()]
    if as_json:
        told = [asdict(mount) for mount in mounts]
        click.echo(json.dumps([*told, *({"target": path, "pid": None, "failure": _DIED} for path in left)], indent=2))
        return
    for mount in mounts:
        console().print(_described(mount))
    for path in left:
        click.echo(printable(f"{path}: {_DIED} (cloakfs umount {path}; mounting there again takes it off, too)"))


def _described(mount: Mounted) -> Table:
    table = Table(title=printable(mount.target), title_justify="left", title_style="bold", box=None, show_header=False)
    for name, value in _lines(mount):
        table.add_row(name, printable(value))
    return table


def _lines(mount: Mounted) -> list[tuple[str, str]]:
    lines = [
        ("tree", mount.source),
        ("options", mount.options),
        ("daemon", f"process {mount.pid}, {mount.reloads} reloads"),
    ]
    if mount.failure:
        lines.append(("not reloaded", mount.failure))
    busiest = sorted(mount.requests.items(), key=lambda item: -item[1])[:6]
    lines.append(("requests", ", ".join(f"{name} {count:,}" for name, count in busiest) or "none"))
    reading = mount.prefetch
    if reading:
        lines.append(("reads", f"{reading['hits']:,} in memory, {reading['misses']:,} had to wait"))
        lines.append(("prefetch", f"{reading['heuristic']}, {decimal(reading['asked'])} asked for"))
        lines += [("", device) for device in reading["devices"]]
    return lines
