"""Runs pyfuse3's session loop without a pass through trio's scheduler for every request.

pyfuse3 has several workers, one of which reads: it takes a lock, waits until the session is readable, reads a request,
releases the lock and answers. Between two requests it passes trio's scheduler and epoll(7) twice, which costs more than
many answers. In the lean loop, the reading worker goes on reading as long as its answers need not wait; another worker
gets the lock only when this one is about to yield the thread. For this purpose, the names that the loop uses from
`pyfuse3.trio` are replaced, as in pyfuse3's own support of asyncio.

A request may be gone by the time it is read, because the process that made it has been killed. read(2) then blocks
until the next request, and with it all timers and all answers that threads have finished, for as long as no request
comes. Therefore, while there are requests, a signal interrupts read(2) now and then.
"""

import contextlib
import select
import signal
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from types import SimpleNamespace
from typing import Any, Protocol, cast

import pyfuse3
import trio
from trio.lowlevel import Abort, Task

IDLE_WORKERS = 8
"""The number of workers that stay after a burst of answers that had to wait; each has a buffer."""

MOST_PENDING = 2000
"""How many requests, other than WRITE, may wait (for threads, directory services) at a time; callers have shares."""

SHARE = MOST_PENDING // 4
"""How many requests of one caller may wait at a time, so that no caller can occupy all workers, or all threads."""

MOST_BACKGROUND = 2000
"""How many requests the kernel sends that no process waits for: reading ahead, and writing what was mapped.

The kernel does not consider whose they are. So it may send more of them than one caller's share of waiting requests is.
"""

MOST_WRITES = 2 * MOST_BACKGROUND
"""How many WRITE may wait at a time. Half of them is a caller's share: as many as the kernel sends by itself.

What was written to a mapping is lost if its WRITE is refused.
"""

MOST_LOCK_REQUESTS = 1000
"""How many requests for locks, and how many to unlock, may wait at a time; callers have shares.

They do not count among `MOST_PENDING`: who waits for as many locks as it may can still look at files, and unlock some.
"""

MOST_WORKERS = MOST_PENDING + MOST_WRITES + 2 * MOST_LOCK_REQUESTS + 100
"""How many answers may wait until no more requests are read, which the limits above prevent."""

# trio notices signals, timers and finished threads only when it gets to run. The loop may delay that this long:
_SECONDS = 0.001
_SECONDS_OTHERS = 0.0002  # while other answers wait
# After FORGET. Of these, the kernel hands out up to 16 before any other request, so that a process that waits for an
# answer waits for all of them, and for whatever the daemon does in between.
_SECONDS_FORGETS = 0.005

# How long read(2) waits at most for a request that is gone. It is longer than any other call of the loop should take,
# because the signal interrupts those calls as well.
_TICK_SECONDS = 0.05


@types.coroutine
def _return() -> Generator[Any, Any, None]:
    return
    yield


# An awaitable that is done, as often as it is awaited. To make and to run a coroutine for each request takes longer.
_done = _return()
with contextlib.suppress(StopIteration):
    _done.send(None)


class LastRequest:
    """What the session loop knows of the last request that it has read.

    Attributes:
        is_forget: whether that was FORGET.
    """

    __slots__ = ("is_forget",)

    def __init__(self) -> None:
        self.is_forget = False


last_request = LastRequest()


class Working:
    """The worker of the lean loop that runs.

    Attributes:
        session: pyfuse3's coroutine in it, which answers one request at a time. It is known once it has yielded. None
            in pyfuse3's own loop.
    """

    __slots__ = ("session",)

    def __init__(self) -> None:
        self.session: Any = None


working = Working()


class Nursery(Protocol):
    """The part of a nursery that the session loop uses."""

    def start_soon(self, work: Callable[..., Awaitable[Any]], *args: Any, name: object = None) -> None:
        """See trio.Nursery."""


