"""The interface between the guard and any NFS server."""

import subprocess
from collections.abc import Sequence
from typing import Protocol

import trio

from ..linux import programs
from ..messages import UserError
from .plan import Mount
from .served import ServiceProblems


class ServerError(UserError):
    """The server cannot do what was asked; the text is one line that says why and what to do."""


class NfsServer(Protocol):
    """An NFS server and what it exports for the guard. Paths and clients are those of the mounts."""

    async def start(self, mounts: Sequence[Mount]) -> None:
        """Export the mounts, all of which answer, and return when the server answers; start it if it is not running.

        Raises:
            ServerError: the server does not answer.
        """

    async def change(self, mounts: Sequence[Mount], renewed: Sequence[Mount]) -> None:
        """Export these mounts from now on, and no others; those in `renewed` have replaced old mounts at their paths.

        Clients of the other mounts are not affected; those of renewed mounts can go on as soon as this returns.

        Raises:
            ServerError: the change failed; what is exported is then undefined, and another `change` may follow.
        """

    async def hold(self) -> None:
        """Have clients wait, as far as the server can, for what is exported and was unmounted just now.

        They wait until the next `change`. Where the server does not know this, they get an error.
        """

    def wants_local_locks(self) -> bool:
        """Whether mounts have to be made with `local_locks`, because clients could not lock, or claim, otherwise."""

    async def find_problems(self, mounts: Sequence[Mount]) -> ServiceProblems:
        """Ask the server, now, whether it exports these mounts to their clients; takes little more than a few seconds.

        It is asked what its own table lists. Where this machine is a client that an export admits, it is also asked
        over NFS, as that client.
        """

    async def repair(self) -> str | None:
        """Repair what others did to the server since the last call.

        Returns:
            what was repaired, or what is still wrong; None if nothing was wrong.
        """

    def notes(self) -> list[str]:
        """Return what administrators should know of the server, a line for each; nothing of it is an error."""

    async def stop(self) -> None:
        """Stop exporting the mounts, and stop the server if `start` had started it. Never raises ServerError."""


async def run(*command: str, hint: str = "", errors: bool = False) -> str:
    """Run a program and return its standard output, or what it has written to standard error (`errors`).

    Raises:
        ServerError: it is not installed (`hint` says what to do) or fails; the text is its own error output.
    """
    if programs.which(command[0], path=programs.SYSTEM_PATH) is None:
        raise ServerError(f"{command[0]}: not found" + (f"; {hint}" if hint else ""))
    done = await trio.run_process(  # noqa: TID251  (a guard acts for no caller)
        command, capture_stdout=True, capture_stderr=True, check=False, stdin=subprocess.DEVNULL,
        env=programs.SYSTEM_ENVIRONMENT,
    )  # fmt: skip
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())
        raise ServerError(
            f"{' '.join(command)}: {said or f'exit status {done.returncode}'}" + (f"; {hint}" if hint else "")
        )
    return (done.stderr if errors else done.stdout).decode("utf-8", "replace")
