"""Trials behind NFS: the host asks, and the laboratory's guest, whose kernel has NFS, measures."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..lab.asking import answer, asking
from ..lab.guest import missing
from .experiment import Unavailable
from .trial import Gather, Trial, Values, gathering


@contextlib.contextmanager
def behind_nfs(trial: Trial, *, quick: bool) -> Iterator[Gather]:
    """Boot a guest for a trial; give what measures all of its cases there.

    Raises:
        Unavailable: there is no laboratory on this machine, or what is needed cannot be fetched.
    """
    if why := missing():
        raise Unavailable(why)
    if not quick:
        trial.fetch()
    with asking("bench.papers.guest", trial.key, *(["quick"] if quick else [])) as ask:

        def gather(setting: str, run: int) -> Values:
            values: Values = ask({"setting": setting, "run": run})
            return values

        yield gather


def _serve(key: str, *, quick: bool) -> None:
    """In the guest."""
    from ..lab.nfshost import NfsHost  # noqa: PLC0415  (for the guest alone)
    from .nfsground import nfs  # noqa: PLC0415  (for the guest alone)
    from .trials import TRIALS  # noqa: PLC0415  (these import what they measure)

    trial = TRIALS[key]
    NfsHost()
    with nfs(trial.mib, trial.microseconds) as ground, gathering(trial, ground, quick=quick) as gather:

        def measure(asked: dict[str, Any]) -> Values:
            return gather(asked["setting"], asked["run"])

        answer(measure)


if __name__ == "__main__":
    _serve(sys.argv[1], quick="quick" in sys.argv[2:])
