"""Runs the real command with parts of it replaced, to bring about what cannot be brought about from outside.

What is replaced is said by functions, which the new process calls before the command (`tests.mount.alterations`). They
are code like any other: their types are checked, and one that names something that does not exist ends the command.
"""

import ast
import base64
import functools
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeAlias, TypeGuard

from cloakfs.tuning import STANDARD, Tuning

Alteration: TypeAlias = "Callable[[], None] | functools.partial[None]"
"""A function of a module, or a partial one of such a function, and of arguments that can be pickled."""

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def command_with(*alterations: Alteration, tuning: Tuning = STANDARD) -> tuple[str, ...]:
    """Return the real command, altered, and with these times and bounds."""
    text = encoded(alterations, tuning)
    code = f"import sys; sys.path.insert(0, {_ROOT!r}); from tests.altered import main; main({text!r})"
    return sys.executable, "-c", code


def encoded(alterations: Sequence[Alteration], tuning: Tuning) -> str:
    """Return the text by which `main` in another process makes these alterations."""
    return base64.b64encode(pickle.dumps((alterations, tuning))).decode()


def replace(owner: object, name: str, value: object) -> None:
    """Replace an attribute of a module or a class.

    Raises:
        AttributeError: there is none of that name.
        LookupError: a module of cloakfs has imported it, but uses it in type hints at most, so that nothing would be
            replaced.
    """
    getattr(owner, name)
    if _is_ours(owner) and not uses(inspect.getsource(owner), name):
        raise LookupError(f"{owner.__name__} does not use {name}")
    setattr(owner, name, value)


def _is_ours(owner: object) -> TypeGuard[ModuleType]:
    """Whether this is a module of cloakfs or its commands, and no package, whose names others use."""
    return (
        isinstance(owner, ModuleType)
        and owner.__name__.startswith(("cloakfs", "cli."))
        and "__path__" not in vars(owner)
    )


def uses(code: str, name: str) -> bool:
    """Whether a module defines this name or, outside of type hints, uses it."""
    found = _Names()
    found.visit(ast.parse(code))
    return name in found.names


class _Names(ast.NodeVisitor):
    """Collects the names that code defines and uses, apart from type hints and imports."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names.add(node.name)
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list, *node.body):
            self.visit(part)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)


def main(text: str) -> None:
    """Run the command, altered as `encoded` says."""
    alterations, tuning = pickle.loads(base64.b64decode(text))
    for alter in alterations:
        alter()
    importlib.import_module("cloakfs_cli.main").main(tuning)  # by the name that other processes find it by, too
