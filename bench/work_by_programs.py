"""Work that people have real programs do: ls(1), a build, git(1) and rsync(1)."""

import os
import subprocess
from functools import partial

from .homes import rights_of
from .job import Job, JobInputs, Make
from .tree import PACKAGE

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent"}

_UNPACK = f"mkdir src; tar -xzf ../{PACKAGE} -C src --strip-components=1"
_GIT = "git -c safe.directory=*"  # the directories above are not the worker's
_COMMIT = f"{_GIT} -C src init -q; {_GIT} -C src add .; {_GIT} -C src -c user.name=a -c user.email=a@b commit -qm all"


def _run(script: str, directory: str) -> None:
    command = ["/bin/sh", "-euc", script]
    done = subprocess.run(
        command, cwd=directory, env=_ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"exit status {done.returncode}: {done.stderr[-1000:]}")


def list_all(inputs: JobInputs) -> Job:
    """Have ls(1) list all directories, with the attributes of each file."""

    def batch() -> int:
        _run("exec ls -lR many >/dev/null", ".")
        return inputs.sizes.directories * inputs.sizes.per_directory

    return Job(batch)


def _in_own(script: str, before: str, after: str, inputs: JobInputs) -> Job:
    """Run a script in the directory `own`; what it needs is made before, and goes afterwards."""
    os.umask(0o777 & ~rights_of(inputs.kind).directory)

    def batch() -> int:
        _run(script, "own")
        return 1

    return Job(batch, partial(_run, before, "own"), partial(_run, after, "own"), warm=False)


PROGRAMS: dict[str, Make] = {
    what: partial(_in_own, script, before, after)
    for what, script, before, after in (
        ("tar+make+rm", f"{_UNPACK}; make -C src CC=gcc >/dev/null; rm -r src", "rm -rf src", ":"),
        ("git status", f"{_GIT} -C src status --short", f"{_UNPACK}; {_COMMIT}", "rm -rf src"),
        ("git clone", f"{_GIT} clone -q --local src clone", f"{_UNPACK}; {_COMMIT}", "rm -rf src clone"),
        ("rsync -a", "rsync -a src/ copy", _UNPACK, "rm -rf src copy"),
    )
}
"""What is done; each is one run."""
