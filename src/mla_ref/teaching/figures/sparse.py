"""Figures of sparse attention: where it stops being dense, and how a list is split."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.checks import require_count, require_float, require_integer
from mla_ref.platform import require
from mla_ref.teaching import style

_LEAST = 1e-8
_LOOKS = {
    "ideal": (style.GREEN, "s", "--"),
    "indexer": (style.BLUE, "o", "-"),
    "window": (style.ORANGE, "^", "-"),
    "random": (style.MUTED, "x", ":"),
}
_SPLITS = (style.SKY, style.ORANGE)


def sparse_cliff(
    errors: dict[int, Float[Tensor, " n"]], rows: list[dict[str, Any]], text: str
) -> Any:
    """Left, the error of each row's output against its context; right, perplexity against k.

    Args:
        errors: For some k, the relative error of rows that see 1, 2, 3, ... keys; up to three.
        rows: Measurements with "text", "choice", "topk" and "perplexity", as
            `smollm2_indexer.json` has them.
        text: Which text's rows to draw.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no such text.
    """
    mine = [row for row in rows if row["text"] == text]
    if not mine:
        raise ValueError(f"text must be one of {sorted({row['text'] for row in rows})}, got {text}")
    for k, error in errors.items():
        require_float(f"errors[{k}]", error, "n")
    with style.styled():
        figure = style.new_figure(3.3)
        left, right = figure.subplots(1, 2)
        for (k, error), colour in zip(
            errors.items(), (style.VERMILLION, style.ORANGE, style.BLUE), strict=False
        ):
            context = torch.arange(1, len(error) + 1)
            left.plot(context, error.clamp(min=_LEAST), color=colour, linewidth=1.5)
            left.text(
                k + 1.5, 1e-5, f"k = {k}", color=style.INK, rotation=90, va="center", fontsize=8.5
            )  # fmt: skip
            left.axvline(k, color=colour, linewidth=1, linestyle=":")
        left.set(
            title="Relative error of a row", xlabel="keys that the row may see", yscale="log",
            ylim=(_LEAST, 2),
        )  # fmt: skip
        left.set_yticks([_LEAST, 1e-6, 1e-4, 1e-2, 1.0], ["exact", "10⁻⁶", "10⁻⁴", "10⁻²", "1"])
        left.yaxis.minorticks_off()
        for choice, (colour, marker, line) in _LOOKS.items():
            drawn = [row for row in mine if row["choice"] == choice]
            right.plot(
                [row["topk"] for row in drawn], [row["perplexity"] for row in drawn],
                line, marker=marker, color=colour, markersize=4, label=choice,
            )  # fmt: skip
        for row in mine:
            if row["choice"] == "dense":
                right.axhline(row["perplexity"], color=style.INK, linewidth=1, label="dense")
        topks = sorted({row["topk"] for row in mine if row["topk"] is not None})
        right.set(title="Perplexity of the model", xlabel="k", xscale="log", yscale="log")
        right.set_xticks(topks, [str(k) for k in topks])
        right.minorticks_off()
        top = max(row["perplexity"] for row in mine)
        ticks = [t for t in (10, 30, 100, 300, 1000) if t < 2 * top]
        right.set_yticks(ticks, [str(t) for t in ticks])
        right.legend(loc="upper right", fontsize=8)
        for axes in (left, right):
            axes.grid(axis="y", color=style.FAINT)
            axes.set_axisbelow(True)
    return figure


def list_splits(indices: Int[Tensor, " k"], splits: list[int]) -> Any:
    """One row's list, cut into each number of splits; an empty split is a unit of work, too.

    Args:
        indices: The row's slots, -1 for none.
        splits: Numbers of splits, one drawing each.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: The list or `splits` is empty, or a number is below 1.
    """
    require_integer("indices", indices, "k")
    if not len(indices) or not splits:
        raise ValueError("indices and splits must not be empty")
    for number in splits:
        require_count("splits", number, at_least=1)
    k = len(indices)
    with style.styled():
        figure = style.new_figure(0.15 + 0.66 * len(splits))
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(-3.4, k + 3.6), ylim=(-1.0 * len(splits), 0.05))
        axes.axis("off")
        for line, number in enumerate(splits):
            y = -line - 0.72
            length = -(-k // number)
            pieces = [indices[first : first + length] for first in range(0, k, length)]
            idle = number - sum(bool((piece >= 0).any()) for piece in pieces)
            name = "1 split" if number == 1 else f"{number} splits"
            axes.text(-0.4, y + 0.27, name, ha="right", va="center")
            for at, slot in enumerate(indices.tolist()):
                _entry(axes, float(at), y, slot, _SPLITS[at // length % 2])
            for first in range(0, k, length):
                width = min(length, k - first)
                axes.plot(
                    [first + 0.08, first + width - 0.08], [y - 0.09, y - 0.09],
                    color=style.INK, linewidth=1.5, solid_capstyle="butt",
                )  # fmt: skip
            axes.text(
                k + 0.4, y + 0.27, "none empty" if not idle else f"{idle} empty", va="center",
                color=style.VERMILLION if idle else style.MUTED,
            )  # fmt: skip
    return figure


def _entry(axes: Any, x: float, y: float, slot: int, colour: str) -> None:
    patches = require("matplotlib.patches")
    axes.add_patch(
        patches.Rectangle(
            (x + 0.04, y), 0.92, 0.54, facecolor=colour if slot >= 0 else style.FAINT,
            edgecolor="none",
        )
    )  # fmt: skip
    axes.text(
        x + 0.5, y + 0.27, str(slot), ha="center", va="center", fontsize=8,
        color=style.INK if slot >= 0 else style.MUTED,
    )  # fmt: skip
