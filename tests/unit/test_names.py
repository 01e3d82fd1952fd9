"""One name means one thing: no class name, and no file name of a module, is there twice.

A reader of `Request` or `names.py`, in a traceback or in a search, should not have to ask which one it is.
"""

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def classes(path: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]


def twice(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_each_class_name_is_there_once_in_cloakfs_the_commands_and_the_benchmarks() -> None:
    names = [
        name for room in ("cloakfs", "cli", "bench") for path in (ROOT / room).rglob("*.py") for name in classes(path)
    ]
    assert "Filesystem" in names
    assert twice(names) == set()


def test_each_file_name_of_a_module_is_there_once_in_cloakfs() -> None:
    names = [path.name for path in (ROOT / "cloakfs").rglob("*.py") if path.name != "__init__.py"]
    assert "daemon.py" in names
    assert twice(names) == set()


def test_what_counts_as_twice() -> None:
    assert twice(["A", "_B", "C", "_B", "A", "A"]) == {"A", "_B"}
