"""What the guard asks of an NFS server, whichever it is."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Protocol

import trio

from .plan import Mount


class ServerError(Exception):
    """The server cannot be made to do it; the text is one line that says why and what to do."""


class Server(Protocol):
    """An NFS server, and what it exports for us. Paths and clients are those of the mounts."""

    async def start(self, mounts: Sequence[Mount]) -> None:
        """Export the mounts, all of which answer, and return when the server does; start it if it is not running.

        Raises:
            ServerError: it does not.
        """

    async def change(self, mounts: Sequence[Mount], renewed: Sequence[Mount]) -> None:
        """Export these mounts from now on, and no others; `renewed` are new ones at the place of old ones.

        Clients of the others go on; those of renewed mounts do as soon as this returns.

        Raises:
            ServerError: it cannot; what is exported is then unclear, and another `change` may follow.
        """

    async def check(self) -> str | None:
        """Put right what somebody else did to the server since the last call.

        Returns:
            what it was, or what is still wrong; None if all is well.
        """

    async def stop(self) -> None:
        """Export nothing any more, and stop the server if `start` had started it. Never raises ServerError."""


async def run(*command: str, hint: str = "") -> str:
    """The standard output of a program.

    Raises:
        ServerError: it is not there (`hint` says what to do) or fails; with its own words.
    """
    if shutil.which(command[0], path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
        raise ServerError(f"{command[0]}: not found" + (f"; {hint}" if hint else ""))
    done = await trio.run_process(
        command, capture_stdout=True, capture_stderr=True, check=False, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())
        raise ServerError(
            f"{' '.join(command)}: {said or f'exit status {done.returncode}'}" + (f"; {hint}" if hint else "")
        )
    return done.stdout.decode("utf-8", "replace")
