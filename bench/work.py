"""The work that is timed. Each function returns, for a worker in its directory, a job that does one batch of it."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from .tree import BLOCK, KINDS, MODES, PACKAGE, Sizes

PINNED, UNPINNED = "pinned", "unpinned"
"""Client and daemon on one CPU; all CPUs for both."""

CLIENTS = 4

_CHUNK = 1 << 20
_PAGE = 4096


class Ground(NamedTuple):
    """What to work on: the sizes, the kind of files, and the name of a large file if the work needs one."""

    sizes: Sizes
    kind: str
    data: str


class Job(NamedTuple):
    """`batch` is timed, repeatedly, and returns how much it did; `before` is called before each batch, and not timed.

    A job that is `warm` does one batch before the first that is timed.
    """

    batch: Callable[[], int]
    before: Callable[[], object] | None = None
    warm: bool = True


Make = Callable[[Ground], Job]


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work, on one kind of files.

    Attributes:
        name: its name, which includes the kind.
        kind: the directory in which it is done.
        table: the table that shows it.
        unit: what is counted.
        make: returns the job, in the directory of the kind.
        settings: pinned, unpinned, or both.
        rounds: the most rounds; None for all.
        clients: the number of clients at once.
        reads_data: whether it needs a large file.
        counted: whether its requests are counted, too.
        thorough: whether it is also done with peers that differ little.
    """

    name: str
    kind: str
    table: str
    unit: str
    make: Make
    settings: tuple[str, ...] = (PINNED, UNPINNED)
    rounds: int | None = None
    clients: int = 1
    reads_data: bool = False
    counted: bool = True
    thorough: bool = False


def _stat(ground: Ground) -> Job:
    def batch() -> int:
        for _ in range(ground.sizes.batch):
            os.stat("file")
        return ground.sizes.batch

    return Job(batch)


def _lookup(ground: Ground) -> Job:
    os.chdir("listed")
    names = sorted(os.listdir())

    def batch() -> int:
        for name in names:
            os.close(os.open(name, os.O_PATH))
        return len(names)

    return Job(batch)


def _absent(ground: Ground) -> Job:
    names = [f"absent-{i}" for i in range(ground.sizes.batch)]

    def batch() -> int:
        return sum(not os.access(name, os.F_OK) for name in names)

    return Job(batch)


def _list_and_stat(_: Ground) -> Job:
    os.chdir("listed")

    def batch() -> int:
        with os.scandir() as entries:
            return sum(entry.stat().st_size == len(BLOCK) for entry in entries)

    return Job(batch)


def _read_one(name: str) -> None:
    fd = os.open(name, os.O_RDONLY)
    if len(os.read(fd, len(BLOCK))) != len(BLOCK):
        raise OSError(f"{name}: the read was short")
    os.close(fd)


def _open_read_close(ground: Ground) -> Job:
    def batch() -> int:
        for _ in range(ground.sizes.batch):
            _read_one("file")
        return ground.sizes.batch

    return Job(batch)


