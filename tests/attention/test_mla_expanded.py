"""Rung 5 against rung 4: keys and values rebuilt from the latent row."""

import math

import pytest
import torch
from tests.support import (
    MLAProblem,
    assert_agrees,
    mla_problem,
    raw,
    scatter_pages,
)
from torch.utils.flop_counter import FlopCounterMode

from mla_ref.attention import expand_kv, mla_expanded_attention, paged_attention
from mla_ref.layers import preset
from mla_ref.numerics import AttentionResult

RAGGED = ([7, 1, 5, 3, 0, 0, 1], [7, 9, 13, 11, 0, 6, 1])


def rung_4(problem: MLAProblem) -> AttentionResult:
    """Expand every request's rows first, cache keys and values for each head, attend over pages."""
    page_size = problem.kv_cache.shape[1]
    expanded = [expand_kv(rows, problem.w_uk, problem.w_uv) for rows in problem.rows]
    k_cache, block_table = scatter_pages([k for k, _ in expanded], page_size)
    v_cache, _ = scatter_pages([v for _, v in expanded], page_size)
    return paged_attention(
        torch.cat([problem.q_nope, problem.q_pe], dim=-1),
        k_cache,
        v_cache,
        query_start_loc=problem.query_start_loc,
        seq_lens=problem.seq_lens,
        block_table=block_table,
        softmax_scale=problem.softmax_scale,
    )


def test_rows_worked_out_by_hand() -> None:
    """One token: latent (1, 2), rotary key 9. W_UK = (3 4), W_UV = (5 6; 7 8) for its one head.

    k = (3 * 1 + 4 * 2, 9) = (11, 9); v = (5 * 1 + 6 * 2, 7 * 1 + 8 * 2) = (17, 23).
    With q = (2; 0.5): logit 2 * 11 + 0.5 * 9 = 26.5. One key, so out = v and lse = the logit.
    """
    rows = torch.tensor([[1.0, 2.0, 9.0]])
    w_uk, w_uv = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[5.0, 6.0], [7.0, 8.0]]])
    k, v = expand_kv(rows, w_uk, w_uv)
    assert k.tolist() == [[[11.0, 9.0]]] and v.tolist() == [[[17.0, 23.0]]]
    out, lse = mla_expanded_attention(
        torch.tensor([[[2.0]]]),
        torch.tensor([[[0.5]]]),
        rows[None],
        w_uk,
        w_uv,
        query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([1]),
        block_table=torch.tensor([[0]]),
        softmax_scale=1.0,
    )
    assert out.tolist() == [[[17.0, 23.0]]] and lse.tolist() == [[26.5]]


def test_the_rotary_key_is_shared_by_all_heads() -> None:
    rows = torch.randn(5, 16)
    k, v = expand_kv(rows, torch.randn(3, 8, 12), torch.randn(3, 6, 12))
    assert k.shape == (5, 3, 12) and v.shape == (5, 3, 6)
    for head in range(3):
        assert torch.equal(k[:, head, 8:], rows[:, 12:])


@pytest.mark.parametrize("page_size", [1, 2, 4, 64])
def test_against_rung_4(page_size: int) -> None:
    problem = mla_problem(*RAGGED, page_size=page_size)
    result = problem.attend("expanded")
    assert_agrees(result, rung_4(problem), rel_l2=1e-14)
    assert_agrees(result, problem.oracle(), rel_l2=1e-13)


def test_one_nan_in_a_seen_latent() -> None:
    """Row 2 of request 0 is NaN: rows from position 2 on are NaN, the others do not change."""
    problem = mla_problem([5, 2], [5, 4])
    clean = problem.attend("expanded")
    cache = problem.kv_cache.clone()
    cache[int(problem.block_table[0, 0]), 2, 0] = math.nan
    result = problem.attend("expanded", kv_cache=cache)
    assert result.out[2:5].isnan().all() and result.lse[2:5].isnan().all()
    for rows in (slice(0, 2), slice(5, 7)):
        assert torch.allclose(result.out[rows], clean.out[rows], rtol=0, atol=1e-15)


def test_what_a_query_costs() -> None:
    """2 h (d_n + d_r + d_v) operations a pair, 2 h d_c (d_n + d_v) a cached row: counted."""
    h, d_n, d_r, d_c, d_v, s_q, s_kv = 4, 8, 4, 12, 6, 3, 10
    problem = mla_problem([s_q], [s_kv], heads=h, d_n=d_n, d_r=d_r, d_c=d_c, d_v=d_v)
    with FlopCounterMode(display=False) as counter:
        problem.attend("expanded")
    pairs = 2 * h * (d_n + d_r + d_v) * s_q * s_kv  # masked pairs are computed, too
    assert counter.get_total_flops() == pairs + 2 * h * d_c * (d_n + d_v) * s_kv


def test_B151_what_a_token_costs_in_the_cache() -> None:
    """The 71 of the docstring: 128 heads * (192 + 128) numbers against 576."""
    v3 = preset("v3.2")
    per_token = v3.num_heads * (v3.qk_head_dim + v3.v_head_dim)
    assert (per_token, v3.kv_row_dim, per_token // v3.kv_row_dim) == (40_960, 576, 71)


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "kv_cache", "w_uk", "w_uv"])
def test_float64_in_any_argument_is_float64_inside(name: str) -> None:
    """One wide argument is not rounded to the width of the others."""
    narrow = mla_problem([2, 1], [6, 3], dtype=torch.float32)
    wide = getattr(narrow, name).double()
    for form in ("expanded", "absorbed"):
        result = narrow.attend(form, **{name: wide})
        assert result.lse.dtype == torch.float64
        assert_agrees(
            AttentionResult(narrow.oracle().out.to(result.out.dtype), result.lse),
            AttentionResult(result.out, narrow.oracle().lse),
            rel_l2=1e-7,
            lse_abs=1e-13,
        )


def test_building_blocks_name_bad_input() -> None:
    rows, w_uk, w_uv = torch.randn(5, 16), torch.randn(3, 8, 12), torch.randn(3, 6, 12)
    for arguments, name in [
        ((None, w_uk, w_uv), "kv_rows"),
        ((rows[0], w_uk, w_uv), "kv_rows"),
        ((rows[:, :11], w_uk, w_uv), "w_uk"),
        ((rows.double(), w_uk, w_uv), "kv_rows"),
        ((rows, w_uk[0], w_uv), "w_uk"),
        ((rows, w_uk, w_uv[:2]), "w_uv"),
        ((rows, w_uk, w_uv[..., :11]), "w_uv"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(expand_kv)(*arguments)
