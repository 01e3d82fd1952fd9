"""The pieces of work over NFS: what is done, on which files, and what one unit of it is."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ..homes import HOME, rights_of
from ..over_nfs import BELOW, CLIENT, PLACES, prepare
from ..tree import WORKER, generated_package, make_directory, make_file
from ..workers import done_as

LISTED = PLACES[BELOW]
"""The directory that is listed, relative to the top of the tree: of mode 0755, with files of mode 0600."""

PROJECT = os.path.join("home", "user-00", "project")
"""Beside it, where everything else is done."""

BUILT = 4
"""How many files of the package are compiled: more would take long in an emulated processor."""

_FRESH = ("nosharecache",)
_MIB = b"d" * (1 << 20)
_BLOCK = b"x" * 4096
_PROGRAMS = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is done: `listed` and `files` are files, `mib` is the size of what is read and written in order,
    `sources` are the source files of a package.
    """

    listed: int = 300
    files: int = 50
    mib: int = 8
    sources: int = 20


@dataclass(frozen=True, slots=True)
class NfsWork:
    """One piece of work.

    Attributes:
        name: its name.
        unit: what one of it is called.
        units: how many of these it is.
        do: what is measured.
        prepare: what is done before it, through the same mount; None: nothing.
        clean: removes what both have made, in the tree itself; None: nothing.
        place: the directory in which these are called, as the worker: relative to the top of the tree.
        within: the directory for `do`, relative to this one.
        client: options of the client's mount.
        is_cold: whether the pages of FUSE's files are dropped before.
        renames: whether files are renamed.
    """

    name: str
    unit: str
    units: int
    do: Callable[[], object]
    prepare: Callable[[], object] | None = None
    clean: Callable[[], object] | None = None
    place: str = PROJECT
    within: str = ""
    client: tuple[str, ...] = _FRESH
    is_cold: bool = False
    renames: bool = False


def all_nfs_work(amounts: Amounts) -> dict[str, NfsWork]:
    """Return every piece of work by name, in the order in which they are done."""
    listed, files, mib = amounts.listed, amounts.files, amounts.mib
    remove_new, fill_new = partial(_run, "rm", "-rf", "new"), partial(_make_files, files)
    known = partial(_stat_in_many, files)
    works = [
        NfsWork("list+stat", "file", listed, partial(_list, listed), place=LISTED, client=CLIENT),
        NfsWork("ls -l", "file", listed, partial(_run, "ls", "-l"), place=LISTED, client=CLIENT),
        NfsWork("stat by name", "file", files, partial(_stat, files), within="many"),
        NfsWork("stat again", "file", files, partial(_stat, files), known, within="many", client=(*_FRESH, "noac")),
        NfsWork("open+read", "file", files, partial(_read_each, files), within="many"),
        NfsWork("sequential read", "MiB", mib, partial(_read_all, mib)),
        NfsWork("sequential read cold", "MiB", mib, partial(_read_all, mib), is_cold=True),
        NfsWork("sequential write", "MiB", mib, partial(_write_all, mib), clean=partial(os.unlink, "written")),
        NfsWork("append", "line", files, partial(_append, files), clean=partial(os.unlink, "log")),
        NfsWork("create+write", "file", files, partial(_create, files, _BLOCK), _make_new, remove_new, within="new"),
        NfsWork("unlink", "file", files, partial(_unlink, files), fill_new, remove_new, within="new"),
        NfsWork("tar x", "run", 1, partial(_run, "tar", "-xzf", "package.tar.gz"),
                clean=partial(_run, "rm", "-rf", "package")),
        NfsWork("build", "file", BUILT, _build, partial(_run, "tar", "-xzf", "package.tar.gz"),
                partial(_run, "rm", "-rf", "package")),
        NfsWork("git status", "run", 1, partial(_git, "status", "--short"), within="repository", renames=True),
        NfsWork("git clone", "run", 1, partial(_git, "clone", "-q", "--local", "repository", "clone"),
                clean=partial(_run, "rm", "-rf", "clone"), renames=True),
        NfsWork("rsync -a", "run", 1, partial(_run, "rsync", "-a", "repository/", "copy"),
                clean=partial(_run, "rm", "-rf", "copy"), renames=True),
        NfsWork("rename", "file", files, partial(_rename, files), fill_new, remove_new, within="new", renames=True),
    ]  # fmt: skip
    return {work.name: work for work in works}


def fill(tree: str, amounts: Amounts) -> None:
    """Fill an empty tree with all that the work needs."""
    prepare(tree, BELOW, amounts.listed)
    rights = rights_of(HOME)._replace(directory=0o755)
    project = os.path.join(tree, PROJECT)
    many = os.path.join(project, "many")
    make_directory(project, rights)
    make_directory(many, rights)
    for number in range(amounts.files):
        make_file(os.path.join(many, f"f{number}"), rights, _BLOCK)
    make_file(os.path.join(project, "data"), rights, _MIB, amounts.mib)
    make_file(os.path.join(project, "package.tar.gz"), rights, generated_package(amounts.sources))
    done_as(WORKER, project, _make_repository)


def _make_repository() -> None:
    os.umask(0o077)
    _run("tar", "-xzf", "package.tar.gz")
    os.rename("package", "repository")
    _git("-C", "repository", "init", "-q")
    _git("-C", "repository", "add", ".")
    _git("-C", "repository", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "all")


def _run(*command: str) -> None:
    done = subprocess.run(command, env=_PROGRAMS, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: exit status {done.returncode}: {done.stderr[-300:]}")


def _build() -> None:
    _run("make", "-C", "package", "CC=gcc", *(f"part{number}.o" for number in range(BUILT)))


def _git(*arguments: str) -> None:
    # The worker has no configuration, and the directories above are not its own.
    _run("git", "-c", "safe.directory=*", *arguments)


def _names(number: int, letter: str = "f") -> Iterable[str]:
    return (f"{letter}{i}" for i in range(number))


def _list(number: int) -> None:
    with os.scandir(".") as entries:
        found = [entry.stat(follow_symlinks=False).st_mode for entry in entries]
    if len(found) != number:
        raise OSError(f"{len(found)} files, not {number}")


def _stat(number: int) -> None:
    for name in _names(number):
        os.lstat(name)


def _stat_in_many(number: int) -> None:
    os.chdir("many")
    _stat(number)


def _read_each(number: int) -> None:
    for name in _names(number):
        with _opened(name, os.O_RDONLY) as file:
            os.read(file, 8192)


def _read_all(mib: int) -> None:
    read = 0
    with _opened("data", os.O_RDONLY) as file:
        while got := os.read(file, 1 << 20):
            read += len(got)
    if read != mib << 20:
        raise OSError(f"{read} bytes, not {mib} MiB")


def _write_all(mib: int) -> None:
    with _opened("written", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for _ in range(mib):
            os.write(file, _MIB)


def _append(number: int) -> None:
    """Write lines to a log, which is opened and closed for each."""
    for _ in range(number):
        with _opened("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            os.write(file, b"x" * 100)


def _create(number: int, content: bytes = b"") -> None:
    for name in _names(number):
        with _opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            if content:
                os.write(file, content)


def _unlink(number: int) -> None:
    for name in _names(number):
        os.unlink(name)


def _rename(number: int) -> None:
    for name, new in zip(_names(number), _names(number, "g"), strict=True):
        os.rename(name, new)


def _make_new() -> None:
    os.mkdir("new")


def _make_files(number: int) -> None:
    _make_new()
    os.chdir("new")
    _create(number)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """Open a file as a program in C does: `open` would ask for its attributes, too."""
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)
