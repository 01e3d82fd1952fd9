"""Claims that are a ratio of two points: what a paper printed, and whether ours is like it."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .experiment import Measured, Verdict

SIGNIFICANT = 0.01
"""Spadavecchia & Zadok, §4.1: smaller differences between two measurements may not be significant."""


class Sense(StrEnum):
    """When the claim holds, by our ratio."""

    NO_MORE = "no more than printed"
    NO_LESS = "no less than printed"
    BELOW_ONE = "below 1"
    ABOVE_ONE = "above 1"


class At(NamedTuple):
    """A point of a figure."""

    series: str
    x: str


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        says: what it says, in a few words.
        of, to: the points whose ratio it is; without `to`, the value of `of` is a ratio already.
        printed: the paper's ratio.
        sense: what ours has to be.
    """

    says: str
    of: At
    to: At | None
    printed: float
    sense: Sense = Sense.NO_MORE

    def check(self, measured: Measured) -> tuple[bool, str]:
        """Return whether it holds, and ours beside the printed ratio.

        Our ratio is the mean over the runs. It has to be on the right side by no less than its uncertainty (two
        standard errors) if a difference is claimed, and may be on the wrong side by as much, or by SIGNIFICANT if that
        is more, if none is.

        Raises:
            LookupError: it was not measured.
        """
        ratios = self._ratios(measured)
        mean = statistics.fmean(ratios)
        unsure = 2 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        slack = max(unsure, SIGNIFICANT)
        held = {
            Sense.NO_MORE: mean <= self.printed + slack,
            Sense.NO_LESS: mean >= self.printed - slack,
            Sense.BELOW_ONE: mean + unsure < 1,
            Sense.ABOVE_ONE: mean - unsure > 1,
        }[self.sense]
        return held, f"{self.says}: {mean:.3g} (printed: {self.printed:.4g})"

    def _ratios(self, measured: Measured) -> list[float]:
        of = measured.at(*self.of)
        to = measured.at(*self.to) if self.to else None
        if of is None or (self.to and to is None):
            raise LookupError(f"{self.says} was not measured")
        ratios = of.ratios(to) if to else list(of.values.values())
        if not ratios:
            raise LookupError(f"{self.says}: no run has both")
        return ratios


def judge(claims: Iterable[Claim], measured: Measured) -> Verdict:
    """Return the verdict on the claims of a figure that were measured; the sentence names those that were not.

    Raises:
        LookupError: none of them was.
    """
    checks, told, missing = {}, [], []
    for claim in claims:
        try:
            held, said = claim.check(measured)
        except LookupError:
            missing.append(claim.says)
            continue
        checks[f"{claim.says} {claim.sense}"] = held
        told.append(said)
    if not checks:
        raise LookupError(f"{'; '.join(missing)}")
    if missing:
        told.append(f"not measured: {', '.join(missing)}")
    return Verdict.of(checks, f"{'; '.join(told)}.")


def criterion(claims: Iterable[Claim]) -> str:
    """Return the rule in words: one line for all claims."""
    by_sense: dict[Sense, list[str]] = {}
    for claim in claims:
        by_sense.setdefault(claim.sense, []).append(f"{claim.says} ({claim.printed:.4g})")
    return (
        "; ".join(f"{sense}: {', '.join(dict.fromkeys(which))}" for sense, which in by_sense.items())
        + f". A difference counts if it exceeds two standard errors of the mean, and {SIGNIFICANT:.0%} where none is "
        "claimed. All: holds; some: holds in part."
    )
