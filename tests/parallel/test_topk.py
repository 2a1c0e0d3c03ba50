"""Top-k over ranks is top-k over the whole, as a list and not only as a set."""

import math

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.cache import new_index_cache, read_index_keys, write_index_keys
from mla_ref.indexer import index_scores, select_topk, select_topk_chunked
from mla_ref.parallel import (
    Candidates,
    global_positions,
    local_lens,
    merge_candidates,
    rank_candidates,
    select_topk_on_rank,
    simulate_topk,
    slots_on_rank,
)


def scores_with_ties(rows: int, keys: int, seed: int = 0) -> Tensor:
    """Few different values, as a ReLU makes them, some NaN, some -inf; zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (rows, keys), generator=generator).float()
    scores[torch.rand(rows, keys, generator=generator) < 0.1] = -0.0
    scores[torch.rand(rows, keys, generator=generator) < 0.1] = math.nan
    scores[torch.rand(rows, keys, generator=generator) < 0.1] = -math.inf
    return scores


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("interleave", [1, 2, 16])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_B118_top_k_of_a_sharded_cache(world: int, interleave: int) -> None:
    """Ties across ranks, ranks with fewer than k keys and with none, rows that see nothing."""
    for seed, keys in enumerate((0, 1, 3, 7, 40, 100)):
        visible = torch.tensor([keys, 0, max(keys - 1, 0), keys // 2, min(keys, 1)])
        for scores in (scores_with_ties(5, keys, seed), torch.randn(5, keys)):
            for k in (0, 1, 5, 60):
                expected = select_topk(scores, visible, k)
                got = simulate_topk(scores, visible, k, world=world, interleave=interleave)
                assert got.dtype == torch.int32 and torch.equal(got, expected)


def test_B118_ties_go_to_the_lower_global_position() -> None:
    """All scores equal: the list is 0, 1, 2, .. and not the first keys of rank 0."""
    scores = torch.zeros(1, 12)
    for world, interleave in ((2, 1), (4, 1), (3, 2)):
        got = simulate_topk(scores, torch.tensor([12]), 5, world=world, interleave=interleave)
        assert got.tolist() == [[0, 1, 2, 3, 4]]
    # The bug: merging by rank and not by position.
    found = [
        rank_candidates(scores[:, rank::4], torch.tensor([12]), 5, rank=rank, world=4)
        for rank in range(4)
    ]
    values, positions = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    by_rank = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :5]
    assert positions.gather(1, by_rank).tolist() == [[0, 4, 8, 1, 5]]


def test_a_rank_proposes_what_its_rows_may_see() -> None:
    """Rows of lengths 5 and 6 on 2 ranks; a key of 100 lies just beyond the first."""
    scores = torch.tensor([[0.0, 1, 2, 3, 4, 100]]).expand(2, 6)
    visible = torch.tensor([5, 6])
    got = rank_candidates(scores[:, 1::2], visible, 2, rank=1, world=2)
    assert got.positions.tolist() == [[3, 1], [5, 3]]
    assert got.scores.tolist() == [[3, 1], [100, 3]]
    got = rank_candidates(scores[:, 1::2], visible, 4, rank=1, world=2)
    assert got.positions.tolist() == [[3, 1, -1, -1], [5, 3, 1, -1]]
    assert got.scores[0].tolist() == [3, 1, -math.inf, -math.inf]


def test_B117_replicated_indexers_agree_whatever_their_order_of_work() -> None:
    """Keys scored in chunks of any size give one list: same numbers, same order."""
    scores = scores_with_ties(4, 70)
    visible = torch.tensor([70, 69, 68, 10])
    expected = select_topk(scores, visible, 16)
    for chunk in (1, 7, 16, 64, 100):
        got = select_topk_chunked(lambda f, n: scores[:, f : f + n], 70, visible, 16, chunk=chunk)
        assert torch.equal(got, expected)


def test_B117_proposals_in_any_order_of_the_ranks() -> None:
    """A rank that hears the others in another order must not list another order."""
    scores, visible = scores_with_ties(4, 70), torch.tensor([70, 69, 68, 10])
    found = [
        rank_candidates(scores[:, rank::4], visible, 16, rank=rank, world=4) for rank in range(4)
    ]
    expected = select_topk(scores, visible, 16)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        parts = zip(*(found[rank] for rank in order), strict=True)
        assert torch.equal(merge_candidates(Candidates(*map(torch.stack, parts)), 16), expected)


def test_proposals_that_are_none() -> None:
    """Whatever stands beside -1, NaN or -inf is not selected; a list wider than all is padded."""
    scores = torch.tensor([[[1.0, math.nan, -math.inf]], [[2.0, 9.0, -1.0]]])
    positions = torch.tensor([[[4, 2, 0]], [[3, -1, 5]]])
    assert merge_candidates(Candidates(scores, positions), 2).tolist() == [[3, 4]]
    assert merge_candidates(Candidates(scores, positions), 8).tolist() == [[3, 4, 5] + [-1] * 5]
    # The best one lies beyond int32, where it would come round as position 7.
    positions = torch.tensor([[[2**32 + 7, 2, 0]], [[3, -1, 2**31 - 1]]])
    found = merge_candidates(Candidates(scores, positions), 4)
    assert found.dtype == torch.int32 and found.tolist() == [[3, 2**31 - 1, -1, -1]]


def test_a_sharded_cache_of_index_keys() -> None:
    """Keys as served, FP8 in pages of each rank; every rank scores its own, then they merge."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(50, 128, generator=generator)
    q, weights = torch.randn(4, 2, 128, generator=generator), torch.rand(4, 2, generator=generator)
    visible, world, page = torch.tensor([47, 48, 49, 50]), 4, 4
    whole = new_index_cache(13, page)
    write_index_keys(whole, keys, torch.arange(50))
    everything = read_index_keys(whole, torch.arange(13), 0, 50)
    expected = select_topk(index_scores(q, everything, weights), visible, 12)
    table = torch.tensor([[2, 0, 3, 1]])
    found = []
    for rank in range(world):
        share = {"rank": rank, "world": world, "interleave": 2}
        cache = new_index_cache(4, page)
        slots = slots_on_rank(torch.arange(50)[None], torch.tensor([0]), table, page, **share)
        write_index_keys(cache, keys, slots[0])
        n = int(local_lens(torch.tensor([50]), **share))
        mine = index_scores(q, read_index_keys(cache, table[0], 0, n), weights)
        assert torch.equal(
            read_index_keys(cache, table[0], 0, n),
            everything[global_positions(torch.arange(n), **share)],
        )
        found.append(rank_candidates(mine, visible, 12, **share))
    got = merge_candidates(Candidates(*map(torch.stack, zip(*found, strict=True))), 12)
    assert torch.equal(got, expected)


