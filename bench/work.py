"""The work that is timed. Each function returns, for a worker in its directory, a job that does one batch of it."""

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from . import work_in_homes, work_in_team
from .homes import HOME, MEMBERS, TEAM, USERS, rights_of
from .job import PINNED, UNPINNED, Job, JobInputs, Make, Work, create_one, list_one, mix, nothing, read_one
from .tree import BLOCK, KINDS
from .work_by_programs import PROGRAMS, list_all
from .work_that_changes import CHANGES

CLIENTS = 4

_CHUNK = 1 << 20
_PAGE = 4096


def _stat(inputs: JobInputs) -> Job:
    def batch() -> int:
        for _ in range(inputs.sizes.batch):
            os.stat("file")
        return inputs.sizes.batch

    return Job(batch)


def _lookup(inputs: JobInputs) -> Job:
    os.chdir("listed")
    names = sorted(os.listdir())

    def batch() -> int:
        for name in names:
            os.close(os.open(name, os.O_PATH))
        return len(names)

    return Job(batch)


def _absent(inputs: JobInputs) -> Job:
    names = [f"absent-{i}" for i in range(inputs.sizes.batch)]

    def batch() -> int:
        return sum(not os.access(name, os.F_OK) for name in names)

    return Job(batch)


def _list_and_stat(_: JobInputs) -> Job:
    os.chdir("listed")
    return Job(partial(list_one, "."))


def _open_read_close(inputs: JobInputs) -> Job:
    def batch() -> int:
        for _ in range(inputs.sizes.batch):
            read_one("file")
        return inputs.sizes.batch

    return Job(batch)


def _create_write_unlink(inputs: JobInputs) -> Job:
    mode = rights_of(inputs.kind).file
    os.chdir("own")
    os.umask(0)

    def batch() -> int:
        for _ in range(inputs.sizes.batch):
            create_one("new", mode, BLOCK)
            os.unlink("new")
        return inputs.sizes.batch

    return Job(batch)


def _create(inputs: JobInputs) -> Job:
    mode = rights_of(inputs.kind).file
    os.chdir("own")
    os.umask(0)
    names = [f"new-{i}" for i in range(inputs.sizes.batch)]

    def batch() -> int:
        for name in names:
            create_one(name, mode)
        return len(names)

    def remove() -> None:
        for name in names:
            os.unlink(name)

    return Job(batch, after=remove)


def _mix(inputs: JobInputs) -> Job:
    os.chdir("listed")
    return mix(sorted(os.listdir()), inputs.sizes.batch)


def _all_chunks(fd: int, chunk: bytearray) -> int:
    at = 0
    while got := os.preadv(fd, [chunk], at):
        at += got
    return at >> 20


def _forget_pages(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sequential(how: str, inputs: JobInputs) -> Job:
    fd = os.open(inputs.data, os.O_RDONLY)
    chunk = bytearray(_CHUNK)

    def open_again() -> None:
        os.close(fd)
        if os.open(inputs.data, os.O_RDONLY) != fd:
            raise OSError("the descriptor has changed")

    befores: dict[str, Callable[[], object]] = {"cold": partial(_forget_pages, fd), "again": open_again}
    return Job(partial(_all_chunks, fd, chunk), befores.get(how, nothing))


def _sequential_write(inputs: JobInputs, writers: int = 1) -> Job:
    mode = rights_of(inputs.kind).file
    os.chdir("own")
    os.umask(0)
    chunk = b"x" * _CHUNK
    chunks = max(inputs.sizes.mib // writers, 1)
    name = f"data-{inputs.client}"

    def batch() -> int:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        written = sum(os.write(fd, chunk) for _ in range(chunks))
        os.close(fd)
        return written >> 20

    return Job(batch, after=partial(os.unlink, name))


def _random(how: str, inputs: JobInputs) -> Job:
    fd = os.open(inputs.data, os.O_RDONLY)
    pages = inputs.sizes.mib * _CHUNK // _PAGE
    # The same pseudo-random order for all; each page once before any comes again (the factor is odd, the count even).
    places = count()
    page = bytearray(_PAGE)
    number = inputs.sizes.batch * (4 if how == "cold" else 40)

    def batch() -> int:
        for _ in range(number):
            os.preadv(fd, [page], next(places) * 40503 % pages * _PAGE)
        return number

    if how == "warm":
        _all_chunks(fd, bytearray(_CHUNK))
    return Job(batch, partial(_forget_pages, fd) if how == "cold" else nothing)


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

    def add(what: str, kinds: tuple[str, ...], table: str, unit: str, make: Make, **more: Any) -> None:
        for kind in kinds:
            name = f"{what} {kind}"
            work[name] = Work(name, kind, f"{table}, {kind}", unit, make=make, **more)

    everywhere, home = (*KINDS, HOME), (HOME,)
    for what, (unit, make) in _BY_FILE.items():
        add(what, KINDS, "file by file", unit, make, thorough=True)
    for what, make in work_in_homes.BY_FILE.items():
        add(what, home, "file by file", "files", make)
    add("create+write+unlink", home, "file by file", "files", _create_write_unlink)
    add("create", everywhere, "file by file", "files", _create)
    members: dict[str, Any] = {"clients": MEMBERS, "users": True}
    for what, (unit, make) in work_in_team.WORK.items():
        add(what, (TEAM,), "a group's directory", unit, make, settings=(PINNED,), counted=False, **members)
    for what, (unit, make) in CHANGES.items():
        add(what, ("private", HOME), "changes", unit, make, settings=(PINNED,), rounds=heavy_rounds, counted=False)
    data = {"rounds": heavy_rounds, "reads_data": True}
    for when in ("warm", "again", "cold"):
        add(f"sequential {when}", KINDS, "data", "MiB", partial(_sequential, when), counted=when == "cold", **data)
    for when in ("warm", "cold"):
        add(f"random 4K {when}", KINDS, "data", "reads", partial(_random, when), counted=when == "cold", **data)
    add("sequential write", everywhere, "data", "MiB", _sequential_write, rounds=heavy_rounds)
    programs = "programs and clients"
    clients: dict[str, Any] = {"settings": (UNPINNED,), "counted": False}
    many_users: dict[str, Any] = {"clients": USERS, "users": True, "rounds": heavy_rounds}
    add(f"{CLIENTS} clients", KINDS, programs, "files", _mix, clients=CLIENTS, **clients)
    add(f"{CLIENTS} clients", home, programs, "files", work_in_homes.read_many, clients=CLIENTS, **clients)
    add(f"{USERS} users", home, programs, "files", work_in_homes.users, **many_users, **clients)
    write_one = partial(_sequential_write, writers=CLIENTS)
    add(f"{CLIENTS} writers", everywhere, "data", "MiB", write_one, clients=CLIENTS, rounds=heavy_rounds, counted=False)
    add("ls -lR", everywhere, programs, "files", list_all, rounds=heavy_rounds)
    for what, make in PROGRAMS.items():
        add(what, KINDS, programs, "runs", make, settings=(UNPINNED,), rounds=heavy_rounds)
    return work
