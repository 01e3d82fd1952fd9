"""Makes the kernel forget names, attributes and pages, and never waits for it where others would have to wait, too.

To forget a name, the kernel needs the lock of its directory, which a user can hold indefinitely: by a getdents(2) into
a page of a FUSE file of the user's own, or by a request in the directory that takes long. So names are forgotten by a
bounded number of threads, and in each directory by one at a time. A directory whose lock is not obtained within some
patience is *late*. Then, on Linux 6.16 and later, the kernel is told to ask for every name once more
(FUSE_NOTIFY_INC_EPOCH), for which it needs no lock. In any case, nothing in that directory is remembered until its lock
has been free.

Together with a name, the kernel drops everything that it knows below, and keeps the lock for as long as that takes. So
where much is known below, that is forgotten first. Meanwhile the kernel asks about the name each time
(FUSE_EXPIRE_ONLY, Linux 6.2 and later; before, it drops everything at once), and the name counts as one that has yet to
be forgotten: an answer that is on its way may let the kernel use it once more.

Attributes are forgotten without any lock, but only those of inodes that the kernel has. An answer that is still on its
way creates the inode afterwards, with attributes that are outdated by then. Whoever waits for such an answer holds the
directory's lock, so attributes are forgotten once more after the name, when the lock has been free.
"""

import contextlib
import errno
import logging
import os
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from time import monotonic

import pyfuse3
import trio
from pyfuse3 import InodeT

from ..background.tasks import Tasks
from ..linux import ownfiles
from ..tree import calls
from ..tuning import STANDARD, Tuning

log = logging.getLogger(__name__)

# How often to look for late directories, and to forget attributes once more.
AGAIN_SECONDS = 0.1
# Only a few threads work: more would keep the session loop from the processor. (That a thread waits for a lock shows in
# the time that one name takes it; many names take long as well.)
_FEW_THREADS = 1 if len(os.sched_getaffinity(0)) <= 2 else 2
_MOST_THREADS_FOR_PAGES = 8
# How many names may wait in one directory, if the kernel cannot be told to ask for all of them.
_MOST_NAMES = 10_000
# If no thread can be started, try again after:
_NO_THREAD_SECONDS = 0.1

# A struct fuse_out_header: its length, FUSE_NOTIFY_INC_EPOCH, and 0, because it answers no request.
_INC_EPOCH = struct.pack("=IiQ", 16, 8, 0)

# What comes before a name that is to expire: a struct fuse_out_header (length, FUSE_NOTIFY_INVAL_ENTRY, 0) and a struct
# fuse_notify_inval_entry_out (the directory, the length of the name, FUSE_EXPIRE_ONLY).
_EXPIRE = struct.Struct("=IiQQII")
_INVAL_ENTRY, _EXPIRE_ONLY = 3, 1

_NO_NAME = b"/"
"""A name that cannot exist: forgetting it means waiting until the directory's lock is free."""


class _Batch:
    """What is forgotten in one go in a directory: names, each with nodeids whose attributes are forgotten after it.

    Before, the names `expired` are made to expire. With `has_listing`, the entries that the kernel has of the directory
    are forgotten as well. `moved` is when the thread last went on to another name.
    """

    __slots__ = ("expired", "has_listing", "moved", "names", "settled", "since")

    def __init__(self) -> None:
        self.expired: set[bytes] = set()
        self.names: dict[bytes, set[int]] = {}
        self.has_listing = False
        self.since = trio.current_time()
        self.moved = monotonic()
        self.settled = trio.Event()


class _Lane:
    """One directory in which something is to be forgotten: what a thread is doing at this moment, and what waits."""

    __slots__ = ("late", "running", "waiting")

    def __init__(self) -> None:
        self.running: _Batch | None = None
        self.waiting: _Batch | None = None
        self.late = False


def _forget_attributes(nodeid: int) -> bool:
    """Forget the attributes of an inode; return False if the kernel does not have it (yet)."""
    try:
        pyfuse3.invalidate_inode(InodeT(nodeid), attr_only=True)
    except OSError:
        return False
    return True


