"""Reading and writing real files without ever keeping the session loop waiting, and reading ahead.

What is in memory is copied on the spot (RWF_NOWAIT, preadv2(2)); for anything else a thread waits. What a `Prefetcher`
asks for is read ahead by threads, too: into the page cache of the real file, where the next READ finds it.
"""

import contextlib
import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Hashable
from functools import partial
from statistics import fmean
from typing import Any, TextIO

import trio

from . import linux
from .prefetch import HEURISTICS, Ask, Limits, Prefetcher
from .tasks import Tasks
from .tree import calls
from .tree.filesystems import Filesystem

log = logging.getLogger(__name__)

PAYS_SECONDS = 0.001
"""Reading ahead pays where what is not in memory takes at least so long, in the mean of the last misses. Below, the
kernel's own read-ahead hides it, and a thread would cost as much."""

# So many misses tell how long they take; none is believed before there were so many. (Not their median: storage that
# is throttled answers most at once, and then none for a while.)
_MISSES = 64
_FEWEST = 4

# So many threads at most do nothing but read ahead.
_THREADS = 16

_DEFAULT_CHUNK = 128 << 10


class Storage:
    """What one file system of the tree lies on.

    Attributes:
        path: where it is mounted.
        chunk: bytes that it takes at once; what is asked for beyond is dropped (mm/readahead.c).
        writes_at_once: RWF_NOWAIT works for writing.
        wait: the mean of the last misses, in seconds; None as long as there were too few.
        pays: it is slow enough for reading ahead.
    """

    def __init__(self, filesystem: Filesystem) -> None:
        self.path = filesystem.path
        self.chunk = _chunk(filesystem.device)
        self.writes_at_once = not filesystem.remote
        self._waits: deque[float] = deque(maxlen=_MISSES)
        self.wait: float | None = None
        self.pays = False

    def missed(self, seconds: float) -> None:
        """So long it took to get what was not in memory."""
        self._waits.append(seconds)
        if len(self._waits) >= _FEWEST:
            self.wait = fmean(self._waits)
            self.pays = self.wait >= PAYS_SECONDS

    def __str__(self) -> str:
        if self.wait is None:
            return f"{self.path}: too few reads had to wait to know how slow it is"
        took = f"{self.path}: what is not in memory takes {self.wait * 1000:.2g} ms"
        return took if self.pays else f"{took}: too fast to read ahead (from {PAYS_SECONDS * 1000:g} ms)"


def _chunk(number: int) -> int:
    """How much read-ahead the device with this st_dev takes in one piece, in bytes."""
    name = f"{os.major(number)}:{os.minor(number)}"
    settings = (
        f"/sys/class/bdi/{name}/read_ahead_kb",
        f"/sys/dev/block/{name}/queue/max_sectors_kb",
        f"/sys/dev/block/{name}/../queue/max_sectors_kb",  # a partition's disk
    )
    found = [_DEFAULT_CHUNK]
    for path in settings:
        try:
            with open(path) as file:
                found.append(int(file.read()) << 10)
        except (OSError, ValueError):
            continue
    return max(found)


