"""The results of a run, and what is computed from them: ratios within a round, their median and range."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Self


@dataclass
class Run:
    """Everything that was measured.

    Attributes:
        about: the circumstances.
        rates: setting -> work -> peer -> units per second, one for each round.
        requests: work -> peer -> operation -> how many for one unit.
        memory: peer -> what -> MiB.
        skipped: peers and works that this machine does not have, and why.
        failed: what went wrong.
    """

    about: dict[str, object] = field(default_factory=dict)
    rates: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    requests: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> Self:
        """Return an earlier run.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a run.
        """
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
        try:
            return cls(**fields)
        except TypeError as exc:
            raise ValueError(f"not a run: {exc}") from exc

    def write(self, path: str) -> None:
        """Write the run, for `read`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1, ensure_ascii=False)
            file.write("\n")

    def peers(self) -> list[str]:
        """Return the peers that have any rate, in order."""
        return list(dict.fromkeys(p for by_work in self.rates.values() for r in by_work.values() for p in r))

    def ratios(self, setting: str, work: str, peer: str, to: str) -> list[float]:
        """Return the ratio of each round, so that its spread can be computed; nothing if either was not measured."""
        rates = self.rates.get(setting, {}).get(work, {})
        return [mine / theirs for mine, theirs in zip(rates.get(peer, []), rates.get(to, []), strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the range of some values."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread | None":
        """Return the spread of the values; None if there are none."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def inverse(self) -> "Spread":
        """Return the spread of times, from one of rates."""
        return Spread(1 / self.middle, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{number(self.middle)} ({number(self.low)}–{number(self.high)})"


def number(value: float) -> str:
    """Return a number with the two digits that the spread leaves meaningful; around 1, with three."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2f}" if 0.5 <= value < 2 else f"{value:.2g}"


def compare(before: Spread, now: Spread) -> tuple[float, int]:
    """Return the change of the median (0.1: a tenth more), and 1 or -1 if it exceeds the spread, otherwise 0.

    It exceeds the spread if neither median lies within the range of the other.
    """
    change = now.middle / before.middle - 1
    if now.middle < before.low and before.middle > now.high:
        return change, -1
    if now.middle > before.high and before.middle < now.low:
        return change, 1
    return change, 0
