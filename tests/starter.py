"""Runs `cloakfs` commands in processes that are forked from one which has already imported their modules.

The suite makes and ends about a thousand mounts, and to import the modules takes several times as long as either. The
processes are separate ones with an environment, a working directory and outputs of their own, as if they were started
anew. A test about the start itself starts Python. A command that is altered (`tests.altered`) imports what the
alterations do not use after they were made, as it would if it were started anew.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

from cloakfs.tuning import STANDARD, Tuning
from tests import altered
from tests.altered import Alteration, encoded

# A daemon has no more modules than it would have if it were started anew: some tests are about its memory.
_MOUNT = ("cloakfs_cli.main", "cloakfs_cli.mount")
_OTHERS = tuple(
    f"cloakfs_cli.{name}"
    for name in (
        "main", "umount", "status", "explain", "table", "check", "exposure", "prune", "trace", "events", "metrics",
    )
)  # fmt: skip
_ALTERED = ("cloakfs_cli.main", "tests.mount.alterations")
_MOST = 1 << 16  # bytes of a request
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Starter:
    """The process from which others are forked. It also ends with the last process that may send it requests.

    Args:
        modules: to be imported before.
    """

    def __init__(self, *modules: str) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.starter", str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, cwd=_ROOT,
            )  # fmt: skip

    def close(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def run(self, *arguments: str, text: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run one command, and return when it has ended; it is not ended early if the test is interrupted.

        Args:
            arguments: what follows `cloakfs`.
            text: how it is altered (`altered.encoded`).
            timeout: how long it may take, in seconds.

        Raises:
            TimeoutError: it takes longer. It goes on.
        """
        ours, theirs = socket.socketpair()
        with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with theirs:
                request = json.dumps([os.getcwd(), dict(os.environ), arguments, text]).encode()
                assert len(request) < _MOST
                socket.send_fds(self._requests, [request], [theirs.fileno(), out.fileno(), err.fileno()])
            ours.settimeout(timeout)
            try:
                status = ours.recv(10)
            except KeyboardInterrupt:
                ours.recv(10)  # what is half done could not be cleaned up
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(os.fsdecode(file.read()))
        return subprocess.CompletedProcess(arguments, int(status or b"-1"), *texts)


def run(
    *arguments: str, alterations: Sequence[Alteration] = (), tuning: Tuning = STANDARD, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run one command, altered, in a process that is forked from one of this run's; see `Starter.run`."""
    modules = _ALTERED if alterations else _MOUNT if arguments[:1] == ("mount",) else _OTHERS
    return _starter(*modules).run(*arguments, text=encoded(alterations, tuning), timeout=timeout)


@cache
def _starter(*modules: str) -> Starter:
    """Return the one with these modules, which starts when it is first needed."""
    made = Starter(*modules)
    atexit.register(made.close)
    return made


def _serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the children
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _become(request, *descriptors)
        for fd in descriptors:
            os.close(fd)


def _become(request: bytes, answer: int, out: int, err: int) -> NoReturn:
    """Run a command as this process, and send its exit status; -1 is for one that ends otherwise."""
    status: object = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for theirs, standard in ((out, 1), (err, 2)):
            os.dup2(theirs, standard)
            os.close(theirs)
        directory, environment, arguments, text = json.loads(request)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["cloakfs", *arguments]
        altered.main(text)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(answer, b"%d" % (status if isinstance(status, int) else status is not None))
    os._exit(0)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _serve(socket.socket(fileno=int(sys.argv[1])))
