"""A trial: what is measured with each case, in which setting, and how the values of all cases are gathered."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .configurations import Configuration
from .testbed import Testbed

Values = dict[str, dict[str, float]]
"""case -> what -> value."""

Gather = Callable[[str, int], Values]
"""Measures all cases once: setting, run."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where one case is measured.

    Attributes:
        path: the directory in which the client works.
        real: the same directory of the real tree.
        case: which case.
        run: the number of the run.
        quick: whether little is enough.
    """

    path: str
    real: str
    case: Configuration
    run: int
    quick: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """What is measured.

    Attributes:
        key: a word for it.
        cases: what is compared; the argument is `quick`.
        prepare: fills the tree: tree, quick.
        measure: measures a case once.
        alone: each case is served only while it is measured, because it writes, of which all daemons on the same file
            system would get events. Otherwise all are served all the time.
        rehearsed: whether everything is done once before it counts: a guest that has just started is slow.
        mib: how large the file system is.
        microseconds: how long its disk takes for each command, behind NFS; 0: it is a file in memory.
        fetch: gets what it needs from the network, unless it has to be quick; the laboratory's guest has no network.
    """

    key: str
    cases: Callable[[bool], tuple[Configuration, ...]]
    prepare: Callable[[str, bool], None]
    measure: Callable[[Spot], dict[str, float]]
    alone: bool = True
    rehearsed: bool = False
    mib: int = 256
    microseconds: int = 0
    fetch: Callable[[], object] = lambda: None


@contextlib.contextmanager
def gathering(trial: Trial, testbed: Testbed, *, quick: bool) -> Iterator[Gather]:
    """Prepare the tree, and serve it; give what measures all cases, beginning with another one in each run."""
    trial.prepare(testbed.tree, quick)
    with contextlib.ExitStack() as stack:
        served: dict[str, str] = {}

        def measure(case: Configuration, served_as: str, setting: str, run: int) -> dict[str, float]:
            with testbed.reach(served_as, setting) as path:
                below = f"/{case.place}" if case.place else ""
                return trial.measure(Spot(path + below, testbed.tree + below, case, run, quick))

        rehearsing = trial.rehearsed

        def gather(setting: str, run: int) -> Values:
            nonlocal rehearsing
            if rehearsing:
                rehearsing = False
                gather(setting, run)
            cases = trial.cases(quick)
            values = {}
            for case in cases[run % len(cases) :] + cases[: run % len(cases)]:
                if trial.alone:
                    with testbed.serve(case.options) as served_as:
                        values[case.name] = measure(case, served_as, setting, run)
                    continue
                if case.options not in served:
                    served[case.options] = stack.enter_context(testbed.serve(case.options))
                values[case.name] = measure(case, served[case.options], setting, run)
            return values

        yield gather
