"""From positions in a request to slots in the cache, on one rank or on several.

The indexer speaks of positions 0 .. seq_len - 1 of a request; attention reads physical slots.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from mla_ref.cache.ownership import local_positions, owner_of
from mla_ref.cache.ownership import require_owner as require_owner  # kernels take it from here
from mla_ref.checks import require_count, require_integer, require_same_device, require_size


def positions_to_slots(
    positions: Int[Tensor, "rows k"],
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_pages"],
    page_size: int,
) -> Int[Tensor, "rows k"]:
    """Slot of each selected position: page of the block table * page_size + offset.

    Args:
        positions: Request-local positions; -1 stays -1.
        request_of_row: Which request each row belongs to.
        block_table: Pages of each request, any row stride.
        page_size: Tokens a page.

    Returns:
        int32, as kernels take them, or int64 where the block table is int64, which is how a caller
        says that the cache has more than 2^31 slots. -1 where the position is negative or beyond
        the block table's width, where the page is negative or its slots do not fit that integer,
        and in a row whose request is outside the table (vllm#55637). Never 0 for "none": slot 0 is
        real data (vllm#45324).
    """
    require_conversion(positions, request_of_row, block_table, page_size)
    requests, width = block_table.shape
    column = torch.where(positions >= 0, positions, 0).long() // page_size
    known = (request_of_row >= 0) & (request_of_row < requests)
    valid = (positions >= 0) & (column < width) & known[:, None]
    if requests == 0 or width == 0:
        return torch.full_like(positions, -1, dtype=block_table.dtype)
    row = torch.where(known, request_of_row, 0).long()
    page = block_table[row[:, None], torch.where(valid, column, 0)].long()
    slots = page * page_size + positions.long() % page_size
    # A slot that its integer cannot hold would come round as another one.
    held = (page >= 0) & (page <= (torch.iinfo(block_table.dtype).max - page_size + 1) // page_size)
    return torch.where(valid & held, slots, -1).to(block_table.dtype)


def own_positions(
    positions: Int[Tensor, "rows k"], *, rank: int, world: int, interleave: int = 1
) -> tuple[Int[Tensor, "rows k"], Int[Tensor, " rows"]]:
    """The selected positions that one rank of a parallel cache holds, as its local positions.

    Who holds which, and where, is said by `owner_of` and `local_positions` of
    `mla_ref.cache.ownership`.

    Args:
        positions: Global positions; -1 is none.
        rank: This rank.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.

    Returns:
        Local positions with the owned ones first, in their order, then -1; and how many there are.
    """
    require_integer("positions", positions, "rows k")
    require_owner(rank, world, interleave)
    owned = owner_of(positions, world=world, interleave=interleave) == rank
    local = local_positions(positions, world=world, interleave=interleave)
    # A stable sort by "not owned" moves the owned ones to the front and keeps their order.
    order = torch.sort((~owned).to(torch.int8), dim=1, stable=True).indices
    compacted = torch.where(owned, local, -1).gather(1, order)
    return compacted, owned.sum(dim=1, dtype=torch.int32)


def require_conversion(
    positions: Tensor, request_of_row: Tensor, block_table: Tensor, page_size: int
) -> None:
    """Raise unless these are arguments of `positions_to_slots`."""
    require_integer("positions", positions, "rows k")
    require_integer("request_of_row", request_of_row, "rows")
    require_integer("block_table", block_table, "b max_pages")
    require_count("page_size", page_size, at_least=1)
    require_size("request_of_row", request_of_row, 0, positions.shape[0], "one request a row")
    require_same_device(
        {"positions": positions, "request_of_row": request_of_row, "block_table": block_table}
    )
