"""Reading from a fast disk behind NFS: what the server's kernel reads ahead by itself, and what the daemon adds."""

import os
import shutil
from functools import partial

from ..prefetch import content
from ..prefetch.experiments import ALWAYS, CURSORS, OFF, OPTIONS
from ..prefetch.live import Files, read_all
from ..prefetch.streams import Read, generate, reordered
from .configurations import BARE, NULL, Configuration
from .processes import done_as
from .testbed import drop_caches, kib_read
from .trial import Spot
from .workloads import COLD_KIB

MICROSECONDS = 100
"""What the disk takes for each command."""

_SIZE, _QUICK_SIZE = 16 << 20, 1 << 20
BLOCK = 8192
SMALL_KB, LARGE_KB = 128, 2048
"""read_ahead_kb: Linux's default, and the rival."""

BUFFERED, IN_ORDER, REORDERED, STRIDES = "buffered", "in order", "6 % reordered", "4 strides"
PATTERNS = (BUFFERED, IN_ORDER, REORDERED, STRIDES)
"""The first is read through the client's page cache, which reads ahead, too; the others send each READ as it is."""

_READERS = 4
"""How many READs of a reader the server has at any time."""

CASES = (
    Configuration("knfsd", BARE),
    *(Configuration(name, f"{NULL},{OPTIONS[name]}") for name in (OFF, CURSORS, ALWAYS)),
)
_TUNED = (BARE, CASES[1].options)
"""Those that are measured with LARGE_KB, too."""


def value(pattern: str, read_ahead_kb: int) -> str:
    """Return the name of a value: the MB/s of a pattern with this read_ahead_kb."""
    return f"{pattern}, {read_ahead_kb} KiB"


_CONTENT = "content"


def prepare_fast_reads(tree: str, quick: bool) -> None:
    """Make what the files are copies of."""
    content.create(tree, _CONTENT, _QUICK_SIZE if quick else _SIZE)


def fast_reads(spot: Spot) -> dict[str, float]:
    """Read a new file in each of the patterns, with cold caches: MB/s, and the least KiB from the device."""
    values: dict[str, float] = {}
    kib: list[float] = []
    for read_ahead_kb in (SMALL_KB, LARGE_KB)[: 2 if spot.case.options in _TUNED else 1]:
        _set_read_ahead(spot.real, read_ahead_kb)
        for number, pattern in enumerate(PATTERNS):
            # The kernel and the daemon keep state of files: how much is to be read ahead of each.
            name = f"file-{spot.case.name}-{spot.run}-{read_ahead_kb}-{number}"
            path = shutil.copyfile(os.path.join(spot.real, _CONTENT), os.path.join(spot.real, name))
            try:
                os.chmod(path, 0o644)
                drop_caches(spot.real)
                before = kib_read(spot.real)
                read = partial(_read, _stream(pattern, name, os.path.getsize(path), spot.run), pattern != BUFFERED)
                values[value(pattern, read_ahead_kb)] = done_as(spot.case, spot.path, read)
                kib.append(kib_read(spot.real) - before)
            finally:
                os.unlink(path)
    return values | {COLD_KIB: min(kib)}


def _stream(pattern: str, name: str, size: int, seed: int) -> list[Read]:
    (stream,) = generate("stride" if pattern == STRIDES else "sequential", size, BLOCK, stride=4)
    stream = [read._replace(file=name) for read in stream]
    return reordered(stream, 0.06, seed) if pattern == REORDERED else stream


def _read(stream: list[Read], direct: bool) -> float:
    with Files(".", [stream[0].file], direct=direct) as files:
        if files.direct != direct:
            raise RuntimeError("the client has no O_DIRECT")
        found = read_all([stream], files, outstanding=_READERS if direct else 1)
    if found.bytes != sum(read.length for read in stream):
        raise RuntimeError(f"read {found.bytes} bytes")
    return found.rate


def _set_read_ahead(tree: str, kb: int) -> None:
    number = os.stat(tree).st_dev
    setting = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/queue/read_ahead_kb"
    with open(setting, "w", encoding="ascii") as file:
        file.write(f"{kb}\n")
