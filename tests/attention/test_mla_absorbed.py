"""Rung 6 against rung 5: the same numbers, without ever rebuilding a key or a value."""

import math

import pytest
import torch
from tests.support import (
    GARBAGE,
    assert_agrees,
    assert_same_bits,
    bits,
    mla_problem,
    raw,
    tensors_of,
)
from torch.utils.flop_counter import FlopCounterMode

from mla_ref.attention import (
    absorb_query,
    latent_attention,
    mla_absorbed_attention,
    mla_expanded_attention,
    project_values,
)
from mla_ref.bench import TensorMemory
from mla_ref.layers import preset
from mla_ref.numerics import AttentionResult, precision_rule

RAGGED = ([7, 1, 5, 3, 0, 0, 1], [7, 9, 13, 11, 0, 6, 1])


def test_numbers_by_hand() -> None:
    """Latent (1, 2), rotary key 9; W_UK = (3 4), q = (2; 0.5), W_UV = (5 6; 7 8).

    q~ = W_UK^T q_nope = (6, 8); logit 6 * 1 + 8 * 2 + 0.5 * 9 = 26.5, as in rung 5. One key, so the
    latent output is (1, 2), and W_UV makes (17, 23) of it.
    """
    w_uk, w_uv = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[5.0, 6.0], [7.0, 8.0]]])
    q = absorb_query(torch.tensor([[[2.0]]]), torch.tensor([[[0.5]]]), w_uk)
    assert q.tolist() == [[[6.0, 8.0, 0.5]]]
    out, lse = latent_attention(
        q,
        torch.tensor([[[1.0, 2.0, 9.0]]]),
        query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([1]),
        block_table=torch.tensor([[0]]),
        softmax_scale=1.0,
        kv_lora_rank=2,
    )
    assert out.tolist() == [[[1.0, 2.0]]] and lse.tolist() == [[26.5]]
    assert project_values(out, w_uv).tolist() == [[[17.0, 23.0]]]


@pytest.mark.parametrize("page_size", [1, 2, 4, 53, 64])
def test_B150_expanded_and_absorbed_are_one(page_size: int) -> None:
    problem = mla_problem(*RAGGED, page_size=page_size)
    absorbed = problem.attend("absorbed")
    assert_agrees(absorbed, problem.attend("expanded"), rel_l2=1e-13)
    assert_agrees(absorbed, problem.oracle(), rel_l2=1e-13)


def test_B083_the_widths_of_deepseek() -> None:
    """Key 576 wide, value 512, 16 heads: equal to 1e-12 in float64."""
    problem = mla_problem([1, 3], [5, 9], heads=16, d_n=128, d_r=64, d_c=512, d_v=128, page_size=64)
    absorbed = problem.attend("absorbed")
    assert_agrees(absorbed, problem.attend("expanded"), rel_l2=1e-12)
    assert_agrees(absorbed, problem.oracle(), rel_l2=1e-12)


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_c": 16, "d_r": 8, "d_n": 5, "d_v": 3},  # key 24, value 16
        {"d_c": 1, "d_r": 2, "d_n": 1, "d_v": 1},
        {"d_c": 12, "d_r": 4, "d_n": 0, "d_v": 6},  # rotary numbers alone
        {"d_c": 13, "d_r": 0, "d_n": 7, "d_v": 5},  # none
    ],
    ids=str,
)
def test_B083_widths_that_are_no_powers_of_two(sizes: dict) -> None:
    problem = mla_problem([3, 1], [6, 9], **sizes)
    absorbed = problem.attend("absorbed")
    assert_agrees(absorbed, problem.attend("expanded"), rel_l2=1e-13)
    assert_agrees(absorbed, problem.oracle(), rel_l2=1e-13)


