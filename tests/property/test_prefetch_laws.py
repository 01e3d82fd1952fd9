"""What reading ahead must never do, whatever is read, and what it does for readers that are mostly sequential."""

from collections import defaultdict
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloakfs.prefetch import HEURISTICS, LEAST, MOST, NEAR_BYTES, Limits, Prefetcher, ReadAhead

TRIAL = 512 << 10
BLOCK = 4 << 10
MIB = 1 << 20
SPACING = 4 * MIB
"""From one reader's first byte to the next one's: more than all that one of them reads, and the window."""

names = st.sampled_from(sorted(HEURISTICS))
seeds = st.integers(0, 1 << 32)


# -- arbitrary reads, in whole blocks ---------------------------------------------------------------------


class Books:
    """A prefetcher, and who keeps an eye on it: what was asked for and not read since, and which files it knows."""

    def __init__(self, heuristic: str, limits: Limits) -> None:
        self.prefetcher = Prefetcher(HEURISTICS[heuristic], limits)
        self.limits = limits
        self.unread: defaultdict[str, set[int]] = defaultdict(set)
        self.known: list[str] = []  # the one read last is the last
        self.loyal = HEURISTICS[heuristic].loyal  # otherwise the one read least recently is forgotten
        self.memory: defaultdict[str, set[int]] = defaultdict(set)
        self.evicted: set[str] = set()

    def evict(self) -> None:
        """Nothing is in memory any more. What was asked for may be asked for again, and what comes with it, too."""
        self.evicted |= {key for key, blocks in self.unread.items() if blocks}
        self.memory.clear()
        self.unread.clear()

    def read(self, key: str, first: int, end: int, size: int) -> None:
        missed = not self.memory[key].issuperset(range(first, end))
        self.memory[key] |= {*range(first, end)}
        piece = self.prefetcher.read(key, first * BLOCK, (end - first) * BLOCK, size * BLOCK, missed=missed)
        self.known = [*(other for other in self.known if other != key), key]
        kept = {name for name, _ in self.prefetcher._files.items()}
        lost = [name for name in self.known if name not in kept] if self.loyal else self.known[: -self.limits.files]
        assert len(lost) <= 1
        assert key not in lost
        for ejected in lost:
            self.lose(ejected)
        self.unread[key] -= {*range(first, end)}
        if piece is not None:
            assert piece.start % BLOCK == piece.end % BLOCK == 0
            assert 0 < piece.end - piece.start <= self.limits.window
            assert piece.end <= size * BLOCK
            assert self.prefetcher.ahead >= piece.end - piece.start
            blocks = {*range(piece.start // BLOCK, piece.end // BLOCK)}
            assert key in self.evicted or not blocks & self.unread[key], "asked for before"
            self.unread[key] |= blocks
            self.memory[key] |= blocks
        self.check()

    def lose(self, key: str) -> None:
        self.known.remove(key)
        self.unread[key].clear()

    def check(self) -> None:
        files, pool = dict(self.prefetcher._files.items()), self.prefetcher._pool
        assert len(files) <= self.limits.files
        assert set(files) == set(self.known) if self.loyal else list(files) == self.known
        assert sum(len(file.cursors) for file in files.values()) == len(pool)
        assert len(pool) <= max(self.limits.cursors, self.limits.files)
        for key, file in files.items():
            assert pool.of(file) == {*file.cursors} != set()  # nobody is without one
            assert all(cursor.file is file for cursor in file.cursors)
            assert file.going_on == sum(cursor in self.prefetcher._going_on for cursor in file.cursors)
            assert [cursor.expected for cursor in file.cursors] == sorted(cursor.expected for cursor in file.cursors)
            assert file.ahead == sum(cursor.requested - cursor.furthest for cursor in file.cursors) <= self.limits.file
            assert file.trial == sum(cursor.requested - cursor.furthest for cursor in file.cursors if not cursor.proof)
            assert all(0 <= count <= MOST for count in self.prefetcher.seq_counts(key))
        assert self.prefetcher.ahead == sum(file.ahead for file in files.values()) <= self.limits.total
        assert 0 <= self.prefetcher._trust <= self.prefetcher._most_trust

    def remembers_all(self) -> bool:
        """Has nothing been dropped yet of what was given up?"""
        return all(len(f.given_up) < (f.given_up.maxlen or 0) for _, f in self.prefetcher._files.items())


def some_blocks(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most).map(BLOCK.__mul__)


tight = st.builds(
    Limits,
    window=some_blocks(64),
    file=some_blocks(100),
    total=some_blocks(150),
    files=st.integers(1, 3),
    cursors=st.integers(1, 6),
)
steps = st.tuples(
    st.sampled_from("aaabbc"),
    st.sampled_from(["on", "near", "back to", "far"]),
    st.integers(0, 1000),
    st.integers(1, 8),  # reads one after the other
    st.integers(1, 4),  # blocks of each
    st.booleans(),
)


@given(names, tight | st.just(Limits()), st.sampled_from([1, 3, 40, 300, 5000]), st.lists(steps, max_size=40))
def test_whatever_is_read(
    heuristic: str, limits: Limits, size: int, stream: list[tuple[str, str, int, int, int, bool]]
) -> None:
    books = Books(heuristic, limits)
    ends: defaultdict[str, list[int]] = defaultdict(lambda: [0])
    for key, kind, value, times, length, evicted in stream:
        if evicted:
            books.evict()
        at = {
            "on": ends[key][-1],
            "near": ends[key][-1] + value % 33 - 16,
            "back to": ends[key][value % len(ends[key])],
            "far": value * 7,
        }[kind]
        at = max(0, min(at, size - 1))
        for _ in range(times):
            end = min(at + length, size)
            if at < end and books.remembers_all():
                books.read(key, at, end, size)
                at = end
        ends[key].append(at)


@given(names, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 18), st.integers(0, 1 << 21))))
def test_any_byte_of_files_that_change(heuristic: str, reads: list[tuple[int, int, int]]) -> None:
    prefetcher = Prefetcher(HEURISTICS[heuristic])
    for offset, length, size in reads:
        piece = prefetcher.read("file", offset, length, size)
        assert piece is None or offset + length <= piece.start < piece.end <= size
        assert all(0 <= count <= MOST for count in prefetcher.seq_counts("file"))


