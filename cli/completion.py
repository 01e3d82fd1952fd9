"""What shells complete as arguments. (click makes the functions for bash, zsh and fish: `_CLOAKFS_COMPLETE`.)

The type `click.Path` would do so, too, but it calls stat(2), for which a mount that hangs makes it wait.
"""

import click
from click.shell_completion import CompletionItem

from cloakfs.state.runtime import places


def a_file(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file or directory."""
    return [CompletionItem(incomplete, type="file")]


def a_directory(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a directory."""
    return [CompletionItem(incomplete, type="dir")]


def a_mount_point(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the mount point of a cloakfs mount."""
    paths = {place.path for place in places()}
    return [CompletionItem(path) for path in sorted(paths) if path.startswith(incomplete)]
