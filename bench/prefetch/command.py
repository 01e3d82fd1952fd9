"""The command `python -m bench prefetch`."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import click
from rich.table import Table

from cli.common import console, fail
from cli.exits import FAILED, WRONG
from cloakfs.config.errors import ExportsError
from cloakfs.config.parse import parse_options
from cloakfs.prefetch import HEURISTICS, Limits

from ..figures import Run
from ..session import interruptible, read, require_matplotlib, require_writable
from . import content, report
from .experiments import QUICK_SCALE, Scale, about, cases, length, measure
from .hung import measure as latencies
from .live import Files, read_all
from .picture import draw
from .replay import replay as feed
from .slowdisk import SlowDiskError
from .streams import LARGEST, Read, StreamError, generate, merged, parse, reordered, sizes, text

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST = 1 << 40


def _size(value: str) -> int:
    """Return the number of bytes that a word with K, M or G means."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", value)
    number = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < number <= _MOST:
        raise click.BadParameter(f"{value!r} is not a size; expected a number of bytes up to 1024G, such as 8K or 256M")
    return number


@click.group()
def prefetch() -> None:
    """Measure what reading ahead does, without a disk and with a slow one."""


# -- replay --------------------------------------------------------------------------------------------


@prefetch.command()
@click.argument("stream_file", metavar="[STREAM-FILE]", required=False)
@click.option("--pattern", type=click.Choice(["sequential", "stride", "random"]), help="Generate a stream instead.")
@click.option(
    "--size", type=_size, metavar="SIZE", default="16M", show_default=True, help="Size of all its files together."
)
@click.option("--block", type=_size, metavar="SIZE", default="8K", show_default=True, help="Bytes of each read.")
@click.option(
    "--stride", type=click.IntRange(1), default=2, show_default=True, help="With stride: the number of parts."
)
@click.option("--readers", type=click.IntRange(1), default=1, show_default=True, help="Readers, each of its own file.")
@click.option(
    "--reordered",
    "percent",
    type=click.FloatRange(0, 100),
    default=0,
    metavar="PERCENT",
    help="How many of the requests are overtaken by later ones for the same file.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything random.")
