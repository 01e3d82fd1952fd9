"""Ends processes that are not children of ours (waitpid(2)): daemons, guards, reapers."""

import os
import signal

from cloakfs.linux import process


def kill(pid: int, seconds: float = 30) -> None:
    """Send SIGKILL; return when the process has ended."""
    held = process.held(pid)
    assert held is not None, f"there is no process {pid}"
    try:
        signal.pidfd_send_signal(held, signal.SIGKILL)
        assert process.ends(held, seconds), f"process {pid} has not ended within {seconds} s"
    finally:
        os.close(held)
