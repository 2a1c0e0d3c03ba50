"""Rung 13: context parallelism. Each rank attends to the keys that it holds; the LSE merges them.

    global list of a row ──> own positions ──> slots of this rank ──> partial (out, lse)
    partials of all ranks ──> merge ──> sink, once

Checked against rungs 10 and 11 on one rank. A rank that holds no listed key of a row contributes
(0, -inf), which changes nothing. The lists are global, so they must be the same on all ranks: see
`select_topk_on_rank`.

Two ways to finish. With heads "all" every rank gathers every partial and ends with the same result.
With heads "own" the ranks share the heads too, as tensor parallelism does: queries of all heads are
gathered, and each rank sends away what it has found for the heads of others. A rank then receives
`world` times fewer partials: with GLM-5.2's 64 heads, 4 verifier rows and 8 ranks 0.46 MB
(and 0.26 MB of bfloat16 queries) in place of 3.7 MB.
"""

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.backends import KINDS, Plan
from mla_ref.cache.ownership import require_owner
from mla_ref.checks import describe, require_choice, require_float, require_integer, require_size
from mla_ref.indexer import own_positions, positions_to_slots
from mla_ref.numerics import AttentionResult, apply_sink, lse_dtype, merge_many
from mla_ref.parallel.exchange import exchange_heads, gather_over_ranks, require_group
from mla_ref.parallel.slots import require_page_holds_chunks

HEADS = ("all", "own")


def attend_to_share(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    positions: Int[Tensor, "rows k"],
    visible_lens: Int[Tensor, " rows"] | None,
    *,
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_blocks"],
    plan: Plan,
    softmax_scale: float,
    rank: int,
    world: int,
    interleave: int = 1,
    counts: Int[Tensor, " rows"] | None = None,
    route: str = "decode",
) -> AttentionResult:
    """One rank's part: each row over those of its keys that the rank holds.

    Nothing is read back to the host and nothing is sent.

    Args:
        q: Absorbed queries, the same on all ranks.
        kv_cache: The rank's pages.
        positions: Keys of each row by their position in the whole request; -1 anywhere is none. A
            position listed twice counts twice.
        visible_lens: Causal length of each row in the whole request; entries at and beyond it are
            dropped. A verifier's rows have one each. None is refused where there are several
            ranks: no share tells how much of the request a row may see (tokenspeed#364).
        request_of_row: Which request each row belongs to.
        block_table: The rank's page of each virtual block, see `slots_on_rank`.
        plan: Of a backend, from `plan_for_ranks`.
        softmax_scale: The un-absorbed scale.
        rank: This rank.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.
        counts: Entries of each row of `positions` that count; None for all.
        route: "decode" (rung 10) or "extend" (rung 9).

    Returns:
        A partial result in float32 (float64 for float64), without the sink; (0, -inf) for a row of
        which the rank holds no key.
    """
    require_owner(rank, world, interleave)
    require_choice("route", route, KINDS)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must have nbytes, decode, extend, got {describe(plan)}")
    if not isinstance(kv_cache, Tensor) or kv_cache.ndim != 3:
        raise ValueError(
            f"kv_cache must have the shape [pages, page_size, row], got {describe(kv_cache)}"
        )
    page_size = kv_cache.shape[1]
    require_page_holds_chunks(page_size, interleave)
    require_float("q", q, "rows h d_row")
    require_integer("positions", positions, "rows k")
    require_size("positions", positions, 0, q.shape[0], "one list a row of q")
    if visible_lens is None and world > 1:
        raise ValueError(
            f"visible_lens must hold the global causal length of each row where world is {world}: "
            "no rank can tell it from its own share, got None"
        )
    listed = _countable(positions, visible_lens, counts)
    own, own_counts = own_positions(listed, rank=rank, world=world, interleave=interleave)
    slots = positions_to_slots(own, request_of_row, block_table, page_size)
    attend = plan.decode if route == "decode" else plan.extend
    return attend(
        q,
        kv_cache,
        slots,
        own_counts,
        softmax_scale=softmax_scale,
        out_dtype=lse_dtype(q.dtype),
    )


