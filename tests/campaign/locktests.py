"""Runs published lock tests: Samba's ping_pong in several places at once, and those of stress-ng.

ping_pong (Debian: ctdb) is what administrators of cluster file systems test them with: its processes pass a lock from
one to the next, and each adds one to a byte that is read and written under it. One process runs on the real tree, and
one in each of two mounts. What a process writes to a mapping, only those see that use the same mount, so that test runs
in one mount. stress-ng locks a file in one mount by flock(2), lockf(3), fcntl(2) and as open file descriptions.

With `--exports`, two NFSv4 clients pass locks on as well: `scripts/campaign guest locktests --exports`. They do not
count what the others add: each asks for a lock again and again until it gets it, so that they take no turns.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.lab.guest import inside
from tests.agents import User
from tests.campaign.locks import UID, places

STRESSORS = ("flock", "lockf", "lockofd", "locka")

_RATE = re.compile(r"\d+ locks/sec")
_INCREMENT = re.compile(r"data increment = (\d+)")


def _start(command: Sequence[str], cwd: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=cwd, user=UID, group=UID, extra_groups=(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def ping_pong(mode: str, tops: Sequence[str], seconds: float) -> str:
    """Run ping_pong in all of these places at once; return what is wrong, or ""."""
    file = f"pingpong{mode}"
    with User(UID) as first:
        first.do(Path(tops[0], file).write_bytes, b"")
    command = ["timeout", f"{seconds:g}", "ping_pong", mode, file, str(len(tops) + 1)]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_start(command, top)) for top in tops]
        said = [process.communicate()[0].replace("\r", "\n").split("\n") for process in running]
    problems = []
    for top, text in zip(tops, said, strict=True):
        lines = [line.strip() for line in text if line.strip()]
        increments = [found[1] for line in lines if (found := _INCREMENT.fullmatch(line))]
        other = {line for line in lines if not _RATE.fullmatch(line) and not _INCREMENT.fullmatch(line)}
        rates = [line for line in lines if _RATE.fullmatch(line)]
        if other or not rates:
            problems.append(f"{top}: {'; '.join(sorted(other)) or 'no lock was passed on'}")
        # At first and in the end, not all of them run.
        elif "w" in mode and str(len(tops)) not in increments:
            problems.append(f"{top}: {len(tops)} add one each, but it saw {', '.join(increments)} more ({rates[-1]})")
    return "; ".join(problems)


def stress(stressor: str, top: str, seconds: float) -> str:
    """Run one of stress-ng's tests; return what is wrong, or ""."""
    command = [
        "stress-ng", "--temp-path", ".", f"--{stressor}", "4", "--timeout", f"{seconds:.0f}", "--verify",
        "--no-rand-seed",
    ]  # fmt: skip
    with _start(command, top) as process:
        said = process.communicate()[0]
    return "" if process.returncode == 0 and "fail" not in said else said


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign locktests", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each test (default: %(default)s)")
    parser.add_argument("--exports", action="store_true", help="by two clients of two exports, too; in a guest")
    words = parser.parse_args()
    if words.exports and not inside():
        parser.error("--exports needs an NFS server of its own: scripts/campaign guest locktests --exports")
    packages = {"ping_pong": "ctdb", "stress-ng": "stress-ng"}
    if absent := [package for program, package in packages.items() if shutil.which(program) is None]:
        print(f"locktests: not installed (apt-get install {' '.join(absent)}): NOT TESTED", file=sys.stderr)
        return 1
    status = 0
    with places(words.exports) as tops:
        local, clients = ["tree", "one", "two"], [place for place in tops if place.startswith("NFS")]
        scenes = [("-c", local), ("-rw", local), ("-rwm", ["one"] * 3)]
        for mode, where in scenes + ([("-c", clients)] if clients else []):
            problem = ping_pong(mode, [tops[place] for place in where], words.seconds)
            print(f"ping_pong {mode} in {', '.join(where)}: {problem or 'passed'}", flush=True)
            status |= bool(problem)
        for stressor in STRESSORS:
            problem = stress(stressor, tops["one"], words.seconds)
            print(f"stress-ng --{stressor} in one: {problem or 'passed'}", flush=True)
            status |= bool(problem)
    return status


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
