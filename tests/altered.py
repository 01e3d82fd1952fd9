"""Runs the real command with parts of it replaced, to bring about what cannot be brought about from outside.

What is replaced is said by functions, which the new process calls before the command (`tests.mount.alterations`). They
are code like any other: their types are checked, and one that names something that does not exist ends the command.
"""

import base64
import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

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
    """
    getattr(owner, name)
    setattr(owner, name, value)


def main(text: str) -> None:
    """Run the command, altered as `encoded` says."""
    alterations, tuning = pickle.loads(base64.b64decode(text))
    for alter in alterations:
        alter()
    importlib.import_module("cloakfs_cli.main").main(tuning)  # by the name that other processes find it by, too
