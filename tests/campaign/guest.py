"""Runs tests of local mounts, or another campaign, on the kernel of Debian: in the laboratory's guest (bench/lab).

Arguments are those of pytest, or the name of a campaign and its arguments. Without any test file or directory, these
are all tests but those of NFS, which run in a guest anyway, and the conformance suites, which take too long there. Each
file has a guest of its own, with a disk for /tmp in its memory, and so many guests run at a time as there are
processors. What a guest cannot show is speed, what several processors do at once, and what its kernel was built
without; such tests are skipped and say why.
"""

import concurrent.futures
import os
import queue
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.clone import ROOT
from bench.lab.guest import Guest, kernel_version, missing

DEFAULT = ("tests/mount", "tests/property", "tests/unit")

_MIB = 3000
_PATIENCE = 7200.0
_NO_TESTS = 5  # pytest's exit status: all of the file are deselected

# A system call takes twenty times as long as on the host, so a test gets more time until it counts as hung.
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "--timeout=1200")

_PREPARE = f"""\
truncate -s 8G /run/disk && mkfs.ext4 -q /run/disk && mount -o loop /run/disk /tmp && chmod 1777 /tmp || exit
ulimit -Hn 524288  # as systemd has it
cd {shlex.quote(ROOT)}
"""


def targets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split pytest's arguments into files, or single tests of them, and whatever else there is."""
    chosen = [word for word in words if os.path.exists(os.path.join(ROOT, word.partition("::")[0]))]
    others = [word for word in words if word not in chosen]
    found = []
    for word in chosen or DEFAULT:
        path = Path(ROOT, word)
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(ROOT)) for file in files]
    return found, others


def run(words: Sequence[str], processors: "queue.SimpleQueue[int]", ending: threading.Event) -> tuple[int, str, float]:
    """Run a module of Python in a guest; return its exit status, what it said, and how long it took.

    Args:
        words: the module, and its arguments.
        processors: those of the host that are free; waits for one.
        ending: set when the campaign is interrupted.
    """
    processor = processors.get()
    began = time.monotonic()
    try:
        with Guest(f"{_PREPARE}{shlex.join([sys.executable, '-m', *words])}\n", _MIB, processor) as guest:
            while guest.is_running() and time.monotonic() < began + _PATIENCE and not ending.wait(0.2):
                pass
            said = guest.said()
            status = guest.read("status").strip()
            if not status:
                said += f"\nthe guest {'hangs' if guest.is_running() else 'ended early'}\n"
            return int(status or -1), said, time.monotonic() - began
    finally:
        processors.put(processor)


def main() -> int:
    """Run the campaign."""
    if why := missing():
        print(f"guest: {why}", file=sys.stderr)
        return 2
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: scripts/campaign guest [CAMPAIGN] [ARGUMENTS]\n\n{__doc__}")
        return 0
    if words and Path(__file__).parent.joinpath(f"{words[0]}.py").exists():
        jobs = {shlex.join(words): [f"tests.campaign.{words[0]}", *words[1:]]}
    else:
        files, others = targets(words)
        jobs = {file: [*_PYTEST, *others, file] for file in files}
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have had the first one ignored
        signal.signal(number, signal.default_int_handler)
    processors: queue.SimpleQueue[int] = queue.SimpleQueue()
    for processor in sorted(os.sched_getaffinity(0)):
        processors.put(processor)
    print(f"guest: Linux {kernel_version()}, {len(jobs)} guests, {processors.qsize()} at a time", flush=True)
    bad, ending = [], threading.Event()
    with concurrent.futures.ThreadPoolExecutor(processors.qsize()) as threads:
        running = {threads.submit(run, job, processors, ending): name for name, job in jobs.items()}
        try:
            for done in concurrent.futures.as_completed(running):
                status, said, seconds = done.result()
                name = running[done]
                bad += [name] if status not in (0, _NO_TESTS) else []
                print(f"=== {name}: exit status {status} after {seconds:.0f} s\n{said.strip()}", flush=True)
        finally:
            ending.set()
            threads.shutdown(cancel_futures=True)
    print(f"guest: {len(bad)} of {len(jobs)} guests found something", *bad, sep="\n  ")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
