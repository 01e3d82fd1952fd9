"""Reads the options of a mount again, in a process of its own.

To parse and check 100,000 definitions, and to make tables of them, takes seconds. A thread would not do: while it runs,
the session loop gets to run only now and then, and all callers wait. What comes back consists of numbers in arrays and
of one text (`columns`), which is taken over in a moment.
"""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from ..background.tasks import cause
from ..config.options import Options
from ..config.render import format_options
from ..fuse.attach import MountError
from ..linux import programs
from ..policy import Policy

# As in `reaper`: nothing is imported from the working directory.
_PROGRAM = (sys.executable, "-P", "-c", "from cloakfs.mount.reread import main; main()")


# Requests that wait for the daemon come first.
_NICENESS = 5


class Reread(NamedTuple):
    """Options that were read again, with the tables of their definitions, and as they are published (`as_json`)."""

    options: Options
    published: bytes


def as_json(options: Options) -> bytes:
    """Return the options as text for `mount -o`, as JSON."""
    return json.dumps(format_options(options)).encode()


def read_apart(read: Callable[[], Options]) -> Reread:
    """In a thread that has no descriptors (`linux.apart`): have a process of its own read the options, and return them.

    Args:
        read: reads the options; it must be possible to pickle it.

    Raises:
        MountError: it has failed, or the process has.
    """
    try:
        done = programs.run(_PROGRAM, input=pickle.dumps(read), stdout=subprocess.PIPE, check=True)
        reply = io.BytesIO(done.stdout)
        answer = pickle.load(reply)
    except (OSError, subprocess.SubprocessError, pickle.PickleError, EOFError) as exc:
        raise MountError(f"the process that reads the options has failed: {exc}") from exc
    if isinstance(answer, str):
        raise MountError(answer)
    return Reread(answer, reply.read())


def main() -> None:
    """Read and answer, as the process that `read_apart` has started."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.nice(_NICENESS)
    answer: Options | str
    published = b""
    try:
        answer = options = pickle.load(sys.stdin.buffer)()
        Policy(options)  # makes the tables, which are kept with the definitions
        published = as_json(options)
    except (MountError, ValueError, OSError) as exc:
        answer = str(exc)
    except Exception as exc:
        answer = cause(exc)
    sys.stdout.buffer.write(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL) + published)
