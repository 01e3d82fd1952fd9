"""Each change fragment gets into the change notes; towncrier passes over a file in a folder that it does not know."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
TOWNCRIER = Path(sys.executable).parent / "towncrier"

pytestmark = pytest.mark.skipif(not TOWNCRIER.exists(), reason="needs towncrier (scripts/setup --test)")


def fragments(top: Path) -> list[Path]:
    return [
        path
        for path in (top / "changes").rglob("*")
        if path.is_file() and path not in (top / "changes/README.md", top / "changes/template.md")
    ]


def left_out(top: Path) -> list[str]:
    """The fragments of which the draft of the next notes has nothing."""
    made = subprocess.run([TOWNCRIER, "build", "--draft"], cwd=top, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    lines = {re.sub(r"^(- |  )", "", line).rstrip() for line in made.stdout.splitlines()}
    return [
        str(path.relative_to(top))
        for path in fragments(top)
        if not lines.issuperset(line.rstrip() for line in path.read_text().strip().splitlines())
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The configuration and a folder for fragments, with none in it."""
    (tmp_path / "changes").mkdir()
    for name in ("pyproject.toml", "CHANGELOG.md", "changes/template.md"):
        (tmp_path / name).write_bytes((TOP / name).read_bytes())
    return tmp_path


def put(top: Path, name: str, text: str) -> None:
    (top / "changes" / name).parent.mkdir(exist_ok=True)
    (top / "changes" / name).write_text(text)


def test_the_fragments_are_well_formed() -> None:
    assert left_out(TOP) == []
    assert [str(path) for path in fragments(TOP) if not path.read_text().strip()] == []


def test_a_misplaced_fragment_is_found(copy: Path) -> None:
    put(copy, "nfs/a.fixed.md", "A write is\nnot lost.\n")
    assert left_out(copy) == []
    put(copy, "nsf/b.fixed.md", "Nor is a read.\n")
    put(copy, "c.fixed.md", "Nor is a lock.\n")
    assert sorted(left_out(copy)) == ["changes/c.fixed.md", "changes/nsf/b.fixed.md"]


def test_a_kind_that_there_is_not_is_refused(copy: Path) -> None:
    put(copy, "nfs/a.fixd.md", "A write is not lost.\n")
    with pytest.raises(AssertionError, match=re.escape("Invalid news fragment name: a.fixd.md")):
        left_out(copy)


def test_a_release_writes_its_section_above_the_others(copy: Path) -> None:
    put(copy, "nfs/a.fixed.md", "A write is\nnot lost.\n")
    put(copy, "visibility/a.security.md", "A name is hidden.\n")
    before = (copy / "CHANGELOG.md").read_text()
    done = subprocess.run(
        [TOWNCRIER, "build", "--version=9.9", "--date=2030-01-31", "--keep"], cwd=copy, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    marker = "<!-- towncrier release notes start -->\n"
    section = """
## 9.9 (2030-01-31)

### Who sees what

#### Security

- A name is hidden.

### NFS exports

#### Fixed

- A write is
  not lost.
"""
    assert (copy / "CHANGELOG.md").read_text() == before.replace(marker, marker + section)
