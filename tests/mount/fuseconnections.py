"""Ends FUSE sessions by force, so that a test in which a daemon waits for itself leaves no process waiting."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator

from cloakfs import linux
from cloakfs.linux import mountinfo

_CONNECTIONS = "/sys/fs/fuse/connections"


def abort_below(directory: str) -> None:
    """End every FUSE session that is mounted below `directory`, and unmount everything there."""
    there = [place for place in mountinfo.by_id().values() if place.path.startswith(directory + "/")]
    for place in there:
        if place.kind.startswith("fuse"):
            with (
                contextlib.suppress(OSError),
                open(f"{_CONNECTIONS}/{place.device.partition(':')[2]}/abort", "w") as file,
            ):
                file.write("1")
    for place in reversed(there):
        with contextlib.suppress(OSError):
            linux.umount(place.path, linux.MNT_DETACH)


@contextlib.contextmanager
def nobody_waits_for_ever(directory: str, seconds: float = 90.0) -> Iterator[None]:
    """Abort what is mounted below `directory` after the with block, or if the block takes too long."""
    control = not os.path.exists(_CONNECTIONS) or not os.path.ismount(_CONNECTIONS)
    if control:
        subprocess.run(["mount", "-t", "fusectl", "none", _CONNECTIONS], check=False, capture_output=True)
    timer = threading.Timer(seconds, abort_below, (directory,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        abort_below(directory)
        if control:
            subprocess.run(["umount", _CONNECTIONS], check=False, capture_output=True)
