"""Has a small process outlive the daemon of a local mount, which takes the mount off if the daemon could not.

A mount whose daemon was killed answers nobody. It would stay until somebody takes it off.
"""

import contextlib
import logging
import os
import subprocess
import sys

from .control import socket_of
from .files import beside
from .mounted import STATE_DIR, state_path
from .mountpoint import Attached

log = logging.getLogger(__name__)

# A fork of the daemon would in time have most of its memory twice. -I -S: next to nothing is imported, and nothing from
# the working directory.
_PROGRAM = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from cloakfs import cleanupprocess; cleanupprocess.main()",
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)  # fmt: skip


class CleanUp:
    """The clean-up process of a mount that is about to be made: its program may lie where the mount is going to.

    It has none of the daemon's descriptors: the session is to end with the daemon, and locks are. Without it all else
    works, so that it is not fatal if it cannot be had.

    Args:
        key: the mount's (`mount_key`).
        target: the mount point.
    """

    def __init__(self, key: str, target: str) -> None:
        told, tell = os.pipe()
        self._tell = open(tell, "wb", buffering=0)  # noqa: SIM115  (until the mount is made, or is not)
        words = (os.path.join(STATE_DIR, key), state_path(key), beside(state_path(key)), socket_of(key))
        silent = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, told)
            try:
                daemon = os.pidfd_open(os.getpid())
                stack.callback(os.close, daemon)
                # Once all is imported, it goes on as nobody's child, and this returns.
                subprocess.run(
                    [*_PROGRAM, target, str(daemon), *words], stdin=told, stdout=silent, stderr=silent,
                    pass_fds=[daemon], cwd="/", start_new_session=True, check=True,
                )  # fmt: skip
            except (OSError, subprocess.CalledProcessError) as exc:
                log.warning("%s: no clean-up process (%s): if the daemon is killed, a dead mount stays", target, exc)

    def take_charge(self, attached: Attached) -> None:
        """The mount was made; this is it."""
        with contextlib.suppress(BrokenPipeError):  # there is no process
            self._tell.write(f"{attached.mount_id} {attached.device}".encode())
        self.close()

    def close(self) -> None:
        """The mount was not made, or all is said."""
        self._tell.close()