def forget_names(parent: int, batch: _Batch, session: int) -> None:
    """Forget what is in a batch. `session` is a descriptor of the session, which is closed; negative if not needed."""
    if batch.has_listing:
        _forget_listing(parent)
    if session >= 0:
        try:
            for name in batch.expired:
                batch.moved = monotonic()
                _expire(session, parent, name)
        finally:
            calls.close(session)
    for name, nodeids in batch.names.items():
        batch.moved = monotonic()
        with contextlib.suppress(OSError):  # the kernel does not know it (any more)
            pyfuse3.invalidate_entry(InodeT(parent), name)
        for nodeid in nodeids:
            _forget_attributes(nodeid)
    if batch.has_listing:  # who has just been answered has held the lock until now, and may have added entries
        _forget_listing(parent)


def _expire(session: int, parent: int, name: bytes) -> None:
    length = _EXPIRE.size + len(name) + 1
    message = _EXPIRE.pack(length, _INVAL_ENTRY, 0, parent, len(name), _EXPIRE_ONLY)
    with contextlib.suppress(OSError):  # the kernel does not know it (any more)
        ownfiles.write(session, message + name + b"\0")


def _forget_listing(directory: int) -> None:
    with contextlib.suppress(OSError):
        pyfuse3.invalidate_inode(InodeT(directory))


def forget_pages(nodeids: deque[int]) -> None:
    """Make the kernel forget what it keeps of the content of these files; they are taken out of the queue."""
    with contextlib.suppress(IndexError):
        while True:
            nodeid = nodeids.popleft()
            with contextlib.suppress(OSError):
                pyfuse3.invalidate_inode(InodeT(nodeid))


