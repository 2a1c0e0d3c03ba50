"""Rung 4 against rung 3: where a key lies changes nothing."""

import math
from dataclasses import replace

import pytest
import torch
from tests.support import (
    GARBAGE,
    PagedProblem,
    assert_agrees,
    assert_same_bits,
    bits,
    causal_oracle,
    lay_out,
    paged_problem,
    random_qkv,
    raw,
    tensors_of,
)

from mla_ref.attention import online_attention, paged_attention
from mla_ref.bench import TensorMemory
from mla_ref.numerics import AttentionResult

# New tokens and lengths: prefill, decode, a chunk, a verifier's rows, padded requests, one token.
RAGGED = ([7, 1, 5, 3, 0, 0, 1], [7, 9, 13, 11, 0, 6, 1])


def rung_3(q, k, v, scale) -> AttentionResult:
    return online_attention(q, k, v, softmax_scale=scale, block_size=5)


@pytest.mark.parametrize("page_size", [1, 2, 4, 53, 61, 64])
def test_against_rung_3(page_size: int) -> None:
    problem = paged_problem(*RAGGED, page_size=page_size)
    result = problem.attend()
    assert_agrees(result, problem.each(rung_3), rel_l2=1e-14)
    assert_agrees(result, problem.each(causal_oracle), rel_l2=1e-14)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 130])
def test_around_the_page_border(length: int) -> None:
    problem = paged_problem([1, length], [length, length], page_size=64, dtype=torch.float32)
    assert_agrees(problem.attend(), problem.each(rung_3), rel_l2=1e-6)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_page_as_a_tile_is_rung_3_bit_for_bit(page_size: int) -> None:
    """Same tiles, same order, same bits: only the address of a key is new."""
    problem = paged_problem([5, 1], [70, 33], page_size=page_size, dtype=torch.float32)

    def same_tiles(q, k, v, scale):
        return online_attention(q, k, v, softmax_scale=scale, block_size=page_size)

    assert_same_bits(problem.attend(), problem.each(same_tiles))


@pytest.mark.parametrize(
    "sizes",
    [
        {"h_q": 9, "h_kv": 3},
        {"h_q": 48, "h_kv": 2},
        {"h_q": 1, "h_kv": 1, "d_qk": 1, "d_v": 1},
        {"d_qk": 24, "d_v": 16},
    ],
    ids=str,
)
def test_heads_and_widths(sizes: dict) -> None:
    problem = paged_problem([3, 1], [6, 9], **sizes)
    assert_agrees(problem.attend(), problem.each(causal_oracle), rel_l2=1e-14)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_integers_of_both_widths(integers: torch.dtype) -> None:
    problem = paged_problem(*RAGGED)
    changed = {
        name: getattr(problem, name).to(integers)
        for name in ("query_start_loc", "seq_lens", "block_table")
    }
    assert_same_bits(problem.attend(**changed), problem.attend())


def test_B016_all_lengths_are_zero() -> None:
    """As when a graph is captured: no work, no error."""
    problem = paged_problem([0] * 4, [0] * 4)
    result = problem.attend()
    assert result.out.shape == (0, 4, 6) and result.lse.shape == (0, 4)


def test_no_request_at_all() -> None:
    problem = paged_problem([2], [3])
    result = problem.attend(
        q=problem.q[:0],
        query_start_loc=torch.tensor([0]),
        seq_lens=torch.empty(0, dtype=torch.int64),
        block_table=problem.block_table[:0],
    )
    assert result.out.shape == (0, 4, 6) and result.lse.shape == (0, 4)


def test_B071_padded_requests_between_real_ones() -> None:
    """Lengths 3, 0, 5, 0: 0 / 0 in the last division, then a per-tensor amax, would spoil all."""
    problem = paged_problem([3, 0, 5, 0], [3, 0, 5, 0])
    result = problem.attend()
    assert result.out.isfinite().all() and result.lse.isfinite().all()
    assert result.out.abs().amax().isfinite()
    alone = paged_problem([3], [3])
    assert torch.equal(result.out[:3], alone.attend().out)
    assert_agrees(result, problem.each(causal_oracle), rel_l2=1e-14)


