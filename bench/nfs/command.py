"""The command `python -m bench nfs`."""

import contextlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import click

from cli.common import console, fail
from cli.exits import FAILED

from ..lab.stock.image import made_image
from ..lab.stock.kernels import KERNELS, StockKernel
from ..lab.stock.setup import NoLaboratory, install_missing, run
from ..session import interruptible, read, require_writable
from ..sheet import Sheet
from ..speed.choice import chosen, revision
from .measure import measure
from .plan import BARE, OPTIONS, NfsPlan
from .report import against_sheet, doubts, ratio_sheet, request_sheet
from .results import NfsRun
from .targets import target_sheet
from .work import Amounts, all_nfs_work

_SAY_EACH = 60.0
"""Seconds between two lines that say how far it is, without a terminal."""


@click.command()
@click.option("--kernel", "kernels", type=click.Choice(list(KERNELS)), multiple=True, help="Only this; repeatable.")
@click.option("--work", "works", multiple=True, metavar="GLOB", help="Only this work (see --list); repeatable.")
@click.option(
    "--export", "exports", multiple=True, metavar="GLOB", help="Only these exports, beside the bare one; repeatable."
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="The least of so many counts.")
@click.option("--requests", is_flag=True, help="Print the requests to the daemon as well.")
@click.option("--markdown", is_flag=True, help="Print tables for the documentation.")
@click.option("--json", "json_path", metavar="FILE", help="Write all counts to FILE.")
@click.option("--against", metavar="FILE", help="Print what changed since an earlier run (from --json).")
@click.option("--show", multiple=True, metavar="FILE", help="Measure nothing; show earlier runs; repeatable.")
@click.option("--list", "only_list", is_flag=True, help="Print the names of all works and exports.")
def nfs(
    kernels: tuple[str, ...],
    works: tuple[str, ...],
    exports: tuple[str, ...],
    repeat: int,
    json_path: str | None,
    against: str | None,
    show: tuple[str, ...],
    *,
    requests: bool,
    markdown: bool,
    only_list: bool,
) -> None:
    """Measure work over NFS on stock kernels of Debian, in weighed instructions.

    Boots each kernel in software emulation (qemu), where NFS server and client are, and counts instructions. What else
    runs on the machine does not matter. docs/performance.md describes it. Everything takes an hour; what is missing is
    installed and downloaded first, and kept in .cache/stock. Needs root, and Debian 12 on x86-64.

    Exit status: 0 measured (or shown), 1 it cannot be measured, or some work failed, 2 wrong usage.
    """
    plan = NfsPlan(
        chosen(list(all_nfs_work(Amounts())), works, "--work"),
        list(dict.fromkeys([BARE, *chosen(list(OPTIONS), exports, "--export")])),
        repeat=repeat,
    )
    if only_list:
        click.echo("\n".join(["works (--work):", *(f"  {name}" for name in plan.works)]))
        click.echo("\n".join(["exports (--export):", *(f"  {name}" for name in plan.exports)]))
        return
    old = read(against, NfsRun) if against else None
    if show:
        found = NfsRun()
        for path in show:
            found.merge(read(path, NfsRun))
    else:
        if json_path:
            require_writable(json_path)
        found = NfsRun()
        try:
            with interruptible("nfs"):
                _measure(kernels or tuple(KERNELS), plan, found)
        finally:
            if json_path and found.measured:  # also after an interruption
                found.write(json_path)
    _print(found, old, requests=requests, markdown=markdown)
    sys.exit(FAILED if found.failed and not show else 0)


def _say(text: str) -> None:
    click.echo(f"cloakfs: nfs: {text}", err=True)


def _measure(kernels: Sequence[str], plan: NfsPlan, found: NfsRun) -> None:
    """Set up what is missing, and measure; end the command if that cannot be done."""
    try:
        if installed := install_missing():
            _say(f"installed {' '.join(installed)}")
        fetched = {version: StockKernel.fetched(version) for version in kernels}
        image = made_image()
        found.about = _about(plan, fetched)
    except NoLaboratory as exc:
        fail(f"nfs: {exc}", FAILED)
    with _progress(len(kernels) * plan.length()) as advance:
        for at, (version, kernel) in enumerate(fetched.items()):
            measure(version, kernel, image, plan, found, partial(advance, at * plan.length()))
    for text in found.failed:
        _say(text)


def _about(plan: NfsPlan, kernels: dict[str, StockKernel]) -> dict[str, object]:
    """Return what the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "cloakfs": f"{importlib.metadata.version('cloakfs')}{revision()}",
        "Python": platform.python_version(),
        "qemu": run("qemu-system-x86_64", "--version").splitlines()[0],
        **{f"Linux {version}": kernel.release for version, kernel in kernels.items()},
        "repeat": plan.repeat,
        "amounts": asdict(plan.amounts),
    }


@contextlib.contextmanager
def _progress(length: int) -> Iterator[Callable[[int, int, str], None]]:
    """Give a function that moves a bar, or says how far it is.

    It is called with how much was done before this guest, how much in it, and what was done last.
    """
    if not sys.stderr.isatty():
        said = time.monotonic()

        def say(before: int, done: int, what: str) -> None:
            nonlocal said
            if time.monotonic() - said > _SAY_EACH:
                said = time.monotonic()
                _say(f"{before + done} of {length}: {what}")

        yield say
        return
    with click.progressbar(length=length, file=sys.stderr, item_show_func=lambda what: what) as bar:
        yield lambda before, done, what: bar.update(before + done - bar.pos, what)


def _print(found: NfsRun, old: NfsRun | None, *, requests: bool, markdown: bool) -> None:
    works = all_nfs_work(Amounts())
    sheets: list[Sheet] = []
    for kernel in found.kernels():
        sheets.append(ratio_sheet(found, works, kernel))
        if requests:
            sheets.append(request_sheet(found, works, kernel))
    if (targets := target_sheet(found)).rows:
        sheets.append(targets)
    if old:
        sheets.append(against_sheet(found, old, works))
    for sheet in sheets:
        if markdown:
            click.echo(sheet.markdown())
        else:
            console().print(sheet.table())
    for text in doubts(found):
        _say(text)
