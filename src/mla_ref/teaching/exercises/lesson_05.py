"""Exercises of lesson 05: from one layout of rotary pairs to the other, numbers and weights."""

import torch
from torch import Tensor

from mla_ref.layers import RopeConfig, apply_rope, rope_table
from mla_ref.teaching.exercises.exercise import Case, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_same_bits, expect_tensor


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _halves(x: Tensor) -> Tensor:
    """The definition, number by number, so that nothing here gives the short way to the reader."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for pair in range(half):
        out[..., pair] = x[..., 2 * pair]
        out[..., half + pair] = x[..., 2 * pair + 1]
    return out


def _halves_case(name: str, x: Tensor, why: str) -> Case:
    def check(to_halves: Function) -> None:
        result = expect_tensor(to_halves(x), x.dtype, tuple(x.shape), "the result")
        expect_same_bits(result, _halves(x), "the result")

    return Case(name, why, check)


def _check_scores(to_halves: Function) -> None:
    q, k = _random(3, 6, 2, 16), _random(4, 6, 2, 16)
    cos, sin = rope_table(RopeConfig(16, 1e4, interleaved=True), torch.tensor([0, 1, 2, 7, 90, 91]))
    pairs = [apply_rope(x, cos, sin, interleaved=True) for x in (q, k)]
    moved = [expect_tensor(to_halves(x), x.dtype, tuple(x.shape), "the result") for x in (q, k)]
    halves = [apply_rope(x, cos, sin, interleaved=False) for x in moved]
    expected = torch.einsum("shd,thd->hst", *pairs)
    scores = torch.einsum("shd,thd->hst", *halves)
    expect_close(scores, expected, "the score of head, query, key", max_abs=1e-4)


TO_HALVES = Exercise(
    id="05-to-halves",
    title="From pairs to halves",
    task=(
        "Write `to_halves(x)`. It puts the last dimension of `x`, which lies in interleaved pairs, "
        "into the order of the half-split layout: first the first number of every pair, then the "
        "second number of every pair. Turned in halves, the result is then `x` turned in pairs, in "
        "the new order. `x` has any number of dimensions before the last, and keeps its dtype."
    ),
    signature='def to_halves(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:',
    cases=(
        _halves_case(
            "four numbers",
            torch.tensor([[10.0, 11.0, 20.0, 21.0]]),
            "Two pairs, (10, 11) and (20, 21).",
        ),
        _halves_case(
            "eight numbers",
            torch.tensor([[10.0, 11.0, 20.0, 21.0, 30.0, 31.0, 40.0, 41.0]]),
            "With four numbers the way there and the way back are the same permutation. A test of "
            "that size cannot tell one from the other.",
        ),
        _halves_case(
            "five rows of three heads",
            _random(1, 5, 3, 16),
            "Queries are [s, heads, d]: only the last dimension may change its order.",
        ),
        _halves_case(
            "a single row without heads", _random(2, 6), "The rotary key of one token is a vector."
        ),
        _halves_case(
            "bfloat16",
            _random(5, 4, 8).bfloat16(),
            "Weights and caches are stored in it; putting numbers in order rounds nothing.",
        ),
        Case(
            "scores are equal",
            "What the order is for: turned in halves, queries and keys give the scores that they "
            "gave when turned in pairs.",
            _check_scores,
        ),
    ),
)


def _converted(weight: Tensor, num_heads: int, nope_dim: int) -> Tensor:
    width = weight.shape[0] // num_heads
    out = weight.clone()
    for head in range(num_heads):
        rope = slice(head * width + nope_dim, (head + 1) * width)
        out[rope] = _halves(weight[rope].T).T
    return out


def _weight_case(name: str, rows: int, num_heads: int, nope_dim: int, why: str) -> Case:
    def check(convert_weight: Function) -> None:
        weight = _random(rows, rows, 5)
        result = expect_tensor(
            convert_weight(weight, num_heads, nope_dim),
            weight.dtype,
            tuple(weight.shape),
            "the weight",
        )
        expect_same_bits(
            result, _converted(weight, num_heads, nope_dim), "the weight [row, column]"
        )

    return Case(name, why, check)


def _check_projection(convert_weight: Function) -> None:
    heads, nope, rope, hidden = 3, 4, 8, 12
    w_q, w_k = _random(11, heads * (nope + rope), hidden), _random(12, nope + rope, hidden)
    x = _random(13, 7, hidden)
    cos, sin = rope_table(RopeConfig(rope, 1e4, interleaved=True), torch.arange(7))

    def scores(w_q: Tensor, w_k: Tensor, interleaved: bool) -> Tensor:
        q, k = (x @ w_q.T).unflatten(-1, (heads, nope + rope)), (x @ w_k.T)[:, None]
        q, k = (
            torch.cat(
                [y[..., :nope], apply_rope(y[..., nope:], cos, sin, interleaved=interleaved)], -1
            )
            for y in (q, k)
        )
        return torch.einsum("shd,td->hst", q, k[:, 0])

    result = scores(convert_weight(w_q, heads, nope), convert_weight(w_k, 1, nope), False)
    expected = scores(w_q, w_k, True)
    expect_close(result, expected, "the score of head, query, key", max_abs=1e-3)


CONVERT_WEIGHT = Exercise(
    id="05-convert-weight",
    title="Convert a checkpoint",
    task=(
        "Write `convert_weight(weight, num_heads, nope_dim)`. The rows of `weight` give a query or "
        "key, head after head; the first `nope_dim` rows of each head carry no positions, the rest "
        "are turned in interleaved pairs. Return the weight whose output can be turned in halves. "
        "What carries no positions stays where it is."
    ),
    signature=(
        'def convert_weight(\n    weight: Float[Tensor, "out hidden"], num_heads: int, '
        'nope_dim: int\n) -> Float[Tensor, "out hidden"]:'
    ),
    cases=(
        _weight_case(
            "one head that turns whole, 8 rows",
            8,
            1,
            0,
            "A key of a model with one KV head.",
        ),
        _weight_case(
            "three heads that turn whole, 24 rows",
            24,
            3,
            0,
            "Llama's q_proj: every head has its own pairs. Conversion scripts for Llama do this.",
        ),
        _weight_case(
            "a latent of 6 and a rotary key of 8",
            14,
            1,
            6,
            "DeepSeek's kv_a: the latent stands first and is not turned, then the rotary key.",
        ),
        _weight_case(
            "three heads of 4 + 8",
            36,
            3,
            4,
            "DeepSeek's q_b: each head has its part without positions first.",
        ),
        _weight_case(
            "nothing is turned",
            12,
            3,
            4,
            "A layer without positions has a rotary part of width 0; GLM-5.3-Flash has such.",
        ),
        Case(
            "scores through both projections are equal",
            "The converted model must be the same model.",
            _check_projection,
        ),
    ),
)
