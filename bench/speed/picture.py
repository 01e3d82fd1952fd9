"""A picture of the ratios."""

from collections.abc import Mapping
from itertools import groupby

from ..figures import Run, Spread
from ..homes import HOME
from ..job import Piece
from ..peers import BARE, FIXED, MANY, NULL, PEERS, STOCK, UNCACHED

_SHOWN = ("overlayfs", "bindfs", UNCACHED, STOCK, NULL, MANY, FIXED)
"""The other ways of mounting would fill the picture and look like one of these."""


def draw(run: Run, works: Mapping[str, Piece], path: str) -> None:
    """Bars: peers against the bare tree (logarithmic); one row for each setting and kind of files."""
    import matplotlib  # noqa: PLC0415  (an extra: `bench`)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    peers = [peer for peer in run.peers() if peer in _SHOWN]
    peers = peers or [peer for peer in run.peers() if peer in PEERS and peer != BARE]
    panels = []
    for setting, rates in run.rates.items():
        compared = [name for name in rates if name in works and BARE in rates[name]]
        names = sorted(compared, key=lambda name: works[name].kind, reverse=True)
        for kind, group in groupby(names, key=lambda name: works[name].kind):
            panels.append((f"{setting}, {'files in homes' if kind == HOME else f'{kind} files'}", setting, list(group)))
    canvas, axes = pyplot.subplots(len(panels), 1, figsize=(16, 4.0 * len(panels)), squeeze=False)
    width = 0.76 / max(1, len(peers))
    colours = [f"C{number}" for number in range(10)]
    for axis, (title, setting, names) in zip(axes[:, 0], panels, strict=True):
        for at, peer in enumerate(peers):
            bars = [
                (x + (at - len(peers) / 2 + 0.5) * width, spread)
                for x, name in enumerate(names)
                if (spread := Spread.of(run.ratios(setting, name, peer, BARE)))
            ]
            places, middles = [place for place, _ in bars], [spread.middle for _, spread in bars]
            error = [[s.middle - s.low for _, s in bars], [s.high - s.middle for _, s in bars]]
            label, colour = peer, colours[at % len(colours)]
            axis.bar(places, middles, width, yerr=error, label=label, color=colour, error_kw={"elinewidth": 0.7})
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        kind = works[names[0]].kind
        labels = [name.removesuffix(f" {kind}").replace("+", "+\n").replace(" ", "\n") for name in names]
        axis.set_xticks(range(len(names)), labels, fontsize="small")
        axis.set_xlim(-0.5, len(names) - 0.5)
        axis.set_ylabel("rate / rate of the bare tree")
        axis.set_title(f"{title}: median and range of the rounds (higher is faster)")
        axis.grid(axis="y", alpha=0.3)
    if panels:
        axes[0, 0].legend(fontsize="small", ncols=len(peers), loc="upper center", bbox_to_anchor=(0.5, 1.25))
    canvas.tight_layout()
    canvas.savefig(path)
    pyplot.close(canvas)
