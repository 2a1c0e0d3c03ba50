"""Rung 2 against rung 1: all rows at once, and a batch in front."""

import pytest
import torch
from tests.support import SHAPES, assert_agrees, assert_same_bits, random_qkv, raw

from mla_ref.attention import causal_attention, vectorised_attention
from mla_ref.numerics import AttentionResult


def batched(count: int, s_q: int, s_kv: int, **sizes) -> tuple[torch.Tensor, ...]:
    """q, k and v of `count` sequences of one length."""
    each = [random_qkv(s_q, s_kv, seed=seed, **sizes) for seed in range(count)]
    return tuple(torch.stack(part) for part in zip(*each, strict=True))


def one_by_one(q, k, v, scale, lens=None) -> AttentionResult:
    """Rung 1 on each sequence."""
    results = [
        causal_attention(
            q[i], k[i], v[i], softmax_scale=scale, visible_lens=None if lens is None else lens[i]
        )
        for i in range(len(q))
    ]
    return AttentionResult(
        torch.stack([r.out for r in results]), torch.stack([r.lse for r in results])
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=["fp64", "fp32"]
)
def test_against_rung_1(shape: dict, dtype: torch.dtype, limit: float) -> None:
    q, k, v = batched(2, **shape, dtype=dtype)
    result = vectorised_attention(q, k, v, softmax_scale=0.35)
    assert result.out.dtype == result.lse.dtype == dtype
    assert_agrees(result, one_by_one(q, k, v, 0.35), rel_l2=limit)


def test_no_sequence_at_all() -> None:
    q, k, v = (x[:0] for x in batched(1, 3, 5))
    result = vectorised_attention(q, k, v, softmax_scale=0.35)
    assert result.out.shape == (0, 3, 4, 6) and result.lse.shape == (0, 3, 4)


def test_each_row_of_each_sequence_has_its_length() -> None:
    q, k, v = batched(3, 4, 9)
    lens = torch.tensor([[0, 9, 1, 5], [3, 3, 3, 3], [9, 8, 0, 0]])
    result = vectorised_attention(q, k, v, softmax_scale=0.35, visible_lens=lens)
    assert_agrees(result, one_by_one(q, k, v, 0.35, lens), rel_l2=1e-14)


def test_B077_an_unmasked_row_sees_everything_and_an_empty_one_nothing() -> None:
    """-1e6 in place of -inf would make the empty row the mean of all values."""
    q, k, v = batched(1, 2, 5)
    result = vectorised_attention(q, k, v, softmax_scale=0.35, visible_lens=torch.tensor([[0, 5]]))
    assert (result.out[0, 0] == 0).all()
    assert (result.lse[0, 0] == -torch.inf).all()
    assert result.lse[0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permuting_the_batch_permutes_the_bits(dtype: torch.dtype) -> None:
    q, k, v = batched(5, 3, 17, dtype=dtype)
    order = torch.tensor([3, 0, 4, 1, 2])
    result = vectorised_attention(q, k, v, softmax_scale=0.35)
    permuted = vectorised_attention(q[order], k[order], v[order], softmax_scale=0.35)
    assert_same_bits(permuted, AttentionResult(result.out[order], result.lse[order]))


def test_a_neighbours_nan_stays_with_the_neighbour() -> None:
    q, k, v = batched(2, 3, 6)
    clean = vectorised_attention(q, k, v, softmax_scale=0.35)
    k[1, 2], v[1, 4] = torch.nan, torch.inf
    dirty = vectorised_attention(q, k, v, softmax_scale=0.35)
    assert_agrees(
        AttentionResult(dirty.out[0], dirty.lse[0]),
        AttentionResult(clean.out[0], clean.lse[0]),
        rel_l2=1e-15,
    )
    assert not dirty.out[1].isfinite().all()


def test_the_batch_is_checked() -> None:
    q, k, v = batched(2, 3, 5)
    for changed, name in [
        ({"k": k[:1], "v": v[:1]}, "k"),
        ({"q": q[0]}, "q"),
        ({"visible_lens": torch.tensor([1, 2, 3])}, "visible_lens"),
        ({"visible_lens": torch.tensor([[1, 2, 3]])}, "visible_lens"),
    ]:
        arguments = {"q": q, "k": k, "v": v, "softmax_scale": 1.0} | changed
        with pytest.raises((TypeError, ValueError), match=name):
            raw(vectorised_attention)(**arguments)
