"""Ellard & Seltzer, "NFS Tricks and Benchmarking Traps" (2003), sections 6 to 8: what reading ahead gains.

Everything is measured on real mounts of a slow disk. Simulations of the sections before are in `ellardtraps`.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial

from cloakfs.prefetch import HEURISTICS, Limits

from ..peers import BARE
from ..prefetch.experiments import (
    ALWAYS,
    CURSORS,
    DEFAULT,
    OFF,
    READERS,
    SLOW,
    SLOWDOWN,
    SMALL,
    SMALL_DEFAULT,
    SMALL_SLOWDOWN,
    STRIDE,
    ReadWorkload,
    Scale,
)
from ..prefetch.replay import replay
from ..prefetch.streams import Read, generate, merged, reordered
from .experiment import Experiment, Figure, Judge, Judgement, MeasuredSeries, Measurement, RunOnce, Sample
from .figures import definitions
from .laboratory import BPS, IOPS, Meddlers, infinite_loops, laboratory, pin

_M = 1 << 20
_SIZE, _QUICK_SIZE = 256 * _M, 4 * _M
_BLOCK = 8192
_IDLE, _BUSY = "idle", "busy"
_PERCENT = {_IDLE: 6, _BUSY: 10}
"""How many requests are reordered: as many as the paper saw at most on its idle client; and "more than 10 %"."""
_LOOPS = 4


def _scale(*, quick: bool) -> Scale:
    size = _QUICK_SIZE if quick else _SIZE
    return Scale(size=size, reader_size=size, table_size=size, iops=IOPS, bps=BPS)


def _streams(
    pattern: str, size: int, seed: int, prefix: str, *, stride: int = 2, readers: int = 1, percent: int = 0
) -> list[list[Read]]:
    streams = generate(pattern, size, _BLOCK, stride=stride, readers=readers, seed=seed, prefix=prefix)
    return [reordered(stream, percent / 100, seed) for stream in streams]


_CONSTANTS = {
    "iops": IOPS,
    "mbps": BPS // 1_000_000,
    "small": SMALL,
    "idle_percent": _PERCENT[_IDLE],
    "busy_percent": _PERCENT[_BUSY],
}


def _figure(key: str, judge: Judge, **constants: int) -> Figure:
    return definitions().figure(key, judge=judge, constants={**_CONSTANTS, **constants})


def _size(*, quick: bool) -> int:
    return _QUICK_SIZE if quick else _SIZE


# -- Figures 6 and 7 -----------------------------------------------------------------------------------

_OLD, _NEW = "old table", "new table"
_NAMES = {
    ALWAYS: ALWAYS,
    DEFAULT: f"{DEFAULT}, {_NEW}",
    SLOWDOWN: f"{SLOWDOWN}, {_NEW}",
    SMALL_DEFAULT: f"{DEFAULT}, {_OLD}",
    SMALL_SLOWDOWN: f"{SLOWDOWN}, {_OLD}",
}
"""What the peers of Figure 7 are called."""

_CLIENTS = {
    _IDLE: (ALWAYS, DEFAULT, SLOWDOWN, SMALL_DEFAULT, SMALL_SLOWDOWN),
    _BUSY: (ALWAYS, SMALL_DEFAULT),
}


def _reader_points(quick: bool) -> list[str]:
    numbers = (1, 16) if quick else (1, 2, 4, 8, 16, 32)
    return [f"{client} {number}" for client in _CLIENTS for number in numbers]


def _reader_case(point: str, *, quick: bool) -> ReadWorkload:
    client, number = point.split()
    streams = partial(_streams, "sequential", _size(quick=quick), readers=int(number), percent=_PERCENT[client])
    return ReadWorkload(READERS, point, SLOW, _CLIENTS[client], 1, streams)


@contextlib.contextmanager
def _reader_site(quick: bool) -> Iterator[RunOnce]:
    cases = {point: _reader_case(point, quick=quick) for point in _reader_points(quick)}
    with laboratory(list(cases.values()), _scale(quick=quick)) as lab, pin(lab.site):

        def run_once(point: str, run: int) -> Measurement:
            client, number = point.split()
            with infinite_loops(_LOOPS if client == _BUSY else 0):
                rates, proof = lab.rates(cases[point], run)
            samples = [
                Sample("ellard-6", f"{peer} ({client})", number, rates[name])
                for name, peer in ((ALWAYS, ALWAYS), (SMALL_DEFAULT, DEFAULT))
            ]
            if client == _IDLE:
                samples += [Sample("ellard-7", _NAMES[name], number, value) for name, value in rates.items()]
            return Measurement(tuple(samples), proof)

        yield run_once


def _reader_seconds(point: str, quick: bool) -> float:
    client, number = point.split()
    one = _size(quick=quick) / BPS
    crowded = 3.0 if int(number) > SMALL else 1.0
    small = sum(1 for name in _CLIENTS[client] if name in (SMALL_DEFAULT, SMALL_SLOWDOWN))
    return 1 + one * (len(_CLIENTS[client]) - small + small * crowded)


def _many(found: MeasuredSeries) -> list[str]:
    """Return the numbers of readers that the old table has no room for."""
    many = [x for x in found.xs if int(x) > SMALL]
    if not many:
        raise LookupError(f"more than {SMALL} readers")
    return many


def _mean_ratio(found: MeasuredSeries, name: str, to: str, xs: list[str]) -> float:
    return statistics.fmean(found.ratio(name, to, x) for x in xs)


def _judge_6(found: MeasuredSeries) -> Judgement:
    many = _many(found)
    few = [x for x in found.xs if int(x) <= SMALL]
    idle = _mean_ratio(found, f"{DEFAULT} ({_IDLE})", f"{ALWAYS} ({_IDLE})", many)
    before = _mean_ratio(found, f"{DEFAULT} ({_IDLE})", f"{ALWAYS} ({_IDLE})", few)
    busy = _mean_ratio(found, f"{DEFAULT} ({_BUSY})", f"{ALWAYS} ({_BUSY})", many)
    return Judgement.of(
        {
            "many readers fall behind": idle < 0.9,
            "few readers do not fall behind as much": before > idle,
            "the gap is smaller when the client is busy": busy > idle,
        },
        f"default / always is {before:.2f} with up to {SMALL} readers and {idle:.2f} with more; "
        f"{busy:.2f} when the client is busy.",
    )


def _judge_7(found: MeasuredSeries) -> Judgement:
    many = _many(found)
    every = found.xs
    old = _mean_ratio(found, _NAMES[SMALL_DEFAULT], ALWAYS, many)
    new = min(found.ratio(_NAMES[DEFAULT], ALWAYS, x) for x in every)
    slow = min(found.ratio(_NAMES[SLOWDOWN], ALWAYS, x) for x in every)
    further = _mean_ratio(found, _NAMES[SLOWDOWN], _NAMES[DEFAULT], every)
    return Judgement.of(
        {
            "a large table gains much for many readers": old < 0.9 * new,
            "SlowDown with a large table is as fast as always": slow >= 0.95,
            "so is the default with a large table": new >= 0.95,
            "SlowDown makes no further improvement": further < 1.03,
        },
        f"Beside always, the default has {old:.2f} with the small table and many readers, and with the large one at "
        f"least {new:.2f}; SlowDown at least {slow:.2f}. With the large one, SlowDown / default is {further:.2f}.",
    )


READERS_EXPERIMENT = Experiment(
    key="ellard-readers",
    figures=(
        _figure("ellard-6", _judge_6),
        _figure("ellard-7", _judge_7),
    ),
    runs=10,
    points=_reader_points,
    site=_reader_site,
    seconds=_reader_seconds,
)


# -- Table 1 and Figure 8 ------------------------------------------------------------------------------

_STRIDE_PEERS = (DEFAULT, CURSORS, BARE)


def _stride_points(quick: bool) -> list[str]:
    return ["2", "8"] if quick else ["2", "4", "8"]


@contextlib.contextmanager
def _stride_site(quick: bool) -> Iterator[RunOnce]:
    cases = {
        point: ReadWorkload(
            STRIDE,
            point,
            SLOW,
            _STRIDE_PEERS,
            1,
            partial(_streams, "stride", _size(quick=quick), stride=int(point)),
        )
        for point in _stride_points(quick)
    }
    with laboratory(list(cases.values()), _scale(quick=quick)) as lab:

        def run_once(point: str, run: int) -> Measurement:
            rates, proof = lab.rates(cases[point], run)
            return Measurement(
                tuple(Sample("ellard-table1", name, point, value) for name, value in rates.items()), proof
            )

        yield run_once


def _judge_strides(found: MeasuredSeries) -> Judgement:
    ratios = {x: found.ratio(CURSORS, DEFAULT, x) for x in found.xs}
    shown = ", ".join(f"{ratio:.2f} with {x} strides" for x, ratio in ratios.items())
    return Judgement.of(
        {f"half as fast again with {x} strides": ratio >= 1.5 for x, ratio in ratios.items()},
        f"cursors / default is {shown}; the paper has 1.5 to 2.4.",
    )


STRIDES_EXPERIMENT = Experiment(
    key="ellard-strides",
    figures=(_figure("ellard-table1", _judge_strides),),
    runs=10,
    points=_stride_points,
    site=_stride_site,
    seconds=lambda point, quick: 1 + _size(quick=quick) * (2 / 14e6 + 1 / 50e6),
)


# -- section 8: metadata and writes beside the readers -------------------------------------------------

_MIX_PEERS = (OFF, DEFAULT, SLOWDOWN, CURSORS, ALWAYS)
_MIX_READERS = 8


def _mix_points(quick: bool) -> list[str]:
    return ["0", "4"] if quick else ["0", "1", "4"]


@contextlib.contextmanager
def _mix_site(quick: bool) -> Iterator[RunOnce]:
    streams = partial(_streams, "sequential", _size(quick=quick), readers=_MIX_READERS, percent=_PERCENT[_IDLE])
    cases = {point: ReadWorkload(READERS, point, SLOW, _MIX_PEERS, 1, streams) for point in _mix_points(quick)}
    with laboratory(list(cases.values()), _scale(quick=quick)) as lab:

        def run_once(point: str, run: int) -> Measurement:
            case = cases[point]
            meddlers = Meddlers(int(point))
            beside: Callable[[str], contextlib.AbstractContextManager[object]] = (
                meddlers if meddlers.number else contextlib.nullcontext
            )
            rates, proof = lab.rates(case, run, beside)
            samples = [Sample("ellard-mix", name, point, value) for name, value in rates.items()]
            first = run % len(_MIX_PEERS)  # as in Laboratory.rates
            order = (*_MIX_PEERS[first:], *_MIX_PEERS[:first])
            samples += [
                Sample("ellard-mix-changes", name, point, value)
                for name, value in zip(order, meddlers.rates, strict=bool(meddlers.number))
            ]
            return Measurement(tuple(samples), proof)

        yield run_once


def _judge_mix(found: MeasuredSeries) -> Judgement:
    busy = [x for x in found.xs if x != "0"]
    against = {name: min(found.ratio(name, ALWAYS, x) for x in busy) for name in (CURSORS, SLOWDOWN, DEFAULT)}
    gain = min(found.ratio(CURSORS, OFF, x) for x in busy)
    return Judgement.of(
        {
            "cursors are as fast as always": against[CURSORS] >= 0.95,
            "so is SlowDown": against[SLOWDOWN] >= 0.95,
            "reading ahead gains": gain >= 1.05,
        },
        "Beside metadata and writes, and always reading ahead as 1, cursors have at least "
        f"{against[CURSORS]:.2f}, SlowDown {against[SLOWDOWN]:.2f} and the default {against[DEFAULT]:.2f}; "
        f"cursors / off is at least {gain:.2f}.",
    )


def _judge_changes(found: MeasuredSeries) -> Judgement:
    least = {name: min(found.ratio(name, OFF, x) for x in found.xs) for name in (CURSORS, SLOWDOWN, DEFAULT)}
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in least.items())
    return Judgement.of(
        {f"{name} costs others less than a tenth": ratio >= 0.9 for name, ratio in least.items()},
        f"Operations per second beside those without any reading ahead, at least: {shown}.",
    )


MIX_EXPERIMENT = Experiment(
    key="ellard-mixed",
    figures=(
        _figure("ellard-mix", _judge_mix, mix_readers=_MIX_READERS),
        _figure("ellard-mix-changes", _judge_changes, mix_readers=_MIX_READERS),
    ),
    runs=10,
    points=_mix_points,
    site=_mix_site,
    seconds=lambda point, quick: 1 + len(_MIX_PEERS) * _size(quick=quick) / 45e6,
)

# -- section 6.3: the size of the table ----------------------------------------------------------------

_TABLE, _QUICK_TABLE = Limits().files, 64
_TURNS = 17
"""The number of reads of each file."""


def _table_points(quick: bool) -> list[str]:
    return ["64", "65", "96"] if quick else ["3072", "4096", "4097", "5120", "8192"]


@contextlib.contextmanager
def _table_site(quick: bool) -> Iterator[RunOnce]:
    files = _QUICK_TABLE if quick else _TABLE

    def run_once(point: str, _run: int) -> Measurement:
        number = int(point)
        streams = generate("sequential", number * _TURNS * _BLOCK, _BLOCK, readers=number)
        in_turn = merged(streams)
        samples = []
        for name in (DEFAULT, CURSORS):
            found = replay(in_turn, HEURISTICS[name], Limits(files=files, cursors=files))
            hits = 100 * (1 - found.misses / found.requests)
            samples.append(Sample("ellard-nfsheur", name, point, hits))
        return Measurement(tuple(samples), {"files that the table has room for": files})

    yield run_once


def _judge_table(found: MeasuredSeries) -> Judgement:
    size = _TABLE if str(_TABLE) in found.xs else _QUICK_TABLE
    fits, over = str(size), str(size + 1)
    paper = found.mean(DEFAULT, over)
    ours = {x: found.mean(CURSORS, x) for x in found.xs}
    shown = ", ".join(f"{share:.0f} % with {x} files" for x, share in ours.items())
    return Judgement.of(
        {
            "the table of the paper fails with one file too many": paper < 0.1 * found.mean(DEFAULT, fits),
            "that of cloakfs does not": ours[over] > 0.9 * ours[fits],
        },
        f"With room for {size} files, the least recently used one giving way, {paper:.0f} % of the reads find their "
        f"data with one file more; with cloakfs it is {shown}.",
    )


TABLE_EXPERIMENT = Experiment(
    key="ellard-nfsheur",
    figures=(_figure("ellard-nfsheur", _judge_table, turns=_TURNS),),
    runs=1,
    points=_table_points,
    site=_table_site,
    seconds=lambda point, quick: int(point) * _TURNS * 3e-4,
    same=True,
)

EXPERIMENTS = (READERS_EXPERIMENT, TABLE_EXPERIMENT, STRIDES_EXPERIMENT, MIX_EXPERIMENT)
