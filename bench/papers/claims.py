"""Claims that are a ratio of two points: what a paper printed, and whether ours is like it."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .experiment import Checked, Grade, Judgement, MeasuredSeries

SIGNIFICANT = 0.01
"""Spadavecchia & Zadok, §4.1: smaller differences between two measurements may not be significant."""


class Sense(StrEnum):
    """When the claim holds, by our ratio."""

    NO_MORE = "no more than printed"
    NO_LESS = "no less than printed"
    BELOW_ONE = "below 1"
    ABOVE_ONE = "above 1"


_MEANING = {
    Sense.NO_MORE: "",
    Sense.NO_LESS: "",
    Sense.BELOW_ONE: ", that is below 1",
    Sense.ABOVE_ONE: ", that is above 1",
}


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
        bound: whether `printed` is a bound that we took, because the paper prints no such ratio.
    """

    says: str
    of: At
    to: At | None
    printed: float
    sense: Sense = Sense.NO_MORE
    bound: bool = False

    def check(self, measured: MeasuredSeries) -> Checked:
        """Return whether it holds, and ours beside the printed ratio.

        Our ratio is the mean over the runs. It has to be on the right side by no less than its uncertainty (two
        standard errors) if a difference is claimed, and may be on the wrong side by as much, or by SIGNIFICANT if that
        is more, if none is.

        Raises:
            LookupError: it was not measured.
        """
        ratios = self._ratios(measured)
        mean = statistics.fmean(ratios)
        spread = statistics.stdev(ratios) if len(ratios) > 1 else None
        unsure = 2 * (spread or 0.0) / math.sqrt(len(ratios))
        slack = max(unsure, SIGNIFICANT)
        held = {
            Sense.NO_MORE: mean <= self.printed + slack,
            Sense.NO_LESS: mean >= self.printed - slack,
            Sense.BELOW_ONE: mean + unsure < 1,
            Sense.ABOVE_ONE: mean - unsure > 1,
        }[self.sense]
        return Checked(self.says, self._wanted(), mean, mean / self.printed, spread, held)

    def _wanted(self) -> str:
        if self.bound:
            return f"bound: {_ratio(self.printed)}"
        return f"printed: {_ratio(self.printed)}{_MEANING[self.sense]}"

    def missed(self, checked: Checked) -> float:
        """Return how far ours is on the wrong side of the printed ratio: above 1, or below it if it is on the right."""
        if self.sense in (Sense.NO_MORE, Sense.BELOW_ONE):
            return checked.to_wanted
        return 1 / checked.to_wanted if checked.to_wanted > 0 else math.inf

    def _ratios(self, measured: MeasuredSeries) -> list[float]:
        of = measured.at(*self.of)
        to = measured.at(*self.to) if self.to else None
        if of is None or (self.to and to is None):
            raise LookupError(f"{self.says} was not measured")
        ratios = of.ratios(to) if to else list(of.values.values())
        if not ratios:
            raise LookupError(f"{self.says}: no run has both")
        return ratios


def _ratio(value: float) -> str:
    """Return a ratio with four digits, or with as many as distinguish it from 1."""
    return f"{value:.6g}" if abs(value - 1) < SIGNIFICANT else f"{value:.4g}"


def judge(claims: Iterable[Claim], measured: MeasuredSeries) -> Judgement:
    """Return the verdict on the claims of a figure that were measured; the sentence names those that were not.

    Raises:
        LookupError: none of them was.
    """
    found: list[tuple[Claim, Checked]] = []
    missing = []
    for claim in claims:
        try:
            found.append((claim, claim.check(measured)))
        except LookupError:
            missing.append(claim.says)
    if not found:
        raise LookupError(f"{'; '.join(missing)}")
    checked = tuple(one for _, one in found)
    _, farthest = max(found, key=lambda pair: (not pair[1].held, pair[0].missed(pair[1])))
    shown = f"{farthest.says}: {farthest.ours:.3g} ({farthest.wanted})"
    if len(found) > 1:
        shown = f"As claimed: {sum(one.held for one in checked)} of {len(checked)} ratios; farthest from it is {shown}"
    if missing:
        few = len(missing) < 3
        shown += f"; not measured: {', '.join(missing) if few else f'{len(missing)} others'}"
    return Judgement(Grade.of([one.held for one in checked]), f"{shown}.", checked)


def criterion(claims: Iterable[Claim]) -> str:
    """Return the rule in words: one line for all claims."""
    rules: dict[str, list[str]] = {}
    for claim in claims:
        rule = claim.sense.replace("printed", "the bound") if claim.bound else claim.sense.value
        rules.setdefault(rule, []).append(f"{claim.says} ({_ratio(claim.printed)})")
    return (
        "; ".join(f"{rule}: {', '.join(dict.fromkeys(which))}" for rule, which in rules.items())
        + f". A difference counts if it exceeds two standard errors of the mean, and {SIGNIFICANT:.0%} where none is "
        "claimed. All: holds; some: holds in part."
    )
