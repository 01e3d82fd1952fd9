"""Starts a small process that outlives the daemon of a local mount, and unmounts the mount if the daemon could not.

A mount whose daemon was killed answers no requests, and would stay until somebody unmounts it. With `restart`, the
process also mounts again.
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
"""What the daemon tells the process (`CleanUp.say`)."""

# A mere fork of the daemon would in time duplicate most of its memory. With -I -S, next to nothing is imported, and
# nothing from the working directory.
_PROGRAM = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from cloakfs.mount import reaperprocess; reaperprocess.main()",
    os.path.dirname(os.path.dirname(os.path.abspath(cloakfs.__file__))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Again:
    """How to mount again after the daemon has died.

    Attributes:
        command: the command that mounts in the background.
        directory: the working directory of the command.
        log: the file that is told of it.
        restarts: how many times it was mounted again so far.
    """

    command: tuple[str, ...]
    directory: str
    log: str
    restarts: int = 0


class CleanUp:
    """The clean-up process of a mount. It starts before the mount is made, which may cover the process's program.

    It inherits none of the daemon's descriptors, because the session and the locks must end with the daemon. Everything
    else works without it, so a failure to start it is not fatal.

    Args:
        key: the key of the mount (`mount_key`).
        target: the mount point.
        again: how to mount again if the daemon dies; None if that is not wanted.
    """

    def __init__(self, key: str, target: str, again: Again | None = None) -> None:
        told, tell = os.pipe()
        self._tell = ownfiles.open(tell, "wb", buffering=0)
        words = [os.path.join(STATE_DIR, key), state_path(key), ownfiles.beside(state_path(key)), socket_of(key), "--"]
        if again is not None:
            words += [waiting_path(key), again.log, again.directory, str(again.restarts), *again.command]
        self._tells_more = again is not None
        silent = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, told)
            try:
                daemon = os.pidfd_open(os.getpid())
                stack.callback(os.close, daemon)
                # Once it has imported everything, it goes on as an orphan, and this call returns.
                programs.run(
                    [*_PROGRAM, target, str(daemon), *words], stdin=told, stdout=silent, stderr=silent,
                    pass_fds=[daemon], cwd="/", start_new_session=True, check=True,
                )  # fmt: skip
            except (OSError, subprocess.CalledProcessError) as exc:
                log.warning("%s: no clean-up process (%s): if the daemon is killed, its dead mount stays", target, exc)

    def take_charge(self, attached: Attached) -> None:
        """Tell the process which mount was made."""
        with contextlib.suppress(BrokenPipeError):  # the process does not exist
            self._tell.write(f"{attached.mount_id} {attached.device} ".encode())
        if not self._tells_more:
            self.close()

    def say(self, word: str) -> None:
        """Tell the process whether the mount is to be made again: `READY`, `ENDED` or `FAILED`.

        The process mounts again what was ready, unless it ended in an orderly way. What failed has been unmounted by
        the daemon itself, and is mounted again nevertheless.
        """
        if not self._tell.closed:
            with contextlib.suppress(BrokenPipeError):
                self._tell.write(f"{word} ".encode())

    def close(self) -> None:
        """Close the pipe: the mount was not made, or the process knows everything."""
        self._tell.close()
