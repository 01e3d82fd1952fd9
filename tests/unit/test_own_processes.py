"""Processes that cloakfs starts import nothing from the working directory, and inherit no descriptors of others."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.common import OWN_COMMAND

SOURCES = Path(__file__).parents[2]

_HOSTILE = """\
import os
os.close(os.open(os.environ["MARK"], os.O_CREAT | os.O_WRONLY))
raise SystemExit("imported from the working directory")
"""


def test_the_working_directory_is_nobodys_module(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    place = tmp_path / "cwd"
    for package in ("cloakfs", "cloakfs_cli", "bench"):
        (place / package).mkdir(parents=True)
        for name in ("__init__.py", "main.py"):
            (place / package / name).write_text(_HOSTILE)
    for module in ("click", "rich", "trio", "pyfuse3", "json", "contextlib", "sdnotify"):
        (place / f"{module}.py").write_text(_HOSTILE)
    done = subprocess.run(
        [*OWN_COMMAND, "mount", "--help"], cwd=place, env={**os.environ, "MARK": str(mark)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, mark.exists()) == (0, False), done.stderr


def test_python_is_started_in_one_way() -> None:
    """Whoever starts an interpreter otherwise imports what lies in the working directory."""
    found = [
        str(file.relative_to(SOURCES))
        for folder in ("cloakfs", "cli", "bench")
        for file in (SOURCES / folder).rglob("*.py")
        if re.search(r"sys\.executable", file.read_text())
    ]
    assert sorted(found) == [
        "cli/common.py",
        "cloakfs/kernelcache/sharedwatch.py",
        "cloakfs/mount/reaper.py",
        "cloakfs/mount/reread.py",
        "cloakfs/nfs/nfsdrestart.py",
    ]


# A daemon that says which descriptors it has, and stays.
_DAEMON = """\
import logging, os, signal
from cli import background
background.record_inherited()
own, other = os.pipe()

def work(ready):
    with open(os.environ["TOLD"], "w") as told:
        print(os.getpid(), *os.listdir("/proc/self/fd"), file=told)
    os.fstat(own)  # what is our own stays
    ready()
    {rest}

background.{how}(work, logging.INFO, *{more!r})
"""


@pytest.mark.parametrize(("how", "rest"), [("in_background", "signal.pause()"), ("in_foreground", "os._exit(0)")])
def test_a_daemon_keeps_no_descriptor_of_others(tmp_path: Path, how: str, rest: str) -> None:
    told = tmp_path / "told"
    more = [str(tmp_path / "log")] if how == "in_background" else []
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    pid = None
    try:
        subprocess.run(
            [sys.executable, "-c", _DAEMON.format(how=how, rest=rest, more=more)], check=True, pass_fds=[lock],
            cwd=SOURCES, env={**os.environ, "TOLD": str(told)}, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
        words = told.read_text().split()
        pid = int(words[0])
        assert str(lock) not in words[1:]
        os.close(lock)
        lock = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
        if pid and how == "in_background":
            os.kill(pid, signal.SIGKILL)
