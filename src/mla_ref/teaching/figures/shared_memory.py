"""The figure of a block's shared memory: what it is used for, against what a GPU has."""

from typing import Any

from mla_ref.checks import require_count
from mla_ref.teaching import style

SM120_LIMIT = 101_376  # bytes that one block may ask for
_LOOKS = ((style.BLUE, ""), (style.ORANGE, "//"), (style.SKY, ".."), (style.GREEN, "xx"))


def shared_memory_budget(
    kernels: dict[str, dict[str, int]], limit: int = SM120_LIMIT, *, limit_name: str = "SM120"
) -> Any:
    """Bytes of a block by use, a bar a kernel, and the line that none may cross.

    Bars that cross it are named "too large" as well, so that colour is not all that says it.

    Args:
        kernels: For each kernel, in order, the bytes of each use by name.
        limit: Bytes that one block may ask for.
        limit_name: Whose limit it is.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no kernel, a count is negative, or there are more than four uses.
    """
    if not kernels:
        raise ValueError("kernels must hold one kernel at least, got none")
    require_count("limit", limit, at_least=1)
    for name, uses in kernels.items():
        for use, count in uses.items():
            require_count(f"kernels[{name!r}][{use!r}]", count)
    names = list(dict.fromkeys(use for uses in kernels.values() for use in uses))
    if len(names) > len(_LOOKS):
        raise ValueError(f"kernels must have {len(_LOOKS)} uses at most, got {names}")
    widest = max(limit, *(sum(uses.values()) for uses in kernels.values()))
    with style.styled():
        figure = style.new_figure(1.15 + 0.34 * len(kernels))
        axes = figure.add_subplot()
        for use, (colour, hatch) in zip(names, _LOOKS, strict=False):
            _bars(axes, use, kernels, names, colour, hatch)
        for row, uses in enumerate(kernels.values()):
            total = sum(uses.values())
            over = total > limit
            axes.text(
                total + widest * 0.008,
                row,
                f"{total:,}" + (", too large" if over else ""),
                va="center",
                color=style.VERMILLION if over else style.INK,
                fontsize=8.5,
                bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.8},
                zorder=4,
            )
        axes.axvline(limit, color=style.VERMILLION, linewidth=1.6, zorder=3)
        axes.text(
            limit,
            -0.62,
            f"{limit_name}: {limit:,} bytes",
            ha="right" if limit > widest / 2 else "left",
            va="bottom",
            color=style.VERMILLION,
            fontsize=9,
        )
        axes.set_yticks(range(len(kernels)), list(kernels), fontsize=8.5)
        axes.set(xlim=(0, widest * 1.16), ylim=(len(kernels) - 0.4, -0.6), xticks=[])
        axes.set_title("Shared memory of one block", pad=18)
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        figure.legend(
            loc="outside lower left",
            ncols=len(names),
            handlelength=1.4,
            columnspacing=1.4,
            fontsize=8.5,
        )
    return figure


def _bars(
    axes: Any,
    use: str,
    kernels: dict[str, dict[str, int]],
    names: list[str],
    colour: str,
    hatch: str,
) -> None:
    """One use in all kernels, to the right of the uses before it."""
    before = names[: names.index(use)]
    axes.barh(
        range(len(kernels)),
        [uses.get(use, 0) for uses in kernels.values()],
        left=[sum(uses.get(name, 0) for name in before) for uses in kernels.values()],
        height=0.66,
        color=colour,
        hatch=hatch,
        edgecolor=style.PAPER,
        linewidth=0,
        label=use,
    )