def test_B055_no_rotary_numbers_at_all() -> None:
    """q_pe of shape [tokens, heads, 0] is taken, and the row is the latent."""
    problem = mla_problem([2, 1], [6, 4], d_r=0)
    assert problem.q_pe.shape == (3, 4, 0)
    for form in ("expanded", "absorbed"):
        assert_agrees(problem.attend(form), problem.oracle(), rel_l2=1e-13)


@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 24, 40, 128])
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_B085_any_number_of_heads(heads: int, form: str) -> None:
    problem = mla_problem([2, 1], [5, 3], heads=heads)
    result = problem.attend(form)
    assert result.out.shape == (3, heads, 6)
    assert_agrees(result, problem.oracle(), rel_l2=1e-13)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_keeps_the_precision_rule(form: str, dtype: torch.dtype) -> None:
    """The twin rounds after every step; a reference must not err more than twice as much."""
    problem = mla_problem([4, 1], [24, 40], heads=8, d_n=16, d_r=8, d_c=32, d_v=16, dtype=dtype)
    result = problem.attend(form)
    assert (result.out.dtype, result.lse.dtype) == (dtype, torch.float32)
    twins = []
    starts = problem.query_start_loc.tolist()
    for request, rows in enumerate(problem.rows):
        new = slice(starts[request], starts[request + 1])
        latent, k_pe = rows[:, :32], rows[:, 32:]
        q = absorb_query(problem.q_nope[new], problem.q_pe[new], problem.w_uk)
        k = torch.cat([latent, k_pe], dim=-1)
        scores = torch.einsum("shc,tc->sht", q, k) * problem.softmax_scale
        late = torch.arange(len(rows)) > torch.arange(len(q))[:, None] + len(rows) - len(q)
        weights = scores.masked_fill(late[:, None], -math.inf).softmax(-1)
        twins.append(project_values(torch.einsum("sht,tc->shc", weights, latent), problem.w_uv))
    verdict = precision_rule(result.out, problem.oracle().out, torch.cat(twins))
    assert verdict.passed, verdict


def test_B079_the_scale_is_the_callers() -> None:
    """(d_c + d_r)^-0.5 is what a kernel would take from the row; the results differ plainly."""
    problem = mla_problem([1], [9])
    right = problem.attend("absorbed")
    from_the_row = problem.attend("absorbed", softmax_scale=16**-0.5)
    assert (right.lse - from_the_row.lse).abs().max() > 0.01
    assert_agrees(right, problem.oracle(), rel_l2=1e-13)
    # One key takes all the weight whatever the scale: a test of one token shows nothing.
    single = mla_problem([1], [1])
    assert torch.equal(
        single.attend("absorbed").out, single.attend("absorbed", softmax_scale=16**-0.5).out
    )


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_B078_verifier_rows_equal_single_steps(form: str) -> None:
    """6 cached tokens, 3 new ones, at once and one after the other."""
    problem = mla_problem([3], [9])
    at_once = problem.attend(form)
    for row in range(3):
        single = problem.attend(
            form,
            q_nope=problem.q_nope[row : row + 1],
            q_pe=problem.q_pe[row : row + 1],
            query_start_loc=torch.tensor([0, 1]),
            seq_lens=torch.tensor([7 + row]),
        )
        assert_agrees(
            single, AttentionResult(at_once.out[row : row + 1], at_once.lse[row : row + 1]),
            rel_l2=1e-14,
        )  # fmt: skip


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_B065_what_nobody_sees_is_not_touched(form: str, poison: float) -> None:
    problem = mla_problem(*RAGGED, dtype=torch.float32)
    cache = problem.kv_cache.clone()
    cache[cache.isnan()] = poison
    cache = torch.cat([cache, torch.full_like(cache[:1], poison)])
    table = problem.block_table.clone()
    table[table == GARBAGE] = -1
    assert_same_bits(problem.attend(form, kv_cache=cache, block_table=table), problem.attend(form))


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_B016_all_lengths_are_zero(form: str) -> None:
    result = mla_problem([0, 0], [0, 0]).attend(form)
    assert result.out.shape == (0, 4, 6) and result.lse.shape == (0, 4)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_B019_a_cache_that_interleaves_layers(form: str) -> None:
    problem = mla_problem(*RAGGED, dtype=torch.float32)
    layers = torch.full((problem.kv_cache.shape[0], 2, *problem.kv_cache.shape[1:]), math.nan)
    layers[:, 1] = problem.kv_cache
    assert not layers[:, 1].is_contiguous()
    assert_agrees(problem.attend(form, kv_cache=layers[:, 1]), problem.attend(form), rel_l2=1e-6)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_B088_queries_and_weights_of_any_stride(form: str) -> None:
    """Parts of one fused projection, as a model has them: [W_UK; W_UV] of each head."""
    problem = mla_problem(*RAGGED)
    q = torch.cat([problem.q_nope, problem.q_pe], dim=-1)
    kv_b = torch.cat([problem.w_uk, problem.w_uv], dim=1)
    changed = {
        "q_nope": q[..., :8],
        "q_pe": q[..., 8:],
        "w_uk": kv_b[:, :8],
        "w_uv": kv_b[:, 8:].transpose(1, 2).contiguous().transpose(1, 2),
    }
    assert not any(x.is_contiguous() for x in changed.values())
    assert_agrees(problem.attend(form, **changed), problem.attend(form), rel_l2=1e-14)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_inputs_stay_as_they_are_and_bits_repeat(form: str) -> None:
    problem = mla_problem(*RAGGED, dtype=torch.bfloat16)
    before = {name: bits(x).clone() for name, x in tensors_of(problem).items()}
    first = problem.attend(form)
    for _ in range(3):
        assert_same_bits(problem.attend(form), first)
    for name, x in tensors_of(problem).items():
        assert torch.equal(bits(x), before[name]), name


