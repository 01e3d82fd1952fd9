"""What is measured: each function prepares a tree, or measures one case in it."""

import contextlib
import ctypes
import errno
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

from cloakfs.linux.libc import AT_EMPTY_PATH, libc

from ..lab.guest import inside
from ..tree import generated_package
from .configurations import USER
from .package import package, tiny_package
from .processes import ENVIRONMENT, ProgramTimes, done_as, timed
from .testbed import drop_caches, kib_read
from .trial import Spot

# -- listing -------------------------------------------------------------------------------------------

DIRECTORIES, FEW_DIRECTORIES = 3, 1
FILES, QUICK_FILES = 1000, 100
"""Directories that are listed, and how many files each has. Behind NFS, and if it has to be quick, there are few."""

HOT, _FEW_HOT = 3, 1
"""How often each is listed with caches hot, after a listing that only makes them so; behind NFS, where a client that
may not use its caches takes a minute for a thousand files, just once, after the listing with cold caches."""

OWNERS = (10, 100, 1000)

COLD_KIB, HOT_KIB = "KiB cold", "KiB hot"
"""Names of values: what was read from the device by what began with cold caches, or by a listing with hot ones."""


def prepare_listing(tree: str, quick: bool) -> None:
    """Make `by-N`, in which N users own all files, those of each in a row, and `empty`."""
    files, directories = _extent(quick)
    for owners in (0, *OWNERS):
        place = os.path.join(tree, f"by-{owners}" if owners else "empty")
        os.mkdir(place)
        for directory in range(directories):
            below = os.path.join(place, f"directory-{directory}")
            os.mkdir(below)
            for i in range(files if owners else 0):
                path = os.path.join(below, f"file-{i:04}")
                with open(path, "xb") as file:
                    os.fchown(file.fileno(), USER + i * owners // files, 0)
                    os.fchmod(file.fileno(), 0o644)


def _extent(quick: bool) -> tuple[int, int]:
    """Return how many files a directory has, and how many directories there are."""
    return QUICK_FILES if quick else FILES, FEW_DIRECTORIES if quick or inside() else DIRECTORIES


_LISTINGS = {"ls -lR": ("ls", "-lR"), "find": ("find", ".")}


def list_all(spot: Spot) -> dict[str, float]:
    """List the tree with `ls -lR` and `find`, with caches cold and hot; seconds, and KiB from the device."""
    values: dict[str, float] = {}
    kib = {COLD_KIB: 0.0, HOT_KIB: 0.0}
    for name, command in _LISTINGS.items():
        listed = partial(timed, command, spot.path, spot.case)
        drop_caches(spot.real)
        timed(command, "/proc/self/fdinfo", spot.case)  # the program itself is warm
        before = kib_read(spot.real)
        cold = listed()
        kib[COLD_KIB] += kib_read(spot.real) - before
        if not inside():
            listed()
        before = kib_read(spot.real)
        hot = [listed() for _ in range(_FEW_HOT if inside() else HOT)]
        kib[HOT_KIB] += kib_read(spot.real) - before
        values |= {
            f"{name} cold": cold.elapsed,
            f"{name} cold, waiting": cold.waiting,
            f"{name} hot": sum(times.elapsed for times in hot) / len(hot),
        }
    _check_visible(spot)
    return values | kib


def _check_visible(spot: Spot) -> None:
    """Check that the caller sees what the configuration is meant to show: nothing else is measured."""
    if spot.case.visible is None:
        return
    files, directories = _extent(spot.quick)
    owners = round(FILES / spot.case.visible) if spot.case.visible else 0
    wanted = directories * (files // min(owners, files)) if owners else 0
    seen = done_as(spot.case, spot.path, _count)
    if seen != wanted:
        raise RuntimeError(f"{spot.case.name} shows {seen} files, not {wanted}")


def _count() -> int:
    return sum(len(files) for _, _, files in os.walk("."))


# -- work in a directory of its own --------------------------------------------------------------------


@contextlib.contextmanager
def _workplace(spot: Spot) -> Iterator[str]:
    """A directory that belongs to the caller, seen through what is measured; it is removed afterwards."""
    name = f"work-{spot.run}"
    real = os.path.join(spot.real, name)
    shutil.rmtree(real, ignore_errors=True)
    os.mkdir(real)
    os.chown(real, spot.case.server_uid, spot.case.server_uid)
    os.chmod(real, 0o755)
    try:
        yield os.path.join(spot.path, name)
    finally:
        shutil.rmtree(real, ignore_errors=True)  # what NFS removes late is gone then


# -- a build -------------------------------------------------------------------------------------------

_PACKAGE, _ANSWERS = "package.tar.bz2", "config.cache"

PHASES = ("untar", "configure", "make", "clean", "delete")
BUILT = ("configure", "make", "clean")
"""The phases that are the paper's benchmark."""


def prepare_build(tree: str, quick: bool) -> None:
    """Put the package into the tree; behind NFS, with what its configure script has to know of the machine.

    To find that out it starts a thousand programs, which user-mode Linux does ten times as slowly: without the answers,
    nine tenths of a build there are this, whatever the file system.
    """
    _write(os.path.join(tree, _PACKAGE), tiny_package() if quick else package())
    if quick or not inside():
        return
    source = os.path.join(tree, "configured")
    os.mkdir(source)
    untar = ["tar", "-xjf", os.path.join(tree, _PACKAGE), "-C", source, "--strip-components=1"]
    configure = ["./configure", f"--cache-file={os.path.join(tree, _ANSWERS)}"]
    for command in (untar, configure):
        subprocess.run(command, cwd=source, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(source)
    os.chmod(os.path.join(tree, _ANSWERS), 0o644)  # callers can read it, and not write it


def build(spot: Spot) -> dict[str, float]:
    """Unpack, configure, make, clean and delete the package, from a cold start; seconds, and KiB from the device."""
    with _workplace(spot) as place:
        source = os.path.join(place, "source")
        steps = {
            "untar": (["sh", "-ec", f"mkdir source; tar -xjf ../{_PACKAGE} -C source --strip-components=1"], place),
            "configure": (["./configure", *_answers(spot)], source),
            "make": (["make"], source),
            "clean": (["make", "clean"], source),
            "delete": (["rm", "-r", "source"], place),
        }
        drop_caches(spot.real)
        before = kib_read(spot.real)
        times = {name: timed(command, where, spot.case) for name, (command, where) in steps.items()}
        cold = kib_read(spot.real) - before
    total = sum((times[name] for name in BUILT), ProgramTimes(0, 0, 0))
    return {
        **{name: one.elapsed for name, one in times.items()},
        "elapsed": total.elapsed,
        "user": total.user,
        "system": total.system,
        COLD_KIB: cold,
    }


def _answers(spot: Spot) -> list[str]:
    return [f"--cache-file=../../{_ANSWERS}"] if os.path.exists(os.path.join(spot.real, _ANSWERS)) else []


# -- NFSSTONE ------------------------------------------------------------------------------------------

MIX = {"lookup": 53.0, "read": 32.0, "readlink": 7.5, "write": 3.2, "getattr": 2.3, "create": 1.4}
"""Percent of all operations, as printed; they add up to 99.4."""

OPERATIONS, QUICK_OPERATIONS = 45522, 500
_MANY, _QUICK_MANY = 2000, 50
_DATA, _BLOCK = 50, 8192


def prepare_stone(tree: str, quick: bool) -> None:
    """Make files to look up, to read, and symbolic links."""
    many = _QUICK_MANY if quick else _MANY
    for name, number, size in (("names", many, 0), ("data", _DATA, 8 * _BLOCK)):
        os.mkdir(os.path.join(tree, name))
        for i in range(number):
            path = os.path.join(tree, name, f"a-name-that-is-somewhat-long-{i:05}")
            _write(path, b"x" * size)
            os.chown(path, USER, USER)
    os.mkdir(os.path.join(tree, "links"))
    for i in range(many // 10):
        os.symlink(f"../data/{i}", os.path.join(tree, "links", f"link-{i:05}"))


def stone(spot: Spot) -> dict[str, float]:
    """Do the mix of NFSSTONE from a cold start: seconds, operations per second, and KiB from the device."""
    number = QUICK_OPERATIONS if spot.quick else OPERATIONS
    kinds = random.Random(spot.run).choices(list(MIX), list(MIX.values()), k=number)
    with _workplace(spot) as place:
        drop_caches(spot.real)
        before = kib_read(spot.real)
        elapsed = done_as(spot.case, place, partial(_operate, kinds, spot.run))
        cold = kib_read(spot.real) - before
    return {"elapsed": elapsed, "rate": number / elapsed, COLD_KIB: cold}


def _operate(kinds: list[str], seed: int) -> float:
    chosen = random.Random(seed)
    names, links, data = (sorted(os.listdir(f"../{kind}")) for kind in ("names", "links", "data"))
    reading = [os.open(f"../data/{name}", os.O_RDONLY) for name in data]
    writing = os.open("written", os.O_RDWR | os.O_CREAT, 0o644)
    block = b"y" * _BLOCK
    numbers = iter(range(len(kinds)))

    def create() -> None:
        os.close(os.open(f"new-{next(numbers)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    operations: dict[str, Callable[[], object]] = {
        "lookup": lambda: os.access(f"../names/{chosen.choice(names)}", os.F_OK),
        "read": lambda: os.pread(chosen.choice(reading), _BLOCK, chosen.randrange(8) * _BLOCK),
        "readlink": lambda: os.readlink(f"../links/{chosen.choice(links)}"),
        "getattr": lambda: os.fstat(chosen.choice(reading)),
        "write": lambda: os.pwrite(writing, block, chosen.randrange(64) * _BLOCK),
        "create": create,
    }
    began = time.perf_counter()
    for kind in kinds:
        operations[kind]()
    os.close(writing)
    return time.perf_counter() - began


# -- the modified Andrew benchmark ---------------------------------------------------------------------

MAB = ("mkdir", "copy", "stat", "search", "compile")
_MAB_FILES, _QUICK_MAB_FILES = 17, 2
_COPIES, _QUICK_COPIES = 20, 2


def prepare_mab(tree: str, quick: bool) -> None:
    """Unpack the sources that are copied."""
    place = os.path.join(tree, "sources")
    os.mkdir(place)
    content = generated_package(_QUICK_MAB_FILES if quick else _MAB_FILES)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = ["tar", "-xzf", file.name, "-C", place, "--strip-components=1", "--no-same-owner"]
        subprocess.run(command, check=True)
    for name in os.listdir(place):
        os.chmod(os.path.join(place, name), 0o644)


def mab(spot: Spot) -> dict[str, float]:
    """Make directories, copy the sources into each, stat and search all of them, and compile one; caches warm."""
    copies = range(_QUICK_COPIES if spot.quick else _COPIES)
    names = " ".join(f"copy-{i}" for i in copies)
    with _workplace(spot) as place:
        timed(["sh", "-c", "cat ../sources/* >/dev/null"], place, spot.case)
        steps = {
            "mkdir": f"mkdir {names}",
            "copy": f"for i in {names}; do cp ../sources/* $i; done",
            "stat": "exec ls -lR .",
            "search": "! grep -r no-such-string-anywhere .",
            "compile": "exec make -C copy-0 CC=gcc",
        }
        return {name: timed(["sh", "-ec", steps[name]], place, spot.case).elapsed for name in MAB}


# -- latency, and sequential reading -------------------------------------------------------------------

CALLS, QUICK_CALLS = 2000, 50
_SPARSE_MIB, _QUICK_SPARSE_MIB = 100, 4
_CHUNK = 1 << 16

_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC_STATS = 0x7FF


def prepare_latency(tree: str, quick: bool) -> None:
    """Make a file that belongs to another user, and a large one without any blocks."""
    for name, mib in (("other", 0), ("sparse", _QUICK_SPARSE_MIB if quick else _SPARSE_MIB)):
        path = os.path.join(tree, name)
        _write(path, b"")
        os.truncate(path, mib << 20)
        os.chown(path, USER + 1, USER + 1)
        os.chmod(path, 0o644)


def latency(spot: Spot) -> dict[str, float]:
    """Return how long an unauthorized fchown(2) and a getattr take, in µs, and MB/s of sequential reading."""
    mib = _QUICK_SPARSE_MIB if spot.quick else _SPARSE_MIB
    drop_caches(spot.real)
    return done_as(spot.case, spot.path, partial(_latencies, QUICK_CALLS if spot.quick else CALLS, mib << 20))


def _latencies(calls: int, size: int) -> dict[str, float]:
    buffer = ctypes.create_string_buffer(256)
    other = os.open("other", os.O_RDONLY)

    def fchown() -> None:
        try:
            os.fchown(other, os.getuid(), -1)
        except OSError as exc:
            if exc.errno in (errno.EPERM, errno.EACCES):
                return
            raise
        raise RuntimeError("fchown was not refused")

    def getattr_() -> None:
        flags = AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC
        if libc.statx(other, b"", flags, _STATX_BASIC_STATS, buffer) < 0:
            raise OSError(ctypes.get_errno(), "statx")

    return {
        "fchown": _mean_us(fchown, calls),
        "getattr": _mean_us(getattr_, calls),
        "sequential": _sequential("sparse", size),
    }


def _mean_us(call: Callable[[], None], calls: int) -> float:
    """Return how many µs a call takes; a tenth as many are made before, which do not count."""
    for _ in range(calls // 10):
        call()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def _sequential(path: str, size: int) -> float:
    """Return how many MB/s of a file are read.

    Raises:
        RuntimeError: it has another size.
    """
    file = os.open(path, os.O_RDONLY)
    began = time.perf_counter()
    read = 0
    while got := len(os.read(file, _CHUNK)):
        read += got
    rate = read / (time.perf_counter() - began) / 1e6
    if read != size:
        raise RuntimeError(f"read {read} of {size} bytes")
    return rate


def _write(path: str, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
    os.chmod(path, 0o644)
