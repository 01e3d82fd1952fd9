"""Runs tests in a guest whose kernel has an NFS server and client (bench/lab).

The guest runs pytest on the wanted tests, and writes each report as a line of JSON as soon as it has it; the host's
pytest logs these reports as its own.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bench.clone import ROOT
from bench.lab.guest import OUT, Guest, inside, missing

__all__ = ("OUT", "ROOT", "Guest", "Tests", "inside", "missing")


class Tests:
    """The tests of one session that run in a guest, and their reports as they come in."""

    def __init__(self, config: pytest.Config, ids: Sequence[str]) -> None:
        self._config = config
        passed = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("CLOAKFS_NFS_")]
        arguments = ["-p", "no:cacheprovider", "--timeout=280", *(os.path.join(ROOT, i) for i in ids)]
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
                    raise RuntimeError(f"the guest ended without a report on {nodeid}:\n{self._guest.said()[-10000:]}")
                continue
            time.sleep(0.1)

    def close(self) -> None:
        self._guest.close()
