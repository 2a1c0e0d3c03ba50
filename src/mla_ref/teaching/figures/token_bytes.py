"""The figure of what a token costs in the cache, and of what the bytes are for."""

from typing import Any

from mla_ref.checks import require_count
from mla_ref.teaching import style

_COLOURS = (style.BLUE, style.SKY, style.ORANGE, style.GREEN, style.VERMILLION)
_HATCHES = ("", "//", "", "..", "xx")
_SMALL = 1 / 20  # of the largest form; what is smaller is drawn again, magnified


def token_bytes(forms: dict[str, dict[str, int]]) -> Any:
    """Bytes a token, form by form; below, the small ones again, magnified and in their parts.

    Args:
        forms: For each form, in order, the bytes of each of its parts by name.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no form, a form has no bytes, or there are more than five part names.
    """
    if not forms:
        raise ValueError("forms must hold one form at least, got none")
    for name, parts in forms.items():
        for part, count in parts.items():
            require_count(f"forms[{name!r}][{part!r}]", count)
        if sum(parts.values()) == 0:
            raise ValueError(f"forms[{name!r}] must have a byte at least, got {parts}")
    names = list(dict.fromkeys(part for parts in forms.values() for part in parts))
    if len(names) > len(_COLOURS):
        raise ValueError(f"forms must have {len(_COLOURS)} part names at most, got {names}")
    largest = max(sum(parts.values()) for parts in forms.values())
    small = {n: parts for n, parts in forms.items() if sum(parts.values()) <= largest * _SMALL}
    rows = [len(forms)] + ([len(small)] if 0 < len(small) < len(forms) else [])
    with style.styled():
        figure = style.new_figure(0.9 * len(rows) + 0.34 * sum(rows))
        panels = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
        _bars(panels[0], forms, names)
        panels[0].set_title("Bytes a token and layer")
        shown = panels[0]
        if len(rows) == 2:
            _bars(panels[1], small, names)
            factor = largest / max(sum(parts.values()) for parts in small.values())
            panels[1].set_title(f"The small ones, magnified {factor:.0f} times")
            shown = panels[1]
        for part, colour, hatch in zip(names, _COLOURS, _HATCHES, strict=False):
            shown.barh([0], [0], color=colour, hatch=hatch, edgecolor=style.PAPER, label=part)
        figure.legend(
            *shown.get_legend_handles_labels(),
            loc="outside lower left",
            ncols=len(names),
            handlelength=1.4,
            columnspacing=1.4,
            fontsize=8.5,
        )
    return figure


def _bars(axes: Any, forms: dict[str, dict[str, int]], names: list[str]) -> None:
    largest = max(sum(parts.values()) for parts in forms.values())
    for row, parts in enumerate(forms.values()):
        left = 0
        for part, colour, hatch in zip(names, _COLOURS, _HATCHES, strict=False):
            count = parts.get(part, 0)
            axes.barh(
                row,
                count,
                height=0.68,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor=style.PAPER,
                linewidth=0,
            )
            left += count
        axes.text(left + largest * 0.01, row, f"{left:,}", va="center", ha="left")
    axes.set_yticks(range(len(forms)), list(forms))
    axes.set(xlim=(0, largest * 1.12), ylim=(len(forms) - 0.4, -0.6), xticks=[])
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
