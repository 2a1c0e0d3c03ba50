"""Figures of who sees whom."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mla_ref.attention.masking import causal_lens, visible_mask
from mla_ref.checks import require_count, require_tensor
from mla_ref.platform import require
from mla_ref.teaching import style

_GAP = 3.4  # cells between the whole sequence and the two calls


def mask_alignment(s_q: int = 2, s_kv: int = 5) -> Any:
    """The two ways to put s_q rows into the causal square of s_kv tokens.

    On the left the whole sequence in one call. On the right a call with the newest s_q rows only:
    aligned at the bottom right it is the square's last rows, aligned at the top left its first.

    Args:
        s_q: Query rows of the call, 1 .. s_kv.
        s_kv: Keys.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: s_q is larger than s_kv, or a size is below 1.
    """
    require_count("s_q", s_q, at_least=1)
    require_count("s_kv", s_kv, at_least=s_q)
    square = visible_mask(causal_lens(s_kv, s_kv), 0, s_kv)
    first, last = square[:s_q], square[s_kv - s_q :]
    right, wrong = style.BLUE, style.VERMILLION
    x_calls, y_last = s_kv + _GAP, float(s_kv - s_q)
    # The two calls must not touch if s_q is more than half of the square.
    y_first = min(0.0, y_last - s_q - 1.0)
    # Cells of one size, and room for a title over a narrow call.
    x_end, y_end = x_calls + max(s_kv, 7.6), s_kv + 1.2
    cell = style.WIDTH / (x_end + 1.7)
    with style.styled():
        figure = style.new_figure(cell * (y_end - y_first + 0.9))
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        _band(axes, s_kv, x_calls, 0.0, y_first, s_q, wrong)
        _band(axes, s_kv, x_calls, y_last, y_last, s_q, right)
        _draw(axes, square, 0.0, 0.0)
        _draw(axes, last, x_calls, y_last, colour=right)
        _draw(axes, first, x_calls, y_first, colour=wrong, expected=last)
        new_rows = [f"row {i}" for i in range(s_q)]
        _name_rows(axes, 0.0, 0.0, [f"token {i}" for i in range(s_kv)])
        _name_rows(axes, x_calls, y_last, new_rows)
        _name_rows(axes, x_calls, y_first, new_rows)
        _name_keys(axes, 0.0, s_kv)
        _name_keys(axes, x_calls, s_kv)
        for x, y, colour, title in (
            (0, 0, style.INK, f"All {s_kv} tokens in one call"),
            (x_calls, y_first, wrong, "Top left (wrong): row 0 is token 0"),
            (x_calls, y_last, right, f"Bottom right: row {s_q - 1} is token {s_kv - 1}"),
        ):
            axes.text(x, y - 0.25, title, va="bottom", weight="bold", color=colour)
        axes.set(xlim=(-1.7, x_end), ylim=(y_end, y_first - 0.9))
        axes.axis("off")
    return figure


def masks(
    named: dict[str, Bool[Tensor, "s_q s_kv"]],
    *,
    expected: Bool[Tensor, "s_q s_kv"] | None = None,
) -> Any:
    """Masks side by side, one panel each: filled where the row may see the key.

    Args:
        named: Title and mask of each panel.
        expected: If given, every cell that differs from it is crossed.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no mask, or one has not two dimensions of size 1 at least.
    """
    if not named:
        raise ValueError("named must hold one mask at least, got none")
    for name, mask in named.items():
        require_tensor(f"named[{name!r}]", mask, "s_q s_kv")
        if mask.numel() == 0:
            raise ValueError(f"named[{name!r}] must have a row and a key, got {list(mask.shape)}")
    rows, keys = (max(m.shape[dim] for m in named.values()) for dim in (0, 1))
    cell = min(0.45, (style.WIDTH / len(named) - 0.8) / keys)
    with style.styled():
        figure = style.new_figure(cell * rows + 1.0)
        for axes, (name, mask) in zip(
            figure.subplots(1, len(named), squeeze=False)[0], named.items(), strict=True
        ):
            _draw(axes, mask, 0.0, 0.0, expected=expected)
            axes.set(
                title=name,
                xlabel="key",
                ylabel="query row",
                aspect="equal",
                xlim=(-0.05, mask.shape[1] + 0.05),
                ylim=(mask.shape[0] + 0.05, -0.05),
            )
            for axis, count in ((axes.xaxis, mask.shape[1]), (axes.yaxis, mask.shape[0])):
                step = max(1, count // 8)
                axis.set_ticks(
                    [i + 0.5 for i in range(0, count, step)],
                    [str(i) for i in range(0, count, step)],
                )
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
    return figure


def _draw(
    axes: Any,
    mask: Bool[Tensor, "s_q s_kv"],
    left: float,
    top: float,
    *,
    colour: str = style.SKY,
    expected: Bool[Tensor, "s_q s_kv"] | None = None,
) -> None:
    """One mask as cells of size 1; a cross where it differs from what is expected."""
    patches = require("matplotlib.patches")
    wrong = torch.zeros_like(mask) if expected is None else mask != expected
    for row in range(mask.shape[0]):
        for key in range(mask.shape[1]):
            seen = bool(mask[row, key])
            axes.add_patch(
                patches.Rectangle(
                    (left + key + 0.05, top + row + 0.05),
                    0.9,
                    0.9,
                    facecolor=colour if seen else style.FAINT,
                    edgecolor="none",
                )
            )
            if wrong[row, key]:
                axes.text(
                    left + key + 0.5,
                    top + row + 0.5,
                    "×",
                    ha="center",
                    va="center",
                    fontsize=13,
                    color=style.PAPER if seen else style.VERMILLION,
                )


def _band(
    axes: Any, s_kv: int, x_calls: float, square_row: float, call_row: float, s_q: int, colour: str
) -> None:
    """A pale ribbon from rows of the square to the call they end up in."""
    axes.fill(
        [s_kv, x_calls - 1.25, x_calls - 1.25, s_kv],
        [square_row, call_row, call_row + s_q, square_row + s_q],
        color=colour,
        alpha=0.13,
        linewidth=0,
    )


def _name_rows(axes: Any, left: float, top: float, names: list[str]) -> None:
    for row, name in enumerate(names):
        axes.text(left - 0.15, top + row + 0.5, name, ha="right", va="center", color=style.MUTED)


def _name_keys(axes: Any, left: float, s_kv: int) -> None:
    for key in range(s_kv):
        axes.text(left + key + 0.5, s_kv + 0.1, f"{key}", ha="center", va="top", color=style.MUTED)
    axes.text(left + s_kv / 2, s_kv + 0.55, "key", ha="center", va="top", color=style.MUTED)
