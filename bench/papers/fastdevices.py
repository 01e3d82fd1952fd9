"""Reading ahead where reads take less than a millisecond: whether it gains there, and what rivals it.

The daemon reads nothing ahead on such devices (docs/prefetch.md), so most users never meet the heuristics of Ellard &
Seltzer. `always` reads ahead on any device, and shows what they miss.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial

from ..peers import mounting
from ..prefetch.experiments import ALWAYS, CURSORS, DEVICE, DISK, OFF, OPTIONS, MountedPlace, ReadWorkload
from ..prefetch.slowdisk import SlowDiskError, fast_disk
from ..prefetch.streams import Read, generate, reordered
from ..workers import undisturbed
from . import claims
from .claims import At, Claim, Sense
from .experiment import Experiment, Judgement, MeasuredSeries, Measurement, RunOnce, Sample, Unavailable
from .fastreads import (
    BLOCK,
    CASES,
    IN_ORDER,
    LARGE_KB,
    MICROSECONDS,
    PATTERNS,
    REORDERED,
    SMALL_KB,
    STRIDES,
    value,
)
from .figures import definitions
from .laboratory import Laboratory
from .testbed import VERSIONS
from .trial import Values

_M = 1 << 20
_SIZE, _QUICK_SIZE = 64 * _M, 2 * _M
_TUNED = f"{OFF}, kernel {LARGE_KB} KiB"

_RANDOM = "random"
_PATTERNS = (IN_ORDER, REORDERED, STRIDES, _RANDOM)
_PEERS = {SMALL_KB: (OFF, CURSORS, ALWAYS), LARGE_KB: (OFF,)}


def _streams(pattern: str, size: int, seed: int, prefix: str) -> list[list[Read]]:
    if pattern == _RANDOM:
        (stream,) = generate("random", size, 4096, seed=seed, prefix=prefix)
        return [stream[: len(stream) // 8]]
    (stream,) = generate("stride" if pattern == STRIDES else "sequential", size, BLOCK, stride=4, prefix=prefix)
    return [reordered(stream, 0.06, seed) if pattern == REORDERED else stream]


def _points(quick: bool) -> list[str]:
    return [REORDERED, STRIDES] if quick else list(_PATTERNS)


@contextlib.contextmanager
def _laboratory(base: str, read_ahead_kb: int, mib: int) -> Iterator[Laboratory]:
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(fast_disk(mib, read_ahead_kb=read_ahead_kb))
        except SlowDiskError as exc:
            raise Unavailable(str(exc)) from exc
        site = MountedPlace(disk.path, {}, None)
        for name in _PEERS[read_ahead_kb]:
            at = os.path.join(base, f"{read_ahead_kb}-{name}")
            with undisturbed():
                os.mkdir(at)
                start = mounting(f"no_root_squash,{OPTIONS[name]}", uid=0)
                site.peers[name] = start(stack, name, disk.path, at)()
        yield Laboratory(site, disk, disk.about)


@contextlib.contextmanager
def _site(quick: bool) -> Iterator[RunOnce]:
    size = _QUICK_SIZE if quick else _SIZE
    with contextlib.ExitStack() as stack:
        with undisturbed():
            base = os.path.realpath(tempfile.mkdtemp(prefix="cloakfs-papers-"))
            stack.callback(shutil.rmtree, base)
        labs = {kb: stack.enter_context(_laboratory(base, kb, 2 * (size >> 20) + 64)) for kb in _PEERS}

        def run_once(point: str, run: int) -> Measurement:
            rates: dict[str, float] = {}
            proof: dict[str, object] = {}
            for kb in (SMALL_KB, LARGE_KB)[:: 1 if run % 2 else -1]:
                case = ReadWorkload(DEVICE, point, DISK, _PEERS[kb], 1, partial(_streams, point, size))
                found, said = labs[kb].rates(case, run)
                rates |= found if kb == SMALL_KB else {_TUNED: found[OFF]}
                proof |= {name if kb == SMALL_KB else f"{name}, {kb} KiB": value for name, value in said.items()}
            names = (OFF, _TUNED, CURSORS, ALWAYS)
            return Measurement(tuple(Sample("ellard-fast", name, point, rates[name]) for name in names), proof)

        yield run_once


def _judge(found: MeasuredSeries) -> Judgement:
    streams = [x for x in found.xs if x != _RANDOM]
    gains = {x: found.ratio(ALWAYS, OFF, x) for x in streams}
    tuned = {x: found.ratio(_TUNED, OFF, x) for x in streams}
    costs = min(found.ratio(CURSORS, OFF, x) for x in found.xs)
    listed = ", ".join(f"{gains[x]:.2f} ({tuned[x]:.2f}) {x}" for x in streams)
    return Judgement.of(
        {
            "the mount loses nothing where it does not read ahead": costs >= 0.95,
            "nor would it gain by reading ahead": max(gains.values()) < 1.1,
        },
        f"Reading ahead always, instead of leaving it to the kernel, gives {listed}; in brackets, what a larger "
        f"read_ahead_kb gives. The least of {CURSORS} / {OFF} is {costs:.2f}.",
    )


# -- behind NFS ----------------------------------------------------------------------------------------

_BEHIND = "ellard-fast-nfs"
_KNFSD = CASES[0].name


def _samples(setting: str, values: Values) -> Iterator[Sample]:
    for name, of in values.items():
        for pattern in PATTERNS:
            for kb in (SMALL_KB, LARGE_KB):
                if (rate := of.get(value(pattern, kb))) is not None:
                    series = name if kb == SMALL_KB else f"{name}, kernel {LARGE_KB} KiB"
                    yield Sample(_BEHIND, series, f"{setting}, {pattern}", rate)


_XS = [f"{setting}, {pattern}" for setting in VERSIONS for pattern in PATTERNS]
_LEAST, _MOST = 0.95, 1.1
_CLAIMS = [
    *(Claim(f"{CURSORS} / {OFF}, {x}", At(CURSORS, x), At(OFF, x), _LEAST, Sense.NO_LESS, bound=True) for x in _XS),
    *(Claim(f"{ALWAYS} / {OFF}, {x}", At(ALWAYS, x), At(OFF, x), _MOST, bound=True) for x in _XS),
]


def _judge_behind(found: MeasuredSeries) -> Judgement:
    verdict = claims.judge(_CLAIMS, found)
    listed = []
    for series, whose in ((_KNFSD, "the server alone"), (OFF, f"cloakfs ({OFF})")):
        tuned = [found.ratio(f"{series}, kernel {LARGE_KB} KiB", series, x) for x in found.xs]
        kept = [
            found.mean(series, x) / found.mean(series, x.replace(REORDERED, IN_ORDER))
            for x in found.xs
            if x.endswith(REORDERED)
        ]
        listed.append(
            f"With {whose}, reordered requests keep {min(kept):.2f} to {max(kept):.2f} of the rate of those in order, "
            f"and a larger read_ahead_kb gives {min(tuned):.2f} to {max(tuned):.2f}."
        )
    return verdict._replace(sentence=" ".join([verdict.sentence, *listed]))


EXPERIMENTS = (
    definitions().experiment(
        "ellard-fast",
        "-nfs",
        [definitions().figure(_BEHIND, judge=_judge_behind, constants={"microseconds": MICROSECONDS})],
        _samples,
    ),
    Experiment(
        key="ellard-fast",
        figures=(
            definitions().figure("ellard-fast", judge=_judge, constants={"small_kb": SMALL_KB, "large_kb": LARGE_KB}),
        ),
        runs=10,
        points=_points,
        site=_site,
        seconds=lambda point, quick: 1.5 if quick else 12.0,
    ),
)