@pytest.mark.thorough
def test_what_a_query_costs() -> None:
    """2 h (2 d_c + d_r) operations a pair: counted, then the 3.4 of the docstring."""
    h, d_n, d_r, d_c, d_v, s_q, s_kv = 4, 8, 4, 12, 6, 3, 12
    problem = mla_problem([s_q], [s_kv], heads=h, d_n=d_n, d_r=d_r, d_c=d_c, d_v=d_v)
    with FlopCounterMode(display=False) as counter:
        problem.attend("absorbed")
    pairs = 2 * h * (2 * d_c + d_r) * s_q * s_kv
    assert counter.get_total_flops() == pairs + 2 * h * d_c * (d_n + d_v) * s_q
    v3 = preset("v3.2")
    absorbed = 2 * v3.kv_lora_rank + v3.qk_rope_head_dim
    expanded = v3.qk_head_dim + v3.v_head_dim
    assert (absorbed, expanded) == (1088, 320)
    assert absorbed / expanded == pytest.approx(3.4)
    assert v3.kv_row_dim * torch.bfloat16.itemsize == 1152


def test_no_matrix_of_all_scores_and_no_expanded_key() -> None:
    """96 rows and keys, 2 heads: 18,432 scores, or 96 * 2 * 20 expanded keys for the other form."""
    problem = mla_problem(
        [96], [96], heads=2, d_n=40, d_r=4, d_c=4, d_v=4, page_size=8, dtype=torch.float32
    )
    with TensorMemory() as memory:
        problem.attend("absorbed")
    largest_query = 96 * 2 * (4 + 4)
    assert memory.largest_tensor.numel <= max(largest_query, 96 * 2 * 8)
    with TensorMemory() as expanded:
        problem.attend("expanded")
    assert expanded.largest_tensor.numel >= 96 * 96 * 2


