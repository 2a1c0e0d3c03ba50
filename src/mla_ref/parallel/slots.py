"""Where a rank keeps its tokens: virtual blocks of page_size * world tokens.

Entry b of a request's block table stands for positions b * page_size * world and following, of
which each rank keeps page_size, in the page of its own cache that the entry names. So one block
table may serve all ranks, and each rank's cache is a plain paged cache of its local positions.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mla_ref.batching import Step
from mla_ref.cache import pages_needed, write_rows
from mla_ref.cache.ownership import local_positions, owner_of, require_owner
from mla_ref.checks import describe, require_count, require_integer, require_tensor
from mla_ref.indexer import positions_to_slots
from mla_ref.parallel.ownership import global_positions, local_lens


def slots_on_rank(
    positions: Int[Tensor, "rows k"],
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_blocks"],
    page_size: int,
    *,
    rank: int,
    world: int,
    interleave: int = 1,
) -> Int[Tensor, "rows k"]:
    """The slot of each position in a rank's cache; -1 where another rank holds it.

    Args:
        positions: Positions in the row's request; -1 is none.
        request_of_row: Which request each row belongs to.
        block_table: The rank's page of each virtual block of each request.
        page_size: Tokens a page of the rank's cache; a multiple of `interleave`.
        rank: This rank.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.

    Returns:
        As `positions_to_slots`: block_table[p // (page_size * world)] * page_size + offset, in the
        dtype of the block table.
    """
    require_integer("positions", positions, "rows k")
    require_owner(rank, world, interleave)
    require_page_holds_chunks(page_size, interleave)
    owned = owner_of(positions, world=world, interleave=interleave) == rank
    local = local_positions(positions, world=world, interleave=interleave)
    return positions_to_slots(torch.where(owned, local, -1), request_of_row, block_table, page_size)


def slot_mapping_on_rank(
    step: Step,
    block_table: Int[Tensor, "b max_blocks"],
    *,
    rank: int,
    world: int,
    interleave: int = 1,
) -> Int[Tensor, " padded_tokens"]:
    """Where a rank writes the step's new rows; -1 for padding and for tokens of other ranks.

    A sharded cache is written by this, a cache that every rank holds in full by
    `step.slot_mapping`. Both serve one step, which stays as it is: a replicated index cache that
    was written through the shares' slots held every world-th key (vllm-ascend#16327).

    Args:
        step: The batch, the same on all ranks. Its own block table and slots are those of a whole
            cache and are not read.
        block_table: The rank's page of each virtual block.
        rank: This rank.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.

    Returns:
        int64 slots.

    Raises:
        ValueError: The block table has no page for a token that the rank holds.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must be a Step, got {describe(step)}")
    require_integer("block_table", block_table, "b max_blocks")
    share = {"rank": rank, "world": world, "interleave": interleave}
    positions = torch.where(step.request_of_row < 0, -1, step.positions)[:, None]
    requests = step.request_of_row
    slots = slots_on_rank(positions, requests, block_table.long(), step.page_size, **share)
    owned = owner_of(positions, world=world, interleave=interleave) == rank
    lost = (owned & (slots < 0)).flatten()
    if lost.any():
        token = int(lost.to(torch.int8).argmax())
        raise ValueError(
            f"block_table {list(block_table.shape)} has no page of {step.page_size} on rank {rank} "
            f"of {world} for position {int(positions[token])} of request {int(requests[token])}"
        )
    return slots.flatten()


def share_of_rows(
    kv_rows: Sequence[Shaped[Tensor, "_ row"]],
    page_size: int,
    *,
    rank: int,
    world: int,
    interleave: int = 1,
) -> tuple[Shaped[Tensor, "pages page_size row"], Int[Tensor, "b max_blocks"]]:
    """A rank's cache of the requests, and the block table that finds their rows.

    The table is the same on all ranks. Slots that the rank does not use hold NaN.
    """
    require_owner(rank, world, interleave)
    require_page_holds_chunks(page_size, interleave)
    first = require_rows(kv_rows)
    device, packed = first.device, first.dtype == torch.uint8
    blocks = [pages_needed(len(rows), page_size * world) for rows in kv_rows]
    block_table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32, device=device)
    numbers = torch.arange(sum(blocks), dtype=torch.int32, device=device)
    for request, pages in enumerate(numbers.split(blocks)):
        block_table[request, : len(pages)] = pages
    # 0xFF is NaN as an E4M3 number, as a bfloat16 and as a float32.
    cache = first.new_full((sum(blocks), page_size, first.shape[1]), 0xFF if packed else math.nan)
    for request, rows in enumerate(kv_rows):
        whole = torch.tensor([len(rows)], device=device)
        n = int(local_lens(whole, rank=rank, world=world, interleave=interleave))
        local = torch.arange(n, device=device)
        mine = global_positions(local, rank=rank, world=world, interleave=interleave)
        slots = positions_to_slots(
            local[None], torch.tensor([request], device=device), block_table, page_size
        )
        write_rows(cache, rows[mine], slots[0])
    return cache, block_table


def require_page_holds_chunks(page_size: int, interleave: int) -> None:
    """Raise a ValueError unless a page holds whole chunks of neighbouring positions.

    Otherwise the tokens of one virtual block do not fill one page on every rank, and a shared block
    table points next to them.
    """
    require_count("page_size", page_size, at_least=1)
    require_count("interleave", interleave, at_least=1)
    if page_size % interleave:
        raise ValueError(
            f"page_size must be a multiple of interleave, got page_size {page_size} and "
            f"interleave {interleave}"
        )


def require_rows(kv_rows: object) -> Tensor:
    """The first request's rows, if all are [s_kv, row] of one width, dtype and device."""
    if not isinstance(kv_rows, Sequence) or not kv_rows:
        raise TypeError(
            f"kv_rows must be a sequence of tensors, one a request, got {describe(kv_rows)}"
        )
    first = kv_rows[0]
    for request, rows in enumerate(kv_rows):
        require_tensor(f"kv_rows[{request}]", rows, "s_kv row")
        if (
            rows.shape[1] != first.shape[1]
            or rows.dtype != first.dtype
            or rows.device != first.device
        ):
            raise ValueError(
                f"kv_rows[{request}] must have the width, dtype and device of kv_rows[0], got "
                f"{describe(rows)} beside {describe(first)}"
            )
    if not (first.is_floating_point() or first.dtype == torch.uint8):
        raise TypeError(f"kv_rows must hold floats or packed bytes, got {describe(first)}")
    return first
