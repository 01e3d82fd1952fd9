"""What tests replace in cloakfs exists: a test that replaces what nobody uses any more would pass for nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloakfs.mount import daemon, settings
from tests.altered import replace, uses

TESTS = Path(__file__).parents[1]


def imported(code: ast.Module) -> set[str]:
    """Return the names by which a text imports anything of cloakfs."""
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(code)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if re.match("cloakfs|cli$|cli[.]", getattr(node, "module", None) or alias.name)
    }


def rebound(code: ast.Module) -> Iterator[str]:
    """Yield the attributes of what was imported that a text assigns to."""
    ours = imported(code)
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ours:
                yield ast.unparse(node)


def texts(path: Path) -> Iterator[ast.Module]:
    """Yield the Python programs that a module has as text."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "0" for part in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"{\w*(![rs])?}", "0", node.value)
        else:
            continue
        try:
            yield ast.parse(text)
        except (SyntaxError, ValueError):
            continue


@pytest.mark.parametrize(
    "path", sorted({*TESTS.rglob("*.py")} - {Path(__file__)}), ids=lambda path: str(path.relative_to(TESTS))
)
def test_no_text_replaces_anything(path: Path) -> None:
    """No checker looks into texts; `tests.altered` is for that."""
    assert [name for code in texts(path) for name in rebound(code)] == []


def test_a_text_that_does_is_found() -> None:
    for text in (
        "from cloakfs.mount import daemon; daemon._X = 0",
        "import cloakfs.tree.objects\ncloakfs.tree.objects.MOST = 1",
    ):
        assert len(list(rebound(ast.parse(text)))) == 1
    for text in ("from cloakfs.mount import daemon\nx = daemon.serve", "import os\nos.x = 1", "self.cloakfs = 1"):
        assert not list(rebound(ast.parse(text)))


def test_what_does_not_exist_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError):
        replace(settings.Settings, "no_such_field", 1)


def test_what_is_only_a_type_hint_cannot_be_replaced() -> None:
    """Where a module only names a type, nothing happens by a replacement of it."""
    code = "from x import A, B, C\ndef f(a: A, b: int = B) -> A:\n    c: A = C\n    return a\n"
    assert [uses(code, name) for name in "ABCf"] == [False, True, True, True]
    with pytest.raises(LookupError):
        replace(daemon, "Filesystem", None)
