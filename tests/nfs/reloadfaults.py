"""Makes a step of a guard's reload fail, whichever: `install` runs in the guard, and the test says when and how.

What a guard does that can fail goes through few functions. Each call of one of them is a step, and gets a number.
"""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import trio

from cloakfs import linux
from cloakfs.linux import ownfiles
from cloakfs.nfs import ganesha, guard, knfsd
from tests.altered import replace

FAULTS = ("error", "server", "daemon")
"""A step fails with an error of the system; or it works, but the server, or the daemon of a mount that stays, has been
killed when it begins."""

ENDS = ("killed", "interrupted", "alone")
"""At a step, the guard and its starters are killed; or the guard is interrupted; or its starters alone are killed."""


class _Steps:
    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0
        self._given = 0
        self._is_acting = False

    def take(self, what: str) -> None:
        """Count a step, and have it fail if it is its turn. Each order counts from its own time on."""
        try:
            with open(self._path, encoding="ascii") as file:
                given = os.fstat(file.fileno()).st_mtime_ns
                at, how, victim, kind = file.read().split("\n")
        except (FileNotFoundError, ValueError):
            return
        if given != self._given:
            self._given, self._count = given, 0
        if self._is_acting or not what.startswith(kind):
            return
        self._count += 1
        with open(f"{self._path}.steps", "a", encoding="utf-8") as log:
            log.write(f"{self._count} {what}\n")
        if self._count != int(at):
            return
        if how == "error":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (step {at}: {what})")
        self._is_acting = True  # what it does itself is no step
        if how in ENDS:
            _end(how)
        for pid in _processes(victim) if how in FAULTS else ():
            os.kill(pid, signal.SIGKILL)
        self._is_acting = False


def _end(how: str) -> None:
    """End this guard, or those who wait until it is ready."""
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    starter = os.getppid()
    with open(f"/proc/{starter}/stat", encoding="utf-8") as file:
        first = int(file.read().rpartition(")")[2].split()[1])
    for pid in (first, starter):
        os.kill(pid, signal.SIGKILL)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def _processes(words: str) -> list[int]:
    """Return the processes in whose command line this is."""
    found = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found]


def install(path: str) -> None:
    """Count the steps of this process whenever there is an order at `path` (`Reloads.fail_at`)."""
    steps = _Steps(path)

    def before(owner: Any, name: str, what: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            steps.take(what(*arguments))
            return original(*arguments, **more)

        replace(owner, name, counted)

    before(ownfiles, "replace", lambda path, *_: f"write {os.path.basename(path)}")
    before(trio, "run_process", lambda command, *_: f"run {os.path.basename(command[0])}")
    before(guard, "detach", lambda path: f"unmount {os.path.basename(path)}")
    before(guard, "end", lambda *_: "end a daemon")
    before(os, "kill", lambda *_: "send a signal")
    before(linux, "mount", lambda source, *_: f"mount {os.path.basename(source)}")
    before(linux, "umount", lambda path, *_: f"unbind {os.path.basename(path)}")
    before(trio.Process, "send_signal", lambda *_: "reload the server")
    before(ganesha.Ganesha, "current", lambda *_: "ask the server")
    before(knfsd, "run", lambda *command: f"run {command[0]}")
