"""Exercises of lesson 06: keys and values out of a cached row, and the scale of their scores."""

import math

import torch
from torch import Tensor

from mla_ref.attention import vectorised_attention
from mla_ref.checks import describe
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_close, expect_parts, expect_tensor


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _checked(
    up_project: Function, kv_rows: Tensor, kv_b: Tensor, num_heads: int, nope_dim: int
) -> tuple[Tensor, Tensor]:
    """What the answer returns, if kinds and shapes are right."""
    k, v = expect_parts(up_project(kv_rows, kv_b, num_heads, nope_dim), ("k", "v"))
    s, rope_dim = kv_rows.shape[0], kv_rows.shape[1] - kv_b.shape[1]
    v_dim = kv_b.shape[0] // num_heads - nope_dim
    return (
        expect_tensor(k, kv_rows.dtype, (s, num_heads, nope_dim + rope_dim), "k"),
        expect_tensor(v, kv_rows.dtype, (s, num_heads, v_dim), "v"),
    )


def _project_case(name: str, s: int, heads: int, dims: tuple[int, int, int, int], why: str) -> Case:
    """dims: latent, rotary key, key without positions, value."""
    d_c, d_r, d_n, d_v = dims

    def check(up_project: Function) -> None:
        kv_rows, kv_b = _random(s + heads, s, d_c + d_r), _random(d_c, heads * (d_n + d_v), d_c)
        k, v = _checked(up_project, kv_rows, kv_b, heads, d_n)
        # The definition, token by token and head by head.
        for token in range(s):
            for head in range(heads):
                first = head * (d_n + d_v)
                both = kv_b[first : first + d_n + d_v] @ kv_rows[token, :d_c]
                key = torch.cat([both[:d_n], kv_rows[token, d_c:]])
                at = f"of token {token}, head {head}"
                expect_close(k[token, head], key, f"k {at}", max_abs=1e-4)
                expect_close(v[token, head], both[d_n:], f"v {at}", max_abs=1e-4)

    return Case(name, why, check)


def _check_by_hand(up_project: Function) -> None:
    kv_rows, kv_b = torch.tensor([[1.0, 2.0, 7.0]]), torch.tensor([[3.0, 0.0], [0.0, 5.0]])
    k, v = _checked(up_project, kv_rows, kv_b, 1, 1)
    expect_close(k, torch.tensor([[[3.0, 7.0]]]), "k", max_abs=0.0)
    expect_close(v, torch.tensor([[[10.0]]]), "v", max_abs=0.0)


def _check_merged(up_project: Function) -> None:
    s, hidden, heads, d_c, d_n, d_v = 9, 20, 3, 6, 4, 5
    x, w_down = _random(30, s, hidden), _random(31, d_c, hidden) / hidden**0.5
    kv_b, q = _random(32, heads * (d_n + d_v), d_c), _random(33, s, heads, d_n)
    # Ordinary attention whose weights are the product of both maps.
    merged = (kv_b @ w_down).unflatten(0, (heads, -1))
    keys = torch.einsum("si,hni->shn", x, merged[:, :d_n])
    values = torch.einsum("si,hvi->shv", x, merged[:, d_n:])
    expected = vectorised_attention(q[None], keys[None], values[None], softmax_scale=0.5)
    k, v = _checked(up_project, x @ w_down.T, kv_b, heads, d_n)
    result = vectorised_attention(q[None], k[None], v[None], softmax_scale=0.5)
    what = "with your keys and values, the output"
    expect_close(result.out[0], expected.out[0], what, max_abs=1e-4)


