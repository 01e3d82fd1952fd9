"""What all commands share comes from `cli/`: a folder to type checkers, the package `cloakfs_cli` to installed code."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.common import OWN_COMMAND, console, fail, note
else:
    from cloakfs_cli.common import OWN_COMMAND, console, fail, note

__all__ = ("OWN_COMMAND", "console", "fail", "note")
