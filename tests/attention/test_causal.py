"""Rung 1 against numbers worked out by hand, then against the float64 oracle."""

import math

import pytest
import torch
from tests.support import SHAPES, assert_agrees, bits, causal_oracle, random_qkv, raw

from mla_ref.attention import causal_attention
from mla_ref.numerics import oracle_attention

LN2, LN3 = math.log(2), math.log(3)


def column(*values: float) -> torch.Tensor:
    """One head of width 1: [s, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)


def test_numbers_by_hand() -> None:
    """Two tokens, logits 0 and ln 3, values 8 and 4.

    Row 0 sees key 0 alone: weight 1, out 8, lse = ln(e^0) = 0.
    Row 1 sees both: exp gives 1 and 3, sum 4; out = 1/4 * 8 + 3/4 * 4 = 5, lse = ln 4.
    """
    out, lse = causal_attention(column(1, 1), column(0, LN3), column(8, 4), softmax_scale=1.0)
    assert out.flatten().tolist() == pytest.approx([8.0, 5.0], abs=1e-14)
    assert lse.flatten().tolist() == pytest.approx([0.0, 2 * LN2], abs=1e-15)


def test_B076_ln_4_and_not_2() -> None:
    """Base 2 would give log2(4) = 2; a stray log2(e) in the reference once did."""
    _, lse = causal_attention(column(1), column(0, LN3), column(0, 0), softmax_scale=1.0)
    assert lse.item() == pytest.approx(1.386294, abs=1e-6)


def test_the_scale_is_applied_once() -> None:
    """q·k = 2 ln 3 and a scale of 1/2 give logits 0 and ln 3 again."""
    q, k, v = column(2), column(0, LN3), column(8, 4)
    out, lse = causal_attention(q, k, v, softmax_scale=0.5)
    assert (out.item(), lse.item()) == (pytest.approx(5.0), pytest.approx(2 * LN2))


def test_grouped_heads_by_hand() -> None:
    """Four query heads over two KV heads: heads 0, 1 read KV head 0, heads 2, 3 KV head 1.

    One token, so each head's output is the value of its KV head, and lse is its logit.
    """
    q = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    k = torch.tensor([[[10.0], [100.0]]])
    v = torch.tensor([[[5.0], [6.0]]])
    out, lse = causal_attention(q, k, v, softmax_scale=1.0)
    assert out.flatten().tolist() == [5.0, 5.0, 6.0, 6.0]
    assert lse.flatten().tolist() == [10.0, 20.0, 300.0, 400.0]


def test_three_rows_by_hand() -> None:
    """Equal keys: row i averages the first i + 1 values, lse = ln(i + 1)."""
    out, lse = causal_attention(
        column(7, 7, 7), column(0, 0, 0), column(3, 5, 10), softmax_scale=1.0
    )
    assert out.flatten().tolist() == pytest.approx([3.0, 4.0, 6.0], abs=1e-14)
    assert lse.flatten().tolist() == pytest.approx([0.0, LN2, LN3], abs=1e-15)


def test_B077_the_mask_is_aligned_at_the_bottom_right() -> None:
    """2 rows, 5 keys: they see 4 and 5. Equal keys, so the outputs are the averages."""
    out, lse = causal_attention(
        column(1, 1), column(0, 0, 0, 0, 0), column(4, 0, 0, 0, 16), softmax_scale=1.0
    )
    assert lse.exp().flatten().tolist() == pytest.approx([4.0, 5.0], abs=1e-13)
    assert out.flatten().tolist() == pytest.approx([1.0, 4.0], abs=1e-14)


def test_B077_more_rows_than_keys() -> None:
    """5 rows, 2 keys: three rows come before the first key and see nothing."""
    out, lse = causal_attention(
        column(1, 1, 1, 1, 1), column(0, 0), column(6, 2), softmax_scale=1.0
    )
    assert torch.equal(bits(out[:3]), bits(torch.zeros(3, 1, 1, dtype=torch.float64)))
    assert lse.flatten().tolist()[:3] == [-math.inf] * 3
    assert out.flatten().tolist()[3:] == [6.0, 4.0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=["fp64", "fp32"]
)
def test_against_the_oracle(shape: dict, dtype: torch.dtype, limit: float) -> None:
    q, k, v = random_qkv(**shape, dtype=dtype)
    result = causal_attention(q, k, v, softmax_scale=0.35)
    assert result.out.dtype == result.lse.dtype == dtype
    assert_agrees(result, causal_oracle(q, k, v, 0.35), rel_l2=limit)


@pytest.mark.parametrize("lens", [[0, 3, 9], [9, 9, 9], [0, 0, 0], [1, 0, 5]])
def test_visible_lens_of_the_callers_choice(lens: list[int]) -> None:
    q, k, v = random_qkv(3, 9)
    visible = torch.arange(9) < torch.tensor(lens)[:, None]
    expected = oracle_attention(q, k, v, visible, softmax_scale=0.35)
    for dtype in (torch.int32, torch.int64):
        result = causal_attention(
            q, k, v, softmax_scale=0.35, visible_lens=torch.tensor(lens, dtype=dtype)
        )
        assert_agrees(result, expected, rel_l2=1e-14)


def test_B151_the_future_does_not_matter() -> None:
    """Whatever stands behind a row's own position, the row keeps its bits."""
    q, k, v = random_qkv(6, 6)
    before = causal_attention(q, k, v, softmax_scale=0.35)
    for position in range(6):
        k2, v2 = k.clone(), v.clone()
        k2[position + 1 :], v2[position + 1 :] = 1e6, -1e6
        after = causal_attention(q, k2, v2, softmax_scale=0.35)
        assert torch.equal(after.out[: position + 1], before.out[: position + 1])
        assert torch.equal(after.lse[: position + 1], before.lse[: position + 1])


def test_bad_lengths_are_named() -> None:
    q, k, v = random_qkv(3, 5)
    for wrong in (
        [1, 2, 3],
        torch.tensor([1, 2]),
        torch.tensor([[1, 2, 3]]),
        torch.tensor([1, 2, 6]),
        torch.tensor([-1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([True, True, False]),
    ):
        with pytest.raises((TypeError, ValueError), match="visible_lens"):
            raw(causal_attention)(q, k, v, softmax_scale=1.0, visible_lens=wrong)