class Notifier:
    """Makes the kernel forget what it was told. Objects are identified by nodeids here.

    Args:
        tuning: times and bounds.

    Attributes:
        session: the descriptor of the FUSE session, for telling the kernel to ask for every name; negative if it
            cannot be told.
        device: the same descriptor, for making names expire; negative if there is none.
        overflowed: whether more had to be forgotten in one directory than can be kept for later. Whoever deals with
            this resets it.
    """

    def __init__(self, tuning: Tuning = STANDARD) -> None:
        self._tuning = tuning
        self._few_threads = _FEW_THREADS if tuning.notify_threads is None else tuning.notify_threads
        self.session = self.device = -1
        self.overflowed = False
        self._later: dict[int, Counter[bytes]] = {}  # by directory: how often each name is to be forgotten later
        self._lanes: dict[int, _Lane] = {}
        self._next: OrderedDict[int, None] = OrderedDict()  # the directories whose lanes need a thread
        self._held: set[int] = set()  # the directories whose locks are held by requests that wait for what is done here
        self._late: set[int] = set()  # the directories that are late
        self._lately: set[int] = set()  # nodeids whose attributes are forgotten once more
        self._pages: set[int] = set()
        self._pages_running: deque[int] = deque()
        self._threads = 0
        self._running: dict[int, _Batch] = {}  # what the threads are doing, by directory
        self._limiter = trio.CapacityLimiter(tuning.most_notify_threads + _MOST_THREADS_FOR_PAGES)
        self._page_threads = 0
        self._tasks: Tasks | None = None

    def is_late(self, parent: int) -> bool:
        """Whether somebody keeps the lock of this directory, so that nothing in it may be remembered for now."""
        return parent in self._late

    # -- what is to be forgotten -------------------------------------------------------------------

    def attributes(self, nodeid: int, parent: int | None) -> None:
        """Forget attributes at once. `parent` is a directory in which the kernel may just be learning of the inode."""
        self._lately.add(nodeid)
        if not _forget_attributes(nodeid) and parent is not None:
            self.name(parent, _NO_NAME, nodeid)

    def acl(self, nodeid: int) -> None:
        """Forget the ACLs at once, and the attributes, as the kernel does not distinguish them."""
        _forget_attributes(nodeid)

    def name(self, parent: int, name: bytes, nodeid: int | None = None) -> trio.Event | None:
        """Forget the entry `name` of the directory as soon as its lock is free, and then the attributes of `nodeid`.

        Returns:
            an event that is set when this is done, or need not be done any more; None if that is so already.
        """
        lane, waiting = self._waiting(parent)
        if lane.late and self.session >= 0:
            name = _NO_NAME  # no name has been remembered since the directory became late
        names = waiting.names
        if lane.late and (len(names) >= _MOST_NAMES or len(names.get(name, ())) >= _MOST_NAMES):
            self.overflowed = True
            return None
        nodeids = names.setdefault(name, set())
        if nodeid is not None:
            nodeids.add(nodeid)
        return None if lane.late else waiting.settled

    def _waiting(self, parent: int) -> tuple[_Lane, _Batch]:
        """Return what waits in this directory, and see that a thread does it."""
        lane = self._lanes.get(parent)
        if lane is None:
            lane = self._lanes[parent] = _Lane()
        if lane.waiting is None:
            lane.waiting = _Batch()
            if lane.running is None:
                self._queue(parent)
                self._start()
        return lane, lane.waiting

    def _queue(self, parent: int) -> None:
        if parent not in self._held:
            self._next[parent] = None

    @contextlib.contextmanager
    def holding(self, directory: int) -> Iterator[None]:
        """Do nothing in this directory meanwhile: the request that is being served holds its lock until the answer.

        A thread that had to wait for the lock would be missing where that request needs it.
        """
        self._held.add(directory)
        self._next.pop(directory, None)
        if directory in self._running:
            self._start()
        try:
            yield
        finally:
            self._held.discard(directory)
            lane = self._lanes.get(directory)
            if lane is not None and lane.running is None:
                self._queue(directory)
                self._start()

    def expire(self, parent: int, name: bytes) -> trio.Event | None:
        """Make the kernel ask about this name each time, as soon as the lock of the directory is free.

        Before Linux 6.2, it is forgotten. Where an answer is on its way, the kernel may use the name once more.

        Returns:
            an event like that of `name`.
        """
        lane, waiting = self._waiting(parent)
        if not (lane.late and self.session >= 0):
            waiting.expired.add(name)
        return None if lane.late else waiting.settled

    def later(self, parent: int, name: bytes) -> None:
        """Note that `now` will forget this name: until it is forgotten, it counts as such a name."""
        self._later.setdefault(parent, Counter())[name] += 1

    def comes_later(self, parent: int, name: bytes) -> bool:
        """Whether `now` will forget this name (`later`)."""
        return name in self._later.get(parent, ())

    def now(self, parent: int, name: bytes, nodeid: int | None = None, *, first: bool = False) -> trio.Event | None:
        """Do what `name` does, for a name that was noted by `later`: after whatever waits for a thread, or `first`."""
        event = self.name(parent, name, nodeid)
        if parent in self._next:
            self._next.move_to_end(parent, last=not first)
        noted = self._later[parent]
        noted[name] -= 1
        if not noted[name]:
            del noted[name]
        if not noted:
            del self._later[parent]
        return event

    def names_so_far(self, parent: int) -> trio.Event | None:
        """Return an event like that of `name` for all names that are to be forgotten in this directory by now."""
        return self.name(parent, _NO_NAME)

    def listing(self, directory: int) -> trio.Event | None:
        """Forget the entries that the kernel has of a directory; return an event like that of `name`.

        A listing that is being answered holds the lock of the directory, and adds its entries before it releases it.
        So they are forgotten once more when the lock has been free. Before that, they are forgotten without the lock,
        since somebody may keep it.
        """
        settled = self.name(directory, _NO_NAME)
        self._waiting(directory)[1].has_listing = True
        return settled

    def is_idle(self) -> bool:
        """Whether nothing has yet to be forgotten anywhere, but attributes and pages."""
        return not self._lanes and not self._later

    def is_held_back(self, event: trio.Event) -> bool:
        """Whether this event (of `name`) is about a directory in which nothing is done for now: see `holding`."""
        for directory in self._held:
            lane = self._lanes.get(directory)
            if lane is not None and any(it is not None and it.settled is event for it in (lane.running, lane.waiting)):
                return True
        return False

    def is_busy(self, directory: int) -> bool:
        """Whether something has yet to be forgotten in this directory."""
        return directory in self._lanes or directory in self._later

    def is_forgetting(self, directory: int, name: bytes) -> bool:
        """Whether this name in the directory has yet to be forgotten."""
        if name in self._later.get(directory, ()):
            return True
        lane = self._lanes.get(directory)
        return lane is not None and any(
            batch is not None and name in batch.names for batch in (lane.running, lane.waiting)
        )

    def pages(self, nodeid: int) -> None:
        """Forget the content soon; the kernel has to wait for a page that is just being read."""
        self._pages.add(nodeid)

    def every_name(self) -> bool:
        """Make the kernel ask for every name once more, at once; return False if it cannot, and nothing was done."""
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

    # -- forgetting --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run for ever, doing what may have to wait for the kernel. Started again, it repeats what was not finished."""
        if any(lane.running is not None for lane in self._lanes.values()):
            self.every_name()
        for lane in self._lanes.values():
            self._do_again(lane)
        self._next = OrderedDict.fromkeys(parent for parent in self._lanes if parent not in self._held)
        self._threads = self._page_threads = 0
        self._running = {}
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = Tasks(nursery)
                self._start()
                while True:
                    await trio.sleep(AGAIN_SECONDS)
                    self._start_more()
                    self._find_late()
                    self._start_pages()
                    await self._forget_again()
        finally:
            self._tasks = None

    @staticmethod
    def _do_again(lane: _Lane) -> None:
        """Queue again what failed, or may have failed. Those who wait for it go on, since it is tried for ever."""
        again = _Batch()
        for batch in (lane.running, lane.waiting):
            if batch is not None:
                again.has_listing |= batch.has_listing
                again.expired |= batch.expired
                for name, nodeids in batch.names.items():
                    again.names.setdefault(name, set()).update(nodeids)
                batch.settled.set()
        lane.running, lane.waiting = None, again

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
        return sum(batch.moved < before or parent in self._held for parent, batch in self._running.items())

    async def _work(self) -> None:
        while self._next:
            parent, _ = self._next.popitem(last=False)
            lane = self._lanes[parent]
            batch, lane.waiting = lane.waiting, None
            assert batch is not None
            lane.running = batch
            batch.since, batch.moved = trio.current_time(), monotonic()
            self._running[parent] = batch
            try:
                # The thread may outlive the session, whose descriptor may then be another file's.
                session = calls.dup(self.device) if batch.expired and self.device >= 0 else -1
                await self._in_thread(forget_names, parent, batch, session)
            except Exception:
                self.every_name()
                self._do_again(lane)
                self._queue(parent)
                raise
            finally:
                del self._running[parent]
            batch.settled.set()
            lane.running = None
            lane.late = False
            self._late.discard(parent)
            if lane.waiting is None:
                del self._lanes[parent]
            else:
                if lane.waiting.settled.is_set():  # set for those who came while it was late
                    lane.waiting.settled = trio.Event()
                    lane.waiting.since = trio.current_time()
                self._queue(parent)
        self._threads -= 1

    async def _in_thread(self, call: Callable[..., object], *args: object) -> None:
        while True:
            try:
                await trio.to_thread.run_sync(call, *args, limiter=self._limiter, abandon_on_cancel=True)
            except RuntimeError as exc:  # no thread can be started
                log.debug("%s", exc)
                await trio.sleep(_NO_THREAD_SECONDS)
            else:
                return

    def _find_late(self) -> None:
        """Deal with directories that have waited too long, for the lock or for a thread."""
        before = trio.current_time() - self._tuning.notify_patience_seconds
        late: list[tuple[int, _Lane]] = []
        for parent, lane in self._lanes.items():
            first = lane.running or lane.waiting
            if not lane.late and first is not None and first.since < before:
                late.append((parent, lane))
        if not late:
            return
        is_settled = self.every_name()
        for parent, lane in late:
            lane.late = True
            self._late.add(parent)
            for batch in (lane.running, lane.waiting):
                if batch is None:
                    continue
                batch.settled.set()
                # Only attributes are left. (Where no thread has tried, names are forgotten nevertheless, so that the
                # kernel does not have to drop all of them together with the name of the directory.)
                if is_settled and batch is lane.waiting and lane.running is not None:
                    batch.names = {_NO_NAME: set().union(*batch.names.values())}
                    batch.expired = set()

    def _start_pages(self) -> None:
        # The previous thread may be waiting for one page; what comes after that page need not wait.
        with contextlib.suppress(IndexError):
            while True:
                self._pages.add(self._pages_running.pop())
        if self._tasks is not None and self._pages and self._page_threads < _MOST_THREADS_FOR_PAGES:
            self._page_threads += 1
            self._pages_running, self._pages = deque(self._pages), set()
            self._tasks.supervise("invalidating pages in the kernel", self._work_on_pages, self._pages_running)

    async def _work_on_pages(self, nodeids: deque[int]) -> None:
        await self._in_thread(forget_pages, nodeids)
        self._page_threads -= 1

    async def _forget_again(self) -> None:
        """Forget recent attributes once more: an answer that was on its way may have told the kernel the old ones."""
        lately, self._lately = self._lately, set()
        for done, nodeid in enumerate(lately, 1):
            _forget_attributes(nodeid)
            if done % self._tuning.names_at_once == 0:
                await trio.sleep(0)
