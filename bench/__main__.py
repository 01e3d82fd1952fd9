"""`python -m bench`: metadata operations of cloakfs against the bare tree and bindfs, in one run."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .peers import OWNER, WORKER, Peer, all_peers
from .work import WORK, prepare, rate, undisturbed

Rates = dict[str, dict[str, list[float]]]
"""work -> peer -> units per second, one for each round."""

_LISTED = 1000


def measure(peers: list[Peer], rounds: int, seconds: float, *, pinned: bool) -> Rates:
    """Every piece of work with every peer, round by round, so that what drifts hits all of them alike."""
    everywhere = os.sched_getaffinity(0)
    cpus = {min(everywhere)} if pinned else everywhere
    for peer in peers:
        for thread in os.listdir(f"/proc/{peer.daemon}/task") if peer.daemon else ():
            os.sched_setaffinity(int(thread), cpus)
    rates: Rates = {work: {peer.name: [] for peer in peers} for work in WORK}
    # Not redirected: workers report failures to standard error, too.
    progress = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    with progress:
        task = progress.add_task("pinned" if pinned else "unpinned", total=rounds * len(WORK) * len(peers))
        for number in range(rounds):
            for work in WORK:
                # Another one is first in each round.
                for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
                    rates[work][peer.name].append(rate(work, peer.path, peer.uid, seconds, cpus))
                    progress.advance(task)
    return rates


def ratios(rates: Rates, work: str, peer: str, to: str) -> list[float]:
    """Round by round, so that the spread is that of the comparison."""
    return [mine / theirs for mine, theirs in zip(rates[work][peer], rates[work][to], strict=True)]


def figure(value: float) -> str:
    """Two digits are all that the spread leaves meaningful."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def cell(values: list[float]) -> tuple[str, str]:
    """Median, and the range over the rounds."""
    return figure(statistics.median(values)), f"{figure(min(values))}–{figure(max(values))}"


