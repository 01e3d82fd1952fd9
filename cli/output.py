"""The output of a command: JSON that every reader accepts, and errors of an output that is full or closed."""

import io
import json
import os
import sys
from typing import Any, NoReturn

import click

from cloakfs.messages import UserError, printable

from .exits import FAILED


class OutputError(Exception):
    """Standard output cannot be written. This is no OSError, because those are about the objects of a command."""


class _Output(io.FileIO):
    """Standard output, whose errors can be distinguished from others."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            raise OutputError(exc.strerror) from exc


def run(command: click.Command, obj: object, name: str = "cloakfs") -> NoReturn:
    """Run the command and end the process.

    If the reader stops reading (`cloakfs table / | head`), no message is printed. If the output cannot be written for
    any other reason, one line says so, and the status is 1, whatever the command found.

    Args:
        command: the command.
        obj: what it finds in its context (`click.Context.obj`).
        name: what calls the command, for its messages on usage.
    """
    before = sys.stdout
    if before is not None:
        raw = _Output(before.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=bool(before.line_buffering)
        )
    status: str | int | None = FAILED
    try:
        try:
            command.main(prog_name=name, obj=obj)
        except SystemExit as end:
            status = end.code
        except UserError as exc:
            click.echo(printable(f"cloakfs: {exc}"), err=True)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputError as exc:
        status = FAILED
        if not isinstance(exc.__cause__, BrokenPipeError):
            click.echo(f"cloakfs: standard output: {exc}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), before.fileno())  # takes what is still in the buffer
    sys.exit(status)


def echo_json(value: object) -> None:
    """Print a value as JSON. A byte of a name that is not UTF-8 becomes a backslash and three digits, as in text."""
    click.echo(json.dumps(_encodable(value), indent=2))


def echo_json_line(value: object) -> None:
    """Print a value as JSON in one line, for a list that has no end."""
    click.echo(json.dumps(_encodable(value)))


def _encodable(value: object) -> object:
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    if isinstance(value, str) and not value.isascii():
        return "".join(printable(char) if "\ud800" <= char <= "\udfff" else char for char in value)
    return value
