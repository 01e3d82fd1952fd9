"""Starts a small process that outlives the daemon of a local mount, and unmounts the mount if the daemon could not.

A mount whose daemon was killed answers no requests, and would stay until somebody unmounts it.
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

# A mere fork of the daemon would in time duplicate most of its memory. With -I -S, next to nothing is imported, and
# nothing from the working directory.
_PROGRAM = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from cloakfs import cleanupprocess; cleanupprocess.main()",
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)  # fmt: skip


class CleanUp:
    """The clean-up process of a mount. It starts before the mount is made, which may cover the process's program.

    It inherits none of the daemon's descriptors, because the session and the locks must end with the daemon. Everything
    else works without it, so a failure to start it is not fatal.

    Args:
        key: the key of the mount (`mount_key`).
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
                # Once it has imported everything, it goes on as an orphan, and this call returns.
                subprocess.run(
                    [*_PROGRAM, target, str(daemon), *words], stdin=told, stdout=silent, stderr=silent,
                    pass_fds=[daemon], cwd="/", start_new_session=True, check=True,
                )  # fmt: skip
            except (OSError, subprocess.CalledProcessError) as exc:
                log.warning("%s: no clean-up process (%s): if the daemon is killed, its dead mount stays", target, exc)

    def take_charge(self, attached: Attached) -> None:
        """Tell the process which mount was made."""
        with contextlib.suppress(BrokenPipeError):  # the process does not exist
            self._tell.write(f"{attached.mount_id} {attached.device}".encode())
        self.close()

    def close(self) -> None:
        """Close the pipe: the mount was not made, or the process knows everything."""
        self._tell.close()
