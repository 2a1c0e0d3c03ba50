"""Figures of the indexer: its guess beside the truth, and how good its choice of keys is."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mla_ref.checks import require_count, require_float
from mla_ref.platform import require
from mla_ref.teaching import style

_FAINTEST = 1e-4
_LOOKS = {
    "ideal": (style.GREEN, "s", "--"),
    "indexer": (style.BLUE, "o", "-"),
    "window": (style.ORANGE, "^", "-"),
    "random": (style.MUTED, "x", ":"),
}


def score_maps(
    guess: Float[Tensor, "n n"], truth: Float[Tensor, "n n"], chosen: Bool[Tensor, "two n n"]
) -> Any:
    """Two causal maps of weights, and where the keys that each would choose agree.

    Args:
        guess: Weights of each row as the indexer expects them: the softmax of its scores.
        truth: Weights of the attention, mean of the heads.
        chosen: True for the best k keys of each row, by guess and by truth.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: The maps are not square, empty, or of different size.
    """
    require_float("guess", guess, "n n")
    require_float("truth", truth, "n n")
    n = guess.shape[0]
    if n == 0 or guess.shape != (n, n) or truth.shape != (n, n) or chosen.shape != (2, n, n):
        raise ValueError(
            "guess, truth and both maps of chosen must be square and of one size, got "
            f"{list(guess.shape)}, {list(truth.shape)} and {list(chosen.shape)}"
        )
    colors = require("matplotlib.colors")
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    with style.styled():
        figure = style.new_figure(3.3)
        axes = figure.subplots(1, 3)
        norm = colors.LogNorm(_FAINTEST, 1.0)
        ramp = colors.LinearSegmentedColormap.from_list(
            "ink", [style.PAPER, style.SKY, style.BLUE, style.INK]
        ).with_extremes(bad=style.FAINT)
        for panel, title, weights in (
            (axes[0], "Indexer's guess", guess),
            (axes[1], "Attention", truth),
        ):
            shown = weights.double().clamp(min=_FAINTEST).masked_fill(future, torch.nan).numpy()
            image = panel.imshow(shown, norm=norm, cmap=ramp, interpolation="nearest")
            panel.set_title(title)
        figure.colorbar(
            image, ax=axes.tolist(), location="bottom", shrink=0.5, aspect=40,
            label="weight of a key, left and middle",
        )  # fmt: skip
        by_guess, by_truth = chosen
        kinds = torch.where(by_guess & by_truth, 3, torch.where(by_truth, 2, by_guess.int()))
        palette = colors.ListedColormap(
            [style.PAPER, style.ORANGE, style.VERMILLION, style.BLUE]
        ).with_extremes(bad=style.FAINT)
        axes[2].imshow(
            kinds.double().masked_fill(future, torch.nan).numpy(),
            vmin=0, vmax=3, cmap=palette, interpolation="nearest",
        )  # fmt: skip
        axes[2].set_title("Chosen keys")
        patch = require("matplotlib.patches").Patch
        labels = ((style.BLUE, "by both"), (style.VERMILLION, "missed"), (style.ORANGE, "needless"))
        axes[2].legend(
            handles=[patch(color=colour, label=label) for colour, label in labels],
            loc="upper right", fontsize=8, handlelength=1.0, borderaxespad=0.2,
        )  # fmt: skip
        for panel in axes:
            panel.set(xlabel="key", xticks=[0, n - 1], yticks=[0, n - 1])
        axes[0].set_ylabel("row", labelpad=-8)
    return figure


def selection_quality(rows: list[dict[str, Any]], text: str, training: dict[str, list[Any]]) -> Any:
    """Recall and attention mass against k for each way to choose, and the curve of the training.

    Args:
        rows: Measurements with "text", "choice", "topk", "recall" and "mass", as
            `smollm2_indexer.json` has them.
        text: Which text's rows to draw.
        training: "step" and "loss", in nats.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no such text, or not one loss a step.
    """
    mine = [row for row in rows if row["text"] == text and row["topk"] is not None]
    if not mine:
        raise ValueError(f"text must be one of {sorted({row['text'] for row in rows})}, got {text}")
    steps, losses = training["step"], training["loss"]
    if require_count("len(steps)", len(steps), at_least=1) != len(losses):
        raise ValueError(f"training must hold one loss a step, {len(steps)}, got {len(losses)}")
    with style.styled():
        figure = style.new_figure(3.0)
        axes = figure.subplots(1, 3)
        for choice, (colour, marker, line) in _LOOKS.items():
            drawn = [row for row in mine if row["choice"] == choice]
            topks = [row["topk"] for row in drawn]
            for panel, what in ((axes[0], "recall"), (axes[1], "mass")):
                panel.plot(
                    topks, [row[what] for row in drawn], line, marker=marker, color=colour,
                    markersize=4, label=choice,
                )  # fmt: skip
        topks = sorted({row["topk"] for row in mine})
        for panel, title in ((axes[0], "Recall of the best k"), (axes[1], "Share of the weight")):
            panel.set(title=title, xscale="log", xlabel="k", ylim=(0, 1.03))
            panel.set_xticks(topks, [str(k) for k in topks])
            panel.minorticks_off()
            panel.grid(axis="y", color=style.FAINT)
        axes[1].legend(loc="center left", fontsize=8, bbox_to_anchor=(0.0, 0.57), borderaxespad=0.2)
        axes[2].plot(steps, losses, "-", color=style.BLUE, linewidth=2)
        axes[2].set(title="Training: mean KL, nats", xlabel="step", yscale="log")
        axes[2].set_yticks([0.1, 1.0], ["0.1", "1"])
        axes[2].grid(axis="y", color=style.FAINT)
        for panel in axes:
            panel.set_axisbelow(True)
    return figure
