"""The figure of a receipt: measured times, and the floor that no kernel can go below."""

from collections.abc import Sequence
from typing import Any

from mla_ref.bench.receipt import ReceiptLine
from mla_ref.teaching import style

_LOOKS = ((style.BLUE, "o"), (style.ORANGE, "s"), (style.GREEN, "^"), (style.SKY, "D"))


def receipt_times(lines: Sequence[ReceiptLine]) -> Any:
    """Time against rows, a panel for each number of heads and a curve for each contender.

    The bar of a point goes from its fastest to its slowest round. The floor is the receipt's own:
    unique bytes at the speed of a copy, or operations at the speed of a product, both measured in
    the same run.

    Args:
        lines: Lines of one receipt and one workload; those without a time are left out.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: No line has a time, they are of several workloads, or there are more than four
            contenders or three numbers of heads.
    """
    timed = [line for line in lines if line.median_us is not None]
    if not timed:
        raise ValueError("lines must hold a time at least, got none")
    workloads = sorted({(line.workload, line.overlap) for line in timed})
    if len(workloads) > 1:
        raise ValueError(f"lines must be of one workload, got {workloads}")
    heads = sorted({line.heads for line in timed})
    names = list(dict.fromkeys(line.contender for line in timed))
    if len(names) > len(_LOOKS) or len(heads) > 3:
        raise ValueError(
            f"lines must be of four contenders and three numbers of heads at most, got {names} "
            f"and {heads}"
        )
    rows = sorted({line.rows for line in timed})
    with style.styled():
        figure = style.new_figure(3.1)
        panels = figure.subplots(1, len(heads), sharey=True, squeeze=False)[0]
        for axes, count in zip(panels, heads, strict=True):
            mine = [line for line in timed if line.heads == count]
            for name, (colour, marker) in zip(names, _LOOKS, strict=False):
                points = sorted((x for x in mine if x.contender == name), key=lambda x: x.rows)
                middles = [float(x.median_us or 0) for x in points]
                below = [m - float(x.lowest_us or 0) for m, x in zip(middles, points, strict=True)]
                above = [float(x.highest_us or 0) - m for m, x in zip(middles, points, strict=True)]
                axes.errorbar(
                    [x.rows for x in points], middles, yerr=[below, above], color=colour,
                    marker=marker, ms=5, capsize=2, lw=1.4, label=name,
                )  # fmt: skip
            floors = sorted({(line.rows, line.floor_us) for line in mine})
            axes.plot(*zip(*floors, strict=True), color=style.MUTED, lw=1.4, ls="--", label="floor")
            axes.fill_between(*zip(*floors, strict=True), 1e-9, color=style.FAINT, lw=0)
            axes.set_title(f"{count} heads")
            axes.set(xscale="log", yscale="log", xlabel="query rows")
            axes.set_xticks(rows, [str(n) for n in rows])
            axes.set_xticks([], minor=True)
            axes.grid(axis="y", color=style.FAINT)
            axes.set_axisbelow(True)
        lowest = min(line.floor_us for line in timed)
        highest = max(float(line.highest_us or 0) for line in timed)
        panels[0].set(ylabel="microseconds", ylim=(lowest / 1.5, highest * 1.5))
        panels[0].yaxis.set_major_formatter("{x:g}")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=5, fontsize=8.5)
    return figure
