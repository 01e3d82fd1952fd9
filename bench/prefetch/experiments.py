"""The experiments of Ellard & Seltzer (2003), on real mounts: strides, reordered readers, and fast devices.

In each round, each case runs with all its peers, beginning with another one each time; ratios are taken within a round.
Every round has files of its own, so that no daemon knows them yet.
"""

import contextlib
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..figures import Run
from ..job import Job, JobInputs, Work
from ..peers import BARE, Peer, mounting, place
from ..tree import QUICK
from ..workers import ClientProcesses, WorkError, undisturbed
from . import content
from .live import Files, read_all
from .slowdisk import BPS, IOPS, READ_AHEAD_KB, SlowDisk, device_of, require_disk, slow_disk
from .streams import Read, generate, reordered, sizes

STRIDE, READERS, TABLE, DEVICE = "stride", "readers", "table", "device"
"""Table 1 and Figure 8; Figures 6 and 7; the same with a small table of files; and devices, which the paper lacks."""

SLOW, DISK, MEMORY = "slow disk", "disk", "memory"
"""The places of the files."""

OFF, DEFAULT, SLOWDOWN, CURSORS, ALWAYS = "off", "default", "slowdown", "cursors", "always"
SMALL = 8
"""The number of files that have room in a table as small as the old nfsheur."""
SMALL_DEFAULT, SMALL_SLOWDOWN = (f"{name}, {SMALL} files" for name in (DEFAULT, SLOWDOWN))

OPTIONS = {
    **{name: f"prefetch={name}" for name in (OFF, DEFAULT, SLOWDOWN, CURSORS, ALWAYS)},
    SMALL_DEFAULT: f"prefetch={DEFAULT},prefetch_files={SMALL}",
    SMALL_SLOWDOWN: f"prefetch={SLOWDOWN},prefetch_files={SMALL}",
}
"""The options of each mount."""

FIGURES = {
    "table1": (STRIDE, (BARE, OFF, DEFAULT, CURSORS)),
    "6": (READERS, (ALWAYS, DEFAULT)),
    "7": (READERS, (ALWAYS, SLOWDOWN, DEFAULT)),
    "nfsheur": (TABLE, (SLOWDOWN, DEFAULT, SMALL_SLOWDOWN, SMALL_DEFAULT)),
    "device": (DEVICE, (OFF, CURSORS)),
}
"""The experiment of each figure, and its peers."""

