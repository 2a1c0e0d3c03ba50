"""The figure of the online softmax: what the state holds after each tile."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_count, require_float
from mla_ref.teaching import style


def running_softmax(scores: Float[Tensor, " s_kv"], block_size: int) -> Any:
    """Running maximum m and running sum l while the tiles of one row go by.

    Above, the scores of the row, tile by tile, and m after each tile. Below, l after each tile:
    what was carried over, already scaled down to the new maximum, and what the tile added.

    Args:
        scores: Scores of one query row and head, softmax scale included; -inf is a hidden key.
        block_size: Keys a tile.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are no scores, or one is NaN or +inf.
    """
    require_float("scores", scores, "s_kv")
    require_count("block_size", block_size, at_least=1)
    if scores.numel() == 0 or bool((scores.isnan() | (scores == torch.inf)).any()):
        raise ValueError("scores must hold numbers or -inf, one key at least")
    tiles = scores.double().split(block_size)
    with style.styled():
        figure = style.new_figure(4.6)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.25, 1])
        m, total, first = -math.inf, 0.0, 0
        for index, tile in enumerate(tiles):
            edges = (first - 0.5, first + len(tile) - 0.5)
            new_m = max(m, float(tile.max()))
            anchor = new_m if new_m > -math.inf else 0.0
            kept = total * math.exp(m - anchor) if total else 0.0
            added = float(torch.exp(tile - anchor).sum())
            _scores(above, tile, first, edges, index, new_m)
            _sums(
                below,
                edges,
                kept,
                added,
                shrunk=total > 0 and new_m > m,
                factor=math.exp(m - anchor) if total else 1.0,
            )
            m, total, first = new_m, kept + added, first + len(tile)
        hidden = (scores == -torch.inf).nonzero().flatten()
        above.plot(
            hidden,
            [0.04] * len(hidden),
            "x",
            color=style.MUTED,
            markersize=5,
            transform=above.get_xaxis_transform(),
        )
        above.plot([], [], "o", color=style.BLUE, markersize=4, label="score of a key")
        if len(hidden):
            above.plot([], [], "x", color=style.MUTED, markersize=5, label="hidden key")
        above.plot([], [], color=style.VERMILLION, linewidth=2, label="m, highest so far")
        above.set(ylabel="score", title=f"{len(scores)} keys in tiles of {block_size}")
        above.margins(y=0.12)
        below.bar([0], [0], color=style.SKY, label="carried over, rescaled")
        below.bar(
            [0],
            [0],
            color=style.ORANGE,
            hatch="//",
            edgecolor=style.PAPER,
            label="added by the tile",
        )
        numbers = (
            f"m = {m:.3f}, l = {total:.3f}, LSE = {m + math.log(total):.3f}"
            if total
            else ("m = −∞, l = 0, LSE = −∞")
        )
        below.set(
            xlabel="key",
            ylabel="running sum l",
            xlim=(-0.5, first - 0.5),
            title=f"At the end: {numbers}",
        )
        below.set_ylim(top=below.get_ylim()[1] * 1.15)
        for axes in (above, below):
            axes.legend(
                loc="lower right",
                bbox_to_anchor=(1.0, 0.99),
                ncols=3,
                handlelength=1.2,
                borderaxespad=0,
                columnspacing=1.2,
                fontsize=8.5,
            )
    return figure


def _scores(
    axes: Any, tile: Tensor, first: int, edges: tuple[float, float], index: int, m: float
) -> None:
    if index % 2:
        axes.axvspan(*edges, color=style.FAINT, alpha=0.45, linewidth=0)
    keys = range(first, first + len(tile))
    axes.plot(
        keys,
        tile.clamp(min=-1e30).where(tile > -math.inf, torch.nan),
        "o",
        color=style.BLUE,
        markersize=4,
    )
    if m > -math.inf:
        axes.plot(edges, [m, m], color=style.VERMILLION, linewidth=2)


def _sums(
    axes: Any, edges: tuple[float, float], kept: float, added: float, *, shrunk: bool, factor: float
) -> None:
    middle, width = sum(edges) / 2, (edges[1] - edges[0]) * 0.72
    axes.bar(middle, kept, width, color=style.SKY)
    axes.bar(
        middle,
        added,
        width,
        bottom=kept,
        color=style.ORANGE,
        hatch="//",
        edgecolor=style.PAPER,
        linewidth=0,
    )
    if shrunk:
        axes.annotate(
            f"×{factor:.2g}",
            (middle, kept + added),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=style.MUTED,
        )
