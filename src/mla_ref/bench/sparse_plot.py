"""The figure of what sparse attention saves."""

from collections.abc import Sequence
from pathlib import Path

from mla_ref.bench.sparse import NAMES, SparseRow
from mla_ref.platform import require


def plot_sparse(rows: Sequence[SparseRow], path: str | Path, *, title: str = "") -> None:
    """Draw the time of a step against the length of the cache, both axes logarithmic.

    What grows with the length rises; what does not stays level.

    Args:
        rows: What `measure_sparse` gave, at two lengths or more.
        path: Where to save the figure; its ending (png, svg, pdf) names the format.
        title: What was measured where: times without their machine mean little.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are fewer than two lengths, or matplotlib does not know the ending.
    """
    ticks = sorted({row.length for row in rows})
    if len(ticks) < 2:
        raise ValueError("rows must hold two lengths at least, or there is no line to draw")
    # A Figure of its own: pyplot would keep it open and choose a window system.
    figure = require("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, marker in zip(NAMES, "D^so", strict=True):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.length)
        if not mine:
            continue
        medians = [row.timing.median_s * 1e3 for row in mine]
        below = [m - row.timing.min_s * 1e3 for m, row in zip(medians, mine, strict=True)]
        above = [row.timing.max_s * 1e3 - m for m, row in zip(medians, mine, strict=True)]
        lengths = [row.length for row in mine]
        axes.errorbar(lengths, medians, yerr=[below, above], marker=marker, capsize=3, label=name)
    axes.set(
        title="One decode step of one layer: median, fastest to slowest",
        xscale="log",
        yscale="log",
        xlabel="tokens in the cache",
        ylabel="ms",
    )
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(title, fontsize="small", wrap=True)
    figure.savefig(path)
