"""The tree that is worked on: the same for every peer, each on a file system of its own."""

import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from typing import NamedTuple

WORKER, OWNER = 1500, 1501
"""Server ids: who works, and whose the files are."""

KINDS = ("public", "private")
"""Visible to all callers; hidden from some, and visible to the worker by the group bits alone."""

BLOCK = b"x" * 4096

PACKAGE = "package.tar.gz"

_MIB = b"x" * (1 << 20)
_numbers = count()


class Rights(NamedTuple):
    """Whose directories and files are, and their modes."""

    uid: int
    gid: int
    directory: int
    file: int


RIGHTS = {"public": Rights(OWNER, OWNER, 0o755, 0o644), "private": Rights(OWNER, WORKER, 0o750, 0o640)}
"""By kind."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything there is; `settle` is how many seconds daemons get to come to rest.

    `own` and `others` are how many files there are in each directory of the worker's home, and of the others' homes;
    `shared`, in the directory of the team.
    """

    listed: int = 1000
    directories: int = 100
    per_directory: int = 100
    mib: int = 256
    known: int = 100_000
    batch: int = 100
    settle: float = 1.0
    own: int = 50
    others: int = 5
    shared: int = 300


QUICK = Sizes(
    listed=20, directories=3, per_directory=5, mib=1, known=200, batch=5, settle=0.05, own=2, others=1, shared=4
)


def make_directory(path: str, rights: Rights) -> None:
    """Make an empty directory."""
    os.mkdir(path)
    os.chown(path, rights.uid, rights.gid)
    os.chmod(path, rights.directory)


def make_file(path: str, rights: Rights, content: bytes = b"", blocks: int = 1) -> None:
    """Make a file with so many blocks of this content."""
    with open(path, "wb", buffering=0) as file:
        for _ in range(blocks if content else 0):
            file.write(content)
        os.fchown(file.fileno(), rights.uid, rights.gid)
        os.fchmod(file.fileno(), rights.file)


def make_many(path: str, rights: Rights, directories: int, files: int) -> None:
    """Make so many directories, with so many empty files in each."""
    make_directory(path, rights)
    for i in range(directories):
        below = os.path.join(path, f"directory-{i:03}")
        make_directory(below, rights)
        for j in range(files):
            make_file(os.path.join(below, f"file-{j:04}"), rights)


def prepare(tree: str, sizes: Sizes, package: bytes | None, *, many: bool) -> None:
    """Fill a tree.

    Args:
        tree: its top, which exists and is empty.
        sizes: how much.
        package: of sources, for the works that build something.
        many: with the files for `ls -lR`.
    """
    os.chown(tree, OWNER, OWNER)
    os.chmod(tree, 0o755)
    for kind in KINDS:
        top, rights = os.path.join(tree, kind), RIGHTS[kind]
        make_directory(top, rights)
        make_file(os.path.join(top, "file"), rights, BLOCK)
        listed = os.path.join(top, "listed")
        make_directory(listed, rights)
        for i in range(sizes.listed):
            make_file(os.path.join(listed, f"file-{i:04}"), rights, BLOCK)
        if many:
            make_many(os.path.join(top, "many"), rights, sizes.directories, sizes.per_directory)
        # Where the worker makes files: its own, or by the right of its group.
        own = os.path.join(top, "own")
        make_directory(own, rights)
        if kind == "public":
            os.chown(own, WORKER, WORKER)
        else:
            os.chmod(own, 0o770)
        if package is not None:
            make_file(os.path.join(top, PACKAGE), rights, package)


@contextmanager
def data_file(tree: str, kind: str, mib: int) -> Iterator[str]:
    """Make a large file for as long as it is needed; give its name, which was never there before."""
    name = f"data-{next(_numbers)}"
    path = os.path.join(tree, kind, name)
    try:
        make_file(path, RIGHTS[kind], _MIB, mib)
        yield name
    finally:
        os.unlink(path)


def known_tree(tree: str, files: int) -> str:
    """Make so many files more, visible to all, in directories of 1,000; return the name of the top."""
    each = min(1000, files)
    make_many(os.path.join(tree, "public", "known"), RIGHTS["public"], files // each, each)
    return "known"


def generated_package(files: int = 60) -> bytes:
    """Return a generated source package, where the real one is not at hand."""
    sources = {f"part{i}.c": _SOURCE.format(i=i) for i in range(files)}
    sources["common.h"] = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n" + "".join(
        f"int part{i}(int);\n" for i in range(files)
    )
    calls = " + ".join(f"part{i}(n)" for i in range(files))
    sources["main.c"] = f'#include "common.h"\nint main(int n, char **v) {{ (void)v; printf("%d\\n", {calls}); }}\n'
    objects = " ".join(["main.o", *(f"part{i}.o" for i in range(files))])
    sources["Makefile"] = f"CFLAGS = -O2\nprogram: {objects}\n\t$(CC) -o $@ {objects}\n{objects}: common.h\n"
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in sources.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(text)
            archive.addfile(info, BytesIO(text.encode()))
    return out.getvalue()


_SOURCE = """#include "common.h"
static int table{i}[64];
static int fill{i}(int seed) {{
    for (int at = 0; at < 64; at++) table{i}[at] = (seed * 31 + at * {i}) % 97;
    return table{i}[seed & 63];
}}
int part{i}(int n) {{
    char text[32];
    snprintf(text, sizeof text, "%d", fill{i}(n));
    return (int)strlen(text) + atoi(text);
}}
"""
