"""What tests reach into, and how often they sleep, is counted, so that it becomes less and never more.

A test that uses what is private in cloakfs has to be changed whenever that is renamed or moved. A test that sleeps
takes long on a fast machine and fails on a slow one: `tests.waiting` waits for what is to happen, and `told` in
`tests/mount/conftest.py` until daemons have heard of a change.
"""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ALLOWED = json.loads(Path(__file__).with_name("reaches.json").read_text("utf-8"))
"""Of each kind, how many there may be, by file. Lower the numbers when there are fewer."""

_OF_NAMEDTUPLE = {"_asdict", "_field_defaults", "_fields", "_replace"}
_REPLACERS = {"replace", "setattr", "setitem", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _OF_NAMEDTUPLE


def privates(code: ast.Module) -> Iterator[str]:
    """Yield what is private in other classes and modules, and used or replaced."""
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")) | ast.Attribute(value=ast.Name("os"), attr="_exit"):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield ast.unparse(node)
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("tests"):
                yield from (f"{module}.{alias.name}" for alias in names if is_private(alias.name))
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), args=[_, ast.Constant(str(value)), *_]):
                if name in _REPLACERS and is_private(value):
                    yield f"{name} {value}"


def sleeps(code: ast.Module) -> Iterator[str]:
    """Yield the calls that sleep for a time, and not until something has happened."""
    for node in ast.walk(code):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("time" | "trio"), attr="sleep"), args=[seconds]):
                if not (isinstance(seconds, ast.Constant) and seconds.value == 0):  # which lets others run
                    yield ast.unparse(node)


KINDS: dict[str, Callable[[ast.Module], Iterator[str]]] = {"privates": privates, "sleeps": sleeps}


@pytest.mark.parametrize("kind", KINDS)
def test_they_become_fewer(kind: str) -> None:
    found = {
        str(path.relative_to(TESTS)): count
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != "waiting.py" and (count := len(list(KINDS[kind](ast.parse(path.read_text("utf-8"))))))
    }
    allowed: dict[str, int] = ALLOWED[kind]
    more = {path: count for path, count in found.items() if count > allowed.get(path, 0)}
    assert not more, f"more {kind} than before; test by what is public, and wait for what is to happen"
    assert found == allowed, f"fewer {kind} than before; lower the numbers in reaches.json"


def test_what_is_counted() -> None:
    def found(text: str, kind: str) -> list[str]:
        return list(KINDS[kind](ast.parse(text)))

    assert found("x._y; self._y; self.x._y; x.__y__; os._exit(0); x._replace(y=1)", "privates") == ["x._y", "self.x._y"]
    assert found("from cloakfs.nfs.guard import Guard, _X\nfrom tests.x import _y", "privates") == [
        "cloakfs.nfs.guard._X"
    ]
    assert found("patch.setattr(x, '_y', 1); replace(x, '_y', 1); replace(x, 'y', 1); f(x, '_y')", "privates") == [
        "setattr _y",
        "replace _y",
    ]
    assert found("time.sleep(1); await_(trio.sleep(x)); trio.sleep(0); trio.sleep_forever()", "sleeps") == [
        "time.sleep(1)",
        "trio.sleep(x)",
    ]
