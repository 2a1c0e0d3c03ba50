"""Exercise of lesson 14: take one more tile into a program's state, operands swapped."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_ref.teaching.exercises.exercise import Case, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_parts, expect_tensor

_HEADS, _D = 3, 6


@dataclass(frozen=True)
class _Tile:
    codes: Tensor  # [t, d]
    scales: Tensor  # [t]
    scores: Tensor  # [t, h]
    listed: Tensor  # [t]


def _tile(seed: int, t: int, raised: float = 0.0) -> _Tile:
    generator = torch.Generator().manual_seed(seed)
    return _Tile(
        torch.randn(t, _D, generator=generator),
        torch.ones(t),
        torch.randn(t, _HEADS, generator=generator) + raised,
        torch.ones(t, dtype=torch.bool),
    )


def _scaled(tile: _Tile, scales: tuple[float, ...]) -> _Tile:
    return replace(tile, scales=torch.tensor(scales))


def _unlisted(tile: _Tile, entries: tuple[int, ...], *, poison: float | None = None) -> _Tile:
    """Without some entries; `poison` is what lies in memory where they would have been loaded."""
    chosen = torch.tensor(entries)
    listed = tile.listed.clone()
    listed[chosen] = False
    if poison is None:
        return replace(tile, listed=listed)
    codes, scores, scales = tile.codes.clone(), tile.scores.clone(), tile.scales.clone()
    codes[chosen], scores[chosen], scales[chosen] = poison, poison, poison
    return _Tile(codes, scales, scores, listed)


def _lowered(tile: _Tile, entries: tuple[int, ...], by: float) -> _Tile:
    scores = tile.scores.clone()
    scores[torch.tensor(entries)] -= by
    return replace(tile, scores=scores)


def _check(add_tile: Function, tiles: list[_Tile]) -> None:
    state: tuple[Tensor, ...] = (
        torch.full((_HEADS,), -torch.inf),
        torch.zeros(_HEADS),
        torch.zeros(_D, _HEADS),
    )
    names, shapes = ("highest", "total", "acc"), ((_HEADS,), (_HEADS,), (_D, _HEADS))
    for one in tiles:
        given = (one.codes, one.scales, one.scores, one.listed)
        parts = expect_parts(add_tile(*state, *given), names)
        state = tuple(
            expect_tensor(part, torch.float32, shape, name)
            for part, shape, name in zip(parts, shapes, names, strict=True)
        )
    # Only the listed tokens, all at once, in float64.
    scores = torch.cat([one.scores[one.listed] for one in tiles]).double()
    values = torch.cat([(one.codes * one.scales[:, None])[one.listed] for one in tiles]).double()
    highest = torch.full((_HEADS,), -torch.inf, dtype=torch.float64)
    if len(scores):
        highest = scores.amax(dim=0)
    weights = torch.exp(scores - highest)
    expect_close(state[0], highest, "highest", max_abs=0.0)
    expect_close(state[1], weights.sum(dim=0), "total", max_abs=1e-4)
    expect_close(state[2], values.T @ weights, "acc", max_abs=1e-4)


def _case(name: str, tiles: list[_Tile], why: str) -> Case:
    def check(add_tile: Function) -> None:
        _check(add_tile, tiles)

    return Case(name, why, check)


ADD_TILE_SWAPPED = Exercise(
    id="14-add-tile",
    title="A tile, operands swapped",
    task=(
        "Write `add_tile(highest, total, acc, codes, scales, scores, listed)`: the state of a "
        "program after one more tile of `t` tokens, as the tuple `(highest, total, acc)`. Tokens "
        "stand on the first axis of `scores` and heads on the second; `acc` is transposed in the "
        "same way. `codes` are a group of a row's numbers as they are stored, and a token's value "
        "is its codes times its scale; multiply no scale into `codes`. Where `listed` is False the "
        "entry is -1, and codes, scale and scores may be anything, NaN too. Scores carry the "
        "softmax scale, in natural units. The state starts as `(-inf, 0, 0)` and is not normalised."
    ),
    signature=(
        'def add_tile(\n    highest: Float[Tensor, " h"],\n    total: Float[Tensor, " h"],\n'
        '    acc: Float[Tensor, "d h"],\n    codes: Float[Tensor, "t d"],\n'
        '    scales: Float[Tensor, " t"],\n    scores: Float[Tensor, "t h"],\n'
        '    listed: Bool[Tensor, " t"],\n) -> tuple[Tensor, Tensor, Tensor]:'
    ),
    cases=(
        _case(
            "one tile of five tokens",
            [_tile(1, 5)],
            "Tokens are the rows now: the maximum and the sum go down a column, one a head.",
        ),
        _case(
            "a second tile with higher scores",
            [_tile(1, 5), _tile(2, 5, raised=9.0)],
            "The sum and every column of acc were measured against the old maximum.",
        ),
        _case(
            "scales from 1/8 to 4",
            [_scaled(_tile(3, 4), (0.125, 4.0, 1.0, 2.0))],
            "A value is codes times scale. A scale on the weights does the same for one number in "
            "place of 128, but the sum of the weights is without it.",
        ),
        _case(
            "two entries of -1 among five",
            [_unlisted(_lowered(_tile(4, 5), (1, 3), by=3.0), (1, 3))],
            "Rows of few tokens, and ranks that own every eighth: -1 may stand anywhere.",
        ),
        _case(
            "-1 with the highest score",
            [_unlisted(_tile(4, 5, raised=-5.0), (1,), poison=0.0)],
            "A masked load gives zeros, so the score is 0, and real ones may all lie below: "
            "mask before the maximum is taken.",
        ),
        _case(
            "NaN where nothing was loaded",
            [_unlisted(_tile(5, 5), (0, 4), poison=math.nan)],
            "Weight 0 times NaN is NaN (miles#2079). Codes and scale must be 0 as well.",
        ),
        _case(
            "a tile of -1 alone, then a real one",
            [_unlisted(_tile(6, 4), (0, 1, 2, 3)), _tile(7, 4)],
            "highest is still -inf, and -inf minus -inf is NaN for ever after (vllm#48364).",
        ),
        _case(
            "a real tile, then one of -1 alone",
            [_tile(8, 4), _unlisted(_tile(9, 4), (0, 1, 2, 3))],
            "The usual end of a list that is not full: nothing may change.",
        ),
        _case(
            "scores of 1,000, then of -1,000",
            [_tile(10, 4, raised=1000.0), _tile(11, 4, raised=-1000.0)],
            "exp(1000) is inf. Only differences to the maximum may be raised to a power.",
        ),
        _case(
            "a list of -1",
            [_unlisted(_tile(12, 4), (0, 1, 2, 3), poison=math.nan)],
            "A padded row of a graph: the state stays (-inf, 0, 0).",
        ),
    ),
)
