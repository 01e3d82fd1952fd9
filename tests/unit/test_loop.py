"""Which task reads, and which tasks run meanwhile. The session is a socket; pyfuse3's loop is rewritten in Python."""

import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from types import ModuleType
from typing import Any, cast

import pyfuse3
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from cloakfs.fuse import loop
from tests.waiting import wait_in_loop

Handler = Callable[[int], Awaitable[None]]


class Session:
    """`_session_loop` and what it uses, as in pyfuse3's internal.pxi."""

    def __init__(
        self, handler: Handler, min_tasks: int = loop.IDLE_WORKERS, max_tasks: int = loop.MOST_WORKERS
    ) -> None:
        self.ours, self.theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.handler = handler
        self.min_tasks = min_tasks
        self.max_tasks = max_tasks
        self.trio: Any = None
        self.lock: Any = None
        self.exited = False
        self.active = 0
        self.tasks = 1
        self.most_tasks = 1
        self.inside = 0  # of the lock
        self.answered: list[int] = []

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            self.theirs.send(number.to_bytes(4, "big"))

    def end(self) -> None:
        self.theirs.close()

    def terminate(self) -> None:
        self.exited = True
        self.trio.lowlevel.notify_closing(self.ours)

    async def main(self) -> None:
        self.trio = cast("Any", pyfuse3).trio
        with self.ours, self.theirs:
            async with self.trio.open_nursery() as nursery:
                nursery.start_soon(self._session_loop, nursery, name="first")

    async def _wait(self) -> bool:
        if self.lock is None:
            self.lock = self.trio.Lock()
        self.active += 1
        try:
            async with self.lock:
                self.inside += 1
                assert self.inside == 1, "two read"
                try:
                    if self.exited:
                        return False
                    await self.trio.lowlevel.wait_readable(self.ours)
                finally:
                    self.inside -= 1
        except self.trio.ClosedResourceError:
            return False
        finally:
            self.active -= 1
        return True

    async def _session_loop(self, nursery: Any) -> None:
        while not self.exited:
            if self.active > self.min_tasks:
                break
            if not await self._wait():
                break
            message = self.ours.recv(4)  # BlockingIOError: somebody else was faster, or nobody asked
            if not self.active and self.tasks < self.max_tasks:
                self.tasks += 1
                self.most_tasks = max(self.tasks, self.most_tasks)
                nursery.start_soon(self._session_loop, nursery, name="another")
            if not message:
                self.exited = True
                break
            number = int.from_bytes(message, "big")
            await self.handler(number)
            self.answered.append(number)
        self.tasks -= 1


async def at_once(_: int) -> None:
    pass


@contextlib.asynccontextmanager
async def served(session: Session) -> AsyncIterator[trio.Nursery]:
    """The session runs during the with block, and then ends by itself."""
    with loop._lean():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.main)
            yield nursery
            nursery.cancel_scope.deadline = trio.current_time() + 60
        assert not nursery.cancel_scope.cancelled_caught, "it does not end"
    assert session.tasks == session.active == session.inside == 0
    assert session.lock._count == 0


# -- none lost, none twice, one at a time ----------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), max_size=60),
    st.integers(1, 5),
    st.integers(0, 6),
    st.lists(st.integers(1, 10), min_size=1, max_size=5),
)
def test_every_request_is_answered_once(waits: list[int], min_tasks: int, more: int, batches: list[int]) -> None:
    """The handler of request N waits waits[N] times; requests come in batches."""

    async def handler(number: int) -> None:
        for _ in range(waits[number]):
            await trio.lowlevel.checkpoint()

    async def check() -> None:
        session = Session(handler, min_tasks, min_tasks + more)
        async with served(session):
            numbers = iter(range(len(waits)))
            for size in itertools.cycle(batches):
                if not (batch := list(itertools.islice(numbers, size))):
                    break
                session.ask(*batch)
                await trio.lowlevel.checkpoint()
            await wait_in_loop(lambda: len(session.answered) == len(waits))
            session.end()
        assert sorted(session.answered) == list(range(len(waits)))
        assert session.most_tasks <= min_tasks + more

    trio.run(check)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 30),
    st.sampled_from(["cancel", "end", "terminate"]),
)
def test_it_ends_at_any_moment(waits: list[int], steps: int, how: str) -> None:
    async def handler(number: int) -> None:
        for _ in range(waits[number]):
            await trio.lowlevel.checkpoint()

    async def check() -> None:
        session = Session(handler, 2, 6)
        with loop._lean(), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.main)
                session.ask(*range(len(waits)))
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                if how == "cancel":
                    nursery.cancel_scope.cancel()
                elif how == "end" or session.trio is None:
                    session.end()
                else:
                    session.terminate()
        assert session.active == session.inside == 0
        assert len(set(session.answered)) == len(session.answered)
        assert how != "end" or len(session.answered) == len(waits)

    trio.run(check)


