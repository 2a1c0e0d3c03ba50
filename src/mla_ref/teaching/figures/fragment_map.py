"""The figure of mma.sync's fragments: which lane of the warp holds which element."""

from typing import Any

from mla_ref.checks import describe, require_count
from mla_ref.platform import require
from mla_ref.teaching import style
from mla_ref.teaching.fragments import LANES, A, B, C, Fragment

_GAP = 3.4  # cells between matrices
_LOOKS = ((style.BLUE, style.PAPER), (style.ORANGE, style.INK))


def fragment_map(
    lanes: tuple[int, ...] = (5,), fragments: tuple[Fragment, Fragment, Fragment] = (A, B, C)
) -> Any:
    """A, B and C of one instruction as they are multiplied, each element with its lane's number.

    B stands above C and A to its left, so that an element of C lies where its row of A meets its
    column of B. The elements of the chosen lanes are filled.

    Args:
        lanes: One or two lanes to follow.
        fragments: The maps of A, B and C.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: There is no lane or there are more than two, or a number is out of range.
    """
    if not 1 <= len(lanes) <= len(_LOOKS):
        raise ValueError(f"lanes must be one or two, got {list(lanes)}")
    for lane in lanes:
        if require_count("lanes", lane) >= LANES:
            raise ValueError(f"lanes must be below {LANES}, got {lane}")
    a, b, c = fragments
    if (a.shape[1], b.shape[0]) != (b.shape[0], a.shape[1]) or c.shape != (a.shape[0], b.shape[1]):
        shapes = [fragment.shape for fragment in fragments]
        raise ValueError(f"fragments must multiply, got {describe(shapes)}")
    patches = require("matplotlib.patches")
    left, top = a.shape[1] + _GAP, b.shape[0] + _GAP
    width, height = left + b.shape[1], top + a.shape[0]
    with style.styled():
        figure = style.new_figure(0.17 * (height + 2.5))
        axes = figure.add_subplot()
        for fragment, x, y, title in (
            (a, 0.0, top, "A"), (b, left, 0.0, "B"), (c, left, top, "C")
        ):  # fmt: skip
            rows, columns = fragment.shape
            _draw(axes, patches, fragment, x, y, lanes)
            axes.text(
                x + columns / 2, y - 0.45, f"{title}, {rows} × {columns}",
                ha="center", va="bottom", fontsize=10,
            )  # fmt: skip
        _explain(axes, patches, lanes, fragments)
        axes.set(xlim=(-0.3, width + 0.3), ylim=(height + 0.3, -1.9), aspect="equal")
        axes.axis("off")
    return figure


def _draw(
    axes: Any, patches: Any, fragment: Fragment, x: float, y: float, lanes: tuple[int, ...]
) -> None:
    """One matrix, its upper left corner at (x, y)."""
    rows, columns = fragment.shape
    owners = fragment.owners()
    for row in range(rows):
        for column in range(columns):
            lane = int(owners[row, column])
            face, ink = style.PAPER, style.MUTED
            if lane in lanes:
                face, ink = _LOOKS[lanes.index(lane)]
            axes.add_patch(
                patches.Rectangle((x + column, y + row), 1, 1, facecolor=face,
                                  edgecolor=style.FAINT, lw=0.6)
            )  # fmt: skip
            axes.text(
                x + column + 0.5, y + row + 0.53, str(lane), ha="center", va="center",
                fontsize=6.5, color=ink, fontweight="bold" if lane in lanes else "normal",
            )  # fmt: skip
    # The halves that one register of a lane is in.
    for row in range(0, rows + 1, 8):
        axes.plot([x, x + columns], [y + row] * 2, color=style.INK, lw=0.9)
    for column in range(0, columns + 1, 8):
        axes.plot([x + column] * 2, [y, y + rows], color=style.INK, lw=0.9)


def _explain(
    axes: Any, patches: Any, lanes: tuple[int, ...], fragments: tuple[Fragment, ...]
) -> None:
    """In the empty corner, what the chosen lanes hold."""
    y = 0.4
    for lane, (colour, _) in zip(lanes, _LOOKS, strict=False):
        axes.add_patch(patches.Rectangle((0, y), 1, 1, facecolor=colour))
        axes.text(
            1.6, y + 0.5, f"lane {lane}: g = {lane // 4}, t = {lane % 4}", va="center", fontsize=9.5
        )
        y += 1.4
        for fragment in fragments:
            rows = sorted({int(n) for n in fragment.row[lane]})
            columns = sorted({int(n) for n in fragment.column[lane]})
            axes.text(
                1.6, y + 0.5,
                f"{fragment.name}: {_words('row', rows)}, {_words('column', columns)}",
                va="center", fontsize=8.5, color=style.MUTED,
            )  # fmt: skip
            y += 1.3
        y += 0.8
    axes.text(
        0, fragments[1].shape[0] + 0.2, "a cell: the lane that holds it", fontsize=8.5,
        color=style.MUTED,
    )  # fmt: skip


def _words(name: str, numbers: list[int]) -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
