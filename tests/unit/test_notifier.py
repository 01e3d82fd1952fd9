"""Who waits until a name is invalidated. A thread plays the kernel, and continues when the test lets it."""

import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pyfuse3
import pytest
import trio
import trio.testing

from cloakfs.kernelcache import notifier
from cloakfs.kernelcache.notifier import Notifier
from cloakfs.tuning import STANDARD, Tuning
from tests.waiting import wait_in_loop

HELD, OTHER = 7, 8


class Kernel:
    """Is notified of names in directories, and drops them when the test lets it.

    Attributes:
        asked: the directories, in the order in which threads asked.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._allowed = threading.Semaphore(0)

    def invalidate_names(self, parent: int, *_: object) -> None:
        self.asked.append(parent)
        self._allowed.acquire()

    def allow(self, times: int) -> None:
        self._allowed.release(times)

    async def is_asked(self, *directories: int) -> None:
        await wait_in_loop(lambda: self.asked == list(directories))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(notifier, "invalidate_names", kernel.invalidate_names)
    yield kernel
    kernel.allow(1000)


CALM = Tuning(notify_patience_seconds=1000.0, notify_threads=1, notify_wait_seconds=1000.0)
"""One thread works, unless it seems to wait for a lock; no directory is stalled."""


def run(test: Callable[[Notifier], Awaitable[None]], tuning: Tuning = CALM) -> None:
    async def main() -> None:
        names = Notifier(tuning)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.run)
            await trio.testing.wait_all_tasks_blocked()
            await test(names)
            nursery.cancel_scope.cancel()

    trio.run(main)


async def settled(*events: trio.Event | None) -> None:
    with trio.fail_after(60):
        for event in events:
            assert event is not None
            await event.wait()


def test_who_changes_a_name_after_the_directory_is_free_again(kernel: Kernel) -> None:
    """Requests that came while it was held did not wait, although their names are still pending; the next one does."""

    async def test(names: Notifier) -> None:
        first = names.invalidate_entry(HELD, b"first")
        await kernel.is_asked(HELD)
        names.invalidate_entry(OTHER, b"a name")
        second = names.invalidate_entry(HELD, b"second")
        await settled(first, second)
        assert HELD in names.stalled
        names._tuning = CALM  # from now on, no directory is stalled
        kernel.allow(1)
        await kernel.is_asked(HELD, OTHER)
        assert HELD not in names.stalled
        third = names.invalidate_entry(HELD, b"third")
        assert third is not None
        assert not third.is_set()
        kernel.allow(2)
        await settled(third)
        assert kernel.asked == [HELD, OTHER, HELD]

    run(test, replace(CALM, notify_patience_seconds=0.05, most_notify_threads=1))


DIRECTORIES = range(10, 20)


@pytest.mark.parametrize("waits_seconds", [1000.0, 0.0], ids=["they work", "they wait"])
def test_only_a_few_threads_work(waits_seconds: float, kernel: Kernel) -> None:
    """Others begin if these seem to wait for a lock, which a process may never release."""

    async def test(names: Notifier) -> None:
        events = [names.invalidate_entry(directory, b"name") for directory in DIRECTORIES]
        await wait_in_loop(lambda: len(kernel.asked) >= (2 if waits_seconds else len(DIRECTORIES)))
        if waits_seconds:
            await trio.sleep(3 * notifier.AGAIN_SECONDS)
            assert len(kernel.asked) == 2
        kernel.allow(len(DIRECTORIES))
        await settled(*events)
        assert sorted(kernel.asked) == list(DIRECTORIES)

    run(test, replace(CALM, notify_threads=2, notify_wait_seconds=waits_seconds))


def test_a_name_that_comes_later_waits_for_what_waits_by_then(kernel: Kernel) -> None:
    """And until it is invalidated, it is pending."""

    async def test(names: Notifier) -> None:
        names.invalidate_entry(1, b"first")
        await kernel.is_asked(1)
        names.defer(HELD, b"name")
        names.defer(HELD, b"name")
        names.invalidate_entry(HELD, b"beside")
        names.invalidate_entry(OTHER, b"below")
        assert names.is_pending(HELD, b"name")
        assert names.is_busy(HELD)
        events = [names.invalidate_deferred(HELD, b"name") for _ in range(2)]
        assert names.is_pending(HELD, b"name")
        kernel.allow(3)
        await settled(*events)
        assert kernel.asked == [1, OTHER, HELD]
        assert not names.is_pending(HELD, b"name")
        assert not names.is_busy(HELD)

    run(test)


def test_no_thread_begins_in_a_directory_that_a_request_holds(kernel: Kernel) -> None:
    """The thread would wait for the request, and the request for the thread."""

    async def test(names: Notifier) -> None:
        names.invalidate_entry(1, b"first")
        await kernel.is_asked(1)
        before = names.invalidate_entry(HELD, b"before")
        with names.suspended(HELD):
            meanwhile = names.invalidate_entry(HELD, b"meanwhile")
            elsewhere = names.invalidate_entry(OTHER, b"elsewhere")
            kernel.allow(2)
            await settled(elsewhere)
            assert kernel.asked == [1, OTHER]
            assert names.is_pending(HELD, b"before")
            assert names.is_pending(HELD, b"meanwhile")
        kernel.allow(1)
        await settled(before, meanwhile)
        assert kernel.asked == [1, OTHER, HELD]
        assert not names.is_busy(HELD)

    run(test)


def test_a_thread_that_waits_for_a_request_is_replaced_at_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "AGAIN_SECONDS", 1000.0)

    async def test(names: Notifier) -> None:
        before = names.invalidate_entry(HELD, b"before")
        await kernel.is_asked(HELD)
        with names.suspended(HELD):
            elsewhere = names.invalidate_entry(OTHER, b"elsewhere")
            await kernel.is_asked(HELD, OTHER)
        kernel.allow(2)
        await settled(before, elsewhere)

    run(test)


def test_a_thread_that_has_many_names_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take together, each is invalidated in no time, so that no further thread begins."""
    now = 0.0
    threads: set[int] = set()
    step = threading.Barrier(2)  # the two threads go on name by name

    def invalidate_entry(*_: object) -> None:
        nonlocal now
        threads.add(threading.get_ident())
        if step.wait(60) == 0:
            now += STANDARD.notify_wait_seconds / 2
        step.wait(60)

    monkeypatch.setattr(notifier, "monotonic", lambda: now)
    monkeypatch.setattr(pyfuse3, "invalidate_entry", invalidate_entry)
    most = 0

    async def test(names: Notifier) -> None:
        nonlocal most
        events = [names.invalidate_entry(directory, b"%d" % name) for directory in (10, 11) for name in range(100)]
        await wait_in_loop(lambda: len(threads) >= 2 and now >= 10 * STANDARD.notify_wait_seconds)
        most = names._waiting_threads()
        await settled(*events)

    run(test, replace(STANDARD, notify_threads=2, notify_patience_seconds=1000.0))
    assert most == 0


class _Between(trio.abc.Instrument):
    """Calls a function once, before a task that invalidates pages takes its first step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.has_called = False
        self.is_done = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if "pages" in task.name and not self.has_called:
            self.has_called = True
            self._call()

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.is_done |= "pages" in task.name


def test_nothing_is_invalidated_once_a_file_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what was asked for a second time before a thread began, which then did it for both."""
    asked: list[int] = []
    monkeypatch.setattr(notifier, "invalidate_pages", asked.append)

    async def in_thread(call: Callable[..., object], *arguments: object) -> object:
        return await trio.to_thread.run_sync(call, *arguments)

    async def test(files: Notifier) -> None:
        between = _Between(lambda: files.invalidate_pages(HELD))
        trio.lowlevel.add_instrument(between)
        files.invalidate_pages(HELD)
        await wait_in_loop(lambda: between.is_done)
        await files.confirm(HELD, in_thread)
        until_locked = list(asked)
        files.invalidate_pages(OTHER)
        await wait_in_loop(lambda: OTHER in asked)
        assert until_locked == [HELD]
        assert asked == [HELD, OTHER]

    run(test)
