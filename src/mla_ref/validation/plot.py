"""The figure of a validation: rows by position, errors by layer, and the controls.

It is drawn from the plain data of a report (`Finding.to_json`), so a file that was written months
ago gives the figure that it gave then.
"""

from collections.abc import Mapping
from math import floor, log10, nan
from pathlib import Path
from typing import Any

from mla_ref.platform import require

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


def plot_validation(finding: Mapping[str, Any], path: str | Path) -> None:
    """Save the figure, with the headline above it.

    Args:
        finding: One configuration, as `Finding.to_json` gives it.
        path: Where to; its ending (png, svg, pdf) names the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the ending.
    """
    figure = draw_validation(finding)
    figure.suptitle(finding["headline"], fontsize="small", wrap=True, color=_MUTED)
    figure.savefig(path)


def draw_validation(finding: Mapping[str, Any], *, narrow: bool = False) -> Any:
    """Draw three panels: KL of each row by position, error of each layer, the controls' means.

    Args:
        finding: One configuration, as `Finding.to_json` gives it.
        narrow: For the column of a page: the rows above, the other two below.

    Returns:
        A matplotlib figure without a title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # A Figure of its own: pyplot would keep it open and choose a window system.
    size = (7.2, 7.4) if narrow else (11, 4.4)
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    if narrow:
        panels = figure.subplot_mosaic([["rows", "rows"], ["layers", "controls"]])
        rows, layers, controls = (panels[name] for name in ("rows", "layers", "controls"))
    else:
        rows, layers, controls = figure.subplots(1, 3, width_ratios=(4, 3.4, 3.4))
    _draw_rows(rows, finding)
    _draw_layers(layers, finding)
    _draw_controls(controls, finding)
    for axes in (rows, layers, controls):
        axes.spines[["right", "top"]].set_visible(False)
        axes.title.set_fontsize("medium")
    return figure


def _pair(finding: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(
        pair for pair in finding["pairs"] if name == f"{pair['reference']} || {pair['tested']}"
    )


def _least(finding: Mapping[str, Any]) -> float:
    """Where a KL of 0 is drawn on an axis of logarithms: a decade below all others."""
    kls = [kl for name in _PAIRS for kl in _pair(finding, name)["kl_of_rows"] if kl]
    return min(kls, default=1e-15) / 10


def _draw_rows(axes: Any, finding: Mapping[str, Any]) -> None:
    """A dot a row; a large mark for the mean of a position."""
    least, count, zero = _least(finding), 0, False
    for place, (name, (colour, marker, label)) in enumerate(_PAIRS.items()):
        pair = _pair(finding, name)
        # A row that is not finite has no KL to draw; the verdict speaks of it.
        rows = [
            (position, kl)
            for (_, _, position), kl in zip(finding["places"], pair["kl_of_rows"], strict=True)
            if kl is not None
        ]
        shift = 0.24 * (place - 1)
        axes.plot(
            [position + shift for position, _ in rows],
            [max(kl, least) for _, kl in rows],
            marker,
            color=colour,
            markersize=4,
            alpha=0.4,
            markeredgewidth=0,
        )
        means = [_number(summary["mean"]) for summary in pair["kl_by_position"]]
        axes.plot(
            [position + shift for position in range(len(means))],
            [max(mean, least) for mean in means],
            marker,
            color=colour,
            markersize=9,
            markeredgecolor="white",
            label=label,
        )
        zero |= any(kl == 0 for _, kl in rows)
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


def _draw_layers(axes: Any, finding: Mapping[str, Any]) -> None:
    """A dot a layer and shard."""
    shards = finding["configuration"]["shards"]
    found = {
        tuple(entry["pair"]): [_number(error) for error in entry["rel_l2_of_layers"]]
        for entry in finding["layers"]
    }
    most = max((e for errors in found.values() for e in errors if e == e), default=0.0)
    power = floor(log10(most)) if most > 0 else 0
    for (a, b), (colour, marker) in _LAYERS.items():
        axes.plot(
            [i // shards for i in range(len(found[a, b]))],
            [error / 10.0**power for error in found[a, b]],
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


def _draw_controls(axes: Any, finding: Mapping[str, Any]) -> None:
    """The means on one axis, with what is taken for noise and what a control must pass."""
    verdict, least = finding["verdict"], _least(finding)
    factor, sensitivity = verdict["factor"], verdict["sensitivity"]
    yardstick = _number(verdict["yardstick"])
    means = [_number(_pair(finding, name)["kl"]["mean"]) for name in _PAIRS]
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
        axes.axvspan(yardstick / factor, factor * yardstick, color=_FAINT, zorder=0)
        axes.axvline(sensitivity * yardstick, color=_MUTED, linestyle="--", zorder=0)
        low, high = min(low, yardstick / factor), max(high, sensitivity * yardstick)
        for x, words in (
            (yardstick, f"noise, up to\n{factor:.0f} times"),
            (sensitivity * yardstick, f"must be\nbeyond: {sensitivity:.0f}"),
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


def _number(value: float | None) -> float:
    """A number of a report, which has no NaN."""
    return nan if value is None else value