@click.option(
    "--heuristic", "names", type=click.Choice(list(HEURISTICS)), multiple=True, help="Only this one; repeatable."
)
@click.option("-o", "words", metavar="OPTIONS", default="", help="Limits, as for a mount: prefetch_window=1M,…")
@click.option("--save", metavar="FILE", help="Write the stream to FILE.")
@click.option("--live", metavar="DIR", help="Read the files in DIR as the stream says.")
@click.option(
    "--create", is_flag=True, help="With --live: make the files, and check the content that each read returns."
)
@click.option("--outstanding", type=click.IntRange(1, 256), default=1, show_default=True, help="Concurrent reads.")
@click.option("--buffered", is_flag=True, help="With --live: read through the page cache of DIR's file system.")
@click.option(
    "--paced", is_flag=True, help="With --live: keep the times of the stream, instead of reading as fast as possible."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
def replay(
    stream_file: str | None,
    pattern: str | None,
    size: int,
    block: int,
    stride: int,
    readers: int,
    percent: float,
    seed: int,
    names: tuple[str, ...],
    words: str,
    save: str | None,
    live: str | None,
    outstanding: int,
    *,
    create: bool,
    buffered: bool,
    paced: bool,
    as_json: bool,
) -> None:
    """Feed a stream of READs to each heuristic, or with --live to real files.

    A stream consists of lines SECONDS FILE OFFSET LENGTH; a mount with `-o record=FILE` writes one.

    Exit status: 0 done, 1 a file cannot be read or written, or has the wrong content, 2 wrong usage, or
    STREAM-FILE is not a stream.
    """
    if (stream_file is None) == (pattern is None):
        fail("prefetch replay: expected either a STREAM-FILE or --pattern", WRONG)
    if stream_file is not None:
        stream = _stream(stream_file)
    else:
        assert pattern is not None
        if not block <= LARGEST:
            fail(f"--block {block}: more than {LARGEST >> 20}M", WRONG)
        if size < readers:
            fail(f"--size {size}: less than a byte for each of {readers} readers", WRONG)
        stream = merged(generate(pattern, size, block, stride=stride, readers=readers, seed=seed))
    if percent:
        stream = reordered(stream, percent / 100, seed)
    if save is not None:
        with _errors_of(save), open(save, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text(stream))
    if live is not None:
        _live(stream, live, outstanding, create=create, buffered=buffered, paced=paced, as_json=as_json)
    else:
        _offline(stream, names or tuple(HEURISTICS), _limits(words), as_json=as_json)


@contextlib.contextmanager
def _errors_of(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        fail(f"{exc.filename or path}: {exc.strerror or exc}", FAILED)


def _stream(path: str) -> list[Read]:
    with _errors_of(path):
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                return parse(file, path)
        except StreamError as exc:
            fail(str(exc), WRONG)


def _limits(words: str) -> Limits:
    try:
        options, _ = parse_options(words)
        nothing, _ = parse_options("")
    except ExportsError as exc:
        fail(str(exc), WRONG)
    if options != replace(nothing, prefetch_limits=options.prefetch_limits):
        fail(f"-o {words}: only prefetch_window, _file, _total, _files and _cursors can be given here", WRONG)
    return options.prefetch_limits


def _offline(stream: list[Read], names: tuple[str, ...], limits: Limits, *, as_json: bool) -> None:
    outcomes = {name: feed(stream, HEURISTICS[name], limits) for name in names}
    if as_json:
        results = {name: asdict(outcome) | {"wasted": outcome.wasted} for name, outcome in outcomes.items()}
        click.echo(json.dumps({"limits": asdict(limits), "heuristics": results}, indent=2))
        return
    columns = ("heuristic", "requests", "misses", "asks", "asked, KiB", "used", "wasted", "peak ahead", "mean seqCount")
    table = Table(*columns[:1])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for name, outcome in outcomes.items():
        sizes = (outcome.asked, outcome.used, outcome.wasted, outcome.peak)
        table.add_row(
            name,
            f"{outcome.requests:,}",
            f"{outcome.misses:,}",
            f"{outcome.asks:,}",
            *(f"{amount / 1024:,.0f}" for amount in sizes),
            f"{outcome.seq_count:.1f}",
        )
    console().print(table)


def _live(
    stream: list[Read], directory: str, outstanding: int, *, create: bool, buffered: bool, paced: bool, as_json: bool
) -> None:
    needed = sizes(stream)
    with _errors_of(directory):
        for name, size in needed.items():
            path = os.path.join(directory, name)
            if create and not os.path.exists(path):
                content.create(directory, name, size)
            elif os.stat(path).st_size == 0:
                fail(f"{path}: the file is empty; remove it, and use --create", FAILED)
        left = [content.drop_pages(os.path.join(directory, name)) for name in needed]
        with Files(directory, needed, direct=not buffered) as files:
            found = read_all([stream], files, outstanding=outstanding, verified=create, paced=paced)
            direct = files.direct
    facts: dict[str, object] = {
        "requests": len(stream),
        "bytes": found.bytes,
        "seconds": round(found.seconds, 3),
        "MB/s": round(found.rate, 2),
        **{f"p{share * 100:g} ms": round(found.percentile(share) * 1000, 3) for share in (0.5, 0.9, 0.99, 1)},
        "O_DIRECT": direct,
        "pages in memory before": None if None in left else sum(pages or 0 for pages in left),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo("\n".join(f"{name}: {value}" for name, value in facts.items()))


# -- figures -------------------------------------------------------------------------------------------


@prefetch.command()
@click.option(
    "--figure",
    "figures",
    type=click.Choice(["table1", "6", "7", "8", "nfsheur", "device"]),
    multiple=True,
    help="Only this one; repeatable.",
)
@click.option(
    "--runs", type=click.IntRange(1), help="Runs of each experiment; by default 10, and 2 of concurrent readers."
)
@click.option(
    "--size",
    type=_size,
    metavar="SIZE",
    help="Size of the files read at a time; by default 64M, and 1G for Figures 6 and 7. The paper has 256M.",
)
@click.option("--block", type=_size, metavar="SIZE", default="8K", show_default=True, help="Bytes of each read.")
@click.option(
    "--outstanding", type=click.IntRange(1, 64), default=1, show_default=True, help="Concurrent reads of each reader."
)
@click.option("--iops", type=click.IntRange(10), default=200, show_default=True, help="Reads per second of the disk.")
@click.option(
    "--rate", type=_size, metavar="SIZE", default="120000000", show_default=True, help="Bytes per second of the disk."
)
@click.option(
    "--read-ahead-kb", type=click.IntRange(0), default=128, show_default=True, help="KiB that the kernel reads ahead."
)
@click.option("--quick", is_flag=True, help="One short run with little data, to see whether everything works.")
@click.option("--json", "json_path", metavar="FILE", help="Write all rates to FILE.")
@click.option("--plot", metavar="FILE", help="Draw the figures (PNG or SVG; needs matplotlib).")
@click.option("--show", metavar="FILE", help="Measure nothing; show an earlier run (from --json).")
@click.option("--markdown", is_flag=True, help="Print tables for the documentation.")
def figures(
    figures: tuple[str, ...],
    runs: int | None,
    size: int | None,
    block: int,
    outstanding: int,
    iops: int,
    rate: int,
    read_ahead_kb: int,
    json_path: str | None,
    plot: str | None,
    show: str | None,
    *,
    quick: bool,
    markdown: bool,
) -> None:
    """Repeat the experiments of Ellard and Seltzer (2003) on a slow disk, which is made for them.

    docs/prefetch.md describes what is measured, and how. This takes three quarters of an hour. Ratios are comparable
    between runs, rates only between disks of the same speed. Needs root.

    Exit status: 0 measured (or shown), 1 it cannot be measured, or something failed, 2 wrong usage.
    """
    if plot:
        require_matplotlib()
        require_writable(plot)
    if show:
        run = read(show, Run)
    else:
        if os.geteuid() != 0:
            fail("only root can measure: this mounts file systems, and throttles a disk", FAILED)
        if json_path:
            require_writable(json_path)
        chosen = list(
            dict.fromkeys("table1" if name == "8" else name for name in figures or ("table1", "7", "nfsheur", "device"))
        )
        scale = QUICK_SCALE if quick else Scale(iops=iops, bps=rate)
        scale = replace(scale, block=block, outstanding=outstanding, read_ahead_kb=read_ahead_kb)
        scale = _scaled(scale, runs, size)
        facts = about(chosen, scale)
        for reduction in scale.reductions(chosen):
            click.echo(f"cloakfs: prefetch: reduced: {reduction}", err=True)
        with interruptible("prefetch"):
            run = _measured(chosen, scale)
        run.about = facts | run.about
        if json_path:
            run.write(json_path)
    if plot:
        draw(run, plot)
    report.show(run, markdown=markdown)
    sys.exit(FAILED if run.failed and not show else 0)


def _scaled(scale: Scale, runs: int | None, size: int | None) -> Scale:
    """Return the scale with this number of runs and size of files; end the command if they are too small."""
    if runs is not None:
        scale = replace(scale, runs=runs, reader_runs=runs)
    if size is not None:
        if size < 32 * scale.block:
            fail(f"--size {size}: less than a block of {scale.block} for each of 32 readers", WRONG)
        scale = replace(scale, size=size, reader_size=size, table_size=size)
    return scale


@prefetch.command()
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Rounds, each without and with waiting clients.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Duration of each measurement."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
def hung(rounds: int, seconds: float, *, as_json: bool) -> None:
    """Measure 16 clients beside a file system that never answers.

    It is mounted inside the tree; four more clients wait for it. Needs root.

    Exit status: 0 measured, 1 it cannot be measured.
    """
    if os.geteuid() != 0:
        fail("only root can measure: this mounts file systems", FAILED)
    try:
        with interruptible("prefetch"), _progress(rounds + 1) as advance:
            found = latencies(rounds, seconds, advance)
    except (RuntimeError, OSError) as exc:
        fail(f"prefetch: {exc}", FAILED)
    click.echo(json.dumps(found.as_json()) if as_json else found.summary())


def _measured(chosen: list[str], scale: Scale) -> Run:
    todo = cases(chosen, scale)
    try:
        with _progress(length(todo)) as advance:
            return measure(todo, scale, advance, lambda said: click.echo(f"cloakfs: prefetch: {said}", err=True))
    except (SlowDiskError, RuntimeError, OSError, subprocess.CalledProcessError) as exc:
        fail(f"prefetch: {exc}", FAILED)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, drawn between two measurements; what it gives is called at each step."""
    where = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with click.progressbar(length=steps, file=where, item_show_func=lambda what: what) as bar:
        yield lambda what: bar.update(1, what)
