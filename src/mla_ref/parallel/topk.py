"""Top-k over a request whose index keys lie on several ranks.

Each rank proposes the k best of its own keys. The k best of all proposals are the k best of all
keys: a key that is not among its rank's k best has k better ones there already. Ties go to the
lower *global* position, as on one rank, so the lists are the same numbers in the same order on
every rank (aiter#4415, vllm#46145).

Where the index keys are replicated (132 bytes a token beside 656) each rank selects for itself, by
`select_positions`, and there is nothing to merge.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.cache.ownership import require_owner
from mla_ref.checks import require_count, require_float, require_integer, require_size
from mla_ref.indexer import select_topk
from mla_ref.parallel.exchange import gather_over_ranks, require_group
from mla_ref.parallel.ownership import global_positions, local_lens


class Candidates(NamedTuple):
    """A rank's proposals.

    Attributes:
        scores: Best first; -inf where the rank has fewer than k keys.
        positions: In the whole request; -1 where the rank has fewer than k keys.
    """

    scores: Float[Tensor, "*world rows k"]
    positions: Int[Tensor, "*world rows k"]


def rank_candidates(
    scores: Float[Tensor, "rows s_local"],
    visible_lens: Int[Tensor, " rows"],
    k: int,
    *,
    rank: int,
    world: int,
    interleave: int = 1,
) -> Candidates:
    """The k best keys of a rank's share, by their positions in the whole request.

    Args:
        scores: Index scores of the rank's keys in the order of their local positions. Keys that a
            row may not see yet may be among them.
        visible_lens: Causal length of each row in the whole request.
        k: Proposals a row; as many as the final list is wide.
        rank: This rank.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.
    """
    require_integer("visible_lens", visible_lens, "rows")
    share = {"rank": rank, "world": world, "interleave": interleave}
    local = select_topk(scores, local_lens(visible_lens, **share), k)
    if scores.shape[1] == 0:
        return Candidates(scores.new_full((scores.shape[0], k), -torch.inf), local)
    found = scores.gather(1, torch.where(local < 0, 0, local).long())
    return Candidates(found.masked_fill(local < 0, -torch.inf), global_positions(local, **share))


def merge_candidates(candidates: Candidates, k: int) -> Int[Tensor, "rows k"]:
    """The k best of all ranks' proposals, best first, the lower position first among equals.

    Args:
        candidates: `scores` and `positions` [world, rows, proposals]; in any order of the ranks.
        k: Width of the result.

    Returns:
        int32 positions in the whole request, the list of `select_topk` over all keys; -1 where a
        row has fewer than k. A proposal of NaN or -inf is never selected, nor one whose position
        does not fit int32.
    """
    require_count("k", k)
    scores = require_float("candidates.scores", candidates.scores, "world rows k")
    positions = require_integer("candidates.positions", candidates.positions, "world rows k")
    for dim, size in enumerate(scores.shape):
        require_size("candidates.positions", positions, dim, size, "as candidates.scores")
    scores, positions = (x.movedim(0, 1).flatten(1) for x in (scores, positions))
    # A position beyond int32 would come round as another one.
    none = (positions < 0) | (positions > torch.iinfo(torch.int32).max)
    scores = scores.masked_fill(scores.isnan() | none, -torch.inf)
    positions = positions.to(torch.int32).masked_fill(scores == -torch.inf, -1)
    # By position, then by score; the second sort is stable, so equal scores keep the first order.
    by_position = torch.sort(positions, dim=1, stable=True)
    scores = scores.gather(1, by_position.indices)
    by_score = torch.sort(scores, dim=1, descending=True, stable=True)
    best = by_position.values.gather(1, by_score.indices[:, :k])
    return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1)


def select_topk_on_rank(
    scores: Float[Tensor, "rows s_local"],
    visible_lens: Int[Tensor, " rows"],
    k: int,
    *,
    rank: int,
    world: int,
    interleave: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Int[Tensor, "rows k"]:
    """Top-k over the whole request: to be called by all ranks of a group.

    A rank receives (world - 1) * rows * k scores and positions: 8 bytes a proposal, 0.5 MB for 4
    rows with 2,048 keys each on 8 ranks.

    Args:
        scores: As in `rank_candidates`.
        visible_lens: As in `rank_candidates`.
        k: Width of the list.
        rank: This process's rank in `group`.
        world: Number of ranks in `group`.
        interleave: Neighbouring positions that stay together.
        group: Who exchanges; None for the default group.

    Returns:
        int32 positions in the whole request, the same list on all ranks.
    """
    require_group(group, rank=rank, world=world, interleave=interleave)
    mine = rank_candidates(scores, visible_lens, k, rank=rank, world=world, interleave=interleave)
    everyone = (gather_over_ranks(part, world=world, group=group) for part in mine)
    return merge_candidates(Candidates(*everyone), k)


def simulate_topk(
    scores: Float[Tensor, "rows s_kv"],
    visible_lens: Int[Tensor, " rows"],
    k: int,
    *,
    world: int,
    interleave: int = 1,
) -> Int[Tensor, "rows k"]:
    """`select_topk_on_rank` for all ranks in one process: the list of `select_topk`.

    Args:
        scores: Index scores of all keys of one request.
        visible_lens: Causal length of each row.
        k: Width of the list.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.
    """
    require_float("scores", scores, "rows s_kv")
    require_owner(0, world, interleave)
    whole = torch.tensor([scores.shape[1]], device=scores.device)
    found = []
    for rank in range(world):
        share = {"rank": rank, "world": world, "interleave": interleave}
        local = torch.arange(int(local_lens(whole, **share)), device=scores.device)
        mine = scores[:, global_positions(local, **share)]
        found.append(rank_candidates(mine, visible_lens, k, **share))
    return merge_candidates(Candidates(*map(torch.stack, zip(*found, strict=True))), k)
