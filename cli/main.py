"""The command group `cloakfs`."""

import importlib
import os
import sys

import click

from cloakfs.tuning import STANDARD, Tuning

from .background import record_inherited
from .common import fail
from .exits import WRONG
from .output import run

_COMMANDS = (
    "mount", "umount", "status", "metrics", "export", "session", "prune", "check", "explain", "table", "trace",
    "events", "exposure",
)  # fmt: skip
"""Each is a module with a command of that name."""

_IN_A_CLONE = {"bench": "python -m bench", "prefetch": "python -m bench prefetch"}
"""Commands up to 0.1.0, and what does the same in a clone (docs/measuring.md). Remove them after 0.2.0."""


class _Commands(click.Group):
    """Imports only the command that is called: to import all of them takes longer than most of them run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _IN_A_CLONE:
            return _moved(cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f".{cmd_name}", __package__), cmd_name)
        return command


def _moved(name: str) -> click.Command:
    """Return a command that takes any arguments, and only says what has taken its place."""

    def show_replacement(**_ignored: object) -> None:
        fail(f"{name}: this is not installed any more; in a clone of the repository, run: {_IN_A_CLONE[name]}", WRONG)

    return click.Command(
        name,
        callback=show_replacement,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        hidden=True,
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="cloakfs")
def cloakfs() -> None:
    """Give each caller of a shared tree a view of its own."""


def main(tuning: Tuning = STANDARD) -> None:
    """Run the command; `cloakfs SOURCE MOUNTPOINT …`, as mount(8)'s FUSE helper calls it, means `cloakfs mount`."""
    record_inherited()
    if _is_by_mount8(sys.argv[1:]):
        sys.argv.insert(1, "mount")
    run(cloakfs, tuning)


def _is_by_mount8(arguments: list[str]) -> bool:
    """Whether this is SOURCE MOUNTPOINT …; in a remount, SOURCE may be any word (`fsname=`)."""
    if arguments and os.sep in arguments[0] and not arguments[0].startswith("-"):
        return True
    return arguments[2:3] == ["-o"] and "remount" in ",".join(arguments[3:4]).split(",")


if __name__ == "__main__":
    main()
