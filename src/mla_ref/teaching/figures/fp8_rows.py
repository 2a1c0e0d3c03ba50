"""Figures of the FP8 row: where its bytes lie, and what its scales do."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_float
from mla_ref.platform import require
from mla_ref.teaching import style

_LATENT, _SCALES, _ROPE = style.SKY, style.VERMILLION, style.GREEN
_COLOURS = (style.BLUE, style.SKY, style.VERMILLION, style.ORANGE)


def byte_maps() -> Any:
    """One token of 656 bytes beside one of 584: scales in the row, and scales behind the page.

    Widths are drawn to scale. The second token of each page is drawn in full colour.

    Returns:
        A matplotlib Figure.
    """
    with style.styled():
        figure = style.new_figure(4.9)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(-64, 668), ylim=(0, 110))
        axes.axis("off")
        _title(axes, 106.0, "Whole rows: 656 bytes a token, its scales among them")
        for token, y in ((0, 86.0), (1, 77.0), (63, 64.0)):
            _row(axes, y, token, (128.0,) * 4, (4.0,) * 4)
        _dots(axes, 73.5)
        _note(axes, 256.0, "latent, 4 × 128 E4M3", 95.5)
        _note(axes, 510.0, "4 scales,\nfp32", 97.5)
        _note(axes, 592.0, "rotary key,\n64 × bf16", 97.5)
        for x, side in ((0, "center"), (512, "right"), (528, "left"), (656, "center")):
            _offset(axes, x, 63.0, side)
        _title(axes, 52.0, "Planes of a page: 576 bytes a token, and the scales of all behind them")
        for token, y in ((0, 32.0), (1, 23.0), (63, 10.0)):
            _row(axes, y, token, (64.0,) * 7, ())
        _dots(axes, 19.5)
        _note(axes, 224.0, "latent, 7 × 64 E4M3", 41.5)
        _note(axes, 512.0, "rotary key,\n64 × bf16", 43.5)
        axes.text(-6, 4.5, "scales", ha="right", va="center", fontsize=8.5)
        for token in range(64):
            _box(axes, 8.0 * token, 1.0, 8.0, _SCALES, bright=token == 1)
        axes.text(520, 4.5, "8 bytes a token:\n7 exponents, 1 spare", va="center", fontsize=8.5)
    return figure


def _offset(axes: Any, x: int, y: float, side: str) -> None:
    axes.text(x, y, f"{x}", ha=side, va="top", fontsize=8, color=style.MUTED)


def _row(
    axes: Any, y: float, token: int, tiles: tuple[float, ...], scales: tuple[float, ...]
) -> None:
    bright, x = token == 1, 0.0
    axes.text(-6, y + 3.5, f"token {token}", ha="right", va="center", fontsize=8.5)
    parts = [(w, _LATENT) for w in tiles] + [(w, _SCALES) for w in scales] + [(128.0, _ROPE)]
    for width, colour in parts:
        _box(axes, x, y, width, colour, bright=bright)
        x += width


def _box(axes: Any, x: float, y: float, width: float, colour: str, *, bright: bool) -> None:
    rectangle = require("matplotlib.patches").Rectangle
    axes.add_patch(
        rectangle(
            (x, y),
            width,
            7,
            facecolor=colour,
            alpha=1.0 if bright else 0.4,
            edgecolor=style.PAPER,
            linewidth=0.7,
        )
    )


def _dots(axes: Any, y: float) -> None:
    axes.text(-6, y, "…", ha="right", va="center", color=style.MUTED)


def _title(axes: Any, y: float, text: str) -> None:
    axes.text(-64, y, text, fontsize=10.5, va="center")


def _note(axes: Any, x: float, text: str, y: float) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, linespacing=1.1)


def scale_errors(
    scales: Float[Tensor, "n groups"], errors: dict[str, Float[Tensor, "n groups"]]
) -> Any:
    """Left, how the groups' scales are spread; right, each tile's error against its mantissa.

    The mantissa of a scale is the scale over the power of two below it, a number in 1 .. 2: what a
    reader loses who keeps only the exponent.

    Args:
        scales: The stored scale of each tile of each row, above 0.
        errors: Name of a reader, and the relative error that it makes of each tile; up to two.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are no scales, one is not above 0, or the errors are not one a tile.
    """
    require_float("scales", scales, "n groups")
    if scales.numel() == 0 or not bool((scales > 0).all()):
        raise ValueError("scales must hold numbers above 0, one a tile, got others or none")
    for name, error in errors.items():
        if require_float(f"errors[{name!r}]", error, "n groups").shape != scales.shape:
            raise ValueError(
                f"errors[{name!r}] must hold one error a tile, {list(scales.shape)}, got "
                f"{list(error.shape)}"
            )
    exponents = scales.double().log2()
    mantissas = torch.exp2(exponents - exponents.floor())
    with style.styled():
        figure = style.new_figure(3.2)
        left, right = figure.subplots(1, 2)
        low, high = int(exponents.min().floor()), int(exponents.max().floor()) + 1
        bins = torch.arange(4 * low, 4 * high + 1) / 4
        for group in range(scales.shape[1]):
            colour = _COLOURS[group % 4]
            left.hist(
                exponents[:, group], bins=bins.tolist(), histtype="stepfilled", alpha=0.35,
                color=colour,
            )  # fmt: skip
            left.hist(
                exponents[:, group], bins=bins.tolist(), histtype="step", color=colour,
                linewidth=1.5, linestyle=("-", "--")[group % 2], label=f"group {group}",
            )  # fmt: skip
        left.set(title="Stored scales", xlabel="log2 of the scale", ylabel="tokens")
        left.legend(loc="upper left", fontsize=8.5)
        left.set_ylim(0, left.get_ylim()[1] * 1.45)
        for (name, error), colour, marker in zip(
            errors.items(), (style.BLUE, style.VERMILLION), ("o", "x"), strict=False
        ):
            right.plot(
                mantissas.flatten(), error.flatten(), marker, color=colour, markersize=3, label=name
            )
        right.set(
            title="Relative error of a tile", xlabel="mantissa of its scale", xlim=(1, 2),
            ylim=(0, None),
        )  # fmt: skip
        right.grid(axis="y", color=style.FAINT)
        right.set_axisbelow(True)
        right.legend(loc="upper left", fontsize=8.5)
    return figure