class Workers:
    """The workers of one session, of which at most one reads. This is also an instrument of trio.

    Whenever no worker runs, either one of them reads or none waits to read: a worker that stops running (`_watched`)
    ensures this. A process has only one instance, because pyfuse3 holds the lock that it was given first.
    """

    def __init__(self) -> None:
        self._reading = False
        self._waiting: list[Task] = []  # to read
        self._count = 0
        self._closing = False
        self._poll: Callable[[int], list[tuple[int, int]]] | None = None
        self._since = 0.0  # when trio last got to run
        self._is_idle = False  # the reading worker waits in trio
        self._is_ticking = False  # the timer sends signals
        # The tasks that could run. trio calls these two functions when a task becomes runnable, and when it runs.
        self._runnable: set[Task] = set()
        self.task_scheduled = self._runnable.add
        self.before_task_step = self._runnable.discard

    # -- the lock ----------------------------------------------------------------------------------

    def __aenter__(self) -> Awaitable[None]:
        if self._reading:
            return self._wait_to_read()
        self._reading = True
        return _done

    async def _wait_to_read(self) -> None:
        task = trio.lowlevel.current_task()
        self._waiting.append(task)

        def give_up(_: object) -> Abort:
            self._waiting.remove(task)
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)
        self._reading = True

    def __aexit__(self, *exc: object) -> Awaitable[None]:
        self._reading = False
        return _done

    def _hand_over(self) -> None:
        if not self._reading and self._waiting:
            self._reading = True  # set here already, so that no other worker can get the lock first
            self._since = time.monotonic()
            trio.lowlevel.reschedule(self._waiting.pop())  # the last one, whose buffer is still in the CPU cache

    # -- the workers -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[Nursery]:
        """Open a nursery whose tasks are watched as workers."""
        async with trio.open_nursery() as nursery:

            def start_soon(work: Callable[..., Coroutine[Any, Any, None]], *args: Any, name: object = None) -> None:
                nursery.start_soon(self._work, work, *args, name=name)

            yield cast("Nursery", SimpleNamespace(start_soon=start_soon))

    async def _work(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        self._count += 1
        try:
            await self._watched(work(*args))
        finally:
            self._count -= 1

    @types.coroutine
    def _watched(self, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Await `work`; whenever it stops running and does not read, let another worker read."""
        step, value = work.send, None
        while True:
            working.session = getattr(work, "cr_await", None)
            try:
                trap = step(value)
            except StopIteration:
                return
            finally:
                self._hand_over()
            try:
                step, value = work.send, (yield trap)
            except BaseException as exc:
                step, value = work.throw, exc

    # -- waiting for requests ----------------------------------------------------------------------

    def wait_readable(self, fd: int) -> Awaitable[None]:
        """Return when there is a request, at once if there is one already; let trio run now and then.

        Raises:
            trio.ClosedResourceError: the session is about to be closed.
        """
        if self._poll is None:
            session = select.poll()
            session.register(fd, select.POLLIN)
            self._poll = session.poll
        since = time.monotonic() - self._since
        reads_on = last_request.is_forget and since < _SECONDS_FORGETS
        last_request.is_forget = False
        is_due = not reads_on and (
            self._runnable
            or since > _SECONDS
            or (since > _SECONDS_OTHERS and self._count - len(self._waiting) > 1)  # other answers wait
        )
        if is_due or not self._is_ticking or not self._poll(0):
            return self._wait_readable(fd, is_due=bool(is_due))
        return _done

    async def _wait_readable(self, fd: int, *, is_due: bool) -> None:
        if is_due:
            await trio.lowlevel.checkpoint()
            self._since = time.monotonic()
            if self._closing:  # no task was waiting for notify_closing() to wake it
                raise trio.ClosedResourceError
        assert self._poll is not None
        if not self._poll(0):
            self._is_idle = True
            try:
                await trio.lowlevel.wait_readable(fd)
            finally:
                self._is_idle = False
            self._since = time.monotonic()
        if not self._is_ticking:
            self._is_ticking = True
            signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)

    def tick(self, *_: object) -> None:
        """Handle SIGALRM: the signal by itself interrupts a waiting read(2). An idle loop needs no signals."""
        if self._is_idle:
            self.stop_ticking()

    def stop_ticking(self) -> None:
        """Send no more signals until there is a request."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._is_ticking = False

    def notify_closing(self, fd: int) -> None:
        """See trio.lowlevel."""
        self._closing = True
        trio.lowlevel.notify_closing(fd)


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    workers = Workers()
    lowlevel = {"wait_readable": workers.wait_readable, "notify_closing": workers.notify_closing}
    names = {
        "Lock": lambda: workers,
        "open_nursery": workers.open_nursery,
        "lowlevel": SimpleNamespace(**(vars(trio.lowlevel) | lowlevel)),
    }
    module = cast("Any", pyfuse3)
    module.trio = SimpleNamespace(**(vars(trio) | names))
    trio.lowlevel.add_instrument(cast("trio.abc.Instrument", workers))
    before = signal.signal(signal.SIGALRM, workers.tick)
    try:
        yield
    finally:
        workers.stop_ticking()
        signal.signal(signal.SIGALRM, before)
        trio.lowlevel.remove_instrument(cast("trio.abc.Instrument", workers))
        module.trio = trio


async def serve(*, stock: bool = False) -> None:
    """Answer requests until the session ends, once in a process; with `stock`, use pyfuse3's own loop.

    That loop blocks on requests that are gone (see above); it is available only for comparison.
    """
    # Each answer may take a thread. Other users of threads (unmounting, for example) must not have to wait for those.
    trio.to_thread.current_default_thread_limiter().total_tokens += MOST_PENDING
    if stock:
        await pyfuse3.main()
    else:
        with _lean():
            await pyfuse3.main(IDLE_WORKERS, MOST_WORKERS)
