"""Programs that the daemon runs, as itself (`linux.ownfiles`): execve(2) keeps the groups of the thread that calls it.

These are those of subprocess and shutil, with their names.
"""

import shutil
import subprocess

from .credentials import as_daemon

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM_ENVIRONMENT = {"PATH": SYSTEM_PATH, "LC_ALL": "C"}
"""For programs of the system, whatever the environment of the daemon is."""

run = as_daemon(subprocess.run)
which = as_daemon(shutil.which)


class Popen(subprocess.Popen[bytes]):
    """A program that runs in the background."""

    __init__ = as_daemon(subprocess.Popen.__init__)
