"""Rung 3 against rung 2: tiles of any size, and rows whose first tiles are masked."""

import math

import pytest
import torch
from tests.support import SHAPES, assert_agrees, random_qkv, raw

from mla_ref.attention import OnlineSoftmax, online_attention, vectorised_attention
from mla_ref.attention.masking import grouped
from mla_ref.bench import TensorMemory
from mla_ref.numerics import AttentionResult, merge, oracle_attention


def rung_2(q, k, v, scale, lens=None) -> AttentionResult:
    out, lse = vectorised_attention(
        q[None],
        k[None],
        v[None],
        softmax_scale=scale,
        visible_lens=None if lens is None else lens[None],
    )
    return AttentionResult(out[0], lse[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=["fp64", "fp32"]
)
def test_against_rung_2(shape: dict, dtype: torch.dtype, limit: float) -> None:
    q, k, v = random_qkv(**shape, dtype=dtype)
    result = online_attention(q, k, v, softmax_scale=0.35, block_size=4)
    assert result.out.dtype == result.lse.dtype == dtype
    assert_agrees(result, rung_2(q, k, v, 0.35), rel_l2=limit)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 32, 33, 34, 64, 10**9])
def test_any_tile_size(block_size: int) -> None:
    """33 keys: tiles that divide them, that leave a rest, and one that is larger than all."""
    q, k, v = random_qkv(20, 33)
    result = online_attention(q, k, v, softmax_scale=0.35, block_size=block_size)
    assert_agrees(result, rung_2(q, k, v, 0.35), rel_l2=1e-14)


def test_visible_lens_at_and_around_the_tile_borders() -> None:
    q, k, v = random_qkv(8, 12)
    lens = torch.tensor([0, 1, 3, 4, 5, 8, 11, 12])
    result = online_attention(q, k, v, softmax_scale=0.35, block_size=4, visible_lens=lens)
    assert_agrees(result, rung_2(q, k, v, 0.35, lens), rel_l2=1e-14)


def feed(q, k, v, visible, scale: float, block_size: int) -> AttentionResult:
    """Any mask through the state, tile by tile."""
    queries = grouped(q * scale, k.shape[1])
    state = OnlineSoftmax.empty(queries, v.shape[-1])
    for first in range(0, k.shape[0], block_size):
        tile = slice(first, first + block_size)
        state = state.add(queries, k[tile], v[tile], visible[:, tile])
    return state.result()


VISIBLE_OF_34 = {
    "16 masked, then 3 and 5 of the next tile": [16 + 3, 16 + 5],
    "32 masked, then one": [32],
    "every second": list(range(1, 34, 2)),
    "the last alone": [33],
    "the first alone": [0],
    "only the middle tile": [20],
    "none": [],
}


@pytest.mark.parametrize("seen", VISIBLE_OF_34.values(), ids=VISIBLE_OF_34.keys())
@pytest.mark.parametrize("block_size", [16, 1, 5])
def test_B063_a_first_tile_that_is_masked_whole(seen: list[int], block_size: int) -> None:
    """The running maximum is still -inf there, and -inf minus -inf is NaN for ever after.

    Trailing padding alone does not show it: the maximum is finite by then.
    """
    q, k, v = random_qkv(2, 34)
    visible = torch.zeros(2, 34, dtype=torch.bool)
    visible[0, seen] = True
    visible[1] = True  # a row beside it that sees everything
    result = feed(q, k, v, visible, 0.35, block_size)
    assert_agrees(result, oracle_attention(q, k, v, visible, softmax_scale=0.35), rel_l2=1e-14)


@pytest.mark.parametrize("heads", [1, 8, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_B064_a_row_without_a_key(heads: int, dtype: torch.dtype) -> None:
    """Output exactly +0 and LSE -inf, beside a row that sees one."""
    q, k, v = random_qkv(2, 6, h_q=heads, h_kv=1, dtype=dtype)
    out, lse = online_attention(
        q, k, -v.abs(), softmax_scale=0.35, block_size=2, visible_lens=torch.tensor([0, 1])
    )
    assert (out[0] == 0).all() and not out[0].signbit().any()
    assert (lse[0] == -math.inf).all()
    assert torch.equal(out[1], -v[0].abs().expand(heads, 6))


def test_scores_that_grow_and_shrink_by_thousands() -> None:
    """Tiles far above or below all before them: nothing overflows, nothing is lost."""
    for scores in ([0.0, 1e4, -1e4, 1e4 + 1, 5e3, 1e4], [1e4, 0.0, 1e4 - 1]):
        k = torch.tensor(scores).reshape(-1, 1, 1)
        v = torch.arange(len(scores), dtype=torch.float32).reshape(-1, 1, 1)
        q = torch.ones(1, 1, 1)
        out, lse = online_attention(q, k, v, softmax_scale=1.0, block_size=1)
        exact = torch.tensor(scores, dtype=torch.float64)
        assert out.item() == pytest.approx(float(exact.softmax(0) @ v.flatten().double()), rel=1e-6)
        assert lse.item() == pytest.approx(float(exact.logsumexp(0)), rel=1e-7)


@pytest.mark.parametrize("cut", [0, 1, 4, 9, 10])
def test_two_states_merge_to_one(cut: int) -> None:
    """What the state holds is what a merge needs: any cut of the keys gives the whole."""
    q, k, v = random_qkv(3, 10)
    visible = torch.arange(10) < torch.tensor([0, 4, 10])[:, None]
    left = feed(q, k[:cut], v[:cut], visible[:, :cut], 0.35, 3)
    right = feed(q, k[cut:], v[cut:], visible[:, cut:], 0.35, 3)
    whole = feed(q, k, v, visible, 0.35, 3)
    assert_agrees(merge(*left, *right), whole, rel_l2=1e-14)


def test_a_state_is_never_changed() -> None:
    q, k, v = random_qkv(2, 4)
    queries = grouped(q, 2)
    visible = torch.ones(2, 4, dtype=torch.bool)
    first = OnlineSoftmax.empty(queries, 6).add(queries, k, v, visible)
    m, l, acc = first.m.clone(), first.l.clone(), first.acc.clone()  # noqa: E741
    first.add(queries, 3 * k, v, visible)
    assert torch.equal(first.m, m) and torch.equal(first.l, l) and torch.equal(first.acc, acc)


def test_no_matrix_of_all_scores() -> None:
    """256 rows and keys, 2 heads: rung 2 holds 131,072 scores, a tile of 16 keys 8,192."""
    q, k, v = random_qkv(256, 256, h_q=2, h_kv=1, d_qk=4, d_v=4, dtype=torch.float32)
    with TensorMemory() as tiled:
        online_attention(q, k, v, softmax_scale=0.35, block_size=16)
    with TensorMemory() as whole:
        vectorised_attention(q[None], k[None], v[None], softmax_scale=0.35)
    assert whole.largest_tensor.numel >= 256 * 256 * 2
    assert tiled.largest_tensor.numel <= 256 * 16 * 2
    assert tiled.peak_bytes < whole.peak_bytes / 8


def test_the_tile_size_is_checked() -> None:
    q, k, v = random_qkv(2, 3)
    for wrong in (0, -1, 2.0, None, True):
        with pytest.raises((TypeError, ValueError), match="block_size"):
            raw(online_attention)(q, k, v, softmax_scale=1.0, block_size=wrong)
