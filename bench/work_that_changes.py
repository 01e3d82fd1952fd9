"""Work that changes things, in the directory `own`: what programs do that write, append, rename and remove."""

import os
import shutil
import sqlite3
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from io import BytesIO

from .homes import rights_of
from .job import LINE, Job, JobInputs, Make, append_one, create_one, each, read_one
from .tree import BLOCK

_ARCHIVE = "archive.tar"
_ARCHIVED = tuple(f"part-{i}" for i in range(10))


def _make(prepare: Callable[[JobInputs], Job]) -> Make:
    """Work in `own`, with the modes of the kind of files."""

    def make(inputs: JobInputs) -> Job:
        os.umask(0)
        os.chdir("own")
        return prepare(inputs)

    return make


def _names(inputs: JobInputs) -> list[str]:
    return [f"new-{i}" for i in range(inputs.sizes.batch)]


def _fill(inputs: JobInputs, content: bytes = b"") -> None:
    for name in _names(inputs):
        create_one(name, rights_of(inputs.kind).file, content)


def _empty(inputs: JobInputs) -> None:
    for name in _names(inputs):
        os.unlink(name)


def _each(do: Callable[[str], object], inputs: JobInputs) -> Callable[[], int]:
    return each(do, _names(inputs))


def _rename(inputs: JobInputs) -> Job:
    names = _names(inputs)

    def batch() -> int:
        for name in names:
            os.rename(name, f"to-{name}")
        for name in names:
            os.rename(f"to-{name}", name)
        return 2 * len(names)

    return Job(batch, partial(_fill, inputs), partial(_empty, inputs), warm=False)


def _unlink(inputs: JobInputs) -> Job:
    return Job(_each(os.unlink, inputs), partial(_fill, inputs), warm=False)


def _chmod(inputs: JobInputs) -> Job:
    """Change something each time."""
    mode = rights_of(inputs.kind).file

    def both(name: str) -> None:
        os.chmod(name, mode ^ 0o100)
        os.chmod(name, mode)

    return Job(_each(both, inputs), partial(_fill, inputs), partial(_empty, inputs), warm=False)


def _create_and_write(inputs: JobInputs) -> Job:
    mode = rights_of(inputs.kind).file
    return Job(_each(lambda name: create_one(name, mode, BLOCK), inputs), after=partial(_empty, inputs), warm=False)


def _directories(inputs: JobInputs) -> Job:
    mode = rights_of(inputs.kind).directory

    def batch() -> int:
        for name in _names(inputs):
            os.mkdir(name, mode)
        for name in _names(inputs):
            os.rmdir(name)
        return inputs.sizes.batch

    return Job(batch, warm=False)


def _write(content: bytes, how: int, inputs: JobInputs) -> Job:
    """Write to one file that stays open."""
    number = 10 * inputs.sizes.batch

    def batch() -> int:
        fd = os.open("file", os.O_WRONLY | os.O_CREAT | how, rights_of(inputs.kind).file)
        for _ in range(number):
            os.write(fd, content)
        os.close(fd)
        return number

    return Job(batch, after=partial(os.unlink, "file"), warm=False)


def _append(inputs: JobInputs) -> Job:
    """Append to one file, again and again."""

    def begin() -> None:
        create_one("file", rights_of(inputs.kind).file)

    batch = each(append_one, ["file"] * inputs.sizes.batch)
    return Job(batch, begin, partial(os.unlink, "file"), warm=False)


def _read(inputs: JobInputs) -> Job:
    return Job(_each(read_one, inputs), partial(_fill, inputs, BLOCK), partial(_empty, inputs), warm=False)


def _commit(inputs: JobInputs) -> Job:
    """Commit one row at a time, without waiting for the disk."""
    mode, number = rights_of(inputs.kind).file, inputs.sizes.batch

    def begin() -> None:
        create_one("database", mode)
        connection = sqlite3.connect("database", isolation_level=None)
        connection.execute("CREATE TABLE rows (value)")
        connection.close()

    def batch() -> int:
        connection = sqlite3.connect("database", isolation_level=None)
        connection.execute("PRAGMA synchronous=OFF")
        for value in range(number):
            connection.execute("INSERT INTO rows VALUES (?)", (value,))
        connection.close()
        return number

    return Job(batch, begin, partial(os.unlink, "database"), warm=False)


def _archive() -> None:
    with tarfile.open(_ARCHIVE, "w") as archive:
        for directory in _ARCHIVED:
            for number in range(20):
                file = tarfile.TarInfo(f"{directory}/file-{number}")
                file.size = 3000
                archive.addfile(file, BytesIO(b"x" * file.size))


def _unpack() -> int:
    subprocess.run(["tar", "-xf", _ARCHIVE], check=True)
    return 20 * len(_ARCHIVED)


def _remove() -> int:
    subprocess.run(["rm", "-r", *_ARCHIVED], check=True)
    return 20 * len(_ARCHIVED)


def _clean_up() -> None:
    for directory in _ARCHIVED:
        shutil.rmtree(directory)
    os.unlink(_ARCHIVE)


def _tar(_: JobInputs) -> Job:
    return Job(_unpack, _archive, _clean_up, warm=False)


def _rm(_: JobInputs) -> Job:
    def begin() -> None:
        _archive()
        _unpack()

    return Job(_remove, begin, partial(os.unlink, _ARCHIVE), warm=False)


CHANGES: dict[str, tuple[str, Make]] = {
    what: (unit, _make(prepare))
    for what, unit, prepare in (
        ("rename", "renames", _rename),
        ("unlink", "files", _unlink),
        ("chmod twice", "files", _chmod),
        ("create+4K", "files", _create_and_write),
        ("mkdir+rmdir", "directories", _directories),
        ("write 4K", "writes", partial(_write, BLOCK, os.O_TRUNC)),
        ("log line", "lines", partial(_write, LINE, os.O_APPEND)),
        ("open+append+close", "lines", _append),
        ("open+read+close of new", "files", _read),
        ("SQLite commit", "commits", _commit),
        ("tar x", "files", _tar),
        ("rm -r", "files", _rm),
    )
}
"""What is done, with what is counted."""
