"""Work on private files in homes: several files, several directories deep, by paths relative and absolute."""

import os
from collections.abc import Callable
from functools import partial
from itertools import count

from .homes import DIRECTORIES, HOME, USERS, names, place_of
from .job import Job, JobInputs, Make, each, list_one, mix, read_one
from .tree import BLOCK


def read_many(inputs: JobInputs) -> Job:
    """Stat and read one file after the other."""
    return mix(names(inputs.sizes.own), inputs.sizes.batch)


def users(inputs: JobInputs) -> Job:
    """One user of a login host, at work at home; or, as the first of them, one who polls what the others have there."""
    return _at_work(inputs) if inputs.client else _polling(inputs)


def _lookup(path: str) -> None:
    os.close(os.open(path, os.O_PATH))


def _each(do: Callable[[str], object], inputs: JobInputs, *, absolute: bool = False) -> Job:
    top = os.getcwd() if absolute else ""
    return Job(each(do, [os.path.join(top, name) for name in names(inputs.sizes.own)]))


def _list_and_stat(_: JobInputs) -> Job:
    def batch() -> int:
        return sum(list_one(directory) for directory in DIRECTORIES)

    return Job(batch)


BY_FILE: dict[str, Make] = {
    "stat": partial(_each, os.stat),
    "lookup": partial(_each, _lookup),
    "list+stat": _list_and_stat,
    "open+read+close": partial(_each, read_one),
    "stat absolute": partial(_each, os.stat, absolute=True),
    "open+read+close absolute": partial(_each, read_one, absolute=True),
}
"""What is done file by file."""


def _at_work(inputs: JobInputs) -> Job:
    paths, at = names(inputs.sizes.others), count()

    def one() -> None:
        path = paths[next(at) % len(paths)]
        os.stat(path)
        os.listdir(os.path.dirname(path))
        read_one(path)
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, BLOCK)
        os.close(fd)

    def batch(number: int = 5) -> int:
        for _ in range(number):
            one()
        return number

    batch(len(paths))
    return Job(batch)


def _polling(inputs: JobInputs) -> Job:
    """It counts for nothing: what matters is what the others still get done."""
    top, files = os.getcwd().removesuffix(place_of(HOME)), names(inputs.sizes.others)
    paths, at = [os.path.join(top, place_of(HOME, user), name) for user in range(1, USERS) for name in files], count()

    def batch() -> int:
        for _ in range(inputs.sizes.batch):
            path = paths[next(at) % len(paths)]
            try:
                os.stat(path)
            except (FileNotFoundError, PermissionError):
                continue
            raise OSError(f"{path}: not refused")
        return 0

    return Job(batch)
