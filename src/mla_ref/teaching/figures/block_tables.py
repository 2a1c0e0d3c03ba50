"""The figure of a block table: the order of a request's tokens, and where they lie in memory."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.cache import pages_needed
from mla_ref.cache.pages import require_batch, require_pages
from mla_ref.checks import require_count
from mla_ref.platform import require
from mla_ref.teaching import style

_COLOURS = (style.SKY, style.ORANGE, style.GREEN, style.VERMILLION)
_GAP = 0.7  # cells between two pages
_TOP, _BOTTOM = 0.0, 6.0  # rows of cells, in cells


def block_tables(
    block_table: Int[Tensor, "b max_pages"],
    seq_lens: Int[Tensor, " b"],
    *,
    page_size: int,
    num_pages: int,
) -> Any:
    """Requests above, in the order of their tokens; below, the same tokens in the pages of memory.

    A number is the position of a token in its request; a crossed slot belongs to nobody. A page
    that two requests share is drawn in the colour of the first.

    Args:
        block_table: Pages of each request, in order.
        seq_lens: Tokens of each request; four requests at most.
        page_size: Tokens a page.
        num_pages: Pages in memory.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: The table does not fit the lengths or the memory, or there are more requests
            than colours.
    """
    require_count("num_pages", num_pages, at_least=1)
    requests = len(seq_lens)
    if not 1 <= requests <= len(_COLOURS):
        raise ValueError(f"seq_lens must hold 1 to {len(_COLOURS)} requests, got {requests}")
    starts = torch.zeros(requests + 1, dtype=torch.int64)
    require_batch(starts, seq_lens, block_table, page_size)
    require_pages(block_table, seq_lens, num_pages, page_size)
    lengths = seq_lens.tolist()
    used = [pages_needed(length, page_size) for length in lengths]
    # Requests lie side by side, one page of room between them.
    above = (sum(used) + requests - 1) * (page_size + _GAP)
    below = num_pages * (page_size + _GAP)
    width = max(above, below) - _GAP
    cell = style.WIDTH / (width + 0.6)
    with style.styled():
        figure = style.new_figure(cell * (_BOTTOM + 4.9))
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-0.3, width + 0.3), ylim=(_BOTTOM + 2.4, -2.5))
        axes.axis("off")
        font = min(9.0, 72 * cell * 0.52)
        owned: dict[int, str] = {}
        left = 0.0
        for request, length in enumerate(lengths):
            colour, name = _COLOURS[request], "ABCD"[request]
            pages = block_table[request, : used[request]].tolist()
            axes.text(left, _TOP - 1.25, f"Request {name}", weight="bold", va="bottom")
            axes.text(left, _TOP - 0.3, f"pages {pages}".replace("[]", "none"), va="bottom")
            for index, page in enumerate(pages):
                first = index * page_size
                cells = [p if p < length else None for p in range(first, first + page_size)]
                x = page * (page_size + _GAP)
                _page(axes, left, _TOP, cells, colour, font)
                _line(axes, left, x, page_size, colour)
                if page not in owned:
                    _page(axes, x, _BOTTOM, cells, colour, font, crossed=True)
                owned[page] = f"{owned[page]}, {name}" if page in owned else name
                left += page_size + _GAP
            left += page_size + _GAP
        for page in range(num_pages):
            x = page * (page_size + _GAP)
            if page not in owned:
                _page(axes, x, _BOTTOM, [None] * page_size, style.FAINT, font, crossed=True)
            label = f"page {page}"
            middle, colour = x + page_size / 2, style.INK if page in owned else style.MUTED
            axes.text(middle, _BOTTOM + 1.2, label, ha="center", va="top", color=colour)
    return figure


def _page(
    axes: Any,
    left: float,
    top: float,
    cells: list[int | None],
    colour: str,
    font: float,
    *,
    crossed: bool = False,
) -> None:
    """One page: a cell a slot, with the position of its token, empty or crossed without one."""
    patches = require("matplotlib.patches")
    for index, position in enumerate(cells):
        x = left + index
        face = style.FAINT if position is None else colour
        box = {"facecolor": face, "edgecolor": style.PAPER, "linewidth": 1.0}
        axes.add_patch(patches.Rectangle((x, top), 1, 1, **box))
        text = f"{position}" if position is not None else "×" if crossed else ""
        ink = style.INK if position is not None else style.MUTED
        axes.text(x + 0.5, top + 0.52, text, ha="center", va="center", fontsize=font, color=ink)
    frame = {"facecolor": "none", "edgecolor": style.MUTED, "linewidth": 0.9}
    axes.add_patch(patches.Rectangle((left, top), len(cells), 1, **frame))


def _line(axes: Any, above: float, below: float, page_size: int, colour: str) -> None:
    """From a page of a request to its place in memory."""
    axes.plot(
        [above + page_size / 2, below + page_size / 2],
        [_TOP + 1.12, _BOTTOM - 0.12],
        color=colour,
        linewidth=2,
        solid_capstyle="round",
        zorder=0,
    )
