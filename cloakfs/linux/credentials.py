"""The credentials with which the calling thread makes system calls on files."""

import ctypes
import errno
import threading
from array import array
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

from ..identity import ServerId
from .capabilities import effective_capabilities, set_effective_capabilities
from .libc import NR, check, syscall

_Call = TypeVar("_Call", bound=Callable[..., Any])

_INVALID = ctypes.c_uint32(0xFFFFFFFF)
_ROOT_ID = ctypes.c_uint32(0)


class Credentials(NamedTuple):
    """The identity with which a system call is made, in server ids: file-system uid and gid, supplementary groups.

    With uid 0, `lacks` is a bit mask of capabilities that it does not have, although root has them. With `or_daemon`,
    the call may as well be made with these ids and any groups, or as the daemon: as whichever the thread acts already,
    or else as the daemon.
    """

    uid: ServerId
    gid: ServerId
    groups: tuple[ServerId, ...]
    lacks: int = 0
    or_daemon: bool = False


ROOT = Credentials(ServerId(0), ServerId(0), ())
"""The daemon, acting on its own behalf. It is distinguished by identity (`is`) from a caller with the same ids."""

ANY_CREDENTIALS = Credentials(ServerId(0), ServerId(0), ())
"""For a call that needs no permission, and has the same result with any credentials: the thread need not switch.

It is distinguished by identity, too.
"""

_of_daemon = ROOT
_has_switched = False  # whether a thread of this process may have other credentials than it began with


def set_daemon_credentials(credentials: Credentials) -> None:
    """Let `ROOT` mean these credentials from now on, by which the lower cloakfs mount recognizes this daemon.

    The thread acts with them at once. To be called before there are other threads.
    """
    global _of_daemon  # noqa: PLW0603 (as all the process's credentials)
    _of_daemon = credentials
    assume(ROOT)


class _ThreadCredentials(threading.local):
    credentials: Credentials | None = (
        None  # not known: a new thread begins with the credentials of the one that made it
    )


_thread = _ThreadCredentials()


class _Limits:
    """The effective capabilities of a thread of this process that acts as root; None if none ever had fewer."""

    effective: int | None = None


class _Arguments:
    """A caller's ids, ready for the system calls."""

    __slots__ = ("count", "gid", "groups", "proven", "uid")

    def __init__(self, credentials: Credentials) -> None:
        self.count = ctypes.c_long(len(credentials.groups))
        self.groups = (ctypes.c_uint32 * len(credentials.groups)).from_buffer(array("I", credentials.groups))
        self.gid = ctypes.c_uint32(credentials.gid)
        self.uid = ctypes.c_uint32(credentials.uid)
        self.proven = False


FEW_GROUPS = 64
"""Only a few identities with more groups than this are cached: any user can be in 65,536 groups."""

MOST_LONG = 8
"""How many of those identities are cached."""

_arguments = lru_cache(1024)(_Arguments)  # clients choose ids: there must be a bound
_long: dict[int, tuple[Credentials, _Arguments]] = {}  # by id()


def _long_arguments(credentials: Credentials) -> _Arguments:
    """Return the same for many groups, without even hashing them each time."""
    known, ready = _long.get(id(credentials), (None, None))
    if ready is None or known is not credentials:
        if len(_long) >= MOST_LONG:
            _long.clear()
        ready = _Arguments(credentials)
        _long[id(credentials)] = credentials, ready
    return ready


_SETGROUPS, _SETFSUID, _SETFSGID = NR["setgroups"], NR["setfsuid"], NR["setfsgid"]


def assume(credentials: Credentials) -> None:
    """Make the calling thread's file-system operations run as `credentials`, until it assumes other credentials.

    Only this thread changes (raw system calls; libc's wrappers would change all threads). Leaving uid 0 drops the
    file-related capabilities from the effective set, and returning to it raises them (capabilities(7)). Those that
    root is to lack are dropped, and raised again before the thread assumes other credentials.

    Raises:
        PermissionError: the kernel refused one of the ids (for example, one not mapped in a user namespace).
    """
    if credentials is ANY_CREDENTIALS:
        return
    before = _thread.credentials
    if credentials.or_daemon:
        if before is not None and before.uid == credentials.uid and before.gid == credentials.gid:
            return
        credentials = ROOT
    if credentials is ROOT:
        credentials = _of_daemon
    if before is not credentials and before != credentials:
        _switch(before, credentials)


def _switch(before: Credentials | None, credentials: Credentials) -> None:
    global _has_switched  # noqa: PLW0603 (it is the process's)
    _thread.credentials = None
    _has_switched = True
    if _Limits.effective is not None and (before is None or before.lacks):
        # A new thread has begun with what its maker had.
        syscall(_SETFSUID, _ROOT_ID)  # otherwise, the caller that the thread then acts as would have what is raised
        set_effective_capabilities(_Limits.effective)
    ready = _arguments(credentials) if len(credentials.groups) <= FEW_GROUPS else _long_arguments(credentials)
    if before is None or before.groups != credentials.groups:
        check(syscall(_SETGROUPS, ready.count, ready.groups))
    syscall(_SETFSGID, ready.gid)
    syscall(_SETFSUID, ready.uid)
    if not ready.proven:
        # setfsuid(2) reports no errors, so the ids now in force have to be queried. What worked once works again.
        if (
            syscall(_SETFSUID, _INVALID) & 0xFFFFFFFF != credentials.uid
            or syscall(_SETFSGID, _INVALID) & 0xFFFFFFFF != credentials.gid
        ):
            raise PermissionError(errno.EPERM, f"cannot act as {credentials.uid}:{credentials.gid}")
        ready.proven = True
    if credentials.lacks:
        if _Limits.effective is None:
            _Limits.effective = effective_capabilities()
        set_effective_capabilities(_Limits.effective & ~credentials.lacks)
    _thread.credentials = credentials


def act_as_daemon() -> None:
    """Switch this thread to the daemon's credentials, before code that is not ours runs in it, such as a plug-in.

    Otherwise, a thread retains the credentials of the caller for whom it made its last call. This costs nothing if the
    thread acts as the daemon already, and does nothing in a process without callers, such as a command.
    """
    if _has_switched:
        assume(ROOT)


def as_daemon(call: _Call) -> _Call:
    """Return a function that does what `call` does, with the daemon's credentials, which the thread then retains."""

    @wraps(call)
    def acting(*args: Any, **kwargs: Any) -> Any:
        if _has_switched and _thread.credentials is not _of_daemon:
            assume(ROOT)
        return call(*args, **kwargs)

    return cast(_Call, acting)
