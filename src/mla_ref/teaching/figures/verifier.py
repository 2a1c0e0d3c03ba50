"""Figures of a verifier batch: what each of its rows may see, and how much of a GPU it fills."""

from collections.abc import Sequence
from typing import Any

from mla_ref.batching import KernelCost, Step
from mla_ref.checks import describe
from mla_ref.platform import require
from mla_ref.teaching import style

_CACHED, _NEW, _OWN = style.SKY, style.ORANGE, style.VERMILLION


def verifier_rows(step: Step) -> Any:
    """One line a row of the step, one cell a key: cached before, of this step, the row's own.

    What a row may not see is pale. Padded rows come last and see nothing.

    Args:
        step: A step on the host with short requests; up to about 24 keys each.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: No request has a token.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must be a Step, got {describe(step)}")
    if step.num_tokens == 0:
        raise ValueError("step must have a token at least, got none")
    patches = require("matplotlib.patches")
    longest = int(step.seq_lens.max())
    with style.styled():
        lines = step.num_tokens_padded + 0.45 * step.num_reqs
        figure = style.new_figure(0.27 * lines + 0.75)
        axes = figure.add_subplot()
        y, row = 0.0, 0
        for request, new in enumerate(step.query_lens[: step.num_reqs]):
            length = int(step.seq_lens[request])
            if new:
                axes.text(-3.0, y + new / 2, f"request {request}", ha="right", va="center")
            for candidate in range(new):
                seen = int(step.visible_lens[row])
                for key in range(length):
                    colour = _OWN if key == seen - 1 else _NEW if key >= length - new else _CACHED
                    box = {"facecolor": colour if key < seen else style.FAINT, "edgecolor": "none"}
                    axes.add_patch(patches.Rectangle((key + 0.05, y + 0.06), 0.9, 0.88, **box))
                name = "newest token" if candidate == 0 else f"draft {candidate - 1}"
                task = "gives the next" if candidate == new - 1 else f"judges draft {candidate}"
                axes.text(-0.3, y + 0.5, f"row {row}", ha="right", va="center", color=style.MUTED)
                text = f"{name}, sees {seen}, {task}"
                axes.text(longest + 0.5, y + 0.5, text, va="center", fontsize=8.5)
                y, row = y + 1, row + 1
            y += 0.45
        for padded in range(row, step.num_tokens_padded):
            axes.text(-0.3, y + 0.5, f"row {padded}", ha="right", va="center", color=style.MUTED)
            axes.text(
                longest + 0.5, y + 0.5, "padding, sees 0", va="center", fontsize=8.5,
                color=style.MUTED,
            )  # fmt: skip
            y += 1
        axes.set(xlim=(-6.6, longest + 11.5), ylim=(y + 0.1, -0.1))
        axes.axis("off")
        handles = [
            patches.Patch(color=_CACHED, label="cached before"),
            patches.Patch(color=_NEW, label="written in this step"),
            patches.Patch(color=_OWN, label="the row itself"),
            patches.Patch(color=style.FAINT, label="later, hidden"),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8.5)
    return figure


def blocks_on_multiprocessors(costs: Sequence[KernelCost]) -> Any:
    """Each launch's thread blocks on a GPU: one square a multiprocessor, filled if it has a block.

    Counted, not measured: at most one block is drawn on each.

    Args:
        costs: One to three launches, side by side.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no launch, or there are more than three.
    """
    if not 1 <= len(costs) <= 3:
        raise ValueError(f"costs must hold one to three launches, got {len(costs)}")
    patches = require("matplotlib.patches")
    columns = 20
    with style.styled():
        most = max(-(-cost.multiprocessors // columns) for cost in costs)
        figure = style.new_figure(style.WIDTH / len(costs) / (columns + 1) * (most + 1.2) + 0.5)
        panels = figure.subplots(1, len(costs), squeeze=False)[0]
        for axes, cost in zip(panels, costs, strict=True):
            for unit in range(cost.multiprocessors):
                busy = unit < cost.blocks
                corner = (unit % columns + 0.08, unit // columns + 0.08)
                face = style.BLUE if busy else style.FAINT
                axes.add_patch(
                    patches.Rectangle(corner, 0.84, 0.84, facecolor=face, edgecolor="none")
                )
            splits = "1 pass" if cost.num_splits == 1 else f"{cost.num_splits} splits"
            filled = min(cost.blocks, cost.multiprocessors)
            axes.set_title(f"{cost.kind}: {splits}, {cost.blocks} blocks")
            axes.text(
                0.08, most + 0.25, f"{filled} of {cost.multiprocessors} multiprocessors have work",
                va="top", color=style.MUTED,
            )  # fmt: skip
            axes.set(xlim=(0, columns), ylim=(most + 1.1, -0.1), aspect="equal")
            axes.axis("off")
    return figure
