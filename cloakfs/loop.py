"""pyfuse3's session loop, without a trip through trio's scheduler for every request.

pyfuse3 has several workers, one of which reads: it holds a lock, waits until the session is readable, lets the lock go
and answers. Between two requests it passes trio's scheduler and epoll(7) twice, which costs more than many an answer.
Lean, the worker that reads goes on reading as long as its answers wait for nothing; the lock goes to another only when
it is about to leave the thread to others. For that, the names that the loop takes from `pyfuse3.trio` are replaced, as
pyfuse3's own support of asyncio does.

A request may be gone by the time it is read, because the process that made it has been killed. read(2) then waits for
the next one, and all answers that are due from threads and all timers wait with it, for as long as nobody asks for
anything. So while there are requests, a signal interrupts read(2) now and then.
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
"""So many keep waiting after a burst of answers that had to wait for something; each has a buffer."""

MOST_WORKERS = 2000
"""With so many answers waiting for something (threads, directory services), no more requests are read."""

SHARE = MOST_WORKERS // 4
"""So many requests of one caller may wait at a time: nobody can have all workers, or all threads."""

# Of signals, timers and what threads have done, trio learns only when it is given time. For so long it is not:
_SECONDS = 0.001
_SECONDS_OTHERS = 0.0002  # while other answers wait for something

# At most this long does read(2) wait for a request that is gone. It is longer than any other call of the loop should
# take, because the signal interrupts those as well.
_TICK_SECONDS = 0.05


class Nursery(Protocol):
    """What the session loop wants of one."""

    def start_soon(self, work: Callable[..., Awaitable[Any]], *args: Any, name: object = None) -> None:
        """See trio.Nursery."""


class Workers:
    """The workers of one session, of which at most one reads. Also an instrument of trio's.

    Whenever none of them runs, one reads or none waits to: whoever stops running (`_watched`) sees to it. There is one
    in a process, since pyfuse3 keeps the lock that it was given first.
    """

    def __init__(self) -> None:
        self._reading = False
        self._waiting: list[Task] = []  # to read
        self._count = 0
        self._closing = False
        self._poll: Callable[[int], list[tuple[int, int]]] | None = None
        self._since = 0.0  # then trio had time
        self._is_idle = False  # the one that reads waits, in trio
        self._is_ticking = False  # there is a signal now and then
        # The tasks that could run. trio calls these two when a task gets there, and when it runs.
        self._runnable: set[Task] = set()
        self.task_scheduled = self._runnable.add
        self.before_task_step = self._runnable.discard

    # -- the lock ----------------------------------------------------------------------------------

    async def __aenter__(self) -> None:
        if self._reading:
            task = trio.lowlevel.current_task()
            self._waiting.append(task)

            def give_up(_: object) -> Abort:
                self._waiting.remove(task)
                return Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(give_up)
        self._reading = True

    async def __aexit__(self, *exc: object) -> None:
        self._reading = False

    def _hand_over(self) -> None:
        if not self._reading and self._waiting:
            self._reading = True  # from now on: nobody may come in between
            self._since = time.monotonic()
            trio.lowlevel.reschedule(self._waiting.pop())  # the last one: its buffer is in the processor's cache

    # -- the workers -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[Nursery]:
        """Workers started in this one are watched."""
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
        """Await `work`; whenever it stops running and does not read, another one reads."""
        step, value = work.send, None
        while True:
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

    async def wait_readable(self, fd: int) -> None:
        """Return when there is a request, at once if there is one already; trio gets its time now and then.

        Raises:
            trio.ClosedResourceError: the session is to end.
        """
        if self._poll is None:
            session = select.poll()
            session.register(fd, select.POLLIN)
            self._poll = session.poll
        others = self._count - len(self._waiting) > 1
        if self._runnable or time.monotonic() - self._since > (_SECONDS_OTHERS if others else _SECONDS):
            await trio.lowlevel.checkpoint()
            self._since = time.monotonic()
            if self._closing:  # nobody waited for what notify_closing() wakes
                raise trio.ClosedResourceError
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
        """The handler of SIGALRM: the signal by itself ends a read(2) that waits. An idle loop needs none."""
        if self._is_idle:
            self.stop_ticking()

    def stop_ticking(self) -> None:
        """No more signals until there is a request."""
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
    """Answer requests until the session ends, once in a process; `stock` is pyfuse3's own way.

    pyfuse3's own waits for requests that are gone (see above): it is here to be compared with.
    """
    # Each answer may take a thread. What else needs one (to unmount, for example) must not have to wait for them.
    trio.to_thread.current_default_thread_limiter().total_tokens += MOST_WORKERS
    if stock:
        await pyfuse3.main()
    else:
        with _lean():
            await pyfuse3.main(IDLE_WORKERS, MOST_WORKERS)
