"""Listings over NFS: the host requests one after the other, and the laboratory's guest, whose kernel has NFS, lists."""

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..figures import Run
from ..job import PINNED
from ..lab.guest import missing
from ..lab.guestrequests import guest_requests, serve_requests
from ..lab.shared import GuestEnded
from ..over_nfs import EXPORTS, ExportedTree, site
from .plan import Schedule

LISTINGS = "ls -l over NFS"
"""What is skipped without the laboratory."""


def measure_over_nfs(plan: Schedule, run: Run, advance: Callable[[str], None], report: Callable[[str], None]) -> None:
    """Add the rates and the requests of all listings to a run.

    The guest has a processor of its own, and a kernel, but memory and caches in common with whatever else runs.

    Args:
        plan: what.
        run: what is added to.
        advance: called with what is next.
        report: called with what was left out, and why.
    """
    if not plan.listings or not plan.exports:
        return
    if why := missing():
        run.skipped[LISTINGS] = why
        report(f"skipped {LISTINGS}: {why}")
        return
    rates = {listing.name: {name: list[float]() for name in plan.exports} for listing in plan.listings}
    requests = {listing.name: {name: Counter[str]() for name in plan.exports} for listing in plan.listings}
    run.rates.setdefault(PINNED, {}).update(rates)
    try:
        with guest_requests("bench.speed.overnfs", str(plan.sizes.listed), *plan.exports) as request:
            for at, listing in plan.listing_steps():
                ours = rates[listing.name]
                # Another one is first in each round.
                first = at % len(plan.exports)
                for name in plan.exports[first:] + plan.exports[:first]:
                    advance(listing.name)
                    if name not in ours:
                        continue
                    try:
                        listed = request([listing.kind, name, listing.version, listing.cold])
                    except GuestEnded:
                        raise
                    except RuntimeError as exc:
                        _fail(f"{listing.name} with {name}: {exc}", run, report)
                        del ours[name]  # rounds would not match any more
                        continue
                    ours[name].append(1 / listed["seconds"])
                    requests[listing.name][name].update(listed["requests"])
    except (GuestEnded, OSError, subprocess.SubprocessError) as exc:
        _fail(f"{LISTINGS}: {exc}", run, report)
    for work, by_name in requests.items():
        run.requests[work] = {
            name: {operation: number / len(rates[work][name]) for operation, number in sorted(counts.items())}
            for name, counts in by_name.items()
            if EXPORTS[name] is not None and rates[work].get(name)
        }


def _fail(what: str, run: Run, report: Callable[[str], None]) -> None:
    run.failed.append(what)
    report(what)


def _serve(files: int, exports: Sequence[str]) -> None:
    """In the guest."""
    from ..lab.nfshost import NfsHost  # noqa: PLC0415  (for the guest alone)

    NfsHost()
    with contextlib.ExitStack() as stack:
        sites: dict[str, ExportedTree] = {}

        def listed(request: list[Any]) -> dict[str, object]:
            kind, export, version, cold = request
            if kind not in sites:
                sites.clear()
                stack.close()
                sites[kind] = stack.enter_context(site(kind, files, exports))
            one = sites[kind].list_once(export, version, cold=cold)
            return {"seconds": one.seconds, "requests": one.requests}

        serve_requests(listed)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
