"""What the kernel dropped is dealt with little by little."""

import trio
import trio.testing

from cloakfs.filesystem.references import AT_ONCE, References


class _Forgotten:
    """Counts what was dropped; a nodeid of 0 cannot be."""

    def __init__(self) -> None:
        self.references: list[tuple[int, int]] = []
        self.failures = 0

    def forget(self, inode: int, count: int) -> None:
        if not inode:
            raise KeyError(inode)
        self.references.append((inode, count))

    def is_news(self, _: str, __: Exception) -> bool:
        self.failures += 1
        return False


def test_few_are_dropped_at_once() -> None:
    async def main() -> None:
        forgotten = _Forgotten()
        References(forgotten.forget, forgotten.is_news).dropped([(number, 2) for number in range(1, 4)])
        assert forgotten.references == [(1, 2), (2, 2), (3, 2)]

    trio.run(main)


def test_others_get_their_turn_while_many_are_dropped() -> None:
    async def main() -> None:
        forgotten = _Forgotten()
        references = References(forgotten.forget, forgotten.is_news)
        wanted = [(number, 1) for number in range(100 * AT_ONCE)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(references.run)
            await trio.testing.wait_all_tasks_blocked()
            references.dropped(wanted)
            turns = 0
            while len(forgotten.references) + forgotten.failures < len(wanted):
                before = len(forgotten.references) + forgotten.failures
                await trio.sleep(0)
                assert len(forgotten.references) + forgotten.failures - before <= 2 * AT_ONCE
                turns += 1
            assert turns >= 50
            references.dropped([(7, 3)] * (AT_ONCE + 1))  # after it had nothing to do, too
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert forgotten.references == wanted[1:] + [(7, 3)] * (AT_ONCE + 1)
        assert forgotten.failures == 1, "one that fails keeps no other"

    trio.run(main)