@given(names, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4))))
def test_what_is_in_memory_is_left_to_itself(heuristic: str, reads: list[tuple[int, int]]) -> None:
    prefetcher = Prefetcher(HEURISTICS[heuristic])
    for first, length in reads:
        assert prefetcher.read("file", first * BLOCK, length * BLOCK, 1 << 40, missed=False) is None


distances = st.sampled_from([0, 0, 0, 1, -1, 65536, -65536, 65537, -65537, 1 << 30])


@given(
    st.sampled_from(["default", "slowdown"]),
    st.lists(st.tuples(st.integers(1, 150), distances, st.integers(1, 1 << 17)), max_size=8),
)
def test_scores_follow_the_rules(heuristic: str, runs: list[tuple[int, int, int]]) -> None:
    """The rules in other words, for files that have one cursor."""
    prefetcher = Prefetcher(HEURISTICS[heuristic])
    prefetcher.read("file", 0, BLOCK, 1 << 40)
    expected, score = BLOCK, 1
    for times, distance, length in runs:
        for _ in range(times):
            offset = max(0, expected + distance)
            prefetcher.read("file", offset, length, 1 << 40)
            if offset == expected:
                score = min(score + 1, 127)
            elif heuristic == "default":
                score = 1
            elif not expected - 65536 <= offset <= expected + 65536:
                score = score // 2
            expected = offset + length
            assert prefetcher.seq_counts("file") == [score]


# -- sequential readers -------------------------------------------------------------------------------------


@given(names, st.integers(1, 64), st.integers(0, 4 * MIB), st.integers(2, 64), st.integers(1, 3))
def test_a_sequential_reader_finds_all_but_the_first_reads_in_memory(
    heuristic: str, blocks: int, size: int, windows: int, files: int
) -> None:
    length = max(blocks, size // BLOCK // 300) * BLOCK
    limits = Limits(window=windows * length, file=windows * length, total=3 * windows * length)
    prefetcher = Prefetcher(HEURISTICS[heuristic], limits)
    alone = length if heuristic == "always" else 2 * length  # what has to be waited for
    asked = [min(alone, size)] * files
    for number, offset in enumerate(range(0, size, length), 1):
        end = min(offset + length, size)
        for key in range(files):
            piece = prefetcher.read(key, offset, end - offset, size, missed=offset < alone)
            if piece is not None:
                assert piece.start == asked[key]  # one piece after the other
                assert 0 < piece.end - piece.start <= limits.window
                asked[key] = piece.end
            if heuristic != "always":
                assert prefetcher.seq_counts(key) == [min(number, MOST)]
            assert asked[key] - end <= max(limits.window, alone - end)
            assert asked[key] >= min(end + length, size) or number < LEAST
    assert asked == [size] * files
    assert prefetcher.ahead == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60), st.integers(1, 40))
