"""The figure of two forms of one attention: what each costs as a call has more query rows."""

import math
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import require_float, require_integer
from mla_ref.teaching import style

_COLOURS = (style.VERMILLION, style.BLUE)


def forms_by_rows(
    rows: Int[Tensor, " n"],
    flops: dict[str, Float[Tensor, " n"]],
    nbytes: dict[str, Float[Tensor, " n"]],
) -> Any:
    """Operations on the left and bytes on the right, against query rows, both logarithmic.

    Where the two forms cost the same number of operations, a line and its number of rows are drawn.

    Args:
        rows: Query rows of a call, growing, from 1 on.
        flops: Name and floating-point operations of the two forms.
        nbytes: The same names, and the bytes that they read and write.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are not two forms, the names differ, or not one number a row count.
    """
    require_integer("rows", rows, "n")
    if len(flops) != 2 or list(flops) != list(nbytes):
        raise ValueError(
            f"flops and nbytes must hold the same two forms, got {list(flops)} and {list(nbytes)}"
        )
    for what, numbers in (("flops", flops), ("nbytes", nbytes)):
        for name, values in numbers.items():
            require_float(f"{what}[{name!r}]", values, "n")
            if len(values) != len(rows):
                raise ValueError(
                    f"{what}[{name!r}] must hold one number a row count, {len(rows)}, "
                    f"got {len(values)}"
                )
    with style.styled():
        figure = style.new_figure(3.4)
        left, right = figure.subplots(1, 2)
        for axes, numbers in ((left, flops), (right, nbytes)):
            for (name, values), colour, line in zip(
                numbers.items(), _COLOURS, ("--", "-"), strict=True
            ):
                axes.plot(rows, values, line, color=colour, linewidth=2, label=name)
            axes.set(xscale="log", yscale="log", xlabel="query rows of the call")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.grid(axis="y", color=style.FAINT)
            axes.set_axisbelow(True)
            axes.legend(loc="upper left")
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom, top * (top / bottom) ** 0.2)  # room for the legend
        left.set_title("Floating-point operations")
        right.set_title("Bytes read and written")
        first, second = flops.values()
        if (at := _crossing(rows, first, second)) is not None:
            left.axvline(at, color=style.MUTED, linewidth=1, linestyle=":")
            left.text(
                at * 1.15,
                0.05,
                f"equal at {at:.0f} rows",
                transform=left.get_xaxis_transform(),
                color=style.MUTED,
            )
    return figure


def _crossing(
    rows: Int[Tensor, " n"], first: Float[Tensor, " n"], second: Float[Tensor, " n"]
) -> float | None:
    """Where two curves meet, on the logarithmic axes, between the first points that swap order."""
    gap = (first.double().log() - second.double().log()).tolist()
    for i in range(len(gap) - 1):
        if gap[i] * gap[i + 1] < 0:
            share = gap[i] / (gap[i] - gap[i + 1])
            low, high = math.log(int(rows[i])), math.log(int(rows[i + 1]))
            return math.exp(low + share * (high - low))
    return None
