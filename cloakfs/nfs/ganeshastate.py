"""What NFSv4 clients hold on an nfs-ganesha: what they have locked, and its record of them on disk.

Measured with nfs-ganesha 4.3, or read in its source. It locks, on the file system, what an NFSv4 client locks, with
the open file description of the client's own (F_OFD_SETLK). Its record (`RecoveryBackend = fs_ng`) is a directory below
`v4recov`, named after the host, with an entry for each client that has a lease, whether or not it has anything open.
Each server makes a new one; until its grace time has passed, a symbolic link leads to that of the server before.
"""

import contextlib
import os
from collections.abc import Iterable

from ..linux import ownfiles

_PLACE = "v4recov"


def locked_devices(fdinfo: Iterable[str]) -> set[str]:
    """Return the devices (`major:minor`) of the files that are locked, according to proc_pid_fdinfo(5).

    Args:
        fdinfo: the lines of one file there, or of several.
    """
    found = set()
    for line in fdinfo:
        # lock: 1: OFDLCK  ADVISORY  WRITE -1 07:1f:1234 0 EOF
        words = line.split()
        if words[:1] == ["lock:"] and "ADVISORY" in words:
            major, minor, _ = words[6].split(":")
            found.add(f"{int(major, 16)}:{int(minor, 16)}")
    return found


def locked_by(pid: int) -> set[str]:
    """Return the devices of the files that a process has locked; none if it has ended. No file system is asked."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in ownfiles.scandir(f"/proc/{pid}/fdinfo"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), ownfiles.open(entry.path) as lines:
                found |= locked_devices(lines)
    return found


def is_in_grace(recovery: str) -> bool:
    """Whether the server waits for clients of the server before it to claim what they hold.

    Args:
        recovery: its `RecoveryRoot`. If no server runs: whether the last one did when it ended.
    """
    links, records = _entries(recovery)
    return bool(links) and len(records) > 1


def skip_next_grace(recovery: str) -> None:
    """Have the next server start without a grace time, because no client has anything to claim.

    If the grace time of the present one has not passed, nothing is changed: clients may have yet to claim something.
    """
    if not is_in_grace(recovery):
        for link in _entries(recovery)[0]:
            ownfiles.unlink(link)


def remove_old_records(recovery: str) -> None:
    """Remove the records that no link leads to, which servers leave that end during their grace time."""
    links, records = _entries(recovery)
    linked = {ownfiles.realpath(link) for link in links}
    for path in records:
        if ownfiles.realpath(path) not in linked:
            ownfiles.rmtree(path)


def _entries(recovery: str) -> tuple[list[str], list[str]]:
    """Return the links to records, and the records."""
    try:
        entries = list(ownfiles.scandir(os.path.join(recovery, _PLACE)))
    except FileNotFoundError:
        return [], []
    return (
        [entry.path for entry in entries if entry.is_symlink()],
        [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)],
    )
