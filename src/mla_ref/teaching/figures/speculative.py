"""Figures of speculative decoding: what a step keeps and drops, and how far drafts are accepted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mla_ref.checks import describe, require_count
from mla_ref.engine import Output
from mla_ref.platform import require
from mla_ref.speculative import AcceptanceStats
from mla_ref.teaching import style

_COLOURS = (style.BLUE, style.ORANGE, style.GREEN)
_HATCHES = ("", "///", "..")
_LONGEST = 9  # characters that fit into a cell


def draft_steps(
    prompt_ids: Sequence[int],
    outputs: Sequence[Output],
    decode: Callable[[int], str],
    *,
    first: int = 1,
    count: int = 3,
) -> Any:
    """Steps of one request, one column a position of its text.

    Each step has two lines: the tokens that the pass runs, the newest of the text and its drafts,
    and what the model itself says at each draft's place. Accepted drafts are filled, rejected ones
    struck out; the last token that the step gives, recovered or bonus, is filled in another colour.

    Args:
        prompt_ids: The request's prompt.
        outputs: All that the engine gave it, step by step; the prompt ran in one step.
        decode: A token's text.
        first: First step drawn; step 0 runs the prompt.
        count: Steps drawn.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are no such steps.
    """
    require_count("first", first, at_least=1)
    require_count("count", count, at_least=1)
    if first + count > len(outputs):
        raise ValueError(
            f"first and count must name steps 1 .. {len(outputs) - 1}, got steps {first} .. "
            f"{first + count - 1}"
        )
    text = [*prompt_ids, *(t for output in outputs[:first] for t in output.token_ids)]
    origin = len(text) - 1
    chosen = outputs[first : first + count]
    columns = max(
        sum(len(o.token_ids) for o in chosen[:i]) + len(chosen[i].drafts) + 2 for i in range(count)
    )
    with style.styled():
        figure = style.new_figure(0.86 * count + 0.75)
        axes = figure.add_subplot()
        for place, output in enumerate(chosen):
            _draw_step(axes, 3.3 * place, len(text) - 1 - origin, text[-1], output, decode, origin)
            text += output.token_ids
        axes.set(xlim=(-2.15, max(columns, 7) + 0.05), ylim=(3.3 * count + 0.1, -0.2))
        axes.axis("off")
        patches = require("matplotlib.patches")
        handles = [
            patches.Patch(color=style.SKY, label="newest token"),
            patches.Patch(color=style.GREEN, label="accepted draft"),
            patches.Patch(facecolor=style.FAINT, edgecolor=style.VERMILLION, label="rejected"),
            patches.Patch(color=style.BLUE, label="the model's own: recovered or bonus"),
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8.5)
    return figure


def _draw_step(
    axes: Any,
    y: float,
    x: int,
    newest: int,
    output: Output,
    decode: Callable[[int], str],
    origin: int,
) -> None:
    drafts, accepted = output.drafts, output.num_accepted
    computed, rejected = origin + x, len(drafts) - accepted
    rows = "row" if rejected == 1 else "rows"
    axes.text(
        -2.1, y + 0.42,
        f"num_computed {computed}: {1 + len(drafts)} rows run, {accepted} of {len(drafts)} drafts "
        f"stand, {rejected} {rows} rolled back; then {computed + 1 + accepted}",
        va="center", fontsize=8.5, color=style.MUTED,
    )  # fmt: skip
    for line, name in enumerate(("run", "the model says")):
        axes.text(-0.15, y + 1.4 + line, name, ha="right", va="center", fontsize=8.5)
    _cell(axes, x, y + 0.95, decode(newest), style.SKY, style.INK)
    for i, draft in enumerate(drafts):
        column = x + 1 + i
        stands = i < accepted
        face, ink = (style.GREEN, style.PAPER) if stands else (style.FAINT, style.MUTED)
        _cell(axes, column, y + 0.95, decode(draft), face, ink)
        if not stands:
            axes.plot(
                [column + 0.08, column + 0.92], [y + 1.75, y + 1.05], color=style.VERMILLION,
                linewidth=1.4,
            )  # fmt: skip
        if stands:
            _cell(axes, column, y + 1.95, decode(draft), style.PAPER, style.INK, style.GREEN)
        elif i > accepted:
            _cell(axes, column, y + 1.95, "unused", style.PAPER, style.MUTED, style.FAINT)
    # An end token among the accepted drafts cuts off what stands behind it.
    if len(output.token_ids) == accepted + 1:
        own = decode(output.token_ids[-1])
        _cell(axes, x + 1 + accepted, y + 1.95, own, style.BLUE, style.PAPER)


def _cell(
    axes: Any, column: int, y: float, text: str, face: str, ink: str, edge: str = "none"
) -> None:
    patches = require("matplotlib.patches")
    axes.add_patch(
        patches.Rectangle((column + 0.04, y + 0.05), 0.92, 0.8, facecolor=face, edgecolor=edge)
    )
    shown = text.replace("\n", "↵").replace(" ", "·")
    shown = shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
    size = 8.5 if len(shown) <= 6 else 7
    axes.text(column + 0.5, y + 0.45, shown, ha="center", va="center", fontsize=size, color=ink)


def acceptance(stats: Mapping[str, AcceptanceStats]) -> Any:
    """Left, how many drafts had 0, 1, 2, ... tokens accepted; right, the share by place.

    Args:
        stats: Counts by drafter, one to three.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There are none or too many, or one has no drafts.
    """
    if not 1 <= len(stats) <= len(_COLOURS):
        raise ValueError(f"stats must hold one to three drafters, got {len(stats)}")
    for name, counted in stats.items():
        if not isinstance(counted, AcceptanceStats):
            raise TypeError(f"stats[{name!r}] must be AcceptanceStats, got {describe(counted)}")
        if not counted.num_drafts:
            raise ValueError(f"stats[{name!r}] must have a draft at least, got none")
    longest = max(len(counted.histogram) for counted in stats.values())
    width = 0.8 / len(stats)
    with style.styled():
        figure = style.new_figure(2.9)
        left, right = figure.subplots(1, 2)
        for place, (name, counted) in enumerate(stats.items()):
            colour, at = _COLOURS[place], (place + 0.5) * width - 0.4
            length = counted.mean_acceptance_length
            label = f"{name}: {counted.num_drafts} drafts, {length:.2f} tokens a step"
            shares = [n / counted.num_drafts for n in counted.histogram]
            left.bar(
                [i + at for i in range(len(shares))], shares, width * 0.92, color=colour,
                hatch=_HATCHES[place], edgecolor=style.PAPER, label=label,
            )  # fmt: skip
            rates = counted.per_position_rates
            right.plot(
                range(len(rates)), rates, "os^"[place] + "-", color=colour, markersize=6,
                linewidth=1.5,
            )  # fmt: skip
        left.set(title="Share of the drafts", xlabel="tokens accepted", xticks=range(longest))
        right.set(
            title="Accepted, by place in the draft", xlabel="place", xticks=range(longest - 1),
            xlim=(-0.3, longest - 1.7),
        )  # fmt: skip
        for axes in (left, right):
            axes.set_ylim(0, 1)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
            axes.grid(axis="y", color=style.FAINT)
            axes.set_axisbelow(True)
        figure.legend(loc="outside lower left", ncols=len(stats), fontsize=8.5)
    return figure
