"""From a trial to an experiment: where it is done, and which samples its values give."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from .experiment import Experiment, Figure, Measurement, RunOnce, Sample
from .guest import behind_nfs
from .testbed import LOCAL, VERSIONS, local
from .trial import Gather, Trial, Values, gathering
from .workloads import COLD_KIB, HOT_KIB

SETTINGS = {"": (LOCAL,), "-nfs": tuple(VERSIONS)}
"""By what is added to the keys of figures and experiments: the settings that are measured together."""

Samples = Callable[[str, Values], Iterable[Sample]]
"""setting, values -> the samples of all figures."""


def experiment(
    suffix: str,
    trial: Trial,
    name: str,
    figures: tuple[Figure, ...],
    runs: int,
    samples: Samples,
    seconds: tuple[float, float],
    *,
    quick: bool = True,
) -> Experiment:
    """Return the experiment that does a trial, in the settings of the suffix.

    Args:
        suffix: of SETTINGS.
        trial: what is done.
        name: of the experiment, without the suffix.
        figures: those of the settings that the samples are for.
        runs: how often.
        samples: makes samples of the values.
        seconds: how long a run may take, and with `--quick`.
        quick: whether it is done with `--quick` at all.
    """
    settings = SETTINGS[suffix]

    @contextlib.contextmanager
    def site(few: bool) -> Iterator[RunOnce]:
        with _gathering(trial, suffix, quick=few) as gather:

            def run_once(setting: str, run: int) -> Measurement:
                values = gather(setting, run)
                return Measurement(tuple(samples(setting, values)), _proof(values))

            yield run_once

    return Experiment(
        f"{name}{suffix}",
        figures,
        runs,
        lambda few: list(settings[: int(quick) if few else None]),
        site,
        lambda _, few: seconds[few],
    )


@contextlib.contextmanager
def _gathering(trial: Trial, suffix: str, *, quick: bool) -> Iterator[Gather]:
    if suffix:
        with behind_nfs(trial, quick=quick) as gather:
            yield gather
    else:
        with local(trial.mib) as testbed, gathering(trial, testbed, quick=quick) as gather:
            yield gather


def _proof(values: Values) -> Mapping[str, object]:
    """Return what was read from the device: something with cold caches, and as good as nothing with hot ones."""
    cold = [of[COLD_KIB] for of in values.values() if COLD_KIB in of]
    hot = [of[HOT_KIB] for of in values.values() if HOT_KIB in of]
    proof = {}
    if cold:
        proof["least KiB that were read from the device after caches had been dropped"] = min(cold)
    if hot:
        proof["most KiB that were with hot caches"] = max(hot)
    return proof


def relative(values: Values, what: str, to: str) -> dict[str, float]:
    """Return a value of each case, as a ratio to that of the case `to` in the same run."""
    return {name: of[what] / values[to][what] for name, of in values.items() if what in of}
