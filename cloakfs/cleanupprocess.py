"""The clean-up process of a mount: waits for the end of the daemon, and takes off what it leaves behind.

Everything is imported before it begins to wait, and nothing but what it takes: a package that is replaced meanwhile
does not matter, and there may be many mounts.
"""

import contextlib
import fcntl
import os
import signal
import sys

from .linux import fuseconnection, mountinfo, process
from .unmount import KINDS, detach_dead

NAME = "cloakfs-cleanup"
"""What `ps` tells, with the mount point and the daemon; the kernel takes 15 bytes."""


def main() -> None:
    """The mount point, the daemon (a pidfd), the directory it has locked and the files it leaves are the arguments.

    The number and the device of the mount come by standard input, once it is made.
    """
    target, daemon, state, *told = sys.argv[1:]
    # What ends all processes of a terminal or a service ends the daemon as well, and then this one.
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
    if not process.ends(int(daemon), 0):  # it still has the session, and the device is no other's
        _abort(int(number), device)
    _take_off(int(number), device)
    process.ends(int(daemon))
    _forget(state, told)


def _abort(number: int, device: str) -> None:
    """End the connection, unless the mount is off the tree already, and so cannot be told from another one."""
    with contextlib.suppress(OSError):
        abort = fuseconnection.open_abort(device)
        if _place(number, device) is not None:
            fuseconnection.abort(abort)
        os.close(abort)


def _take_off(number: int, device: str) -> None:
    """If something is mounted on top, it stays."""
    place = _place(number, device)
    if place is not None:
        detach_dead(place.path, number)


def _place(number: int, device: str) -> mountinfo.Place | None:
    place = mountinfo.by_id().get(number)
    return place if place is not None and place.device == device and place.kind in KINDS else None


def _forget(state: str, told: list[str]) -> None:
    """Remove what the daemon told, unless there is another one by now, which has it locked."""
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(state, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in told:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
