"""Mazières 1997 (SFS) and 2001 (the toolkit): a relay that adds nothing, in front of a file system."""

from collections.abc import Iterator
from functools import partial

from .experiment import Experiment, Sample
from .figures import definitions
from .trial import Values
from .workloads import MAB


def latency_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    """Yield the seconds of single calls and of sequential work (toolkit, latency and sequential)."""
    for name, of in values.items():
        for what in ("fchown", "getattr"):
            yield Sample(f"toolkit-latency{suffix}", name, f"{setting}, {what}", of[what])
        yield Sample(f"toolkit-sequential{suffix}", name, setting, of["sequential"])


def mab_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    """Yield the seconds of each phase of the modified Andrew benchmark, and of all (SFS, Figure 6)."""
    for name, of in values.items():
        for phase in MAB:
            yield Sample(f"sfs-6-1{suffix}", name, f"{setting}, {phase}", of[phase])
        yield Sample(f"sfs-6-1{suffix}", name, f"{setting}, all", sum(of[phase] for phase in MAB))


def _experiments(suffix: str) -> Iterator[Experiment]:
    for key, figures, samples in (
        ("sfs-mab", ("sfs-6-1",), mab_samples),
        ("toolkit-relay", ("toolkit-latency", "toolkit-sequential"), latency_samples),
    ):
        shown = [definitions().figure(figure, suffix) for figure in figures]
        yield definitions().experiment(key, suffix, shown, partial(samples, suffix))


EXPERIMENTS = (*_experiments(""), *_experiments("-nfs"))
