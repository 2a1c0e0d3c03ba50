"""All ranks in one process, one after the other: the same code without anything being sent.

For lessons, the ladder and exhaustive tests. Each simulated rank has a cache of its own, in which
slots that it does not use hold NaN.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.backends import KINDS, AttnSpec, Backend, TorchBackend
from mla_ref.cache.ownership import require_owner
from mla_ref.checks import (
    require_choice,
    require_count,
    require_float,
    require_integer,
    require_same_device,
    require_size,
)
from mla_ref.numerics import AttentionResult
from mla_ref.parallel.attend import attend_to_share, merge_shares
from mla_ref.parallel.plan import plan_for_ranks
from mla_ref.parallel.slots import require_rows, share_of_rows


def simulate_ranks(
    q: Float[Tensor, "rows h d_row"],
    kv_rows: Sequence[Shaped[Tensor, "_ row"]],
    positions: Int[Tensor, "rows k"],
    visible_lens: Int[Tensor, " rows"],
    *,
    softmax_scale: float,
    world: int,
    interleave: int = 1,
    request_of_row: Int[Tensor, " rows"] | None = None,
    kv_lora_rank: int = 512,
    page_size: int = 64,
    counts: Int[Tensor, " rows"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
    backend: Backend | None = None,
    route: str = "decode",
) -> AttentionResult:
    """Attention with the rows of each request dealt to `world` ranks: what one rank would give.

    Args:
        q: Absorbed queries.
        kv_rows: The cached rows of each request in the order of their positions: numbers in a
            float dtype, or 656 bytes from `pack_fp8_rows`.
        positions: Keys of each row by their position in its request, as an indexer gives them.
        visible_lens: Causal length of each row; entries at and beyond it are dropped.
        softmax_scale: The un-absorbed scale.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.
        request_of_row: Which request each row belongs to; may be left out where there is one.
        kv_lora_rank: Numbers of a row that are its value.
        page_size: Tokens a page of each rank's cache; a multiple of `interleave`.
        counts: Entries of each row of `positions` that count; None for all.
        sink: Score of an extra key of value 0 for each head, applied once, after the merge.
        backend: Who computes the shares; the torch backend if None.
        route: "decode" (rung 10) or "extend" (rung 9).

    Returns:
        `out` in q's dtype and natural-log `lse`.
    """
    shares = simulate_shares(
        q,
        kv_rows,
        positions,
        visible_lens,
        softmax_scale=softmax_scale,
        world=world,
        interleave=interleave,
        request_of_row=request_of_row,
        kv_lora_rank=kv_lora_rank,
        page_size=page_size,
        counts=counts,
        backend=backend,
        route=route,
    )
    outs, lses = (torch.stack(parts) for parts in zip(*shares, strict=True))
    return merge_shares(outs, lses, sink, q.dtype)


def simulate_shares(
    q: Float[Tensor, "rows h d_row"],
    kv_rows: Sequence[Shaped[Tensor, "_ row"]],
    positions: Int[Tensor, "rows k"],
    visible_lens: Int[Tensor, " rows"],
    *,
    softmax_scale: float,
    world: int,
    interleave: int = 1,
    request_of_row: Int[Tensor, " rows"] | None = None,
    kv_lora_rank: int = 512,
    page_size: int = 64,
    counts: Int[Tensor, " rows"] | None = None,
    backend: Backend | None = None,
    route: str = "decode",
) -> list[AttentionResult]:
    """The partial result of each rank, before anything is merged. Arguments as `simulate_ranks`."""
    require_float("q", q, "rows h d_row")
    require_integer("positions", positions, "rows k")
    require_owner(0, world, interleave)
    require_choice("route", route, KINDS)
    request_of_row = _requests(q, kv_rows, request_of_row)
    require_same_device(
        {"q": q, "kv_rows": kv_rows[0], "positions": positions, "request_of_row": request_of_row}
    )
    if require_count("kv_lora_rank", kv_lora_rank, at_least=1) > q.shape[2]:
        raise ValueError(
            f"kv_lora_rank must lie in 1 .. {q.shape[2]}, the row of q, got {kv_lora_rank}"
        )
    spec = AttnSpec(
        num_heads=q.shape[1],
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=q.shape[2] - kv_lora_rank,
        topk=max(positions.shape[1], 1),
        page_size=page_size,
        cache_format="fp8" if kv_rows[0].dtype == torch.uint8 else "bf16",
        q_dtype=q.dtype,
    )
    # One plan for all: a plan holds scratch between kernels of a run, nothing from run to run.
    plan = plan_for_ranks(
        TorchBackend() if backend is None else backend,
        spec,
        max_rows=max(q.shape[0], 1),
        max_requests=len(kv_rows),
        device=q.device,
        kinds=(route,),
    )
    shares = []
    for rank in range(world):
        cache, block_table = share_of_rows(
            kv_rows, page_size, rank=rank, world=world, interleave=interleave
        )
        share = attend_to_share(
            q,
            cache,
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
        shares.append(AttentionResult(share.out.clone(), share.lse.clone()))
    return shares


def _requests(
    q: Tensor, kv_rows: Sequence[Tensor], request_of_row: Tensor | None
) -> Int[Tensor, " rows"]:
    """Which request each row of q belongs to, checked."""
    require_rows(kv_rows)
    if request_of_row is None:
        if len(kv_rows) > 1:
            raise ValueError(
                f"request_of_row must say which of the {len(kv_rows)} requests each row belongs "
                "to, got None"
            )
        return torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    require_integer("request_of_row", request_of_row, "rows")
    require_size("request_of_row", request_of_row, 0, q.shape[0], "one request a row of q")
    return request_of_row