UP_PROJECT = Exercise(
    id="06-up-project",
    title="Up-projection",
    task=(
        "Write `up_project(kv_rows, kv_b, num_heads, nope_dim)`: the keys and values of every "
        "head, as the tuple `(k, v)`. A row of `kv_rows` is the latent, then the turned rotary "
        "key. `kv_b` is a checkpoint's weight: for head after head, first the `nope_dim` rows "
        "that make its key, then the rows that make its value. In `k` the part without "
        "positions comes first, then the rotary key, the same for all heads. All other widths "
        "follow from the shapes; the rotary key may have width 0."
    ),
    signature=(
        'def up_project(\n    kv_rows: Float[Tensor, "s d_row"],\n'
        '    kv_b: Float[Tensor, "h_times_nope_and_v d_c"],\n    num_heads: int,\n'
        "    nope_dim: int,\n"
        ') -> tuple[Float[Tensor, "s h d_qk"], Float[Tensor, "s h d_v"]]:'
    ),
    cases=(
        Case(
            "one token and head, by hand",
            "The row is the latent (1, 2) and the rotary key 7. The key is 3 * 1, then 7; the "
            "value is 5 * 2.",
            _check_by_hand,
        ),
        _project_case(
            "five tokens, three heads",
            5,
            3,
            (8, 4, 6, 6),
            "Key and value of one head stand together in kv_b, then those of the next. Cutting it "
            "into all keys and all values gives most heads the rows of another.",
        ),
        _project_case(
            "values wider than keys",
            5,
            2,
            (8, 4, 3, 6),
            "GLM-5.2 has 192 and 256, DeepSeek has 128 twice and hides the difference.",
        ),
        _project_case(
            "no rotary key",
            4,
            2,
            (8, 0, 3, 3),
            "A layer without positions caches the latent alone.",
        ),
        _project_case(
            "no tokens", 0, 2, (8, 4, 3, 5), "A request that has nothing in the cache yet."
        ),
        Case(
            "attention equals that of merged weights",
            "Down and up are two maps, so their product is one. Ordinary multi-head attention with "
            "that product must give the same.",
            _check_merged,
        ),
    ),
)


def _scale_case(
    name: str, dims: tuple[int, int], factor: float, mscale_all_dim: float, why: str
) -> Case:
    def check(softmax_scale: Function) -> None:
        result = softmax_scale(*dims, factor, mscale_all_dim)
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            raise Complaint(f"the scale is {describe(result)}, expected a float")
        stretch = max(factor, 1.0) ** (0.1 * mscale_all_dim)  # its logarithm is what is added to 1
        expected = (1 + math.log(stretch)) ** 2 / math.sqrt(sum(dims))
        if not math.isclose(result, expected, rel_tol=1e-6):
            raise Complaint(f"the scale is {result:.6g}, expected {expected:.6g}")

    return Case(name, why, check)


SOFTMAX_SCALE = Exercise(
    id="06-softmax-scale",
    title="The scale",
    task=(
        "Write `softmax_scale(nope_dim, rope_dim, factor, mscale_all_dim)`: the factor on q·k of a "
        "model whose context is stretched by `factor`, as a float. A `factor` of 1 or less "
        "stretches nothing."
    ),
    signature=(
        "def softmax_scale(\n    nope_dim: int,\n    rope_dim: int,\n    factor: float,\n"
        "    mscale_all_dim: float,\n) -> float:"
    ),
    cases=(
        _scale_case(
            "GLM-5.2: 192 + 64, nothing stretched",
            (192, 64),
            1.0,
            0.0,
            "All numbers that a head compares count, those with positions as well.",
        ),
        _scale_case(
            "DeepSeek-V3.2: 128 + 64, factor 40, weight 1",
            (128, 64),
            40.0,
            1.0,
            "Query and key both carry mscale, so the score carries its square.",
        ),
        _scale_case(
            "DeepSeek-V2-Lite: 128 + 64, factor 40, weight 0.707",
            (128, 64),
            40.0,
            0.707,
            "The weight is a setting of the model, not always 1.",
        ),
        _scale_case(
            "a factor of 0.5",
            (128, 64),
            0.5,
            1.0,
            "Nothing is stretched, and the logarithm is negative.",
        ),
    ),
)
