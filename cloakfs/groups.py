"""Where a caller's supplementary groups come from, since a FUSE request does not carry them."""

import os
import pwd
import time
from typing import Protocol

import trio

from . import linux


class GroupSource(Protocol):
    """Answers for one mount which supplementary groups a caller has."""

    def of_request(self, pid: int) -> frozenset[int]:
        """Client gids of the thread that made the request; they are mapped one by one."""

    async def of_user(self, server_uid: int) -> frozenset[int]:
        """Server gids of the mapped user."""


class ProcessGroups:
    """The groups of the calling thread, from /proc/<tid>/status (proc(5)).

    The thread waits for its answer, so its id cannot be reused meanwhile. A caller in a foreign pid namespace
    (pid 0), or one that is gone, has no groups: when in doubt, less.
    """

    def of_request(self, pid: int) -> frozenset[int]:
        """See `GroupSource`."""
        if pid == 0:
            return frozenset()
        linux.assume(linux.ROOT)  # /proc may be mounted with hidepid
        try:
            fd = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return frozenset()
        try:
            status = os.read(fd, 1024)
            start = status.find(b"\nGroups:")
            while start >= 0 and b"\n" not in status[start + 1 :] and (more := os.read(fd, 65536)):
                status += more  # somebody in a great many groups
        except ProcessLookupError:
            return frozenset()
        finally:
            os.close(fd)
        if start < 0:
            return frozenset()
        return frozenset(map(int, status[start + 8 : status.index(b"\n", start + 1)].split()))

    async def of_user(self, server_uid: int) -> frozenset[int]:
        """No groups from here."""
        return frozenset()


class FixedGroups:
    """The same client gids for every caller (possibly none)."""

    def __init__(self, gids: frozenset[int]) -> None:
        self._gids = gids

    def of_request(self, pid: int) -> frozenset[int]:
        """See `GroupSource`."""
        return self._gids

    async def of_user(self, server_uid: int) -> frozenset[int]:
        """No groups from here."""
        return frozenset()


class DatabaseGroups:
    """The groups that the server's user database gives the mapped uid (getgrouplist(3)).

    Asked in a thread, since a directory service may be slow, and remembered for `ttl` seconds: a change
    there is in force that much later at most. A uid that the database does not know has no groups.
    """

    def __init__(self, ttl: float = 30.0) -> None:
        self._ttl = ttl
        self._known: dict[int, tuple[float, frozenset[int]]] = {}

    def of_request(self, pid: int) -> frozenset[int]:
        """No groups from here."""
        return frozenset()

    async def of_user(self, server_uid: int) -> frozenset[int]:
        """See `GroupSource`."""
        known = self._known.get(server_uid)
        now = time.monotonic()
        if known is not None and now < known[0]:
            return known[1]
        groups = await trio.to_thread.run_sync(_database_groups, server_uid)
        self._known[server_uid] = (now + self._ttl, groups)
        return groups


def _database_groups(uid: int) -> frozenset[int]:
    linux.assume(linux.ROOT)
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


def group_source(words: str | None) -> GroupSource:
    """The source that the option `groups=` names: `proc` (default), `database`, `none`, or `1001:1002`."""
    match words:
        case None | "proc":
            return ProcessGroups()
        case "database":
            return DatabaseGroups()
        case "none":
            return FixedGroups(frozenset())
        case _:
            return FixedGroups(frozenset(int(gid) for gid in words.split(":")))
