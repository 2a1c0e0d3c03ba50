"""Rung 13 without processes: shares of all ranks, merged, are what one rank computes."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from tests.parallel.problems import CASES, TOLERANCE, VERIFIER, RankProblem, rank_problem
from tests.support import NothingReadBack, assert_agrees, assert_same_bits, concatenate, raw

from mla_ref.backends import TorchBackend
from mla_ref.indexer import own_positions
from mla_ref.numerics import AttentionResult, apply_sink, merge_many
from mla_ref.parallel import (
    attend_on_rank,
    attend_to_share,
    local_lens,
    plan_for_ranks,
    share_of_rows,
    simulate_ranks,
    simulate_shares,
)


def agree(actual: AttentionResult, expected: AttentionResult, problem: RankProblem) -> None:
    """Outputs to the rounding of their dtype; an LSE is float32 at least."""
    limit = TOLERANCE[problem.q.dtype]
    assert_agrees(actual, expected, rel_l2=limit, lse_abs=min(1e-5, 10 * limit))


# The shape checks take three quarters of the time of small tensors; other tests here have them on.
@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_any_number_of_ranks_equals_one(name: str, interleave: int) -> None:
    problem = rank_problem(**CASES[name])
    expected = problem.one_rank()
    agree(expected, problem.oracle(), problem)
    for world, route in ((1, "decode"), (2, "extend"), (3, "decode"), (4, "decode"), (8, "extend")):
        got = problem.simulate(world, interleave, route=route)
        assert got.out.dtype == problem.q.dtype
        agree(got, expected, problem)


@pytest.mark.usefixtures("plain_calls")
def test_a_random_batch_and_every_world_and_interleave() -> None:
    generator = torch.Generator().manual_seed(1)
    for seed in range(6):
        new = torch.randint(1, 6, (3,), generator=generator)
        seq = new + torch.randint(0, 90, (3,), generator=generator)
        problem = rank_problem(
            seq.tolist(), new.tolist(), k=23, future=True, counts=True, sink=True, seed=seed
        )
        expected = problem.oracle()
        for world, interleave in ((1 + seed % 8, 1), (3, 1 << seed % 5), (7, 8), (16, 4)):
            agree(problem.simulate(world, interleave), expected, problem)


def test_one_rank_alone_gives_the_same_bits() -> None:
    """A merge of one part changes nothing; only the -1 have moved to the end of the lists."""
    problem = rank_problem(**VERIFIER)
    compact, _ = own_positions(problem.listed, rank=0, world=1)
    expected = dataclasses.replace(problem, positions=compact).one_rank()
    assert_same_bits(problem.simulate(1), expected)


def shares_of(problem: RankProblem, world: int, **changed: Any) -> list[AttentionResult]:
    arguments: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "world": world,
        "request_of_row": problem.request_of_row,
        "kv_lora_rank": problem.kv_lora_rank,
        "page_size": 16,
    }
    return simulate_shares(
        problem.q,
        problem.kv_rows,
        problem.positions,
        problem.visible_lens,
        **(arguments | changed),
    )


def test_B116_a_rank_without_a_token_changes_nothing() -> None:
    """One token on four ranks: three of them see nothing, and the first decides, bit for bit."""
    problem = rank_problem([1], [1])
    shares = shares_of(problem, 4)
    for share in shares[1:]:
        assert share.out.eq(0).all() and share.lse.eq(-math.inf).all()
    assert_same_bits(problem.simulate(4), problem.simulate(1))
    agree(problem.simulate(4), problem.one_rank(), problem)
    # The owner is whoever holds position 0; with two tokens in one chunk rank 1 has nothing.
    shares = shares_of(rank_problem([2], [1]), 2, interleave=2)
    assert shares[1].lse.eq(-math.inf).all() and shares[0].lse.isfinite().all()


@pytest.mark.parametrize("world", [1, 4])
def test_B116_a_request_of_length_zero(world: int) -> None:
    problem = rank_problem([0, 3], [0, 1], padded_rows=2, sink=True)
    got = problem.simulate(world)
    assert got.out[1:].eq(0).all() and got.lse[1:].eq(-math.inf).all()
    agree(got, problem.one_rank(), problem)
    empty = rank_problem([0], [0], padded_rows=2).simulate(world)
    assert empty.out.eq(0).all() and empty.lse.eq(-math.inf).all()


def test_shares_are_wide_and_without_the_sink() -> None:
    """Partial results are rounded once, after the merge; the sink comes once, after it too."""
    problem = rank_problem(**VERIFIER, dtype=torch.bfloat16, sink=True)
    shares = shares_of(problem, 4)
    assert all(share.out.dtype == share.lse.dtype == torch.float32 for share in shares)
    merged = merge_many(*(torch.stack(parts) for parts in zip(*shares, strict=True)))
    got = problem.simulate(4)
    assert torch.equal(got.lse, merged.lse)
    assert torch.equal(got.out, apply_sink(merged, problem.sink).bfloat16())
    # What goes wrong otherwise: a sink on every rank takes its weight four times.
    often = [AttentionResult(apply_sink(share, problem.sink), share.lse) for share in shares]
    wrong = merge_many(*(torch.stack(parts) for parts in zip(*often, strict=True)))
    assert (wrong.out - got.out.float()).abs().max() > 0.01


def test_ranks_hold_their_own_rows_only() -> None:
    """The shares together are the rows, each once; everything else is NaN."""
    rows = (
        torch.arange(41.0)[:, None].repeat(1, 3),
        torch.arange(100.0, 107)[:, None].repeat(1, 3),
    )
    held = []
    for rank in range(4):
        cache, table = share_of_rows(rows, 8, rank=rank, world=4, interleave=2)
        assert table.tolist() == [[0, 1], [2, -1]]
        values = cache[..., 0].flatten()
        lens = local_lens(torch.tensor([41, 7]), rank=rank, world=4, interleave=2)
        assert values.isnan().logical_not().sum() == lens.sum()
        held += values[values.isfinite()].tolist()
    assert sorted(held) == [*range(41), *range(100, 107)]


def test_B115_no_share_tells_what_a_row_may_see() -> None:
    problem = rank_problem(**VERIFIER)
    plan = plan_for_ranks(
        TorchBackend(), problem.spec, max_rows=12, max_requests=3, device=problem.q.device
    )
    cache, table = share_of_rows(problem.kv_rows, 16, rank=0, world=1)
    arguments: dict[str, Any] = {
        "request_of_row": problem.request_of_row,
        "block_table": table,
        "plan": plan,
        "softmax_scale": 0.2,
    }
    call = (problem.q, cache, problem.positions, None)
    # Alone, a rank takes the lists as they are.
    alone = raw(attend_to_share)(*call, rank=0, world=1, **arguments)
    agree(alone, problem.one_rank(), problem)
    with pytest.raises(ValueError, match="visible_lens must hold the global causal length"):
        raw(attend_to_share)(*call, rank=0, world=2, **arguments)
    with pytest.raises(ValueError, match="page_size must be a multiple of interleave"):
        raw(attend_to_share)(*call, rank=0, world=1, interleave=3, **arguments)
    for rank in (-1, 2, 7):
        with pytest.raises(ValueError, match="rank must"):
            raw(attend_to_share)(*call, rank=rank, world=2, **arguments)
        with pytest.raises(ValueError, match="rank must"):
            raw(attend_on_rank)(*call, rank=rank, world=2, **arguments)


def test_B142_speculative_rows_through_the_public_function() -> None:
    """Four rows of one request with one list of all keys: each sees its own length, as alone."""
    for length in (4, 9, 34):
        problem = rank_problem([length], [4], k=length)
        everything = torch.arange(length, dtype=torch.int32)
        steps = [
            simulate_ranks(
                problem.q[row : row + 1],
                (problem.kv_rows[0][:visible],),
                everything[None, :visible],
                torch.tensor([visible]),
                softmax_scale=problem.softmax_scale,
                world=1,
                kv_lora_rank=problem.kv_lora_rank,
            )
            for row, visible in enumerate(problem.visible_lens.tolist())
        ]
        for world, interleave in ((2, 1), (4, 2), (8, 1)):
            got = problem.simulate(world, interleave, positions=everything.expand(4, length))
            assert_agrees(got, concatenate(steps), rel_l2=1e-6)


def test_a_share_reads_nothing_back() -> None:
    problem = rank_problem(**VERIFIER, counts=True)
    plan = plan_for_ranks(
        TorchBackend(), problem.spec, max_rows=12, max_requests=3, device=problem.q.device
    )
    cache, table = share_of_rows(problem.kv_rows, 16, rank=1, world=2)
    with NothingReadBack():
        attend_to_share(
            problem.q,
            cache,
            problem.positions,
            problem.visible_lens,
            request_of_row=problem.request_of_row,
            block_table=table,
            plan=plan,
            softmax_scale=0.2,
            rank=1,
            world=2,
            counts=problem.counts,
        )


def test_rows_of_a_batch_may_change_places() -> None:
    problem = rank_problem(**VERIFIER, sink=True)
    order = torch.randperm(len(problem.q))
    got = problem.simulate(4)
    turned = problem.simulate(
        4,
        q=problem.q[order],
        positions=problem.positions[order],
        visible_lens=problem.visible_lens[order],
        request_of_row=problem.request_of_row[order],
    )
    assert_same_bits(turned, AttentionResult(got.out[order], got.lse[order]))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"world": 0}, "world"),
        ({"interleave": 3}, "page_size must be a multiple of interleave"),
        ({"interleave": 0}, "interleave"),
        ({"route": "prefill"}, "route"),
        ({"request_of_row": None}, "request_of_row"),
        ({"request_of_row": torch.zeros(2, dtype=torch.int64)}, "request_of_row"),
        ({"visible_lens": torch.zeros(2, dtype=torch.int64)}, "visible_lens"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, "counts"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, "positions"),
        ({"kv_lora_rank": 25}, "kv_lora_rank"),
        ({"kv_rows": ()}, "kv_rows"),
        ({"kv_rows": torch.zeros(3, 24)}, "kv_rows must be a sequence"),
        ({"kv_rows": (torch.zeros(3, 24), None, torch.zeros(3, 24))}, r"kv_rows\[1\]"),
        ({"kv_rows": (torch.zeros(3, 24), torch.zeros(24))}, r"kv_rows\[1\]"),
        ({"kv_rows": (torch.zeros(3, 24), torch.zeros(3, 24).double())}, r"kv_rows\[1\]"),
        ({"kv_rows": (torch.zeros(3, 24), torch.zeros(3, 23))}, r"kv_rows\[1\]"),
        ({"kv_rows": (torch.zeros(3, 24, dtype=torch.int64),) * 3}, "kv_rows"),
    ],
)
def test_bad_input_is_named(changed: dict[str, Any], name: str) -> None:
    problem = rank_problem(**VERIFIER)
    arguments = {"world": 2, "interleave": 1} | changed
    with pytest.raises((ValueError, TypeError), match=name):
        raw(problem.simulate)(**arguments)


def test_a_group_must_be_there_and_fit() -> None:
    problem = rank_problem(**VERIFIER)
    plan = plan_for_ranks(
        TorchBackend(), problem.spec, max_rows=12, max_requests=3, device=problem.q.device
    )
    cache, table = share_of_rows(problem.kv_rows, 16, rank=0, world=2)
    with pytest.raises(ValueError, match=r"group must be .*init_process_group"):
        attend_on_rank(
            problem.q,
            cache,
            problem.positions,
            problem.visible_lens,
            request_of_row=problem.request_of_row,
            block_table=table,
            plan=plan,
            softmax_scale=0.2,
            rank=0,
            world=2,
        )
