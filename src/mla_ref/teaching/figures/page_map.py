"""The figure of poison: what lies in every slot of a cache, and which of it a whole page brings."""

from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mla_ref.cache import pages_needed
from mla_ref.cache.pages import require_page_size, require_pages
from mla_ref.checks import require_float
from mla_ref.platform import require
from mla_ref.teaching import style


def page_map(
    cache: Shaped[Tensor, "pages page_size *row"],
    block_table: Int[Tensor, "b max_pages"],
    seq_lens: Int[Tensor, " b"],
) -> Any:
    """A heat map of a cache: one cell a slot, as dark as its row is large, crossed if it is NaN.

    Slots that nobody wrote, but that lie on the last page of a request, have a frame: code that
    takes whole pages reads them.

    Args:
        cache: Any row; NaN where nobody has written.
        block_table: Pages of each request, in order.
        seq_lens: Tokens of each request.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: A page that a request uses lies outside the cache, or pages have no slot.
    """
    require_float("cache", cache.flatten(2), "pages page_size row")
    require_page_size("cache", cache)
    pages, page_size = cache.shape[:2]
    require_pages(block_table, seq_lens, pages, page_size)
    sizes = cache.flatten(2).double().norm(dim=-1)
    largest = max(float(sizes.nan_to_num(0.0, posinf=0.0).max()), 1e-30)
    owner, tail = [""] * pages, torch.zeros(pages, page_size, dtype=torch.bool)
    for request, length in enumerate(seq_lens.tolist()):
        for index, page in enumerate(block_table[request, : pages_needed(length, page_size)]):
            first = index * page_size
            last = min(first + page_size, length) - 1
            tail[page, last - first + 1 :] = True
            owner[page] = f"request {'ABCDEFGH'[request % 8]}, tokens {first} to {last}"
    patches, colours = require("matplotlib.patches"), require("matplotlib.colors")
    shade = colours.LinearSegmentedColormap.from_list("", ["#e3f1fa", style.BLUE])
    with style.styled():
        figure = style.new_figure(0.29 * pages + 0.85)
        axes = figure.add_subplot()
        for page in range(pages):
            for offset in range(page_size):
                size = float(sizes[page, offset])
                bad = size != size or size == float("inf")
                face = style.FAINT if bad else shade(size / largest)
                box = {"facecolor": face, "edgecolor": style.PAPER, "linewidth": 0.8}
                axes.add_patch(patches.Rectangle((offset, page), 1, 1, **box))
                if bad:
                    colour = style.VERMILLION if tail[page, offset] else style.MUTED
                    spot = {"ha": "center", "va": "center", "color": colour}
                    axes.text(offset + 0.5, page + 0.52, "×", **spot)
            read = tail[page].nonzero().flatten().tolist()
            if read:
                frame = {"facecolor": "none", "edgecolor": style.VERMILLION, "linewidth": 1.8}
                corner = (read[0] + 0.06, page + 0.08)
                axes.add_patch(patches.Rectangle(corner, len(read) - 0.12, 0.84, **frame))
            text, ink = (owner[page], style.INK) if owner[page] else ("nobody's", style.MUTED)
            axes.text(page_size + 0.3, page + 0.5, text, va="center", color=ink, fontsize=8.5)
        axes.set(xlim=(0, page_size * 1.62), ylim=(pages, 0))
        axes.set_yticks([p + 0.5 for p in range(pages)], [f"page {p}" for p in range(pages)])
        ticks = range(0, page_size, max(1, page_size // 8))
        axes.set_xticks([i + 0.5 for i in ticks], [str(i) for i in ticks])
        axes.set_xlabel("offset in the page", loc="left")
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        handles = [
            patches.Patch(facecolor=shade(0.6), label="a row, darker if larger"),
            axes.plot([], [], linestyle="", marker="x", color=style.MUTED, label="NaN")[0],
            patches.Patch(
                facecolor="none",
                edgecolor=style.VERMILLION,
                linewidth=1.8,
                label="unwritten, and read with its page",
            ),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8.5)
    return figure