PAPER_SIZE = 256 << 20
PAPER_RUNS = 10


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        runs: the runs of strides and devices.
        reader_runs: the runs of concurrent readers.
        size: bytes of a file.
        reader_size: bytes of all files that are read concurrently, together. This disk takes as long for them as the
            paper's did for 256 MiB, so that the start of each of many readers has no more weight than it had there.
        table_size: the same where the table of files is small, so that nothing is read ahead of many readers.
        block: bytes of each read.
        strides, readers, percent, table_percent: parts of a file, concurrent readers, and how many requests are
            reordered.
        outstanding: the number of concurrent reads of each reader.
        random: the number of random reads on a fast device; a tenth of it on the slow one.
        iops, bps, read_ahead_kb: the properties of the slow disk.
    """

    runs: int = PAPER_RUNS
    reader_runs: int = 2
    size: int = 64 << 20
    reader_size: int = 1 << 30
    table_size: int = 64 << 20
    block: int = 8 << 10
    strides: tuple[int, ...] = (2, 4, 8)
    readers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    percent: tuple[int, ...] = (0, 2, 6, 10)
    table_percent: int = 6
    outstanding: int = 1
    random: int = 5000
    iops: int = IOPS
    bps: int = BPS
    read_ahead_kb: int = READ_AHEAD_KB

    def reductions(self, figures: list[str]) -> list[str]:
        """Return what is smaller than in the paper."""
        reductions = []
        chosen = {FIGURES[figure][0] for figure in figures}
        for setting, size, runs in (
            (STRIDE, self.size, self.runs),
            (READERS, self.reader_size, self.reader_runs),
            (TABLE, self.table_size, self.reader_runs),
        ):
            if setting in chosen and size < PAPER_SIZE:
                reductions.append(f"{setting}: {size / (1 << 20):g} MiB instead of 256 MiB")
            if setting in chosen and runs < PAPER_RUNS:
                reductions.append(f"{setting}: {runs} {'run' if runs == 1 else 'runs'} instead of {PAPER_RUNS}")
        return reductions


QUICK_SCALE = Scale(
    runs=1,
    reader_runs=1,
    size=4 << 20,
    reader_size=4 << 20,
    table_size=4 << 20,
    strides=(2, 8),
    readers=(1, 4),
    percent=(0, 10),
    random=200,
    iops=400,
)
"""Shows only that everything runs."""


@dataclass(frozen=True, slots=True)
class ReadWorkload:
    """One column of a table.

    Attributes:
        setting: STRIDE, READERS, TABLE or DEVICE.
        name: the name of the column.
        place: SLOW, DISK or MEMORY.
        peers: the peers that are measured.
        rounds: how often it is measured.
        streams: makes the streams of the readers from a seed and a prefix for the names of files.
        outstanding: the number of concurrent reads of each reader.
    """

    setting: str
    name: str
    place: str
    peers: tuple[str, ...]
    rounds: int
    streams: Callable[[int, str], list[list[Read]]]
    outstanding: int = 1


def cases(figures: list[str], scale: Scale) -> list[ReadWorkload]:
    """Return the cases that these figures need, each once."""
    peers: dict[str, list[str]] = {}
    for figure in figures:
        setting, names = FIGURES[figure]
        known = peers.setdefault(setting, [])
        known += [name for name in names if name not in known]
    found = []
    for setting, make in ((STRIDE, _strides), (READERS, _readers), (TABLE, _tables), (DEVICE, _devices)):
        if setting in peers:
            found += list(make(tuple(peers[setting]), scale))
    return found


def _strides(peers: tuple[str, ...], scale: Scale) -> Iterator[ReadWorkload]:
    for parts in scale.strides:
        yield ReadWorkload(
            STRIDE,
            stride_case(parts),
            SLOW,
            peers,
            scale.runs,
            partial(_pattern, "stride", scale.size, scale.block, stride=parts),
        )


def _readers(peers: tuple[str, ...], scale: Scale) -> Iterator[ReadWorkload]:
    for percent in scale.percent:
        for readers in scale.readers:
            yield _concurrent(READERS, peers, scale, scale.reader_size, readers, percent)


def _tables(peers: tuple[str, ...], scale: Scale) -> Iterator[ReadWorkload]:
    for readers in scale.readers:
        yield _concurrent(TABLE, peers, scale, scale.table_size, readers, scale.table_percent)


def _concurrent(
    setting: str, peers: tuple[str, ...], scale: Scale, size: int, readers: int, percent: int
) -> ReadWorkload:
    streams = partial(_pattern, "sequential", size, scale.block, readers=readers, percent=percent)
    return ReadWorkload(
        setting, reader_case(readers, percent), SLOW, peers, scale.reader_runs, streams, scale.outstanding
    )


def _devices(peers: tuple[str, ...], scale: Scale) -> Iterator[ReadWorkload]:
    for where in (SLOW, DISK, MEMORY):
        reads = scale.random // 10 if where == SLOW else scale.random
        random = partial(_random, scale.size, reads)
        yield ReadWorkload(DEVICE, f"{where}, random 4K", where, peers, scale.runs, random)
        in_order = partial(_pattern, "sequential", scale.size, scale.block)
        yield ReadWorkload(DEVICE, f"{where}, sequential", where, peers, scale.runs, in_order)


def stride_case(parts: int) -> str:
    """Return the name of a column."""
    return f"s = {parts}"


def reader_case(readers: int, percent: int) -> str:
    """Return the name of a column."""
    return f"{readers} {'reader' if readers == 1 else 'readers'}, {percent} % reordered"


def _pattern(
    pattern: str, size: int, block: int, seed: int, prefix: str, *, stride: int = 2, readers: int = 1, percent: int = 0
) -> list[list[Read]]:
    streams = generate(pattern, size, block, stride=stride, readers=readers, seed=seed, prefix=prefix)
    return [reordered(stream, percent / 100, seed) for stream in streams]


def _random(size: int, reads: int, seed: int, prefix: str) -> list[list[Read]]:
    (stream,) = generate("random", size, 4096, seed=seed, prefix=prefix)
    return [stream[:reads]]


# -- measuring -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MountedPlace:
    """A place with its mounts.

    Attributes:
        tree: where files are made.
        peers: those that read them.
        disk: the throttle; None where there is none.
    """

    tree: str
    peers: dict[str, Peer]
    disk: SlowDisk | None


def measure(
    todo: list[ReadWorkload], scale: Scale, advance: Callable[[str], None], report: Callable[[str], None]
) -> Run:
    """Mount, measure, and leave nothing behind, even when interrupted. The rates are MB/s.

    Args:
        todo: the cases to measure.
        scale: the sizes.
        advance: called with the name of the next step, `length(todo)` times at most.
        report: called with each failure.

    Raises:
        SlowDiskError: no slow disk can be made here.
        RuntimeError, OSError: something cannot be mounted.
    """
    run = Run()
    with contextlib.ExitStack() as stack:
        try:
            sites = set_up(stack, todo, scale, run, advance)
            numbers = iter(range(1 << 30))
            for at in range(max(case.rounds for case in todo)):
                for case in todo:
                    if at < case.rounds:
                        _measure_case(case, at, f"{next(numbers)}-", sites[case.place], run, advance, report)
        finally:
            with undisturbed():
                stack.close()
    return run


def length(todo: list[ReadWorkload]) -> int:
    """Return the number of steps."""
    return 1 + sum(case.rounds * len(case.peers) for case in todo)


def set_up(
    stack: contextlib.ExitStack, todo: list[ReadWorkload], scale: Scale, run: Run, advance: Callable[[str], None]
) -> dict[str, MountedPlace]:
    """Mount all that the cases need, until the stack is closed; `run.about` says what each place is.

    Raises:
        SlowDiskError: no slow disk can be made here.
        RuntimeError, OSError: something cannot be mounted.
    """
    advance("mounting")
    require_disk(tempfile.gettempdir())
    with undisturbed():
        base = os.path.realpath(tempfile.mkdtemp(prefix="cloakfs-prefetch-"))
        stack.callback(os.rmdir, base)
    sites: dict[str, MountedPlace] = {}
    waiting = []
    for where in dict.fromkeys(case.place for case in todo):
        disk = None
        if where == SLOW:
            # Files that were just removed may still be open for a moment.
            mib = 2 * (max(scale.size, scale.reader_size, scale.table_size) >> 20) + 64
            disk = stack.enter_context(
                slow_disk(mib, iops=scale.iops, bps=scale.bps, read_ahead_kb=scale.read_ahead_kb)
            )
            tree = disk.path
        elif where == DISK:
            tree = _directory(stack, base, "disk")
        else:
            with undisturbed():
                tree, _ = place(stack, base, where)
        run.about[where] = disk.about if disk else device_of(tree)
        sites[where] = MountedPlace(tree, {}, disk)
        for name in dict.fromkeys(peer for case in todo if case.place == where for peer in case.peers):
            if name == BARE:
                sites[where].peers[name] = Peer(name, tree, tree, 0)
                continue
            at = _directory(stack, base, f"{where}-{name}".replace(" ", "-").replace(",", ""))
            start = mounting(f"no_root_squash,{OPTIONS[name]}", uid=0)
            with undisturbed():
                waiting.append((sites[where], name, start(stack, name, tree, at)))
    for site, name, wait in waiting:
        with undisturbed():
            peer = wait()
            if site.disk is not None and peer.daemon is not None:
                site.disk.slow_down(peer.daemon)
            site.peers[name] = peer
    return sites


def _directory(stack: contextlib.ExitStack, base: str, name: str) -> str:
    path = os.path.join(base, name)
    with undisturbed():
        os.mkdir(path)
        stack.callback(os.rmdir, path)
    return path


def _measure_case(
    case: ReadWorkload,
    at: int,
    prefix: str,
    site: MountedPlace,
    run: Run,
    advance: Callable[[str], None],
    report: Callable[[str], None],
) -> None:
    rates = run.rates.setdefault(case.setting, {}).setdefault(case.name, {name: [] for name in case.peers})
    streams = case.streams(at, prefix)
    with files_of(site.tree, streams) as names:
        for name in case.peers[at % len(case.peers) :] + case.peers[: at % len(case.peers)]:
            advance(f"run {at + 1}: {case.name}, {name}")
            if name not in rates:
                continue
            try:
                rates[name].append(rate(case, site, name, streams, names))
            except (WorkError, OSError) as exc:
                run.failed.append(f"{case.name}, {name}: {exc}")
                report(run.failed[-1])
                del rates[name]  # its rounds would not match those of the others


@contextlib.contextmanager
def files_of(tree: str, streams: list[list[Read]]) -> Iterator[list[str]]:
    """Make the files that are read, and remove them afterwards; give their names."""
    needed = {name: size for stream in streams for name, size in sizes(stream).items()}
    made: list[str] = []
    try:
        for name, size in needed.items():
            made.append(name)
            content.create(tree, name, size)
        yield made
    finally:
        with undisturbed():
            for name in made:
                path = os.path.join(tree, name)
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(path, 0)  # a process that has it open keeps no disk space
                    os.unlink(path)


def rate(case: ReadWorkload, site: MountedPlace, name: str, streams: list[list[Read]], files: list[str]) -> float:
    """Return the rate in MB/s until the last reader is done, beginning with nothing in memory."""
    for file in files if case.place != MEMORY else ():
        if left := content.drop_pages(os.path.join(site.tree, file)):
            raise WorkError(f"{left} pages of {file} cannot be dropped from memory")
    disk = site.disk if name == BARE else None
    job = partial(_job, streams, files, case.outstanding, disk, name != BARE)
    work = Work(case.name, ".", "", "bytes", make=job)
    with ClientProcesses(work, site.peers[name], QUICK, "", None, os.sched_getaffinity(0)) as workers:
        return workers.go()[1] / 1e6


def _job(
    streams: list[list[Read]], names: list[str], outstanding: int, disk: SlowDisk | None, direct: bool, _: JobInputs
) -> Job:
    """Return the job of a process of its own; for the bare tree, the disk is slow for this process."""
    if disk is not None:
        disk.slow_down(os.getpid())
    files = Files(".", names, direct=direct)
    return Job(lambda: read_all(streams, files, outstanding=outstanding, verified=True).bytes, warm=False)


def about(figures: list[str], scale: Scale) -> dict[str, object]:
    """Return what the figures depend on, except for the devices."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "kernel": platform.release(),
        "CPUs": len(os.sched_getaffinity(0)),
        "cloakfs": importlib.metadata.version("cloakfs"),
        "figures": ", ".join(figures),
        "size": f"{scale.size / (1 << 20):g} MiB; of concurrent readers {scale.reader_size / (1 << 20):g} MiB, "
        f"of those beside a small table {scale.table_size / (1 << 20):g} MiB",
        "block": f"{scale.block / 1024:g} KiB",
        "outstanding reads": scale.outstanding,
        "runs": scale.runs,
        "runs of readers": scale.reader_runs,
        "cache": "cold: emptied before each run, and checked to be empty (mounts are read past their page cache)",
        "reduced": "; ".join(scale.reductions(figures)) or "nothing",
        "load before": round(os.getloadavg()[0], 2),
    }
