"""READ streams, which say what is read when: generated, reordered as NFS clients do it, and as text.

One line for each read, in the order of arrival: `SECONDS FILE OFFSET LENGTH`. Lines that begin with `#` are comments.
"""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

INTERVAL = 0.0001
"""Seconds between two reads of a generated stream."""

LATE = 3
"""The most places by which a request is overtaken: as many as requests that other nfsiods hold."""

LARGEST = 1 << 24
"""Bytes of one read; NFS and FUSE stay below."""

_LAST = (1 << 63) - 1

_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
_NUMBER = re.compile(r"[0-9]{1,19}")


class Read(NamedTuple):
    """One READ: seconds since some beginning, a path below the directory that is read, bytes, bytes (at least 1)."""

    time: float
    file: str
    offset: int
    length: int


class StreamError(ValueError):
    """A text is not a stream; the message is one line with the place, the value, and what was expected."""


# -- patterns ------------------------------------------------------------------------------------------


def sequential(blocks: int) -> Iterator[int]:
    """Return the numbers of a file's blocks, in order."""
    return iter(range(blocks))


def strided(blocks: int, parts: int) -> Iterator[int]:
    """Return the first block of each part of the file, then the second of each, and so on [ES §7]."""
    bounds = [part * blocks // parts for part in range(parts + 1)]
    for at in range(math.ceil(blocks / parts)):
        yield from (low + at for low, high in pairwise(bounds) if low + at < high)


def shuffled(blocks: int, seed: str) -> Iterator[int]:
    """Return every block once, in random order."""
    order = list(range(blocks))
    random.Random(seed).shuffle(order)
    return iter(order)


PATTERNS: dict[str, Callable[[int, int, str], Iterator[int]]] = {
    "sequential": lambda blocks, parts, seed: sequential(blocks),
    "stride": lambda blocks, parts, seed: strided(blocks, parts),
    "random": lambda blocks, parts, seed: shuffled(blocks, seed),
}
"""Each pattern by name: a function of the number of blocks, the parts of a stride, and a seed."""


def generate(
    pattern: str, size: int, block: int, *, stride: int = 2, readers: int = 1, seed: int = 0, prefix: str = "file-"
) -> list[list[Read]]:
    """Return a stream for each reader, which reads a file of its own; nothing is read twice.

    Args:
        pattern: a name in `PATTERNS`.
        size: bytes of all files together.
        block: bytes of each read, from 1 to `LARGEST`; the last one of a file may be shorter.
        stride: into how many parts a file is divided.
        readers: how many there are.
        seed: for `random`.
        prefix: what the names of the files begin with.
    """
    each = size // readers
    streams = []
    for reader in range(readers):
        file = f"{prefix}{reader}"
        order = PATTERNS[pattern](math.ceil(each / block), stride, f"{seed} {file}")
        reads = [
            Read((at * readers + reader) * INTERVAL, file, number * block, min(block, each - number * block))
            for at, number in enumerate(order)
        ]
        streams.append(reads)
    return streams


def merged(streams: Iterable[Iterable[Read]]) -> list[Read]:
    """Merge several streams into one, by their times."""
    return sorted((read for stream in streams for read in stream), key=lambda read: read.time)


def reordered(stream: Iterable[Read], fraction: float, seed: int) -> list[Read]:
    """Return the stream as several nfsiods would send it: the next few for the same file overtake some requests.

    Args:
        stream: the reads in the order in which the application made them.
        fraction: how many of the requests of each file are overtaken, from 0 to 1.
        seed: determines which these are, and by how many places (1 to `LATE`).
    """
    reads = list(stream)
    places: dict[str, list[int]] = {}
    for at, read in enumerate(reads):
        places.setdefault(read.file, []).append(at)
    arrived = reads.copy()
    for file, slots in places.items():
        chance = random.Random(f"{seed} {file}")
        turns = [float(turn) for turn in range(len(slots))]
        for late in chance.sample(range(len(slots) - 1), min(round(fraction * len(slots)), len(slots) - 1)):
            turns[late] += chance.randint(1, LATE) + 0.5
        order = sorted(range(len(slots)), key=turns.__getitem__)
        for slot, turn in zip(slots, order, strict=True):
            arrived[slot] = reads[slots[turn]]._replace(time=reads[slot].time)
    return arrived


def sizes(stream: Iterable[Read]) -> dict[str, int]:
    """Return how large each file must be, in bytes."""
    found: dict[str, int] = {}
    for read in stream:
        found[read.file] = max(found.get(read.file, 0), read.offset + read.length)
    return found


# -- text ----------------------------------------------------------------------------------------------


def text(stream: Iterable[Read]) -> str:
    """Return the text form of a stream, for `parse`, with microseconds."""
    return "".join(f"{read.time:.6f} {read.file} {read.offset} {read.length}\n" for read in stream)


def parse(lines: Iterable[str], name: str) -> list[Read]:
    """Return the stream that a text describes; its first read is at 0 seconds.

    Args:
        lines: the text.
        name: its name in error messages.

    Raises:
        StreamError: it is not a stream.
    """
    reads = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            reads.append(_parsed(line.split()))
        except StreamError as exc:
            raise StreamError(f"{name}:{number}: {exc}") from None
    if not reads:
        raise StreamError(f"{name}: no read in the stream; expected lines SECONDS FILE OFFSET LENGTH")
    begin = min(read.time for read in reads)
    return [read._replace(time=read.time - begin) for read in reads]


def _parsed(words: list[str]) -> Read:
    if len(words) != 4:
        raise StreamError(f"{' '.join(words)!r} has {len(words)} words; expected SECONDS FILE OFFSET LENGTH")
    seconds, file, offset, length = words
    if not _SECONDS.fullmatch(seconds):
        raise StreamError(f"{seconds!r} is not a time; expected seconds, such as 12.345678")
    if file.startswith("/") or "\0" in file or not {"", ".", ".."}.isdisjoint(file.split("/")):
        raise StreamError(f"{file!r} is not a file name; expected a path below the directory, without . and ..")
    length_number = _number(length, "length", 1, LARGEST)
    return Read(float(seconds), file, _number(offset, "offset", 0, _LAST - length_number), length_number)


def _number(word: str, what: str, low: int, high: int) -> int:
    if not (_NUMBER.fullmatch(word) and low <= int(word) <= high):
        raise StreamError(f"{word!r} is not a valid {what}; expected bytes, from {low} to {high}")
    return int(word)
