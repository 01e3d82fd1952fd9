"""Ellard & Seltzer (2003), section 5: how disks, queues and schedulers mislead those who measure, in a model of a disk.

No disk of today can carry these arguments, and the daemon has no part in them: they are simulated, with fixed seeds.
What is of cloakfs in Figures 4 and 5 is the code that decides what to read ahead.
"""

import contextlib
from collections.abc import Callable, Iterator

from cloakfs.prefetch import HEURISTICS, Limits

from ..prefetch.streams import generate, reordered
from .diskmodel import BLOCK, Elevator, FairElevator, Queue, TaggedQueue, files, local_readers, remote_readers
from .ellard import PAPER
from .experiment import Experiment, Figure, Measured, Outcome, RunOnce, Sample, Verdict, printed

_M = 1 << 20
_SIZE, _QUICK_SIZE = 256 * _M, 16 * _M
_REMOTE_SIZE, _QUICK_REMOTE_SIZE = 32 * _M, 2 * _M
_WINDOW = 4
_OLD = Limits(files=8, window=256 << 10)

_ELEVATOR, _FAIR, _TAGGED = "elevator", "N-CSCAN", "tagged queue"
_QUEUES: dict[str, Callable[[], Queue]] = {_ELEVATOR: Elevator, _FAIR: FairElevator, _TAGGED: TaggedQueue}

_OUTER, _INNER = "outer", "inner"
_QUARTERS = {_OUTER: 0, _INNER: 3}

_OURS = "model"

_MODEL = (
    "**Simulated**: a model of a disk, in simulated time. It has zones (42 to 28 MB/s), seeks of 1.5 to 15.5 ms, 7,200 "
    "rotations per minute, and four requests of 64 KiB of each process at any time. "
)
_UNKNOWN = (
    "What the disk does with a tagged queue is its maker's secret; in the model, requests that came first are served "
    "first. "
)


def _numbers(quick: bool) -> list[str]:
    return ["1", "8"] if quick else ["1", "2", "4", "8", "16", "32"]


# -- Figures 1 to 3 ------------------------------------------------------------------------------------

_SPREAD = "spread"
_PROCESSES = 8


def _local_points(quick: bool) -> list[str]:
    return [*_numbers(quick), _SPREAD]


def _local_rate(number: int, size: int, zone: str, queue: str, run: int) -> float:
    """Return the MB/s of so many processes, until the last is done."""
    read = files(number, size, _QUARTERS[zone])
    ends = local_readers(read, _QUEUES[queue](), window=_WINDOW, seed=run)
    return sum(file.size for file in read) / max(ends) / 1e6


@contextlib.contextmanager
def _local_site(quick: bool) -> Iterator[RunOnce]:
    size = _QUICK_SIZE if quick else _SIZE

    def run_once(point: str, run: int) -> Outcome:
        samples = []
        if point == _SPREAD:
            for name, queue in _QUEUES.items():
                read = files(_PROCESSES, size, 0)
                ends = sorted(local_readers(read, queue(), window=_WINDOW, seed=run))
                samples += [Sample("ellard-3", name, str(at), end) for at, end in enumerate(ends, 1)]
        else:
            number = int(point)
            for zone in _QUARTERS:
                rate = _local_rate(number, size, zone, _ELEVATOR, run)
                samples.append(Sample("ellard-1", zone, point, rate))
                samples.append(Sample("ellard-2", f"{_ELEVATOR} ({zone})", point, rate))
                tagged = _local_rate(number, size, zone, _TAGGED, run)
                samples.append(Sample("ellard-2", f"{_TAGGED} ({zone})", point, tagged))
        return Outcome(tuple(samples), {"what was measured": "simulated time; nothing was read"})

    yield run_once


def _judge_1(found: Measured) -> Verdict:
    ratios = [found.ratio(_INNER, _OUTER, x) for x in found.xs]
    return Verdict.of(
        {
            "the innermost quarter has 0.55 to 0.85 of the rate of the outermost": 0.55
            < min(ratios)
            < max(ratios)
            < 0.85
        },
        f"inner / outer is {min(ratios):.2f} to {max(ratios):.2f}, whatever the number of readers: far more than "
        "what a heuristic gains.",
    )


def _judge_2(found: Measured) -> Verdict:
    tagged, elevator = f"{_TAGGED} ({_OUTER})", f"{_ELEVATOR} ({_OUTER})"
    alone = found.ratio(tagged, elevator, "1")
    others = max(found.ratio(tagged, elevator, x) for x in found.xs if x != "1")
    kept = min(found.mean(elevator, x) for x in found.xs) / found.mean(elevator, "1")
    return Verdict.of(
        {
            "alone, a reader has as much with tagged queues": alone > 0.9,
            "several readers have less": others < 0.7,
            "without them, many readers have nearly as much as one": kept > 0.85,
        },
        f"tagged queue / elevator is {alone:.2f} for one reader and at most {others:.2f} for several; with the "
        f"elevator, many readers keep {kept:.2f} of the rate of one (the paper: 15 and 27 MB/s, which is 0.56).",
    )