class Reader:
    """Reads and writes for one mount.

    Args:
        heuristic: a name in `HEURISTICS`, or "off".
        limits: how much may be read ahead.
        record: gets a line for each READ: seconds, file, offset, length.
    """

    def __init__(self, heuristic: str, limits: Limits, record: TextIO | None = None) -> None:
        self.use(heuristic, limits)
        self._record = record
        self._storages: dict[Filesystem, Storage] = {}
        self._limiter = trio.CapacityLimiter(_THREADS)
        self.tasks: Tasks | None = None
        self.counts: Counter[str] = Counter()
        """How many reads found what they wanted in memory (`hits`), how many did not (`misses`); bytes `asked` for."""

    def use(self, heuristic: str, limits: Limits) -> None:
        """Go on with this heuristic, which knows nothing yet."""
        self._name = heuristic
        self._prefetcher = Prefetcher(HEURISTICS[heuristic], limits) if heuristic in HEURISTICS else None

    async def read(self, fd: int, key: Hashable, filesystem: Filesystem, offset: int, size: int) -> bytearray | bytes:
        """Up to `size` bytes from `offset`: at once if they are in memory, else from a thread.

        Args:
            fd: the open file.
            key: which file it is, whoever opened it.
            filesystem: where it is.
            offset: of the first byte.
            size: bytes wanted.

        Raises:
            OSError: what the real file system says.
        """
        if self._record is not None:
            self._record.write(f"{time.monotonic():.6f} {key} {offset} {size}\n")
        buffer = bytearray(size)
        count = -1
        if not filesystem.remote:
            how = 0 if filesystem.in_memory else linux.RWF_NOWAIT
            with contextlib.suppress(OSError):  # not in memory, or a file system that cannot say
                count = calls.preadv(fd, [buffer], offset, how)
        # What was read may end where the page cache does, not where the file does.
        missed = count < 0 or (count < size and offset + count < calls.fstat(fd).st_size)
        self.counts["misses" if missed else "hits"] += 1
        storage = self._storage(filesystem)
        if not filesystem.remote:
            self._look_ahead(fd, key, storage, offset, size, missed=missed)
        if missed:
            data, took, end = await trio.to_thread.run_sync(_pread, fd, size, offset, abandon_on_cancel=True)
            storage.missed(took)
            if filesystem.remote:
                self._look_ahead(fd, key, storage, offset, size, missed=True, end=end)
            return data
        del buffer[count:]
        return buffer

    async def write(
        self,
        fd: int,
        who: linux.Credentials,
        filesystem: Filesystem,
        offset: int,
        data: bytes | memoryview,
        *,
        append: bool = False,
    ) -> int:
        """Write `data` as `who` at `offset`, or wherever the file ends, and return how much of it was written.

        Raises:
            OSError: what the real file system says.
        """
        flags = os.RWF_APPEND if append else 0
        if filesystem.in_memory:
            return calls.pwrite(who, fd, data, offset, flags)
        storage = self._storage(filesystem)
        done = 0
        if storage.writes_at_once:
            try:
                done = calls.pwrite(who, fd, data, offset, linux.RWF_NOWAIT | flags)
            except OSError as exc:  # what else it says, it says again in the thread
                storage.writes_at_once = exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL)
        if done == len(data):
            return done
        rest = partial(calls.pwrite, who, fd, memoryview(data)[done:], offset + done, flags)
        try:
            return done + await trio.to_thread.run_sync(rest, abandon_on_cancel=True)
        except OSError:
            if not done:
                raise
            return done  # as write(2): the next one is told

    def state(self) -> dict[str, Any]:
        """What `cloakfs status` tells."""
        return {
            "heuristic": self._name,
            **{name: self.counts[name] for name in ("hits", "misses", "asked")},
            "devices": [str(storage) for storage in self._storages.values()],
        }

    def _storage(self, filesystem: Filesystem) -> Storage:
        storage = self._storages.get(filesystem)
        if storage is None:
            storage = self._storages[filesystem] = Storage(filesystem)
        return storage

    def _look_ahead(
        self, fd: int, key: Hashable, storage: Storage, offset: int, size: int, *, missed: bool, end: int | None = None
    ) -> None:
        """Read ahead of this read, if that is worth it; `end` is the file's."""
        prefetcher = self._prefetcher
        if prefetcher is None or self.tasks is None or not (storage.pays or not prefetcher.heuristic.frugal):
            return
        if end is None:
            end = calls.fstat(fd).st_size
        length = min(size, end - offset)
        if length <= 0:
            return
        ask = prefetcher.read(key, offset, length, end, missed=missed)
        if ask is None:
            return
        try:
            own = calls.dup(fd)  # the client may close its file meanwhile
        except OSError:
            return  # too many are open
        self.counts["asked"] += ask.end - ask.start
        self.tasks.once("reading ahead", self._fetch, own, ask, storage.chunk)

    async def _fetch(self, fd: int, ask: Ask, chunk: int) -> None:
        # What is left when the daemon ends, goes with it.
        try:
            await trio.to_thread.run_sync(_advise, fd, ask, chunk, limiter=self._limiter, abandon_on_cancel=True)
        except RuntimeError as exc:  # no more threads: nobody has to read ahead
            calls.close(fd)
            log.debug("read-ahead: %s", exc)


def _pread(fd: int, size: int, offset: int) -> tuple[bytes, float, int]:
    """What is read, how many seconds it took, and where the file ends."""
    began = time.monotonic()
    data = calls.pread(fd, size, offset)
    return data, time.monotonic() - began, calls.fstat(fd).st_size


def _advise(fd: int, ask: Ask, chunk: int) -> None:
    try:
        for start in range(ask.start, ask.end, chunk):
            calls.fadvise(fd, start, min(chunk, ask.end - start), os.POSIX_FADV_WILLNEED)
    except OSError as exc:
        log.debug("read-ahead: %s", exc)  # whoever reads there will be told
    finally:
        calls.close(fd)
