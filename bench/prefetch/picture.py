"""Draws the figures, next to the paper's own numbers."""

import statistics
from typing import Any

from ..figures import Run, Spread
from .experiments import CURSORS, DEFAULT, DEVICE, OFF, READERS, SMALL, STRIDE, TABLE, reader_case, stride_case
from .report import PAPER, readers_of, strides_of


def draw(run: Run, path: str) -> None:
    """Draw strides beside the paper's, readers by percentage reordered, and devices, as far as they were measured."""
    import matplotlib  # noqa: PLC0415  (an extra: `bench`)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    by_percent = readers_of(run)
    small = readers_of(run, TABLE)
    rows = [setting for setting in (STRIDE, READERS, TABLE, DEVICE) if run.rates.get(setting)]
    columns = max(3, len(by_percent))
    canvas = pyplot.figure(figsize=(4.2 * columns, 4.2 * len(rows)), layout="constrained")
    for strip, row in zip(canvas.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        if row == STRIDE:
            _strides(run, strip)
        elif row == READERS:
            _readers(run, strip, READERS, by_percent)
            strip.suptitle("Figures 6 and 7: sequential readers of different files, on the slow disk")
        elif row == TABLE:
            _readers(run, strip, TABLE, small)
            strip.suptitle(f"a table of {SMALL} files, as small as the old nfsheur")
        else:
            _devices(run, strip)
    canvas.savefig(path)
    pyplot.close(canvas)


def _bars(axis: Any, labels: list[str], series: dict[str, list[tuple[float, float] | None]]) -> None:
    """Draw groups of bars: for each label, every series' (value, deviation), or None if it was not measured."""
    width = 0.8 / len(series)
    for at, (name, values) in enumerate(series.items()):
        known = [(x + (at - len(series) / 2 + 0.5) * width, *value) for x, value in enumerate(values) if value]
        axis.bar(
            *zip(*((x, value) for x, value, _ in known), strict=True), width, yerr=[d for *_, d in known], label=name
        )
    axis.set_xticks(range(len(labels)), labels)
    axis.grid(axis="y", alpha=0.3)


def _mean(rates: list[float] | None) -> tuple[float, float] | None:
    return (statistics.fmean(rates), statistics.stdev(rates) if len(rates) > 1 else 0.0) if rates else None


def _strides(run: Run, strip: Any) -> None:
    strides = strides_of(run)
    axes = strip.subplots(1, 3)
    for axis, (disk, by_peer) in zip(axes, PAPER.items(), strict=False):
        series = {peer: [(rates[s], 0.0) if s in rates else None for s in strides] for peer, rates in by_peer.items()}
        _bars(axis, [stride_case(s) for s in strides], series)
        axis.set_title(f"the paper: {disk}")
    cases = [stride_case(s) for s in strides]
    # As in the paper's panels, these two come first.
    known = dict.fromkeys([DEFAULT, CURSORS, *(peer for case in cases for peer in run.rates[STRIDE][case])])
    _bars(axes[2], cases, {peer: [_mean(run.rates[STRIDE][case].get(peer)) for case in cases] for peer in known})
    axes[2].set_title("cloakfs on the slow disk")
    axes[0].set_ylabel("MB/s")
    for axis in axes:
        axis.legend(fontsize="small")
    strip.suptitle("Table 1 and Figure 8: strides, mean and standard deviation")


def _readers(run: Run, strip: Any, setting: str, by_percent: dict[int, list[int]]) -> None:
    axes = strip.subplots(1, len(by_percent), sharey=True, squeeze=False)[0]
    for axis, (percent, readers) in zip(axes, by_percent.items(), strict=True):
        rates = run.rates[setting]
        cases = [reader_case(number, percent) for number in readers]
        for peer in dict.fromkeys(peer for case in cases for peer in rates[case]):
            points = [
                (number, *found)
                for number, case in zip(readers, cases, strict=True)
                if (found := _mean(rates[case].get(peer)))
            ]
            if points:
                xs, means, errors = zip(*points, strict=True)
                axis.errorbar(xs, means, errors, marker="o", markersize=4, capsize=2, label=peer)
        axis.set_xscale("log", base=2)
        axis.set_xticks(readers, [str(number) for number in readers])
        axis.set_title(f"{percent} % reordered")
        axis.set_xlabel("concurrent readers")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("MB/s")
    handles, labels = axes[-1].get_legend_handles_labels()
    strip.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")


def _devices(run: Run, strip: Any) -> None:
    axis = strip.subplots(1, 1)
    cases = run.rates[DEVICE]
    spreads = {case: Spread.of(run.ratios(DEVICE, case, CURSORS, OFF)) for case in cases}
    known = [(case, spread) for case, spread in spreads.items() if spread]
    error = [[s.middle - s.low for _, s in known], [s.high - s.middle for _, s in known]]
    axis.bar(range(len(known)), [s.middle for _, s in known], 0.6, yerr=error, capsize=3)
    axis.set_xticks(range(len(known)), [case.replace(", ", ",\n") for case, _ in known])
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_ylabel(f"{CURSORS} / {OFF}, median and range")
    axis.grid(axis="y", alpha=0.3)
    strip.suptitle("devices")
