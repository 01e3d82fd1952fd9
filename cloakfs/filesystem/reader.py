"""Reads and writes real files without ever blocking the session loop, and reads ahead.

Data in memory is copied at once (RWF_NOWAIT, preadv2(2)); for anything else, a thread waits. Threads also read ahead
what a `Prefetcher` requests, into the page cache of the real file, where the next READ finds it.
"""

import contextlib
import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from statistics import fmean
from typing import Any, TextIO

import trio

from .. import linux
from ..background.tasks import Tasks
from ..linux import ownfiles
from ..linux.dirtypages import DirtyPages, is_limited_by_itself
from ..prefetch import HEURISTICS, Limits, Prefetcher, ReadAhead
from ..shares import Shares
from ..tree import calls
from ..tree.filesystems import SLOW_FOR_SECONDS, SLOW_SECONDS, MountedFilesystem, waits_of_this_thread

log = logging.getLogger(__name__)

PAYS_SECONDS = 0.001
"""Reading ahead pays if the last misses took at least this long on average. Below, the kernel's own read-ahead hides
the latency, and a thread would cost as much."""

# The mean is over the last _MISSES misses, and is not used before there were _FEWEST. (The median would not do, because
# throttled storage answers most requests at once, and then none for a while.)
_MISSES = 64
_FEWEST = 4

# The maximum number of threads that do nothing but read ahead from one file system, and how many times something may
# be waiting for them; each of those has a descriptor.
_THREADS = 16
_MOST_PENDING = 64

# Kinds that write into the page cache as fast as into memory, but do not say beforehand whether they would have to wait
# (ext4 refuses RWF_NOWAIT; xfs returns EAGAIN for whatever makes a file larger).
_QUICK_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs"})

# More than this is written by a thread, which costs little in comparison.
_QUICK_BYTES = 128 << 10

# How many dirty pages there are, and how full the disk is, is looked up again after this many bytes, or seconds.
_LOOK_BYTES = 8 << 20
_LOOK_SECONDS = 0.1

# With less room than this, a file system makes some, and waits until what it has put off is on the disk.
_FULL_BYTES = 16 << 20

# The maximum number of threads that write for one caller. What waits for them cannot be refused without loss.
_WRITERS = 64

MOST_UNWRITTEN = 2 << 30
"""How many bytes may wait to be written; callers have shares."""

_DEFAULT_CHUNK = 128 << 10


