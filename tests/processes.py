"""Processes that need not be children of ours: ends them, and says what they do (proc(5))."""

import os
import signal
from pathlib import Path

from cloakfs.linux import process
from tests.waiting import wait_until


def kill(pid: int, seconds: float = 30) -> None:
    """Send SIGKILL; return when the process has ended."""
    held = process.held(pid)
    assert held is not None, f"there is no process {pid}"
    try:
        signal.pidfd_send_signal(held, signal.SIGKILL)
        assert process.ends(held, seconds), f"process {pid} has not ended within {seconds} s"
    finally:
        os.close(held)


def children(pid: int) -> list[int]:
    """Return the children that the main thread of a process has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()))


def waits(pid: int) -> int:
    """Return how often a process, or its main thread, has begun to wait for something."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    raise AssertionError(f"/proc/{pid}/status does not say how often it waited")


def wait_until_blocked(*pids: int) -> None:
    """Wait until each of these processes waits for something, or has ended: it did not run between ten looks in a row.

    What it waits for, only some kernels show (/proc/PID/wchan).
    """
    looks, before = 0, list[int]()

    def are_blocked() -> bool:
        nonlocal looks, before
        now = list(map(waits, pids))
        sleep = all(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"SDZ" for pid in pids)
        looks = looks + 1 if sleep and now == before else 0
        before = now
        return looks >= 10

    wait_until(are_blocked)
