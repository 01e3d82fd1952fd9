"""Sends invalidations of names, attributes and pages to the kernel, and never waits for it on the session loop.

To invalidate a name, the kernel needs the lock of its directory, which a user can hold for any time: by a getdents(2)
into a page of a FUSE file of the user's own, or by a slow request in the directory. So names are invalidated by a
bounded number of threads, in each directory by one at a time, from a queue per directory. A directory whose lock is not
obtained within some patience is *stalled*. Then, on Linux 6.16 and later, the kernel has to look up every name once
more (FUSE_NOTIFY_INC_EPOCH), for which it needs no lock. In any case, nothing in that directory may be cached until its
lock has been free.

Together with a name, the kernel drops everything below it, and holds the lock for as long as that takes. So where much
is cached below, that is invalidated first. Meanwhile the name expires: the kernel revalidates it at each use
(FUSE_EXPIRE_ONLY, Linux 6.2 and later; before, it drops everything at once). It stays *pending*, since a reply that is
on its way may let the kernel use it once more.

Attributes are invalidated without any lock, but only those of inodes that the kernel has. A reply that is still on its
way creates the inode afterwards, with attributes that are outdated by then. The request that waits for such a reply
holds the lock of the directory, so attributes are invalidated once more after the name, when the lock has been free.
"""

import contextlib
import errno
import itertools
import logging
import os
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import monotonic
from typing import TypeVar

import pyfuse3
import trio
from pyfuse3 import InodeT

from ..background.tasks import Tasks
from ..linux import ownfiles
from ..tree import calls
from ..tuning import STANDARD, Tuning

log = logging.getLogger(__name__)

_T = TypeVar("_T")

InThread = Callable[..., Awaitable[object]]
"""Waits for a call, which comes first, with its arguments in a thread."""

# How often to look for stalled directories, and to invalidate attributes once more.
AGAIN_SECONDS = 0.1
# For how long after a lock was granted the attributes of the file are not invalidated once more: its owner may be slow.
LOCKED_SECONDS = 10.0
# Only a few threads work: more would keep the session loop from the processor. (That a thread waits for a lock shows in
# the time that one name takes it; many names take long as well.)
_FEW_THREADS = 1 if len(os.sched_getaffinity(0)) <= 2 else 2
_MOST_THREADS_FOR_PAGES = 8
# How many names may wait in one directory, if the kernel does not support looking up all names again.
_MAX_NAMES = 10_000
# If no thread can be started, try again after:
_NO_THREAD_SECONDS = 0.1

# A struct fuse_out_header: its length, FUSE_NOTIFY_INC_EPOCH, and 0, because it answers no request.
_INC_EPOCH = struct.pack("=IiQ", 16, 8, 0)

# What comes before a name that is to expire: a struct fuse_out_header (length, FUSE_NOTIFY_INVAL_ENTRY, 0) and a struct
# fuse_notify_inval_entry_out (the directory, the length of the name, FUSE_EXPIRE_ONLY).
_EXPIRE = struct.Struct("=IiQQII")
_INVAL_ENTRY, _EXPIRE_ONLY = 3, 1

_IMPOSSIBLE_NAME = b"/"
"""A name that cannot exist: to invalidate it means to wait until the lock of the directory is free."""


class _Batch:
    """What a thread invalidates in one go in a directory: names, each with nodeids whose attributes come after it.

    Before, the names `expired` are made to expire. With `has_listing`, the entries that the kernel has of the directory
    are invalidated as well. `progressed_at` is when the thread last went on to another name.
    """

    __slots__ = ("expired", "has_listing", "names", "progressed_at", "settled", "since")

    def __init__(self) -> None:
        self.expired: set[bytes] = set()
        self.names: dict[bytes, set[int]] = {}
        self.has_listing = False
        self.since = trio.current_time()
        self.progressed_at = monotonic()
        self.settled = trio.Event()


class _Queue:
    """The queue of one directory: what a thread is invalidating at this moment, and what waits."""

    __slots__ = ("running", "stalled", "waiting")

    def __init__(self) -> None:
        self.running: _Batch | None = None
        self.waiting: _Batch | None = None
        self.stalled = False


