"""The figure of a validation: rows by position, errors by layer, and the controls."""

from math import floor, inf, log10
from pathlib import Path
from typing import Any

from mla_ref.platform import require
from mla_ref.validation.configuration import Finding
from mla_ref.validation.verdict import FACTOR, SENSITIVITY

# Of Okabe and Ito (2008), which stay apart in all common kinds of colour blindness; and shapes.
_PAIRS = {
    "extend || decode": ("#0072b2", "o", "extend || decode"),
    "decode || null": ("#009e73", "s", "null control: other splits"),
    "decode || positive": ("#d55e00", "^", "positive control: earlier drafts hidden"),
}
_LAYERS = {
    ("decode", "extend"): ("#0072b2", "o"),
    ("decode", "token-wise"): ("#e69f00", "D"),
    ("extend", "token-wise"): ("#56b4e9", "v"),
}
_INK, _MUTED, _FAINT = "#1b1f24", "#5f6873", "#dfe3e8"


def plot_validation(finding: Finding, path: str | Path, *, title: str = "") -> None:
    """Draw three panels: KL of each row by position, error of each layer, the controls' means.

    Args:
        finding: One configuration.
        path: Where to save the figure; its ending (png, svg, pdf) names the format.
        title: What was compared, for the top.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the ending.
    """
    # A Figure of its own: pyplot would keep it open and choose a window system.
    figure = require("matplotlib.figure").Figure(figsize=(11, 4.4), layout="constrained")
    rows, layers, controls = figure.subplots(1, 3, width_ratios=(4, 3.4, 3.4))
    _draw_rows(rows, finding)
    _draw_layers(layers, finding)
    _draw_controls(controls, finding)
    for axes in (rows, layers, controls):
        axes.spines[["right", "top"]].set_visible(False)
        axes.title.set_fontsize("medium")
    figure.suptitle(title, fontsize="small", wrap=True, color=_MUTED)
    figure.savefig(path)


def _least(finding: Finding) -> float:
    """Where a KL of 0 is drawn on an axis of logarithms: a decade below all others."""
    kls = [row.kl for name in _PAIRS for row in finding.replay.pairs[name].rows if row.finite]
    return min((kl for kl in kls if kl > 0), default=1e-15) / 10


def _draw_rows(axes: Any, finding: Finding) -> None:
    """A dot a row; a large mark for the mean of a position."""
    least, count, zero = _least(finding), 0, False
    for place, (name, (colour, marker, label)) in enumerate(_PAIRS.items()):
        pair = finding.replay.pairs[name]
        rows = [row for row in pair.rows if row.finite]
        shift = 0.24 * (place - 1)
        axes.plot(
            [row.position + shift for row in rows],
            [max(row.kl, least) for row in rows],
            marker,
            color=colour,
            markersize=4,
            alpha=0.4,
            markeredgewidth=0,
        )
        means = [summary.mean for summary in pair.kl_by_position]
        axes.plot(
            [position + shift for position in range(len(means))],
            [max(mean, least) for mean in means],
            marker,
            color=colour,
            markersize=9,
            markeredgecolor="white",
            label=label,
        )
        zero |= any(row.kl == 0 for row in rows)
        count = max(count, len(means))
    axes.set_yscale("log")
    if zero:
        axes.axhline(least, color=_MUTED, linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(
            "0",
            (1, least),
            (-8, 3),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            fontsize="small",
            color=_MUTED,
        )
    axes.set_xticks(range(count), ["accepted", *(f"draft {i}" for i in range(1, count))])
    axes.set_ylabel("KL of the logits, nats")
    axes.set_title("Each row, by position; large: the mean", loc="left")
    axes.legend(
        frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1
    )


def _draw_layers(axes: Any, finding: Finding) -> None:
    """A dot a layer and shard."""
    found = {pair: finding.replay.layers.of(*pair) for pair in _LAYERS}
    most = max((error.rel_l2 for errors in found.values() for error in errors), default=0.0)
    power = floor(log10(most)) if 0 < most < inf else 0
    for (a, b), (colour, marker) in _LAYERS.items():
        axes.plot(
            [error.layer for error in found[a, b]],
            [error.rel_l2 / 10.0**power for error in found[a, b]],
            marker,
            color=colour,
            markersize=4.5,
            alpha=0.8,
            markeredgewidth=0,
            label=f"{a}, {b}",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel(f"relative L2 of the output, in $10^{{{power}}}$")
    axes.set_title("Each layer, same input to all", loc="left")
    axes.legend(
        frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=1
    )


def _draw_controls(axes: Any, finding: Finding) -> None:
    """The means on one axis, with what is taken for noise and what a control must pass."""
    least, yardstick = _least(finding), finding.verdict.yardstick
    means = [finding.replay.pairs[name].kl.mean for name in _PAIRS]
    for place, (mean, (colour, marker, label)) in enumerate(
        zip(means, _PAIRS.values(), strict=True)
    ):
        axes.plot(max(mean, least), place, marker, color=colour, markersize=10, zorder=3)
        axes.annotate(
            f"{label.partition(':')[0]}\n{mean:.1e}",
            (max(mean, least), place),
            (0, 10),
            textcoords="offset points",
            ha="center",
            fontsize="small",
            color=_INK,
        )
    axes.set_xscale("log")
    low, high = max(min(means), least), max(max(means), least)
    if yardstick > 0:
        axes.axvspan(yardstick / FACTOR, FACTOR * yardstick, color=_FAINT, zorder=0)
        axes.axvline(SENSITIVITY * yardstick, color=_MUTED, linestyle="--", zorder=0)
        low, high = min(low, yardstick / FACTOR), max(high, SENSITIVITY * yardstick)
        for x, words in (
            (yardstick, f"noise, up to\n{FACTOR:.0f} times"),
            (SENSITIVITY * yardstick, f"must be\nbeyond: {SENSITIVITY:.0f}"),
        ):
            axes.annotate(
                words,
                (x, -0.45),
                (3 if x > yardstick else 0, 0),
                textcoords="offset points",
                ha="left" if x > yardstick else "center",
                va="center",
                fontsize="small",
                color=_MUTED,
            )
    axes.set(xlim=(low / 30, high * 300), ylim=(-0.8, len(means) - 0.4), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("mean KL, nats")
    axes.set_title("What it is weighed by", loc="left")
