"""What was measured over NFS, and what is computed from it: time by the model, and ratios to the bare export."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Self

from ..lab.stock.marks import with_switches
from ..lab.stock.weights import Counts
from .plan import BARE, Record


class Case(NamedTuple):
    """What is measured several times: a piece of work, on this Linux, by this version of NFS, through this export."""

    kernel: str
    work: str
    version: str
    export: str


@dataclass(frozen=True, slots=True)
class NfsMeasurement:
    """One measurement: what was counted, and the requests that the daemon has answered, by operation."""

    counts: Counts
    requests: dict[str, int]


@dataclass
class NfsRun:
    """Everything that was measured.

    Attributes:
        about: the circumstances.
        measured: by case, in the order in which it was done.
        failed: what went wrong.
    """

    about: dict[str, object] = field(default_factory=dict)
    measured: dict[Case, list[NfsMeasurement]] = field(default_factory=dict)
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
            run = cls(fields["about"], failed=fields["failed"])
            for row in fields["measured"]:
                case = Case(*row["case"])
                measurement = NfsMeasurement(Counts(**row["counts"]), row["requests"])
                run.measured.setdefault(case, []).append(measurement)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"not a run of `bench nfs`: {exc!r}") from exc
        return run

    def write(self, path: str) -> None:
        """Write the run, for `read`: a line for each measurement."""
        rows = (
            {"case": case, "counts": asdict(one.counts), "requests": one.requests}
            for case, several in self.measured.items()
            for one in several
        )
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        about, failed = (json.dumps(value, ensure_ascii=False) for value in (self.about, self.failed))
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'{{"about": {about},\n"failed": {failed},\n"measured": [\n{lines}\n]}}\n')

    def add(self, kernel: str, records: Sequence[Record], counts: dict[int, tuple[int, int, int]]) -> None:
        """Add what a guest has recorded, with what the plugin has counted meanwhile."""
        for record in records:
            case = Case(kernel, record.work, record.version, record.export)
            if record.failed or record.number not in counts:
                self.failed.append(f"{_words(case)}: {record.failed or 'nothing was counted'}")
                continue
            counted = with_switches(counts[record.number], record.switches)
            self.measured.setdefault(case, []).append(NfsMeasurement(counted, record.requests))

    def merge(self, other: Self) -> None:
        """Add another run; it replaces the cases that both have."""
        self.about = {**self.about, **other.about}
        self.measured.update(other.measured)
        self.failed += other.failed

    def kernels(self) -> list[str]:
        """Return the versions of Linux, in order."""
        return list(dict.fromkeys(case.kernel for case in self.measured))

    def least(self, case: Case) -> NfsMeasurement | None:
        """Return the measurement with the least time: what daemons do now and then falls into some of them."""
        several = self.measured.get(case)
        return min(several, key=lambda one: one.counts.seconds()) if several else None

    def seconds(self, case: Case) -> float | None:
        """Return the time by the model; None if the case was not measured."""
        least = self.least(case)
        return None if least is None else least.counts.seconds()

    def ratio(self, case: Case) -> float | None:
        """Return the time by the model / that of the bare export; None if either was not measured."""
        mine, bare = self.seconds(case), self.seconds(case._replace(export=BARE))
        return mine / bare if mine is not None and bare is not None else None

    def spread(self, case: Case) -> float:
        """Return how much longer than the least the second least took (0.01: one per cent longer); 0 for a single one.

        If it is small, the least is what the work takes, and no luck.
        """
        times = sorted(one.counts.seconds() for one in self.measured.get(case, []))
        return times[1] / times[0] - 1 if len(times) > 1 else 0.0


def _words(case: Case) -> str:
    return f"Linux {case.kernel}: {case.work} by NFSv{case.version} with {case.export}"