def attend_on_rank(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    positions: Int[Tensor, "rows k"],
    visible_lens: Int[Tensor, " rows"] | None,
    *,
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_blocks"],
    plan: Plan,
    softmax_scale: float,
    rank: int,
    world: int,
    interleave: int = 1,
    counts: Int[Tensor, " rows"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: dist.ProcessGroup | None = None,
    heads: str = "all",
    route: str = "decode",
) -> AttentionResult:
    """Attention over the whole request: to be called by all ranks of a group.

    Args:
        q: Absorbed queries: all heads, the same on every rank, or this rank's own.
        kv_cache: As in `attend_to_share`.
        positions: As in `attend_to_share`.
        visible_lens: As in `attend_to_share`.
        request_of_row: As in `attend_to_share`.
        block_table: As in `attend_to_share`.
        plan: As in `attend_to_share`; for the heads of all ranks.
        softmax_scale: As in `attend_to_share`.
        rank: This process's rank in `group`.
        world: Number of ranks in `group`.
        interleave: As in `attend_to_share`.
        counts: As in `attend_to_share`.
        sink: Score of an extra key of value 0 for each head of `q`; applied once, to the merged
            result.
        group: Who exchanges; None for the default group. With one rank nothing is exchanged.
        heads: "all" or "own": which heads `q`, `sink` and the result hold. Own heads are as many on
            each rank; rank r has the r-th part of all.
        route: As in `attend_to_share`.

    Returns:
        `out` in q's dtype and `lse`. All heads are bit for bit the same on all ranks; own heads are
        a part of them, bit for bit.
    """
    require_group(group, rank=rank, world=world, interleave=interleave)
    require_choice("heads", heads, HEADS)
    require_float("q", q, "rows h d_row")
    queries = q
    if heads == "own":
        queries = gather_over_ranks(q, world=world, group=group).movedim(0, 1).flatten(1, 2)
    share = attend_to_share(
        queries,
        kv_cache,
        positions,
        visible_lens,
        request_of_row=request_of_row,
        block_table=block_table,
        plan=plan,
        softmax_scale=softmax_scale,
        rank=rank,
        world=world,
        interleave=interleave,
        counts=counts,
        route=route,
    )
    exchange = gather_over_ranks if heads == "all" else exchange_heads
    outs = exchange(share.out, world=world, group=group)
    lses = exchange(share.lse, world=world, group=group)
    return merge_shares(outs, lses, sink, q.dtype)


def merge_shares(
    outs: Float[Tensor, "world rows h d_c"],
    lses: Float[Tensor, "world rows h"],
    sink: Float[Tensor, " h"] | None,
    out_dtype: torch.dtype,
) -> AttentionResult:
    """The ranks' partial results merged in the order of the ranks, then the sink, then rounding."""
    merged = merge_many(outs, lses, validate=False)
    out = merged.out if sink is None else apply_sink(merged, sink)
    return AttentionResult(out.to(out_dtype), merged.lse)


def _countable(
    positions: Int[Tensor, "rows k"],
    visible_lens: Int[Tensor, " rows"] | None,
    counts: Int[Tensor, " rows"] | None,
) -> Int[Tensor, "rows k"]:
    """The lists with -1 for entries beyond a row's causal length or its count."""
    dropped = positions < 0
    if visible_lens is not None:
        require_integer("visible_lens", visible_lens, "rows")
        require_size("visible_lens", visible_lens, 0, positions.shape[0], "one length a row")
        dropped = dropped | (positions >= visible_lens[:, None])
    if counts is not None:
        require_integer("counts", counts, "rows")
        require_size("counts", counts, 0, positions.shape[0], "one count a row of positions")
        entry = torch.arange(positions.shape[1], device=positions.device)
        dropped = dropped | (entry >= counts[:, None])
    return torch.where(dropped, -1, positions)
