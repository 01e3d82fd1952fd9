"""Names that administrators and users chose are printed as they are: rich reads `[…]` as markup."""

import ast
from pathlib import Path

import pytest
from rich.table import Table

from bench.sheet import Sheet
from cli.common import console

TOP = Path(__file__).parents[2]

NAMES = ["n[a-c].example.com", "/srv/a[red]", "/srv/a[/b]c", "/srv/:smile:", "[bold]", r"\[x]", "[link=file:///x]y"]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_prints_names_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(name, title=name)
    table.add_column(name)
    table.add_row(name, name)
    console().print(table)
    console().print(name)
    assert capsys.readouterr().out.count(name) == 6


@pytest.mark.parametrize("name", NAMES)
def test_so_does_a_sheet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    console().print(Sheet(name, [name], [[f"**{name}**"]]).table())
    assert capsys.readouterr().out.count(name) == 3


def _calls() -> list[tuple[str, ast.Call]]:
    found = []
    for folder in ("cli", "bench", "cloakfs"):
        for path in sorted((TOP / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            found += [(str(path.relative_to(TOP)), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def test_one_function_makes_the_consoles() -> None:
    """Any other console would read markup."""
    sources = {
        path: path.read_text() for folder in ("cli", "bench", "cloakfs") for path in (TOP / folder).rglob("*.py")
    }
    users = [path for path, text in sources.items() if "rich.console" in text or "rich.markup" in text]
    assert users == [TOP / "cli/common.py"]


def test_no_bar_reads_markup() -> None:
    """A column of a progress bar does, whatever its console."""
    said = [
        (place, {word.arg: ast.unparse(word.value) for word in node.keywords})
        for place, node in _calls()
        if _called(node) == "TextColumn" or (_called(node) == "partial" and ast.unparse(node.args[0]) == "TextColumn")
    ]
    assert said
    assert [place for place, words in said if words.get("markup") != "False"] == []
