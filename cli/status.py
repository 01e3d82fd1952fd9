"""`cloakfs status`: shows the mounts of this machine and their state."""

import os
import re
from dataclasses import asdict
from datetime import datetime

import click
from rich.filesize import decimal

from cloakfs.linux import mountinfo
from cloakfs.mounted import Mounted, dead, mounted

from .common import fail, printable
from .output import echo_json

SHOWN = 20
"""How many definitions are shown at most."""

_DIED = "its daemon has died, and nobody gets an answer"


@click.command()
@click.argument("mountpoints", nargs=-1, metavar="[MOUNTPOINT]…")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects instead of text.")
def status(mountpoints: tuple[str, ...], *, as_json: bool) -> None:
    """Report the mounts that are served on this machine: requests, reads, and whether reading ahead pays.

    Figures are up to five seconds old. Mounts whose daemon has died come last.

    Exit status: 0 reported, 1 a MOUNTPOINT is not served, or its daemon is of an unknown version.
    """
    if os.geteuid() != 0:
        fail("only root may see the options of mounts", 1)
    there = mounted()
    wanted = [os.path.realpath(path) for path in mountpoints] or sorted(there)
    for path in wanted:
        if path not in there:
            fail(f"{path}: not a cloakfs mount, or its daemon has died (cloakfs status lists all)", 1)
        refusal = there[path].unknown
        if mountpoints and refusal:
            fail(f"{path}: {refusal}", 1)
    mounts = [there[path] for path in wanted]
    words = {place.device: place.words for place in mountinfo.by_id().values()}
    left = [] if mountpoints else [place.path for place in dead()]
    if as_json:
        told = [
            {**asdict(mount), "failure": mount.unknown or mount.failure, "words": words.get(mount.device, "")}
            for mount in mounts
        ]
        echo_json([*told, *({"target": path, "pid": None, "failure": _DIED} for path in left)])
        return
    for mount in mounts:
        if mount.unknown:
            click.echo(printable(f"{mount.target}: {mount.unknown}"))
            continue
        click.echo(printable(mount.target))
        for name, value in _lines(mount, words.get(mount.device, "")):
            click.echo(f" {name:9} {printable(value)}")
    for path in left:
        click.echo(printable(f"{path}: {_DIED} (cloakfs umount {path}; mounting there again unmounts it, too)"))


def _shortened(options: str) -> str:
    """Replace lists that are too long to read at a glance by their length; --json prints all of it."""

    def shorten(found: re.Match[str]) -> str:
        count = len(re.findall(r"\S+" if found[1] == "views" else r"\b[ug]id\b", found[2]))
        return found[0] if count <= SHOWN else f"{found[1]} = ({count:,} of them: see --json)"

    return re.sub(r"\b(range_map|cloak_list|views) = ([^,]*)", shorten, options)


def _lines(mount: Mounted, words: str) -> list[tuple[str, str]]:
    since = f", since {datetime.fromtimestamp(mount.since).isoformat(' ', 'seconds')}" if mount.since else ""
    lines = [
        ("tree", mount.source),
        ("options", _shortened(mount.options)),
        ("mounted", words + since),
        ("daemon", f"process {mount.pid}, {mount.reloads} reloads"),
    ]
    if mount.failure:
        lines.append(("not reloaded", mount.failure))
    busiest = sorted(mount.requests.items(), key=lambda item: -item[1])[:6]
    lines.append(("requests", ", ".join(f"{name} {count:,}" for name, count in busiest) or "none"))
    reading = mount.prefetch
    if reading:
        lines.append(("reads", f"{reading['hits']:,} in memory, {reading['misses']:,} had to wait"))
        lines.append(("prefetch", f"{reading['heuristic']}, {decimal(reading['asked'])} requested"))
        lines += [("", device) for device in reading["devices"]]
    return lines
