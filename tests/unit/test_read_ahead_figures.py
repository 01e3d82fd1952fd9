"""What read-ahead asked for was of use, was in vain, or is still ahead of a reader."""

from cloakfs.filesystem.reader import Reader
from cloakfs.prefetch import Limits

SIZE = 1 << 30
BLOCK = 8192


def test_bytes_are_useful_wasted_or_ahead() -> None:
    reader = Reader("always", Limits())

    def read(offset: int) -> None:
        assert reader._prefetcher is not None
        piece = reader._prefetcher.read("file", offset, BLOCK, SIZE)
        reader.counts["requested"] += piece.end - piece.start if piece is not None else 0

    def ahead() -> int:
        return reader._prefetcher.ahead if reader._prefetcher is not None else 0

    assert reader.read_ahead() == (0, 0, 0)
    read(0)
    asked, useful, wasted = reader.read_ahead()
    assert (asked, useful, wasted) == (ahead(), 0, 0)
    assert asked > 2 * BLOCK

    read(BLOCK)
    read(2 * BLOCK)
    asked, useful, wasted = reader.read_ahead()
    assert (useful, wasted) == (2 * BLOCK, 0)
    left = ahead()

    read(SIZE // 2)  # what is left will not be read
    asked, useful, wasted = reader.read_ahead()
    assert (useful, wasted) == (2 * BLOCK, left)
    assert asked == useful + wasted + ahead()

    # A reload forgets all streams, and no counter falls.
    reader.use("cursors", Limits())
    assert reader.read_ahead() == (asked, useful, asked - useful)
    reader.use("off", Limits())
    assert reader.read_ahead() == (asked, useful, asked - useful)


def test_what_was_given_up_may_be_read_after_all() -> None:
    reader = Reader("always", Limits())
    assert reader._prefetcher is not None
    piece = reader._prefetcher.read("file", 0, BLOCK, SIZE)
    assert piece is not None
    reader.counts["requested"] += piece.end - piece.start
    other = reader._prefetcher.read("file", SIZE // 2, BLOCK, SIZE)
    assert other is not None
    reader.counts["requested"] += other.end - other.start
    _, _, wasted = reader.read_ahead()
    assert wasted == piece.end - piece.start
    reader._prefetcher.read("file", BLOCK, BLOCK, SIZE, missed=False)
    _, useful, still = reader.read_ahead()
    assert useful == BLOCK
    assert still >= wasted
