"""Figures of a cache on several ranks: who holds which token, and what each rank sees of a step."""

from collections.abc import Sequence
from typing import Any

import torch

from mla_ref.checks import require_count
from mla_ref.parallel import global_positions, local_lens, owner_of
from mla_ref.platform import require
from mla_ref.teaching import style

_RANKS = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILLION)
_LIGHT = style.ORANGE
_CACHED, _NEW = style.SKY, style.ORANGE


def dealt_positions(
    length: int, *, world: int, interleaves: Sequence[int], page_size: int = 16
) -> Any:
    """For each interleave, the ranks of all positions as a strip, and below it each rank's slots.

    A slot shows the position that it holds; an empty one is pale.

    Args:
        length: Tokens of the request; they fill at most one page on each rank.
        world: Number of ranks, up to four.
        interleaves: Neighbouring positions that stay together: one panel each, up to three.
        page_size: Slots of a page, up to 16; a multiple of each interleave.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: More than can be drawn.
    """
    _require_up_to("world", world, len(_RANKS))
    _require_up_to("page_size", page_size, 16)
    _require_up_to("length", length, world * page_size)
    _require_up_to("len(interleaves)", len(interleaves), 3)
    patches = require("matplotlib.patches")
    width = world * page_size
    with style.styled():
        figure = style.new_figure(len(interleaves) * (0.29 * world + 0.72))
        panels = figure.subplots(len(interleaves), 1, squeeze=False)[:, 0]
        for axes, interleave in zip(panels, interleaves, strict=True):
            owners = owner_of(torch.arange(length), world=world, interleave=interleave).tolist()
            for position in range(width):
                face = _RANKS[owners[position]] if position < length else style.FAINT
                corner = (position / world + 0.02, -1.35)
                axes.add_patch(patches.Rectangle(corner, 1 / world - 0.04, 0.8, fc=face, ec="none"))
            axes.text(-0.25, -0.95, "position", ha="right", va="center", color=style.MUTED)
            axes.text(page_size + 0.25, -0.95, f"0 to {length - 1}", va="center", color=style.MUTED)
            for rank in range(world):
                share = {"rank": rank, "world": world, "interleave": interleave}
                held = int(local_lens(torch.tensor([length]), **share))
                positions = global_positions(torch.arange(page_size), **share).tolist()
                for slot, position in enumerate(positions):
                    face = _RANKS[rank] if slot < held else style.FAINT
                    corner = (slot + 0.03, rank + 0.06)
                    axes.add_patch(patches.Rectangle(corner, 0.94, 0.88, fc=face, ec="none"))
                    if slot < held:
                        axes.text(
                            slot + 0.5, rank + 0.52, str(position), ha="center", va="center",
                            fontsize=8.5, color=_ink_on(face),
                        )  # fmt: skip
                axes.text(-0.25, rank + 0.5, f"rank {rank}", ha="right", va="center")
                count = f"{held} token" if held == 1 else f"{held} tokens"
                axes.text(page_size + 0.25, rank + 0.5, count, va="center")
            axes.set_title(f"interleave {interleave}")
            axes.set(xlim=(-2.0, page_size + 2.4), ylim=(world + 0.05, -1.45))
            axes.axis("off")
    return figure


def rank_staircases(visible_lens: Sequence[int], *, world: int, interleave: int = 1) -> Any:
    """One panel a rank, one line a row of a verifier: the keys of the rank that the row may see.

    A cell shows the position of its key; what a row may not see is pale. Keys at and beyond the
    first row's own are of this step.

    Args:
        visible_lens: Global causal lengths of the rows of one request, each one more than the one
            before it; short enough for eight keys a rank.
        world: Number of ranks, two to four.
        interleave: Neighbouring positions that stay together.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: More than can be drawn, or lengths that are not those of a verifier.
    """
    lens = list(visible_lens)
    if not lens or lens != list(range(lens[0], lens[0] + len(lens))) or lens[0] < 1:
        raise ValueError(f"visible_lens must rise by one from row to row, got {lens}")
    if _require_up_to("world", world, len(_RANKS)) < 2:
        raise ValueError(f"world must be at least 2, got {world}")
    first_new = lens[0] - 1
    shares = [{"rank": r, "world": world, "interleave": interleave} for r in range(world)]
    held = [local_lens(torch.tensor(lens), **share).tolist() for share in shares]
    slots = max(row[-1] for row in held)
    _require_up_to("keys of a rank", slots, 8)
    patches = require("matplotlib.patches")
    with style.styled():
        figure = style.new_figure(0.27 * len(lens) + 0.8)
        panels = figure.subplots(1, world, gridspec_kw={"width_ratios": [1.62, *[1] * (world - 1)]})
        for rank, axes in enumerate(panels):
            positions = global_positions(torch.arange(held[rank][-1]), **shares[rank]).tolist()
            for row, seen in enumerate(held[rank]):
                for slot, position in enumerate(positions):
                    face = _NEW if position >= first_new else _CACHED
                    face = face if slot < seen else style.FAINT
                    corner = (slot + 0.04, row + 0.06)
                    axes.add_patch(patches.Rectangle(corner, 0.92, 0.88, fc=face, ec="none"))
                    axes.text(
                        slot + 0.5, row + 0.52, str(position), ha="center", va="center",
                        fontsize=8, color=style.INK if slot < seen else style.MUTED,
                    )  # fmt: skip
                axes.text(slots + 0.2, row + 0.5, str(seen), va="center", fontweight="bold")
                if rank == 0:
                    axes.text(
                        -0.25, row + 0.5, f"row {row}, sees {lens[row]}", ha="right", va="center"
                    )
            axes.set_title(f"rank {rank}")
            left = -0.62 * (slots + 1.1) if rank == 0 else 0.0
            axes.set(xlim=(left, slots + 1.1), ylim=(len(lens) + 0.05, -0.05))
            if rank == 0:
                axes.set_title("")
                axes.text(0.04, -0.22, "rank 0", fontsize=10.5, va="bottom")
            axes.axis("off")
        handles = [
            patches.Patch(color=_CACHED, label="cached before"),
            patches.Patch(color=_NEW, label="written in this step"),
            patches.Patch(color=style.FAINT, label="later, hidden"),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8.5)
    return figure


def _ink_on(face: str) -> str:
    """Text that can be read on a rank's colour."""
    return style.INK if face == _LIGHT else style.PAPER


def _require_up_to(name: str, value: int, most: int) -> int:
    if require_count(name, value, at_least=1) > most:
        raise ValueError(f"{name} must be at most {most} to be drawn, got {value}")
    return value
