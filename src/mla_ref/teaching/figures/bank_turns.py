"""The figure of shared memory's banks: what a warp's load wants, and how many turns that takes."""

from collections.abc import Mapping
from typing import Any

from mla_ref.platform import require
from mla_ref.teaching import style
from mla_ref.teaching.tile_memory import Array
from mla_ref.teaching.warp_memory import PIECE, PIECES, turns

_GAP = 1.6  # columns between quarters


def bank_turns(loads: Mapping[str, Array]) -> Any:
    """Loads of 16 bytes by 32 lanes: eight lanes at a time, a column for each piece of 128 bytes.

    A box is what a lane wants, in the column of the banks where it lies. What is stacked is served
    in turn; lanes that want the very same bytes share a box.

    Args:
        loads: For each load, by name, 32 addresses in bytes, as from `warp_memory.key_addresses`.
            Up to six.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no load, there are more than six, or one has other addresses.
    """
    if not 1 <= len(loads) <= 6:
        raise ValueError(f"loads must be one to six, got {len(loads)}")
    counted = {name: turns(addresses) for name, addresses in loads.items()}
    patches = require("matplotlib.patches")
    width = 4 * PIECES + 3 * _GAP
    heights = [max(counts) + 3.0 for counts in counted.values()]
    with style.styled():
        figure = style.new_figure(style.WIDTH * (sum(heights) + 1.8) / (width + 0.5))
        axes = figure.add_subplot()
        y = 0.0
        for (name, addresses), height in zip(loads.items(), heights, strict=True):
            floor = y + height - 1.4
            total = sum(counted[name])
            axes.text(0, y, f"{name}: {total} turns", va="top", fontsize=9.5)
            for quarter, count in enumerate(counted[name]):
                _quarter(axes, patches, addresses, quarter, count, floor)
            y += height
        axes.text(
            0, y - 0.1,
            "Boxes: lanes. Columns: bytes 0 to 15 of each 128 bytes, 16 to 31, and so on to 127.",
            va="top", fontsize=8.5, color=style.MUTED,
        )  # fmt: skip
        axes.set(xlim=(-0.2, width + 0.2), ylim=(y + 1.1, -0.5), aspect="equal")
        axes.axis("off")
        handles = [
            patches.Patch(color=style.BLUE, label="served in the first turn"),
            patches.Patch(color=style.ORANGE, label="must wait for a turn of its own"),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=8.5)
    return figure


def _quarter(
    axes: Any, patches: Any, addresses: Array, quarter: int, count: int, floor: float
) -> None:
    """Eight lanes, their boxes standing on `floor`."""
    x = quarter * (PIECES + _GAP)
    axes.plot([x, x + PIECES], [floor, floor], color=style.INK, lw=1)
    for column in range(PIECES + 1):
        axes.plot([x + column] * 2, [floor, floor - 0.95], color=style.FAINT, lw=0.8, zorder=0)
    stacks: dict[int, list[int]] = {}
    lanes: dict[int, list[int]] = {}
    for lane in range(8 * quarter, 8 * quarter + 8):
        piece = int(addresses[lane]) // PIECE
        lanes.setdefault(piece, []).append(lane)
        stack = stacks.setdefault(piece % PIECES, [])
        if piece not in stack:
            stack.append(piece)
    for column, stack in stacks.items():
        for level, piece in enumerate(stack):
            corner = (x + column + 0.05, floor - level - 0.95)
            colour, ink = (style.ORANGE, style.INK) if level else (style.BLUE, style.PAPER)
            axes.add_patch(patches.Rectangle(corner, 0.9, 0.9, facecolor=colour))
            first, more = lanes[piece][0], len(lanes[piece]) - 1
            axes.text(
                x + column + 0.5, floor - level - 0.48, f"{first}+{more}" if more else str(first),
                ha="center", va="center", fontsize=6.5 if more else 8, color=ink,
            )  # fmt: skip
    axes.text(
        x + PIECES, floor + 0.12, f"{count} turn{'s' if count > 1 else ''}", ha="right", va="top",
        fontsize=8, color=style.MUTED,
    )  # fmt: skip
