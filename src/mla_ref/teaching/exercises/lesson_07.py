"""Exercises of lesson 07: the query in latent space, and attention that makes no key or value."""

import torch
from torch import Tensor

from mla_ref.attention import causal_attention, expand_kv
from mla_ref.bench import TensorMemory
from mla_ref.numerics import compare
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_tensor


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def _check_query_by_hand(absorb: Function) -> None:
    w_uk = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])  # one head, d_n = 2, d_c = 2
    result = absorb(torch.tensor([[[2.0, 5.0]]]), torch.tensor([[[7.0]]]), w_uk)
    expected = torch.tensor([[[6.0, 13.0, 7.0]]])
    expect_close(
        expect_tensor(result, torch.float32, (1, 1, 3), "the query"),
        expected,
        "the query",
        max_abs=0.0,
    )


def _query_case(name: str, s: int, heads: int, dims: tuple[int, int, int], why: str) -> Case:
    """dims: part without positions, rotary part, latent."""
    d_n, d_r, d_c = dims

    def check(absorb: Function) -> None:
        q_nope, q_pe = _random(1, s, heads, d_n), _random(2, s, heads, d_r)
        w_uk, rows = _random(3, heads, d_n, d_c), _random(4, 5, d_c + d_r)
        result = expect_tensor(
            absorb(q_nope, q_pe, w_uk), q_nope.dtype, (s, heads, d_c + d_r), "the query"
        )
        # The scores that ordinary keys give, head by head, against five cached rows.
        for head in range(heads):
            keys = torch.cat([rows[:, :d_c] @ w_uk[head].T, rows[:, d_c:]], dim=1)
            expected = torch.cat([q_nope[:, head], q_pe[:, head]], dim=1) @ keys.T
            what = f"the score of head {head} with a cached row"
            expect_close(result[:, head] @ rows.T, expected, what, max_abs=1e-11)

    return Case(name, why, check)


ABSORB_QUERY = Exercise(
    id="07-absorb-query",
    title="Absorb W_UK",
    task=(
        "Write `absorb(q_nope, q_pe, w_uk)`: the queries in the space of the cached row, latent "
        "first, then rotary key. Their dot product with a cached row is the dot product of the "
        "whole query with the key that `w_uk` would make of that row."
    ),
    signature=(
        'def absorb(\n    q_nope: Float[Tensor, "s h d_n"],\n    q_pe: Float[Tensor, "s h d_r"],\n'
        '    w_uk: Float[Tensor, "h d_n d_c"],\n) -> Float[Tensor, "s h d_row"]:'
    ),
    cases=(
        Case(
            "one head, by hand",
            "W_UK maps the latent to a key; its transpose maps a query to the latent: "
            "2 * (3, 4) + 5 * (0, 1). The rotary part goes along as it is.",
            _check_query_by_hand,
        ),
        _query_case(
            "three heads",
            4,
            3,
            (6, 4, 8),
            "Each head has a W_UK of its own. The cached row is what they share.",
        ),
        _query_case(
            "as many heads as rows",
            3,
            3,
            (6, 4, 8),
            "Where two sizes are equal, a product over the wrong dimension has the right shape.",
        ),
        _query_case("no rotary part", 4, 2, (6, 0, 8), "A layer without positions."),
        _query_case("no rows", 0, 2, (6, 4, 8), "A padded request."),
    ),
)


def _problem(seed: int, s_q: int, s_kv: int, heads: int, dims: tuple[int, ...]) -> list[Tensor]:
    d_c, d_r, d_n, d_v = dims
    return [
        _random(seed, s_q, heads, d_n),
        _random(seed + 1, s_q, heads, d_r),
        _random(seed + 2, s_kv, d_c + d_r),
        _random(seed + 3, heads, d_n, d_c) / d_c**0.5,
        _random(seed + 4, heads, d_v, d_c) / d_c**0.5,
    ]


