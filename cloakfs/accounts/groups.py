"""Where a caller's supplementary groups come from, since a FUSE request does not carry them."""

import logging
import math
from typing import NamedTuple, Protocol

import trio

from ..identity import ClientId, ServerId
from ..linux import userdatabase
from ..tuning import STANDARD, Tuning
from .threadstatus import ThreadStatus

log = logging.getLogger(__name__)

# After a wait without an answer, no query is made for this long.
_FAILURE_SECONDS = 1.0
_THREADS = 4
# Clients choose uids, so the number of cached answers must be bounded.
_MOST_KNOWN = 10_000
_LOG_AGAIN_SECONDS = 60.0


class GroupSource(Protocol):
    """Finds a caller's supplementary groups, for one mount.

    Attributes:
        by_user: whether `of_user` has to be called.
    """

    by_user: bool

    def of_request(self, pid: int) -> frozenset[ClientId]:
        """Return the client gids of the thread that made the request; they are mapped one by one."""

    async def of_user(self, server_uid: ServerId) -> frozenset[ServerId]:
        """Return the server gids of the mapped user."""


class ProcessGroups:
    """The groups of the calling thread that its process has, too, as /proc says (`threadstatus`)."""

    by_user = False

    def __init__(self, threads: ThreadStatus) -> None:
        self.of_request = threads.groups

    async def of_user(self, server_uid: ServerId) -> frozenset[ServerId]:
        """Return no groups: this source has none of this kind."""
        return frozenset()


class FixedGroups:
    """The same client gids for every caller (possibly none)."""

    by_user = False

    def __init__(self, gids: frozenset[ClientId]) -> None:
        self._gids = gids

    def of_request(self, pid: int) -> frozenset[ClientId]:
        """Return the fixed client gids."""
        return self._gids

    async def of_user(self, server_uid: ServerId) -> frozenset[ServerId]:
        """Return no groups: this source has none of this kind."""
        return frozenset()


class _Answer(NamedTuple):
    """The groups of a user, when to query again, and until when they may be used; times are on trio's clock."""

    groups: frozenset[ServerId]
    again: float
    until: float


_NONE = _Answer(frozenset(), -math.inf, -math.inf)


class DatabaseGroups:
    """The groups that the server's user database gives the mapped uid (getgrouplist(3)).

    A change there comes into force within `Tuning.groups_seconds`. A directory service may be slow, or hang. It is
    therefore queried in a few dedicated threads, once for all requests that wait for the same uid. After
    `Tuning.groups_patience_seconds`, these requests go on without groups: in doubt, a caller gets fewer. A uid that the
    database does not know has none.
    """

    by_user = True

    def __init__(self, tuning: Tuning = STANDARD) -> None:
        self._tuning = tuning
        self._known: dict[ServerId, _Answer] = {}
        self._queries: dict[ServerId, trio.Event] = {}  # uid -> set when there is an answer, or none is expected
        self._threads = trio.CapacityLimiter(_THREADS)
        self._silent_until = -math.inf

    def of_request(self, pid: int) -> frozenset[ClientId]:
        """Return no groups: this source has none of this kind."""
        return frozenset()

    async def of_user(self, server_uid: ServerId) -> frozenset[ServerId]:
        """Return the server gids of the mapped user; none if there is no answer in time."""
        now = trio.current_time()
        answer = self._known.get(server_uid, _NONE)
        if now >= answer.again and server_uid not in self._queries:
            self._queries[server_uid] = trio.Event()
            # This does not run in the task of the request, which may stop waiting while others still need the answer.
            trio.lowlevel.spawn_system_task(self._query, server_uid)
        if now < answer.until:
            return answer.groups
        with trio.move_on_after(self._tuning.groups_patience_seconds) as waiting:
            await self._queries[server_uid].wait()
        if waiting.cancelled_caught:
            self._fail(server_uid, f"no answer within {self._tuning.groups_patience_seconds:g} s")
        answer = self._known.get(server_uid, _NONE)
        # An answer that took very long has already expired.
        return answer.groups if trio.current_time() < answer.until else frozenset()

    async def _query(self, uid: ServerId) -> None:
        try:
            with trio.move_on_after(self._tuning.groups_patience_seconds) as queueing:
                async with self._threads:
                    # From here on there is no time limit: a thread that hangs cannot be reclaimed, and must be counted.
                    queueing.deadline = math.inf
                    began = trio.current_time()
                    groups = await trio.to_thread.run_sync(
                        database_groups, uid, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True
                    )
                    again, until = began + self._tuning.groups_again_seconds, began + self._tuning.groups_seconds
                    self._store(uid, _Answer(groups, again, until))
        except Exception as exc:  # an exception that leaves this task would end the daemon
            self._fail(uid, repr(exc))
        finally:
            self._queries.pop(uid).set()

    def _fail(self, uid: ServerId, why: str) -> None:
        """Note a failure, so that no query follows at once. A known answer is used as long as before."""
        now = trio.current_time()
        known = self._known.get(uid, _NONE)
        if now >= known.until:
            known = _NONE._replace(until=now + _FAILURE_SECONDS)
        self._store(uid, known._replace(again=min(now + _FAILURE_SECONDS, known.until)))
        if now >= self._silent_until:
            self._silent_until = now + _LOG_AGAIN_SECONDS
            log.warning("the groups of uid %d cannot be read from the user database: %s", uid, why)

    def _store(self, uid: ServerId, answer: _Answer) -> None:
        if len(self._known) >= _MOST_KNOWN and uid not in self._known:
            self._known.clear()
        self._known[uid] = answer


def database_groups(uid: ServerId) -> frozenset[ServerId]:
    """Return the groups of a user in the user database, none if it is unknown; in a thread, since it may take long."""
    try:
        entry = userdatabase.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(map(ServerId, userdatabase.getgrouplist(entry.pw_name, entry.pw_gid)))


def group_source(words: str | None, threads: ThreadStatus | None = None, tuning: Tuning = STANDARD) -> GroupSource:
    """Return the source that the option `groups=` names: `proc` (default), `database`, `none`, or `1001:1002`."""
    match words:
        case None | "proc":
            return ProcessGroups(threads or ThreadStatus())
        case "database":
            return DatabaseGroups(tuning)
        case "none":
            return FixedGroups(frozenset())
        case _:
            return FixedGroups(frozenset(ClientId(int(gid)) for gid in words.split(":")))
