"""Every experiment, in the order of the report."""

from . import ellard, ellardtraps, fastdevices, toolkit, zadok
from .experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    *zadok.EXPERIMENTS,
    *ellardtraps.EXPERIMENTS,
    *ellard.EXPERIMENTS,
    *fastdevices.EXPERIMENTS,
    *toolkit.EXPERIMENTS,
)
