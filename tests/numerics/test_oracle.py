"""The oracle: against numbers by hand and against torch's own attention, then its edges."""

import math

import pytest
import torch
from tests.support import bits, random_qkv, raw

from mla_ref.numerics import oracle_attention

NAN, INF = math.nan, math.inf


def test_numbers_by_hand() -> None:
    """One query 1, keys 0 and ln 3, values (1, 0) and (5, 8), all visible.

    exp of the scores: 1 and 3, sum 4. out = 1/4 (1, 0) + 3/4 (5, 8) = (4, 6); lse = ln 4.
    """
    q = torch.ones(1, 1, 1)
    k = torch.tensor([0.0, math.log(3)], dtype=torch.float64).reshape(2, 1, 1)
    v = torch.tensor([[[1.0, 0.0]], [[5.0, 8.0]]])
    out, lse = oracle_attention(q, k, v, torch.ones(1, 2, dtype=torch.bool), softmax_scale=1.0)
    assert out.flatten().tolist() == pytest.approx([4.0, 6.0], abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)


def test_against_torch_on_an_arbitrary_mask() -> None:
    q, k, v = random_qkv(6, 9, h_q=6, h_kv=3)
    visible = torch.rand(6, 9) < 0.6
    visible[:, 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(2, dim=1).transpose(0, 1),
        v.repeat_interleave(2, dim=1).transpose(0, 1),
        attn_mask=visible,
        scale=0.7,
    ).transpose(0, 1)
    out, lse = oracle_attention(q, k, v, visible, softmax_scale=0.7)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)
    scores = torch.einsum("shd,thd->sht", q, k.repeat_interleave(2, dim=1)) * 0.7
    scores = scores.masked_fill(~visible[:, None], -INF)
    assert torch.allclose(lse, scores.exp().sum(-1).log(), rtol=0, atol=1e-13)


def test_bfloat16_inputs_are_computed_in_float64() -> None:
    q, k, v = random_qkv(3, 7, dtype=torch.bfloat16)
    visible = torch.ones(3, 7, dtype=torch.bool)
    low = oracle_attention(q, k, v, visible, softmax_scale=0.3)
    high = oracle_attention(q.double(), k.double(), v.double(), visible, softmax_scale=0.3)
    assert low.out.dtype == low.lse.dtype == torch.float64
    assert torch.equal(low.out, high.out) and torch.equal(low.lse, high.lse)


def test_rows_that_see_nothing() -> None:
    q, k, v = random_qkv(3, 4)
    visible = torch.ones(3, 4, dtype=torch.bool)
    visible[1] = False
    out, lse = oracle_attention(q, k, v, visible, softmax_scale=0.3)
    assert torch.equal(bits(out[1]), bits(torch.zeros(4, 6, dtype=torch.float64)))
    assert (lse[1] == -INF).all() and lse[::2].isfinite().all()


@pytest.mark.parametrize(("s_q", "s_kv"), [(0, 3), (2, 0), (0, 0)])
def test_no_queries_or_no_keys(s_q: int, s_kv: int) -> None:
    q, k, v = random_qkv(s_q, s_kv)
    mask = torch.ones(s_q, s_kv, dtype=torch.bool)
    out, lse = oracle_attention(q, k, v, mask, softmax_scale=0.3)
    assert out.shape == (s_q, 4, 6) and lse.shape == (s_q, 4)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_visible_is_not_touched(bad: float) -> None:
    q, k, v = random_qkv(3, 5)
    visible = torch.ones(3, 5, dtype=torch.bool)
    visible[:2, 4] = False
    clean = oracle_attention(q, k, v, visible, softmax_scale=0.3)
    v[4] = bad
    dirty = oracle_attention(q, k, v, visible, softmax_scale=0.3)
    assert torch.allclose(dirty.out[:2], clean.out[:2], rtol=0, atol=1e-15)
    assert not dirty.out[2].isfinite().any()
    assert torch.equal(dirty.lse, clean.lse)  # a value does not enter the LSE
    k[4] = bad
    dirty = oracle_attention(q, k, v, visible, softmax_scale=0.3)
    assert torch.allclose(dirty.out[:2], clean.out[:2], rtol=0, atol=1e-15)


def test_a_score_of_plus_inf_has_no_softmax() -> None:
    q = torch.ones(1, 1, 1)
    k, v = torch.tensor([0.0, INF]).reshape(2, 1, 1), torch.ones(2, 1, 1)
    out, lse = oracle_attention(q, k, v, torch.ones(1, 2, dtype=torch.bool), softmax_scale=1.0)
    assert out.isnan().all() and lse.isnan().all()


def test_bad_input_is_named() -> None:
    q, k, v = random_qkv(2, 3)
    good = {"q": q, "k": k, "v": v, "visible": torch.ones(2, 3, dtype=torch.bool)}
    for name, wrong in [
        ("q", None),
        ("q", q[0]),
        ("q", torch.ones(2, 3, 8)),  # 3 heads over 2
        ("k", torch.ones(3, 2, 7)),
        ("k", k.long()),
        ("v", torch.ones(4, 2, 6)),
        ("v", torch.ones(3, 1, 6)),
        ("v", torch.ones(3, 2, 6, device="meta")),
        ("visible", torch.ones(2, 3)),
        ("visible", torch.ones(2, 3, dtype=torch.int64)),
        ("visible", torch.ones(3, 3, dtype=torch.bool)),
        ("visible", torch.ones(2, 4, dtype=torch.bool)),
        ("visible", [[True]]),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(oracle_attention)(**(good | {name: wrong}), softmax_scale=1.0)
    for scale in (0.0, -1.0, NAN, INF, 1e-50, None, "1", True, torch.tensor(1.0)):
        with pytest.raises((TypeError, ValueError), match="softmax_scale"):
            raw(oracle_attention)(**good, softmax_scale=scale)
