"""Every trial, by its key; the laboratory's guest finds them here, too."""

import shutil

from ..lab.guest import inside
from .configurations import Configuration, general, relays, scaling, worst
from .fastreads import CASES, MICROSECONDS, fast_reads, prepare_fast_reads
from .package import package
from .trial import Trial
from .workloads import (
    OWNERS,
    build,
    latency,
    list_all,
    mab,
    prepare_build,
    prepare_latency,
    prepare_listing,
    prepare_mab,
    prepare_stone,
    stone,
)

DEFINITIONS = 1000


def _worst(quick: bool) -> tuple[Configuration, ...]:
    cases = worst(100 if quick else DEFINITIONS)
    return cases[:7] if quick else cases


def _scaling(_: bool) -> tuple[Configuration, ...]:
    return scaling(OWNERS)


def _general(quick: bool) -> tuple[Configuration, ...]:
    # Behind NFS a build takes minutes; the listings there have as many definitions.
    return general() if quick or inside() else general(1000)


def _relays(quick: bool) -> tuple[Configuration, ...]:
    # The kernel's server cannot export bindfs without an fsid for it.
    return relays(bindfs=not quick and not inside() and shutil.which("bindfs") is not None)


TRIALS = {
    trial.key: trial
    for trial in (
        Trial("build", _general, prepare_build, build, fetch=package),
        Trial("stone", _general, prepare_stone, stone),
        Trial("worst", _worst, prepare_listing, list_all, alone=False),
        Trial("scaling", _scaling, prepare_listing, list_all, alone=False),
        Trial("mab", _relays, prepare_mab, mab),
        Trial("latency", _relays, prepare_latency, latency),
        Trial(
            "fast", lambda _: CASES, prepare_fast_reads, fast_reads, rehearsed=True, mib=64, microseconds=MICROSECONDS
        ),
    )
}
