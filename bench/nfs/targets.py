"""What is wanted of work over NFS: the most times that the bare export takes."""

from collections.abc import Iterator
from typing import NamedTuple

from ..figures import number
from ..sheet import Sheet
from .results import Case, NfsRun

_CALLER, _CALLER_CHECKED, _FIXED_CHECKED = "caller view", "caller view, subtree_check", "fixed view, subtree_check"


class NfsTarget(NamedTuple):
    """The most that a piece of work may take through an export, as ratios to the bare export.

    Attributes:
        export: its name.
        work: its name.
        most: by NFSv3, and by NFSv4.2.
    """

    export: str
    work: str
    most: tuple[float, float]


TARGETS = (
    NfsTarget(_CALLER_CHECKED, "list+stat", (1.5, 1.5)),
    NfsTarget(_CALLER_CHECKED, "ls -l", (2.8, 1.4)),
    NfsTarget(_CALLER_CHECKED, "open+read", (2, 2)),
    NfsTarget(_CALLER_CHECKED, "sequential read", (1.4, 1.4)),
    NfsTarget(_CALLER_CHECKED, "sequential read cold", (1.4, 1.4)),
    NfsTarget(_CALLER_CHECKED, "sequential write", (1.4, 1.4)),
    NfsTarget(_CALLER_CHECKED, "create+write", (4, 3)),
    NfsTarget(_CALLER_CHECKED, "unlink", (3.5, 3.5)),
    NfsTarget(_CALLER_CHECKED, "rename", (3.5, 3.5)),
    NfsTarget(_CALLER_CHECKED, "tar x", (3, 3)),
    NfsTarget(_CALLER, "list+stat", (8, 8)),
    NfsTarget(_FIXED_CHECKED, "list+stat", (1.3, 1.3)),
    NfsTarget(_FIXED_CHECKED, "create+write", (2.5, 2.5)),
    NfsTarget(_FIXED_CHECKED, "unlink", (2.5, 2.5)),
    NfsTarget(_FIXED_CHECKED, "rename", (2.5, 2.5)),
    NfsTarget(_FIXED_CHECKED, "tar x", (2.5, 2.5)),
)


def target_sheet(run: NfsRun, versions: tuple[str, str] = ("3", "4.2")) -> Sheet:
    """Return what was wanted, and what was measured on each Linux."""
    sheet = Sheet("targets: time / time of the bare export", ["export", "work", "NFS", "wanted", *run.kernels()])
    for target in TARGETS:
        for version, most in zip(versions, target.most, strict=True):
            cells = [*_judged(run, target, version, most)]
            if any(cells):
                sheet.rows.append([target.export, target.work, version, f"≤ {number(most)}", *cells])
    return sheet


def _judged(run: NfsRun, target: NfsTarget, version: str, most: float) -> Iterator[str]:
    for kernel in run.kernels():
        ratio = run.ratio(Case(kernel, target.work, version, target.export))
        yield "" if ratio is None else f"{number(ratio)} {'reached' if ratio <= most else 'missed'}"
