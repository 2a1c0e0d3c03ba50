"""The figure of a tolerance: how large the errors of several computations are, and how many."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_float
from mla_ref.teaching import style

_COLOURS = (style.SKY, style.GREEN, style.BLUE, style.ORANGE, style.VERMILLION)
_BINS_A_DECADE = 6


def error_histogram(
    errors: Mapping[str, Float[Tensor, "..."]], limits: Mapping[str, float] | None = None
) -> Any:
    """One row of bars for each computation: how many of its errors are of which size.

    Errors of 0 have no place on a logarithmic axis; their share stands beside the row if it is 2%
    or more.

    Args:
        errors: Absolute errors by name, up to five rows; all finite, and not all of them 0.
        limits: A largest error that is allowed, by name, drawn into the row of that name.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no row or more than five, a row is empty or holds NaN, an infinity or a
            negative number, every error is 0, or a limit has no row.
    """
    if not 1 <= len(errors) <= len(_COLOURS):
        raise ValueError(f"errors must be one to {len(_COLOURS)} rows, got {len(errors)}")
    rows = {name: _magnitudes(name, value) for name, value in errors.items()}
    limits = dict(limits or {})
    if unknown := sorted(set(limits) - set(rows)):
        raise ValueError(f"limits must name rows of errors, got {unknown}")
    positive = torch.cat([value[value > 0] for value in rows.values()])
    if not len(positive):
        raise ValueError("errors must hold a number above 0, got none")
    # The few smallest errors of many are luck; they are counted in the first bar.
    lowest = float(positive.sort().values[len(positive) // 500])
    first = np.floor(np.log10(lowest))
    last = np.ceil(np.log10(max(float(positive.max()), *limits.values(), 0.0)) + 0.1)
    edges = np.logspace(first, last, int(last - first) * _BINS_A_DECADE + 1)
    with style.styled():
        figure = style.new_figure(0.7 + 0.72 * len(rows))
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, value), colour in zip(panels, rows.items(), _COLOURS, strict=False):
            counts, _ = np.histogram(value[value > 0].clamp(min=edges[0]).numpy(), edges)
            axes.stairs(counts, edges, fill=True, color=colour, alpha=0.85)
            axes.set(xscale="log", xlim=(edges[0], edges[-1]), ylim=(0, max(counts.max(), 1) * 1.1))
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            exact = float((value == 0).double().mean())
            axes.text(
                0.0, 0.94, f"{name}{f', {exact:.0%} exact' if exact >= 0.02 else ''}",
                transform=axes.transAxes, va="top", fontsize=9,
            )  # fmt: skip
            if name in limits:
                axes.axvline(limits[name], color=style.INK, lw=1.6)
                axes.annotate(
                    "allowed", (limits[name], 0.9), (4, 0), xycoords=("data", "axes fraction"),
                    textcoords="offset points", va="top", fontsize=8.5,
                )  # fmt: skip
        panels[-1].set_xlabel("absolute error, one bar a sixth of a decade")
    return figure


def _magnitudes(name: str, value: Tensor) -> Tensor:
    """The errors as a flat float64 tensor on the CPU."""
    require_float(f"errors[{name!r}]", value, " ".join("d" * value.ndim))
    flat = value.detach().to("cpu", torch.float64).flatten()
    if not len(flat) or not bool(flat.isfinite().all()) or bool((flat < 0).any()):
        raise ValueError(f"errors[{name!r}] must hold finite numbers of 0 or more, at least one")
    return flat
