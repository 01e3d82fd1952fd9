"""The map in docs/design.md is the folder listing: it names every module, and nothing else."""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]


def mapped() -> set[str]:
    """The modules of the map: of a row, those after the first are in the folder of the first."""
    paths = set()
    for row in re.findall(r"^\| (`cloakfs/.*?) \|", (TOP / "docs/design.md").read_text(), re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        paths |= {first, *(str(Path(first).parent / other) for other in others)}
    return {path for path in paths if path.endswith(".py")}


def test_the_map_names_every_module() -> None:
    modules = {str(path.relative_to(TOP)) for path in (TOP / "cloakfs").rglob("*.py") if path.name != "__init__.py"}
    assert mapped() == modules
