"""Spadavecchia & Zadok (2002), §4: Figures 3 to 6, locally and behind the kernel's NFS server.

The figures of the paper are pictures of bars, which the text that we have lacks; what the text prints are ratios. So
all values that are compared are ratios, too, of the times of two configurations in the same run. What the figures are
is in `figures.toml`.
"""

from collections.abc import Iterator
from functools import partial

from .configurations import UNCACHED
from .experiment import Experiment, Figure, Sample
from .figures import definitions
from .package import NAME
from .sites import SETTINGS, relative
from .trial import Values
from .trials import DEFINITIONS
from .workloads import DIRECTORIES, FEW_DIRECTORIES, FILES, HOT, MIX, OPERATIONS, OWNERS

_FEW, *_, _MANY = map(str, OWNERS)


_CONSTANTS = {
    "package": NAME,
    "definitions": DEFINITIONS,
    "directories": DIRECTORIES,
    "few_directories": FEW_DIRECTORIES,
    "files": FILES,
    "hot": HOT,
    "many": _MANY,
    "mix": ", ".join(f"{share:g} % {name}" for name, share in MIX.items()),
    "operations": OPERATIONS,
    "uncached": UNCACHED,
}


def _figure(key: str, suffix: str, setting: str | None = None) -> Figure:
    return definitions().figure(key, suffix, setting=setting, constants=_CONSTANTS)


def build_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    """Yield the times of a build, also as ratios to the bare tree (Figure 3), and its phases (toolkit, Figure 7)."""
    for name, ratio in relative(values, "elapsed", "VAN").items():
        yield Sample(f"zadok-3{suffix}", name, setting, ratio)
    for name, of in values.items():
        for what in ("elapsed", "user", "system"):
            yield Sample(f"zadok-3-times{suffix}", name, f"{setting}, {what}", of[what])
    for what in ("untar", "configure", "make", "delete"):
        for name in ("VAN", "MNU", "RMAPCLK"):
            ratio = values[name][what] / values["VAN"][what]
            yield Sample(f"toolkit-7{suffix}", name, f"{setting}, {what}", ratio)


def stone_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    """Yield the times of nfsstone as ratios to the bare tree (Figure 4), and its rates."""
    for name, ratio in relative(values, "elapsed", "VAN").items():
        yield Sample(f"zadok-4{suffix}", name, setting, ratio)
    for name, of in values.items():
        yield Sample(f"zadok-4-rates{suffix}", name, setting, of["rate"])


def worst_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    """Yield the times of `ls -lR` and `find` as ratios to the bare tree, cold and hot (Figure 5)."""
    for key, what in (("zadok-5", "ls -lR"), ("zadok-find", "find")):
        for when in ("cold", "hot"):
            for name, ratio in relative(values, f"{what} {when}", "VAN").items():
                yield Sample(f"{key}{suffix}", name, f"{setting} {when}", ratio)


def scaling_samples(suffix: str, setting: str, values: Values) -> Iterator[Sample]:
    """Yield the times of `ls -lR` as ratios to those with the fewest definitions (Figure 6)."""
    what = "ls -lR cold"
    keys = {one: figure.key for one, figure in _figures_6(suffix).items()}
    for name in ("RMAP", "CLK", "RMAPCLK"):
        for x in OWNERS:
            ratio = values[f"{name}-{x}"][what] / values[f"{name}-{_FEW}"][what]
            yield Sample(keys[setting], name, str(x), ratio)
    hidden = values[f"CLK-{_MANY}"][what]
    waiting = f"{what}, waiting"
    ratios = {
        "CLK / VAN-0": hidden / values["VAN-0"][what],
        "RMAP / CLK": values[f"RMAP-{_MANY}"][what] / hidden,
        "waiting, RMAP / RMAPCLK": values[f"RMAP-{_FEW}"][waiting] / values[f"RMAPCLK-{_FEW}"][waiting],
    }
    for name, ratio in ratios.items():
        yield Sample(f"zadok-6-hidden{suffix}", name, setting, ratio)


def _figures_6(suffix: str) -> dict[str, Figure]:
    """Return a figure for each setting."""
    return {setting: _figure("zadok-6", suffix, setting) for setting in SETTINGS[suffix]}


def _experiments(suffix: str) -> Iterator[Experiment]:
    for key, figures, samples in (
        ("zadok-build", ("zadok-3", "zadok-3-times", "toolkit-7"), build_samples),
        ("zadok-nfsstone", ("zadok-4", "zadok-4-rates"), stone_samples),
        ("zadok-listing", ("zadok-5", "zadok-find"), worst_samples),
    ):
        shown = [_figure(figure, suffix) for figure in figures]
        yield definitions().experiment(key, suffix, shown, partial(samples, suffix))
    shown = [*_figures_6(suffix).values(), _figure("zadok-6-hidden", suffix)]
    yield definitions().experiment("zadok-scaling", suffix, shown, partial(scaling_samples, suffix))


EXPERIMENTS = (*_experiments(""), *_experiments("-nfs"))
