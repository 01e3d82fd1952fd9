"""`cloakfs prune`: removes the state of mounts that are gone."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import click
from rich.filesize import decimal

from cloakfs.messages import printable
from cloakfs.state import persistent
from cloakfs.state.runtime import STATE_DIR

from .common import fail, note
from .completion import a_directory
from .exits import FAILED
from .output import echo_json


@click.command()
@click.argument("mountpoints", nargs=-1, metavar="[MOUNTPOINT]…", shell_complete=a_directory)
@click.option("-n", "--dry-run", is_flag=True, help="Remove nothing; only report what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects instead of text.")
def prune(mountpoints: tuple[str, ...], *, dry_run: bool, as_json: bool) -> None:
    """Remove the state of mounts that are gone, and report what is kept.

    A mount is gone if its SOURCE has been removed or, unless an NFS server exported it, its mount point. With
    MOUNTPOINTs, only their state is removed, and it is removed if they are not mounted. File handles that NFS clients
    still hold become stale.

    Exit status: 0 done, 1 something cannot be removed, or a MOUNTPOINT is mounted or has no state.
    """
    if os.geteuid() != 0:
        fail("only root may remove the state of mounts", FAILED)
    named = frozenset(os.path.realpath(path) for path in mountpoints)
    states = [state for state in _all_states() if not mountpoints or _target(state) in named]
    found = {_target(state) for state in states}
    pruned = []
    failed = False
    for state in states:
        try:
            result = _prune(state, named, dry_run=dry_run)
        except FileNotFoundError:
            continue  # another process has removed it
        except OSError as exc:
            note(f"{state.path}: {exc.strerror}")
            failed = True
            continue
        failed = failed or bool(mountpoints and not result.verdict.removable)
        pruned.append(result)
        if not as_json:
            click.echo(result.line())
    if as_json:
        echo_json([result.fields() for result in pruned])
    for path in mountpoints:
        if os.path.realpath(path) not in found:
            note(f"{path}: there is no state of a mount at this place")
            failed = True
    if failed:
        sys.exit(FAILED)


@dataclass(frozen=True, slots=True)
class _Pruned:
    """What became of the state of one mount."""

    state: persistent.PersistentState
    verdict: persistent.Removability
    removed: bool

    def line(self) -> str:
        done = "removed" if self.removed else "would be removed" if self.verdict.removable else "kept"
        return printable(f"{self.state.path} ({decimal(self.state.size)}): {done}: {self.verdict.reason}")

    def fields(self) -> dict[str, Any]:
        return {
            "state": self.state.path,
            "source": self.state.record.source if self.state.record else None,
            "target": _target(self.state),
            "bytes": self.state.size,
            "removable": self.verdict.removable,
            "removed": self.removed,
            "reason": self.verdict.reason,
        }


def _all_states() -> list[persistent.PersistentState]:
    """Return the states of all mounts, or end the command."""
    try:
        return persistent.all_states()
    except OSError as exc:
        fail(f"{STATE_DIR}: {exc.strerror}", FAILED)


def _prune(state: persistent.PersistentState, named: frozenset[str], *, dry_run: bool) -> _Pruned:
    """Remove the state of one mount, if it may go.

    Raises:
        OSError: it cannot be read or removed.
    """
    verdict = persistent.removability(state, named)
    return _Pruned(state, verdict, verdict.removable and not dry_run and persistent.remove(state))


def _target(state: persistent.PersistentState) -> str | None:
    """Return the mount point, if the state says which it is."""
    return state.record.target if state.record else None
