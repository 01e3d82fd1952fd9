"""Who waits until a name is invalidated. A thread plays the kernel, and continues when the test lets it."""

import threading

import pyfuse3
import pytest
import trio
import trio.testing

from cloakfs.filesystem import forgetter
from cloakfs.filesystem.forgetter import Forgetter

HELD, OTHER = 7, 8


def test_who_changes_a_name_after_the_directory_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who came while it was held were told not to wait, with names that are not forgotten yet; he waits."""
    free = [threading.Event() for _ in range(3)]
    asked: list[int] = []

    def forget_names(parent: int, *_: object) -> None:
        asked.append(parent)
        free[len(asked) - 1].wait()

    monkeypatch.setattr(forgetter, "_forget_names", forget_names)
    monkeypatch.setattr(forgetter, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(forgetter, "_MOST_THREADS", 1)

    async def main() -> None:
        names = Forgetter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.run)
            await trio.testing.wait_all_tasks_blocked()
            first = names.name(HELD, b"first")
            with trio.fail_after(60):
                while asked != [HELD]:
                    await trio.sleep(0.001)
            names.name(OTHER, b"a name")
            second = names.name(HELD, b"second")
            assert first is not None
            assert second is not None
            with trio.fail_after(60):
                await first.wait()
                await second.wait()
                assert names.is_late(HELD)
                monkeypatch.setattr(forgetter, "_PATIENCE_SECONDS", 1000.0)  # from now on, nobody is late
                free[0].set()
                while asked != [HELD, OTHER]:
                    await trio.sleep(0.001)
            assert not names.is_late(HELD)
            third = names.name(HELD, b"third")
            assert third is not None
            assert not third.is_set()
            free[1].set()
            free[2].set()
            with trio.fail_after(60):
                await third.wait()
            assert asked == [HELD, OTHER, HELD]
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        for event in free:
            event.set()


DIRECTORIES = range(10, 20)


@pytest.mark.parametrize("waits_seconds", [1000.0, 0.0], ids=["they work", "they wait"])
def test_only_a_few_threads_work(waits_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others begin if these seem to wait for a lock, which somebody may never release."""
    go = threading.Event()
    begun: list[int] = []

    def forget_names(parent: int, *_: object) -> None:
        begun.append(parent)
        go.wait()

    monkeypatch.setattr(forgetter, "_forget_names", forget_names)
    monkeypatch.setattr(forgetter, "_PATIENCE_SECONDS", 1000.0)
    monkeypatch.setattr(forgetter, "_FEW_THREADS", 2)
    monkeypatch.setattr(forgetter, "_WAITS_SECONDS", waits_seconds)

    async def main() -> None:
        names = Forgetter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.run)
            await trio.testing.wait_all_tasks_blocked()
            settled = [names.name(directory, b"name") for directory in DIRECTORIES]
            with trio.fail_after(60):
                while len(begun) < (2 if waits_seconds else len(DIRECTORIES)):
                    await trio.sleep(0.001)
                if waits_seconds:
                    await trio.sleep(3 * forgetter._AGAIN_SECONDS)
                    assert len(begun) == 2
                go.set()
                for event in settled:
                    assert event is not None
                    await event.wait()
            assert sorted(begun) == list(DIRECTORIES)
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        go.set()


def test_a_name_that_comes_later_waits_for_what_waits_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """And until it is forgotten, it counts as a name that has yet to be."""
    go = threading.Event()
    begun: list[int] = []

    def forget_names(parent: int, *_: object) -> None:
        begun.append(parent)
        go.wait()

    monkeypatch.setattr(forgetter, "_forget_names", forget_names)
    monkeypatch.setattr(forgetter, "_PATIENCE_SECONDS", 1000.0)
    monkeypatch.setattr(forgetter, "_FEW_THREADS", 1)
    monkeypatch.setattr(forgetter, "_WAITS_SECONDS", 1000.0)

    async def main() -> None:
        names = Forgetter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.run)
            await trio.testing.wait_all_tasks_blocked()
            names.name(1, b"first")
            with trio.fail_after(60):
                while begun != [1]:
                    await trio.sleep(0.001)
            names.later(HELD, b"name")
            names.later(HELD, b"name")
            names.name(HELD, b"beside")
            names.name(OTHER, b"below")
            assert names.is_forgetting(HELD, b"name")
            assert names.is_busy(HELD)
            events = [names.now(HELD, b"name") for _ in range(2)]
            assert names.is_forgetting(HELD, b"name")
            go.set()
            with trio.fail_after(60):
                for event in events:
                    assert event is not None
                    await event.wait()
            assert begun == [1, OTHER, HELD]
            assert not names.is_forgetting(HELD, b"name")
            assert not names.is_busy(HELD)
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        go.set()


def test_a_thread_that_has_many_names_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take together, each is invalidated in no time, so that no further thread begins."""
    now = 0.0
    threads: set[int] = set()
    step = threading.Barrier(2)  # the two threads go on name by name

    def invalidate_entry(*_: object) -> None:
        nonlocal now
        threads.add(threading.get_ident())
        if step.wait(60) == 0:
            now += forgetter._WAITS_SECONDS / 2
        step.wait(60)

    monkeypatch.setattr(forgetter, "monotonic", lambda: now)
    monkeypatch.setattr(forgetter, "_FEW_THREADS", 2)
    monkeypatch.setattr(pyfuse3, "invalidate_entry", invalidate_entry)
    monkeypatch.setattr(forgetter, "_PATIENCE_SECONDS", 1000.0)
    most = 0

    async def main() -> None:
        nonlocal most
        names = Forgetter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.run)
            await trio.testing.wait_all_tasks_blocked()
            settled = [names.name(directory, b"%d" % name) for directory in (10, 11) for name in range(100)]
            with trio.fail_after(60):
                while len(threads) < 2 or now < 10 * forgetter._WAITS_SECONDS:
                    await trio.sleep(0.001)
                most = names._waiting_threads()
                for event in settled:
                    assert event is not None
                    await event.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert most == 0
