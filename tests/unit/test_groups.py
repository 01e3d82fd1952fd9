"""Groups from a user database that is fast, slow, hung or broken.

The lookup that blocks is replaced by one that a test can hold; it runs in real threads, and time is trio's.
"""

import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, assert_no_checkpoints, wait_all_tasks_blocked

from cloakfs.accounts import groups
from cloakfs.accounts.groups import DatabaseGroups
from cloakfs.tuning import STANDARD
from tests.waiting import wait_in_loop

ALICE = 4001
NOTHING: frozenset[int] = frozenset()


class Database:
    """A user database that answers when a test lets it, with `members`."""

    def __init__(self) -> None:
        self.members: dict[int, frozenset[int]] = {}
        self.failure: Exception | None = None
        self.asked: list[int] = []
        self.running = 0
        self.most_running = 0
        self.answers = threading.Event()
        self.answers.set()
        self._lock = threading.Lock()

    def groups_of(self, uid: int) -> frozenset[int]:
        with self._lock:
            self.asked.append(uid)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.answers.wait(30)
        with self._lock:
            self.running -= 1
        if self.failure is not None:
            raise self.failure
        return self.members.get(uid, NOTHING)

    def hang(self) -> None:
        self.answers.clear()


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    made = Database()
    monkeypatch.setattr(groups, "database_groups", made.groups_of)
    yield made
    made.answers.set()  # threads of the test must end


def run(test: Callable[[DatabaseGroups, MockClock], Awaitable[None]]) -> None:
    clock = MockClock()

    async def main() -> None:
        await test(DatabaseGroups(), clock)

    trio.run(main, clock=clock)


until = functools.partial(wait_in_loop, every=0)  # the clock does not go on by itself


def is_quiet(source: DatabaseGroups) -> bool:
    """Has every question been answered, or given up?"""
    return not source._queries