def _attend_case(
    name: str, s_q: int, s_kv: int, heads: int, dims: tuple[int, int, int, int], why: str
) -> Case:
    """dims: latent, rotary key, key without positions, value."""

    def check(absorbed: Function) -> None:
        q_nope, q_pe, rows, w_uk, w_uv = _problem(10 * s_kv, s_q, s_kv, heads, dims)
        scale = 0.37  # of no width: an answer that makes up its own scale fails
        out = absorbed(q_nope, q_pe, rows, w_uk, w_uv, scale)
        out = expect_tensor(out, torch.float64, (s_q, heads, dims[3]), "out")
        k, v = expand_kv(rows, w_uk, w_uv)
        q = torch.cat([q_nope, q_pe], dim=-1)
        expected = causal_attention(q, k, v, softmax_scale=scale).out
        if (found := compare(out, expected)).agrees(max_abs=1e-4) and found.max_abs > 1e-12:
            raise Complaint(
                f"out is right to the rounding of float32 only, {found.max_abs:.0e} off; expected "
                "float64 arithmetic for float64 arguments"
            )
        expect_close(out, expected, "out", max_abs=1e-12)

    return Case(name, why, check)


def _check_nothing_is_expanded(absorbed: Function) -> None:
    s_kv, heads, d_c, d_r, d_n, d_v = 300, 8, 16, 8, 32, 32
    problem = _problem(77, 1, s_kv, heads, (d_c, d_r, d_n, d_v))
    with TensorMemory() as memory:
        expect_tensor(absorbed(*problem, 0.2), torch.float64, (1, heads, d_v), "out")
    largest = memory.largest_tensor
    # Scores are s_kv * heads, a copy of the rows is s_kv * (d_c + d_r): both are allowed.
    if largest.numel >= s_kv * heads * min(d_n, d_v, d_c):
        raise Complaint(
            f"a tensor of shape {list(largest.shape)} was made for one query row over {s_kv} "
            f"cached rows of {d_c + d_r} numbers and {heads} heads; expected none with numbers "
            "for every cached row and every head beyond its score"
        )


ABSORBED_ATTENTION = Exercise(
    id="07-absorbed-attention",
    title="Attention over the cached rows",
    task=(
        "Write `absorbed(q_nope, q_pe, kv_rows, w_uk, w_uv, softmax_scale)`: the output of "
        "attention for one request, whose last `s_q` tokens are the query rows; each sees the "
        "cached rows up to its own. There are at least as many cached rows as query rows. Keep the "
        "dtype, compute in it, and make no key and no value of any cached row."
    ),
    signature=(
        'def absorbed(\n    q_nope: Float[Tensor, "s_q h d_n"],\n'
        '    q_pe: Float[Tensor, "s_q h d_r"],\n    kv_rows: Float[Tensor, "s_kv d_row"],\n'
        '    w_uk: Float[Tensor, "h d_n d_c"],\n    w_uv: Float[Tensor, "h d_v d_c"],\n'
        '    softmax_scale: float,\n) -> Float[Tensor, "s_q h d_v"]:'
    ),
    cases=(
        _attend_case(
            "a decode step over one row, s_q 1, s_kv 1",
            1,
            1,
            2,
            (8, 4, 6, 6),
            "One key gets all the weight, so the output is W_UV times the latent, whatever the "
            "scores are.",
        ),
        _attend_case(
            "a decode step, s_q 1, s_kv 9",
            1,
            9,
            3,
            (8, 4, 6, 6),
            "The scale is given. It belongs to the model and not to any width that you can see.",
        ),
        _attend_case(
            "a verifier's rows, s_q 4, s_kv 9",
            4,
            9,
            3,
            (8, 4, 6, 6),
            "Absorption changes nothing about who sees whom: the mask is aligned at the bottom "
            "right.",
        ),
        _attend_case(
            "values of another width",
            2,
            7,
            2,
            (8, 4, 3, 5),
            "GLM-5.2 has 192 and 256, and the rotary key is no part of the value.",
        ),
        Case(
            "no key and no value is made, s_kv 300",
            "Making them is rung 5. In a decode step it costs more than all the rest of the model.",
            _check_nothing_is_expanded,
        ),
    ),
)
