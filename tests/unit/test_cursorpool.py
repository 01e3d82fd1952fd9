"""Which file gives up a cursor when all are in use."""

from collections.abc import Iterable

import pytest

from cloakfs.streams import CursorPool

NONE_IDLE = frozenset[str]()


def filled(size: int, cursors: str) -> CursorPool[str]:
    """A pool in which these were used one after the other: the owner's letter and a number, `!` after a stream's."""
    pool: CursorPool[str] = CursorPool(size)
    for word in cursors.split():
        pool.use(word[0], word.removesuffix("!"), is_stream=word.endswith("!"))
    return pool


def victim(pool: CursorPool[str], owner: str, idle: Iterable[str] = NONE_IDLE) -> str | None:
    return pool.make_room(owner, frozenset(idle).__contains__)


def test_nobody_gives_way_while_there_is_room() -> None:
    pool = filled(3, "a1 a2!")
    assert victim(pool, "b", idle=["a2"]) is None
    assert list(pool) == ["a1", "a2"]


@pytest.mark.parametrize(
    ("cursors", "owner", "gives_way"),
    [
        # What is on trial is shared evenly.
        ("a1 a2 b1", "b", "a1"),
        ("b1 a1 a2", "c", "a1"),
        ("b1 a1 a2 a1", "c", "a2"),  # a1 was used again
        ("a1! a2 a3 b1!", "b", "a2"),  # not the stream, though it is older
        ("a1 a2 b1 b2", "a", "a1"),  # nobody has more
        ("a1 b1 c1", "c", "c1"),  # nobody loses the only one
        # Streams give way to whoever has less than an equal part, and only those of whoever has the most.
        ("a1! a2! a3! b1!", "b", "a1"),
        ("b1! a1! a2! a3!", "c", "a1"),
        ("a1! a2! b1! b2!", "b", "b1"),
        ("a1! a2! a3! b1! c1!", "b", "b1"),  # an equal part of 5 is 1
        ("a1! a2! a3 b1! b2!", "a", "a3"),  # its own trial goes before its streams
    ],
)
def test_who_gives_way(cursors: str, owner: str, gives_way: str) -> None:
    pool = filled(len(set(cursors.split())), cursors)
    before = list(pool)
    assert victim(pool, owner) == gives_way
    assert list(pool) == [cursor for cursor in before if cursor != gives_way]
    assert gives_way not in pool.of(gives_way[0])


def test_so_many_streams_begin_where_the_streams_of_others_fill_the_pool() -> None:
    """And no more: what is read at random has trials only."""
    others = " ".join(f"a{number}!" for number in range(100))
    for trials, gives_way in ((15, "a0"), (16, "b0")):
        pool = filled(100 + trials, f"{others} {' '.join(f'b{number}' for number in range(trials))}")
        assert victim(pool, "b") == gives_way


def test_an_idle_stream_goes_first() -> None:
    assert victim(filled(4, "a1! b1! b2 b3"), "a", idle=["b1"]) == "b2"  # a1 is older, and goes on
    assert victim(filled(4, "b1! a1! b2 b3"), "a", idle=["b1"]) == "b1"


def test_an_owners_only_cursor_is_not_taken_because_it_is_idle_but_is_no_stream_any_more() -> None:
    pool = filled(4, "a1! b1! b2! c1")
    assert victim(pool, "c", idle=["a1", "b1"]) == "b1"
    assert pool.of("a") == {"a1"}
    # It is on trial now: with another one, it is the first to go.
    pool.use("a", "a2", is_stream=False)
    assert victim(pool, "c") == "a1"


def test_whatever_an_owner_had_is_free() -> None:
    pool = filled(4, "a1 a2! b1 b2")
    pool.drop("a")
    pool.drop("nobody")
    assert list(pool) == ["b1", "b2"]
    assert len(pool) == 2
    assert pool.of("a") == set()
    pool.use("c", "c1", is_stream=False)
    pool.use("c", "c2", is_stream=False)
    assert victim(pool, "a") in ("b1", "c1")


def test_a_stream_may_turn_out_to_be_none_and_the_other_way_round() -> None:
    pool = filled(3, "a1! b1 b2 a1")
    assert victim(pool, "c", idle=["a1"]) == "b1"
    pool = filled(3, "a1 a2 b1 a1! a2!")
    assert victim(pool, "b", idle=["a1"]) == "a1"
