"""Functions that the commands share."""

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from cloakfs.linux import mountinfo
from cloakfs.messages import printable, shell_word
from cloakfs.tuning import STANDARD, Tuning

if TYPE_CHECKING:
    from rich.console import Console

    from cloakfs.config.options import Export, Options

# Modules that not every command needs are imported where they are used.

# The command for further cloakfs processes. With -P, nothing is imported from the working directory, which may belong
# to any user.
OWN_COMMAND = (sys.executable, "-P", "-m", "cloakfs_cli.main")
FORKED = (sys.executable, "-P", "-m", "cloakfs_cli.forked")  # of a `ForkServer`


def fail(text: str, status: int) -> NoReturn:
    """End the command with one line of text and this exit status (`exits`)."""
    click.echo(printable(f"cloakfs: {text}"), err=True)
    sys.exit(status)


def note(text: str) -> None:
    """Print one line to standard error, besides the output of the command."""
    click.echo(printable(f"cloakfs: {text}"), err=True)


def tuning() -> Tuning:
    """Return what `main` was called with."""
    return click.get_current_context().find_object(Tuning) or STANDARD


def working_directory() -> str:
    """Return the working directory; or the root, if it has been removed and nothing relative can be found in it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def mount_point(path: str) -> str:
    """Return the mount point that is meant. One that does not answer is not asked: lstat(2) would wait for it."""
    absolute = os.path.abspath(path)
    return absolute if absolute in mountinfo.by_path() else os.path.realpath(path)


def console(*, stderr: bool = False) -> "Console":
    """Return the console for tables: in colour and as wide as the terminal; plain and unwrapped in a file or pipe.

    Text is printed as it is: a client `n[a-c].example.com` or a path with `:name:` is no markup. Styles are `Text`s.
    """
    from rich.console import Console  # noqa: PLC0415

    as_it_is = partial(Console, stderr=stderr, highlight=False, markup=False, emoji=False)
    if (sys.stderr if stderr else sys.stdout).isatty():
        return as_it_is()
    return as_it_is(force_terminal=False, no_color=True, width=100_000)


def entry_for(entries: "list[Export]", path: str, source: str, client: str | None) -> "Options":
    """Return the options of the one entry for `source` (and `client`) among those of the file `path`.

    Raises:
        MountError: there is no such entry, or several.
    """
    from cloakfs.fuse.attach import MountError  # noqa: PLC0415

    matching = [e for e in entries if os.path.realpath(e.path) == source and client in (None, e.client)]
    if not matching:
        raise MountError(f"{path}: no entry for {source}" + (f" and client {client}" if client else ""))
    if len(matching) > 1:
        if len({entry.client for entry in matching}) == 1:
            places = ", ".join(str(entry.location) for entry in matching)
            raise MountError(
                f"{path}: several entries for {source} and client {matching[0].client} ({places}); keep one"
            )
        clients = ", ".join(shell_word(entry.client) for entry in matching)
        raise MountError(f"{path}: several entries for {source}; choose one with --client ({clients})")
    return matching[0].options