def test_trust_is_lost_but_never_beyond_what_was_earned(files: list[tuple[bool, int]], total: int) -> None:
    """Of some files only the beginning is read, of others everything."""
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(total=total * MIB))
    lost = used = 0
    for key, (whole, blocks) in enumerate(files):
        size = blocks * MIB // 2
        memory = 8 * BLOCK  # the kernel reads so much at the beginning by itself
        asked = 0
        for offset in range(0, size if whole else 4 * BLOCK, 2 * BLOCK):
            piece = prefetcher.read(key, offset, 2 * BLOCK, size, missed=offset == 0 or offset >= memory)
            if piece is not None:
                asked += piece.end - piece.start
                memory = piece.end
        if whole:
            used += asked
        else:
            lost += asked
        assert lost <= total * MIB // 2 + used // 16


class Reader:
    """Reads every block of a part of a file, out of order by no more than 64 KiB."""

    def __init__(self, random: Random, start: int, length: int, reads: int, disorder: bool) -> None:
        # Of so many blocks in any order, and of as many after them, one is not too far from the next.
        together = NEAR_BYTES // length // 2 + 1 if disorder else 1
        self.length = length
        self.offsets: list[int] = []
        for first in range(0, reads, together):
            piece = [start + block * length for block in range(first, min(first + together, reads))]
            random.shuffle(piece)
            self.offsets += piece


