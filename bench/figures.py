"""What a run found, and what is made of it: ratios within a round, their median and range."""

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
        skipped: peers and works that could not be had, and why.
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
        """An earlier run.

        Raises:
            OSError: it cannot be read.
            ValueError: that is no run.
        """
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
        try:
            return cls(**told)
        except TypeError as exc:
            raise ValueError(f"not a run: {exc}") from exc

    def write(self, path: str) -> None:
        """For `read`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1, ensure_ascii=False)
            file.write("\n")

    def peers(self) -> list[str]:
        """Those with any rate, in order."""
        return list(dict.fromkeys(p for by_work in self.rates.values() for r in by_work.values() for p in r))

    def ratios(self, setting: str, work: str, peer: str, to: str) -> list[float]:
        """Round by round, so that the spread is that of the comparison; nothing if either was not measured."""
        rates = self.rates.get(setting, {}).get(work, {})
        return [mine / theirs for mine, theirs in zip(rates.get(peer, []), rates.get(to, []), strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread | None":
        """None of nothing."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def inverse(self) -> "Spread":
        """Of times instead of rates."""
        return Spread(1 / self.middle, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{number(self.middle)} ({number(self.low)}–{number(self.high)})"


def number(value: float) -> str:
    """Two digits are all that the spread leaves meaningful; three around one, where it matters."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2f}" if 0.5 <= value < 2 else f"{value:.2g}"


def compare(before: Spread, now: Spread) -> tuple[float, int]:
    """The change of the median (0.1: a tenth more), and 1 or -1 if it is by more than the spread, else 0.

    That is, neither median lies within the other's range.
    """
    change = now.middle / before.middle - 1
    if now.middle < before.low and before.middle > now.high:
        return change, -1
    if now.middle > before.high and before.middle < now.low:
        return change, 1
    return change, 0
