"""`cloakfs umount`: unmounts, and waits for the daemon to end."""

import contextlib
import errno
import os
import signal
import time

import click

from cloakfs import linux
from cloakfs.fuse.detach import KINDS
from cloakfs.linux import mountinfo, process
from cloakfs.messages import printable
from cloakfs.state.runtime import Mounted, all_mounted, waiting

from .common import fail, note, tuning
from .completion import a_mount_point
from .exits import FAILED

_SILENCE_SECONDS = 1.0
_WAIT_SECONDS = 30.0
# How long a mount may be busy before that counts, and how often to try meanwhile.
_PAUSE_SECONDS = 0.02


@click.command()
@click.argument("mountpoint", shell_complete=a_mount_point)
@click.option("-l", "--lazy", is_flag=True, help="Detach at once; processes with open files keep them.")
def umount(mountpoint: str, *, lazy: bool) -> None:
    """Unmount MOUNTPOINT.

    Exit status: 0 unmounted and the daemon has ended (with --lazy: detached), 1 busy, not a cloakfs mount, or the
    same view is also mounted elsewhere (a bind mount), so that its daemon continues.
    """
    path = os.path.abspath(mountpoint)
    if _mounted_at(path) is None:
        # The path was compared as text first, because a mount that does not answer would not answer lstat(2) either.
        path = os.path.realpath(mountpoint)
    given_up = _end_waiting(path)
    top = _mounted_at(path)
    if top is None or top.kind not in KINDS:
        if given_up:
            note(f"{mountpoint}: its daemon had died; it will not be mounted again")
            return
        fail(f"{mountpoint}: not a cloakfs mount", FAILED)
    daemon = next((mount for mount in all_mounted() if mount.device == top.device), None)
    if daemon is not None and daemon.unknown:
        note(
            f"{top.path}: its daemon (process {daemon.pid}) publishes its state in version {daemon.version}, which "
            "this cloakfs does not know; unmounting is the same in every version"
        )
    # The pidfd is opened before the unmount, because another process may reuse the pid afterwards.
    held = process.held(daemon.pid) if daemon else None
    try:
        _take_off(top, linux.MNT_DETACH if lazy else 0)
    except OSError as exc:
        hint = "; see who uses it (fuser -vm), or use --lazy" if exc.errno == errno.EBUSY else ""
        fail(f"{top.path}: {exc.strerror}{hint}", FAILED)
    others = [place.path for place in mountinfo.by_id().values() if place.device == top.device and place.kind in KINDS]
    if daemon is not None and others:
        fail(
            f"{top.path}: unmounted, but its daemon (process {daemon.pid}) continues: the same view is also mounted at "
            f"{', '.join(others)}",
            FAILED,
        )
    if daemon is not None and held is not None:
        _wait(top.path, daemon, held, lazy=lazy)


def _take_off(top: mountinfo.Place, flags: int) -> None:
    """Unmount; a mount is also busy for the moment in which its own daemon looks at it (`filesystem.relookup`)."""
    deadline = time.monotonic() + tuning().unmount_seconds
    while True:
        try:
            linux.umount(top.path, flags)
        except OSError as exc:
            if exc.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
            if _mounted_at(top.path) != top:  # another mount, which was not to be unmounted
                raise
        else:
            return


def _end_waiting(path: str) -> bool:
    """End the attempts to mount again there, once one that is under way has come to its end; was there any?"""
    found = [mount for mount in waiting() if mount.target == path]
    for mount in found:
        held = process.held(mount.pid)
        if held is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGTERM)
            if not process.ends(held, _WAIT_SECONDS):
                fail(f"{mount.target}: process {mount.pid}, which mounts it again, does not end", FAILED)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(mount.path)
    return bool(found)


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
            FAILED,
        )
