"""The figure of a merge: partial results joined two by two, and the share that each one gets."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_float
from mla_ref.teaching import style


def merge_tree(lses: Float[Tensor, " parts"], names: list[str] | None = None) -> Any:
    """Merging parts in a tree: the LSE at every node, and every part's share of the result.

    Args:
        lses: Natural log-sum-exp of each part, for one row and head; -inf is an empty part.
        names: A word or two for each part. Default: "part 0", "part 1", ...

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no part, an LSE is NaN or +inf, or the names are not one a part.
    """
    require_float("lses", lses, "parts")
    if lses.numel() == 0 or bool((lses.isnan() | (lses == torch.inf)).any()):
        raise ValueError("lses must hold numbers or -inf, one at least")
    labels = names or [f"part {i}" for i in range(len(lses))]
    if len(labels) != len(lses):
        raise ValueError(f"names must hold one name a part, {len(lses)}, got {len(labels)}")
    total = float(torch.logsumexp(lses.double(), 0))
    level = [(float(i), lse) for i, lse in enumerate(lses.double().tolist())]
    rounds = math.ceil(math.log2(len(level)))
    with style.styled():
        figure = style.new_figure(1.5 + 0.95 * rounds)
        axes = figure.add_subplot()
        for (x, lse), label in zip(level, labels, strict=True):
            share = _share(lse, total)
            colour = style.INK if share else style.MUTED
            text = f"{label}\n{share:.1%}"
            axes.text(x, 0.42, text, ha="center", va="top", color=colour, fontsize=9)
            _node(axes, x, 0.0, lse)
        for step in range(rounds):
            level = _join(axes, level, -float(step))
        axes.set(
            xlim=(-0.6, len(lses) - 0.4),
            ylim=(1.05, -rounds - 0.45),
            title="Under each part, its share of the result; on each edge, its weight there",
        )
        axes.axis("off")
    return figure


def _share(lse: float, of: float) -> float:
    return 0.0 if lse == -math.inf else math.exp(lse - of)


def _join(axes: Any, level: list[tuple[float, float]], y: float) -> list[tuple[float, float]]:
    """Draw one round of merges above the nodes (x, LSE) at height y; return the new nodes."""
    joined = []
    for first in range(0, len(level), 2):
        pair = level[first : first + 2]
        x = sum(x for x, _ in pair) / len(pair)
        lse = float(torch.logsumexp(torch.tensor([lse for _, lse in pair]).double(), 0))
        for x_below, lse_below in pair:
            weight = _share(lse_below, lse)
            colour, line = (style.BLUE, "-") if weight else (style.MUTED, ":")
            width = 0.8 + 3.2 * weight
            axes.plot([x_below, x], [y, y - 1], line, color=colour, linewidth=width, zorder=1)
            if len(pair) == 2:  # an odd part goes up alone and waits for the next round
                axes.text(
                    (x_below + x) / 2,
                    y - 0.5,
                    f"{weight:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 1.0},
                )
        _node(axes, x, y - 1, lse)
        joined.append((x, lse))
    return joined


def _node(axes: Any, x: float, y: float, lse: float) -> None:
    empty = lse == -math.inf
    text = "empty, −∞" if empty else f"LSE {lse:.3f}".replace("-", "−")
    ink, ground = (style.MUTED, style.FAINT) if empty else (style.PAPER, style.BLUE)
    box = {"boxstyle": "round,pad=0.4", "facecolor": ground, "edgecolor": "none"}
    axes.text(x, y, text, ha="center", va="center", zorder=3, color=ink, bbox=box)
