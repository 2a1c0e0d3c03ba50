"""The figure of a symptom: how wrong each row is, and in which call it was computed."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_float
from mla_ref.teaching import style

_FLOOR = 1e-9  # zero has no logarithm; exact rows lie on this line


def error_by_row(
    errors: dict[str, Float[Tensor, " rows"]], calls: list[int], *, ylabel: str = "relative error"
) -> Any:
    """Errors of several variants, row after row, with the calls that computed them marked.

    Args:
        errors: Name and errors of each variant; 0 is drawn at the bottom, on the line "exact".
        calls: Rows of each call, in order; they add up to the number of rows.
        ylabel: What the errors are.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: The calls do not add up to the rows of every variant.
    """
    for name, error in errors.items():
        require_float(f"errors[{name!r}]", error, "rows")
        if sum(calls) != len(error):
            raise ValueError(
                f"calls must add up to {len(error)} rows of {name!r}, got {sum(calls)}"
            )
    colours = (style.BLUE, style.VERMILLION, style.GREEN, style.ORANGE)
    with style.styled():
        figure = style.new_figure(3.2)
        axes = figure.add_subplot()
        first = 0
        for index, rows in enumerate(calls):
            edges = (first - 0.5, first + rows - 0.5)
            if index % 2:
                axes.axvspan(*edges, color=style.FAINT, alpha=0.6, linewidth=0)
            if rows > 2:
                axes.text(
                    sum(edges) / 2,
                    1.01,
                    f"{rows} rows",
                    ha="center",
                    va="bottom",
                    transform=axes.get_xaxis_transform(),
                    color=style.MUTED,
                    fontsize=8.5,
                )
            first += rows
        for (name, error), colour, marker in zip(errors.items(), colours, "o^sD", strict=False):
            axes.plot(
                torch.arange(len(error)),
                error.double().clamp(min=_FLOOR),
                marker,
                color=colour,
                markersize=4.5,
                label=name,
            )
        axes.set(yscale="log", xlabel="token; each white or shaded band is one call", ylabel=ylabel)
        axes.set(xlim=(-0.5, first - 0.5), ylim=(_FLOOR / 3, 10))
        axes.set_yticks([_FLOOR, 1e-6, 1e-3, 1], ["exact", "10⁻⁶", "10⁻³", "1"])
        axes.minorticks_off()
        axes.grid(axis="y", color=style.FAINT)
        axes.set_axisbelow(True)
        axes.legend(loc="center left", handletextpad=0.3)
    return figure
