"""`cloakfs check`: every error and warning of exports.d files, each on a line with its place."""

import glob
import json
import os
import sys
from dataclasses import asdict, dataclass

import click

from cloakfs.exports import Export, parse_all
from cloakfs.policy import PolicyError, load_policy
from cloakfs.views import ViewError, parse_item

from .common import printable


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said about a place; line and column are None if it is about a whole file."""

    file: str
    line: int | None
    column: int | None
    severity: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        return f"{place}: {self.severity}: {self.message}"


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--text-only", is_flag=True, help="Do not look at this machine: its directories, plug-ins and users.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of lines.")
def check(paths: tuple[str, ...], *, text_only: bool, as_json: bool) -> None:
    """Check exports.d files, and all *.exports in folders.

    An error is what has a mount refuse an entry: a text that is not in the grammar, and unless --text-only, a
    directory that is not there, a plug-in that does not load (its file is run), a view of a user who does not exist.
    A warning is what is probably not meant.

    Exit status: 0 no errors (warnings do not count), 1 errors, or a file that cannot be read, 2 wrong usage.
    """
    findings = []
    for path in paths:
        files = sorted(glob.glob(os.path.join(glob.escape(path), "*.exports"))) if os.path.isdir(path) else [path]
        if not files:
            findings.append(Finding(path, None, None, "warning", "no *.exports in this folder"))
        for file in files:
            findings += _check_file(file, text_only=text_only)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(printable(str(finding)))
    sys.exit(any(finding.severity == "error" for finding in findings))


def _check_file(path: str, *, text_only: bool) -> list[Finding]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            entries, warnings, errors = parse_all(file.read(), path)
    except OSError as exc:
        return [Finding(path, None, None, "error", exc.strerror or str(exc))]
    findings = [
        Finding(e.location.file, e.location.line, e.location.column, "error", f"{e.problem}; expected {e.expected}")
        for e in errors
    ]
    findings += [Finding(w.location.file, w.location.line, w.location.column, "warning", w.message) for w in warnings]
    if not text_only:
        absent = set()
        for entry in entries:
            if entry.path not in absent and not os.path.isdir(entry.path):
                absent.add(entry.path)
                findings.append(_error(entry, f"{entry.path}: not a directory"))
            findings += _check_machine(entry, os.path.dirname(os.path.abspath(path)))
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def _error(entry: Export, message: str) -> Finding:
    return Finding(entry.location.file, entry.location.line, entry.location.column, "error", message)


def _check_machine(entry: Export, policy_dir: str) -> list[Finding]:
    """What plug-ins and users of this machine have to say about an entry."""
    said = []
    try:
        load_policy(entry.options.policy, entry.options, policy_dir)
    except PolicyError as exc:
        said.append(str(exc))
    for item in entry.options.views:
        try:
            parse_item(item)
        except ViewError as exc:
            said.append(str(exc))
    return [_error(entry, text) for text in said]
