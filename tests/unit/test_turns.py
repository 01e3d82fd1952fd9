"""Requests that take long let others be served, and those of one caller take turns."""

import trio
import trio.testing

from cloakfs.filesystem.operation import Turns


def test_the_slices_of_one_caller_take_turns() -> None:
    """However many of its requests take long, others wait for one slice of it between two of their own steps."""
    worked: list[int] = []

    async def work(turns: Turns, caller: int) -> None:
        for _ in range(20):
            await turns.wait_for_turn(caller)
            worked.append(caller)

    async def main() -> None:
        turns = Turns()
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(work, turns, 1)
            nursery.start_soon(work, turns, 2)
        assert not turns._waiting

    trio.run(main)
    last_of_the_other = len(worked) - 1 - worked[::-1].index(2)
    assert worked[: last_of_the_other + 1].count(1) < 45  # of 1000; twice as many as the other's, at most


def test_whoever_gives_up_leaves_the_turn_to_others() -> None:
    async def main() -> None:
        turns = Turns()
        with trio.CancelScope() as scope:
            scope.cancel()
            await turns.wait_for_turn(1)
        assert scope.cancelled_caught
        with trio.fail_after(5):
            await turns.wait_for_turn(1)

    trio.run(main)
