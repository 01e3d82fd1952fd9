"""Exports.d on disk: finds the files and reads them."""

import errno
import glob
import os
import stat

from .errors import ExportsError, ExportsWarning
from .options import Export
from .parse import parse, parse_all


def files_of(path: str) -> list[str]:
    """Return the exports.d files that a path means: the file itself, or for a folder its sorted `*.exports`."""
    return sorted(glob.glob(os.path.join(glob.escape(path), "*.exports"))) if os.path.isdir(path) else [path]


def read_all(file: str) -> tuple[list[Export], list[ExportsWarning], list[ExportsError]]:
    """Return the entries of an exports.d file, and all warnings and errors about it.

    Raises:
        OSError: the file cannot be read.
    """
    return parse_all(_text(file), file)


def read(file: str) -> tuple[list[Export], list[ExportsWarning]]:
    """Return the entries of an exports.d file, none of which may be wrong, and the warnings about it.

    Raises:
        ExportsError: the first error in the file.
        OSError: the file cannot be read.
    """
    return parse(_text(file), file)


def policy_dir(file: str) -> str:
    """Return the directory of an exports.d file, to which a relative `policy=` file in it is relative."""
    return os.path.dirname(os.path.abspath(file))


def _text(file: str) -> str:
    # Anything but a regular file is refused: reading a FIFO without a writer would never end.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8", errors="surrogateescape") as text:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", file)
        return text.read()
