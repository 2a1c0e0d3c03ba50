"""Figures of rotary positions: which numbers are a pair, how far each turns, what it costs."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import require_count, require_float, require_integer
from mla_ref.layers import RopeConfig, inverse_frequencies
from mla_ref.platform import require
from mla_ref.teaching import style

_COLOURS = (style.BLUE, style.GREEN, style.ORANGE, style.VERMILLION)
_FLOOR = 1e-9  # zero has no logarithm; exact positions lie on this line
_LARGE = 1e-4  # where no error is smaller, the axis begins at the smallest


def rope_layouts(position: int = 5, theta: float = 10.0) -> Any:
    """Eight numbers in two layouts: which two are a pair, and how far each pair has turned.

    Args:
        position: Of the token; at least 1.
        theta: Base of the frequencies. Small, so that the slow pairs are seen to move.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: The position is below 1, or the base is not above 1.
    """
    require_count("position", position, at_least=1)
    frequencies = inverse_frequencies(RopeConfig(8, theta, interleaved=True)).tolist()
    with style.styled():
        figure = style.new_figure(3.6)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        _layout(
            axes, 0.0, "Interleaved", "pairs (2i, 2i + 1)", [(2 * i, 2 * i + 1) for i in range(4)]
        )
        _layout(axes, 9.6, "Half-split", "pairs (i, i + 4)", [(i, i + 4) for i in range(4)])
        for pair, frequency in enumerate(frequencies):
            _dial(axes, 1.9 + 4.6 * pair, 7.0, pair, frequency, position)
        axes.text(
            0.0,
            4.55,
            f"The four pairs of either layout, from position 0 (grey) to {position}",
            weight="bold",
        )
        axes.set(xlim=(-0.4, 18.0), ylim=(9.4, -0.2), aspect="equal")
        axes.axis("off")
    return figure


def _layout(axes: Any, left: float, name: str, rule: str, pairs: list[tuple[int, int]]) -> None:
    """Eight boxes in a row, coloured by pair, and an arc between the two of a pair."""
    patches = require("matplotlib.patches")
    axes.text(left, 0.35, name, weight="bold")
    axes.text(left + 8, 0.35, rule, ha="right", color=style.MUTED)
    for pair, (first, second) in enumerate(pairs):
        colour = _COLOURS[pair]
        for number in (first, second):
            axes.add_patch(
                patches.Rectangle(
                    (left + number + 0.05, 2.6), 0.9, 0.9, facecolor=colour, edgecolor="none"
                )
            )
            axes.text(
                left + number + 0.5,
                3.05,
                f"{number}",
                ha="center",
                va="center",
                color=style.INK if colour == style.ORANGE else style.PAPER,
                weight="bold",
            )
        width = second - first
        height = 0.8 if width == 1 else 0.9 + 0.27 * pair
        middle = left + (first + second) / 2 + 0.5
        axes.add_patch(
            patches.Arc(
                (middle, 2.6), width, 2 * height, theta1=180, theta2=360, color=colour, linewidth=2
            )
        )


def _dial(axes: Any, x: float, y: float, pair: int, frequency: float, position: int) -> None:
    """A pair as an arrow: faint at the positions on the way, strong at the last."""
    patches = require("matplotlib.patches")
    colour, radius = _COLOURS[pair], 1.45
    axes.add_patch(
        patches.Circle((x, y), radius, facecolor="none", edgecolor=style.FAINT, linewidth=1.5)
    )
    for step in range(position + 1):
        angle = torch.tensor(step * frequency, dtype=torch.float64)
        # The page's y axis points down; angles grow anticlockwise as in a textbook.
        end = (x + radius * float(angle.cos()), y - radius * float(angle.sin()))
        ink = style.MUTED if step == 0 else colour
        axes.plot(
            [x, end[0]],
            [y, end[1]],
            color=ink,
            alpha=1.0 if step in (0, position) else 0.3,
            linewidth=2.6 if step == position else 1.4,
            solid_capstyle="round",
        )
    axes.text(
        x,
        y + 1.75,
        f"pair {pair}: {position * frequency:.2f} rad",
        ha="center",
        va="top",
        color=style.MUTED,
    )


def error_by_position(
    errors: dict[str, Float[Tensor, " n"]],
    positions: Int[Tensor, " n"],
    *,
    ylabel: str = "error",
) -> Any:
    """How an error grows with the position, one curve a variant.

    Args:
        errors: Name and errors of each variant, four at most; 0 is drawn at the bottom, on the
            line "exact", which is left out if all are large.
        positions: What the errors belong to, growing, from 1 on: both axes are logarithmic.
        ylabel: What the errors are.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are no errors, more than four variants, not one error a position, or a
            position is below 1.
    """
    require_integer("positions", positions, "n")
    if positions.numel() == 0 or int(positions.min()) < 1:
        raise ValueError("positions must hold numbers from 1 on, one at least")
    if not 0 < len(errors) <= len(_COLOURS):
        raise ValueError(f"errors must hold 1 to {len(_COLOURS)} variants, got {len(errors)}")
    for name, error in errors.items():
        require_float(f"errors[{name!r}]", error, "n")
        if len(error) != len(positions):
            raise ValueError(
                f"errors[{name!r}] must hold one a position, {len(positions)}, got {len(error)}"
            )
    with style.styled():
        figure = style.new_figure(3.2)
        axes = figure.add_subplot()
        for (name, error), colour, marker in zip(errors.items(), _COLOURS, "o^sD", strict=False):
            axes.plot(
                positions,
                error.double().clamp(min=_FLOOR),
                marker,
                color=colour,
                markersize=4,
                label=name,
            )
        axes.set(xscale="log", xlabel="position", yscale="log", ylabel=ylabel)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        smallest = min(float(error.min()) for error in errors.values())
        if smallest > _LARGE:
            axes.set_ylim(smallest / 2, 10)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axes.set_ylim(_FLOOR / 3, 20)
            axes.set_yticks([_FLOOR, 1e-6, 1e-3, 1], ["exact", "10⁻⁶", "10⁻³", "1"])
            axes.yaxis.minorticks_off()
        axes.grid(axis="y", color=style.FAINT)
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.1)
    return figure
