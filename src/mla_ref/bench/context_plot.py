"""The figure of what a long context costs."""

from collections.abc import Sequence
from pathlib import Path

from mla_ref.bench.context import ContextRow, growth
from mla_ref.platform import require


def plot(rows: Sequence[ContextRow], path: str | Path, *, title: str = "") -> None:
    """Draw peak memory and time against context length, all axes logarithmic.

    On such axes a power of n is a straight line, twice as steep for n² as for n.

    Args:
        rows: What `measure_context` gave, at two lengths or more.
        path: Where to save the figure; its ending (png, svg, pdf) names the format.
        title: What was measured where: times without their machine mean little.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are fewer than two lengths, or matplotlib does not know the ending.
    """
    if len({row.length for row in rows}) < 2:
        raise ValueError("rows must hold two context lengths at least, or there is no line to draw")
    # A Figure of its own: pyplot would keep it open and choose a window system.
    figure = require("matplotlib.figure").Figure(figsize=(10, 4.2), layout="constrained")
    memory_axes, time_axes = figure.subplots(1, 2)
    exponents = growth(rows)
    for name, marker in zip(exponents, "os^", strict=True):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.length)
        lengths = [row.length for row in mine]
        label = f"rung {mine[0].rung}, {name}"
        memory_axes.plot(
            lengths,
            [row.peak_bytes / 2**20 for row in mine],
            marker=marker,
            label=f"{label}: grows as n^{exponents[name]:.2f}",
        )
        medians = [row.timing.median_s * 1e3 for row in mine]
        below = [m - row.timing.min_s * 1e3 for m, row in zip(medians, mine, strict=True)]
        above = [row.timing.max_s * 1e3 - m for m, row in zip(medians, mine, strict=True)]
        time_axes.errorbar(
            lengths, medians, yerr=[below, above], marker=marker, capsize=3, label=label
        )
    memory_axes.set(title="Peak memory beside the inputs", ylabel="MiB")
    time_axes.set(title="Time of one call: median, fastest to slowest", ylabel="ms")
    for axes in (memory_axes, time_axes):
        axes.set(xscale="log", yscale="log", xlabel="context, tokens")
        ticks = sorted({row.length for row in rows})
        axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title, fontsize="small")
    figure.savefig(path)
