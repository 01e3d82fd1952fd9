"""Reading exports.d from disk, and what this machine has to say about an entry."""

import errno
import glob
import os
import pwd
import stat

from .exports import Export, ExportsError, ExportsWarning, parse_all
from .policy import PolicyError, load_policy
from .views import ViewError, parse_item


def files_of(path: str) -> list[str]:
    """The exports.d files that a path means: itself, or for a folder its `*.exports`, sorted."""
    return sorted(glob.glob(os.path.join(glob.escape(path), "*.exports"))) if os.path.isdir(path) else [path]


def read_all(file: str) -> tuple[list[Export], list[ExportsWarning], list[ExportsError]]:
    """The entries of an exports.d file, and what is to be said about it.

    Raises:
        OSError: it cannot be read.
    """
    return parse_all(read_text(file), file)


def read_text(file: str) -> str:
    """The text of an exports.d file. What is no file is refused: a FIFO that nobody writes to would never end.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8", errors="surrogateescape") as text:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", file)
        return text.read()


def refusals(entry: Export) -> list[str]:
    """Why this machine would refuse to mount an entry: no such directory, plug-in, or user. (A plug-in is run.)"""
    said = []
    if not os.path.isdir(entry.path):
        said.append(f"{entry.path}: not a directory")
    try:
        load_policy(entry.options.policy, entry.options, policy_dir(entry))
    except PolicyError as exc:
        said.append(str(exc))
    for item in entry.options.views:
        try:
            parse_item(item)
        except ViewError as exc:
            said.append(str(exc))
    return said


def accounts_of(item: str) -> list[str]:
    """The single identities that an item of `views=` stands for: of a range, the accounts in it that there are."""
    try:
        parsed = parse_item(item)
    except ViewError:
        return []  # see `refusals`
    if not isinstance(parsed, range):
        return [item]
    return sorted({entry.pw_name for entry in pwd.getpwall() if entry.pw_uid in parsed})


def policy_dir(entry: Export) -> str:
    """What a relative `policy=` file of an entry is relative to: the directory of its exports.d file."""
    return os.path.dirname(os.path.abspath(entry.location.file))
