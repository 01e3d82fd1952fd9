"""The host sends requests to the laboratory's guest, whose kernel has NFS, and the guest replies.

Both share a directory. `request-N` says what to do, `reply-N` has the result, or why there is none.
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
from .guest import OUT, Guest
from .shared import GuestEnded

_PATIENCE = 3600.0

_HOST_SECONDS = 300.0
"""If no request comes for so long, the host's process was killed: between two measurements it only writes a line."""


@contextlib.contextmanager
def guest_requests(module: str, *arguments: str) -> Iterator[Callable[[Any], Any]]:
    """Boot a guest that runs a module that calls `serve_requests`; give a function that sends a request and returns
    the result. At the end, end the guest.

    The function raises RuntimeError with the reason if the request failed, and GuestEnded if no reply will come.
    """
    with contextlib.ExitStack() as stack:
        try:
            with undisturbed():
                guest = stack.enter_context(Guest(f"{shlex.join(module_command(module, *arguments))}\n"))
            sent = 0

            def request(what: Any) -> Any:
                nonlocal sent
                sent += 1
                guest.write(f"request-{sent}", json.dumps(what))
                try:
                    reply = json.loads(guest.wait_for(f"reply-{sent}", _PATIENCE))
                except GuestEnded as exc:
                    raise GuestEnded(_in_a_line(str(exc))) from None
                if "failed" in reply:
                    raise RuntimeError(f"{reply['failed']} (the guest said: {_in_a_line(guest.said()[-500:])})")
                return reply["result"]

            yield request
        finally:
            with undisturbed():
                stack.close()


def serve_requests(do: Callable[[Any], Any]) -> None:
    """In the guest: do what the host requests, until the guest is ended, or the host has gone."""
    number, patience = 1, time.monotonic() + _HOST_SECONDS
    while True:
        path = os.path.join(OUT, f"request-{number}")
        if not os.path.exists(path):
            if time.monotonic() > patience:
                return
            time.sleep(0.05)
            continue
        with open(path, encoding="utf-8") as file:
            what = json.load(file)
        try:
            reply = {"result": do(what)}
        except Exception as exc:  # it is the host that decides whether to go on
            traceback.print_exc()
            reply = {"failed": f"{type(exc).__name__}: {exc}"}
        _write(os.path.join(OUT, f"reply-{number}"), reply)
        number, patience = number + 1, time.monotonic() + _HOST_SECONDS


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _write(path: str, reply: Any) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(reply, file)
    os.rename(f"{path}.new", path)
