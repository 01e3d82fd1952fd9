"""What a piece of work is, and steps that several pieces have in common."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from .tree import BLOCK, Sizes

LINE = b"z" * 99 + b"\n"

PINNED, UNPINNED = "pinned", "unpinned"
"""Client and daemon on one CPU; all CPUs for both."""


class JobInputs(NamedTuple):
    """What there is to work on.

    Attributes:
        sizes: how much.
        kind: of files.
        data: the name of a large file, if the work needs one.
        client: which of the clients this is; 0 is the first.
    """

    sizes: Sizes
    kind: str
    data: str
    client: int


def nothing() -> None:
    """Do nothing: the default before and after each batch of a job."""


class Job(NamedTuple):
    """`batch` is what is timed, again and again, and returns how much it did.

    `before` and `after` are done before and after each, untimed. A job that is to be `warm` does one batch before all.
    """

    batch: Callable[[], int]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    warm: bool = True


Make = Callable[[JobInputs], Job]


@dataclass(frozen=True, slots=True)
class Piece:
    """The description of a piece of work on one kind of files.

    Attributes:
        name: with the kind.
        kind: of files.
        table: the table of the report that it is in.
        unit: what is counted.
        settings: pinned, unpinned, or both.
        rounds: at most so many; None: all.
    """

    name: str
    kind: str
    table: str
    unit: str
    settings: tuple[str, ...] = (PINNED, UNPINNED)
    rounds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Piece):
    """A piece of work for processes in the directory of its kind.

    Attributes:
        make: makes the job, in that directory.
        clients: so many at once.
        users: each client is another user, in a home of that user's or in the directory of the team.
        reads_data: it needs a large file.
        counted: whether its requests are counted, too.
        thorough: also with peers that differ little.
    """

    make: Make
    clients: int = 1
    users: bool = False
    reads_data: bool = False
    counted: bool = True
    thorough: bool = False


def read_one(name: str) -> None:
    """Open a file, read its only block, and close it."""
    fd = os.open(name, os.O_RDONLY)
    if len(os.read(fd, len(BLOCK))) != len(BLOCK):
        raise OSError(f"{name}: not all was read")
    os.close(fd)


def each(do: Callable[[str], object], names: Sequence[str]) -> Callable[[], int]:
    """Return a batch that does this with one name after the other."""

    def batch() -> int:
        for name in names:
            do(name)
        return len(names)

    return batch


def append_one(name: str) -> None:
    """Append one line to a file, as a shell does by `>>`."""
    fd = os.open(name, os.O_WRONLY | os.O_APPEND)
    os.write(fd, LINE)
    os.close(fd)


def list_one(path: str) -> int:
    """List a directory and stat what is in it; return how many files of one block there are."""
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size == len(BLOCK) for entry in entries)


def create_one(name: str, mode: int, content: bytes = b"") -> None:
    """Create a file, which must not be there yet, and write its content, if any."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    if content:
        os.write(fd, content)
    os.close(fd)


def mix(names: list[str], number: int) -> Job:
    """Return a job that stats and reads `number` of these files in turn; each client begins elsewhere."""
    start = os.getpid() % len(names)
    names = names[start:] + names[:start]
    at = count()

    def batch() -> int:
        for _ in range(number):
            name = names[next(at) % len(names)]
            os.stat(name)
            read_one(name)
        return number

    def all_of_them() -> int:
        return sum(batch() for _ in range(0, len(names), number))

    all_of_them()
    return Job(batch)