def _judge_3(found: Measured) -> Verdict:
    last = str(_PROCESSES)
    spread = {name: found.mean(name, last) / found.mean(name, "1") for name in _QUEUES}
    slowest, fastest = found.mean(_ELEVATOR, last), found.mean(_FAIR, "1")
    return Verdict.of(
        {
            "with the elevator, the last takes more than five times as long as the first": spread[_ELEVATOR] > 5,
            "with N-CSCAN, less than 1.2 times": spread[_FAIR] < 1.2,
            "the slowest with the elevator is faster than the fastest with N-CSCAN": slowest < fastest,
            "the tagged queue is no less fair than N-CSCAN": spread[_TAGGED] < 1.2,
            "and slower": found.mean(_TAGGED, last) > found.mean(_FAIR, last),
        },
        f"last / first is {spread[_ELEVATOR]:.1f} with the elevator, {spread[_FAIR]:.2f} with N-CSCAN and "
        f"{spread[_TAGGED]:.2f} with the tagged queue; the elevator's slowest needs {slowest / fastest:.2f} of the "
        "time of N-CSCAN's fastest (the paper: about a half).",
    )


LOCAL = Experiment(
    key="ellard-disk",
    figures=(
        Figure(
            key="ellard-1",
            paper=PAPER,
            place="Figure 1",
            title="zones of the disk (ZCAV)",
            claim="The innermost quarter of a disk is much slower than the outermost, whatever reads it.",
            unit="MB/s",
            x_label="concurrent readers",
            differs=_MODEL,
            criterion="inner / outer is between 0.55 and 0.85 (the paper: typically 2:3) for any number of readers.",
            judge=_judge_1,
            paper_note="The paper has only a picture.",
            baseline=_OUTER,
            log_x=True,
            ours=_OURS,
        ),
        Figure(
            key="ellard-2",
            paper=PAPER,
            place="Figure 2",
            title="tagged command queues",
            claim=(
                "With tagged queues, one reader is as fast as without, but several are much slower; without them the "
                "rate hardly falls."
            ),
            unit="MB/s",
            x_label="concurrent readers",
            differs=_MODEL + _UNKNOWN,
            criterion=(
                "tagged queue / elevator, outer zone, is above 0.9 for one reader and below 0.7 for several; with the "
                "elevator, no number of readers has less than 0.85 of the rate of one."
            ),
            judge=_judge_2,
            paper_values=(
                printed(f"{_ELEVATOR} ({_OUTER})", {"32": 27.0}),
                printed(f"{_TAGGED} ({_OUTER})", {"32": 15.0}),
            ),
            paper_note=(
                "From the text: scsi1 levels off just above 15 MB/s, and barely dips below 27 MB/s without tagged "
                "queues. The rest is a picture."
            ),
            baseline=_ELEVATOR,
            log_x=True,
            ours=_OURS,
        ),
        Figure(
            key="ellard-3",
            paper=PAPER,
            place="Figure 3",
            title="disk scheduling, and when each of eight processes is done",
            claim=(
                "With the elevator, the last of eight processes takes six to seven times as long as the first; with "
                "N-CSCAN all take nearly as long, and longer than the elevator's slowest; the tagged queue is fairer "
                "still, and slower."
            ),
            unit="seconds",
            x_label="processes that are done",
            differs=_MODEL + _UNKNOWN,
            criterion=(
                "Last / first is above 5 with the elevator and below 1.2 with N-CSCAN and the tagged queue; the "
                "elevator's last is before N-CSCAN's first; the tagged queue's last is after N-CSCAN's."
            ),
            judge=_judge_3,
            paper_values=(
                printed(_ELEVATOR, {"1": 1.04, "2": 1.98, "3": 2.94, "8": 5.97}),
                printed(f"{_ELEVATOR} (scsi1)", {"1": 1.18, "8": 8.54}),
            ),
            paper_note="From the text: ide1, and scsi1 without tagged queues. The rest is a picture.",
            ours=_OURS,
        ),
    ),
    runs=10,
    points=_local_points,
    site=_local_site,
    seconds=lambda point, quick: 0.1 if quick else 1.0,
    quick_runs=2,
)


# -- Figures 4 and 5 -----------------------------------------------------------------------------------

_TRANSPORTS = {"ellard-4": 6, "ellard-5": 2}
"""How many requests are reordered: as many as the paper saw at most with UDP, and with TCP."""