def _create_write_unlink(ground: Ground) -> Job:
    mode = MODES[ground.kind][1]
    os.chdir("own")
    os.umask(0)

    def batch() -> int:
        for _ in range(ground.sizes.batch):
            fd = os.open("new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            os.write(fd, BLOCK)
            os.close(fd)
            os.unlink("new")
        return ground.sizes.batch

    return Job(batch)


def _mix(ground: Ground) -> Job:
    os.chdir("listed")
    names = sorted(os.listdir())
    start = os.getpid() % len(names)  # not all clients the same
    names = names[start:] + names[:start]
    at = count()

    def batch() -> int:
        for _ in range(ground.sizes.batch):
            name = names[next(at) % len(names)]
            os.stat(name)
            _read_one(name)
        return ground.sizes.batch

    def all_of_them() -> int:
        return sum(batch() for _ in range(0, len(names), ground.sizes.batch))

    all_of_them()
    return Job(batch)


def _all_chunks(fd: int, chunk: bytearray) -> int:
    at = 0
    while got := os.preadv(fd, [chunk], at):
        at += got
    return at >> 20


def _forget_pages(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sequential(how: str, ground: Ground) -> Job:
    fd = os.open(ground.data, os.O_RDONLY)
    chunk = bytearray(_CHUNK)

    def open_again() -> None:
        os.close(fd)
        if os.open(ground.data, os.O_RDONLY) != fd:
            raise OSError("the descriptor has changed")

    befores: dict[str, Callable[[], object]] = {"cold": partial(_forget_pages, fd), "again": open_again}
    return Job(partial(_all_chunks, fd, chunk), befores.get(how))


def _random(how: str, ground: Ground) -> Job:
    fd = os.open(ground.data, os.O_RDONLY)
    pages = ground.sizes.mib * _CHUNK // _PAGE
    # The same pseudo-random order for all; each page once before any comes again (the factor is odd, the count even).
    places = count()
    page = bytearray(_PAGE)
    number = ground.sizes.batch * (4 if how == "cold" else 40)

    def batch() -> int:
        for _ in range(number):
            os.preadv(fd, [page], next(places) * 40503 % pages * _PAGE)
        return number

    if how == "warm":
        _all_chunks(fd, bytearray(_CHUNK))
    return Job(batch, partial(_forget_pages, fd) if how == "cold" else None)


_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent"}


def _run(script: str, directory: str) -> None:
    command = ["/bin/sh", "-euc", script]
    done = subprocess.run(
        command, cwd=directory, env=_ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"exit status {done.returncode}: {done.stderr[-1000:]}")


def _ls(ground: Ground) -> Job:
    def batch() -> int:
        _run("exec ls -lR many >/dev/null", ".")
        return ground.sizes.directories * ground.sizes.per_directory

    return Job(batch)


def _build(ground: Ground) -> Job:
    os.umask(0o777 & ~MODES[ground.kind][0])
    script = (
        f"rm -rf src; mkdir src; tar -xzf ../{PACKAGE} -C src --strip-components=1; "
        "make -C src CC=gcc >/dev/null; rm -r src"
    )

    def batch() -> int:
        _run(script, "own")
        return 1

    return Job(batch, warm=False)


_BY_FILE: dict[str, tuple[str, Make]] = {
    "stat": ("files", _stat),
    "lookup": ("files", _lookup),
    "absent": ("names", _absent),
    "list+stat": ("files", _list_and_stat),
    "open+read+close": ("files", _open_read_close),
    "create+write+unlink": ("files", _create_write_unlink),
}


def all_work(heavy_rounds: int) -> dict[str, Work]:
    """Return all work by name; work that takes long is done in no more than `heavy_rounds`."""
    work: dict[str, Work] = {}

    def add(what: str, table: str, unit: str, make: Make, **more: Any) -> None:
        for kind in KINDS:
            name = f"{what} {kind}"
            work[name] = Work(name, kind, f"{table}, {kind}", unit, make, **more)

    for what, (unit, make) in _BY_FILE.items():
        add(what, "file by file", unit, make, thorough=True)
    data = {"rounds": heavy_rounds, "reads_data": True}
    for when in ("warm", "again", "cold"):
        add(f"sequential {when}", "data", "MiB", partial(_sequential, when), counted=when == "cold", **data)
    for when in ("warm", "cold"):
        add(f"random 4K {when}", "data", "reads", partial(_random, when), counted=when == "cold", **data)
    programs = "programs and clients"
    add(f"{CLIENTS} clients", programs, "files", _mix, settings=(UNPINNED,), clients=CLIENTS, counted=False)
    add("ls -lR", programs, "files", _ls, rounds=heavy_rounds)
    add("tar+make+rm", programs, "runs", _build, settings=(UNPINNED,), rounds=heavy_rounds)
    return work
