"""What is read ahead: scores, cursors, windows and limits, read by read."""

from collections.abc import Hashable, Iterable
from random import Random

import pytest

from bench.prefetch.replay import ReplayResult, replay
from bench.prefetch.streams import Read, generate, merged
from cloakfs.prefetch import HEURISTICS, LEAST, MOST, NEAR_BYTES, Cursor, Limits, Prefetcher, ReadAhead

BLOCK = 32 << 10
HUGE = 1 << 40


class Remembering(Prefetcher):
    """With a memory in which everything stays that was asked for, and windows that are easy to tell by heart."""

    def __init__(self, heuristic: str, limits: Limits | None) -> None:
        super().__init__(HEURISTICS[heuristic], limits)
        self.memory: set[tuple[Hashable, int]] = set()

    def _window(self, cursor: Cursor, length: int) -> int:
        return min((cursor.seq_count - 1) * length, self.limits.window)

    def _share(self, cursor: Cursor) -> int:
        return self.limits.file


class Real(Remembering):
    """With the real windows."""

    _window = Prefetcher._window
    _share = Prefetcher._share


def replayed(streams: Iterable[Iterable[Read]]) -> ReplayResult:
    return replay(merged(streams), HEURISTICS["cursors"], Limits())


def made(heuristic: str = "cursors", limits: Limits | None = None) -> Remembering:
    return Remembering(heuristic, limits)