def ask_of(prefetcher: Prefetcher, reader: Reader, offset: int, memory: set[int]) -> ReadAhead | None:
    """A read; in memory is what was asked for."""
    missed = not memory.issuperset(range(offset // BLOCK, (offset + reader.length) // BLOCK))
    piece = prefetcher.read("file", offset, reader.length, 1 << 40, missed=missed)
    if piece is not None:
        memory |= {*range(piece.start // BLOCK, piece.end // BLOCK)}
    return piece


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[list[Reader], list[int]]:
    """Readers of one file, and whose turn it is."""
    random = Random(draw(seeds))
    disorder = draw(st.booleans())
    readers = [
        Reader(random, start * SPACING, draw(st.sampled_from([4, 8, 16, 32])) << 10, draw(st.integers(1, 60)), disorder)
        for start in random.sample(range(50), draw(st.integers(1, 4)))  # so many may be on trial
    ]
    turns = [which for which, reader in enumerate(readers) for _ in reader.offsets]
    if draw(st.booleans()):
        random.shuffle(turns)
    return readers, turns


@given(interleaved())
def test_each_of_many_readers_is_treated_as_if_it_were_alone(case: tuple[list[Reader], list[int]]) -> None:
    readers, turns = case
    limits = Limits(window=MIB)
    together = Prefetcher(HEURISTICS["cursors"], limits)
    alone = [Prefetcher(HEURISTICS["cursors"], limits) for _ in readers]
    memory: set[int] = set()
    memories: list[set[int]] = [set() for _ in readers]
    asked: list[ReadAhead] = []
    todo = [iter(reader.offsets) for reader in readers]
    met: set[int] = set()
    for which in turns:
        reader, offset = readers[which], next(todo[which])
        met.add(which)
        before = alone[which].seq_counts("file")
        piece = ask_of(alone[which], reader, offset, memories[which])
        assert alone[which].seq_counts("file") >= before  # its score never falls
        assert ask_of(together, reader, offset, memory) == piece
        in_order = sorted(met, key=lambda one: readers[one].offsets[0])
        assert together.seq_counts("file") == [count for one in in_order for count in alone[one].seq_counts("file")]
        asked += [piece] if piece is not None else []
    assert len(together.seq_counts("file")) == len(readers)
    asked.sort()
    assert all(one.end <= other.start for one, other in pairwise(asked)), "asked for twice"


@given(interleaved(), st.sampled_from(["cursors", "slowdown"]))
def test_disorder_costs_no_score(case: tuple[list[Reader], list[int]], heuristic: str) -> None:
    reader = case[0][0]
    tolerant, strict = Prefetcher(HEURISTICS[heuristic]), Prefetcher(HEURISTICS["default"])
    score = 0
    expected = reader.offsets[0]
    for offset in reader.offsets:
        ask_of(tolerant, reader, offset, set())
        ask_of(strict, reader, offset, set())
        score += offset == expected
        assert tolerant.seq_counts("file") == [score]
        if offset != expected:
            assert strict.seq_counts("file") == [1]
        expected = offset + reader.length


@given(interleaved())
def test_readers_that_come_to_where_others_were(case: tuple[list[Reader], list[int]]) -> None:
    """As close together as they may be: nothing is asked for twice that was not read in between."""
    readers, turns = case
    books = Books("cursors", Limits(window=MIB))
    todo = [iter(reader.offsets) for reader in readers]
    for which in turns:
        block = next(todo[which]) // BLOCK
        block = block % (SPACING // BLOCK) + block // (SPACING // BLOCK) * 40
        end = block + readers[which].length // BLOCK
        books.read("file", block, end, 4000)
        assert books.remembers_all()


# -- fairness ------------------------------------------------------------------------------------------------

FILES, POOL = 6, 30  # five cursors are a file's equal part


@given(st.integers(1, POOL // FILES), st.lists(st.tuples(st.integers(1, FILES - 1), st.integers(0, 400)), max_size=400))
def test_no_other_file_takes_streams_that_are_a_file_s_part(streams: int, reads: list[tuple[int, int]]) -> None:
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(files=FILES, cursors=POOL))
    for stream in range(streams):
        for at in range(2):
            prefetcher.read("film", stream * SPACING + at * BLOCK, BLOCK, 1 << 40)
    for number, (file, place) in enumerate(reads):
        prefetcher.read(file, place * SPACING, BLOCK, 1 << 40)
        if number % 100 == 0:
            prefetcher.read("film", 0, 1, 1 << 40)  # near enough, to remain among the files that are remembered
    assert len(prefetcher.seq_counts("film")) == streams
    assert all(count >= LEAST for count in prefetcher.seq_counts("film"))


@given(st.lists(st.tuples(st.integers(0, FILES - 1), st.integers(0, 50), st.integers(1, 3)), max_size=300))
def test_whoever_wants_its_part_gets_it(reads: list[tuple[int, int, int]]) -> None:
    """Whatever others have read, as many streams as are a file's part, one after the other, are all followed."""
    prefetcher = Prefetcher(HEURISTICS["cursors"], Limits(files=FILES, cursors=POOL))
    for file, place, times in reads:
        for at in range(times):
            prefetcher.read(file, place * SPACING + at * BLOCK, BLOCK, 1 << 40)
    for stream in range(POOL // FILES):
        for at in range(2):
            prefetcher.read("film", stream * SPACING + at * BLOCK, BLOCK, 1 << 40)
    assert prefetcher.seq_counts("film") == [2] * (POOL // FILES)


# -- random readers -----------------------------------------------------------------------------------------


def extra(heuristic: str, seed: int, size: int, length: int, reads: int) -> float:
    """Bytes asked for relative to bytes read, when blocks are read at random and none of them is in memory."""
    random, prefetcher = Random(seed), Prefetcher(HEURISTICS[heuristic])
    asked = 0
    for _ in range(reads):
        piece = prefetcher.read("file", random.randrange(size // length) * length, length, size)
        asked += piece.end - piece.start if piece is not None else 0
    return asked / (reads * length)


@pytest.mark.parametrize("heuristic", ["cursors", "slowdown", "default"])
@pytest.mark.parametrize("length", [4 << 10, 8 << 10, 64 << 10])
def test_a_random_reader_costs_next_to_nothing(heuristic: str, length: int) -> None:
    assert extra(heuristic, 7, 16 << 30, length, 20_000) < 0.02


@given(
    st.sampled_from(["cursors", "slowdown", "default"]),
    seeds,
    st.integers(4 << 30, 1 << 40),
    st.sampled_from([4 << 10, 8 << 10, 16 << 10, 64 << 10, 128 << 10]),
)
def test_no_random_reader_costs_more_than_a_twentieth(heuristic: str, seed: int, size: int, length: int) -> None:
    # Beside what any file may have on trial.
    assert extra(heuristic, seed, size, length, 1000) <= 0.05 + TRIAL / (1000 * length)


def test_always_is_the_one_that_does() -> None:
    assert extra("always", 7, 16 << 30, 8 << 10, 100) > 10
