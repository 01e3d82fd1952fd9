"""The clean-up process of a mount: waits for the end of the daemon, and removes what the daemon leaves behind.

It imports everything before it begins to wait, so that the package may be replaced meanwhile. It imports no more than
it needs, because there may be many mounts.
"""

import contextlib
import fcntl
import os
import signal
import sys

from .linux import fuseconnection, mountinfo, process
from .unmount import KINDS, detach_dead

NAME = "cloakfs-cleanup"
"""The name that `ps` shows, with the mount point and the daemon; the kernel keeps 15 bytes of it."""


def main() -> None:
    """Run the clean-up process.

    Its arguments are the mount point, the daemon (a pidfd), the directory that the daemon has locked, and the files
    that it leaves. The id and the device of the mount arrive on standard input once it is made.
    """
    target, daemon, state, *told = sys.argv[1:]
    # A signal to all processes of a terminal or a service ends the daemon as well, and with it this process.
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    pid = os.getppid()
    process.call_this_process(NAME, target, str(pid))
    if os.fork():
        os._exit(0)
    mount = os.read(0, 100).decode().split()
    os.dup2(1, 0)
    if not mount:
        return
    number, device = mount
    process.dies(int(daemon), pid)
    if not process.ends(int(daemon), 0):  # it still holds the session, so the device cannot have been reused
        _abort(int(number), device)
    _take_off(int(number), device)
    process.ends(int(daemon))
    _forget(state, told)


def _abort(number: int, device: str) -> None:
    """Abort the connection, unless the mount is already detached, and so cannot be told apart from another one."""
    with contextlib.suppress(OSError):
        abort = fuseconnection.open_abort(device)
        if _place(number, device) is not None:
            fuseconnection.abort(abort)
        os.close(abort)


def _take_off(number: int, device: str) -> None:
    """Detach the mount, unless something is mounted on top of it."""
    place = _place(number, device)
    if place is not None:
        detach_dead(place.path, number)


def _place(number: int, device: str) -> mountinfo.Place | None:
    place = mountinfo.by_id().get(number)
    return place if place is not None and place.device == device and place.kind in KINDS else None


def _forget(state: str, told: list[str]) -> None:
    """Remove what the daemon published, unless a new daemon has locked the directory by now."""
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(state, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in told:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
