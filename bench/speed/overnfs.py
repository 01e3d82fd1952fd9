"""Listings over NFS: the host asks for one after the other, and the laboratory's guest, whose kernel has NFS, lists."""

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..figures import Run
from ..job import PINNED
from ..lab.asking import answer, asking
from ..lab.guest import GuestEnded, missing
from ..over_nfs import EXPORTS, Site, site
from .plan import Plan

LISTINGS = "ls -l over NFS"
"""What is skipped without the laboratory."""


def measure_over_nfs(plan: Plan, run: Run, advance: Callable[[str], None], tell: Callable[[str], None]) -> None:
    """Add the rates and the requests of all listings to a run.

    The guest has a processor of its own, and a kernel, but memory and caches in common with whatever else runs.

    Args:
        plan: what.
        run: what is added to.
        advance: called with what is next.
        tell: called with what was left out, and why.
    """
    if not plan.listings or not plan.exports:
        return
    if why := missing():
        run.skipped[LISTINGS] = why
        tell(f"skipped {LISTINGS}: {why}")
        return
    rates = {listing.name: {name: list[float]() for name in plan.exports} for listing in plan.listings}
    asked = {listing.name: {name: Counter[str]() for name in plan.exports} for listing in plan.listings}
    run.rates.setdefault(PINNED, {}).update(rates)
    try:
        with asking("bench.speed.overnfs", str(plan.sizes.listed), *plan.exports) as ask:
            for at, listing in plan.listing_steps():
                ours = rates[listing.name]
                # Another one is first in each round.
                first = at % len(plan.exports)
                for name in plan.exports[first:] + plan.exports[:first]:
                    advance(listing.name)
                    if name not in ours:
                        continue
                    try:
                        told = ask([listing.kind, name, listing.version, listing.cold])
                    except GuestEnded:
                        raise
                    except RuntimeError as exc:
                        _fail(f"{listing.name} with {name}: {exc}", run, tell)
                        del ours[name]  # rounds would not match any more
                        continue
                    ours[name].append(1 / told["seconds"])
                    asked[listing.name][name].update(told["requests"])
    except (GuestEnded, OSError, subprocess.SubprocessError) as exc:
        _fail(f"{LISTINGS}: {exc}", run, tell)
    for work, by_name in asked.items():
        run.requests[work] = {
            name: {operation: number / len(rates[work][name]) for operation, number in sorted(counts.items())}
            for name, counts in by_name.items()
            if EXPORTS[name] is not None and rates[work].get(name)
        }


def _fail(what: str, run: Run, tell: Callable[[str], None]) -> None:
    run.failed.append(what)
    tell(what)


def _serve(files: int, exports: Sequence[str]) -> None:
    """In the guest."""
    from ..lab.nfshost import NfsHost  # noqa: PLC0415  (for the guest alone)

    NfsHost()
    with contextlib.ExitStack() as stack:
        sites: dict[str, Site] = {}

        def listed(asked: list[Any]) -> dict[str, object]:
            kind, export, version, cold = asked
            if kind not in sites:
                sites.clear()
                stack.close()
                sites[kind] = stack.enter_context(site(kind, files, exports))
            one = sites[kind].list_once(export, version, cold=cold)
            return {"seconds": one.seconds, "requests": one.requests}

        answer(listed)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
