"""The figure of a latent that is too narrow: what a trained layer's keys and values need."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_float
from mla_ref.teaching import style


def latent_rank(
    spectra: dict[str, Float[Tensor, " n"]],
    ranks: list[int],
    errors: dict[str, Float[Tensor, " ranks"]],
) -> Any:
    """Left, how much of the sum of squares lies beyond a rank; right, the error of stopping there.

    Args:
        spectra: Name and singular values, in falling order, of up to two matrices.
        ranks: Widths of the latent that were tried, growing.
        errors: Name and relative errors at those widths, of up to two things.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are no singular values, or not one error a rank.
    """
    for name, values in spectra.items():
        require_float(f"spectra[{name!r}]", values, "n")
        if values.numel() == 0:
            raise ValueError(f"spectra[{name!r}] must hold one singular value at least, got none")
    for name, error in errors.items():
        require_float(f"errors[{name!r}]", error, "ranks")
        if len(error) != len(ranks):
            raise ValueError(
                f"errors[{name!r}] must hold one a rank, {len(ranks)}, got {len(error)}"
            )
    with style.styled():
        figure = style.new_figure(3.1)
        left, right = figure.subplots(1, 2)
        colours = (style.BLUE, style.ORANGE)
        for (name, values), colour, line in zip(
            spectra.items(), colours, ("-", "--"), strict=False
        ):
            squares = values.double() ** 2
            beyond = 1 - squares.cumsum(0) / squares.sum()
            x = torch.arange(1, len(values) + 1)
            left.plot(x, beyond, line, color=colour, linewidth=2, label=name)
        colours = (style.GREEN, style.VERMILLION)
        for (name, error), colour, marker in zip(errors.items(), colours, "o^", strict=False):
            right.plot(ranks, error, f"-{marker}", color=colour, linewidth=2, label=name)
        left.set(
            title="Share of the squares not covered",
            xlabel="singular values kept",
            ylim=(0, 1),
        )
        right.set(title="Relative error", xlabel="width of the latent", ylim=(0, None))
        for axes in (left, right):
            axes.grid(axis="y", color=style.FAINT)
            axes.set_axisbelow(True)
            axes.legend(loc="upper right")
    return figure
