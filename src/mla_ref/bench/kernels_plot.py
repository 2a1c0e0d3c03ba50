"""The figure of a kernel's times: decode, extend and peers against rows, beside the floor."""

from collections.abc import Sequence
from pathlib import Path

from mla_ref.bench.kernels import KernelPoint
from mla_ref.platform import require

MARKERS = "os^Dvp*X"


def plot_kernels(points: Sequence[KernelPoint], path: str | Path, *, title: str = "") -> None:
    """Draw microseconds against rows, both logarithmic: a column a head count, a row a workload.

    Args:
        points: What `measure_kernels` gave, at two numbers of rows or more.
        path: Where to save the figure; its ending (png, svg, pdf) names the format.
        title: What was measured where.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are fewer than two numbers of rows, or matplotlib does not know the
            ending.
    """
    ticks = sorted({point.shape.rows for point in points})
    if len(ticks) < 2:
        raise ValueError("points must have two numbers of rows at least, or there is no line")
    heads = sorted({point.shape.heads for point in points})
    workloads = list(dict.fromkeys(point.workload for point in points))
    names = list(dict.fromkeys(line.name for p in points for line in p.lines if line.seconds))
    figure = require("matplotlib.figure").Figure(
        figsize=(1.5 + 3.2 * len(heads), 1 + 2.8 * len(workloads)), layout="constrained"
    )
    grid = figure.subplots(len(workloads), len(heads), squeeze=False, sharex=True)
    for row, workload in enumerate(workloads):
        for column, head in enumerate(heads):
            axes = grid[row][column]
            mine = sorted(
                (p for p in points if (p.workload, p.shape.heads) == (workload, head)),
                key=lambda p: p.shape.rows,
            )
            for name, marker in zip(names, MARKERS, strict=False):
                found = [(p.shape.rows, p.seconds(name)) for p in mine]
                timed = [(rows, 1e6 * s) for rows, s in found if s]
                if timed:
                    axes.plot(*zip(*timed, strict=True), marker=marker, markersize=4, label=name)
            axes.plot(
                [p.shape.rows for p in mine],
                [1e6 * p.floor_s for p in mine],
                color="black",
                linestyle=":",
                label="floor",
            )
            axes.set(xscale="log", yscale="log", title=f"{workload}, heads: {head}")
            axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("query rows")
    for line in grid:
        line[0].set_ylabel("us")
    grid[0][0].legend(fontsize="small")
    figure.suptitle(title, fontsize="small", wrap=True)
    figure.savefig(path)