@contextlib.contextmanager
def _remote_site(quick: bool) -> Iterator[RunOnce]:
    size = _QUICK_REMOTE_SIZE if quick else _REMOTE_SIZE

    def run_once(point: str, run: int) -> Outcome:
        samples = []
        for figure, percent in _TRANSPORTS.items():
            for zone, quarter in _QUARTERS.items():
                for name in (_ELEVATOR, _TAGGED):
                    read = files(int(point), size, quarter)
                    total = sum(file.size for file in read)
                    in_order = generate("sequential", total, BLOCK, readers=len(read))
                    streams = [reordered(stream, percent / 100, run) for stream in in_order]
                    ends = remote_readers(read, _QUEUES[name](), streams, HEURISTICS["default"], _OLD, seed=run)
                    samples.append(Sample(figure, f"{name} ({zone})", point, total / max(ends) / 1e6))
        return Outcome(tuple(samples), {"what was measured": "simulated time; nothing was read"})

    yield run_once


def _zones(found: Measured, x: str) -> float:
    return found.ratio(f"{_ELEVATOR} ({_INNER})", f"{_ELEVATOR} ({_OUTER})", x)


def _judge_4(found: Measured) -> Verdict:
    name = f"{_ELEVATOR} ({_OUTER})"
    most = found.xs[-1]
    kept = found.mean(name, most) / found.mean(name, "1")
    few = [x for x in found.xs if int(x) <= _OLD.files]
    fits = found.mean(name, few[-1]) / found.mean(name, "1")
    zones = min(_zones(found, x) for x in few)
    tags = min(found.ratio(f"{_TAGGED} ({_OUTER})", name, x) for x in few)
    return Verdict.of(
        {
            "many readers have much less than one": kept < 0.7,
            "the zones are still visible": zones < 0.95,
            "without tagged queues it is faster": tags < 0.97,
        },
        f"{most} readers have {kept:.2f} of the rate of one; {few[-1]}, for which the table has room, {fits:.2f}. With "
        f"up to {_OLD.files}, inner / outer is down to {zones:.2f}, and tagged queue / elevator to {tags:.2f}.",
    )


def _judge_5(found: Measured) -> Verdict:
    name = f"{_ELEVATOR} ({_OUTER})"
    fits = [x for x in found.xs if int(x) <= _OLD.files]
    kept = {x: found.mean(name, x) / found.mean(name, "1") for x in found.xs}
    zones = min(_zones(found, x) for x in fits)
    return Verdict.of(
        {
            "as long as the table has room, the rate is nearly constant": min(kept[x] for x in fits) > 0.7,
            "with more readers than it has room for, too": min(kept.values()) > 0.7,
            "the zones are still visible": zones < 0.95,
        },
        f"Compared with one reader, up to {_OLD.files} readers have at least {min(kept[x] for x in fits):.2f}, and "
        f"more {min(kept.values()):.2f}; inner / outer is down to {zones:.2f}.",
    )


_REMOTE = (
    _MODEL + _UNKNOWN + "Above it a server that reads ahead by the code of cloakfs (`default`, a table of 8 files, at "
    "most 256 KiB ahead), and a network of 49 MB/s and 0.3 ms for each call; each reader has one call at a time. "
)

REMOTE = Experiment(
    key="ellard-remote",
    figures=(
        Figure(
            key="ellard-4",
            paper=PAPER,
            place="Figure 4",
            title="NFS over UDP, with and without tagged queues",
            claim="The rate falls quickly as there are more readers; zones and tagged queues are still visible.",
            unit="MB/s",
            x_label="concurrent readers",
            differs=_REMOTE + "UDP is only that 6 % of the requests are reordered.",
            criterion=(
                "The most readers have less than 0.7 of the rate of one; with at most 8, inner / outer is below 0.95 "
                "and tagged queue / elevator below 0.97 somewhere."
            ),
            judge=_judge_4,
            paper_note="The paper has only a picture.",
            baseline=_ELEVATOR,
            log_x=True,
            ours=_OURS,
        ),
        Figure(
            key="ellard-5",
            paper=PAPER,
            place="Figure 5",
            title="NFS over TCP, with and without tagged queues",
            claim="Compared to UDP, the rate is relatively constant as there are more readers.",
            unit="MB/s",
            x_label="concurrent readers",
            differs=(
                _REMOTE + "TCP is only that 2 % of the requests are reordered: the model has no flow control, to which "
                "the paper owes much of the difference, and its table of files fails whatever the transport."
            ),
            criterion=(
                "No number of readers has less than 0.7 of the rate of one; inner / outer is below 0.95 somewhere."
            ),
            judge=_judge_5,
            why="The table of files has no room for more readers, and that costs as much over TCP as over UDP.",
            paper_note="The paper has only a picture.",
            baseline=_ELEVATOR,
            log_x=True,
            ours=_OURS,
        ),
    ),
    runs=3,
    points=_numbers,
    site=_remote_site,
    seconds=lambda point, quick: 0.6 if quick else 5.0,
)

EXPERIMENTS = (LOCAL, REMOTE)
