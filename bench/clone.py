"""The clone that this is part of, and how its modules are run as processes of their own."""

import os

from cli.common import OWN_COMMAND

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
"""The clone."""


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of `bench`, from any working directory.

    As with other processes of cloakfs, nothing is imported from the working directory.
    """
    *python, _ = OWN_COMMAND
    return ["/usr/bin/env", f"PYTHONPATH={ROOT}", *python, name, *arguments]
