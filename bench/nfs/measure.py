"""The host's part of measuring over NFS: boot the guest, follow what it records, and join it with the counts."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator

from ..clone import module_command
from ..lab.guest import OUT
from ..lab.shared import GuestEnded
from ..lab.stock.guest import StockGuest
from ..lab.stock.kernels import StockKernel
from ..lab.stock.marks import counts_by_number
from ..workers import undisturbed
from .plan import RESULTS, NfsPlan, Record, parse_records
from .results import NfsRun

_SILENCE = 1800.0
"""Seconds without a record after which the guest hangs: on a busy machine, the longest work takes a minute."""


def measure(
    version: str, kernel: StockKernel, image: str, plan: NfsPlan, run: NfsRun, advance: Callable[[int, str], None]
) -> None:
    """Measure a plan on one kernel, and add what is measured to a run.

    If the guest dies, or this is interrupted, what it has recorded is added; its death is a failure of the run.

    Args:
        version: of Linux.
        kernel: of this version.
        image: the guest's root.
        plan: what is measured.
        run: what is added to.
        advance: called with how much has been measured, and what was last.
    """
    command = shlex.join(module_command("bench.nfs.inguest", os.path.join(OUT, "plan.json")))
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        try:
            with undisturbed():
                guest = stack.enter_context(StockGuest(kernel, image, command))
                guest.write("plan.json", plan.text())
            try:
                for records in _followed(guest):
                    last = records[-1]
                    advance(len(records), f"Linux {version}: {last.export}: {last.work}, NFSv{last.version}")
            except GuestEnded as exc:
                run.failed.append(f"Linux {version}: {exc}")
            finally:
                run.add(version, records, counts_by_number(guest.counted()))
        finally:
            with undisturbed():
                stack.close()


def _followed(guest: StockGuest) -> Iterator[list[Record]]:
    """Give all records whenever there are more, until the guest is done.

    Raises:
        GuestEnded: it died, is silent, or could not do what it should; with what it said.
    """
    known, deadline = 0, time.monotonic() + _SILENCE
    while True:
        is_running, status = guest.is_running(), guest.read("status").strip()
        records = parse_records(guest.read(RESULTS))
        if len(records) > known:
            known, deadline = len(records), time.monotonic() + _SILENCE
            yield records
        if status == "0":
            return
        if status or not is_running or time.monotonic() > deadline:
            ended = f"failed (exit status {status})" if status else "is silent" if is_running else "died"
            raise GuestEnded(f"the guest {ended}: {' '.join(guest.said()[-1500:].split())}")
        time.sleep(0.5)
