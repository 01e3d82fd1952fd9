"""`cloakfs prune`: removes the state of mounts that are gone."""

import os

import click
from rich.filesize import decimal

from cloakfs import keptstate
from cloakfs.mounted import STATE_DIR
from cloakfs.shell import printable

from .common import fail, note
from .completion import a_directory
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
        fail("only root may remove the state of mounts", 1)
    named = frozenset(os.path.realpath(path) for path in mountpoints)
    try:
        states = keptstate.all_states()
    except OSError as exc:
        fail(f"{STATE_DIR}: {exc.strerror}", 1)
    told = []
    failed = False
    found = set()
    for state in states:
        target = state.record.target if state.record else None
        if mountpoints and target not in named:
            continue
        found.add(target)
        try:
            verdict = keptstate.judge(state, named)
            removed = verdict.removable and not dry_run and keptstate.remove(state)
        except FileNotFoundError:
            continue  # somebody else has removed it
        except OSError as exc:
            note(f"{state.path}: {exc.strerror}")
            failed = True
            continue
        failed = failed or bool(mountpoints and not verdict.removable)
        told.append(
            {
                "state": state.path,
                "source": state.record.source if state.record else None,
                "target": target,
                "bytes": state.size,
                "removable": verdict.removable,
                "removed": removed,
                "reason": verdict.reason,
            }
        )
        if not as_json:
            done = "removed" if removed else "would be removed" if verdict.removable else "kept"
            click.echo(printable(f"{state.path} ({decimal(state.size)}): {done}: {verdict.reason}"))
    if as_json:
        echo_json(told)
    for path in mountpoints:
        if os.path.realpath(path) not in found:
            note(f"{path}: there is no state of a mount at this place")
            failed = True
    if failed:
        raise SystemExit(1)
