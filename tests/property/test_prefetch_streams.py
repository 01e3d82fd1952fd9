"""For any stream, the text form is complete, reordering loses nothing, and every block is read once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bench.prefetch.streams import LARGEST, LATE, PATTERNS, Read, generate, merged, parse, reordered, sizes, text

words = st.text(st.characters(exclude_categories=["Z", "C"], exclude_characters="/"), min_size=1, max_size=8).filter(
    lambda word: word not in (".", "..")
)
reads = st.builds(
    Read,
    st.integers(0, 10**12).map(lambda microseconds: microseconds / 10**6),
    st.lists(words, min_size=1, max_size=3).map("/".join),
    st.integers(0, (1 << 63) - 1 - LARGEST),
    st.integers(1, LARGEST),
)
streams = st.lists(reads, min_size=1, max_size=20)


@given(streams)
def test_what_is_written_is_read(stream: list[Read]) -> None:
    again = parse(text(stream).splitlines(keepends=True), "x")
    begin = min(read.time for read in stream)
    assert [read[1:] for read in again] == [read[1:] for read in stream]
    assert all(abs(a.time - (b.time - begin)) < 1e-6 for a, b in zip(again, stream, strict=True))


@given(streams, st.floats(0, 1), st.integers())
def test_reordering_loses_nothing_and_moves_little(stream: list[Read], fraction: float, seed: int) -> None:
    arrived = reordered(stream, fraction, seed)
    assert [(read.time, read.file) for read in arrived] == [(read.time, read.file) for read in stream]
    assert Counter(read[1:] for read in arrived) == Counter(read[1:] for read in stream)


@given(st.integers(1, 200), st.floats(0, 1), st.integers())
def test_none_comes_more_than_a_few_places_late(blocks: int, fraction: float, seed: int) -> None:
    (stream,) = generate("sequential", blocks, 1)
    order = [read.offset for read in reordered(stream, fraction, seed)]
    assert all(at - block <= LATE for at, block in enumerate(order))


@given(
    st.sampled_from(sorted(PATTERNS)),
    st.integers(1, 5000),
    st.integers(1, 100),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_every_byte_is_read_once(pattern: str, size: int, block: int, stride: int, readers: int) -> None:
    each = max(1, size // readers)
    stream = merged(generate(pattern, each * readers, block, stride=stride, readers=readers))
    assert sizes(stream) == {f"file-{reader}": each for reader in range(readers)}
    for file in sizes(stream):
        parts = sorted((read.offset, read.offset + read.length) for read in stream if read.file == file)
        assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