def _invalidate_attributes(nodeid: int) -> bool:
    """Invalidate the attributes of an inode; return False if the kernel does not have it (yet)."""
    try:
        pyfuse3.invalidate_inode(InodeT(nodeid), attr_only=True)
    except OSError:
        return False
    return True


def invalidate_names(parent: int, batch: _Batch, session: int) -> None:
    """Invalidate what is in a batch.

    `session` is a descriptor of the session, which is closed; negative if it is not needed.
    """
    if batch.has_listing:
        _invalidate_listing(parent)
    if session >= 0:
        try:
            for name in batch.expired:
                batch.progressed_at = monotonic()
                _expire_entry(session, parent, name)
        finally:
            calls.close(session)
    for name, nodeids in batch.names.items():
        batch.progressed_at = monotonic()
        with contextlib.suppress(OSError):  # the kernel does not know it (any more)
            pyfuse3.invalidate_entry(InodeT(parent), name)
        for nodeid in nodeids:
            _invalidate_attributes(nodeid)
    if batch.has_listing:  # a listing that has just ended held the lock until now, and may have added entries
        _invalidate_listing(parent)


def _expire_entry(session: int, parent: int, name: bytes) -> None:
    length = _EXPIRE.size + len(name) + 1
    message = _EXPIRE.pack(length, _INVAL_ENTRY, 0, parent, len(name), _EXPIRE_ONLY)
    with contextlib.suppress(OSError):  # the kernel does not know it (any more)
        ownfiles.write(session, message + name + b"\0")


def _invalidate_listing(directory: int) -> None:
    with contextlib.suppress(OSError):
        pyfuse3.invalidate_inode(InodeT(directory))


class _Pages:
    """Files whose pages one thread invalidates, each for as long as it has to wait for a page that is being read.

    Attributes:
        waiting: with which of them the thread has not begun. The session loop may take any of them away.
    """

    __slots__ = ("_busy", "_current", "waiting")

    def __init__(self, nodeids: Iterable[int]) -> None:
        self.waiting = set(nodeids)
        self._current = 0
        self._busy = threading.Lock()

    def invalidate_all(self) -> list[int]:
        """Invalidate the pages of what is waiting; return the files with which that was done."""
        done: list[int] = []
        for nodeid in list(self.waiting):
            with self._busy:
                # Until it is taken out, it may be taken away from this thread; after that, `wait_for` waits.
                self._current = nodeid
                with contextlib.suppress(KeyError):
                    self.waiting.remove(nodeid)
                    invalidate_pages(nodeid)
                    done.append(nodeid)
        return done

    def is_busy_with(self, nodeid: int) -> bool:
        """Whether the thread has begun with this file, and is not done."""
        return self._current == nodeid and self._busy.locked()

    def wait_for(self, nodeid: int) -> None:
        """If the thread has begun with this file, wait until it is done."""
        if self._current == nodeid:
            with self._busy:
                pass


def invalidate_pages(nodeid: int) -> None:
    """Invalidate the pages of a file; this may have to wait for a page that is being read."""
    with contextlib.suppress(OSError):
        pyfuse3.invalidate_inode(InodeT(nodeid))


def _invalidate_pages_after(nodeid: int, others: list[_Pages]) -> None:
    """Invalidate the pages of a file, so that none of the other threads does it later."""
    for other in others:
        other.wait_for(nodeid)
    invalidate_pages(nodeid)