def test_B017_results_are_packed() -> None:
    """1 and 3 new tokens, of at most 3 a request: four rows come back, not six."""
    problem = paged_problem([1, 3], [4, 8])
    result = problem.attend()
    assert result.out.shape == (4, 4, 6) and result.lse.shape == (4, 4)
    assert_agrees(result, problem.each(causal_oracle), rel_l2=1e-14)


def two_steps(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, cuts: list[int], page_size: int):
    """The same rows in chunks: each chunk sees the keys that exist by then."""
    outs, lses = [], []
    for start, end in zip([0, *cuts], [*cuts, len(q)], strict=True):
        problem = lay_out([q[start:end]], [k[:end]], [v[:end]], 0.3, page_size=page_size)
        out, lse = problem.attend()
        outs.append(out)
        lses.append(lse)
    return AttentionResult(torch.cat(outs), torch.cat(lses))


@pytest.mark.parametrize("cuts", [[1], [12], [22], [5, 6, 18], list(range(1, 23))], ids=str)
def test_chunks_of_a_prefill_equal_one_shot(cuts: list[int]) -> None:
    q, k, v = random_qkv(23, 23)
    whole = lay_out([q], [k], [v], 0.3, page_size=4).attend()
    assert_agrees(two_steps(k, v, q, cuts, 4), whole, rel_l2=1e-14)


def test_B078_verifier_rows_equal_single_steps() -> None:
    """6 cached tokens and 3 new ones: the mask is 3 x 9, not 3 x 3."""
    q, k, v = random_qkv(9, 9)
    problem = lay_out([q[6:]], [k], [v], 0.3, page_size=4)
    assert problem.seq_lens.tolist() == [9] and problem.q.shape[0] == 3
    at_once = problem.attend()
    single = two_steps(k, v, q, [6, 7, 8], 4)
    assert_agrees(at_once, AttentionResult(single.out[6:], single.lse[6:]), rel_l2=1e-14)


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_B089_four_rows_and_one_row_agree(num_drafts: int) -> None:
    """A verifier scores 1 + n rows at once and a decoder one: the difference is rounding only."""
    rows = 1 + num_drafts
    q, k, v = random_qkv(40, 40, dtype=torch.float32)
    start = 40 - rows
    at_once = lay_out([q[start:]], [k], [v], 0.3, page_size=16).attend()
    single = two_steps(k, v, q, list(range(start, 40)), 16)
    assert (at_once.out - single.out[start:]).abs().max() <= 1e-6
    assert torch.equal(at_once.out.argmax(-1), single.out[start:].argmax(-1))


