"""`cloakfs status`: shows the mounts and services of this machine, and whether they are healthy."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
from rich.cells import cell_len
from rich.filesize import decimal

from cloakfs.linux import mountinfo
from cloakfs.messages import printable
from cloakfs.nfs.health import Health, machine_state
from cloakfs.nfs.services import Service
from cloakfs.state.runtime import Mounted

from .common import fail, mount_point
from .completion import a_mount_point
from .exits import FAILED, NEGATIVE
from .output import echo_json

SHOWN = 20
"""How many definitions are shown at most."""

_UNITS = (("h", 3600), ("s", 1), ("ms", 0.001))

_INDENT = 11
"""Where values begin."""


@click.command()
@click.argument("mountpoints", nargs=-1, metavar="[MOUNTPOINT]…", shell_complete=a_mount_point)
@click.option("-v", "--verbose", is_flag=True, help=f"Show all definitions, also if there are more than {SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects instead of text.")
def status(mountpoints: tuple[str, ...], *, verbose: bool, as_json: bool) -> None:
    """Report whether the mounts and services of this machine are healthy, and what they do.

    With a MOUNTPOINT, also who checks permissions, what the kernel may cache, for how long, and what keeps it from
    caching more. Figures are up to five seconds old. What is not served comes last.

    Exit status: 0 healthy, 1 a MOUNTPOINT is no cloakfs mount, or its daemon is of an unknown version, 3 a daemon or a
    guard has died or has not answered for five seconds, a mount is not served, a service is just starting or stopping,
    or a server does not answer.
    """
    if os.geteuid() != 0:
        fail("only root may see the options of mounts", FAILED)
    machine = machine_state()
    if mountpoints:
        machine = machine.only(map(mount_point, mountpoints))
        for one in machine.mounts:
            if one.is_absent:
                fail(f"{one.path}: {one.problem} (cloakfs status lists all)", FAILED)
            if one.mount is not None and one.mount.unknown:
                fail(f"{one.path}: {one.mount.unknown}", FAILED)
    words = {place.device: place.words for place in mountinfo.by_id().values()}
    if as_json:
        echo_json([_plain(one, words) for one in machine.mounts])
    else:
        for one in machine.mounts:
            _show(one, words, in_full=verbose, with_kernel=bool(mountpoints))
        for service in machine.services:
            _show_service(service)
    if not machine.is_healthy:
        sys.exit(NEGATIVE)


def _plain(one: Health, words: dict[str, str]) -> dict[str, Any]:
    """Return an object for JSON: the published state of the mount, and its health."""
    of_service = None
    if (service := one.service) is not None:
        of_service = {
            "name": service.name,
            "guard": service.pid,
            "unhealthy": service.problem,
            "restarts": one.restarts,
        }
    health = {"unhealthy": one.problem, "service": of_service}
    mount = one.mount
    if mount is None:
        return {"target": one.path, "pid": None, "failure": one.problem, **health}
    state = asdict(mount)
    return {**state, "failure": mount.unknown or mount.failure, "words": words.get(mount.device, ""), **health}


def _show(one: Health, words: dict[str, str], *, in_full: bool, with_kernel: bool) -> None:
    """Print what there is to know of a mount, for people."""
    mount = one.mount
    hint = f" ({one.hint})" if one.hint else ""
    if mount is None:
        _print_line(f"{one.path}: {one.problem}{hint}")
        return
    if mount.unknown:
        _print_line(f"{mount.target}: {mount.unknown}")
        return
    _print_line(mount.target)
    if one.problem:
        _print_value("unhealthy", f"{one.problem}{hint}")
    for name, value in _lines(mount, words.get(mount.device, ""), in_full=in_full):
        _print_value(name, value)
    if one.service is not None:
        restarts = f", daemon replaced {one.restarts}×" if one.restarts else ""
        _print_value("service", f"{one.service.name}{restarts}")
    if with_kernel:
        for name, value in (("access", mount.access), ("locks", mount.locks), ("passes", mount.passthrough)):
            if value:
                _print_value(name, value)
        for name, value in _kernel_lines(mount):
            _print_value(name, value, 2 * _INDENT + 1)


def _show_service(service: Service) -> None:
    if service.problem:
        _print_line(f"service {service.name}: {service.problem}")
    elif service.server:
        count = f"{len(service.mounts)} mount{'s' * (len(service.mounts) != 1)}"
        _print_line(f"service {service.name}: {service.server} answers, guard is process {service.pid}, {count}")


def _print_value(name: str, value: str, indent: int = _INDENT) -> None:
    _print_line(f" {name:{_INDENT - 2}} {value}", indent)


def _print_line(line: str, indent: int = 1) -> None:
    """Print a line. A terminal gets it in lines of its width that end between words, and are indented from the second.

    A word that is longer than the terminal is wide (a path, say) is left in one piece.
    """
    line = printable(line)
    if not sys.stdout.isatty():
        click.echo(line)
        return
    width = max(shutil.get_terminal_size().columns, indent + 20)
    for part in _wrapped(line, width, indent):
        click.echo(part)


def _wrapped(line: str, width: int, indent: int) -> Iterator[str]:
    """Yield the line in parts that are no wider than `width`, unless a single word is, and end between words."""
    part, rest = line[:indent], line[indent:]
    at, is_empty = cell_len(part), True
    for blanks, word in re.findall(r"( *)([^ ]+)", rest):
        more = blanks + word
        if at + cell_len(more) > width and not is_empty:
            yield part
            part, at, more = " " * indent, indent, word
        part, at, is_empty = part + more, at + cell_len(more), False
    yield part.rstrip()


def _shortened(options: str) -> str:
    """Replace lists that are too long to read at a glance by their length."""

    def shorten(found: re.Match[str]) -> str:
        count = len(re.findall(r"\S+" if found[1] == "views" else r"\b[ug]id\b", found[2]))
        return found[0] if count <= SHOWN else f"{found[1]} = ({count:,} of them: see -v)"

    return re.sub(r"\b(range_map|cloak_list|views) = ([^,]*)", shorten, options)


def _lines(mount: Mounted, words: str, *, in_full: bool) -> list[tuple[str, str]]:
    since = f", since {datetime.fromtimestamp(mount.since).isoformat(' ', 'seconds')}" if mount.since else ""
    lines = [
        ("tree", mount.source),
        ("options", mount.options if in_full else _shortened(mount.options)),
        ("mounted", words + since),
        ("daemon", f"process {mount.pid}, {mount.reloads} reloads"),
    ]
    if mount.failure:
        lines.append(("not reloaded", mount.failure))
    if mount.numbers:
        lines.append(("numbers", mount.numbers))
    busiest = sorted(mount.requests.items(), key=lambda item: -item[1])[:6]
    lines.append(("requests", ", ".join(f"{name} {count:,}" for name, count in busiest) or "none"))
    refused = [f"{what} {count:,}" for what, count in mount.refused.items() if count]
    if refused:
        lines.append(("refused", f"{', '.join(refused)}, to callers that had their share (the log names them)"))
    lines += [("lacking", problem) for problem in mount.lacking]
    reading = mount.prefetch
    if reading:
        lines.append(("reads", f"{reading['hits']:,} in memory, {reading['misses']:,} had to wait"))
        if "written_at_once" in reading:  # not by a daemon of an earlier version
            at_once, by_threads = reading["written_at_once"], reading["written_by_threads"]
            lines.append(("writes", f"{at_once:,} to memory at once, {by_threads:,} by threads, which may wait"))
        lines.append(("prefetch", f"{reading['heuristic']}, {decimal(reading['asked'])} requested"))
        lines += [("", device) for device in reading["devices"]]
    return lines


def _kernel_lines(mount: Mounted) -> list[tuple[str, str]]:
    """Return what the kernel may cache: one line for each fact, and the reason why it is not more."""
    lines = []
    for fact in mount.remembered:
        what = " ".join(filter(None, (fact["what"], fact["of"], fact["where"] and f"on {fact['where']}")))
        why = f": {fact['reason']}" if fact["reason"] else ""
        # A daemon of an earlier version calls the hint `way_out` only.
        hint = f" (hint: {fact['way_out']})" if fact["way_out"] else ""
        lines.append(f"{_duration(fact['seconds']):10}  {what}{why}{hint}")
    return [("" if number else "kernel", line) for number, line in enumerate(lines)]


def _duration(seconds: float | None) -> str:
    if not seconds:
        return "no limit" if seconds is None else "not at all"
    unit, value = next((unit, seconds / size) for unit, size in _UNITS if seconds >= size)
    return f"{value:g} {unit}"
