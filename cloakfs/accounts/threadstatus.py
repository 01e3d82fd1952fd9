"""What /proc says of the threads that make requests: their groups, and which of root's capabilities they lack.

A FUSE request carries neither (proc_pid_status(5)). The thread waits for its answer, so its id cannot be reused
meanwhile, and nothing is cached from one request to the next: it may have dropped both in between.

A thread is not always what its process is. An io_uring worker, for instance, keeps the groups and capabilities that its
process had when it was started. So what counts is what both have. (Threads of the daemon of an upper mount are
excepted: each acts as another caller.)
"""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Collection
from typing import TypeVar

from ..identity import ClientId
from ..linux import FILE_CAPABILITIES, process

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The maximum number of threads whose descriptors are kept open, and of lists of groups.
_MOST_CACHED = 64
# The maximum total size of these lists, as they stand in /proc. Any user can be in 65,536 groups (user_namespaces(7)).
_MOST_BYTES = 1 << 20

_NONE: frozenset[ClientId] = frozenset()


class ThreadStatus:
    """Reads /proc/TID/status of callers. Of one that cannot be seen, nothing is assumed: in doubt, it gets less.

    Descriptors of the last threads are kept, because reading one again costs half as much as opening it again.

    Attributes:
        daemons: the process ids of daemons of upper mounts.
        has_unseen: whether there was a caller that this process cannot see: one in a pid namespace that is not below
            its own.
    """

    def __init__(self) -> None:
        self.daemons: Collection[int] = ()
        self._descriptors: dict[int, int] = {}  # thread id -> descriptor
        self._parsed: dict[bytes, frozenset[ClientId]] = {}
        self._bytes = 0  # of the keys
        self._reserve = os.eventfd(0)  # used when no other descriptor is available
        self._is_blind = False
        self.has_unseen = False
        if not process.is_proc_ours():
            self._is_blind = True
            self._warn("/proc belongs to another pid namespace, so nothing is known of any caller")

    def groups(self, tid: int) -> frozenset[ClientId]:
        """Return the supplementary groups of a thread that its process has, too; none if it cannot be seen."""
        found = self._read(process.groups_in, tid)
        if found is None:
            return _NONE
        line, leader = found
        groups = self._parsed.get(line)  # mostly without a call
        if groups is None:
            groups = self._parse(line)
        if not groups or leader == tid or leader in self.daemons:
            return groups
        of_process = self._read(process.groups_in, leader)
        if of_process is None:
            return _NONE
        return groups if of_process[0] == line else groups & self._parse(of_process[0])

    def lacks(self, tid: int, among: int = FILE_CAPABILITIES) -> int:
        """Return which of these capabilities a thread, or its process, does not have; all if it cannot be seen.

        It has none at all if it is in another user namespace than this process.
        """
        found = self._read(process.capabilities_in, tid)
        if found is None or not process.is_in_our_user_namespace(tid):
            return among
        effective, leader = found
        if leader != tid and leader not in self.daemons:
            of_process = self._read(process.capabilities_in, leader)
            effective &= 0 if of_process is None else of_process[0]
        return among & ~effective

    def is_unseen(self, tid: int) -> bool:
        """Whether this process cannot see the caller."""
        return tid == 0 or self._is_blind

    def _warn(self, why: str) -> None:
        self.has_unseen = True
        log.warning("%s: it has its primary group alone, and as root no capabilities", why)

    def _read(self, read: Callable[[int], _T], tid: int) -> _T | None:
        """Return what `read` finds in the status of a thread; None if it cannot be seen, or has ended."""
        if tid == 0 or self._is_blind:  # `is_unseen`, without a call
            if not self.has_unseen:
                self._warn("a caller belongs to another pid namespace, and this daemon cannot see it")
            return None
        try:
            return read(self._descriptors[tid])
        except KeyError:
            pass
        except ProcessLookupError:
            os.close(self._descriptors.pop(tid))
        try:
            return self._read_anew(read, tid)
        except (FileNotFoundError, ProcessLookupError):
            return None

    def _parse(self, line: bytes) -> frozenset[ClientId]:
        groups = self._parsed.get(line)
        if groups is None:
            self._bytes += len(line)
            if len(self._parsed) >= _MOST_CACHED or self._bytes > _MOST_BYTES:
                self._parsed.clear()
                self._bytes = len(line)
            # This takes half the time of int(), and a caller may be in 65,536 groups.
            groups = self._parsed[line] = frozenset(json.loads(b"[%b]" % line.strip().replace(b" ", b",")))
        return groups

    def _read_anew(self, read: Callable[[int], _T], tid: int) -> _T:
        try:
            return read(self._open(tid))
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        # Others have taken all descriptors, but this caller must not suffer from that.
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        try:
            return read(self._open(tid))
        finally:
            if tid in self._descriptors:
                os.close(self._descriptors.pop(tid))
            with contextlib.suppress(OSError):
                self._reserve = os.eventfd(0)

    def _open(self, tid: int) -> int:
        fd = process.open_status(tid)
        if len(self._descriptors) >= _MOST_CACHED:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        self._descriptors[tid] = fd
        return fd