class Notifier:
    """Sends invalidations to the kernel. Objects are identified by nodeids.

    Args:
        tuning: times and bounds.

    Attributes:
        session: the descriptor of the FUSE session, for telling the kernel to look up every name again; negative if
            the kernel does not support that.
        device: the same descriptor, for making names expire; negative if there is none.
        stalled: the directories whose lock a process holds, so that nothing in them may be cached for now.
        overflowed: whether more had to be invalidated in one directory than its queue may hold; `Invalidation` resets
            it.
    """

    def __init__(self, tuning: Tuning = STANDARD) -> None:
        self._tuning = tuning
        self._few_threads = _FEW_THREADS if tuning.notify_threads is None else tuning.notify_threads
        self.session = self.device = -1
        self.overflowed = False
        self._deferred: dict[int, Counter[bytes]] = {}  # by directory: how often each name is deferred
        self._queues: dict[int, _Queue] = {}
        self._next: OrderedDict[int, None] = OrderedDict()  # the directories whose queues need a thread
        self._suspended: set[int] = set()  # the directories whose locks are held by requests that wait for this
        self.stalled: set[int] = set()
        self._recent: set[int] = set()  # nodeids whose attributes are invalidated once more
        # Nodeids of files that were locked just now, with the times until which they count as such, the earliest first.
        self._locked: OrderedDict[int, float] = OrderedDict()
        self._again_after_lock: set[int] = set()  # nodeids whose attributes are invalidated once more after that
        self._after_lock: set[int] = set()  # nodeids whose attributes and pages are invalidated after that
        self._pages: set[int] = set()
        self._pages_running: list[_Pages] = []
        # Pages that are not known to be invalidated yet, each with the number of the time that this was asked for.
        self._outdated: dict[int, int] = {}
        self._outdated_count = 0
        self._threads = 0
        self._running: dict[int, _Batch] = {}  # what the threads are doing, by directory
        self._limiter = trio.CapacityLimiter(tuning.most_notify_threads + _MOST_THREADS_FOR_PAGES)
        self._tasks: Tasks | None = None
        self._rest: trio.Event | None = None  # set as soon as there is something to do again

    # -- what is to be invalidated -----------------------------------------------------------------

    def invalidate_attributes(self, nodeid: int, parent: int | None) -> None:
        """Invalidate attributes at once. `parent` is a directory in which the kernel may just be creating the inode."""
        self._recent.add(nodeid)
        if self._rest is not None:
            self._rest.set()
        if not _invalidate_attributes(nodeid) and parent is not None:
            self.invalidate_entry(parent, _IMPOSSIBLE_NAME, nodeid)

    def invalidate_acl(self, nodeid: int) -> None:
        """Invalidate the ACLs at once, and the attributes, as the kernel does not distinguish them."""
        _invalidate_attributes(nodeid)

    def invalidate_entry(self, parent: int, name: bytes, nodeid: int | None = None) -> trio.Event | None:
        """Invalidate the entry `name` of the directory when its lock is free, and then the attributes of `nodeid`.

        Returns:
            an event that is set when this is done, or need not be done any more; None if that is so already.
        """
        queue, waiting = self._waiting(parent)
        if queue.stalled and self.session >= 0:
            name = _IMPOSSIBLE_NAME  # no name has been cached since the directory stalled
        names = waiting.names
        if queue.stalled and (len(names) >= _MAX_NAMES or len(names.get(name, ())) >= _MAX_NAMES):
            self.overflowed = True
            return None
        nodeids = names.setdefault(name, set())
        if nodeid is not None:
            nodeids.add(nodeid)
        return None if queue.stalled else waiting.settled

    def _waiting(self, parent: int) -> tuple[_Queue, _Batch]:
        """Return the queue of this directory and its waiting batch, and see that a thread does it."""
        queue = self._queues.get(parent)
        if queue is None:
            queue = self._queues[parent] = _Queue()
            if self._rest is not None:
                self._rest.set()
        if queue.waiting is None:
            queue.waiting = _Batch()
            if queue.running is None:
                self._schedule(parent)
                self._start()
        return queue, queue.waiting

    def _schedule(self, parent: int) -> None:
        if parent not in self._suspended:
            self._next[parent] = None

    @contextlib.contextmanager
    def suspended(self, directory: int) -> Iterator[None]:
        """Do nothing in this directory meanwhile: the request that is being served holds its lock until the reply.

        A thread that had to wait for the lock would be missing where that request needs it.
        """
        self._suspended.add(directory)
        self._next.pop(directory, None)
        if directory in self._running:
            self._start()
        try:
            yield
        finally:
            self._suspended.discard(directory)
            queue = self._queues.get(directory)
            if queue is not None and queue.running is None:
                self._schedule(directory)
                self._start()

    def expire_entry(self, parent: int, name: bytes) -> trio.Event | None:
        """Make this name expire, so that the kernel revalidates it at each use, when the lock of the directory is free.

        Before Linux 6.2, it is invalidated. Where a reply is on its way, the kernel may use the name once more.

        Returns:
            an event like that of `invalidate_entry`.
        """
        queue, waiting = self._waiting(parent)
        if not (queue.stalled and self.session >= 0):
            waiting.expired.add(name)
        return None if queue.stalled else waiting.settled

    def defer(self, parent: int, name: bytes) -> None:
        """Note that `invalidate_deferred` will be called for this name: from now on, it is pending."""
        self._deferred.setdefault(parent, Counter())[name] += 1

    def is_deferred(self, parent: int, name: bytes) -> bool:
        """Whether `invalidate_deferred` will be called for this name (`defer`)."""
        return name in self._deferred.get(parent, ())

    def invalidate_deferred(
        self, parent: int, name: bytes, nodeid: int | None = None, *, first: bool = False
    ) -> trio.Event | None:
        """Invalidate an entry that was noted by `defer`, after all that waits for a thread, or `first`.

        Returns:
            an event like that of `invalidate_entry`.
        """
        event = self.invalidate_entry(parent, name, nodeid)
        if parent in self._next:
            self._next.move_to_end(parent, last=not first)
        noted = self._deferred[parent]
        noted[name] -= 1
        if not noted[name]:
            del noted[name]
        if not noted:
            del self._deferred[parent]
        return event

    def pending_names(self, parent: int) -> trio.Event | None:
        """Return an event like that of `invalidate_entry` for all names that are pending in this directory by now."""
        return self.invalidate_entry(parent, _IMPOSSIBLE_NAME)

    def invalidate_listing(self, directory: int) -> trio.Event | None:
        """Invalidate the entries that the kernel has of a directory.

        A listing in progress holds the lock of the directory, and adds its entries before it releases it. So they are
        invalidated once more when the lock has been free. Before that, they are invalidated without the lock, since a
        process may hold it for long.

        Returns:
            an event like that of `invalidate_entry`.
        """
        settled = self.invalidate_entry(directory, _IMPOSSIBLE_NAME)
        self._waiting(directory)[1].has_listing = True
        return settled

    def is_idle(self) -> bool:
        """Whether no name and no listing is pending anywhere."""
        return not self._queues and not self._deferred

    async def names_settled(self) -> None:
        """Wait until the names are invalidated that wait for a thread by now, other than in stalled directories."""
        for queue in list(self._queues.values()):
            for batch in (queue.running, queue.waiting):
                if batch is not None and not queue.stalled:
                    await batch.settled.wait()

    def is_suspended(self, event: trio.Event) -> bool:
        """Whether this event (of `invalidate_entry`) is about a directory that is `suspended`."""
        for directory in self._suspended:
            queue = self._queues.get(directory)
            if queue is not None and any(
                it is not None and it.settled is event for it in (queue.running, queue.waiting)
            ):
                return True
        return False

    def is_busy(self, directory: int) -> bool:
        """Whether something is pending in this directory."""
        return directory in self._queues or directory in self._deferred

    def is_pending(self, directory: int, name: bytes) -> bool:
        """Whether this name in the directory has yet to be invalidated."""
        if name in self._deferred.get(directory, ()):
            return True
        queue = self._queues.get(directory)
        return queue is not None and any(
            batch is not None and name in batch.names for batch in (queue.running, queue.waiting)
        )

    def invalidate_pages(self, nodeid: int) -> None:
        """Invalidate the pages soon; the kernel has to wait for a page that is just being read."""
        self._pages.add(nodeid)
        if self._rest is not None:
            self._rest.set()
        self._outdated_count += 1
        self._outdated[nodeid] = self._outdated_count

    async def confirm(self, nodeid: int, in_thread: InThread) -> None:
        """Invalidate at once what would be invalidated later, and see that it is not done later: the file gets locked.

        Who has a lock asks for the size of the file and writes at its end. If the attributes are invalidated before the
        kernel has dealt with the answer, it discards that and goes on with the size it had (`fuse_change_attributes`).

        Args:
            nodeid: of a file that is open.
            in_thread: waits for a call in a thread of the caller's share.
        """
        if nodeid in self._after_lock:
            self._invalidate_now(nodeid)
        if nodeid in self._recent or nodeid in self._again_after_lock:
            _invalidate_attributes(nodeid)
        self._locked[nodeid] = trio.current_time() + LOCKED_SECONDS
        if self._rest is not None:
            self._rest.set()
        self._locked.move_to_end(nodeid)
        # It may be in a queue once more although a thread that began later than that was asked for is done with it.
        self._pages.discard(nodeid)
        for pages in self._pages_running:
            pages.waiting.discard(nodeid)
        count = self._outdated.get(nodeid)
        if count is not None or any(pages.is_busy_with(nodeid) for pages in self._pages_running):
            await in_thread(_invalidate_pages_after, nodeid, list(self._pages_running))
            if count is not None:
                self._note_done([nodeid], {nodeid: count})

    def was_locked(self, nodeid: int) -> bool:
        """Whether a lock of this file was granted just now."""
        return self._locked.get(nodeid, 0.0) > trio.current_time()

    def invalidate_after_lock(self, nodeid: int) -> None:
        """Invalidate attributes and pages when the file is locked the next time, or has not been for a while."""
        self._after_lock.add(nodeid)

    def _invalidate_now(self, nodeid: int) -> None:
        self._after_lock.discard(nodeid)
        self.invalidate_attributes(nodeid, None)
        self.invalidate_pages(nodeid)

    def _note_done(self, nodeids: list[int], wanted: dict[int, int]) -> None:
        for nodeid in nodeids:
            if nodeid in wanted and self._outdated.get(nodeid) == wanted[nodeid]:
                del self._outdated[nodeid]

    def increment_epoch(self) -> bool:
        """Make the kernel look up every name once more; return False if it does not support that."""
        if self.session < 0:
            return False
        try:
            ownfiles.write(self.session, _INC_EPOCH)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                log.info(
                    "this kernel (before Linux 6.16) cannot invalidate all names at once; each is invalidated by itself"
                )
            self.session = -1
            return False
        return True

    # -- in the background -------------------------------------------------------------------------

    async def run(self) -> None:
        """Run for ever, with what may have to wait for the kernel. Started again, it repeats what was not finished."""
        if any(queue.running is not None for queue in self._queues.values()):
            self.increment_epoch()
        for queue in self._queues.values():
            self._do_again(queue)
        self._next = OrderedDict.fromkeys(parent for parent in self._queues if parent not in self._suspended)
        self._threads = 0
        self._pages_running = []
        self._pages.update(self._outdated)
        self._running = {}
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = Tasks(nursery)
                self._start()
                while True:
                    if not self._has_work():
                        self._rest = trio.Event()
                        await self._rest.wait()
                        self._rest = None
                    await trio.sleep(AGAIN_SECONDS)
                    self._start_more()
                    self._find_stalled()
                    self._start_pages()
                    await self._repeat_attributes()
        finally:
            self._tasks = self._rest = None

    @staticmethod
    def _do_again(queue: _Queue) -> None:
        """Queue again what failed, or may have failed. Those who wait for it go on, since it is tried for ever."""
        again = _Batch()
        for batch in (queue.running, queue.waiting):
            if batch is not None:
                again.has_listing |= batch.has_listing
                again.expired |= batch.expired
                for name, nodeids in batch.names.items():
                    again.names.setdefault(name, set()).update(nodeids)
                batch.settled.set()
        queue.running, queue.waiting = None, again

    def _start(self) -> None:
        if self._tasks is None or not self._next or self._threads >= self._tuning.most_notify_threads:
            return
        if self._threads < self._few_threads or self._threads - self._waiting_threads() < self._few_threads:
            self._threads += 1
            self._tasks.supervise("invalidating names in the kernel", self._work)

    def _start_more(self) -> None:
        """Start further threads, since those that there are may wait for a lock."""
        before = -1
        while self._threads > before:
            before = self._threads
            self._start()

    def _waiting_threads(self) -> int:
        before = monotonic() - self._tuning.notify_wait_seconds
        return sum(batch.progressed_at < before or parent in self._suspended for parent, batch in self._running.items())

    async def _work(self) -> None:
        while self._next:
            parent, _ = self._next.popitem(last=False)
            queue = self._queues[parent]
            batch, queue.waiting = queue.waiting, None
            assert batch is not None
            queue.running = batch
            batch.since, batch.progressed_at = trio.current_time(), monotonic()
            self._running[parent] = batch
            try:
                # The thread may outlive the session, whose descriptor may then be another file's.
                session = calls.dup(self.device) if batch.expired and self.device >= 0 else -1
                await self._in_thread(invalidate_names, parent, batch, session)
            except Exception:
                self.increment_epoch()
                self._do_again(queue)
                self._schedule(parent)
                raise
            finally:
                del self._running[parent]
            batch.settled.set()
            queue.running = None
            queue.stalled = False
            self.stalled.discard(parent)
            if queue.waiting is None:
                del self._queues[parent]
            else:
                if queue.waiting.settled.is_set():  # set for the requests that came while it was stalled
                    queue.waiting.settled = trio.Event()
                    queue.waiting.since = trio.current_time()
                self._schedule(parent)
        self._threads -= 1

    async def _in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        while True:
            try:
                return await trio.to_thread.run_sync(call, *args, limiter=self._limiter, abandon_on_cancel=True)
            except RuntimeError as exc:  # no thread can be started
                log.debug("%s", exc)
                await trio.sleep(_NO_THREAD_SECONDS)

    def _find_stalled(self) -> None:
        """Mark directories as stalled that have waited too long, for the lock or for a thread."""
        before = trio.current_time() - self._tuning.notify_patience_seconds
        stalled: list[tuple[int, _Queue]] = []
        for parent, queue in self._queues.items():
            first = queue.running or queue.waiting
            if not queue.stalled and first is not None and first.since < before:
                stalled.append((parent, queue))
        if not stalled:
            return
        is_settled = self.increment_epoch()
        for parent, queue in stalled:
            queue.stalled = True
            self.stalled.add(parent)
            for batch in (queue.running, queue.waiting):
                if batch is None:
                    continue
                batch.settled.set()
                # Only attributes are left. (Where no thread has tried, names are invalidated nevertheless, so that the
                # kernel does not have to drop all of them together with the name of the directory.)
                if is_settled and batch is queue.waiting and queue.running is not None:
                    batch.names = {_IMPOSSIBLE_NAME: set().union(*batch.names.values())}
                    batch.expired = set()

    def _start_pages(self) -> None:
        # The other threads may be waiting for one page each; what comes after that page need not wait.
        for pages in self._pages_running:
            with contextlib.suppress(KeyError):
                while True:
                    self._pages.add(pages.waiting.pop())
        if self._tasks is not None and self._pages and len(self._pages_running) < _MOST_THREADS_FOR_PAGES:
            pages = _Pages(self._pages)
            self._pages = set()
            self._pages_running.append(pages)
            self._tasks.supervise("invalidating pages in the kernel", self._work_on_pages, pages)

    async def _work_on_pages(self, pages: _Pages) -> None:
        wanted = {nodeid: self._outdated[nodeid] for nodeid in pages.waiting if nodeid in self._outdated}
        try:
            done = await self._in_thread(pages.invalidate_all)
        except Exception:
            self._pages.update(wanted)
            raise
        self._note_done(done, wanted)
        self._pages_running.remove(pages)

    def _has_work(self) -> bool:
        """Whether anything is invalidated now, or later; many idle daemons would keep a processor busy otherwise."""
        names, pages = self._queues or self._deferred, self._pages or self._pages_running
        return bool(names or pages or self._recent or self._locked or self._after_lock or self._again_after_lock)

    async def _repeat_attributes(self) -> None:
        """Invalidate recent attributes once more: a reply that was on its way may have contained the old ones.

        Where a file was locked just now, this is left to a later time, or to the next lock (`confirm`).
        """
        recent, self._recent = self._recent, set()
        for done, nodeid in enumerate(itertools.chain(recent, self._take_unlocked()), 1):
            if nodeid in self._locked:
                self._again_after_lock.add(nodeid)
            else:
                _invalidate_attributes(nodeid)
            if done % self._tuning.names_at_once == 0:
                await trio.sleep(0)

    def _take_unlocked(self) -> Iterator[int]:
        """Let go of files that were locked long ago; yield those whose attributes are to be invalidated once more."""
        now = trio.current_time()
        while self._locked and next(iter(self._locked.values())) <= now:
            nodeid, _ = self._locked.popitem(last=False)
            if nodeid in self._after_lock:
                self._invalidate_now(nodeid)
            if nodeid in self._again_after_lock:
                self._again_after_lock.discard(nodeid)
                yield nodeid
