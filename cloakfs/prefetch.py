"""Decides what to read ahead of a file's readers: heuristics that survive reordered requests and strides [ES §6, §7].

The measure is seqCount, from 0 to 127: how sequential reading looks. Read-ahead grows with it, and there is none below
2. A heuristic is a small class that decides how each read changes seqCount, and whether a file has one seqCount or
many: *cursors*, each of which follows one of several interleaved streams.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

from .streams import CursorPool, FileTable

NEAR_BYTES = 64 << 10
"""A read no farther than this from the expected offset may belong to a sequential stream, but be out of order."""

MOST = 127
"""The highest seqCount."""

LEAST = 2
"""Below this seqCount nothing is read ahead."""

# The bytes ahead of unproven streams, plus twice the bytes that were read ahead in vain, may exceed the bytes that were
# worth reading ahead by this much: random reads look sequential by accident, and should cost next to nothing.
_TRIAL = 512 << 10

_PAGE = 4096

# The window ahead of an unproven stream.
_TRIAL_WINDOW = 128 << 10

# Two reads in a row may be an accident, unless they are the first of a file.
_LEAST_ELSEWHERE = LEAST + 1

# Bytes requested on trust restore that much trust when they are read. Of all other bytes that were worth reading ahead,
# one in this many adds to the trust.
_EARNING = 16

# For each this many bytes read, one byte that was read ahead in vain is forgiven.
_FORGIVING = 64

# Data on its way is waited for once, or by some reads at the same time. If this many reads in a row have to wait, the
# data is gone.
_PATIENCE = 4

# All cursors are examined again only after this many reads.
_CHECK_EVERY = 64

# How many ranges that were requested, and that their reader has abandoned, are noted per file.
_GIVEN_UP = 32


class ReadAhead(NamedTuple):
    """The range to read ahead: bytes `start` to `end`, the latter not included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be read ahead, and of how many files and streams there are notes.

    Attributes:
        window: the maximum of bytes ahead of one cursor.
        file: the maximum of bytes requested and not read yet, for one file.
        total: the same for all files together.
        files: of how many files there are notes; if there are more, `FileTable` chooses which are dropped.
        cursors: how many streams are followed, which all files share fairly; at least as many as files.
    """

    window: int = 2 << 20
    file: int = 16 << 20
    total: int = 128 << 20
    files: int = 4096
    cursors: int = 4096


class Heuristic(Protocol):
    """Decides how seqCount changes.

    Attributes:
        first: the seqCount that a file, or a cursor, begins with.
        many: whether a read too far from the expected offset begins another cursor.
        frugal: whether read-ahead stops where it has not been worth it, or would not be.
        trusting: whether a reader of the beginning of a file is expected to read all of it, as long as most do.
        loyal: whether files that are being read are kept when a full table meets one that comes back.
    """

    first: int
    many: bool
    frugal: bool
    trusting: bool
    loyal: bool

    def count(self, seq_count: int, distance: int) -> int:
        """Return the seqCount after a read at `distance` bytes from the expected offset; negative means before it."""


class Default:
    """What NFS servers did: reads that come out of order look random [ES §6.2]."""

    first = 1
    many = False
    frugal = True
    trusting = False
    loyal = False

    def count(self, seq_count: int, distance: int) -> int:
        """Return one more if the read begins where the last one ended, otherwise 1."""
        return min(seq_count + 1, MOST) if distance == 0 else 1


class SlowDown:
    """Rises as the default does, and falls slowly [ES §6.2]."""

    first = 1
    many = False
    frugal = True
    trusting = True
    loyal = True

    def count(self, seq_count: int, distance: int) -> int:
        """Return one more in sequence, the same value if the read is near, and otherwise half of it."""
        if distance == 0:
            return min(seq_count + 1, MOST)
        return seq_count if abs(distance) <= NEAR_BYTES else seq_count // 2


class Cursors(SlowDown):
    """SlowDown for each of many streams in one file [ES §7]."""

    many = True


class Always:
    """Treats all reads as sequential [ES §6.1], to show the most that can be gained, and lost."""

    first = MOST
    many = False
    frugal = False
    trusting = False
    loyal = False

    def count(self, seq_count: int, distance: int) -> int:
        """Return the highest seqCount."""
        return MOST


HEURISTICS: dict[str, Heuristic] = {
    "cursors": Cursors(),
    "slowdown": SlowDown(),
    "default": Default(),
    "always": Always(),
}
"""The heuristics by their names in exports.d."""


class Cursor:
    """One stream of reads.

    Attributes:
        used: when it was last read, by the count of all reads.
        proof: bytes that were requested and then read, or requested on trust; while it is 0, a request is a trial.
        waits: how many reads in a row had to wait for data that was requested.
        expected: the offset where the next read should begin, which is where the last one ended.
        furthest: the end of the furthest read of this stream.
        requested: everything ahead was requested up to this offset; not before `furthest`.
        cold: reads of this stream have to wait for their data.
        begins: its first read was at the beginning of the file, or near it.
        trusted: it may, once, request as much as if it had proven to be a stream.
        debt: bytes that it requested on trust and that were not read yet.
    """

    __slots__ = (
        "begins", "cold", "debt", "expected", "file", "furthest", "proof", "requested", "seq_count", "trusted", "used",
        "waits",
    )  # fmt: skip

    def __init__(self, file: "_File", seq_count: int, end: int) -> None:
        self.file = file
        self.seq_count = seq_count
        self.expected = self.furthest = self.requested = end
        self.cold = self.begins = self.trusted = False
        self.used = self.waits = self.proof = self.debt = 0


class _File:
    """An active file: its cursors in the order of their expected offsets."""

    __slots__ = ("ahead", "cursors", "given_up", "going_on", "trial", "used", "waste", "worth")

    def __init__(self) -> None:
        self.cursors: list[Cursor] = []
        self.used = 0  # when it was last read, by the count of all reads
        self.going_on = 0  # how many of the cursors have proven to be streams, and are being read
        self.ahead = 0  # bytes requested and not read yet
        self.trial = 0  # the part of `ahead` that belongs to unproven streams
        self.worth = 0  # bytes requested that were then read, as far as they count
        self.waste = 0  # bytes requested that are not expected to be read any more
        self.given_up: deque[ReadAhead] = deque(maxlen=_GIVEN_UP)


def _expected(cursor: Cursor) -> int:
    return cursor.expected


class Prefetcher:
    """Decides what to read ahead, file by file; does no I/O.

    Args:
        heuristic: decides how seqCount changes.
        limits: how much may be read ahead.
    """

    def __init__(self, heuristic: Heuristic, limits: Limits | None = None) -> None:
        self.heuristic = heuristic
        self.limits = limits or Limits()
        self.ahead = 0
        """Bytes requested and not read yet, for all files together."""
        self.useful = 0
        """Bytes requested that were then read, for all files together."""
        self._trust = self._most_trust = self.limits.total // 2  # bytes that may be requested on trust
        self._reads = 0
        self._next_check = 0  # the read at which idle cursors are searched for again
        self._files: FileTable[_File] = FileTable(self.limits.files)
        self._pool: CursorPool[Cursor] = CursorPool(max(self.limits.cursors, self.limits.files))
        self._going_on: OrderedDict[Cursor, None] = OrderedDict()  # the most recently read is the last

    def read(self, key: Hashable, offset: int, length: int, size: int, *, missed: bool = True) -> ReadAhead | None:
        """Note a read, and return what to read ahead now, if anything.

        Nothing is read ahead while reads find data in memory that was not read ahead here, because then something else
        brings it there.

        Args:
            key: identifies the file.
            offset: where the read began.
            length: how many bytes it got, at least 1.
            size: the size of the file in bytes; nothing is read ahead past its end.
            missed: whether the read had to wait for its data.
        """
        self._reads += 1
        file = self._file(key)
        end = offset + length
        file.waste = max(0, file.waste - length // _FORGIVING)
        cursor = self._cursor(file, offset)
        if cursor is None:
            cursor = self._new_cursor(file, end)
            cursor.cold = missed
            cursor.begins = offset <= NEAR_BYTES  # the first read may have come out of order
            cursor.trusted = cursor.begins and missed and self.heuristic.trusting
        else:
            self._move(cursor, offset, end, missed)
        cursor.used = self._reads
        self._pool.use(file, cursor, is_stream=cursor.seq_count >= LEAST)
        if file.given_up:
            self._pay(file, self._take_back(file, cursor, offset, end, missed=missed))
        if len(file.cursors) > 1:
            self._take_over(file, cursor, offset, end, missed=missed)
        least = LEAST if cursor.begins or cursor.proof else _LEAST_ELSEWHERE
        piece = self._next_piece(cursor, length, size) if cursor.cold and cursor.seq_count >= least else None
        if cursor.proof:
            self._note_going_on(cursor)
        return piece

    def seq_counts(self, key: Hashable) -> list[int]:
        """Return the seqCounts of the file's cursors, in the order of their offsets."""
        file = self._files.peek(key)
        return [cursor.seq_count for cursor in file.cursors] if file is not None else []

    # -- files and cursors -------------------------------------------------------------------------

    def _file(self, key: Hashable) -> _File:
        file = self._files.use(key)
        if file is None:
            file = _File()
            before = self._reads - self._idle_after()
            old = self._files.add(key, file, lambda other: self.heuristic.loyal and other.used > before)
            if old is not None:
                self._drop(old)
        file.used = self._reads
        return file

    def _drop(self, file: _File) -> None:
        self.ahead -= file.ahead
        self._pool.drop(file)
        for cursor in file.cursors:
            self._drop_going_on(cursor)

    def _cursor(self, file: _File, offset: int) -> Cursor | None:
        """Return the cursor whose expected offset is nearest, if it is near enough or the only one allowed."""
        cursors = file.cursors
        if not cursors:
            return None
        if not self.heuristic.many:
            return cursors[0]
        at = bisect_left(cursors, offset, key=_expected)
        nearest = min(cursors[max(at - 1, 0) : at + 1], key=lambda cursor: abs(cursor.expected - offset))
        return nearest if abs(nearest.expected - offset) <= NEAR_BYTES else None

    def _new_cursor(self, file: _File, end: int) -> Cursor:
        before = self._reads - self._idle_after()
        old = self._pool.make_room(file, lambda stream: stream.used < before)
        if old is not None:
            self._give_up(old, old.requested)
            self._drop_going_on(old)
            old.file.cursors.remove(old)
        cursor = Cursor(file, self.heuristic.first, end)
        insort(file.cursors, cursor, key=_expected)
        return cursor

    def _move(self, cursor: Cursor, offset: int, end: int, missed: bool) -> None:
        cursor.waits = cursor.waits + 1 if missed and cursor.furthest <= offset and end <= cursor.requested else 0
        if cursor.waits == _PATIENCE:
            self._spend(cursor, cursor.requested - cursor.furthest)
            cursor.requested = cursor.furthest
        distance = offset - cursor.expected
        cursor.seq_count = self.heuristic.count(cursor.seq_count, distance)
        # A reader that goes backwards in small steps gets as far away as by one jump.
        same = abs(distance) <= NEAR_BYTES and cursor.furthest - end <= NEAR_BYTES
        cursor.trusted = cursor.trusted and same and self._trust >= _TRIAL_WINDOW
        # The kernel itself reads ahead at the beginning of a file, which does not mean that all of it is in memory.
        cursor.cold = missed or (same and cursor.cold and (end <= cursor.requested or cursor.trusted))
        if not same:
            self._give_up(cursor, cursor.requested)
            cursor.furthest = cursor.requested = end
        elif end > cursor.furthest:
            self._give_up(cursor, min(offset, cursor.requested))  # this part was skipped; it may still be read
            read = min(end, cursor.requested) - cursor.furthest
            self._spend(cursor, read)
            self._pay(cursor.file, read)
            self._pay_back(cursor, read)
            cursor.furthest = end
            cursor.requested = max(cursor.requested, end)
            self._prove(cursor, read)
        cursor.expected = end
        cursors = cursor.file.cursors
        if len(cursors) > 1:
            cursors.sort(key=_expected)  # at most one is out of place

    # -- reading ahead -----------------------------------------------------------------------------

    def _next_piece(self, cursor: Cursor, length: int, size: int) -> ReadAhead | None:
        file, start = cursor.file, cursor.requested
        window = self._window(cursor, length)
        if start - cursor.furthest > window // 2:
            return None  # fewer, larger requests cost less
        if not self._is_worth_it(file):
            self._give_up_idle()
            return None
        window = min(window, self._share(cursor))
        if start - cursor.furthest > window // 2:
            return None
        end = min(cursor.furthest + window, size)
        if self._room(file) < end - start:
            self._give_up_idle()
        room = self._room(file)
        if 2 * room < end - start:
            return None
        piece = self._unrequested(cursor, start, min(end, start + room))
        if piece is None or (piece.end < min(end, start + room) and self._can_wait(cursor, piece)):
            return None
        if cursor.trusted:
            self._borrow(cursor, piece.end - piece.start)
        self._extend(cursor, piece.end)
        return piece

    def _window(self, cursor: Cursor, length: int) -> int:
        """Return how much should be ahead of a stream: 2 MiB after 17 reads of 8 KiB in order, or five of 128 KiB.

        On trial, it gets as much as the kernel reads ahead by itself: on a disk that seeks, less costs the same.
        """
        if cursor.trusted:
            return min(self._trust // _PAGE * _PAGE, self.limits.window)
        trial = 0 if cursor.proof else _TRIAL_WINDOW
        return min(max((cursor.seq_count - 1) ** 2 * length, trial), self.limits.window)

    @staticmethod
    def _can_wait(cursor: Cursor, piece: ReadAhead) -> bool:
        """Whether this is a small, distant gap before what another stream has requested. It may grow, or be filled."""
        return piece.end - piece.start < _TRIAL_WINDOW < piece.start - cursor.furthest

    def _share(self, cursor: Cursor) -> int:
        """Return how much a stream may have ahead so that there is room for all active streams."""
        before = self._reads - self._idle_after()
        while self._going_on and (oldest := next(iter(self._going_on))).used < before:
            self._drop_going_on(oldest)
        more = cursor not in self._going_on
        here, everywhere = cursor.file.going_on + more, len(self._going_on) + more
        return min(self.limits.file // here, self.limits.total // everywhere) // _PAGE * _PAGE

    def _note_going_on(self, cursor: Cursor) -> None:
        """Note that this stream has just been read, and is expected to go on."""
        if cursor not in self._going_on:
            cursor.file.going_on += 1
        self._going_on[cursor] = None
        self._going_on.move_to_end(cursor)

    def _drop_going_on(self, cursor: Cursor) -> None:
        if cursor in self._going_on:
            cursor.file.going_on -= 1
            del self._going_on[cursor]

    def _is_worth_it(self, file: _File) -> bool:
        return not self.heuristic.frugal or file.trial + 2 * file.waste <= _TRIAL + file.worth

    def _room(self, file: _File) -> int:
        """Return how many more bytes may be ahead."""
        return min(self.limits.file - file.ahead, self.limits.total - self.ahead)

    def _take_over(self, file: _File, cursor: Cursor, offset: int, end: int, *, missed: bool) -> None:
        """Let a stream that reaches what another one has requested take this over, if it is (still) in memory."""
        at = bisect_left(file.cursors, cursor.expected, key=_expected)
        other = file.cursors[max(at - 1, 0)]
        if other is cursor or not other.furthest <= offset < other.requested or end < cursor.furthest:
            return
        self._spend(other, other.requested - offset)
        other.requested, requested = offset, other.requested
        if not missed or end > requested:
            self._extend(cursor, requested)

    def _extend(self, cursor: Cursor, end: int) -> None:
        """Note that everything ahead of this stream was requested, up to `end`."""
        if end > cursor.requested:
            self._spend(cursor, cursor.requested - end)
            cursor.requested = end

    def _unrequested(self, cursor: Cursor, start: int, end: int) -> ReadAhead | None:
        """Return the part of the range before the first byte that was already requested."""
        file = cursor.file
        requested = [(other.furthest, other.requested) for other in file.cursors if other is not cursor]
        for low, high in [*requested, *file.given_up]:
            if low < end and start < high:
                end = low
        return ReadAhead(start, end) if start < end else None

    def _spend(self, cursor: Cursor, amount: int) -> None:
        """Note that `amount` fewer bytes are ahead of this stream."""
        cursor.file.ahead -= amount
        self.ahead -= amount
        if not cursor.proof:
            cursor.file.trial -= amount

    @staticmethod
    def _prove(cursor: Cursor, amount: int) -> None:
        """Count `amount` bytes as proof of this stream; what is ahead of it is then no longer a trial."""
        if amount and not cursor.proof:
            cursor.file.trial -= cursor.requested - cursor.furthest
        cursor.proof += amount

    def _pay(self, file: _File, amount: int) -> None:
        """Note that `amount` bytes were read that had been requested."""
        self.useful += amount
        file.worth = min(file.worth + amount, self.limits.file)
        self._trust = min(self._trust + amount // _EARNING, self._most_trust)

    def _borrow(self, cursor: Cursor, amount: int) -> None:
        """Note that this stream requests `amount` bytes on trust."""
        cursor.trusted = False
        cursor.debt = amount
        self._trust -= amount
        self._prove(cursor, amount)

    def _pay_back(self, cursor: Cursor, amount: int) -> None:
        """Note that up to `amount` of the bytes requested on trust were read."""
        back = min(amount, cursor.debt)
        cursor.debt -= back
        self._trust = min(self._trust + back, self._most_trust)

    def _idle_after(self) -> int:
        """Return after how many reads of all files a stream is idle; an active one is read several times meanwhile."""
        return 8 * len(self._pool) + 64

    def _give_up_idle(self) -> None:
        """Give up what idle streams have requested, so that it does not keep others from reading ahead."""
        if self._reads < self._next_check:
            return
        self._next_check = self._reads + _CHECK_EVERY
        before = self._reads - self._idle_after()
        for cursor in takewhile(lambda cursor: cursor.used < before, self._pool):
            self._give_up(cursor, cursor.requested)

    def _give_up(self, cursor: Cursor, end: int) -> None:
        """Note that what this stream has requested, up to `end`, is not expected to be read."""
        if end > cursor.furthest:
            amount = end - cursor.furthest
            on_trust = min(amount, cursor.debt)  # other streams of the file must not suffer for this part
            cursor.debt -= on_trust
            self._spend(cursor, amount)
            cursor.file.given_up.append(ReadAhead(cursor.furthest, end))
            cursor.file.waste += amount - on_trust
            cursor.furthest = end

    def _take_back(self, file: _File, cursor: Cursor, start: int, end: int, *, missed: bool) -> int:
        """Take back what was given up and is read after all: this stream takes it over, unless the data is gone.

        Returns:
            how many of the bytes read had been given up.
        """
        kept = []
        back = 0
        for old in file.given_up:
            read = min(old.end, end) - max(old.start, start)
            if read <= 0:
                kept.append(old)
                continue
            back += read
            if missed and read == end - start:
                continue  # the read missed, and all of it had been requested, so the data is gone
            if old.start < start:
                kept.append(ReadAhead(old.start, start))
            if old.end > end and cursor.furthest == end:
                self._extend(cursor, old.end)
            elif old.end > end:
                kept.append(ReadAhead(end, old.end))
        file.given_up = deque(kept, maxlen=_GIVEN_UP)
        file.waste = max(0, file.waste - back)
        return back
