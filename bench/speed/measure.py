"""A run: each piece of work with each peer, round by round, so that drift hits all peers alike."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

from .. import tree
from ..figures import Run
from ..homes import HOME, TEAM, prepare_homes
from ..job import PINNED, UNPINNED, Work
from ..peers import FIXED, MANY, NULL, PEERS, PLAIN, UNCACHED, Peer, Skipped, does, place
from ..tree import Sizes
from ..work_in_team import prepare_team
from ..workers import ClientProcesses, WorkError, done_as, undisturbed
from .overnfs import measure_over_nfs
from .plan import GROWTH, IDLE, REQUESTS, Schedule

_COUNTED = (NULL, MANY, FIXED, PLAIN)
_GROWN = (UNCACHED, NULL, MANY, FIXED)

_PATIENCE = 30.0


def measure(plan: Schedule, advance: Callable[[str], None], report: Callable[[str], None]) -> Run:
    """Mount all peers, measure, and leave nothing behind, even when interrupted.

    Args:
        plan: what.
        advance: called with what is next, `plan.length()` times at most.
        report: called with what was left out, and why.
    """
    run = Run()
    if plan.is_local():
        _measure_mounts(plan, run, advance, report)
    measure_over_nfs(plan, run, advance, report)  # when nothing is mounted any more
    return run


def _measure_mounts(plan: Schedule, run: Run, advance: Callable[[str], None], report: Callable[[str], None]) -> None:
    with contextlib.ExitStack() as stack:
        try:
            peers = _set_up(stack, plan, run, advance, report)
            if not peers:
                return
            if IDLE in plan.extras:
                advance(IDLE)
                time.sleep(plan.sizes.settle)
                for peer in peers:
                    if peer.daemon:
                        run.memory[peer.name] = {f"idle {what}": mib for what, mib in memory(peer.daemon).items()}
            _measure_rates(plan, peers, run, advance, report)
            if REQUESTS in plan.extras:
                advance(REQUESTS)
                _count_requests(plan, peers, run, advance, report)
            if GROWTH in plan.extras:
                advance(GROWTH)
                for peer in peers:
                    if peer.name in _GROWN:
                        with _failing(f"{GROWTH} with {peer.name}", run, report):
                            _measure_growth(plan, peer, run)
        finally:
            with undisturbed():
                stack.close()


def _set_up(
    stack: contextlib.ExitStack, plan: Schedule, run: Run, advance: Callable[[str], None], report: Callable[[str], None]
) -> list[Peer]:
    with undisturbed():
        base = os.path.realpath(tempfile.mkdtemp(prefix="cloakfs-bench-"))
        stack.callback(os.rmdir, base)
    os.chmod(base, 0o755)
    kinds = {work.kind for work in plan.works}
    many = {work.kind for work in plan.works if work.name.startswith("ls -lR")}
    waiting = []
    for name in plan.peers:
        advance(f"tree for {name}")
        with undisturbed():
            top, at = place(stack, base, name, plan.disk)
        tree.prepare(top, plan.sizes, plan.package, many=bool(many & set(tree.KINDS)))
        if HOME in kinds:
            prepare_homes(top, plan.sizes, many=HOME in many)
        if TEAM in kinds:
            prepare_team(top, plan.sizes)
        with undisturbed(), _skipping(name, run, report):
            waiting.append((name, PEERS[name](stack, name, top, at)))
    peers = []
    for name, wait in waiting:
        with undisturbed(), _skipping(name, run, report):
            peers.append(wait())
    return peers


@contextlib.contextmanager
def _skipping(name: str, run: Run, report: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Skipped as exc:
        run.skipped[name] = str(exc)
        report(f"skipped {name}: {exc}")


@contextlib.contextmanager
def _failing(what: str, run: Run, report: Callable[[str], None]) -> Iterator[None]:
    """Report a failure, and go on with the rest."""
    try:
        yield
    except (WorkError, OSError) as exc:
        run.failed.append(f"{what}: {exc}")
        report(run.failed[-1])


def _cpus(setting: str) -> set[int]:
    everywhere = os.sched_getaffinity(0)
    return {min(everywhere)} if setting == PINNED else everywhere


def _measure_rates(
    plan: Schedule, peers: list[Peer], run: Run, advance: Callable[[str], None], report: Callable[[str], None]
) -> None:
    now = None
    for setting, at, work in plan.steps():
        cpus = _cpus(setting)
        if setting != now:
            now = setting
            for peer in peers:
                _pin(peer, cpus)
        rates = run.rates.setdefault(setting, {}).setdefault(
            work.name, {peer.name: [] for peer in peers if does(peer.name, work)}
        )
        # Another one is first in each round.
        for peer in peers[at % len(peers) :] + peers[: at % len(peers)]:
            advance(f"{setting}, {work.name}")
            if peer.name not in rates:
                continue
            with (
                _failing(f"{setting}, {work.name} with {peer.name}", run, report),
                _data(work, peer, plan.sizes) as data,
                ClientProcesses(work, peer, plan.sizes, data, plan.seconds, cpus) as workers,
            ):
                rates[peer.name].append(workers.go()[1])
                continue
            del rates[peer.name]  # rounds would not match any more


def _pin(peer: Peer, cpus: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it died; the next step fails
        for thread in os.listdir(f"/proc/{peer.daemon}/task") if peer.daemon else ():
            os.sched_setaffinity(int(thread), cpus)


@contextlib.contextmanager
def _data(work: Work, peer: Peer, sizes: Sizes) -> Iterator[str]:
    """The name of a large file, if the work needs one."""
    if not work.reads_data:
        yield ""
        return
    with tree.data_file(peer.tree, work.kind, sizes.mib) as name:
        time.sleep(sizes.settle / 5)  # what was just made may not be cached yet, and daemons get events of it
        yield name


# -- requests ------------------------------------------------------------------------------------------


def _count_requests(
    plan: Schedule, peers: list[Peer], run: Run, advance: Callable[[str], None], report: Callable[[str], None]
) -> None:
    """How many requests of each kind a batch of warm work is."""
    counted_peers = [peer for peer in peers if peer.name in _COUNTED]
    for work in plan.counted():
        advance(f"{REQUESTS}, {work.name}")
        with _failing(f"{REQUESTS}, {work.name}", run, report), contextlib.ExitStack() as stack:
            ready = []
            for peer in counted_peers:
                data = stack.enter_context(_data(work, peer, plan.sizes))
                workers = ClientProcesses(work, peer, plan.sizes, data, None, _cpus(UNPINNED))
                ready.append((peer, stack.enter_context(workers)))
            before = counts_now(counted_peers)
            done = {peer.name: workers.go()[0] for peer, workers in ready}
            after = counts_now(counted_peers)
            run.requests[work.name] = {
                name: per_unit(before[name], after[name], units) for name, units in done.items() if units
            }


def per_unit(before: dict[str, int], after: dict[str, int], units: float) -> dict[str, float]:
    """By operation; without what the counting takes, and what the kernel does in its own time."""
    return {
        operation: (count - before.get(operation, 0)) / units
        for operation, count in sorted(after.items())
        if operation not in ("statfs", "forget") and count > before.get(operation, 0)
    }


def counts_now(peers: list[Peer]) -> dict[str, dict[str, int]]:
    """Return how many requests of each operation each daemon has answered until now.

    A daemon publishes counts every few seconds, if there are new ones. So that there are, each gets a
    request that the kernel never answers itself.

    Raises:
        WorkError: a daemon does not publish its counts.
    """
    seen = {peer.name: _published_counts(peer).get("statfs", 0) for peer in peers}
    for peer in peers:
        os.statvfs(peer.path)
    deadline = time.monotonic() + _PATIENCE
    counts: dict[str, dict[str, int]] = {}
    while len(counts) < len(peers):
        for peer in peers:
            counted = _published_counts(peer)
            if counted.get("statfs", 0) > seen[peer.name]:
                counts[peer.name] = counted
        if time.monotonic() > deadline:
            raise WorkError("a daemon does not report how many requests it has answered")
        time.sleep(0.02)
    return counts


def _published_counts(peer: Peer) -> dict[str, int]:
    assert peer.status is not None
    with open(peer.status, encoding="utf-8") as file:
        requests: dict[str, int] = json.load(file)["requests"]
    return requests


# -- memory --------------------------------------------------------------------------------------------


def memory(pid: int) -> dict[str, float]:
    """RSS and PSS of a process in MiB."""
    found = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("Rss", "Pss"):
                found[name.upper()] = int(rest.split()[0]) / 1024
    return found


def _fuse_inodes() -> int:
    """How many inodes of FUSE the kernel holds (the whole machine)."""
    with contextlib.suppress(OSError), open("/proc/slabinfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("fuse_inode "):
                return int(line.split()[1])
    return 0


def _measure_growth(plan: Schedule, peer: Peer, run: Run) -> None:
    """By how much a daemon grows while the kernel gets to know many more files, scaled to 100,000."""
    assert peer.daemon is not None
    known = tree.known_tree(peer.tree, plan.sizes.known)
    time.sleep(plan.sizes.settle)
    before, held = memory(peer.daemon), _fuse_inodes()
    top = os.path.join(peer.path, "public", known)
    if done_as(peer.uid, top, partial(_count_empty, ".")) != plan.sizes.known:
        raise WorkError("not all files were found")
    time.sleep(plan.sizes.settle)
    scale = 100_000 / plan.sizes.known
    figures = run.memory.setdefault(peer.name, {})
    for what, mib in memory(peer.daemon).items():
        figures[f"growth {what}"] = (mib - before[what]) * scale
    if held:
        figures["known"] = (_fuse_inodes() - held) / plan.sizes.known


def _count_empty(top: str) -> int:
    """List and stat all below; how many empty files there are."""
    return sum(
        os.lstat(os.path.join(directory, name)).st_size == 0 for directory, _, names in os.walk(top) for name in names
    )


# -- the package ---------------------------------------------------------------------------------------


def find_package(path: str | None) -> tuple[bytes, str]:
    """A source package and its name: the chosen one, the tests' own, or a generated one.

    Raises:
        OSError: the chosen one cannot be read.
    """
    cache = os.path.join(os.path.dirname(__file__), "..", "..", ".cache", "sources")
    if path is None and os.path.isdir(cache):
        names = sorted(name for name in os.listdir(cache) if name.endswith(".orig.tar.gz"))
        path = os.path.join(cache, names[0]) if names else None
    if path is None:
        return tree.generated_package(), "generated (60 C files)"
    with open(path, "rb") as file:
        return file.read(), os.path.basename(path)


def can_build() -> str | None:
    """Why nothing can be built here, if so."""
    missing = [program for program in ("tar", "gzip", "make", "gcc") if not shutil.which(program)]
    return f"there is no {', '.join(missing)}" if missing else None


def versions() -> dict[str, str]:
    """Of programs beside ours."""
    found = {}
    for program, arguments in (("bindfs", ["--version"]), ("gcc", ["-dumpfullversion"])):
        if where := shutil.which(program):
            done = subprocess.run([where, *arguments], capture_output=True, text=True, check=False)
            found[program] = done.stdout.split("\n")[0].removeprefix(program).strip()
    return found
