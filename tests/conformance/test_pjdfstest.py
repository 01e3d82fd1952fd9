"""pjdfstest: every case ends on a mount as it does on the backing file system."""

from __future__ import annotations

import grp
import pwd
import re
import shutil
from pathlib import Path

import pytest

from .harness import SUITES, Mount, Result, Workspace, disagreements, known_differences, run

# Two users with a group of their own, which every Debian has. One is nobody, as in the suite's own
# configuration: what a range map does with that id is to show in the result.
USERS = ("nobody", "daemon")
# Longer than a tick of the slowest kernel clock (100 Hz), which is what ext4 takes its times from.
NAPTIME = 0.02
TIMEOUT = 600

CASE = re.compile(r"^(\w+(?:::\w+)+) +(ok|FAILED|skipped)$")
TOTAL = re.compile(r"^Summary: .* (\d+) total$", re.MULTILINE)


def configuration(other_file_system: Path, *, remount: bool) -> str:
    entries = [[name, grp.getgrgid(pwd.getpwnam(name).pw_gid).gr_name] for name in USERS]
    return f"""
[features]
posix_fallocate = {{}}
rename_ctime = {{}}
utime_now = {{}}
utimensat = {{}}
secondary_fs = "{other_file_system}"
[settings]
naptime = {NAPTIME}
allow_remount = {str(remount).lower()}
[dummy_auth]
entries = {entries}
"""


def parse(output: str) -> dict[str, Result]:
    """Read the report: a line for each case, below it an indented line that says why it failed."""
    results: dict[str, Result] = {}
    last = ""
    for line in output.splitlines():
        if match := CASE.match(line):
            last = match[1]
            results[last] = Result(match[2])
        elif last and line.startswith("\t"):
            before = results[last]
            results[last] = Result(before.outcome, f"{before.detail} {line.strip()}".strip())
        elif last and line.startswith(("  left:", " right:")):
            before = results[last]
            results[last] = Result(before.outcome, f"{before.detail} {line.strip()}")
    total = TOTAL.search(output)
    if total is None or int(total[1]) != len(results):
        raise RuntimeError(f"pjdfstest did not come to its end:\n{output[-4000:]}")
    return results


def pjdfstest(directory: Path, space: Workspace, *, below: Path | None = None) -> dict[str, Result]:
    # The cases that remount call mount(8), which would look for a helper of the file system's type and
    # start it a second time. The kernel remounts a FUSE file system by itself: --internal-only. It does not by the new
    # calls of mounting (libmount 2.39 and later).
    shim = space.path / "bin"
    if not shim.exists():
        shim.mkdir()
        (shim / "mount").write_text(
            f'#!/bin/sh\nLIBMOUNT_FORCE_MOUNT2=always exec {shutil.which("mount")} --internal-only "$@"\n'
        )
        (shim / "mount").chmod(0o755)

    def cases(pattern: list[str], *, remount: bool) -> dict[str, Result]:
        config = space.path / "pjdfstest.toml"
        config.write_text(configuration(space.path, remount=remount), encoding="utf-8")
        _, output = run(
            [SUITES / "pjdfstest", "-c", config, "-p", directory, *pattern],
            timeout=TIMEOUT,
            below=below,
            env={"PATH": f"{shim}:/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        return parse(output)

    # A process of their own for the cases that remount: others leave files open, and hold that up.
    return cases([], remount=False) | cases(["erofs"], remount=True)


@pytest.fixture(scope="session")
def bare(backing: Workspace) -> dict[str, Result]:
    return pjdfstest(backing.directory("bare"), backing)


@pytest.mark.timeout(3 * TIMEOUT)
def test_same_result(bare: dict[str, Result], mount: Mount, backing: Workspace) -> None:
    mounted = pjdfstest(mount.mountpoint, backing, below=mount.mountpoint)
    differing = disagreements("pjdfstest", bare, mounted)
    assert not differing, "\n".join([f"{len(differing)} cases", *differing])


def test_the_list_names_existing_cases(bare: dict[str, Result]) -> None:
    assert {one.case for one in known_differences("pjdfstest")} <= bare.keys()


def test_every_case_passes_on_the_backing_file_system(bare: dict[str, Result]) -> None:
    # A case that fails or is skipped on both sides would compare equal, and say nothing.
    assert {case: str(result) for case, result in bare.items() if result.outcome != "ok"} == {}
