"""Starts the reaper of a local mount: a small process that outlives the daemon, and unmounts what a dead one has left.

A mount whose daemon was killed answers no requests, and would stay until it is unmounted by hand. With `restart`, the
reaper also mounts again.
"""

import contextlib
import logging
import os
import subprocess
import sys
from dataclasses import dataclass

import cloakfs

from ..fuse.attach import Attached
from ..linux import ownfiles, programs
from ..state.client import socket_of
from ..state.runtime import STATE_DIR, state_path, waiting_path

log = logging.getLogger(__name__)

READY, ENDED, FAILED = "ready", "ended", "failed"
"""What the daemon reports to the reaper (`Reaper.report`)."""

# A mere fork of the daemon would in time duplicate most of its memory. With -I -S, next to nothing is imported, and
# nothing from the working directory.
_PROGRAM = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from cloakfs.mount import reaperprocess; reaperprocess.main()",
    os.path.dirname(os.path.dirname(os.path.abspath(cloakfs.__file__))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """How to mount again after the daemon has died.

    Attributes:
        command: the command that mounts in the background.
        directory: the working directory of the command.
        log: the log file in which the reaper notes what it does.
        restarts: how many times it was mounted again so far.
    """

    command: tuple[str, ...]
    directory: str
    log: str
    restarts: int = 0


class Reaper:
    """The daemon's end of the reaper of its mount, which starts before the mount is made, which may cover the program.

    It inherits none of the daemon's descriptors, because the session and the locks must end with the daemon. Everything
    else works without it, so a failure to start it is not fatal.

    Args:
        key: the key of the mount (`mount_key`).
        target: the mount point.
        plan: how to mount again if the daemon dies; None if that is not wanted.
    """

    def __init__(self, key: str, target: str, plan: RestartPlan | None = None) -> None:
        reader, writer = os.pipe()
        self._pipe = ownfiles.open(writer, "wb", buffering=0)
        words = [os.path.join(STATE_DIR, key), state_path(key), ownfiles.beside(state_path(key)), socket_of(key), "--"]
        if plan is not None:
            words += [waiting_path(key), plan.log, plan.directory, str(plan.restarts), *plan.command]
        self._mounts_again = plan is not None
        silent = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, reader)
            try:
                daemon = os.pidfd_open(os.getpid())
                stack.callback(os.close, daemon)
                # Once it has imported everything, it goes on as an orphan, and this call returns.
                programs.run(
                    [*_PROGRAM, target, str(daemon), *words], stdin=reader, stdout=silent, stderr=silent,
                    pass_fds=[daemon], cwd="/", start_new_session=True, check=True,
                )  # fmt: skip
            except (OSError, subprocess.CalledProcessError) as exc:
                log.warning("%s: no reaper (%s): if the daemon is killed, its dead mount stays", target, exc)

    def assign(self, attached: Attached) -> None:
        """Report which mount was made."""
        with contextlib.suppress(BrokenPipeError):  # there is no reaper
            self._pipe.write(f"{attached.mount_id} {attached.device} ".encode())
        if not self._mounts_again:
            self.close()

    def report(self, word: str) -> None:
        """Report whether the mount is to be made again: `READY`, `ENDED` or `FAILED`.

        The reaper mounts again what was ready, unless it ended in an orderly way. What failed has been unmounted by
        the daemon itself, and is mounted again nevertheless.
        """
        if not self._pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                self._pipe.write(f"{word} ".encode())

    def close(self) -> None:
        """Close the pipe: the mount was not made, or the reaper knows everything."""
        self._pipe.close()
