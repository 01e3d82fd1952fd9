"""`cloakfs umount`: take a mount away and wait for its daemon to end."""

import errno
import os
import select

import click

from cloakfs import linux
from cloakfs.mountpoint import KIND

from .common import fail, mounted


@click.command()
@click.argument("mountpoint")
@click.option("-l", "--lazy", is_flag=True, help="Detach at once; who has files open may finish with them.")
def umount(mountpoint: str, *, lazy: bool) -> None:
    """Unmount MOUNTPOINT.

    Exit status: 0 unmounted and the daemon has ended (with --lazy: detached), 1 it is busy or no cloakfs mount.
    """
    mountpoint = os.path.normpath(os.path.join(os.getcwd(), mountpoint))
    daemon = mounted().get(mountpoint)
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        lines = [line.split() for line in mounts]
    if not any(line[1].encode().decode("unicode_escape") == mountpoint and line[2] == KIND for line in lines):
        fail(f"{mountpoint}: not a cloakfs mount", 1)
    # Opened before the unmount: afterwards the pid may be somebody else's.
    try:
        process = os.pidfd_open(daemon.pid) if daemon else None
    except ProcessLookupError:
        process = None
    try:
        linux.umount(mountpoint, linux.MNT_DETACH if lazy else 0)
    except OSError as exc:
        hint = "; who uses it? (fuser -vm), or --lazy" if exc.errno == errno.EBUSY else ""
        fail(f"{mountpoint}: {exc.strerror}{hint}", 1)
    if process is not None and not lazy and not select.select([process], [], [], 30)[0]:
        fail(f"{mountpoint}: unmounted, but its daemon is still there after 30 s", 1)
