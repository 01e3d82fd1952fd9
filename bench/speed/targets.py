"""What cloakfs is to reach, and whether a run did."""

from dataclasses import dataclass

from ..figures import Run, Spread, number
from ..homes import HOME
from ..job import PINNED, UNPINNED
from ..over_nfs import BARE_EXPORT, CALLER, CALLER_CHECKED, PLACES, SQUASHED, VERSIONS
from ..over_nfs import FIXED as FIXED_EXPORT
from ..over_nfs import FIXED_CHECKED as FIXED_EXPORT_CHECKED
from ..peers import BARE, BINDFS, BOTH, FEW, FIXED, MANY, NULL, PLAIN, SESSION, STOCK, UNCACHED
from ..tree import KINDS

MOST_IDLE = 45.0
MOST_GROWTH = 60.0
"""MiB: of an idle mount, and more for each 100,000 files that the kernel knows."""


MOST_REQUESTS = 60.0
"""Of the daemon, for one `ls -l` of 1,000 files over NFS."""


@dataclass(frozen=True, slots=True)
class Target:
    """The rate of `peer`, compared with that of `to`, is to be at least `bound`; or the time at most, if `time`.

    `judged` are the kinds of files that it is about; what was measured with others of `KINDS` is shown all the same.
    """

    work: str
    setting: str
    peer: str
    to: str
    bound: float
    time: bool = False
    judged: tuple[str, ...] = KINDS

    def __str__(self) -> str:
        return f"{self.work}, {self.setting}: {self.peer} / {self.to}"

    @property
    def wanted(self) -> str:
        """The bound, to be read."""
        return f"time ≤ {self.bound:.2f}" if self.time else f"rate ≥ {self.bound:.2f}"


_ALIKE = ("public",)

TARGETS = (
    Target("stat", PINNED, MANY, UNCACHED, 1.3),
    Target("lookup", PINNED, MANY, UNCACHED, 1.3),
    Target("open+read+close", PINNED, MANY, UNCACHED, 1.2),
    Target("create+write+unlink", PINNED, MANY, UNCACHED, 1.0),
    Target("4 clients", UNPINNED, MANY, UNCACHED, 1.5),
    Target("stat", PINNED, FIXED, BARE, 0.80),
    Target("stat", PINNED, SESSION, BARE, 0.85),
    Target("stat", PINNED, MANY, BARE, 0.80, judged=_ALIKE),
    Target("ls -lR", PINNED, FIXED, BARE, 0.75),
    Target("ls -lR", PINNED, PLAIN, BARE, 0.75),
    Target("ls -lR", PINNED, MANY, BARE, 0.75, judged=_ALIKE),
    Target("sequential warm", PINNED, FIXED, BARE, 0.65),
    Target("sequential warm", PINNED, MANY, BARE, 0.65),
    Target("random 4K warm", PINNED, FIXED, BARE, 0.85),
    Target("random 4K warm", PINNED, MANY, BARE, 0.85),
    Target("sequential write", PINNED, MANY, BINDFS, 1.0),
    Target("tar+make+rm", UNPINNED, FIXED, BARE, 1.5, time=True),
    Target("tar+make+rm", UNPINNED, MANY, BARE, 1.9, time=True),
    Target("list+stat", PINNED, MANY, FEW, 1.02, time=True),
    Target("list+stat", PINNED, BOTH, NULL, 1.15, time=True),
)

HOME_TARGETS = tuple(
    Target(work, setting, MANY, to, bound, judged=(HOME,))
    for work, setting, to, bound in (
        ("stat", PINNED, BARE, 0.80),
        ("lookup", PINNED, BARE, 0.80),
        ("list+stat", PINNED, BARE, 0.80),
        ("stat absolute", PINNED, UNCACHED, 1.3),
        ("open+read+close", PINNED, UNCACHED, 1.0),
        ("open+read+close absolute", PINNED, UNCACHED, 1.0),
        ("create+write+unlink", PINNED, UNCACHED, 0.7),
        ("create", PINNED, UNCACHED, 0.7),
        ("sequential write", PINNED, BINDFS, 1.0),
        ("ls -lR", PINNED, BARE, 0.5),
        ("4 clients", UNPINNED, UNCACHED, 1.5),
    )
)
"""Of what a user does at home."""

NFS_TARGETS = tuple(
    Target(f"ls -l over NFSv{version}", PINNED, export, BARE_EXPORT, bound, time=True, judged=tuple(PLACES))
    for export, bound in (
        (CALLER, 10.0),
        (CALLER_CHECKED, 10.0),
        (FIXED_EXPORT, 5.0),
        (FIXED_EXPORT_CHECKED, 5.0),
        (SQUASHED, 5.0),
    )
    for version in VERSIONS
)
"""With a warm server; each is also about the requests."""


@dataclass(frozen=True, slots=True)
class JudgedValue:
    """A spread, or a single number, and whether it is good enough; None: there is no target for it."""

    value: Spread | float
    reached: bool | None

    def __str__(self) -> str:
        text = str(self.value) if isinstance(self.value, Spread) else f"{self.value:.1f}"
        return text if self.reached is None else f"{text} {'reached' if self.reached else 'missed'}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A target and what a run says to it, by kind of files; nothing of what was not measured."""

    target: str
    wanted: str
    figures: dict[str, JudgedValue]


def judge(run: Run) -> list[Judged]:
    """All targets but those for homes; medians decide."""
    return [_judge(target, run, KINDS) for target in TARGETS] + _judge_memory(run)


def judge_homes(run: Run) -> list[Judged]:
    """Those for homes."""
    return [_judge(target, run, (HOME,)) for target in HOME_TARGETS]


def judge_nfs(run: Run) -> list[Judged]:
    """Those over NFS."""
    kinds = tuple(PLACES)
    times = [_judge(target, run, kinds) for target in NFS_TARGETS]
    return times + [_judge_requests(target.work, target.peer, run, kinds) for target in NFS_TARGETS]


def _judge_requests(work: str, peer: str, run: Run, kinds: tuple[str, ...]) -> Judged:
    found = {kind: run.requests.get(f"{work} {kind}", {}).get(peer) for kind in kinds}
    totals = {kind: sum(counts.values()) for kind, counts in found.items() if counts is not None}
    figures = {kind: JudgedValue(total, total <= MOST_REQUESTS) for kind, total in totals.items()}
    return Judged(f"{work}, requests: {peer}", f"≤ {number(MOST_REQUESTS)}", figures)


def _judge(target: Target, run: Run, kinds: tuple[str, ...]) -> Judged:
    figures = {}
    for kind in kinds:
        spread = Spread.of(run.ratios(target.setting, f"{target.work} {kind}", target.peer, target.to))
        if spread is None:
            continue
        if target.time:
            spread = spread.inverse()
        reached = spread.middle <= target.bound if target.time else spread.middle >= target.bound
        figures[kind] = JudgedValue(spread, reached if kind in target.judged else None)
    return Judged(str(target), target.wanted, figures)


def _judge_memory(run: Run) -> list[Judged]:
    ours = {peer: figures for peer, figures in run.memory.items() if peer.startswith("cloakfs") and peer != STOCK}
    judged = []
    for what, name, most in (
        ("idle RSS", "idle, MiB for a mount (RSS, the largest)", MOST_IDLE),
        ("growth RSS", "MiB more per 100,000 known files (RSS, the largest)", MOST_GROWTH),
    ):
        values = [figures[what] for figures in ours.values() if what in figures]
        figure = {"": JudgedValue(max(values), max(values) <= most)} if values else {}
        judged.append(Judged(name, f"≤ {number(most)}", figure))
    return judged