# -- handing over ----------------------------------------------------------------------------------


def test_answers_that_wait_do_not_keep_others_waiting() -> None:
    async def check() -> None:
        go_on = trio.Event()

        async def handler(number: int) -> None:
            if number < 200:
                await go_on.wait()

        session = Session(handler)
        async with served(session):
            session.ask(*range(200))
            session.ask(200)
            await wait_in_loop(lambda: session.answered == [200])
            go_on.set()
            await wait_in_loop(lambda: len(session.answered) == 201)
            # Those who have nothing to do go; some stay for the next time.
            await wait_in_loop(lambda: session.tasks <= loop.IDLE_WORKERS + 1)
            assert session.tasks > 1
            session.end()

    trio.run(check)


def test_with_all_workers_waiting_the_next_request_does_too() -> None:
    async def check() -> None:
        go_on = [trio.Event() for _ in range(4)]

        async def handler(number: int) -> None:
            await go_on[number].wait()

        session = Session(handler, 2, 3)
        async with served(session):
            session.ask(0, 1, 2, 3)
            go_on[3].set()
            await wait_all_tasks_blocked(0.05)
            assert session.answered == []
            go_on[1].set()
            await wait_in_loop(lambda: session.answered == [1, 3])
            go_on[0].set()
            go_on[2].set()
            await wait_in_loop(lambda: len(session.answered) == 4)
            session.end()

    trio.run(check)


def test_no_worker_too_many_is_started() -> None:
    """pyfuse3 starts one whenever nobody waits to read, which is so until the last one started gets to run."""

    async def check() -> None:
        async def handler(number: int) -> None:
            if number == 0:
                await trio.sleep(0.02)

        session = Session(handler)
        async with served(session):
            session.ask(*range(200))
            await wait_in_loop(lambda: len(session.answered) == 200)
            session.end()
        assert session.most_tasks <= 5

    trio.run(check)


def test_who_was_cancelled_is_not_handed_the_lock() -> None:
    async def check() -> None:
        workers = loop.Workers()
        order = []
        go_on = trio.Event()

        async def hold(number: int, scope: trio.CancelScope) -> None:
            with scope:
                async with workers:
                    order.append(number)
                    await go_on.wait()

        async def work(number: int) -> None:
            await workers._work(hold, number, scopes[number])

        scopes = [trio.CancelScope() for _ in range(4)]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(work, number)
                    await trio.testing.wait_all_tasks_blocked()
                assert order == [0]
                scopes[3].cancel()  # would be the next
                go_on.set()
        assert order == [0, 2, 1]

    trio.run(check)


def test_who_was_handed_the_lock_and_is_cancelled_hands_it_on() -> None:
    async def check() -> None:
        workers = loop.Workers()
        order: list[str] = []
        scopes = [trio.CancelScope() for _ in range(3)]
        go_on = trio.Event()

        async def hold(number: int) -> None:
            with scopes[number]:
                async with workers:
                    order.append(f"{number} reads")
                    await go_on.wait()
                    await trio.sleep(0.01)
                    order.append(f"{number} has read")

        async def hold_and_answer(number: int) -> None:
            await hold(number)
            await trio.lowlevel.checkpoint()  # hands over, to 2

        reschedule = trio.lowlevel.reschedule

        def cancel_at_once(task: trio.lowlevel.Task) -> None:
            reschedule(task)
            scopes[2].cancel()

        with trio.fail_after(60), pytest.MonkeyPatch.context() as patch:
            patch.setattr(trio.lowlevel, "reschedule", cancel_at_once)
            async with trio.open_nursery() as nursery:
                for number, work in enumerate((hold_and_answer, hold, hold)):
                    nursery.start_soon(workers._work, work, number)
                    await trio.testing.wait_all_tasks_blocked()
                go_on.set()
        assert order == ["0 reads", "0 has read", "2 reads", "1 reads", "1 has read"]

    trio.run(check)


# -- trio gets its time ----------------------------------------------------------------------------


def test_requests_that_wait_for_nothing_do_not_go_through_the_scheduler() -> None:
    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    async def check() -> None:
        session = Session(at_once)
        session.ask(*range(100))
        session.end()
        steps = Steps()
        start = time.monotonic()
        trio.lowlevel.add_instrument(steps)
        async with served(session):
            pass
        took = time.monotonic() - start
        assert session.answered == list(range(100))
        assert steps.count < 15 + 2 * took / loop._SECONDS

    trio.run(check)