def permuted(problem: PagedProblem, order: list[int]) -> tuple[PagedProblem, torch.Tensor]:
    """The requests in another order, and where each row of it was before."""
    starts = problem.query_start_loc.tolist()
    rows = [torch.arange(starts[r], starts[r + 1]) for r in order]
    index = torch.cat(rows)
    return (
        replace(
            problem,
            q=problem.q[index],
            query_start_loc=torch.tensor([0, *(len(r) for r in rows)]).cumsum(0),
            seq_lens=problem.seq_lens[order],
            block_table=problem.block_table[order],
        ),
        index,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_permuting_the_requests_permutes_the_bits(dtype: torch.dtype) -> None:
    problem = paged_problem(*RAGGED, dtype=dtype)
    result = problem.attend()
    other, index = permuted(problem, [3, 6, 0, 5, 2, 4, 1])
    assert_same_bits(other.attend(), AttentionResult(result.out[index], result.lse[index]))


def test_a_request_alone_has_the_same_bits() -> None:
    problem = paged_problem(*RAGGED, dtype=torch.float32)
    result = problem.attend()
    alone, index = permuted(problem, [2])
    assert_same_bits(alone.attend(), AttentionResult(result.out[index], result.lse[index]))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_B065_what_nobody_sees_is_not_touched(poison: float) -> None:
    """Page tails, pages of nobody, and the last page, which an index of -1 would mean in Python.

    The block table holds -1 past a request's end, in place of an impossible number.
    """
    problem = paged_problem(*RAGGED, dtype=torch.float32)
    clean = problem.attend()
    k_cache, v_cache = problem.k_cache.clone(), problem.v_cache.clone()
    k_cache[k_cache.isnan()], v_cache[v_cache.isnan()] = poison, poison
    table = problem.block_table.clone()
    table[table == GARBAGE] = -1
    # One page more, the last in memory.
    k_cache = torch.cat([k_cache, torch.full_like(k_cache[:1], poison)])
    v_cache = torch.cat([v_cache, torch.full_like(v_cache[:1], poison)])
    assert_same_bits(problem.attend(k_cache=k_cache, v_cache=v_cache, block_table=table), clean)


def test_B038_page_0_is_real_data() -> None:
    """An entry of nobody must not fall back to page 0: with 1e4 there nothing moves."""
    problem = paged_problem([2, 2], [9, 5], dtype=torch.float32)
    clean = problem.attend()
    in_use = set(problem.block_table.flatten().tolist())
    spare = next(page for page in range(problem.k_cache.shape[0]) if page not in in_use)
    # Swap pages so that page 0 belongs to nobody.
    table = problem.block_table.clone()
    table[problem.block_table == 0] = spare
    k_cache, v_cache = problem.k_cache.clone(), problem.v_cache.clone()
    k_cache[spare], v_cache[spare] = k_cache[0].clone(), v_cache[0].clone()
    k_cache[0], v_cache[0] = 1e4, 1e4
    assert_same_bits(problem.attend(k_cache=k_cache, v_cache=v_cache, block_table=table), clean)


@pytest.mark.parametrize("page", [-1, 99, 2**31 - 1])
def test_B040_a_page_outside_the_cache_is_an_error(page: int) -> None:
    problem = paged_problem([1, 1], [3, 9])
    table = problem.block_table.clone()
    table[1, 1] = page
    with pytest.raises(ValueError, match=rf"block_table\[1\] names page {page}"):
        problem.attend(block_table=table)


@pytest.mark.parametrize("token", [0, 4, 8])
def test_a_nan_that_is_seen_reaches_the_rows_that_see_it(token: int) -> None:
    problem = paged_problem([9, 2], [9, 6])
    page, offset = int(problem.block_table[0, token // 4]), token % 4
    k_cache = problem.k_cache.clone()
    k_cache[page, offset] = math.nan
    result = problem.attend(k_cache=k_cache)
    assert result.out[token:9].isnan().all() and result.lse[token:9].isnan().all()
    assert result.out[:token].isfinite().all() and result.out[9:].isfinite().all()


def test_B019_a_cache_that_interleaves_layers() -> None:
    problem = paged_problem(*RAGGED, dtype=torch.float32)
    layers_k = torch.full((problem.k_cache.shape[0], 3, *problem.k_cache.shape[1:]), math.nan)
    layers_v = torch.full((problem.v_cache.shape[0], 3, *problem.v_cache.shape[1:]), math.nan)
    layers_k[:, 1], layers_v[:, 1] = problem.k_cache, problem.v_cache
    assert not layers_k[:, 1].is_contiguous()
    assert_same_bits(
        problem.attend(k_cache=layers_k[:, 1], v_cache=layers_v[:, 1]), problem.attend()
    )


def test_B088_strides_of_any_kind() -> None:
    """Head-major caches, queries cut from a fused projection, a table cut from a wider one."""
    problem = paged_problem(*RAGGED, dtype=torch.float32)
    fused = torch.cat([torch.full_like(problem.q, math.nan), problem.q], dim=-1)
    wide = torch.cat([problem.block_table, torch.full_like(problem.block_table, -5)], dim=1)
    changed = {
        "q": fused[..., problem.q.shape[-1] :],
        "k_cache": problem.k_cache.transpose(1, 2).contiguous().transpose(1, 2),
        "v_cache": problem.v_cache.transpose(0, 3).contiguous().transpose(0, 3),
        "block_table": wide[:, : problem.block_table.shape[1]],
    }
    assert not any(x.is_contiguous() for x in changed.values())
    assert_agrees(problem.attend(**changed), problem.attend(), rel_l2=1e-6)


def test_B005_a_table_wider_than_needed() -> None:
    problem = paged_problem(*RAGGED)
    wide = torch.cat([problem.block_table, torch.full_like(problem.block_table, -1)], dim=1)
    assert_same_bits(problem.attend(block_table=wide), problem.attend())


def test_two_requests_may_share_pages() -> None:
    """A common prefix is stored once."""
    q, k, v = random_qkv(2, 8)
    shared = lay_out([q], [k], [v], 0.3, page_size=4)
    result = paged_attention(
        torch.cat([q, q]),
        shared.k_cache,
        shared.v_cache,
        query_start_loc=torch.tensor([0, 2, 4]),
        seq_lens=torch.tensor([8, 8]),
        block_table=shared.block_table.expand(2, -1),
        softmax_scale=0.3,
    )
    assert torch.equal(result.out[:2], result.out[2:])
    assert_agrees(AttentionResult(result.out[:2], result.lse[:2]), shared.attend(), rel_l2=1e-15)


def test_inputs_stay_as_they_are_and_bits_repeat() -> None:
    problem = paged_problem(*RAGGED, dtype=torch.bfloat16)
    before = {name: bits(x).clone() for name, x in tensors_of(problem).items()}
    first = problem.attend()
    for _ in range(3):
        assert_same_bits(problem.attend(), first)
    for name, x in tensors_of(problem).items():
        assert torch.equal(bits(x), before[name]), name


def test_no_matrix_of_all_scores() -> None:
    """128 rows and keys, 2 heads: 32,768 scores in all, 4,096 a page of 16."""
    problem = paged_problem(
        [128], [128], page_size=16, h_q=2, h_kv=1, d_qk=4, d_v=4, dtype=torch.float32
    )
    with TensorMemory() as memory:
        problem.attend()
    assert memory.largest_tensor.numel <= 128 * 16 * 2


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"q": lambda p: p.q[:-1]}, "q"),
        ({"q": lambda p: p.q[:, :3]}, "q"),
        ({"q": lambda p: p.q[..., :5]}, "q"),
        ({"q": lambda p: p.q[0]}, "q"),
        ({"q": lambda p: None}, "q"),
        ({"k_cache": lambda p: p.k_cache[:-1]}, "k_cache"),
        ({"k_cache": lambda p: p.k_cache[:, :, 0]}, "k_cache"),
        ({"v_cache": lambda p: p.v_cache[:, :2]}, "v_cache"),
        ({"v_cache": lambda p: p.v_cache.long()}, "v_cache"),
        ({"v_cache": lambda p: p.v_cache.to("meta")}, "v_cache"),
        ({"query_start_loc": lambda p: p.query_start_loc[:-1]}, "query_start_loc"),
        ({"query_start_loc": lambda p: p.query_start_loc + 1}, "query_start_loc"),
        ({"seq_lens": lambda p: -p.seq_lens}, "seq_lens"),
        ({"seq_lens": lambda p: p.seq_lens.float()}, "seq_lens"),
        ({"seq_lens": lambda p: p.seq_lens + 100}, "block_table"),
        ({"block_table": lambda p: p.block_table[:, :1]}, "block_table"),
        ({"block_table": lambda p: p.block_table[:1]}, "block_table"),
        ({"block_table": lambda p: p.block_table[0]}, "block_table"),
        ({"softmax_scale": lambda p: None}, "softmax_scale"),
        ({"softmax_scale": lambda p: math.nan}, "softmax_scale"),
        ({"softmax_scale": lambda p: 0.0}, "softmax_scale"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_input_is_named(changed: dict, name: str) -> None:
    problem = paged_problem([2, 1], [5, 7])
    names = ("q", "k_cache", "v_cache", "query_start_loc", "seq_lens", "block_table")
    good = {n: getattr(problem, n) for n in (*names, "softmax_scale")}
    with pytest.raises((TypeError, ValueError), match=name):
        raw(paged_attention)(**(good | {k: make(problem) for k, make in changed.items()}))