@pytest.mark.parametrize("function", [mla_expanded_attention, mla_absorbed_attention])
def test_bad_input_is_named(function) -> None:
    problem = mla_problem([2, 1], [5, 7])
    good = {n: getattr(problem, n) for n in problem.__dataclass_fields__ if n != "rows"}
    p = problem
    for name, wrong in [
        ("q_nope", None),
        ("q_nope", p.q_nope[:2]),
        ("q_nope", p.q_nope[:, :3]),
        ("q_nope", p.q_nope[..., :7]),
        ("q_nope", p.q_nope.long()),
        ("q_pe", p.q_pe[:2]),
        ("q_pe", p.q_pe[:, :3]),
        ("q_pe", p.q_pe[..., :2]),
        ("q_pe", p.q_pe.to("meta")),
        ("kv_cache", p.kv_cache[0]),
        ("kv_cache", p.kv_cache[..., :15]),
        ("kv_cache", p.kv_cache[..., :11]),
        ("kv_cache", None),
        ("w_uk", p.w_uk[:2]),
        ("w_uk", p.w_uk[..., :5]),
        ("w_uk", p.w_uk[0]),
        ("w_uv", p.w_uv[:2]),
        ("w_uv", p.w_uv[..., :5]),
        ("w_uv", p.w_uv.to("meta")),
        ("query_start_loc", p.query_start_loc[:2]),
        ("query_start_loc", p.query_start_loc + 1),
        ("seq_lens", -p.seq_lens),
        ("seq_lens", p.seq_lens.float()),
        ("block_table", p.block_table[:, :1]),
        ("block_table", torch.full_like(p.block_table, -1)),
        ("block_table", torch.full_like(p.block_table, 99)),
        ("softmax_scale", 0.0),
        ("softmax_scale", math.nan),
        ("softmax_scale", None),
    ]:
        # A shape that does not fit may be reported at its partner.
        partner = {"kv_cache": "w_uk|q_pe", "w_uk": "w_uv|q_nope"}.get(name, name)
        with pytest.raises((TypeError, ValueError), match=f"{name}|{partner}"):
            raw(function)(**(good | {name: wrong}))


def test_a_page_of_another_request_is_named() -> None:
    problem = mla_problem([1, 1], [3, 9])
    table = problem.block_table.clone()
    table[1, 2] = 99
    for form in ("expanded", "absorbed"):
        with pytest.raises(ValueError, match=r"block_table\[1\] names page 99"):
            problem.attend(form, block_table=table)


def test_building_blocks_name_bad_input() -> None:
    q_nope, q_pe, w_uk = torch.randn(3, 4, 8), torch.randn(3, 4, 2), torch.randn(4, 8, 12)
    for arguments, name in [
        ((None, q_pe, w_uk), "q_nope"),
        ((q_nope, q_pe[:2], w_uk), "q_pe"),
        ((q_nope, q_pe[:, :3], w_uk), "q_pe"),
        ((q_nope, q_pe, w_uk[:3]), "w_uk"),
        ((q_nope, q_pe, w_uk[:, :7]), "w_uk"),
        ((q_nope, q_pe, w_uk.double()), "w_uk"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(absorb_query)(*arguments)
    latent, w_uv = torch.randn(3, 4, 12), torch.randn(4, 6, 12)
    for arguments, name in [
        ((None, w_uv), "latent_out"),
        ((latent, w_uv[:3]), "w_uv"),
        ((latent, w_uv[..., :11]), "w_uv"),
        ((latent, w_uv.double()), "w_uv"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            raw(project_values)(*arguments)
    problem = mla_problem([1], [3])
    names = ("kv_cache", "query_start_loc", "seq_lens", "block_table", "softmax_scale")
    good = {n: getattr(problem, n) for n in names}
    q = torch.randn(1, 4, 16, dtype=torch.float64)
    for rank in (0, -1, 17, 12.0, None):
        with pytest.raises((TypeError, ValueError), match="kv_lora_rank"):
            raw(latent_attention)(q, **good, kv_lora_rank=rank)
    with pytest.raises(ValueError, match="kv_cache"):
        raw(latent_attention)(q[..., :15], **good, kv_lora_rank=12)
