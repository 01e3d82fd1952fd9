"""Compares what callers can do over NFS through cloakfs with what they can do through exports of the bare tree.

Each work is done by the owner of a file, a member of its group, a user whom its ACL names, and another user; over
NFSv3, v4.0 and v4.2; with the kernel's server and with nfs-ganesha; through each kind of entry. So is what clients hold
when a mount is replaced, and when a file changes behind it. All of it happens in the laboratory's guest.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.lab.guest import kernel_version, missing
from tests.nfs.knfsd.worktable import CALLERS, DELEGATED, FULL, HELD, NOT_LOCKED, RESULTS, VERSIONS, WORKS, Row

TESTS = ("test_work_table.py", "test_held_table.py", "test_work_table_ganesha.py", "test_held_table_ganesha.py")
FOLDER = Path(__file__).parents[1] / "nfs" / "knfsd"
SERVERS = {"knfsd": "The kernel's server", "Ganesha": "nfs-ganesha"}

NOT_THERE = (
    "**COPY** (server-side copies) is an operation of NFSv4.2 alone. Over NFSv3 and v4.0, and with nfs-ganesha 4.3, "
    "the client reads and writes instead: the row of `cp` shows that.",
    "**Delegations** are part of NFSv4: none over NFSv3. nfs-ganesha gives none, unless its configuration says "
    "otherwise, and that of cloakfs does not.",
    "**nfs-ganesha serves one identity for each export.** Entries by which each caller has a view of its own "
    "(`cloak_list`, `range_map`, `no_root_squash`, `subtree_check` or `no_client_cache` without `views` or "
    "`all_squash`) are refused by `export plan`, and a view has one caller, by whatever uid it comes.",
    "**Locks over NFSv3 with nfs-ganesha**: cloakfs turns its lock manager (NLM) off; clients mount with `nolock`.",
    "**`squash` of a range for the owner or the group**: a range of gids that is squashed is one group, so that its "
    "callers are in no other.",
    "**A bare export is not replaced.** Where files are held open, what is expected is that the caller goes on.",
)
"""The cells that cannot exist, each with its reason."""

DIFFERENT = (
    "**`chgrp` with nfs-ganesha and `all_squash`**: no group that the client names is one of the server's, so that it "
    "is refused with EINVAL ([exports.md](exports.md)). A bare Ganesha lets the owner do it.",
    "**Access by an ACL with nfs-ganesha**: a bare Ganesha knows the mode bits alone, and refuses it. What is compared "
    "is what it lets the same caller do as a member of the group.",
)
"""What is not the same, or could not be, with the reason."""

INTRODUCTION = """\
# What callers can do over NFS, compared with the bare tree

<!-- Written by `scripts/campaign table --output docs/nfs-table.md`. Do not edit. -->

Each work is done through cloakfs and through an export of the bare tree by the same server, and the results are
compared: the error that the program gets, and then size, mode, owner, times and ACL of the real file. **{same:,} of
{all:,} comparisons are equal**; each other one is named. (Linux {kernel}, server and client; nfs-ganesha {ganesha}.)

