"""The figure of a score tile on tensor cores: heads on M and padded, or tokens on M."""

from typing import Any

from mla_ref.checks import require_count
from mla_ref.platform import require
from mla_ref.teaching import style

# Rows and columns of the product that one mma.sync instruction makes, m16n8k16.
M, N = 16, 8
_GAP = 8  # cells between panels


def operand_tiles(heads: int = 8, tokens: int = 32, paddings: tuple[int, ...] = (64, 16)) -> Any:
    """The products of one tile, a cell a number, all panels at one scale.

    First attention by the book for each padding: heads are the rows, M, and padded to a multiple
    of it. Last the operands swapped: tokens are the rows and heads the columns, N.

    Args:
        heads: Query heads of a program, 64 at most.
        tokens: Tokens of a tile, 64 at most.
        paddings: What heads on M are padded to a multiple of, each a multiple of 16; up to two.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: A number is out of its range.
    """
    for name, value in (("heads", heads), ("tokens", tokens)):
        if require_count(name, value, at_least=1) > 64:
            raise ValueError(f"{name} must be at most 64, got {value}")
    if len(paddings) > 2 or any(padding < M or padding % M for padding in paddings):
        raise ValueError(f"paddings must be up to two multiples of {M}, got {list(paddings)}")
    panels = [
        (f"heads on M, padded to {_up(heads, padding)}", heads, tokens, _up(heads, padding),
         _up(tokens, N), "heads", "tokens")
        for padding in paddings
    ] + [
        ("tokens on M, heads on N", tokens, heads, _up(tokens, M), _up(heads, N), "tokens", "heads")
    ]  # fmt: skip
    patches = require("matplotlib.patches")
    # A panel is as wide as its tile or its words; in cells.
    widths = [max(panel[4], 32) for panel in panels]
    width, height = sum(widths) + _GAP * len(widths), max(panel[3] for panel in panels)
    with style.styled():
        figure = style.new_figure(style.WIDTH * (height + 17) / width + 0.2)
        axes = figure.add_subplot()
        x = _GAP
        for panel, taken in zip(panels, widths, strict=True):
            _draw(axes, patches, x, *panel)
            x += taken + _GAP
        axes.set(xlim=(0, width), ylim=(height + 11, -6), aspect="equal")
        axes.axis("off")
        handles = [
            patches.Patch(color=style.BLUE, label="wanted"),
            patches.Patch(facecolor=style.FAINT, hatch="///", edgecolor=style.MUTED, lw=0,
                          label="padding, computed and thrown away"),
            patches.Patch(facecolor="none", edgecolor=style.INK,
                          label="one mma.sync, 16 × 8 results"),
        ]  # fmt: skip
        figure.legend(
            handles=handles, loc="outside lower left", ncols=3, fontsize=8.5, columnspacing=1.4
        )
    return figure


def _draw(
    axes: Any, patches: Any, x: int, title: str, rows: int, columns: int, padded_rows: int,
    padded_columns: int, down: str, across: str,
) -> None:  # fmt: skip
    """One panel, its upper left corner at (x, 0)."""
    axes.add_patch(
        patches.Rectangle((x, 0), padded_columns, padded_rows, facecolor=style.FAINT, hatch="///",
                          edgecolor=style.MUTED, lw=0)
    )  # fmt: skip
    axes.add_patch(patches.Rectangle((x, 0), columns, rows, facecolor=style.BLUE, lw=0))
    for top in range(0, padded_rows, M):
        for left in range(0, padded_columns, N):
            axes.add_patch(
                patches.Rectangle((x + left, top), N, M, fill=False, edgecolor=style.INK, lw=0.8)
            )
    instructions = padded_rows // M * (padded_columns // N)
    share = rows * columns / (padded_rows * padded_columns)
    axes.text(x, -1.2, f"{columns} {across}", va="bottom", fontsize=8.5, color=style.MUTED)
    axes.text(
        x - 1.0, rows / 2, f"{rows} {down}", ha="right", va="center", rotation=90, fontsize=8.5,
        color=style.MUTED,
    )  # fmt: skip
    axes.text(
        x, padded_rows + 1.5, f"{title}\n{instructions} instructions, {100 * share:.4g}% wanted",
        va="top", fontsize=9,
    )  # fmt: skip


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
