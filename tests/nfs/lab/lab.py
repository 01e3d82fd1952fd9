"""Runs tests in a guest whose kernel has an NFS server and client: user-mode Linux, an ordinary process.

The guest sees the host's files (init, next to this), runs pytest on the wanted tests, and writes each report as a line
of JSON as soon as it has it; the host's pytest logs these reports as its own.
"""

import contextlib
import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

OUT = "/run/out"
"""In the guest: the directory it shares with the host."""

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
UML = "/usr"

_MEMORY = "1500M"
_BOOT_SECONDS = 60


def inside() -> bool:
    """Is this the guest?"""
    return os.path.exists(os.path.join(OUT, "command"))


def missing() -> str | None:
    """Why there cannot be a guest here, with the way out."""
    if os.geteuid() != 0:
        return "needs root: the guest sees the host's files as the user who runs it"
    if not _kernel() or not glob.glob(os.path.join(UML, "lib", "uml", "modules", "*")):
        return "needs user-mode Linux (scripts/setup --test)"
    for program in ("/usr/sbin/exportfs", "/usr/sbin/rpc.nfsd", "/sbin/rpcbind", "/sbin/mount.nfs"):
        if not os.path.exists(program):
            return f"needs {program} (scripts/setup --test)"
    return None


def _kernel() -> str | None:
    path = os.path.join(UML, "bin", "linux.uml")
    return path if os.access(path, os.X_OK) else None


class Guest:
    """One guest from boot to power-off. Use it as a context manager: whatever happens, its processes end.

    Args:
        command: shell text to run in it as root.
    """

    def __init__(self, command: str) -> None:
        self.out = tempfile.mkdtemp(prefix="cloakfs-lab-")
        with open(os.path.join(self.out, "command"), "w", encoding="utf-8") as file:
            file.write(command)
        modules = glob.glob(os.path.join(UML, "lib", "uml", "modules", "*"))[0]
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else self.out
        here = os.path.dirname(__file__)
        init = os.path.join(here, "init")
        wide_fpu = os.path.join(self.out, "wide_fpu.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", wide_fpu, os.path.join(here, "wide_fpu.c")], check=True)
        with open(os.path.join(self.out, "console"), "wb") as console:
            self._process = subprocess.Popen(
                [_kernel() or "", f"mem={_MEMORY}", "quiet", "loglevel=1", "root=none", "rootfstype=hostfs",
                 "rootflags=/", "ro", f"init={init}", f"lab.out={self.out}", f"lab.modules={modules}",
                 f"lab.root={ROOT}", f"uml_dir={self.out}", "umid=guest", "con=null", "con0=null,fd:1"],
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TMPDIR": memory, "LD_PRELOAD": wide_fpu},
            )  # fmt: skip

    def read(self, name: str) -> str:
        """A file that the guest left, "" if it did not."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(os.path.join(self.out, name), encoding="utf-8", errors="replace") as file,
        ):
            return file.read()
        return ""

    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        # All of its processes are in the session that it began.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.out)

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Tests:
    """The tests of one session that run in a guest, and their reports as they come in."""

    def __init__(self, config: pytest.Config, ids: Sequence[str]) -> None:
        self._config = config
        passed = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("CLOAKFS_NFS_")]
        arguments = ["-p", "no:cacheprovider", "--timeout=200", *(os.path.join(ROOT, i) for i in ids)]
        self._guest = Guest(
            f"cd {shlex.quote(ROOT)} && {shlex.join(['env', *passed, sys.executable])} -m pytest -q"
            f" {shlex.join(arguments)}\n"
        )
        self._at = 0

    def reports(self, nodeid: str) -> Iterator[pytest.TestReport]:
        """The reports on one test (setup, call, teardown), waiting for them.

        They come in the order of the tests.
        """
        while True:
            lines = self._guest.read("reports").splitlines(keepends=True)
            while self._at < len(lines) and lines[self._at].endswith("\n"):
                data: dict[str, Any] = json.loads(lines[self._at])
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
                if report.nodeid != nodeid:
                    return
                if isinstance(report.longrepr, list):  # JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                self._at += 1
                yield report
                if report.when == "teardown":
                    return
            if not self._guest.is_running():
                # It may have written between the reading and the ending.
                if self._at >= len(self._guest.read("reports").splitlines()):
                    raise RuntimeError(f"the guest ended without a report on {nodeid}:\n{self.log()}")
                continue
            time.sleep(0.1)

    def log(self) -> str:
        return self._guest.read("console") + self._guest.read("log")[-10000:]

    def close(self) -> None:
        self._guest.close()
