"""What is logged, and the log file of a process in the background, which may be rotated at any time."""

import contextlib
import logging
import os

from ..linux import as_daemon, ownfiles


def follow_rotation(path: str) -> None:
    """Let standard output and standard error go to the file at `path` if that is another one by now, or none is there.

    Nothing changes if it cannot be opened: what has been opened before is better than no log.
    """
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(ownfiles.stat(path), ownfiles.fstat(2)):
                return
        log = ownfiles.open_fd(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
        finally:
            os.close(log)


class Formatter(logging.Formatter):
    """Formats what is logged while a request is served, too: a traceback reads source files."""

    format = as_daemon(logging.Formatter.format)
