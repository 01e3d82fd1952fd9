"""The tables of docs/design.md name every room, and every module that lies loose, and nothing else."""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]


def named(heading: str) -> set[str]:
    """What the rows of the table with this heading name."""
    text = (TOP / "docs/design.md").read_text()
    (table,) = re.findall(rf"^\| {heading} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_loose_modules() -> None:
    assert named("module") == {path.name for path in (TOP / "cloakfs").glob("*.py") if path.name != "__init__.py"}


def test_the_rooms() -> None:
    rooms = {f"{path.parent.name}/" for path in (TOP / "cloakfs").glob("*/__init__.py")}
    assert named("room") == rooms | {"cli/", "bench/", "package/"}
