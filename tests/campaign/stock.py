"""Boots stock kernels in qemu (bench/lab/stock), and checks that what is counted there over NFS repeats.

The bare export and one of cloakfs are each looked at twice. It sets up what the laboratory needs, if it can.
"""

import argparse
import sys
import time
from collections.abc import Iterator

from bench.lab.stock.image import made_image
from bench.lab.stock.kernels import KERNELS, StockKernel
from bench.lab.stock.setup import NoLaboratory, install_missing
from bench.nfs.measure import measure
from bench.nfs.plan import BARE, NfsPlan
from bench.nfs.results import NfsRun
from bench.session import interruptible

CACHED = "fixed view, subtree_check"
PLAN = NfsPlan(works=["stat by name"], exports=[BARE, CACHED], repeat=2)

MOST = {BARE: 0.03, CACHED: 0.15}
"""How much two repeats may differ, relative to the shorter one; daemons do things of their own now and then."""

LOWEST, HIGHEST = 0.9, 5.0
"""Between these is the time with cloakfs / the time of the bare export; what is cached takes no request for each."""


def found_in(run: NfsRun) -> Iterator[str]:
    """What is not as it should be."""
    yield from run.failed
    for case, several in run.measured.items():
        if len(several) != PLAN.repeat:
            yield f"{case}: {len(several)} repeats, not {PLAN.repeat}"
        if run.spread(case) > MOST[case.export]:
            yield f"{case}: repeats differ by {run.spread(case):.1%}"
        ratio = run.ratio(case)
        if ratio is None or not LOWEST <= ratio <= HIGHEST:
            yield f"{case}: {ratio} times the time of the bare export"
        if (case.export == BARE) == any(sum(one.requests.values()) for one in several):
            yield f"{case}: requests {[one.requests for one in several]}"
    if len(run.measured) != len(PLAN.exports) * len(PLAN.versions):
        yield f"{len(run.measured)} cases"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=list(KERNELS), action="append", help="only this; repeatable")
    found: list[str] = []
    for version in parser.parse_args().kernel or list(KERNELS):
        began, run = time.monotonic(), NfsRun()
        try:
            install_missing()
            kernel, image = StockKernel.fetched(version), made_image()
        except NoLaboratory as exc:
            sys.exit(f"stock: {exc}")
        with interruptible("stock"):
            measure(version, kernel, image, PLAN, run, lambda _, what: print(what, flush=True))
        found += found_in(run)
        print(f"Linux {version}: {len(run.measured)} cases, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(found) or "nothing found")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