def test_an_answer_is_used_until_it_is_30_s_old(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        with assert_checkpoints():
            assert await source.of_user(ALICE) == {7}
        database.members[ALICE] = frozenset({8})
        clock.jump(19)
        with assert_no_checkpoints():
            assert await source.of_user(ALICE) == {7}
        assert database.asked == [ALICE]
        clock.jump(STANDARD.groups_seconds - 19)
        assert await source.of_user(ALICE) == {8}
        assert database.asked == [ALICE, ALICE]

    assert STANDARD.groups_seconds == 30
    run(test)


def test_an_answer_in_use_is_asked_for_again_before_it_is_old(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        await source.of_user(ALICE)
        database.members[ALICE] = frozenset({8})
        database.hang()
        clock.jump(21)
        for _ in range(5):
            with assert_no_checkpoints():
                assert await source.of_user(ALICE) == {7}
            await wait_all_tasks_blocked()
        database.answers.set()
        await until(lambda: is_quiet(source))
        with assert_no_checkpoints():
            assert await source.of_user(ALICE) == {8}
        assert database.asked == [ALICE, ALICE]
        # The second answer lasts 30 s, too.
        clock.jump(19)
        with assert_no_checkpoints():
            assert await source.of_user(ALICE) == {8}

    run(test)


def test_many_questions_for_one_uid_are_one(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        database.hang()
        answers = []

        async def ask() -> None:
            answers.append(await source.of_user(ALICE))

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(ask)
            await until(lambda: database.running == 1)
            await wait_all_tasks_blocked()
            database.answers.set()
        assert answers == [{7}] * 50
        assert database.asked == [ALICE]

    run(test)


def test_one_who_stops_waiting_takes_nothing_from_the_others(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        database.hang()
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def ask_first() -> None:
                with first:
                    await source.of_user(ALICE)

            async def ask_second() -> None:
                assert await source.of_user(ALICE) == {7}

            nursery.start_soon(ask_first)
            await until(lambda: database.running == 1)
            nursery.start_soon(ask_second)
            await wait_all_tasks_blocked()
            first.cancel()
            await wait_all_tasks_blocked()
            database.answers.set()
        assert database.asked == [ALICE]

    run(test)


def test_a_hung_database_costs_5_s_and_a_late_answer_counts(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        database.hang()
        waited = []

        async def ask() -> None:
            start = trio.current_time()
            assert await source.of_user(ALICE) == NOTHING
            waited.append(trio.current_time() - start)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: database.running == 1)
            for _ in range(51):
                await wait_all_tasks_blocked()
                clock.jump(0.1)
        # That is remembered for a second, and then the thread that still waits is waited for.
        for _ in range(5):
            with assert_no_checkpoints():
                assert await source.of_user(ALICE) == NOTHING
        clock.jump(1.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for _ in range(51):
                await wait_all_tasks_blocked()
                clock.jump(0.1)
        assert waited == pytest.approx([5, 5], abs=0.11)
        assert database.asked == [ALICE]
        database.answers.set()
        await until(lambda: is_quiet(source))
        assert await source.of_user(ALICE) == {7}
        assert database.asked == [ALICE]

    assert STANDARD.groups_patience_seconds == 5
    run(test)
    assert [record.getMessage() for record in caplog.records] == [
        f"the groups of uid {ALICE} cannot be read from the user database: no answer within 5 s"
    ]


def test_an_answer_that_took_longer_than_it_lasts_is_not_used(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        database.hang()

        async def ask() -> None:
            assert await source.of_user(ALICE) == NOTHING

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: database.running == 1)
            await wait_all_tasks_blocked()
            clock.jump(STANDARD.groups_seconds)
            await wait_all_tasks_blocked()
            clock.jump(1)
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            database.answers.set()
        assert await source.of_user(ALICE) == {7}
        assert database.asked == [ALICE, ALICE]

    run(test)


def test_a_hung_database_holds_few_threads_and_nobody_else_up(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        assert await source.of_user(ALICE) == {7}
        database.hang()
        others = trio.to_thread.current_default_thread_limiter()
        answers: list[frozenset[int]] = []

        async def ask(uid: int) -> None:
            answers.append(await source.of_user(uid))

        for turn in range(3):
            async with trio.open_nursery() as nursery:
                for uid in range(5000, 5090):
                    nursery.start_soon(ask, uid + turn * 100)
                await until(lambda: database.running == 4)
                await wait_all_tasks_blocked()
                # The loop is free, and so are the threads that everything else uses.
                with assert_no_checkpoints():
                    assert await source.of_user(ALICE) == {7}
                assert others.borrowed_tokens == 0
                assert await trio.to_thread.run_sync(lambda: "done") == "done"
                clock.jump(STANDARD.groups_patience_seconds)
            clock.jump(1.1)
        assert answers == [NOTHING] * 270
        assert len(database.asked) == 1 + 4
        assert len(source._queries) == 4  # no question waits for ever
        database.members[6000] = frozenset({8})
        database.answers.set()
        await until(lambda: is_quiet(source))
        assert await source.of_user(6000) == {8}
        assert database.most_running == 4

    run(test)


def test_a_failing_database_is_less_and_is_not_asked_all_the_time(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        assert await source.of_user(ALICE) == {7}
        database.failure = OSError(5, "the directory is on fire")
        clock.jump(25)
        for _ in range(5):  # the answer that is still fresh counts
            assert await source.of_user(ALICE) == {7}
            await until(lambda: is_quiet(source))
        assert len(database.asked) == 2
        clock.jump(5)
        for _ in range(5):
            assert await source.of_user(ALICE) == NOTHING
        assert len(database.asked) == 3
        for _ in range(40):
            clock.jump(1.1)
            assert await source.of_user(ALICE) == NOTHING
        database.failure = None
        clock.jump(1.1)
        assert await source.of_user(ALICE) == {7}

    run(test)
    assert len(caplog.records) == 1  # within a minute
    assert "on fire" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_answer_ends_although_it_could_not_be_renewed_just_before(database: Database) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.members[ALICE] = frozenset({7})
        await source.of_user(ALICE)
        database.failure = OSError(5, "no")
        clock.jump(29.5)
        assert await source.of_user(ALICE) == {7}
        await until(lambda: is_quiet(source))
        clock.jump(0.6)
        assert await source.of_user(ALICE) == NOTHING
        assert len(database.asked) == 3

    run(test)


def test_a_failing_database_is_told_once_a_minute(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        database.failure = OSError(5, "no")
        for uid in range(100, 130):
            await source.of_user(uid)
            clock.jump(1.9)
        assert len(caplog.records) == 1
        clock.jump(5)
        await source.of_user(99)
        assert len(caplog.records) == 2

    run(test)
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_what_clients_choose_does_not_fill_the_memory(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_MOST_KNOWN", 20)

    async def test(source: DatabaseGroups, clock: MockClock) -> None:
        for uid in range(100):
            await source.of_user(uid)
            assert len(source._known) <= 20
        assert not source._queries

    run(test)


def test_a_hung_database_does_not_delay_the_end(database: Database) -> None:
    async def main() -> None:
        source = DatabaseGroups()
        database.hang()
        async with trio.open_nursery() as nursery:
            for uid in range(10):
                nursery.start_soon(source.of_user, uid)
            await until(lambda: database.running == 4)
            nursery.cancel_scope.cancel()

    start = time.monotonic()
    trio.run(main)
    assert time.monotonic() - start < 20


def test_the_real_database() -> None:
    async def main(uid: int) -> Any:
        return await DatabaseGroups().of_user(uid)

    assert 0 in trio.run(main, 0)
    for unknown in (2**31 + 12345, 2**32 - 2):
        assert trio.run(main, unknown) == NOTHING
