"""From the options of `python -m bench` to a run."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.common import console, fail
from cli.exits import FAILED, WRONG

from ..figures import Run
from ..job import PINNED, UNPINNED, Piece, Work
from ..lab import guest
from ..over_nfs import EXPORTS, NfsListing
from ..peers import PEERS
from ..tree import QUICK, Sizes, generated_package
from ..work import CLIENTS
from .measure import can_build, find_package, measure, versions
from .plan import GROWTH, IDLE, REQUESTS, Schedule

_EXTRAS = (REQUESTS, IDLE, GROWTH)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the options say."""

    peers: tuple[str, ...]
    works: tuple[str, ...]
    cpus: str
    rounds: int
    seconds: float
    package: str | None
    quick: bool
    disk: str = "tmpfs"

    def plan(self, every: Mapping[str, Piece]) -> Schedule:
        """What is to be measured; ends the command if that is nothing."""
        peers = chosen([*PEERS, *EXPORTS], self.peers, "--peer")
        names = chosen([*every, *_EXTRAS], self.works, "--work")
        pieces = [every[name] for name in names if name in every]
        works = [piece for piece in pieces if isinstance(piece, Work)]
        settings = [PINNED, UNPINNED] if self.cpus == "both" else [self.cpus]
        listings = [piece for piece in pieces if isinstance(piece, NfsListing) and {*piece.settings} & {*settings}]
        if self.quick:
            works = [replace(work, clients=min(work.clients, CLIENTS)) for work in works]
            listings = [listing for listing in listings if listing.kind == listings[0].kind]  # each kind takes seconds
            if self.cpus == "both":
                works = [replace(work, settings=work.settings[:1]) for work in works]
        package = None
        if any("make" in work.name for work in works):
            if why := can_build():
                click.echo(f"cloakfs: bench: skipped tar+make+rm: {why}", err=True)
                works = [work for work in works if "make" not in work.name]
            else:
                package = generated_package(2) if self.quick else self._package()[0]
        return Schedule(
            [name for name in peers if name in PEERS],
            works,
            [name for name in names if name in _EXTRAS],
            settings,
            1 if self.quick else self.rounds,
            0.005 if self.quick else self.seconds,
            QUICK if self.quick else Sizes(),
            package,
            [name for name in peers if name in EXPORTS],
            listings,
            self.disk,
        )

    def _package(self) -> tuple[bytes, str]:
        try:
            return find_package(self.package)
        except OSError as exc:
            fail(f"{self.package}: {exc.strerror}", FAILED)

    @property
    def package_name(self) -> str:
        """Of what is built."""
        return "generated (2 C files)" if self.quick else self._package()[1]


def chosen(names: list[str], globs: tuple[str, ...], option: str) -> list[str]:
    """Those that match any of the globs, in order; all if there is none. Ends the command if one matches nothing."""
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            fail(f"{option} {glob}: no such thing; see --list", WRONG)
    return [name for name in names if not globs or any(fnmatchcase(name, glob) for glob in globs)]


def listing(every: Mapping[str, Piece]) -> str:
    """What there is to choose from."""
    peers = "\n".join(f"  {name}" for name in (*PEERS, *EXPORTS))
    works = "\n".join(f"  {name}" for name in (*every, *_EXTRAS))
    return f"peers (--peer):\n{peers}\nworks (--work):\n{works}"


def measured(plan: Schedule) -> Run:
    """Measure, with a bar that shows how far it is; ends the command if a peer cannot be mounted."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    to = console(stderr=True)
    # Not redirected: workers report failures to standard error, too. Not refreshed by a thread: it would disturb.
    progress = Progress(
        *columns,
        console=to,
        disable=not to.is_terminal,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        task = progress.add_task("", total=plan.length())
        shown = 0.0

        def advance(what: str) -> None:
            nonlocal shown
            progress.update(task, description=what, advance=1)
            if time.monotonic() - shown > 0.2:
                shown = time.monotonic()
                progress.refresh()

        try:
            return measure(plan, advance, lambda text: click.echo(f"cloakfs: bench: {text}", err=True))
        except (RuntimeError, OSError, subprocess.CalledProcessError) as exc:
            fail(f"bench: {exc}", FAILED)


def about(plan: Schedule, choice: Choice) -> dict[str, object]:
    """What the figures depend on."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "kernel": platform.release(),
        "CPUs": f"{len(os.sched_getaffinity(0))} × {models[0] if models else platform.machine()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / (1 << 30):.0f} GiB",
        "Python": platform.python_version(),
        "cloakfs": f"{importlib.metadata.version('cloakfs')}{revision()}",
        "pyfuse3": importlib.metadata.version("pyfuse3"),
        "trio": importlib.metadata.version("trio"),
        **versions(),
        "rounds": plan.rounds,
        "rounds of what takes long": min(
            [piece.rounds or plan.rounds for piece in (*plan.works, *plan.listings)], default=0
        ),
        "seconds": plan.seconds,
    }
    if plan.disk != "tmpfs":
        facts["trees on"] = f"{plan.disk}, on loop devices in memory"
    if plan.package is not None:
        facts["package"] = choice.package_name
    if plan.exports and plan.listings and not guest.missing():
        facts["guest"] = f"Linux {guest.kernel_version()} in user mode, on one processor"
    if plan.sizes != Sizes():
        facts["sizes"] = asdict(plan.sizes)
    facts["load before"] = round(os.getloadavg()[0], 2)
    return facts


def revision() -> str:
    """Which commit, if it is a checkout; `-dirty` if files were changed."""
    command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return f" ({subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()})"
    return ""
