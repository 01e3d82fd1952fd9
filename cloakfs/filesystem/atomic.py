"""Replacing and removing exactly what was seen, although its name may lead to something else the next moment.

System calls that take a name act on whatever has that name when they run. Where something may be hidden from the
caller, this must be exactly what the caller was found to see before. So the object is first moved aside, by a rename
that can be undone, to a name that cannot be guessed. It is removed only when it has been recognized there. (In a
directory that only the caller may change, this is not needed: `names`.)

On file systems without RENAME_NOREPLACE or RENAME_EXCHANGE (NFS, for example; ext2 has only the former), the plain
system calls are made. The same goes for replacing or removing a directory that is not empty: they cannot harm it.
"""

import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable

from .. import linux
from ..linux import ROOT, Credentials, Stat
from ..tree import calls
from ..tree.objects import Stale, dev_ino

log = logging.getLogger(__name__)

TRIES = 20
"""How many times something else may come in between."""

# The errors of file systems that do not know a flag of renameat2(2).
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

# A longer name may need one more block, and it must be possible to remove a file even if there is none.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG)


class Elsewhere(OSError):
    """The name leads to something other than what was seen, which has been left, or put back, where it was."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))


def leads_to(credentials: Credentials, directory: int, name: bytes, info: Stat) -> bool:
    """Whether the name leads to the object with this stat. (While a descriptor holds it, nothing else gets its number.)

    The stat may be outdated: only st_dev and st_ino count.
    """
    try:
        there, _ = calls.statx(credentials, directory, name)
    except FileNotFoundError:
        return False
    return dev_ino(there) == dev_ino(info)


def _put_aside(credentials: Credentials, directory: int, name: bytes, info: Stat) -> bytes:
    """Rename the object with this stat from `name` to a name that cannot be guessed, and return that name.

    Raises:
        Elsewhere: `name` no longer leads to it.
        OSError: renameat2(2) failed.
    """
    aside = b".cloakfs-" + secrets.token_hex(16).encode()
    calls.rename(credentials, directory, name, directory, aside, linux.RENAME_NOREPLACE)
    if leads_to(credentials, directory, aside, info):
        return aside
    _put_back(credentials, directory, aside, name)
    raise Elsewhere


def _put_back(credentials: Credentials, directory: int, aside: bytes, name: bytes) -> None:
    try:
        calls.rename(credentials, directory, aside, directory, name, linux.RENAME_NOREPLACE)
    except OSError as exc:
        log.warning("%r is now called %r, and could not get its name back (%s)", name, aside, exc.strerror)


def _is_empty(seen: int) -> bool:
    """Whether this directory is empty; False when in doubt."""
    try:
        return calls.is_empty(ROOT, seen)
    except OSError:
        return False


def remove(
    credentials: Credentials,
    directory: int,
    name: bytes,
    seen: int,
    info: Stat,
    call: Callable[[Credentials, int, bytes], None],
) -> None:
    """Remove the entry `name`, which leads to what `seen` (O_PATH) refers to, by `calls.unlink` or `calls.rmdir`.

    Args:
        credentials: the caller.
        directory: the directory that the entry is in.
        name: the name of the entry.
        seen: the object.
        info: its stat.
        call: one of these two functions.

    Raises:
        Elsewhere: `name` no longer leads to it, and nothing was removed.
        OSError: a system call failed.
    """
    # What is going to fail has to fail at once, so that no directory is missing meanwhile.
    can_be = not stat.S_ISDIR(info.st_mode) if call is calls.unlink else _is_empty(seen)
    aside = name
    if can_be:
        try:
            aside = _put_aside(credentials, directory, name, info)
        except Elsewhere:
            raise
        except OSError as exc:
            if exc.errno not in (*_UNABLE, *_NO_SPACE):
                raise
    try:
        call(credentials, directory, aside)
    except BaseException:
        if aside is not name:
            _put_back(credentials, directory, aside, name)
        raise


def rename(
    credentials: Credentials,
    old: int,
    name_old: bytes,
    new: int,
    name_new: bytes,
    source: int,
    open_target: Callable[[], int | None],
) -> int | None:
    """Rename onto nothing, or onto something that the caller sees.

    Args:
        credentials: the caller.
        old: the directory of the source.
        name_old: the name of the source.
        new: the directory of the target.
        name_new: the name of the target.
        source: refers (O_PATH) to what is renamed.
        open_target: opens (O_PATH) what has the target's name; returns None if there is nothing, and raises if it is
            hidden.

    Returns:
        a descriptor (O_PATH) of what was replaced; None if there was nothing.

    Raises:
        Elsewhere: the source's name no longer leads to it, and nothing was renamed.
        OSError: a system call failed.
    """
    ours = calls.fstat(source)
    for _ in range(TRIES):
        target = open_target()
        if target is None:
            if not leads_to(credentials, old, name_old, ours):
                raise Elsewhere
            try:
                calls.rename(credentials, old, name_old, new, name_new, linux.RENAME_NOREPLACE)
            except FileExistsError:
                continue  # it has just been made
            except OSError as exc:
                if exc.errno not in _UNABLE:
                    raise
                calls.rename(credentials, old, name_old, new, name_new)
            return None
        try:
            if _replace(credentials, old, name_old, new, name_new, source, target):
                return target
        except BaseException:
            calls.close(target)
            raise
        calls.close(target)
    raise Stale


def _replace(
    credentials: Credentials, old: int, name_old: bytes, new: int, name_new: bytes, source: int, target: int
) -> bool:
    """Rename onto what `target` refers to; return False if the name leads to something else."""
    ours, theirs = calls.fstat(source), calls.fstat(target)
    onto_directory = stat.S_ISDIR(theirs.st_mode)
    if stat.S_ISDIR(ours.st_mode) is not onto_directory:
        code = errno.EISDIR if onto_directory else errno.ENOTDIR
        raise OSError(code, os.strerror(code))
    if onto_directory or dev_ino(ours) == dev_ino(theirs):
        # A directory is replaced only if it is empty, and two names of one file both stay (rename(2)).
        calls.rename(credentials, old, name_old, new, name_new)
        return True
    try:
        exchange(credentials, old, name_old, new, name_new, source, target)
    except Elsewhere:
        if leads_to(credentials, old, name_old, ours):
            return False  # the target is another one, or has gone
        raise
    except FileNotFoundError:
        if leads_to(credentials, old, name_old, ours):
            return False  # the target has gone
        raise
    except OSError as exc:
        if exc.errno not in _UNABLE:
            raise
        calls.rename(credentials, old, name_old, new, name_new)
        return True
    # The caller had the right to do all this. It may not have the right to do the rest in the source's directory.
    try:
        aside = _put_aside(ROOT, old, name_old, theirs)
    except (Elsewhere, FileNotFoundError):
        return True  # others have moved or removed it
    except OSError as exc:
        if exc.errno not in _NO_SPACE:
            raise
        calls.unlink(credentials, old, name_old)
    else:
        calls.unlink(ROOT, old, aside)
    return True


def exchange(
    credentials: Credentials, old: int, name_old: bytes, new: int, name_new: bytes, source: int, target: int
) -> None:
    """Exchange what `source` and `target` (O_PATH) refer to, which the two names lead to (RENAME_EXCHANGE).

    The kernel exchanges whatever has these names. So afterwards this checks what they lead to. If one of them had led
    to another object before, everything is put back. If it was given to another object afterwards, all is well.

    Raises:
        Elsewhere: a name led to another object, and nothing was exchanged.
        OSError: renameat2(2) failed.
    """
    ours, theirs = calls.fstat(source), calls.fstat(target)
    if not (leads_to(credentials, old, name_old, ours) and leads_to(credentials, new, name_new, theirs)):
        raise Elsewhere
    calls.rename(credentials, old, name_old, new, name_new, linux.RENAME_EXCHANGE)
    has_target, has_source = leads_to(credentials, old, name_old, theirs), leads_to(credentials, new, name_new, ours)
    if has_target is has_source:
        return
    at_old, at_new = (old, name_old), (new, name_new)
    if _was_there(target, source, at_new, at_old) if has_source else _was_there(source, target, at_old, at_new):
        return
    try:
        calls.rename(ROOT, old, name_old, new, name_new, linux.RENAME_EXCHANGE)
    except OSError as exc:
        log.warning("%r and %r were exchanged, and could not be put back (%s)", name_old, name_new, exc.strerror)
    raise Elsewhere


def _was_there(missing: int, exchanged: int, before: tuple[int, bytes], after: tuple[int, bytes]) -> bool:
    """Whether an exchange moved an object from one name to the other, which by now leads to something else.

    The kernel knows the last name of an object that was removed or replaced. Of one that others have moved, the time
    of its last change tells, in ticks of the clock. If both are the same, the answer is no: others have more time
    before the exchange than after it.

    Args:
        missing: the object; like `exchanged`, it was opened (O_PATH) by its name.
        exchanged: the other one, which certainly was exchanged.
        before: the directory and the name before the exchange.
        after: those after it.
    """
    path = calls.path_of(missing).removesuffix(b" (deleted)")
    for directory, name in (after, before):
        if path == os.path.join(calls.path_of(directory), name):
            return (directory, name) == after
    return calls.fstat(missing).st_ctime_ns > calls.fstat(exchanged).st_ctime_ns
