"""The log file of a process in the background, which may be rotated at any time."""

import contextlib
import os


def follow_rotation(path: str) -> None:
    """Let standard output and standard error go to the file at `path` if that is another one by now, or none is there.

    Nothing changes if it cannot be opened: what has been opened before is better than no log.
    """
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(2)):
                return
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
        finally:
            os.close(log)