class Storage:
    """The storage under one file system of the tree.

    Attributes:
        path: where it is mounted.
        chunk: the bytes of one read-ahead request; the kernel drops the excess (mm/readahead.c).
        writes_at_once: whether RWF_NOWAIT works for writing.
        writing: how many threads are writing, or allocating; one may hold the lock of a file for long.
        wait: the mean time of the last misses, in seconds; None until there were enough.
        pays: whether it is slow enough for reading ahead.
        pending: how many requests to read ahead are not done yet.
        readers: the threads that read ahead.
    """

    def __init__(self, filesystem: MountedFilesystem, dirty_pages: DirtyPages) -> None:
        self.path = filesystem.path
        self._filesystem = filesystem
        self._dirty_pages = dirty_pages
        self._is_quick_kind = filesystem.kind in _QUICK_KINDS and not filesystem.by_threads
        self._left = 0  # how many bytes to write before the next look
        self._until = 0.0  # when to look again, at the latest
        self._not_before = 0.0  # when, at the earliest
        self.writing = 0
        self.chunk = _chunk(filesystem.device)
        self.writes_at_once = not filesystem.remote
        self._waits: deque[float] = deque(maxlen=_MISSES)
        self.wait: float | None = None
        self.pays = False
        self.pending = 0
        self.reading = 0  # by how many threads, for clients
        self.readers = trio.CapacityLimiter(_THREADS)

    def missed(self, seconds: float) -> None:
        """Note how long it took to read data that was not in memory."""
        self._waits.append(seconds)
        if len(self._waits) >= _FEWEST:
            self.wait = fmean(self._waits)
            self.pays = self.wait >= PAYS_SECONDS

    def is_quick(self, size: int) -> bool:
        """Whether to write this many bytes in the session loop: it takes no longer than to memory, as far as one knows.

        A write waits where there are too many dirty pages, where the file system has to make room for it, and for a
        thread that is writing to the same file.
        """
        if not self._is_quick_kind or self.writing or size > _QUICK_BYTES:
            return False
        now = time.monotonic()
        self._left -= size
        if self._left < 0 or now >= self._until:
            if now < self._not_before:
                return False
            self._left = self._room() - size
            self._until = now + _LOOK_SECONDS
            if self._left < 0:
                self._not_before = self._until
                return False
        return True

    def _room(self) -> int:
        """Return how many bytes to write before the next look: a quarter of the room, since others write as well."""
        filesystem = self._filesystem
        try:
            there = calls.fstatvfs(filesystem.fd)
            room = self._dirty_pages.room()
        except OSError:
            return 0
        if there.f_flag & os.ST_SYNCHRONOUS or is_limited_by_itself(filesystem.device):
            return 0
        return max(0, min(_LOOK_BYTES, room // 4, (there.f_bavail * there.f_frsize - _FULL_BYTES) // 4))

    def write(self, credentials: linux.Credentials, fd: int, data: bytes | memoryview, offset: int, flags: int) -> int:
        """Write in the session loop (`calls.pwrite`). If it had to wait for long, threads write for a while.

        Here the first time is enough, because a write may wait for much longer than a lookup.
        """
        began, waits = time.monotonic(), waits_of_this_thread()
        try:
            return calls.pwrite(credentials, fd, data, offset, flags)
        finally:
            now = time.monotonic()
            if now - began > SLOW_SECONDS and waits_of_this_thread() > waits:
                self._left = 0
                self._not_before = now + SLOW_FOR_SECONDS

    def __str__(self) -> str:
        if self.wait is None:
            return f"{self.path}: too few reads so far to know how slow it is"
        took = f"{self.path}: a read of data not in memory takes {self.wait * 1000:.2g} ms"
        return took if self.pays else f"{took}, too fast to read ahead (pays from {PAYS_SECONDS * 1000:g} ms)"


def _chunk(number: int) -> int:
    """Return how many bytes of read-ahead the device with this st_dev accepts in one request."""
    name = f"{os.major(number)}:{os.minor(number)}"
    settings = (
        f"/sys/class/bdi/{name}/read_ahead_kb",
        f"/sys/dev/block/{name}/queue/max_sectors_kb",
        f"/sys/dev/block/{name}/../queue/max_sectors_kb",  # a partition's disk
    )
    found = [_DEFAULT_CHUNK]
    for path in settings:
        try:
            with ownfiles.open(path) as file:
                found.append(int(file.read()) << 10)
        except (OSError, ValueError):
            continue
    return max(found)


class Reader:
    """Reads and writes for one mount.

    Args:
        heuristic: a name in `HEURISTICS`, or "off".
        limits: how much may be read ahead.
        record: a file that gets a line for each READ: seconds, file, offset, length.

    Attributes:
        unwritten: the bytes that wait to be written, by server uid.
    """

    def __init__(self, heuristic: str, limits: Limits, record: TextIO | None = None) -> None:
        self._prefetcher: Prefetcher | None = None
        self._useful_before = 0  # by earlier prefetchers
        self._wasted = 0
        self.use(heuristic, limits)
        self._record = record
        self._storages: dict[MountedFilesystem, Storage] = {}
        self._writers: dict[int, trio.CapacityLimiter] = {}  # by server uid
        self.unwritten: Shares[int] = Shares(MOST_UNWRITTEN)
        self._dirty_pages = DirtyPages()
        self.records = record is not None  # whether each READ is recorded
        self.tasks: Tasks | None = None
        self.counts: Counter[str] = Counter()
        """The number of reads that found their data in memory (`hits`) or did not (`misses`), the bytes `requested` by
        read-ahead, and the number of writes by the loop (`written_at_once`) and `written_by_threads`."""

    def use(self, heuristic: str, limits: Limits) -> None:
        """Use this heuristic from now on; it starts without any history."""
        if self._prefetcher is not None:
            self._useful_before += self._prefetcher.useful
        self._name = heuristic
        self._prefetcher = Prefetcher(HEURISTICS[heuristic], limits) if heuristic in HEURISTICS else None

    async def read(
        self, fd: int, key: Hashable, filesystem: MountedFilesystem, offset: int, size: int
    ) -> bytearray | bytes:
        """Return up to `size` bytes from `offset`: at once if they are in memory, otherwise from a thread.

        Args:
            fd: the open file.
            key: identifies the file, whichever caller opened it.
            filesystem: the file system of the file.
            offset: the offset of the first byte.
            size: the number of bytes wanted.

        Raises:
            OSError: the error of the real file system.
        """
        if self._record is not None:
            self._record.write(f"{time.monotonic():.6f} {key} {offset} {size}\n")
        buffer = bytearray(size)
        count = -1
        if not filesystem.remote:
            how = 0 if filesystem.in_memory else linux.RWF_NOWAIT
            with contextlib.suppress(OSError):  # not in memory, or the file system does not support the flag
                count = calls.preadv(fd, [buffer], offset, how)
        # A short read may have stopped at the end of the cached pages, not at the end of the file.
        missed = count < 0 or (count < size and offset + count < calls.fstat(fd).st_size)
        self.counts["misses" if missed else "hits"] += 1
        storage = self._storage(filesystem)
        if not filesystem.remote:
            self._prefetch(fd, key, storage, offset, size, missed=missed)
        if missed:
            storage.reading += 1
            try:
                data, took, end = await trio.to_thread.run_sync(_pread, fd, size, offset, abandon_on_cancel=True)
            finally:
                storage.reading -= 1
            storage.missed(took)
            if filesystem.remote:
                self._prefetch(fd, key, storage, offset, size, missed=True, end=end)
            return data
        del buffer[count:]
        return buffer

    async def write(
        self,
        fd: int,
        credentials: linux.Credentials,
        filesystem: MountedFilesystem,
        offset: int,
        data: bytes | memoryview,
        *,
        append: bool = False,
        in_sync: bool = False,
    ) -> int:
        """Write `data` as `credentials` at `offset`, or at the end of the file, and return how many bytes were written.

        `in_sync` says that it has to wait for the disk (O_SYNC, O_DSYNC).

        Raises:
            OSError: the error of the real file system; EAGAIN: too much waits already for this caller to be written.
        """
        flags = os.RWF_APPEND if append else 0
        if filesystem.in_memory:
            return calls.pwrite(credentials, fd, data, offset, flags)
        storage = self._storage(filesystem)
        if not in_sync and storage.is_quick(len(data)):
            self.counts["written_at_once"] += 1
            return storage.write(credentials, fd, data, offset, flags)
        done = 0
        if storage.writes_at_once:
            try:
                done = calls.pwrite(credentials, fd, data, offset, linux.RWF_NOWAIT | flags)
            except OSError as exc:  # any other error occurs again in the thread
                storage.writes_at_once = exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL)
        if done == len(data):
            return done
        rest = partial(calls.pwrite, credentials, fd, memoryview(data)[done:], offset + done, flags)
        self.counts["written_by_threads"] += 1
        try:
            with self.thread_writes(filesystem):
                return done + await self._write_in_thread(credentials.uid, len(data) - done, rest)
        except OSError:
            if not done:
                raise
            return done  # as with write(2), the next write gets the error

    @contextlib.contextmanager
    def thread_writes(self, filesystem: MountedFilesystem) -> Iterator[None]:
        """While a thread changes a file there, leave writes to threads: it may hold the lock of the file for long."""
        storage = self._storage(filesystem)
        storage.writing += 1
        try:
            yield
        finally:
            storage.writing -= 1

    async def _write_in_thread(self, uid: int, size: int, write: Callable[[], int]) -> int:
        if not self.unwritten.has_share_left(uid):
            self.unwritten.refused += 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.unwritten.take(uid, size)
        writers = self._writers.setdefault(uid, trio.CapacityLimiter(_WRITERS))
        try:
            return await trio.to_thread.run_sync(write, limiter=writers, abandon_on_cancel=True)
        finally:
            self.unwritten.give_back(uid, size)
            if uid not in self.unwritten.held:
                del self._writers[uid]

    def is_busy(self, filesystem: MountedFilesystem) -> bool:
        """Whether a thread reads or writes there, which may hold the lock of a file for as long as the disk takes."""
        storage = self._storages.get(filesystem)
        return storage is not None and (storage.writing or storage.reading) > 0

    def state(self) -> dict[str, Any]:
        """Return what `cloakfs status` shows."""
        return {
            "heuristic": self._name,
            "hits": self.counts["hits"],
            "misses": self.counts["misses"],
            "asked": self.counts["requested"],
            "written_at_once": self.counts["written_at_once"],
            "written_by_threads": self.counts["written_by_threads"],
            "devices": [str(storage) for storage in self._storages.values()],
        }

    def read_ahead(self) -> tuple[int, int, int]:
        """Return how many bytes were requested by read-ahead, were then read, and are not expected to be read any more.

        The remaining ones are still ahead of a reader.
        """
        requested, useful, ahead = self.counts["requested"], self._useful_before, 0
        if self._prefetcher is not None:
            useful += self._prefetcher.useful
            ahead = self._prefetcher.ahead
        # What was given up may be read after all; a counter never falls.
        self._wasted = max(self._wasted, requested - useful - ahead)
        return requested, useful, self._wasted

    def _storage(self, filesystem: MountedFilesystem) -> Storage:
        storage = self._storages.get(filesystem)
        if storage is None:
            storage = self._storages[filesystem] = Storage(filesystem, self._dirty_pages)
        return storage

    def _prefetch(
        self, fd: int, key: Hashable, storage: Storage, offset: int, size: int, *, missed: bool, end: int | None = None
    ) -> None:
        """Read ahead of this read, if that is worth it; `end` is the size of the file."""
        prefetcher = self._prefetcher
        if prefetcher is None or self.tasks is None or not (storage.pays or not prefetcher.heuristic.frugal):
            return
        if end is None:
            end = calls.fstat(fd).st_size
        length = min(size, end - offset)
        if length <= 0:
            return
        piece = prefetcher.read(key, offset, length, end, missed=missed)
        if piece is None or storage.pending >= _MOST_PENDING:
            return
        try:
            own = calls.dup(fd)  # the client may close its file meanwhile
        except OSError:
            return  # too many descriptors are open
        self.counts["requested"] += piece.end - piece.start
        storage.pending += 1
        self.tasks.once("reading ahead", self._fetch, own, piece, storage)

    async def _fetch(self, fd: int, piece: ReadAhead, storage: Storage) -> None:
        # Any read-ahead that is left when the daemon ends is abandoned.
        advise = partial(_advise, fd, piece, storage.chunk)
        try:
            await trio.to_thread.run_sync(advise, limiter=storage.readers, abandon_on_cancel=True)
        except RuntimeError as exc:  # no more threads can start; read-ahead is optional
            calls.close(fd)
            log.debug("read-ahead: %s", exc)
        finally:
            storage.pending -= 1


def _pread(fd: int, size: int, offset: int) -> tuple[bytes, float, int]:
    """Return the data, how many seconds the read took, and the size of the file."""
    began = time.monotonic()
    data = calls.pread(fd, size, offset)
    return data, time.monotonic() - began, calls.fstat(fd).st_size


def _advise(fd: int, piece: ReadAhead, chunk: int) -> None:
    try:
        for start in range(piece.start, piece.end, chunk):
            calls.fadvise(fd, start, min(chunk, piece.end - start), os.POSIX_FADV_WILLNEED)
    except OSError as exc:
        log.debug("read-ahead: %s", exc)  # a read at that place gets the error
    finally:
        calls.close(fd)
