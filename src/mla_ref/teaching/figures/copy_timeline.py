"""The figure of a warp and its ring: copies on their way, waiting, computing."""

from collections.abc import Sequence
from typing import Any

from mla_ref.platform import require
from mla_ref.teaching import style
from mla_ref.teaching.warp_memory import timeline


def copy_timeline(
    tiles: int = 6, places: Sequence[int] = (1, 2, 3), *, copy: float = 3.0, compute: float = 1.0
) -> Any:
    """What a warp and its copies do, a panel for each size of the ring and one scale for all.

    The model of `warp_memory.timeline`: a copy takes as long however many are on their way.

    Args:
        tiles: Tiles of the warp, up to 12.
        places: Places of the ring for each panel, up to four panels.
        copy: How long a copy takes from its start until it has landed.
        compute: How long a tile takes.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: A number is out of range.
    """
    if not 1 <= len(places) <= 4:
        raise ValueError(f"places must be one to four numbers, got {list(places)}")
    runs = {count: timeline(tiles, count, copy, compute) for count in places}
    if tiles > 12:
        raise ValueError(f"tiles must be at most 12, got {tiles}")
    patches = require("matplotlib.patches")
    end = max(times[-1].done for times in runs.values())
    lines = sum(count + 1 for count in runs) + 1.3 * len(runs)
    with style.styled():
        figure = style.new_figure(0.24 * lines + 0.75)
        axes = figure.add_subplot()
        y = 0.0
        for count, times in runs.items():
            busy = tiles * compute / times[-1].done
            axes.text(
                0, y + 0.75,
                f"{count} place{'s' if count > 1 else ''}: done at {times[-1].done:g}, "
                f"the warp computes {100 * busy:.0f}% of the time",
                va="bottom", fontsize=9.5,
            )  # fmt: skip
            y += 1.0
            for place in range(count):
                axes.text(
                    -end * 0.012, y + 0.5, f"place {place}", ha="right", va="center",
                    fontsize=8.5, color=style.MUTED,
                )  # fmt: skip
                for i in range(place, tiles, count):
                    span = (times[i].started, times[i].landed)
                    text = f"copy {i}" if copy > 0.07 * end else str(i) if copy > 0.03 * end else ""
                    _bar(axes, patches, span, y, style.SKY, style.INK, text)
                y += 1
            axes.text(
                -end * 0.012, y + 0.5, "the warp", ha="right", va="center", fontsize=8.5
            )  # fmt: skip
            before = 0.0
            for i, time in enumerate(times):
                if time.begun > before:
                    text = "wait" if time.begun - before > 0.04 * end else ""
                    _bar(axes, patches, (before, time.begun), y, style.FAINT, style.MUTED, text)
                text = str(i) if compute > 0.02 * end else ""
                _bar(axes, patches, (time.begun, time.done), y, style.BLUE, style.PAPER, text)
                before = time.done
            y += 1.3
        axes.set(xlim=(-end * 0.11, end * 1.01), ylim=(y - 0.2, -0.1))
        axes.axis("off")
        handles = [
            patches.Patch(color=style.SKY, label="a copy is on its way"),
            patches.Patch(color=style.FAINT, label="the warp waits"),
            patches.Patch(color=style.BLUE, label="the warp computes a tile"),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8.5)
    return figure


def _bar(
    axes: Any, patches: Any, span: tuple[float, float], y: float, colour: str, ink: str, text: str
) -> None:
    """A bar from the first time to the second, with a word in it."""
    start, end = span
    axes.add_patch(
        patches.Rectangle((start, y + 0.06), end - start, 0.88, facecolor=colour,
                          edgecolor=style.PAPER, lw=0.8)
    )  # fmt: skip
    axes.text(
        (start + end) / 2, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink
    )  # fmt: skip
