"""The table of what callers can do over NFS: how it is written, and that the one in docs/ has all of its rows."""

from pathlib import Path

import pytest

from tests.campaign import table
from tests.nfs.knfsd.worktable import CALLERS, COPY, DELEGATED, HELD, VERSIONS, WORKS, Row

DOCUMENT = Path(__file__).parents[2] / "docs" / "nfs-table.md"


def row(work: str, outcome: str = "ok", bare: str = "ok", server: str = "knfsd", entry: str = "views") -> Row:
    return Row(server, "4.2", entry, work, "group", outcome, bare, outcome == bare)


def test_what_differs_is_named() -> None:
    rows = [row(COPY), row(COPY, "EIO", entry="all_squash (group)"), row(COPY, "EIO", entry="all_squash (owner)")]
    assert table.cell(rows) == "yes · 3; **EIO with all_squash, 2×**"
    assert table.cell([row(COPY, "EPERM", "EPERM")]) == "no (EPERM) · 1"
    assert table.cell([]) == "–"
    assert "| `views` | – | – | 1 of 1 |" in table.entries(rows)
    assert "| `all_squash (group)` | – | – | 0 of 1 |" in table.entries(rows)
    text = table.document([*rows, row(HELD[0], "EIO", server="Ganesha")], "4.3")
    assert "**1 of 4 comparisons are equal**" in " ".join(text.split())
    assert f"| {HELD[0]} | v4.2 | – | **EIO** | – | – |" in text


@pytest.mark.parametrize("title", table.SERVERS.values())
def test_the_document_is_complete(title: str) -> None:
    """After a change of what is compared: scripts/campaign table --output docs/nfs-table.md."""
    part = DOCUMENT.read_text(encoding="utf-8").partition(f"## {title}")[2].partition("\n## ")[0]
    for work in WORKS:
        assert f"| {work} |" in part, work
    for how in HELD:
        for version in VERSIONS:
            assert f"| {how} | v{version} |" in part or f"| {how}; the file is not locked | v{version} |" in part
    if title == table.SERVERS["knfsd"]:
        for what in DELEGATED.values():
            assert f"| {what} | v4.2 |" in part
    assert f"| {' | '.join(CALLERS)} |" in part
