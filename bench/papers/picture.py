"""Draws a figure: the paper's values, where they are printed, beside ours."""

import io
from collections.abc import Sequence
from typing import Any

from .experiment import Figure, Form, MeasuredSeries, Series

_MOST_BESIDE = 6
"""So many labels of bars have room beside each other."""


def svg(figure: Figure, measured: MeasuredSeries) -> str:
    """Return the picture as an SVG element, which can stand by itself or in a page beside others."""
    import matplotlib  # noqa: PLC0415  (an extra: `bench`)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    ours = list(measured.series.values())
    panels = [("the paper", list(figure.paper_values))] if figure.paper_values else []
    how = "one run" if measured.runs == 1 else f"mean and deviation of {measured.runs} runs"
    panels.append((f"{figure.ours}, {how}", ours))
    colours = {name: f"C{at % 10}" for at, name in enumerate(_names(ours, figure.paper_values))}
    # The salt keeps the ids of several pictures in one page apart, and those of one picture the same each time.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": figure.key, "font.size": 9}
    height = 4.8 if figure.form is Form.BARS and len(measured.xs) > _MOST_BESIDE else 3.4
    with matplotlib.rc_context(settings):
        canvas, axes = pyplot.subplots(
            1, len(panels), figsize=(5.2 * len(panels), height), squeeze=False, layout="constrained"
        )
        for axis, (title, series) in zip(axes[0], panels, strict=True):
            (_lines if figure.form is Form.LINES else _bars)(axis, figure, series, colours)
            axis.set_title(title, fontsize="medium")
            axis.set_xlabel(figure.x_label)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.3)
        axes[0][0].set_ylabel(figure.unit)
        handles = {
            name: handle for axis in axes[0] for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        canvas.legend(handles.values(), handles, fontsize="small", loc="outside lower center", ncols=2 * len(panels))
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(canvas)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]


def _names(*groups: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(series.name for group in groups for series in group))


def _lines(axis: Any, figure: Figure, drawn: list[Series], colours: dict[str, str]) -> None:
    for series in drawn:
        xs = [float(point.x) for point in series.points]
        means = [point.mean for point in series.points]
        errors = [point.deviation or 0 for point in series.points]
        axis.errorbar(
            xs, means, errors, marker="o", markersize=4, capsize=2, label=series.name, color=colours[series.name]
        )
    xs = sorted({float(point.x) for series in drawn for point in series.points})
    if figure.log_x:
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [f"{x:g}" for x in xs])


def _bars(axis: Any, figure: Figure, drawn: list[Series], colours: dict[str, str]) -> None:
    labels = list(dict.fromkeys(point.x for series in drawn for point in series.points))
    width = 0.8 / max(1, len(drawn))
    for at, series in enumerate(drawn):
        places = [labels.index(point.x) + (at - len(drawn) / 2 + 0.5) * width for point in series.points]
        means = [point.mean for point in series.points]
        errors = [point.deviation or 0 for point in series.points] if any(p.deviation for p in series.points) else None
        axis.bar(places, means, width, yerr=errors, capsize=2, label=series.name, color=colours[series.name])
    crowded = len(labels) > _MOST_BESIDE
    written = labels if crowded else [label.replace(", ", ",\n") for label in labels]
    axis.set_xticks(range(len(labels)), written, rotation=90 if crowded else 0)
