"""`cloakfs umount`: unmounts, and waits for the daemon to end."""

import errno
import os

import click

from cloakfs import linux
from cloakfs.linux import mountinfo, process
from cloakfs.mounted import Mounted, all_mounted
from cloakfs.unmount import KINDS

from .common import fail, note, printable

_SILENCE_SECONDS = 1.0
_WAIT_SECONDS = 30.0


@click.command()
@click.argument("mountpoint")
@click.option("-l", "--lazy", is_flag=True, help="Detach at once; processes with open files keep them.")
def umount(mountpoint: str, *, lazy: bool) -> None:
    """Unmount MOUNTPOINT.

    Exit status: 0 unmounted and the daemon has ended (with --lazy: detached), 1 busy, not a cloakfs mount, or the
    same view is also mounted elsewhere (a bind mount), so that its daemon continues.
    """
    top = _mounted_at(os.path.abspath(mountpoint))
    if top is None:
        # The path was compared as text first, because a mount that does not answer would not answer lstat(2) either.
        top = _mounted_at(os.path.realpath(mountpoint))
    if top is None or top.kind not in KINDS:
        fail(f"{mountpoint}: not a cloakfs mount", 1)
    daemon = next((mount for mount in all_mounted() if mount.device == top.device), None)
    if daemon is not None and daemon.unknown:
        note(
            f"{top.path}: its daemon (process {daemon.pid}) publishes its state in version {daemon.version}, which "
            "this cloakfs does not know; unmounting is the same in every version"
        )
    # The pidfd is opened before the unmount, because another process may reuse the pid afterwards.
    held = process.held(daemon.pid) if daemon else None
    try:
        linux.umount(top.path, linux.MNT_DETACH if lazy else 0)
    except OSError as exc:
        hint = "; see who uses it (fuser -vm), or use --lazy" if exc.errno == errno.EBUSY else ""
        fail(f"{top.path}: {exc.strerror}{hint}", 1)
    others = [place.path for place in mountinfo.by_id().values() if place.device == top.device and place.kind in KINDS]
    if daemon is not None and others:
        fail(
            f"{top.path}: unmounted, but its daemon (process {daemon.pid}) continues: the same view is also mounted at "
            f"{', '.join(others)}",
            1,
        )
    if daemon is not None and held is not None:
        _wait(top.path, daemon, held, lazy=lazy)


def _mounted_at(path: str) -> mountinfo.Place | None:
    """Return the topmost mount at `path`."""
    return next((place for place in reversed(mountinfo.by_id().values()) if place.path == path), None)


def _wait(path: str, daemon: Mounted, held: int, *, lazy: bool) -> None:
    """Wait for the daemon's end, unless users may be left (`lazy`)."""
    if process.ends(held, _SILENCE_SECONDS):
        return
    if lazy:
        click.echo(
            printable(
                f"cloakfs: {path}: detached; its daemon (process {daemon.pid}) serves processes that still use it, "
                "and then ends (kill it twice to end it now)"
            ),
            err=True,
        )
        return
    click.echo(printable(f"cloakfs: {path}: unmounted; waiting for its daemon (process {daemon.pid}) to end"), err=True)
    if not process.ends(held, _WAIT_SECONDS):
        fail(
            f"{path}: unmounted, but its daemon (process {daemon.pid}) has not ended after {_WAIT_SECONDS:g} s; "
            "is the view also mounted in another mount namespace, such as a container's?",
            1,
        )
