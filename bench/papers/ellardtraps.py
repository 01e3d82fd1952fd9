"""Ellard & Seltzer (2003), section 5: how disks, queues and schedulers mislead those who measure, in a model of a disk.

No disk of today can carry these arguments, and the daemon has no part in them: they are simulated, with fixed seeds.
What is of cloakfs in Figures 4 and 5 is the code that decides what to read ahead.
"""

import contextlib
from collections.abc import Callable, Iterator

from cloakfs.prefetch import HEURISTICS, Limits

from ..prefetch.streams import generate, reordered
from .diskmodel import BLOCK, Elevator, FairElevator, Queue, TaggedQueue, files, local_readers, remote_readers
from .experiment import Experiment, Judgement, MeasuredSeries, Measurement, RunOnce, Sample
from .figures import definitions

_M = 1 << 20
_SIZE, _QUICK_SIZE = 256 * _M, 16 * _M
_REMOTE_SIZE, _QUICK_REMOTE_SIZE = 32 * _M, 2 * _M
_WINDOW = 4
_OLD = Limits(files=8, window=256 << 10)

_ELEVATOR, _FAIR, _TAGGED = "elevator", "N-CSCAN", "tagged queue"
_QUEUES: dict[str, Callable[[], Queue]] = {_ELEVATOR: Elevator, _FAIR: FairElevator, _TAGGED: TaggedQueue}

_OUTER, _INNER = "outer", "inner"
_QUARTERS = {_OUTER: 0, _INNER: 3}


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

    def run_once(point: str, run: int) -> Measurement:
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
        return Measurement(tuple(samples), {"what was measured": "simulated time; nothing was read"})

    yield run_once


def _judge_1(found: MeasuredSeries) -> Judgement:
    ratios = [found.ratio(_INNER, _OUTER, x) for x in found.xs]
    return Judgement.of(
        {
            "the innermost quarter has 0.55 to 0.85 of the rate of the outermost": 0.55
            < min(ratios)
            < max(ratios)
            < 0.85
        },
        f"inner / outer is {min(ratios):.2f} to {max(ratios):.2f}, whatever the number of readers: far more than "
        "what a heuristic gains.",
    )


def _judge_2(found: MeasuredSeries) -> Judgement:
    tagged, elevator = f"{_TAGGED} ({_OUTER})", f"{_ELEVATOR} ({_OUTER})"
    alone = found.ratio(tagged, elevator, "1")
    others = max(found.ratio(tagged, elevator, x) for x in found.xs if x != "1")
    kept = min(found.mean(elevator, x) for x in found.xs) / found.mean(elevator, "1")
    return Judgement.of(
        {
            "alone, a reader has as much with tagged queues": alone > 0.9,
            "several readers have less": others < 0.7,
            "without them, many readers have nearly as much as one": kept > 0.85,
        },
        f"tagged queue / elevator is {alone:.2f} for one reader and at most {others:.2f} for several; with the "
        f"elevator, many readers keep {kept:.2f} of the rate of one (the paper: 15 and 27 MB/s, which is 0.56).",
    )


def _judge_3(found: MeasuredSeries) -> Judgement:
    last = str(_PROCESSES)
    spread = {name: found.mean(name, last) / found.mean(name, "1") for name in _QUEUES}
    slowest, fastest = found.mean(_ELEVATOR, last), found.mean(_FAIR, "1")
    return Judgement.of(
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
        definitions().figure("ellard-1", judge=_judge_1),
        definitions().figure("ellard-2", judge=_judge_2),
        definitions().figure("ellard-3", judge=_judge_3),
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

    def run_once(point: str, run: int) -> Measurement:
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
        return Measurement(tuple(samples), {"what was measured": "simulated time; nothing was read"})

    yield run_once


def _zones(found: MeasuredSeries, x: str) -> float:
    return found.ratio(f"{_ELEVATOR} ({_INNER})", f"{_ELEVATOR} ({_OUTER})", x)


def _judge_4(found: MeasuredSeries) -> Judgement:
    name = f"{_ELEVATOR} ({_OUTER})"
    most = found.xs[-1]
    kept = found.mean(name, most) / found.mean(name, "1")
    few = [x for x in found.xs if int(x) <= _OLD.files]
    fits = found.mean(name, few[-1]) / found.mean(name, "1")
    zones = min(_zones(found, x) for x in few)
    tags = min(found.ratio(f"{_TAGGED} ({_OUTER})", name, x) for x in few)
    return Judgement.of(
        {
            "many readers have much less than one": kept < 0.7,
            "the zones are still visible": zones < 0.95,
            "without tagged queues it is faster": tags < 0.97,
        },
        f"{most} readers have {kept:.2f} of the rate of one; {few[-1]}, for which the table has room, {fits:.2f}. With "
        f"up to {_OLD.files}, inner / outer is down to {zones:.2f}, and tagged queue / elevator to {tags:.2f}.",
    )


def _judge_5(found: MeasuredSeries) -> Judgement:
    name = f"{_ELEVATOR} ({_OUTER})"
    fits = [x for x in found.xs if int(x) <= _OLD.files]
    kept = {x: found.mean(name, x) / found.mean(name, "1") for x in found.xs}
    zones = min(_zones(found, x) for x in fits)
    return Judgement.of(
        {
            "as long as the table has room, the rate is nearly constant": min(kept[x] for x in fits) > 0.7,
            "with more readers than it has room for, too": min(kept.values()) > 0.7,
            "the zones are still visible": zones < 0.95,
        },
        f"Compared with one reader, up to {_OLD.files} readers have at least {min(kept[x] for x in fits):.2f}, and "
        f"more {min(kept.values()):.2f}; inner / outer is down to {zones:.2f}.",
    )


REMOTE = Experiment(
    key="ellard-remote",
    figures=(
        definitions().figure("ellard-4", judge=_judge_4),
        definitions().figure("ellard-5", judge=_judge_5),
    ),
    runs=3,
    points=_numbers,
    site=_remote_site,
    seconds=lambda point, quick: 0.6 if quick else 5.0,
)

EXPERIMENTS = (LOCAL, REMOTE)