def rows(rates: Rates, to: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The ratios of each peer to `to`."""
    peers = next(iter(rates.values()))
    return [(peer, [cell(ratios(rates, work, peer, to)) for work in rates]) for peer in peers if peer != to]


def scale(rates: Rates, peer: str) -> list[str]:
    """What the ratios are to, in units per second."""
    return [f"{statistics.median(rates[work][peer]):,.0f}" for work in rates]


def picture(results: dict[str, Rates], path: str) -> None:
    """Bars: each peer against the bare tree (logarithmic)."""
    import matplotlib  # noqa: PLC0415  (an extra: `bench`)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    canvas, axes = pyplot.subplots(len(results), 1, figsize=(11, 4.2 * len(results)), squeeze=False)
    for axis, (title, rates) in zip(axes[:, 0], results.items(), strict=True):
        peers = [peer for peer in next(iter(rates.values())) if peer != "bare"]
        width = 0.8 / len(peers)
        for at, peer in enumerate(peers):
            spread = [ratios(rates, work, peer, "bare") for work in rates]
            middle = [statistics.median(values) for values in spread]
            error = [
                [m - min(v) for m, v in zip(middle, spread, strict=True)],
                [max(v) - m for m, v in zip(middle, spread, strict=True)],
            ]
            places = [x + (at - len(peers) / 2 + 0.5) * width for x in range(len(rates))]
            axis.bar(places, middle, width, yerr=error, label=peer, error_kw={"elinewidth": 0.8})
        axis.set_yscale("log")
        axis.set_xticks(range(len(rates)), list(rates))
        axis.set_ylabel("rate / rate of the bare tree")
        axis.set_title(f"{title}: median and range of the rounds (higher is faster)")
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(fontsize="small", ncols=3)
    canvas.tight_layout()
    canvas.savefig(path)


def circumstances(rounds: int, seconds: float, files: int) -> dict[str, object]:
    """What the figures depend on."""
    bindfs = shutil.which("bindfs")
    version = subprocess.run([bindfs, "--version"], capture_output=True, text=True, check=True).stdout if bindfs else ""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "kernel": platform.release(),
        "CPUs": f"{len(os.sched_getaffinity(0))} × {models[0] if models else platform.machine()}",
        "Python": platform.python_version(),
        "cloakfs": f"{importlib.metadata.version('cloakfs')}{_revision()}",
        "pyfuse3": importlib.metadata.version("pyfuse3"),
        "bindfs": version.split("\n")[0].removeprefix("bindfs").strip(),
        "rounds": rounds,
        "seconds": seconds,
        "files listed": files,
        "load before": round(os.getloadavg()[0], 2),
    }


def _revision() -> str:
    """Which commit, if it is a checkout; `-dirty` if files were changed."""
    command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return f" ({subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()})"
    return ""


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="How often all is repeated.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True, help="How long each time."
)
@click.option("--quick", is_flag=True, help="Two very short rounds with few files: does it run?")
@click.option("--json", "json_path", metavar="FILE", help="Write every single rate.")
@click.option("--plot", metavar="FILE", help="Draw the ratios (PNG or SVG; needs the extra `bench`).")
@click.option("--markdown", is_flag=True, help="Print tables for the documentation.")
def main(rounds: int, seconds: float, json_path: str | None, plot: str | None, *, quick: bool, markdown: bool) -> None:
    """Compare metadata operations of cloakfs with the bare tree and bindfs, as ratios with their spread.

    \b
    stat                 of one file
    lookup               open(O_PATH)+close of 1,000 names in turn
    list+stat            scandir and a stat of each of 1,000 files; counts files
    open+read+close      of one file, 4 KiB
    create+write+unlink  of one file, 4 KiB

    "cloakfs, null" maps and hides nothing; "cloakfs, N" has N range_map and N cloak_list definitions. One client, no
    root; the backing tree is in memory. "pinned" has client and daemon on one CPU. The tree is made in $TMPDIR.
    Needs root.
    """
    files = _LISTED
    if quick:
        rounds, seconds, files = 2, 0.01, 20
    if os.geteuid() != 0:
        sys.exit("bench: needs root, to mount and to work as other users")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that all is cleaned up
    about = circumstances(rounds, seconds, files)
    results = {}
    with contextlib.ExitStack() as stack:
        try:
            with undisturbed():
                work = tempfile.mkdtemp(prefix="cloakfs-bench-")
                stack.callback(shutil.rmtree, work)
                os.chmod(work, 0o755)
                source = os.path.join(work, "source")
                os.mkdir(source)
                prepare(source, files, WORKER, OWNER)
                peers = all_peers(stack, work, source)
            for pinned in (True, False):
                results["pinned" if pinned else "unpinned"] = measure(peers, rounds, seconds, pinned=pinned)
        finally:
            with undisturbed():
                stack.close()
    about["load after"] = round(os.getloadavg()[0], 2)
    print_results(results, about, markdown=markdown)
    if json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"about": about, "rates": results}, file, indent=1)
    if plot:
        picture(results, plot)


def print_results(results: dict[str, Rates], about: dict[str, object], *, markdown: bool) -> None:
    """Tables of ratios to the bare tree, and to bindfs without caches."""
    console = Console()
    if not console.is_terminal:
        console.width = 120
    click.echo(", ".join(f"{key} {value}" for key, value in about.items()))
    for title, rates in results.items():
        for to in ("bare", "bindfs, caches 0"):
            if to not in next(iter(rates.values())):
                continue
            heading = f"{title}, ratio to {to}: median and range of {about['rounds']} rounds"
            unit = f"{to}, per second"
            if markdown:
                click.echo(f"\n**{heading}**\n")
                head = ["", *rates]
                ratio_lines = [[peer, *(f"**{m}** ({r})" for m, r in cells)] for peer, cells in rows(rates, to)]
                for line in (head, ["---"] * len(head), [unit, *scale(rates, to)], *ratio_lines):
                    click.echo(f"| {' | '.join(line)} |")
            else:
                table = Table("", *rates, title=heading, box=box.SIMPLE_HEAD)
                table.add_row(unit, *scale(rates, to))
                for peer, cells in rows(rates, to):
                    table.add_row(peer, *(f"[bold]{m}[/bold]\n{r}" for m, r in cells))
                console.print(table)


if __name__ == "__main__":
    main()
