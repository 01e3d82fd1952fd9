"""The host asks, and the laboratory's guest, whose kernel has NFS, answers.

Both share a directory. `ask-N` says what to do, `answer-N` has what came of it, or why nothing did.
"""

import contextlib
import json
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ..clone import module_command
from ..workers import undisturbed
from .guest import OUT, Guest, GuestEnded

_PATIENCE = 3600.0

_HOST_SECONDS = 300.0
"""If the host asks nothing for so long, it was killed: between two measurements it only writes a line."""


@contextlib.contextmanager
def asking(module: str, *arguments: str) -> Iterator[Callable[[Any], Any]]:
    """Boot a guest that runs a module which calls `answer`; give a function that asks it. At the end, end the guest.

    The function raises RuntimeError with the reason if what it asked for has failed, and GuestEnded if no answer will
    come.
    """
    with contextlib.ExitStack() as stack:
        try:
            with undisturbed():
                guest = stack.enter_context(Guest(f"{shlex.join(module_command(module, *arguments))}\n"))
            asked = 0

            def ask(what: Any) -> Any:
                nonlocal asked
                asked += 1
                guest.write(f"ask-{asked}", json.dumps(what))
                try:
                    told = json.loads(guest.wait_for(f"answer-{asked}", _PATIENCE))
                except GuestEnded as exc:
                    raise GuestEnded(_in_a_line(str(exc))) from None
                if "failed" in told:
                    raise RuntimeError(f"{told['failed']} (the guest said: {_in_a_line(guest.said()[-500:])})")
                return told["answer"]

            yield ask
        finally:
            with undisturbed():
                stack.close()


def answer(do: Callable[[Any], Any]) -> None:
    """In the guest: do whatever the host asks, until the guest is ended, or the host has gone."""
    asked, patience = 1, time.monotonic() + _HOST_SECONDS
    while True:
        path = os.path.join(OUT, f"ask-{asked}")
        if not os.path.exists(path):
            if time.monotonic() > patience:
                return
            time.sleep(0.05)
            continue
        with open(path, encoding="utf-8") as file:
            what = json.load(file)
        try:
            told = {"answer": do(what)}
        except Exception as exc:  # it is the host that decides whether to go on
            traceback.print_exc()
            told = {"failed": f"{type(exc).__name__}: {exc}"}
        _write(os.path.join(OUT, f"answer-{asked}"), told)
        asked, patience = asked + 1, time.monotonic() + _HOST_SECONDS


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _write(path: str, told: Any) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.rename(f"{path}.new", path)
