"""Exports.d on disk: which files there are, and what stands in them."""

import errno
import glob
import os
import stat

from .errors import ExportsError, ExportsWarning
from .options import Export
from .parse import parse, parse_all


def files_of(path: str) -> list[str]:
    """The exports.d files that a path means: itself, or for a folder its `*.exports`, sorted."""
    return sorted(glob.glob(os.path.join(glob.escape(path), "*.exports"))) if os.path.isdir(path) else [path]


def read_all(file: str) -> tuple[list[Export], list[ExportsWarning], list[ExportsError]]:
    """The entries of an exports.d file, and all that is to be said about it.

    Raises:
        OSError: it cannot be read.
    """
    return parse_all(_text(file), file)


def read(file: str) -> tuple[list[Export], list[ExportsWarning]]:
    """The entries of an exports.d file, none of which may be wrong, and what to warn about.

    Raises:
        ExportsError: the first error in it.
        OSError: it cannot be read.
    """
    return parse(_text(file), file)


def policy_dir(file: str) -> str:
    """What a relative `policy=` file in an exports.d file is relative to: the directory of the latter."""
    return os.path.dirname(os.path.abspath(file))


def _text(file: str) -> str:
    # What is no file is refused: a FIFO that nobody writes to would never end.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8", errors="surrogateescape") as text:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", file)
        return text.read()
