"""The command `python -m bench`."""

import os
import sys
from collections.abc import Mapping

import click

from cli.common import fail
from cli.exits import FAILED

from ..figures import Run
from ..job import Piece
from ..over_nfs import all_listings
from ..papers.command import papers
from ..peers import BARE, DISKS
from ..session import interruptible, read, require_matplotlib, require_writable
from ..work import all_work
from . import report
from .choice import Choice, about, listing, measured
from .picture import draw


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
@click.option("--peer", "peers", multiple=True, metavar="GLOB", help="Only these peers (see --list); repeatable.")
@click.option("--work", "works", multiple=True, metavar="GLOB", help="Only these works (see --list); repeatable.")
@click.option(
    "--cpus",
    type=click.Choice(["both", "pinned", "unpinned"]),
    default="both",
    show_default=True,
    help="Pinned: client and daemon on the same CPU.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="How often everything is repeated."
)
@click.option(
    "--heavy-rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Rounds of the works that take long: data, ls, make.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.4,
    show_default=True,
    help="Least duration of each measurement.",
)
@click.option(
    "--on",
    "disk",
    type=click.Choice([*DISKS]),
    default="tmpfs",
    show_default=True,
    help="The kind of file system on which the trees are made.",
)
@click.option("--package", metavar="FILE", help="A source package (tar.gz with a Makefile) to build.")
@click.option(
    "--quick",
    is_flag=True,
    help="Two very short rounds with few files, each work with one choice of CPUs, over NFS only one kind of files, "
    "to see whether everything runs.",
)
@click.option("--markdown", is_flag=True, help="Print tables for the documentation.")
@click.option("--json", "json_path", metavar="FILE", help="Write all rates to FILE.")
@click.option("--plot", metavar="FILE", help="Draw the ratios to the bare tree (PNG or SVG; needs matplotlib).")
@click.option("--against", metavar="FILE", help="Report what changed since an earlier run (from --json).")
@click.option("--show", metavar="FILE", help="Measure nothing; show an earlier run (from --json).")
@click.option("--list", "only_list", is_flag=True, help="Print the names of all peers and works.")
def bench(
    context: click.Context,
    peers: tuple[str, ...],
    works: tuple[str, ...],
    cpus: str,
    rounds: int,
    heavy_rounds: int,
    seconds: float,
    disk: str,
    package: str | None,
    json_path: str | None,
    plot: str | None,
    against: str | None,
    show: str | None,
    *,
    quick: bool,
    markdown: bool,
    only_list: bool,
) -> None:
    """Measure the speed of cloakfs against the bare tree and other ways of mounting it.

    Makes a tree for each peer, in memory or (--on) on a loop device whose image is in memory, mounts the trees below
    $TMPDIR, and works there as an ordinary user. NFS is measured in a guest with a kernel of its own, when all that is
    done. docs/performance.md describes what is measured, and how. Ratios are comparable between runs, absolute rates
    are not. Needs root.

    Exit status: 0 measured (or shown), 1 it cannot be measured, or some work failed, 2 wrong usage.
    """
    if context.invoked_subcommand is not None:
        return
    rounds_of_heavy = 1 if quick else heavy_rounds
    every = {**all_work(rounds_of_heavy), **all_listings(rounds_of_heavy)}
    choice = Choice(peers, works, cpus, rounds, seconds, package, quick=quick, disk=disk)
    if only_list:
        click.echo(listing(every))
        return
    old = read(against, Run) if against else None
    if plot:
        require_matplotlib()
        require_writable(plot)
    run = read(show, Run) if show else _measured(choice, every, json_path)
    if plot and BARE in run.peers():
        draw(run, every, plot)
    elif plot:
        click.echo(f"cloakfs: bench: {plot} is not drawn, because the bare tree was not measured", err=True)
    if old and old.about.get("sizes") != run.about.get("sizes"):
        click.echo(
            "cloakfs: bench: --against: that run had other sizes (--quick), so that the comparison says little",
            err=True,
        )
    report.show(run, every, old, markdown=markdown)
    sys.exit(FAILED if run.failed and not show else 0)


def _measured(choice: Choice, every: Mapping[str, Piece], json_path: str | None) -> Run:
    """Measure what was chosen, and write the rates to a file; end the command if that cannot be done."""
    if os.geteuid() != 0:
        fail("only root can measure: this mounts file systems, and acts as other users", FAILED)
    if json_path:
        require_writable(json_path)
    plan = choice.plan(every)
    with interruptible("bench"):
        circumstances = about(plan, choice)
        run = measured(plan)
        run.about = circumstances | {"load after": round(os.getloadavg()[0], 2)}
    if json_path:
        run.write(json_path)
    return run


bench.add_command(papers)
