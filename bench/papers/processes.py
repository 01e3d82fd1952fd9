"""Does things as a user: runs programs, whose times are taken, and functions in a process of their own."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import workers
from ..workers import T, WorkError
from .configurations import Configuration

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent"}
"""Of every program that is started."""


class ProgramTimes(NamedTuple):
    """How long a program took, in seconds, with all that it started: elapsed, in user mode, in the kernel."""

    elapsed: float
    user: float
    system: float

    @property
    def waiting(self) -> float:
        """The time in which neither it nor the kernel on its behalf computed: the paper's estimate of I/O."""
        return self.elapsed - self.user - self.system

    def __add__(self, other: object) -> "ProgramTimes":
        assert isinstance(other, ProgramTimes)
        return ProgramTimes(self.elapsed + other.elapsed, self.user + other.user, self.system + other.system)


def timed(command: Sequence[str], directory: str, case: Configuration) -> ProgramTimes:
    """Run a program as the caller of a case, and return its times.

    Raises:
        RuntimeError: its exit status is not 0.
    """
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        # The caller enters the directory, which root may not see; wait4, which returns the times, reaps the child.
        process = subprocess.Popen(
            ["env", "-C", directory, *command], env=ENVIRONMENT, umask=0o022,
            user=case.uid, group=case.uid, extra_groups=case.groups,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.kill()
            process.wait()
            raise
        elapsed = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            said = " ".join(errors.read()[-500:].decode("utf-8", "replace").split())
            raise RuntimeError(f"{case.name}: {command[0]}: exit status {process.returncode}: {said}")
    return ProgramTimes(elapsed, usage.ru_utime, usage.ru_stime)


def done_as(case: Configuration, directory: str, do: Callable[[], T]) -> T:
    """Call a function in a process of its own, as the caller of a case, in a directory; return what it returns.

    Raises:
        RuntimeError: it failed.
    """
    try:
        return workers.done_as(case.uid, directory, do, case.groups)
    except WorkError as exc:
        raise RuntimeError(f"{case.name}: {exc}") from exc
