"""A real guard in a process of its own, with a stand-in for the NFS server, so that it needs none."""

import base64
import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from cli.common import FORKED
from cloakfs.background.forkserver import ForkServer
from cloakfs.config.errors import Location
from cloakfs.config.options import Options
from cloakfs.nfs import guard, stale
from cloakfs.nfs.plan import Mount, Plan
from cloakfs.nfs.served import ServiceProblems
from cloakfs.nfs.server import ServerError
from cloakfs.tuning import STANDARD, Tuning
from tests.altered import Alteration, replace
from tests.mount.conftest import is_mounted, run
from tests.mount.faults import FAULTS

_TOP = Path(__file__).parents[2]


class NoServer:
    """See `server.NfsServer`.

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

    def wants_local_locks(self) -> bool:
        return False

    async def find_problems(self, mounts: Sequence[Mount]) -> ServiceProblems:
        return ServiceProblems(self._wrong())

    async def repair(self) -> str | None:
        if wrong := self._wrong():
            raise ServerError(wrong)
        return None

    async def stop(self) -> None:
        pass

    def notes(self) -> list[str]:
        return []


def wrong_while(path: str) -> str | None:
    """Return what is wrong with the server while there is a file at `path`."""
    return "it does not answer" if os.path.exists(path) else None


class Faulty(NoServer):
    """A server that fails as the file `check` in the guard's directory says, and does not stop.

    Args:
        run_dir: the directory.
    """

    def __init__(self, run_dir: str) -> None:
        super().__init__()
        self._run_dir = run_dir

    async def repair(self) -> str | None:
        _fail_as_told(f"{self._run_dir}/check")
        return None

    async def stop(self) -> None:
        raise ZeroDivisionError("arbitrary")


def fail_to_watch(run_dir: str) -> None:
    """Fail to watch a daemon as the file `pidfd` in the guard's directory says."""
    pidfd_open = os.pidfd_open

    def failing(pid: int, flags: int = 0) -> int:
        _fail_as_told(f"{run_dir}/pidfd")
        return pidfd_open(pid, flags)

    replace(os, "pidfd_open", failing)


def _fail_as_told(path: str) -> None:
    try:
        fault = Path(path).read_text()
        os.unlink(path)
    except OSError:
        return
    raise FAULTS[fault]()


def be_of_version(answers: int, writes: int) -> None:
    """Have a guard that answers, and writes down, in these versions."""
    replace(guard, "VERSION", answers)
    replace(stale, "VERSION", writes)


class _Service(NamedTuple):
    tree: str
    path: str
    run_dir: str
    make_server: Callable[[], NoServer]
    altered: Sequence[Alteration]
    tuning: Tuning


def serve(text: str) -> None:
    """Mount, watch over it, and print `ready`; in the process that `guarding` starts."""
    service: _Service = pickle.loads(base64.b64decode(text))
    for alter in service.altered:
        alter()
    path = service.path
    mount = Mount(os.path.basename(path), path, service.tree, "*", "", Options(), Location("x.exports", 1, 1))
    plan = Plan("knfsd", os.path.dirname(path), (mount,), (), ())
    cloakfs = ForkServer(FORKED)
    one = guard.Guard(plan, lambda: plan, service.make_server(), service.run_dir, cloakfs, tuning=service.tuning)
    trio.run(one.run, lambda: print("ready", flush=True))


@contextlib.contextmanager
def guarding(
    tree: str,
    path: str,
    run_dir: str,
    make_server: Callable[[], NoServer] = NoServer,
    altered: Sequence[Alteration] = (),
    tuning: Tuning = STANDARD,
) -> Iterator[subprocess.Popen[str]]:
    """A guard that is ready; afterwards, nothing of it is left.

    Args:
        tree: the real tree.
        path: the mount point.
        run_dir: the guard's directory, which is made.
        make_server: makes the server, in the guard's process.
        altered: how the guard is altered.
        tuning: times and bounds.
    """
    os.makedirs(run_dir, 0o700)
    text = base64.b64encode(pickle.dumps(_Service(tree, path, run_dir, make_server, altered, tuning))).decode()
    words = [sys.executable, "-c", f"from tests.mount.guards import serve; serve({text!r})"]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=_TOP) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                process.terminate()
    finally:
        if is_mounted(path):
            run("umount", "--lazy", path)
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{run_dir}.lock")
