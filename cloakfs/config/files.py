"""Exports.d on disk: finds the files and reads them."""

import errno
import glob
import os
import stat

from .errors import ExportsError, ExportsWarning
from .lint import repeats
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


def read(path: str) -> tuple[list[Export], list[ExportsWarning]]:
    """Return the entries of an exports.d file, or of a folder, none of which may be wrong, and the warnings about them.

    Raises:
        ExportsError: the first error in a file.
        OSError: a file cannot be read.
    """
    entries: list[Export] = []
    warnings: list[ExportsWarning] = []
    for file in files_of(path):
        found, said = parse(_text(file), file)
        entries += found
        warnings += said
    for error in repeats(entries):
        raise error
    return entries, warnings


def policy_dir(path: str) -> str:
    """Return the directory that a relative `policy=` refers to: that of the exports.d file, or the folder itself."""
    absolute = os.path.abspath(path)
    return absolute if os.path.isdir(absolute) else os.path.dirname(absolute)


def _text(file: str) -> str:
    # Anything but a regular file is refused: reading a FIFO without a writer would never end.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a regular file", file)
    with open(fd, encoding="utf-8", errors="surrogateescape") as text:
        return text.read()
