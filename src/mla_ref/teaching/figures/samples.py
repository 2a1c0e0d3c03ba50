"""The figure of repeated times: every sample, their median, and what the mean makes of them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mla_ref.bench.timing import in_words
from mla_ref.checks import require_scale
from mla_ref.teaching import style


def timed_samples(runs: Mapping[str, Sequence[float]]) -> Any:
    """Each sample of each run as a mark on a logarithmic line, in the order of the runs.

    Args:
        runs: Seconds by what was timed, up to eight.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no run or more than eight, one has no sample, or one is not above 0.
    """
    if not 1 <= len(runs) <= 8:
        raise ValueError(f"runs must be one to eight, got {len(runs)}")
    for name, samples in runs.items():
        if not samples:
            raise ValueError(f"runs[{name!r}] must have a sample at least, got none")
        for sample in samples:
            require_scale(f"runs[{name!r}]", sample)
    lowest = min(min(samples) for samples in runs.values())
    highest = max(max(samples) for samples in runs.values())
    with style.styled():
        figure = style.new_figure(0.95 + 0.46 * len(runs))
        axes = figure.add_subplot()
        for row, samples in enumerate(runs.values()):
            # Spread a little in their order, so that equal samples do not hide each other.
            heights = [row - 0.2 + 0.4 * (i + 0.5) / len(samples) for i in range(len(samples))]
            label = "a sample" if row == 0 else None
            axes.plot(samples, heights, "o", ms=3.5, color=style.SKY, mec=style.BLUE, mew=0.6,
                      label=label)  # fmt: skip
            middle, mean = statistics.median(samples), statistics.fmean(samples)
            axes.plot([middle] * 2, [row - 0.33, row + 0.33], color=style.INK, lw=2,
                      label="median" if row == 0 else None)  # fmt: skip
            axes.plot([mean], [row + 0.33], "^", ms=6, color=style.VERMILLION,
                      label="mean" if row == 0 else None)  # fmt: skip
            axes.text(
                1.01, row, in_words(middle), transform=axes.get_yaxis_transform(), va="center",
                fontsize=9,
            )  # fmt: skip
        axes.set(xscale="log", xlim=(lowest / 1.25, highest * 1.25), ylim=(len(runs) - 0.45, -0.55))
        axes.text(
            1.01, -0.62, "median", transform=axes.get_yaxis_transform(), va="center", fontsize=8.5,
            color=style.MUTED,
        )  # fmt: skip
        axes.set_yticks(range(len(runs)), list(runs))
        axes.tick_params(axis="y", length=0)
        ticks = [t for t in _round_times() if lowest / 1.25 <= t <= highest * 1.25]
        axes.set_xticks(ticks, [in_words(t) for t in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(axis="x", color=style.FAINT)
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5)
    return figure


def _round_times() -> list[float]:
    return [m * 10.0**e for e in range(-9, 3) for m in (1, 2, 5)]
