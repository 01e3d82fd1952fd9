"""`python -m bench`: metadata operations of cloakfs against the bare tree and bindfs, in one run."""

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .peers import SERVER_ID, Peer, all_peers
from .work import WORK, prepare, rate

Rates = dict[str, dict[str, list[float]]]
"""work -> peer -> units per second, one for each round."""


def measure(peers: list[Peer], rounds: int, seconds: float, *, pinned: bool) -> Rates:
    """Every piece of work with every peer, round by round, so that what drifts hits all of them alike."""
    everywhere = os.sched_getaffinity(0)
    cpus = {min(everywhere)} if pinned else everywhere
    for peer in peers:
        for thread in os.listdir(f"/proc/{peer.daemon}/task") if peer.daemon else ():
            os.sched_setaffinity(int(thread), cpus)
    rates: Rates = {work: {peer.name: [] for peer in peers} for work in WORK}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pinned" if pinned else "unpinned", total=rounds * len(WORK) * len(peers))
        for number in range(rounds):
            for work, call in WORK.items():
                # Another one is first in each round.
                for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
                    rates[work][peer.name].append(rate(call, peer.path, peer.uid, seconds, cpus))
                    progress.advance(task)
    return rates


def ratios(rates: Rates, work: str, peer: str, to: str) -> list[float]:
    """Round by round, so that the spread is that of the comparison."""
    return [mine / theirs for mine, theirs in zip(rates[work][peer], rates[work][to], strict=True)]


def cell(values: list[float]) -> str:
    """Median, and the range over the rounds."""
    return f"{statistics.median(values):.3g} ({min(values):.2g}–{max(values):.2g})"


def rows(rates: Rates, to: str) -> list[list[str]]:
    """One row a peer: the ratios of each work."""
    peers = next(iter(rates.values()))
    return [[peer, *(cell(ratios(rates, work, peer, to)) for work in rates)] for peer in peers if peer != to]


def picture(results: dict[str, Rates], path: str) -> None:
    """Bars: each peer against the bare tree (logarithmic)."""
    import matplotlib  # noqa: PLC0415  (an extra: `bench`)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(len(results), 1, figsize=(11, 4.2 * len(results)), squeeze=False)
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
    figure.tight_layout()
    figure.savefig(path)


def circumstances(rounds: int, seconds: float) -> dict[str, object]:
    """What the figures depend on."""
    bindfs = shutil.which("bindfs")
    version = subprocess.run([bindfs, "--version"], capture_output=True, text=True, check=True).stdout if bindfs else ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "cloakfs": importlib.metadata.version("cloakfs"),
        "pyfuse3": importlib.metadata.version("pyfuse3"),
        "bindfs": version.strip().split("\n")[0],
        "load before": os.getloadavg()[0],
        "rounds": rounds,
        "seconds": seconds,
    }


@click.command()
@click.option("--rounds", default=7, show_default=True, help="How often each piece of work is repeated.")
@click.option("--seconds", default=0.5, show_default=True, help="How long each time.")
@click.option("--quick", is_flag=True, help="Two very short rounds: does it run?")
@click.option("--json", "json_path", metavar="FILE", help="Write every single rate.")
@click.option("--plot", metavar="FILE", help="Draw the ratios (PNG or SVG; needs the extra `bench`).")
@click.option("--markdown", is_flag=True, help="Print tables for the documentation.")
def main(rounds: int, seconds: float, json_path: str | None, plot: str | None, *, quick: bool, markdown: bool) -> None:
    """Compare metadata operations in one run, as ratios with their spread.

    One client; the backing tree is warm. "Pinned" has client and daemon on one CPU. Needs root.
    """
    if quick:
        rounds, seconds = 2, 0.02
    if os.geteuid() != 0:
        sys.exit("bench: needs root, to mount and to work as other users")
    about = circumstances(rounds, seconds)
    work = tempfile.mkdtemp(prefix="cloakfs-bench-")
    os.chmod(work, 0o755)
    try:
        source = os.path.join(work, "source")
        os.mkdir(source)
        prepare(source, SERVER_ID)
        with all_peers(work, source) as peers:
            results = {
                "pinned" if pinned else "unpinned": measure(peers, rounds, seconds, pinned=pinned)
                for pinned in (True, False)
            }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print_results(results, about, markdown=markdown)
    if json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump({"about": about, "rates": results}, file, indent=1)
    if plot:
        picture(results, plot)


def print_results(results: dict[str, Rates], about: dict[str, object], *, markdown: bool) -> None:
    """Tables of ratios to the bare tree, and to bindfs without caches."""
    console = Console()
    click.echo(", ".join(f"{key} {value}" for key, value in about.items()))
    for title, rates in results.items():
        for to in ("bare", "bindfs, caches 0"):
            if to not in next(iter(rates.values())):
                continue
            heading = f"{title}, ratio to {to}: median (range of {about['rounds']} rounds)"
            head = ["", *rates]
            if markdown:
                click.echo(f"\n{heading}\n")
                for line in (head, ["---"] * len(head), *rows(rates, to)):
                    click.echo(f"| {' | '.join(line)} |")
            else:
                table = Table(*head, title=heading)
                for row in rows(rates, to):
                    table.add_row(*row)
                console.print(table)


if __name__ == "__main__":
    main()
