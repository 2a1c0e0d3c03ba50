"""The figure of MLA's data flow: what a token leaves in the cache, and what is made from it."""

from typing import Any

from mla_ref.checks import describe
from mla_ref.layers import MLAConfig
from mla_ref.platform import require
from mla_ref.teaching import style

_NEW, _CACHED, _AGAIN = style.SKY, style.ORANGE, style.VERMILLION
_HEIGHT = 8.0  # of a box, in units of the page


def mla_flow(config: MLAConfig) -> Any:
    """Expanded MLA from the hidden state to the output, with the numbers of a token at each place.

    Blue is computed once, when a token is new; yellow is what the cache keeps of it; red is made
    again from the cache for every token of the context in every step.

    Args:
        config: The dimensions.

    Returns:
        A matplotlib Figure.

    Raises:
        TypeError: `config` is not an MLAConfig.
    """
    if not isinstance(config, MLAConfig):
        raise TypeError(f"config must be an MLAConfig, got {describe(config)}")
    heads, d_c, d_r = config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
    d_n, d_v = config.qk_nope_head_dim, config.v_head_dim
    query_by = (
        "q" if config.q_lora_rank is None else f"q_a, norm, q_b\n(through {config.q_lora_rank:,})"
    )
    with style.styled():
        figure = style.new_figure(4.3)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        _box(axes, 1.0, 29.0, 12.0, f"hidden\n{config.hidden_size:,}", _NEW)
        _box(axes, 33.0, 47.0, 16.0, f"q_nope\n{heads} × {d_n}", _NEW)
        _box(axes, 33.0, 37.0, 16.0, f"q_pe, turned\n{heads} × {d_r}", _NEW)
        _box(axes, 33.0, 21.0, 16.0, f"latent\n{d_c}", _CACHED)
        _box(axes, 33.0, 9.0, 16.0, f"k_pe, turned\n{d_r}", _CACHED)
        _box(axes, 62.0, 27.0, 16.0, f"k_nope\n{heads} × {d_n}", _AGAIN)
        _box(axes, 62.0, 17.0, 16.0, f"v\n{heads} × {d_v}", _AGAIN)
        _box(axes, 62.0, 7.0, 16.0, f"k_pe\n{heads} copies", _AGAIN)
        _box(axes, 87.0, 25.0, 12.0, f"attention\n{heads} heads", _NEW)
        _box(axes, 87.0, 40.0, 12.0, f"output\n{config.hidden_size:,}", _NEW)
        _frame(axes, 31.5, 6.0, 19.0, 25.5, f"the cached row: {config.kv_row_dim} numbers")
        _arrow(axes, (13.0, 35.0), (33.0, 46.0), query_by, (21.0, 46.5))
        _arrow(axes, (13.0, 32.0), (31.5, 25.0), "kv_a, norm", (24.5, 31.0))
        _arrow(axes, (13.0, 30.0), (31.5, 13.0), "kv_a", (20.5, 18.5))
        _arrow(axes, (49.0, 25.7), (62.0, 31.0), "W_UK", (56.0, 31.2))
        _arrow(axes, (49.0, 24.2), (62.0, 21.0), "W_UV", (56.5, 19.6))
        _arrow(axes, (49.0, 13.0), (62.0, 11.0), "", (0.0, 0.0))
        _arrow(axes, (49.0, 51.0), (93.0, 33.0), "", (0.0, 0.0))
        _arrow(axes, (49.0, 43.5), (90.0, 33.0), "", (0.0, 0.0))
        _arrow(axes, (78.0, 31.0), (87.0, 30.5), "", (0.0, 0.0))
        _arrow(axes, (78.0, 21.0), (87.0, 27.5), "", (0.0, 0.0))
        _arrow(axes, (78.0, 11.0), (89.0, 24.8), "", (0.0, 0.0))
        _arrow(axes, (96.0, 33.0), (96.0, 40.0), "o", (98.0, 36.5))
        for x, colour, text in (
            (1.0, _NEW, "once, for the new token"),
            (33.0, _CACHED, "kept"),
            (47.0, _AGAIN, "again, for every cached token in every step"),
        ):
            axes.plot(x + 0.8, 1.5, "s", color=colour, markersize=9)
            axes.text(x + 2.6, 1.5, text, va="center", color=style.MUTED)
        axes.set(xlim=(0, 100), ylim=(-1, 58.5))
        axes.axis("off")
    return figure


def _box(axes: Any, x: float, y: float, width: float, text: str, colour: str) -> None:
    patches = require("matplotlib.patches")
    axes.add_patch(
        patches.FancyBboxPatch(
            (x + 0.5, y + 0.5),
            width - 1,
            _HEIGHT - 1,
            boxstyle="round,pad=0.5",
            facecolor=colour,
            edgecolor="none",
        )
    )
    ink = style.PAPER if colour == _AGAIN else style.INK
    axes.text(
        x + width / 2, y + _HEIGHT / 2, text, ha="center", va="center", color=ink, linespacing=1.25
    )


def _frame(axes: Any, x: float, y: float, width: float, height: float, text: str) -> None:
    patches = require("matplotlib.patches")
    axes.add_patch(
        patches.Rectangle(
            (x, y),
            width,
            height,
            facecolor="none",
            edgecolor=_CACHED,
            linestyle="--",
            linewidth=1.5,
        )
    )
    axes.text(
        x + width / 2, y + height + 1, text, ha="center", va="bottom", weight="bold", fontsize=9
    )


def _arrow(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str,
    at: tuple[float, float],
) -> None:
    arrow = {
        "arrowstyle": "-|>",
        "color": style.MUTED,
        "linewidth": 1.2,
        "shrinkA": 2,
        "shrinkB": 2,
    }
    axes.annotate("", end, start, arrowprops=arrow)
    if label:
        axes.text(*at, label, ha="center", va="center", fontsize=8.5, color=style.MUTED)
