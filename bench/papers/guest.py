"""Trials behind NFS: the host asks, and the laboratory's guest, whose kernel has NFS, measures.

Both share a directory. `ask-N` says what to measure, `answer-N` has the values, or why there are none.
"""

import contextlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from ..cli import OWN_COMMAND
from ..lab.guest import OUT, Guest, missing
from ..workers import undisturbed
from .experiment import Unavailable
from .trial import Gather, Trial, Values, gathering

_PATIENCE = 3600.0

_HOST_SECONDS = 300.0
"""If the host asks nothing for so long, it was killed: between two measurements it only writes a line."""


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
    *python, _ = OWN_COMMAND
    command = shlex.join([*python, "cloakfs_bench.papers.guest", trial.key, *(["quick"] if quick else [])])
    with contextlib.ExitStack() as stack:
        try:
            with undisturbed():
                guest = stack.enter_context(Guest(f"{command}\n"))
            asked = 0

            def gather(setting: str, run: int) -> Values:
                nonlocal asked
                asked += 1
                _write(os.path.join(guest.out, f"ask-{asked}"), {"setting": setting, "run": run})
                answer = _wait(guest, f"answer-{asked}")
                if "failed" in answer:
                    raise RuntimeError(f"{answer['failed']} (the guest said: {_end_of(guest)[-500:]})")
                values: Values = answer["values"]
                return values

            yield gather
        finally:
            with undisturbed():
                stack.close()


def _wait(guest: Guest, name: str) -> dict[str, Any]:
    deadline = time.monotonic() + _PATIENCE
    while not (text := guest.read(name)):
        if not guest.is_running():
            raise RuntimeError(f"the guest ended: {_end_of(guest)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the guest has not answered for {_PATIENCE:.0f} s: {_end_of(guest)}")
        time.sleep(0.05)
    answer: dict[str, Any] = json.loads(text)
    return answer


def _end_of(guest: Guest) -> str:
    return " ".join((guest.read("console") + guest.read("log"))[-1500:].split())


def _write(path: str, told: dict[str, Any]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.rename(f"{path}.new", path)


def _serve(key: str, *, quick: bool) -> None:
    """In the guest: measure whatever the host asks, until the guest is ended, or the host has gone."""
    from ..lab.nfshost import NfsHost  # noqa: PLC0415  (for the guest alone)
    from .nfsground import nfs  # noqa: PLC0415  (for the guest alone)
    from .trials import TRIALS  # noqa: PLC0415  (these import what they measure)

    trial = TRIALS[key]
    asked, patience = 1, time.monotonic() + _HOST_SECONDS
    NfsHost()
    with nfs(trial.mib, trial.microseconds) as ground, gathering(trial, ground, quick=quick) as gather:
        while True:
            path = os.path.join(OUT, f"ask-{asked}")
            if not os.path.exists(path):
                if time.monotonic() > patience:
                    return
                time.sleep(0.05)
                continue
            with open(path, encoding="utf-8") as file:
                asking = json.load(file)
            try:
                answer: dict[str, Any] = {"values": gather(asking["setting"], asking["run"])}
            except Exception as exc:  # it is the host that decides whether to go on
                traceback.print_exc()
                answer = {"failed": f"{type(exc).__name__}: {exc}"}
            _write(os.path.join(OUT, f"answer-{asked}"), answer)
            asked, patience = asked + 1, time.monotonic() + _HOST_SECONDS


if __name__ == "__main__":
    _serve(sys.argv[1], quick="quick" in sys.argv[2:])
