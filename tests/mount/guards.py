"""A real guard in a process of its own, with a stand-in for the NFS server, so that it needs none."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import trio

from cli.common import OWN_COMMAND
from cloakfs.config.errors import Location
from cloakfs.config.options import Options
from cloakfs.nfs.guard import Guard
from cloakfs.nfs.plan import Mount, Plan
from cloakfs.nfs.served import Answers
from cloakfs.nfs.server import ServerError
from tests.mount.conftest import is_mounted, run

_TOP = Path(__file__).parents[2]


class NoServer:
    """See `server.Server`.

    Args:
        wrong: what is wrong with the server at present, if anything; it may also raise.
    """

    def __init__(self, wrong: Callable[[], str | None] = lambda: None) -> None:
        self._wrong = wrong

    async def start(self, mounts: Sequence[Mount]) -> None:
        pass

    async def change(self, mounts: Sequence[Mount], renewed: Sequence[Mount]) -> None:
        pass

    async def hold(self) -> None:
        pass

    async def ask(self, mounts: Sequence[Mount]) -> Answers:
        return Answers(self._wrong())

    async def check(self) -> str | None:
        if wrong := self._wrong():
            raise ServerError(wrong)
        return None

    async def stop(self) -> None:
        pass

    def notes(self) -> list[str]:
        return []


def serve(tree: str, path: str, run_dir: str, server: NoServer | None = None) -> None:
    """Mount `tree` at `path`, watch over it, and print `ready`; in the process that `guarding` starts."""
    mount = Mount(os.path.basename(path), path, tree, "*", "", Options(), Location("x.exports", 1, 1))
    plan = Plan("knfsd", os.path.dirname(path), (mount,), (), ())
    guard = Guard(plan, lambda: plan, server or NoServer(), run_dir, [*OWN_COMMAND, "mount"])
    trio.run(guard.run, lambda: print("ready", flush=True))


@contextlib.contextmanager
def guarding(script: str, tree: str, path: str, run_dir: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A guard that is ready; afterwards, nothing of it is left.

    Args:
        script: Python that calls `serve`; its arguments are those that follow.
        tree: the real tree.
        path: the mount point.
        run_dir: the guard's directory, which is made.
        more: further arguments.
    """
    os.makedirs(run_dir, 0o700)
    words = [sys.executable, "-c", script, tree, path, run_dir, *more]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=_TOP) as guard:
            try:
                assert guard.stdout is not None
                assert guard.stdout.readline() == "ready\n"
                yield guard
            finally:
                guard.terminate()
    finally:
        if is_mounted(path):
            run("umount", "--lazy", path)
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{run_dir}.lock")
