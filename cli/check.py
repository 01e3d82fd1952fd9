"""`cloakfs check`: every error and warning of exports.d files, each on a line with its place."""

import sys
from dataclasses import asdict, dataclass

import click

from cloakfs.audit.precheck import aliases, precheck
from cloakfs.config.errors import Location
from cloakfs.config.files import files_of, read_all
from cloakfs.config.lint import conflicts, describe_kinds, repeats
from cloakfs.config.options import Export
from cloakfs.messages import printable
from cloakfs.nfs.hosts import unresolved

from .completion import a_file
from .output import echo_json


@dataclass(frozen=True, slots=True)
class CheckMessage:
    """A message about a place; line and column are None if it is about a whole file."""

    file: str
    line: int | None
    column: int | None
    severity: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        return f"{place}: {self.severity}: {self.message}"


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=a_file)
@click.option("--text-only", is_flag=True, help="Check the text only: look up nothing on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects instead of lines.")
def check(paths: tuple[str, ...], *, text_only: bool, as_json: bool) -> None:
    """Check exports.d files, and all *.exports files in folders.

    An error makes a mount refuse the entry: text that violates the grammar and, unless --text-only is given, a
    directory that does not exist, a plug-in that does not load (its file is run), or a view of a user who does not
    exist. A warning points at what is probably a mistake, such as a host name that cannot be resolved. A note says what
    becomes of ids that a range_map does not name.

    Exit status: 0 no errors (warnings do not count), 1 errors, or a file that cannot be read, 2 wrong usage.
    """
    findings = []
    entries: list[Export] = []
    for path in paths:
        files = files_of(path)
        if not files:
            findings.append(CheckMessage(path, None, None, "warning", "no *.exports files in this folder"))
        for file in files:
            found, of_file = _check_file(file, text_only=text_only)
            entries += found
            findings += of_file
    findings += [_finding(error.location, "error", error.message) for error in repeats(entries)]
    said = [*conflicts(entries), *([] if text_only else aliases(entries))]
    findings += [_finding(remark.location, "warning", remark.message) for remark in said]
    if as_json:
        echo_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(printable(str(finding)))
    sys.exit(any(finding.severity == "error" for finding in findings))


def _check_file(path: str, *, text_only: bool) -> tuple[list[Export], list[CheckMessage]]:
    try:
        entries, warnings, errors = read_all(path)
    except OSError as exc:
        return [], [CheckMessage(path, None, None, "error", exc.strerror or str(exc))]
    findings = [_finding(e.location, "error", e.message) for e in errors]
    findings += [_finding(w.location, "warning", w.message) for w in warnings]
    findings += [_finding(e.location, "note", describe_kinds(e.options)) for e in entries if e.options.range_map]
    if not text_only:
        findings += [_finding(problem.location, "error", problem.message) for problem in precheck(entries)]
        # Nothing but a warning, since this machine may be offline: `export plan` and `up` refuse it.
        findings += [_finding(remark.location, "warning", remark.message) for remark in unresolved(entries)]
    return entries, sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def _finding(at: Location, severity: str, message: str) -> CheckMessage:
    return CheckMessage(at.file, at.line, at.column, severity, message)
