"""READ streams: patterns, reordering, and text."""

import pytest

from bench.prefetch.streams import LATE, Read, StreamError, generate, merged, parse, reordered, sizes, text

K = 1 << 10


def offsets(stream: list[Read]) -> list[int]:
    return [read.offset // K for read in stream]


def test_sequential() -> None:
    (stream,) = generate("sequential", 20 * K, 8 * K)
    assert [read[1:] for read in stream] == [("file-0", 0, 8 * K), ("file-0", 8 * K, 8 * K), ("file-0", 16 * K, 4 * K)]
    assert [read.time for read in stream] == sorted({read.time for read in stream})


@pytest.mark.parametrize(
    ("blocks", "parts", "order"),
    [
        (8, 2, [0, 4, 1, 5, 2, 6, 3, 7]),
        (8, 4, [0, 2, 4, 6, 1, 3, 5, 7]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (7, 2, [0, 3, 1, 4, 2, 5, 6]),
        (3, 5, [0, 1, 2]),
        (8, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_stride_takes_a_block_of_each_part_in_turn(blocks: int, parts: int, order: list[int]) -> None:
    (stream,) = generate("stride", blocks * K, K, stride=parts)
    assert offsets(stream) == order


def test_random_reads_every_block_once_by_its_seed() -> None:
    (stream,) = generate("random", 100 * K, K, seed=1)
    assert sorted(offsets(stream)) == list(range(100))
    assert offsets(stream) != list(range(100))
    assert stream == generate("random", 100 * K, K, seed=1)[0]
    assert stream != generate("random", 100 * K, K, seed=2)[0]


def test_readers_share_the_size_and_take_turns() -> None:
    stream = merged(generate("sequential", 12 * K, K, readers=3, prefix="x"))
    assert [read.file for read in stream[:4]] == ["x0", "x1", "x2", "x0"]
    assert sizes(stream) == {"x0": 4 * K, "x1": 4 * K, "x2": 4 * K}


def test_reordering_lets_a_few_be_overtaken_by_a_few() -> None:
    (stream,) = generate("sequential", 1000 * K, K)
    arrived = reordered(stream, 0.1, 7)
    order = offsets(arrived)
    assert sorted(order) == list(range(1000))
    assert [read.time for read in arrived] == [read.time for read in stream]
    overtaken = [block for at, block in enumerate(order) if any(earlier > block for earlier in order[:at])]
    assert 80 <= len(overtaken) <= 100  # one that is overtaken by one that is late itself may be in order again
    assert max(at - block for at, block in enumerate(order)) <= LATE
    assert arrived == reordered(stream, 0.1, 7)
    assert arrived != reordered(stream, 0.1, 8)


def test_reordering_keeps_to_a_file() -> None:
    stream = merged(generate("sequential", 60 * K, K, readers=3))
    arrived = reordered(stream, 0.5, 0)
    assert arrived != stream
    assert [read.file for read in arrived] == [read.file for read in stream]


@pytest.mark.parametrize("fraction", [0, 1])
def test_reordering_of_none_and_of_all(fraction: float) -> None:
    for blocks in (1, 2, 50):
        (stream,) = generate("sequential", blocks * K, K)
        assert sorted(offsets(reordered(stream, fraction, 0))) == list(range(blocks))
    assert reordered(stream, 0, 0) == stream


def test_text() -> None:
    lines = ["# recorded", "", "100.5 a/b 8192 4096\n", "  100.25 17 0 1  "]
    assert parse(lines, "x") == [Read(0.25, "a/b", 8192, 4096), Read(0, "17", 0, 1)]
    assert text(parse(lines, "x")) == "0.250000 a/b 8192 4096\n0.000000 17 0 1\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 f 0", "'1 f 0' has 3 words; expected SECONDS FILE OFFSET LENGTH"),
        ("nan f 0 1", "'nan' is not a time; expected seconds, such as 12.345678"),
        ("-1 f 0 1", "'-1' is not a time; expected seconds, such as 12.345678"),
        ("1 f -1 1", f"'-1' is not a valid offset; expected bytes, from 0 to {(1 << 63) - 2}"),
        ("1 f 0x10 1", f"'0x10' is not a valid offset; expected bytes, from 0 to {(1 << 63) - 2}"),
        (
            f"1 f {(1 << 63) - 1} 1",
            f"'{(1 << 63) - 1}' is not a valid offset; expected bytes, from 0 to {(1 << 63) - 2}",
        ),
        ("1 f 0 0", "'0' is not a valid length; expected bytes, from 1 to 16777216"),
        ("1 f 0 16777217", "'16777217' is not a valid length; expected bytes, from 1 to 16777216"),
        (
            "1 /etc/passwd 0 1",
            "'/etc/passwd' is not a file name; expected a path below the directory, without . and ..",
        ),
        ("1 a/../../b 0 1", "'a/../../b' is not a file name; expected a path below the directory, without . and .."),
        ("1 a//b 0 1", "'a//b' is not a file name; expected a path below the directory, without . and .."),
    ],
)
def test_what_is_wrong_is_told_with_its_line(line: str, said: str) -> None:
    with pytest.raises(StreamError) as caught:
        parse(["# reads", line], "reads.txt")
    assert str(caught.value) == f"reads.txt:2: {said}"


def test_an_empty_stream_is_none() -> None:
    with pytest.raises(StreamError, match=r"^x: no read in the stream; expected lines SECONDS FILE OFFSET LENGTH$"):
        parse(["# nothing"], "x")
