"""What all commands share is of `cli/`, which type checkers know by its folder, and installed code by its package."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.common import OWN_COMMAND, console, fail
else:
    from cloakfs_cli.common import OWN_COMMAND, console, fail

__all__ = ("OWN_COMMAND", "console", "fail")
