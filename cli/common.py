"""What the commands share."""

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from cloakfs.config.options import Export, Options
from cloakfs.mountpoint import MountError

if TYPE_CHECKING:
    from rich.console import Console

# What not every command needs is imported where it is.

# For other processes of ours. -P: nothing is imported from the working directory, which may be anybody's.
OWN_COMMAND = (sys.executable, "-P", "-m", "cloakfs_cli.main")


def fail(text: str, status: int) -> NoReturn:
    """End with one clear line: status 1 for what cannot be done, 2 for what was asked wrongly."""
    click.echo(printable(f"cloakfs: {text}"), err=True)
    sys.exit(status)


def note(text: str) -> None:
    """Say one line beside what was asked for."""
    click.echo(printable(f"cloakfs: {text}"), err=True)


def printable(text: str) -> str:
    """Text for a terminal: whoever named a file may have put control characters or other bytes into its name."""
    parts = []
    for char in text:
        if char.isprintable():
            parts.append(char)
        else:
            parts += [f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape")]
    return "".join(parts)


def console() -> "Console":
    """Where tables go: in colours and as wide as the terminal, but plain and unbroken into a file or a pipe."""
    from rich.console import Console  # noqa: PLC0415

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, force_terminal=False, no_color=True, width=100_000)


def entry_for(entries: list[Export], path: str, source: str, client: str | None) -> Options:
    """The options of the one entry for `source` (and `client`) among those of the file `path`.

    Raises:
        MountError: there is none, or several.
    """
    matching = [e for e in entries if os.path.realpath(e.path) == source and client in (None, e.client)]
    if not matching:
        raise MountError(f"{path}: no entry for {source}" + (f" and client {client}" if client else ""))
    if len(matching) > 1:
        clients = ", ".join(entry.client for entry in matching)
        raise MountError(f"{path}: several entries for {source}; choose one with --client ({clients})")
    return matching[0].options
