"""The figure of the roofline: what a machine can do at most, by the FLOP done for a byte read."""

import math
from typing import Any

from mla_ref.checks import require_scale
from mla_ref.teaching import style

_DECADES_PER_LABEL = 0.62  # vertical room of a label of two lines, in powers of ten


def roofline(points: dict[str, float], machines: dict[str, tuple[float, float]]) -> Any:
    """How fast work can go at most, against its arithmetic intensity, on one or more machines.

    Left of a machine's ridge reading is the limit, right of it arithmetic. The points stand on the
    roof of the first machine: limits that follow from the peaks, not measurements.

    Args:
        points: Name and intensity, in FLOP a byte, of each kind of work.
        machines: Name, peak FLOP a second and peak bytes a second of each machine.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no machine, or a number is not finite and above 0.
    """
    if not machines:
        raise ValueError("machines must hold one machine at least, got none")
    for name, (flops, bandwidth) in machines.items():
        require_scale(f"peak FLOP/s of {name}", flops)
        require_scale(f"peak bytes/s of {name}", bandwidth)
    for name, intensity in points.items():
        require_scale(f"points[{name!r}]", intensity)
    peak, bandwidth = next(iter(machines.values()))
    ridge = peak / bandwidth
    left = min([ridge / 400, *(x / 2.5 for x in points.values())])
    right = max([ridge * 40, *(x * 25 for x in points.values())])
    with style.styled():
        figure = style.new_figure(4.8)
        axes = figure.add_subplot()
        top = max(flops for flops, _ in machines.values()) / 1e12 * 3.2
        axes.set(xscale="log", yscale="log", xlim=(left, right))
        axes.axvspan(left, ridge, color=style.FAINT, alpha=0.45, linewidth=0)
        colours = (style.INK, style.GREEN, style.ORANGE)
        looks = zip(machines.items(), colours, ("-", "--", ":"), strict=False)
        for (name, (flops, rate)), colour, line in looks:
            knee = flops / rate
            axes.plot(
                [left, knee, right],
                [left * rate / 1e12, flops / 1e12, flops / 1e12],
                line,
                color=colour,
                linewidth=1.8,
                label=f"{name}: {flops / 1e12:.0f} TFLOP/s, {rate / 1e12:.1f} TB/s, "
                f"ridge at {knee:.0f} FLOP a byte",
            )
        limits = {"reading is the limit": (-6, "right"), "arithmetic is the limit": (6, "left")}
        for text, (shift, side) in limits.items():
            axes.annotate(
                text,
                (ridge, top / 1.25),
                xytext=(shift, 0),
                textcoords="offset points",
                ha=side,
                va="top",
                color=style.MUTED,
                fontsize=9,
            )
        lowest = _points(axes, points, tuple(machines.values()))
        axes.set_ylim(min(lowest, left * bandwidth / 1e12) / 6, top)
        axes.set(xlabel="FLOP a byte read", ylabel="TFLOP a second, at most")
        figure.legend(loc="outside lower center", fontsize=8.5, handlelength=2.2)
        axes.grid(color=style.FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    return figure


def _points(
    axes: Any, points: dict[str, float], machines: tuple[tuple[float, float], ...]
) -> float:
    """Each point on the first machine's roof, with a stem down to its label below all roofs.

    Labels rise from left to right, so that no stem crosses the label of its neighbour. Returns
    where the lowest one begins.
    """
    peak, ceiling, below = machines[0][0], math.inf, math.inf
    for name, intensity in sorted(points.items(), key=lambda point: -point[1]):
        roofs = [min(flops, intensity * rate) for flops, rate in machines]
        roof, below = roofs[0], min(min(roofs) / 1e12 / 10**0.12, ceiling)
        ceiling = below / 10**_DECADES_PER_LABEL
        colour, marker = (style.BLUE, "o") if roof < peak else (style.VERMILLION, "s")
        axes.plot([intensity] * 2, [below / 10**0.4, roof / 1e12], color=colour, linewidth=1)
        axes.plot([intensity], [roof / 1e12], marker, color=colour, markersize=7, zorder=4)
        axes.text(
            intensity * 1.1,
            below,
            f"{name}\n{intensity:,.3g} FLOP/B, {_share(roof / peak)} of the peak",
            ha="left",
            va="top",
            color=colour,
            fontsize=8.5,
            linespacing=1.15,
        )
    return below


def _share(part: float) -> str:
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"
