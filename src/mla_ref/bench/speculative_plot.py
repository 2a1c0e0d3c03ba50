"""The figure of plain against speculative decoding: what one token costs, and where."""

from collections.abc import Sequence
from pathlib import Path

from mla_ref.bench.speculative_run import PLAIN
from mla_ref.bench.speculative_summary import Gain, WayTotal
from mla_ref.engine import PARTS
from mla_ref.platform import require

# Of Okabe and Ito (2008), which stay apart in all common kinds of colour blindness; and hatches.
_LOOK = {
    "schedule": ("#000000", ""),
    "forward": ("#56b4e9", ""),
    "logits": ("#0072b2", "//"),
    "sampling": ("#d55e00", ""),
    "drafting": ("#e69f00", ".."),
}
# Narrower than this share of the longest bar, a part has no room for its number.
_ROOM = 0.1


def plot_speculative(gains: Sequence[Gain], path: str | Path, *, title: str = "") -> None:
    """Draw a bar a way: milliseconds that a decoded token costs, stacked by part.

    Args:
        gains: One a drafter, of the same prompts.
        path: Where to save the figure; its ending (png, svg, pdf) names the format.
        title: What was measured where: times without their machine mean little.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no gain, or matplotlib does not know the ending.
    """
    if not gains:
        raise ValueError("gains must hold a drafter at least, got none")
    bars: list[tuple[str, WayTotal]] = [(PLAIN, gains[0].plain)]
    bars += [(gain.drafter, gain.speculative) for gain in gains]
    # A Figure of its own: pyplot would keep it open and choose a window system.
    size = (7.2, 1.9 + 0.6 * len(bars))
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    sums = [1e3 * sum(map(total.per_token, PARTS)) for _, total in bars]
    longest = max(sums)
    for place, ((_, total), whole) in enumerate(zip(bars, sums, strict=True)):
        left = 0.0
        for part in PARTS:
            width = 1e3 * total.per_token(part)
            colour, hatch = _LOOK[part]
            axes.barh(
                place,
                width,
                left=left,
                height=0.62,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.8,
                label=part if place == 0 else None,
            )
            if width > _ROOM * longest:
                axes.text(
                    left + width / 2,
                    place,
                    f"{width:.3g}",
                    ha="center",
                    va="center",
                    fontsize="small",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
                )
            left += width
        tokens = total.decode_tokens / max(total.decode_steps, 1)
        axes.text(
            left + 0.01 * longest,
            place,
            f"{whole:.3g} ms, {tokens:.2f} tokens a step",
            va="center",
            fontsize="small",
        )
    axes.set(xlim=(0, 1.4 * longest), xlabel="ms for one token, prompt excluded")
    axes.set_title("What one token costs, by part of the step", loc="left")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.spines[["right", "top"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="small", wrap=True)
    figure.savefig(path)