def test_alone_a_rank_needs_no_group() -> None:
    scores, visible = scores_with_ties(4, 30), torch.tensor([30, 29, 28, 3])
    got = select_topk_on_rank(scores, visible, 8, rank=0, world=1)
    assert torch.equal(got, select_topk(scores, visible, 8))
    with pytest.raises(ValueError, match="group must be a process group of world 2"):
        raw(select_topk_on_rank)(scores, visible, 8, rank=0, world=2)


def test_bad_input_is_named() -> None:
    scores, positions = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int32)
    for wrong, k, name in (
        (Candidates(scores, positions[:1]), 2, "candidates.positions"),
        (Candidates(scores[0], positions[0]), 2, "candidates.scores"),
        (Candidates(scores, scores), 2, "candidates.positions"),
        (Candidates(scores, positions), -1, "k must be at least 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            raw(merge_candidates)(wrong, k)
    visible = torch.tensor([3])
    with pytest.raises((ValueError, TypeError), match="visible_lens"):
        raw(rank_candidates)(torch.zeros(1, 3), None, 2, rank=0, world=2)
    with pytest.raises(ValueError, match="rank must"):
        raw(rank_candidates)(torch.zeros(1, 3), visible, 2, rank=2, world=2)
    with pytest.raises((ValueError, TypeError), match="scores"):
        raw(simulate_topk)(torch.zeros(3), visible, 2, world=2)
