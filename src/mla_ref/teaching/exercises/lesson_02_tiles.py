"""The second exercise of lesson 02: take one more tile into the state of the online softmax."""

import torch
from torch import Tensor

from mla_ref.teaching.exercises.exercise import Case, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_parts, expect_tensor

_ROWS, _D_V = 3, 4
_INF = torch.inf


def _tile(seed: int, t: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(_ROWS, t, generator=generator) * scale,
        torch.randn(t, _D_V, generator=generator),
    )


def _run_tiles(add_tile: Function, tiles: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    state: tuple[Tensor, ...] = (
        torch.full((_ROWS,), -_INF),
        torch.zeros(_ROWS),
        torch.zeros(_ROWS, _D_V),
    )
    shapes = ((_ROWS,), (_ROWS,), (_ROWS, _D_V))
    for scores, values in tiles:
        parts = expect_parts(add_tile(*state, scores, values), ("m", "total", "acc"))
        state = tuple(
            expect_tensor(part, torch.float32, shape, name)
            for part, shape, name in zip(parts, shapes, ("m", "total", "acc"), strict=True)
        )
    return state


def _check_tiles(add_tile: Function, tiles: list[tuple[Tensor, Tensor]]) -> None:
    m, total, acc = _run_tiles(add_tile, tiles)
    scores = torch.cat([s for s, _ in tiles], dim=1).double()
    values = torch.cat([v for _, v in tiles]).double()
    highest = scores.amax(dim=1)
    anchor = torch.where(highest == -_INF, 0.0, highest)
    weights = torch.exp(scores - anchor[:, None])
    expect_close(m, highest, "m", max_abs=0.0)
    expect_close(total, weights.sum(dim=1), "total", max_abs=1e-4)
    expect_close(acc, weights @ values, "acc", max_abs=1e-4)


def _hidden(t: int) -> tuple[Tensor, Tensor]:
    return torch.full((_ROWS, t), -_INF), _tile(20, t)[1]


def _tiles_case(name: str, tiles: list[tuple[Tensor, Tensor]], why: str) -> Case:
    def check(add_tile: Function) -> None:
        _check_tiles(add_tile, tiles)

    return Case(name, why, check)


def _raised(tile: tuple[Tensor, Tensor], by: float) -> tuple[Tensor, Tensor]:
    return tile[0] + by, tile[1]


def _check_uneven(add_tile: Function) -> None:
    first, second = _hidden(4), _tile(26, 4)
    first[0][1] = 1.5  # only row 1 sees the first tile
    second[0][1] = -_INF  # and does not see the second
    _check_tiles(add_tile, [first, second])


def _check_one_by_one(add_tile: Function) -> None:
    scores, values = _tile(25, 9, scale=3.0)
    _check_tiles(add_tile, [(scores[:, j : j + 1], values[j : j + 1]) for j in range(9)])


ADD_TILE = Exercise(
    id="02-add-tile",
    title="One more tile",
    task=(
        "Write `add_tile(m, total, acc, scores, values)`: the state of the online softmax after "
        "one more tile of `t` keys, as the tuple `(m, total, acc)`; `total` is the $\\ell$ above. "
        "`scores` carry the softmax scale already and are `-inf` where a row may not see a key; a "
        "row may see no key of a tile, of several tiles, or of all. The state starts as "
        "`(-inf, 0, 0)` and is not normalised. `m` is the highest score so far, exactly."
    ),
    signature=(
        'def add_tile(\n    m: Float[Tensor, " rows"],\n    total: Float[Tensor, " rows"],\n'
        '    acc: Float[Tensor, "rows d_v"],\n    scores: Float[Tensor, "rows t"],\n'
        '    values: Float[Tensor, "t d_v"],\n) -> tuple[Tensor, Tensor, Tensor]:'
    ),
    cases=(
        _tiles_case("the first tile", [_tile(21, 4)], "Nothing to rescale yet: m is still -inf."),
        _tiles_case(
            "a second tile with lower scores",
            [_tile(21, 4), _raised(_tile(22, 4), -9.0)],
            "The maximum stays, so what was summed stays as it is.",
        ),
        _tiles_case(
            "a second tile with higher scores",
            [_tile(21, 4), _raised(_tile(22, 4), 9.0)],
            "What was summed was measured against the old maximum and must be scaled down, the "
            "values' sum as well as the weights' sum.",
        ),
        Case(
            "nine tiles of one key", "The recurrence of the paper, key by key.", _check_one_by_one
        ),
        _tiles_case(
            "scores of 1,000 and -1,000",
            [_raised(_tile(23, 4), 1000.0), _raised(_tile(24, 4), -1000.0)],
            "exp(1000) is inf. Only differences to the maximum may be raised to a power.",
        ),
        _tiles_case(
            "the first tile hidden, the second not",
            [_hidden(4), _tile(21, 4)],
            "m is -inf after the first tile, and -inf minus -inf is NaN for ever after. A hidden "
            "tile at the end does not show this.",
        ),
        Case(
            "rows that differ in what they see",
            "One row's hidden tile is another row's first.",
            _check_uneven,
        ),
        _tiles_case(
            "nothing visible at all",
            [_hidden(4), _hidden(2)],
            "The state must still be (-inf, 0, 0), so that the row ends as 0 and -inf.",
        ),
    ),
)
