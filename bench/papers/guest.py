"""Trials behind NFS: the host requests, and the laboratory's guest, whose kernel has NFS, measures."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..lab.guest import missing
from ..lab.guestrequests import guest_requests, serve_requests
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
    with guest_requests("bench.papers.guest", trial.key, *(["quick"] if quick else [])) as request:

        def gather(setting: str, run: int) -> Values:
            values: Values = request({"setting": setting, "run": run})
            return values

        yield gather


def _serve(key: str, *, quick: bool) -> None:
    """In the guest."""
    from ..lab.nfshost import NfsHost  # noqa: PLC0415  (for the guest alone)
    from .nfstestbed import nfs  # noqa: PLC0415  (for the guest alone)
    from .trials import TRIALS  # noqa: PLC0415  (these import what they measure)

    trial = TRIALS[key]
    NfsHost()
    with nfs(trial.mib, trial.microseconds) as testbed, gathering(trial, testbed, quick=quick) as gather:

        def measure(request: dict[str, Any]) -> Values:
            return gather(request["setting"], request["run"])

        serve_requests(measure)


if __name__ == "__main__":
    _serve(sys.argv[1], quick="quick" in sys.argv[2:])