def test_timers_and_threads_under_full_load() -> None:
    """The requests of a thread that never pauses; answers take 50 µs."""

    async def check() -> None:
        async def handler(_: int) -> None:
            until = time.perf_counter() + 50e-6
            while time.perf_counter() < until:
                pass

        session = Session(handler)
        stop = False

        def ask() -> None:
            with contextlib.suppress(OSError):
                while not stop:
                    session.ask(1)

        async with served(session) as nursery:
            nursery.start_soon(trio.to_thread.run_sync, ask)
            await wait_in_loop(lambda: len(session.answered) > 100)
            meanwhile = []  # not in seconds: on a busy machine, requests take longer, too
            for _ in range(20):
                before = len(session.answered)
                await trio.sleep(0.001)
                await trio.to_thread.run_sync(int)
                meanwhile.append(len(session.answered) - before)
            session.terminate()
            stop = True
        assert sorted(meanwhile)[5] < 400, meanwhile

    trio.run(check)


def test_a_task_that_could_run_does_so_after_the_request() -> None:
    """As that which looks a refused directory up again."""

    async def check() -> None:
        seen: list[int] = []

        async def look() -> None:
            seen.append(len(session.answered))

        async def handler(number: int) -> None:
            if number == 10:
                nursery.start_soon(look)

        session = Session(handler)
        session.ask(*range(50))
        session.end()
        async with served(session) as nursery:
            pass
        assert len(seen) == 1
        assert seen[0] <= 13  # trio runs those that could in any order

    trio.run(check)


def test_answers_that_wait_are_not_delayed() -> None:
    async def check() -> None:
        async def handler(_: int) -> None:
            await trio.to_thread.run_sync(int)

        session = Session(handler)
        took, alone = [], []
        async with served(session):
            for number in range(50):
                start = time.monotonic()
                await trio.to_thread.run_sync(int)
                alone.append(time.monotonic() - start)
                start = time.monotonic()
                session.ask(number)
                while len(session.answered) <= number:
                    await trio.lowlevel.checkpoint()
                    await trio.to_thread.run_sync(int)  # nothing else could run
                took.append(time.monotonic() - start)
            session.end()
        # As long as a thread takes here and now, and not until the loop looks around.
        assert min(took) < 0.001 + 5 * min(alone)
        assert sorted(took)[25] < 0.02 + 5 * sorted(alone)[25]

    trio.run(check)


def test_an_idle_session_uses_no_processor() -> None:
    async def check() -> None:
        session = Session(at_once)
        async with served(session):
            session.ask(1)
            await wait_in_loop(lambda: session.answered == [1])
            used: list[float] = []
            while not used or (used[-1] >= 0.02 and len(used) < 20):  # what was begun before may still go on
                before = time.process_time()
                await trio.sleep(0.5)
                used.append(time.process_time() - before)
            assert used[-1] < 0.02, used
            session.end()

    trio.run(check)


def test_the_end_is_noticed_while_others_have_their_time() -> None:
    """terminate() finds nobody waiting for the session when the one who reads is giving others time."""

    async def check() -> None:
        async def handler(_: int) -> None:
            session.lock._since = 0
            nursery.start_soon(terminate)

        async def terminate() -> None:
            session.terminate()

        session = Session(handler)
        async with served(session) as nursery:
            session.ask(1)

    for _ in range(10):  # trio runs those that could in any order
        trio.run(check)


def test_what_trio_throws_gets_to_the_handler() -> None:
    class Strange:
        def __await__(self) -> Generator[object, None, None]:
            yield "no trap of trio's"

    async def check() -> None:
        async def handler(_: int) -> None:
            with pytest.raises(TypeError, match="yield"):
                await Strange()

        session = Session(handler)
        session.ask(1)
        async with served(session):
            await wait_in_loop(lambda: session.answered == [1])
            session.end()

    trio.run(check)


# -- the names -------------------------------------------------------------------------------------


def test_pyfuse3_gets_its_trio_back() -> None:
    async def check() -> None:
        async def handler(_: int) -> None:
            raise LookupError

        session = Session(handler)
        session.ask(1)
        with pytest.raises(ExceptionGroup) as caught:
            async with served(session):
                assert not isinstance(cast("Any", pyfuse3).trio, ModuleType)
        assert caught.group_contains(LookupError)
        assert cast("Any", pyfuse3).trio is trio

    trio.run(check)