The file is ann's, of the group `team`, mode 0664. *owner* is ann, *group* is a member of the team, *ACL* is a user
whom the file's ACL lets read and write, and *other* may only read. All users may make files in the directory.
"""


class Results:
    """A plug-in of pytest that collects the rows which tests report.

    Args:
        kept: the file with the rows of earlier runs, to which those of this one are added; None to keep nothing.
    """

    def __init__(self, kept: Path | None) -> None:
        self._kept = kept
        known = [Row(*row) for row in json.loads(kept.read_text("utf-8"))] if kept and kept.exists() else []
        self._rows = {row[:5]: row for row in known}

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order of the tests."""
        return list(self._rows.values())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the rows of a test, whether it passed or not."""
        if report.when == "call":
            properties: Iterable[tuple[str, Any]] = report.user_properties
            rows = [Row(*row) for name, value in properties if name == RESULTS for row in value]
            self._rows |= {row[:5]: row for row in rows}
            if self._kept:
                self._kept.write_text(json.dumps(self.rows), "utf-8")


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    head = list(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def cell(rows: list[Row]) -> str:
    """Return what came of a work by a caller, in all of these comparisons, with their number."""
    if not rows:
        return "–"
    told = {bare: "yes" if bare == "ok" else f"no ({bare})" for bare in sorted({row.bare for row in rows})}
    differing = Counter((row.outcome, row.entry.partition(" (")[0]) for row in rows if not row.is_same)
    said = "; ".join(f"{outcome} with {entry}, {n}×" for (outcome, entry), n in sorted(differing.items()))
    return f"{' or '.join(told.values())} · {len(rows)}" + (f"; **{said}**" if said else "")


def works(rows: list[Row]) -> str:
    """Return the table of works by callers."""
    return table(
        ("work", *CALLERS),
        (
            (work, *(cell([row for row in rows if (row.work, row.caller) == (work, caller)]) for caller in CALLERS))
            for work in WORKS
        ),
    )


def entries(rows: list[Row]) -> str:
    """Return the table of how many comparisons are the same, by entry and version."""

    def count(entry: str, version: str) -> str:
        same = [row.is_same for row in rows if (row.entry, row.version) == (entry, version)]
        return f"{sum(same)} of {len(same)}" if same else "–"

    names = dict.fromkeys(row.entry for row in rows)
    return table(
        ("entry", *(f"NFSv{version}" for version in VERSIONS)),
        ((f"`{name}`", *(count(name, version) for version in VERSIONS)) for name in names),
    )


def held(rows: list[Row]) -> str:
    """Return the table of what clients hold, by what happens, version and caller."""

    def outcome(what: str, version: str, caller: str) -> str:
        found = [row for row in rows if (row.work, row.version, row.caller) == (what, version, caller)]
        fine = "seen" if what in DELEGATED.values() else "goes on"
        return ", ".join(fine if row.outcome == "ok" else f"**{row.outcome}**" for row in found) or "–"

    return table(
        ("what happens", "NFS", *CALLERS),
        (
            (what, f"v{version}", *(outcome(what, version, caller) for caller in CALLERS))
            for what in (*HELD, *map(NOT_LOCKED.format, HELD), *DELEGATED.values())
            for version in VERSIONS
            if any((row.work, row.version) == (what, version) for row in rows)
        ),
    )


def document(rows: list[Row], ganesha: str) -> str:
    """Return the whole of docs/nfs-table.md."""
    same = sum(row.is_same for row in rows)
    text = INTRODUCTION.format(same=same, all=len(rows), kernel=kernel_version(), ganesha=ganesha)
    for server, title in SERVERS.items():
        own = [row for row in rows if row.server == server]
        of_works, of_held = ([row for row in own if (row.work in WORKS) == is_work] for is_work in (True, False))
        text += f"\n## {title}\n"
        for heading, part in (
            ("Whether it can be done, and in how many comparisons (entries and versions)", works(of_works)),
            ("How many works are as through the bare export", entries(of_works)),
            ("What comes of files that clients hold, and of changes behind the mount", held(of_held)),
        ):
            text += f"\n{heading}:\n\n{part}"
    for heading, reasons in (("What differs, and why", DIFFERENT), ("What cannot be compared", NOT_THERE)):
        text += f"\n## {heading}\n\n" + "".join(f"- {reason}\n" for reason in reasons)
    return text


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign table", description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the table (Markdown); otherwise it is printed")
    parser.add_argument("--rows", type=Path, help="a file that keeps results, so that runs with -k add up to a table")
    parser.add_argument("-k", default="", help="which of the tests, as pytest has it")
    words = parser.parse_args()
    if why := missing():
        print(f"table: {why}", file=sys.stderr)
        return 2
    os.environ[FULL] = "full"
    began, results = time.monotonic(), Results(words.rows)
    arguments = ["-v", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-k", words.k]
    status = pytest.main([*arguments, *(str(FOLDER / name) for name in TESTS)], plugins=[results])
    said = subprocess.run(["ganesha.nfsd", "-v"], capture_output=True, text=True, check=False).stdout
    version = next((line.split()[-1].removeprefix("V") for line in said.splitlines() if "Release" in line), "none")
    text = document(results.rows, version)
    if words.output:
        words.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    differing = sum(not row.is_same for row in results.rows)
    print(f"{len(results.rows):,} comparisons, {differing} differ, in {time.monotonic() - began:.0f} s")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