def walk(
    prefetcher: Remembering,
    blocks: Iterable[int],
    key: Hashable = "file",
    size: int = HUGE,
    *,
    missed: bool | None = None,
) -> list[tuple[int, int] | None]:
    """Read these blocks; what was asked for after each, in blocks. They are missed unless they were asked for."""
    asks: list[tuple[int, int] | None] = []
    for block in blocks:
        waited = (key, block) not in prefetcher.memory if missed is None else missed
        piece = prefetcher.read(key, block * BLOCK, BLOCK, size, missed=waited)
        if piece is None:
            asks.append(None)
        else:
            asks.append((piece.start // BLOCK, piece.end // BLOCK))
            prefetcher.memory |= {(key, number) for number in range(piece.start // BLOCK, piece.end // BLOCK)}
    return asks


def scores(heuristic: str, offsets: Iterable[int], length: int = BLOCK) -> list[int]:
    prefetcher = made(heuristic)
    counts = []
    for offset in offsets:
        prefetcher.read("file", offset, length, HUGE)
        counts.append(prefetcher.seq_counts("file")[-1])
    return counts


# -- scores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heuristic", "seq_count", "distance", "after"),
    [
        ("default", 1, 0, 2),
        ("default", MOST - 1, 0, MOST),
        ("default", MOST, 0, MOST),
        ("default", 100, 1, 1),
        ("default", 100, -NEAR_BYTES, 1),
        ("slowdown", 0, 0, 1),
        ("slowdown", MOST - 1, 0, MOST),
        ("slowdown", MOST, 0, MOST),
        ("slowdown", 100, 1, 100),
        ("slowdown", 100, NEAR_BYTES, 100),
        ("slowdown", 100, -NEAR_BYTES, 100),
        ("slowdown", 100, NEAR_BYTES + 1, 50),
        ("slowdown", 101, -NEAR_BYTES - 1, 50),
        ("slowdown", 1, HUGE, 0),
        ("slowdown", 0, HUGE, 0),
        ("cursors", 100, NEAR_BYTES, 100),
        ("always", 0, HUGE, MOST),
    ],
)
def test_the_rules(heuristic: str, seq_count: int, distance: int, after: int) -> None:
    assert HEURISTICS[heuristic].count(seq_count, distance) == after


@pytest.mark.parametrize(
    ("heuristic", "expected"),
    [
        ("default", [1, 2, 3, 4, 1, 1, 1, 2]),
        ("slowdown", [1, 2, 3, 4, 4, 4, 4, 5]),
        ("cursors", [1, 2, 3, 4, 4, 4, 4, 5]),
        ("always", [MOST] * 8),
    ],
)
def test_a_stream_out_of_order(heuristic: str, expected: list[int]) -> None:
    assert scores(heuristic, [block * BLOCK for block in (0, 1, 2, 3, 5, 4, 6, 7)]) == expected


def test_slowdown_falls_by_halves() -> None:
    near, far = NEAR_BYTES, NEAR_BYTES + 1
    offsets = [0, 1, 2, 3, 4 + near, 5 + near - far, HUGE // 2, 0, HUGE // 2]
    assert scores("slowdown", offsets, length=1) == [1, 2, 3, 4, 4, 2, 1, 0, 0]


def test_a_read_beyond_64_kib_begins_a_cursor() -> None:
    prefetcher = made()
    for offset in (0, 1, 2, 3 + NEAR_BYTES, 4 + NEAR_BYTES, 5 + 2 * NEAR_BYTES + 1):
        prefetcher.read("file", offset, 1, HUGE)
    assert prefetcher.seq_counts("file") == [4, 1]


def test_the_nearest_cursor_goes_on() -> None:
    prefetcher = made()
    walk(prefetcher, [0, 4, 1, 2])
    assert prefetcher.seq_counts("file") == [3, 1]
    walk(prefetcher, [5])  # near both
    assert prefetcher.seq_counts("file") == [3, 2]


@pytest.mark.parametrize(("heuristic", "expected"), [("cursors", [8, 8, 8]), ("slowdown", [0]), ("default", [1])])
def test_streams_that_take_turns(heuristic: str, expected: list[int]) -> None:
    prefetcher = made(heuristic)
    walk(prefetcher, [start + n for n in range(8) for start in (1000, 0, 2000)])
    assert prefetcher.seq_counts("file") == expected


# -- windows -------------------------------------------------------------------------------------------


def test_the_window_grows_and_pieces_do() -> None:
    asks = walk(made(), range(8))
    assert asks == [None, (2, 3), (3, 5), (5, 7), (7, 9), None, (9, 13), None]


def test_the_window_ends_growing() -> None:
    asks = walk(made(limits=Limits(window=4 * BLOCK)), range(9))
    assert asks[4:] == [(7, 9), None, (9, 11), None, (11, 13)]


def test_nothing_below_two() -> None:
    prefetcher = made("slowdown")
    assert walk(prefetcher, [0, 1, 1000, 2000]) == [None, (2, 3), None, None]
    assert prefetcher.seq_counts("file") == [0]
    assert walk(prefetcher, [2001]) == [None]
    assert walk(prefetcher, [2002]) == [(2003, 2004)]
    assert LEAST == 2


def test_always_asks_at_once() -> None:
    assert walk(made("always", Limits(window=8 * BLOCK)), [0, 500]) == [(1, 9), (501, 509)]


def test_nothing_past_the_end() -> None:
    prefetcher, size = made(), 4 * BLOCK - 100
    assert walk(prefetcher, [0, 1], size=size) == [None, (2, 3)]
    assert prefetcher.read("file", 2 * BLOCK, BLOCK, size) == ReadAhead(3 * BLOCK, size)
    assert prefetcher.read("file", 3 * BLOCK, BLOCK - 100, size) is None
    assert prefetcher.ahead == 0


def test_a_file_that_became_shorter() -> None:
    prefetcher = made()
    walk(prefetcher, range(4))
    assert walk(prefetcher, [4], size=3 * BLOCK) == [None]


def test_two_reads_in_a_row_may_be_an_accident_but_not_at_the_beginning() -> None:
    for first in (0, 1, 2):
        assert walk(made(), [first, first + 1]) == [None, (first + 2, first + 3)]
    assert walk(made(), [3, 4, 5]) == [None, None, (6, 8)]


# -- trust ----------------------------------------------------------------------------------------------

SMALL = 8 << 10


def beginnings(prefetcher: Prefetcher, files: Iterable[Hashable], reads: int = 2) -> list[int]:
    """Read the beginnings of files, of which the kernel has got more than was missed: how much was asked for."""
    asked = []
    for file in files:
        asks = [prefetcher.read(file, at * SMALL, SMALL, 4 << 20, missed=at == 0) for at in range(reads)]
        asked.append(sum(piece.end - piece.start for piece in asks if piece is not None))
    return asked


@pytest.mark.parametrize(("heuristic", "asked"), [("cursors", 2 << 20), ("slowdown", 2 << 20), ("default", 0)])
def test_who_reads_the_beginning_is_expected_to_go_on(heuristic: str, asked: int) -> None:
    assert beginnings(Prefetcher(HEURISTICS[heuristic]), range(32)) == [asked] * 32


def test_a_beginning_that_is_in_memory_tells_nothing() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"])
    assert [prefetcher.read("file", at * SMALL, SMALL, 4 << 20, missed=False) for at in range(20)] == [None] * 20


def test_those_who_do_not_go_on_use_trust_up() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"])
    asked = beginnings(prefetcher, range(1000))
    assert asked[:32] == [2 << 20] * 32
    assert sum(asked[32:]) == 0
    assert prefetcher.ahead <= prefetcher.limits.total // 2  # streams that have proven to be some have the rest


def test_trust_can_be_earned_again() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"])
    beginnings(prefetcher, range(1000))
    for at in range(40 << 7):  # 40 MiB of one file, of which all but the beginning was asked for
        prefetcher.read("film", at * SMALL, SMALL, HUGE, missed=at < 20)
    assert 2 << 20 <= sum(beginnings(prefetcher, range(1000, 2000))) <= 40 << 20 >> 4


def test_what_was_lost_on_trust_is_not_the_file_s_fault() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(files=1, cursors=1))
    assert beginnings(prefetcher, ["file"]) == [2 << 20]
    asks = [prefetcher.read("file", (3 << 20) + at * SMALL, SMALL, 4 << 20) for at in range(3)]
    assert asks[-1] is not None


def test_streams_that_begin_together_share_trust() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(total=6 << 20))
    for file in range(3):
        assert prefetcher.read(file, 0, SMALL, 4 << 20) is None
    asks = [prefetcher.read(file, SMALL, SMALL, 4 << 20, missed=False) for file in range(3)]
    assert [piece.end - piece.start if piece is not None else 0 for piece in asks] == [2 << 20, 1 << 20, 0]


# -- what nobody needs to ask for -----------------------------------------------------------------------


def test_what_is_in_memory_is_not_asked_for_until_something_is_not() -> None:
    prefetcher = made(limits=Limits(window=2 * BLOCK))
    assert walk(prefetcher, range(4), missed=False) == [None] * 4
    assert walk(prefetcher, [4]) == [(5, 7)]
    assert walk(prefetcher, [5, 6, 7], missed=False) == [(7, 8), (8, 9), (9, 10)]  # found, for they were asked for
    assert walk(prefetcher, [10, 11], missed=False) == [None, None]  # found, and were not
    assert walk(prefetcher, [12]) == [(13, 15)]


@pytest.mark.parametrize("there", [0, 2000])
def test_a_jump_to_what_is_in_memory_asks_for_nothing(there: int) -> None:
    prefetcher = made("slowdown")
    walk(prefetcher, range(1000, 1010))
    assert walk(prefetcher, [there, there + 1], missed=False) == [None, None]
    assert walk(prefetcher, [there + 2]) == [(there + 3, there + 9)]  # half of 10, and 2 more


def test_what_another_stream_has_asked_for_is_left_out() -> None:
    prefetcher = made()
    assert walk(prefetcher, [20, 21, 22]) == [None, None, (23, 25)]
    asks = walk(prefetcher, range(9, 26))
    assert asks[6:10] == [(18, 22), None, (22, 23), None]
    assert asks[-2:] == [None, (26, 42)]  # it has taken over the rest, and goes on from there
    assert prefetcher.ahead == 16 * BLOCK


def test_what_another_stream_has_asked_for_may_be_gone() -> None:
    prefetcher = made()
    assert walk(prefetcher, [20, 21, 22]) == [None, None, (23, 25)]
    walk(prefetcher, range(9, 23))
    assert walk(prefetcher, [23], missed=True) == [(24, 38)]


def test_what_has_been_waited_for_too_long_is_gone() -> None:
    prefetcher = made()
    walk(prefetcher, range(100))
    assert walk(prefetcher, range(100, 103), missed=True) == [None] * 3  # it is on its way
    assert walk(prefetcher, [103], missed=False) == [None]
    assert walk(prefetcher, range(104, 108), missed=True) == [None] * 3 + [(108, 172)]


def test_what_was_given_up_is_left_out_until_it_is_read() -> None:
    prefetcher = made("always", Limits(window=4 * BLOCK))
    assert walk(prefetcher, [0, 500]) == [(1, 5), (501, 505)]
    assert walk(prefetcher, [0]) == [None]
    assert walk(prefetcher, [500, 2]) == [None, None]
    assert prefetcher.ahead == 2 * BLOCK  # 3 and 4 are expected again
    assert walk(prefetcher, [500, 1], missed=True) == [None, (2, 3)]  # 2 was read


def test_what_a_stream_leaves_out_is_not_asked_for_by_the_next() -> None:
    prefetcher = made(limits=Limits(window=2 * BLOCK))
    assert walk(prefetcher, [0, 1, 2]) == [None, (2, 3), (3, 5)]
    walk(prefetcher, [4, 6, 8], missed=False)  # 3 is left out
    assert prefetcher.ahead == 2 * BLOCK
    assert walk(prefetcher, [0, 1, 2]) == [None, (2, 3), None]


def test_streams_that_take_turns_do_not_crowd_out_what_is_remembered_of_others() -> None:
    prefetcher = made("always", Limits(window=100 * BLOCK))
    assert walk(prefetcher, [0]) == [(1, 101)]
    walk(prefetcher, [start + n for n in range(40) for start in (500, 1000)])
    assert walk(prefetcher, [0]) == [None]


def test_forwards_again_after_backwards() -> None:
    prefetcher = made()
    walk(prefetcher, range(14))
    assert prefetcher.seq_counts("file") == [14]
    walk(prefetcher, range(13, -1, -1), missed=False)
    assert prefetcher.seq_counts("file") == [14]
    assert walk(prefetcher, [1, 2]) == [(2, 14), None]  # what follows is remembered


# -- limits ---------------------------------------------------------------------------------------------


def test_the_budget_of_a_file() -> None:
    prefetcher = made(limits=Limits(file=3 * BLOCK))
    assert walk(prefetcher, range(6)) == [None, (2, 3), (3, 5), (5, 7), None, (7, 9)]
    assert prefetcher.ahead == 3 * BLOCK
    assert walk(prefetcher, range(3), "another") == [None, (2, 3), (3, 5)]


def test_the_budget_of_all_files() -> None:
    prefetcher = made(limits=Limits(total=BLOCK))
    walk(prefetcher, range(2), "a")
    assert prefetcher.ahead == BLOCK
    assert walk(prefetcher, range(3), "b") == [None] * 3


def test_who_left_a_file_alone_keeps_nobody_from_reading_ahead() -> None:
    prefetcher = made(limits=Limits(total=BLOCK, window=BLOCK))
    walk(prefetcher, range(2), "a")
    asks = walk(prefetcher, range(200), "b")
    assert asks[50] is None
    assert asks[199] == (200, 201)
    assert prefetcher.ahead == BLOCK  # of b
    assert walk(prefetcher, [2], "a") == [None]  # it was asked for: and now it is wanted after all


@pytest.mark.parametrize("name", ["cursors", "slowdown"])
def test_what_was_not_worth_it_is_not_gone_on_with(name: str) -> None:
    prefetcher = Real(name, None)
    spoilt = 0
    for number in range(2000):
        first = number * 100  # three in a row, and then somewhere else
        for piece in walk(prefetcher, range(first, first + 3)):
            spoilt += piece is not None
    assert spoilt < 400
    tail = walk(prefetcher, range(500_000, 502_000))
    assert tail[-1] is not None or tail[-2] is not None or prefetcher.ahead > 0  # it has earned it again


def test_the_file_read_least_recently_is_ejected_and_begins_anew() -> None:
    prefetcher = made(limits=Limits(files=2))
    walk(prefetcher, range(2), "a")
    walk(prefetcher, range(2), "b")
    walk(prefetcher, [2], "a")
    walk(prefetcher, [0], "c")
    assert [prefetcher.seq_counts(key) for key in "abc"] == [[3], [], [1]]
    assert prefetcher.ahead == 2 * BLOCK  # of a
    assert walk(prefetcher, range(2), "b") == [None, (2, 3)]
    assert prefetcher.seq_counts("a") == []


def test_a_file_recycles_its_own_cursors_first() -> None:
    prefetcher = made(limits=Limits(files=2, cursors=4))
    walk(prefetcher, [0, 1], "a")
    walk(prefetcher, [1000, 1001, 2000, 3000], "b")
    assert prefetcher.seq_counts("b") == [2, 1, 1]
    walk(prefetcher, [4000], "b")  # instead of the one at 2000: it was used least recently of those on trial
    assert (prefetcher.seq_counts("a"), prefetcher.seq_counts("b")) == ([2], [2, 1, 1])
    walk(prefetcher, [3001, 4001], "b")
    assert prefetcher.seq_counts("b") == [2, 2, 2]
    assert walk(prefetcher, [2], "a") == [(3, 5)]  # goes on


def test_who_has_less_than_its_part_gets_it_from_who_has_most() -> None:
    prefetcher = made(limits=Limits(files=2, cursors=4))
    walk(prefetcher, [start + n for start in range(1000, 5000, 1000) for n in range(2)], "b")
    assert prefetcher.seq_counts("b") == [2, 2, 2, 2]
    walk(prefetcher, [1000, 1001], "a")
    walk(prefetcher, [2000, 2001], "a")
    assert (prefetcher.seq_counts("a"), prefetcher.seq_counts("b")) == ([2, 2], [2, 2])
    walk(prefetcher, [3000, 3001], "a")
    assert (prefetcher.seq_counts("a"), prefetcher.seq_counts("b")) == ([2, 2], [2, 2])


def test_what_a_recycled_cursor_asked_for_is_given_up() -> None:
    prefetcher = made(limits=Limits(files=1, cursors=1))
    assert walk(prefetcher, [0, 1, 2]) == [None, (2, 3), (3, 5)]
    walk(prefetcher, [1000])
    assert prefetcher.ahead == 0
    # 3 to 5 had been asked for.
    assert walk(prefetcher, range(1, 8)) == [None, None, (5, 6), (6, 8), (8, 10), None, (10, 14)]


def test_streams_that_were_left_alone_give_way() -> None:
    prefetcher = made(limits=Limits(files=2, cursors=40))
    walk(prefetcher, [start * 1000 + n for start in range(40) for n in range(2)], "yesterday")
    walk(prefetcher, range(1000), "today")
    starts = [10**6 + stream * 1000 for stream in range(30)]
    walk(prefetcher, [start + n for n in range(5) for start in starts], "today")
    assert prefetcher.seq_counts("today").count(5) == 30


def test_one_file_more_than_1024_is_no_cliff() -> None:
    misses = replayed(generate("sequential", 1025 * 33 * SMALL, SMALL, readers=1025)).misses
    assert misses < 1025 * 3  # of 33,825: what cannot be known before the second read of each file


@pytest.mark.parametrize("one_file", [True, False])
def test_64_streams_beside_random_readers(one_file: bool) -> None:
    """Random readers that make a hundred times as many reads as there are cursors do not cost streams one read."""
    films = [[Read(at, f"film{0 if one_file else n}", (n << 24 if one_file else 0) + at * SMALL, SMALL)
              for at in range(64)] for n in range(64)]  # fmt: skip
    random = Random(1)
    noise = [[Read(n // 128, f"random{n % 4}", random.randrange(1 << 21) * SMALL, SMALL) for n in range(64 * 128)]]

    def misses(streams: list[list[Read]]) -> int:
        limits = Limits(files=128, cursors=256)
        prefetcher, memory, found = Prefetcher(HEURISTICS["cursors"], limits), set(), 0
        for read in merged(streams):
            missed = (read.file, read.offset) not in memory
            found += missed and read.file.startswith("film")
            piece = prefetcher.read(read.file, read.offset, SMALL, HUGE, missed=missed)
            if piece is not None:
                memory |= {(read.file, at) for at in range(piece.start, piece.end, SMALL)}
        return found

    assert misses([*films, *noise]) <= misses(films)


def test_windows_grow_with_seq_count() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(window=1 << 20))
    ahead = []
    for number in range(130):
        prefetcher.read("file", (1 << 30) + number * 8192, 8192, HUGE, missed=number < 3)
        ahead.append(prefetcher.ahead)
    assert ahead[:4] == [0, 0, 128 << 10, 120 << 10]  # on trial
    assert max(ahead) == 1 << 20
    assert ahead[-1] >= 1 << 19
    small = Prefetcher(HEURISTICS["cursors"], Limits(window=4096))
    assert [small.read("file", at, 8192, HUGE) for at in (0, 8192)] == [None, (16384, 20480)]


def test_streams_share_what_a_file_may_have_ahead() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(file=1 << 20))
    pieces: dict[int, list[int]] = {1: [], 2: []}
    for number in range(200):
        for stream in pieces:
            piece = prefetcher.read("file", (stream << 30) + number * 8192, 8192, HUGE, missed=number < 3)
            pieces[stream] += [piece.end - piece.start] if piece is not None else []
    assert [max(sizes) <= 1 << 19 for sizes in pieces.values()] == [True, True]
    assert all(sum(sizes) > 190 * 8192 for sizes in pieces.values())


def test_random_reads_leave_streams_their_share() -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(total=8 << 20))
    for number in range(500):
        prefetcher.read("random", number * 7_919 * BLOCK, BLOCK, HUGE)
    asks = [prefetcher.read("stream", at * BLOCK, BLOCK, HUGE, missed=at < 2) for at in range(100)]
    assert max(piece.end - piece.start for piece in asks if piece is not None) >= 1 << 20
