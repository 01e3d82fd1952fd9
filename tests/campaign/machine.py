"""Performs random operations of several callers on a mount and on a second tree, over all policies.

The machine is that of tests/mount/test_stateful.py. Policies take turns; each turn has a seed of its own, which is made
of the campaign's, so that `--seed S --first N` repeats turn N. A failure is shown with its smallest sequence, and the
campaign goes on. Each turn has a file system of its own, of another kind each round, and a mount namespace of its own:
a daemon hears of every change on the file system that it serves, and a turn waits for all daemons that it sees.
"""

import argparse
import concurrent.futures
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from cloakfs.state.runtime import RUN_DIR
from tests.mount.test_stateful import ALL, TwoTrees, search

KINDS = ("tmpfs", "ext4", "xfs", "btrfs")

_CLONE_NEWNS = 0x20000  # sched.h


@dataclass(frozen=True)
class Turns:
    """What all turns have in common.

    Attributes:
        seed: of the campaign.
        examples: how many sequences each has.
        length: how many steps a sequence has at most.
        kinds: of file systems, which take turns.
        oracle: whether daemons check what the kernel caches.
        delays: whether their replies and events are late at times.
    """

    seed: int
    examples: int
    length: int
    kinds: tuple[str, ...]
    oracle: bool
    delays: bool

    def take(self, turn: int) -> tuple[int, str]:
        """Return the number of steps, and the failure, if there is one."""
        before = next(TwoTrees.steps)
        failure = ""
        try:
            search(
                ALL[turn % len(ALL)],
                examples=self.examples,
                steps=self.length,
                seed=self.seed * 1_000_000 + turn,
                kind=self.kinds[turn // len(ALL) % len(self.kinds)],
                checked=self.oracle,
                delays=self.delays,
            )
        except Exception as exc:
            failure = "".join(traceback.format_exception(exc))
        return next(TwoTrees.steps) - before - 1, failure


def keep_apart() -> None:
    """Give this process a mount namespace with state files of its own: a turn waits until all daemons sleep (`told`).

    Raises:
        OSError: the kernel refuses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare(2)")
    os.makedirs(RUN_DIR, exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", RUN_DIR], check=True)


def run(common: Turns, *, steps: int, first: int, seconds: float, jobs: int) -> dict[str, Any]:
    """Run sequences until this number of steps or seconds is over; return a report."""
    began = time.monotonic()
    findings: list[dict[str, Any]] = []
    by_policy = dict.fromkeys(ALL, 0)
    turns = itertools.count(first)
    running: dict[concurrent.futures.Future[tuple[int, str]], int] = {}
    last = first
    with concurrent.futures.ProcessPoolExecutor(jobs, initializer=keep_apart) as processes:
        try:
            while True:
                while len(running) < jobs and sum(by_policy.values()) < steps and time.monotonic() - began < seconds:
                    last = next(turns)
                    running[processes.submit(common.take, last)] = last
                if not running:
                    break
                for done in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                    turn = running.pop(done)
                    count, failure = done.result()
                    policy = ALL[turn % len(ALL)]
                    by_policy[policy] += count
                    if failure:
                        findings.append({"turn": turn, "policy": policy, "error": failure})
                        print(failure, file=sys.stderr, flush=True)
                    minutes = (time.monotonic() - began) / 60
                    print(
                        f"machine: turn {turn}, {policy}: {sum(by_policy.values()):,} steps in {minutes:.1f} min, "
                        f"{len(findings)} findings",
                        file=sys.stderr,
                        flush=True,
                    )
        except KeyboardInterrupt:
            # Each of them goes through its clean-up; what was found so far is reported.
            for child in multiprocessing.active_children():
                child.terminate()
    return {
        "steps": sum(by_policy.values()),
        "seed": common.seed,
        "turns": [first, last + 1],
        "seconds": round(time.monotonic() - began),
        "steps_by_policy": by_policy,
        "findings": findings,
    }


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign machine", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="begin with this turn")
    parser.add_argument("--examples", type=int, default=25, help="sequences of each turn")
    parser.add_argument("--length", type=int, default=50, help="steps of each sequence, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after the turn at that time")
    parser.add_argument("--jobs", type=int, default=1, help="so many turns at a time")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of file systems (default: %(default)s)")
    parser.add_argument("--oracle", action="store_true", help="daemons check what the kernel caches, and for whom")
    parser.add_argument("--delays", action="store_true", help="the same, with late replies and events")
    parser.add_argument("--json", action="store_true", help="print the summary for a program to read")
    words = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # of the turns, too; a shell may have had the first one ignored
        signal.signal(number, signal.default_int_handler)
    print(f"machine: seed {words.seed}, {words.steps:,} steps", file=sys.stderr, flush=True)
    common = Turns(words.seed, words.examples, words.length, tuple(words.kinds.split(",")), words.oracle, words.delays)
    report = run(common, steps=words.steps, first=words.first, seconds=words.seconds, jobs=words.jobs)
    if words.json:
        print(json.dumps(report, indent=2))
    else:
        print(
            f"{report['steps']:,} steps in {report['seconds']} s, {len(report['findings'])} findings; seed {words.seed}"
        )
        for policy, count in report["steps_by_policy"].items():
            print(f"  {policy}: {count:,}")
    return int(bool(report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
