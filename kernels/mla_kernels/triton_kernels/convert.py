"""Index conversion: the indexer speaks of positions of a request, attention of slots of the cache.

    slot = block_table[request, position // page_size] * page_size + position % page_size

Two kernels. `positions_to_slots` is one look-up an entry, and -1 wherever one of its steps leads
nowhere; never 0, which is real data (vllm#45324). `own_slots` serves a cache that is spread over
ranks: it keeps the positions of one rank, turns them into that rank's slots, and moves them to the
front, so that attention reads as many entries as the rank owns.

In a row of 2,048 entries a program reads 8 KiB and writes 8 KiB; the block table of a request of
128k tokens is 8 KiB too. Nothing here is worth tuning beyond enough programs in flight.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from mla_kernels.triton_kernels.outputs import out_or_new, require_runnable
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.indexer.convert import require_conversion, require_owner
from mla_ref.platform.stream import current_device

BLOCK = 1024


@triton.jit
def _slot_of(position, known, table, column_stride, width, page_size, largest_page):
    """Slot of each int64 position in the pages of one request, -1 for none."""
    column = tl.maximum(position, 0) // page_size
    valid = known & (position >= 0) & (column < width)
    page = tl.load(table + column * column_stride, mask=valid, other=-1).to(tl.int64)
    # A slot that its integer cannot hold would come round as another one.
    held = (page >= 0) & (page <= largest_page)
    return tl.where(held, page * page_size + position % page_size, -1)


@triton.jit
def positions_to_slots_kernel(
    positions,
    request_of_row,
    block_table,
    slots,
    k,
    requests,
    width,
    page_size,
    largest_page,
    row_stride,
    entry_stride,
    request_stride,
    table_stride,
    column_stride,
    BLOCK: tl.constexpr,
):
    """One program a row and block of entries; `slots` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < k
    request = tl.load(request_of_row + row * request_stride).to(tl.int64)
    position = tl.load(positions + row * row_stride + entry * entry_stride, mask=inside, other=-1)
    known = (request >= 0) & (request < requests)
    table = block_table + request * table_stride
    slot = _slot_of(
        position.to(tl.int64), known, table, column_stride, width, page_size, largest_page
    )
    tl.store(slots + row * k + entry, slot.to(slots.dtype.element_ty), mask=inside)


@triton.jit
def own_slots_kernel(
    positions,
    request_of_row,
    block_table,
    slots,
    counts,
    k,
    requests,
    width,
    page_size,
    largest_page,
    rank,
    world,
    interleave,
    row_stride,
    entry_stride,
    request_stride,
    table_stride,
    column_stride,
    BLOCK: tl.constexpr,
):
    """One program a row: it walks the row from left to right and knows how many it has kept."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_of_row + row * request_stride).to(tl.int64)
    known = (request >= 0) & (request < requests)
    table = block_table + request * table_stride
    kept = 0
    for first in range(0, k, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        position = tl.load(
            positions + row * row_stride + entry * entry_stride, mask=entry < k, other=-1
        ).to(tl.int64)
        chunk = tl.maximum(position, 0) // interleave
        owned = (position >= 0) & (chunk % world == rank)
        local = tl.where(owned, chunk // world * interleave + position % interleave, -1)
        slot = _slot_of(local, known, table, column_stride, width, page_size, largest_page)
        # The running count is each owned entry's place: the order stays, whatever runs first.
        place = kept + tl.cumsum(owned.to(tl.int32), 0) - 1
        tl.store(slots + row * k + place, slot.to(slots.dtype.element_ty), mask=owned)
        kept += tl.sum(owned.to(tl.int32), 0)
    for first in range(0, k, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        none = tl.full([BLOCK], -1, slots.dtype.element_ty)
        tl.store(slots + row * k + entry, none, mask=(entry >= kept) & (entry < k))
    tl.store(counts + row, kept)


def positions_to_slots(
    positions: Int[Tensor, "rows k"],
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_pages"],
    page_size: int,
    *,
    out: Int[Tensor, "rows k"] | None = None,
) -> Int[Tensor, "rows k"]:
    """`mla_ref.indexer.positions_to_slots` as a kernel, the same integers.

    Args:
        positions: Request-local positions; -1 stays -1.
        request_of_row: Which request each row belongs to.
        block_table: Pages of each request; its dtype is the result's.
        page_size: Tokens a page.
        out: Where to write; a new tensor if None.
    """
    require_conversion(positions, request_of_row, block_table, page_size)
    require_runnable("positions", positions)
    rows, k = positions.shape
    slots = out_or_new("out", out, (rows, k), block_table.dtype, positions)
    if slots.numel():
        with current_device(positions.device):
            positions_to_slots_kernel[(rows, triton.cdiv(k, BLOCK))](
                positions,
                request_of_row,
                block_table,
                slots,
                k,
                *_table_facts(block_table, page_size),
                *_strides(positions, request_of_row, block_table),
                BLOCK=BLOCK,
            )
    return slots


def own_slots(
    positions: Int[Tensor, "rows k"],
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_pages"],
    page_size: int,
    *,
    rank: int,
    world: int,
    interleave: int = 1,
    out: Int[Tensor, "rows k"] | None = None,
    counts: Int[Tensor, " rows"] | None = None,
) -> tuple[Int[Tensor, "rows k"], Int[Tensor, " rows"]]:
    """`own_positions` and then `positions_to_slots` of `mla_ref.indexer`, in one kernel.

    Tests alone call it: the ranks of `mla_ref.parallel` filter by the library's own functions.

    Args:
        positions: Global positions; -1 is none.
        request_of_row: Which request each row belongs to.
        block_table: The rank's pages of each request; its dtype is the slots'.
        page_size: Tokens a page.
        rank: This rank.
        world: Number of ranks.
        interleave: Neighbouring positions that stay together.
        out: Where to write the slots; a new tensor if None.
        counts: Where to write the counts, int32; a new tensor if None.

    Returns:
        Slots with the owned ones first, in their order, then -1; and how many are owned. An owned
        position without a page is -1 among them, and counted.
    """
    require_conversion(positions, request_of_row, block_table, page_size)
    require_owner(rank, world, interleave)
    require_runnable("positions", positions)
    rows, k = positions.shape
    slots = out_or_new("out", out, (rows, k), block_table.dtype, positions)
    kept = out_or_new("counts", counts, (rows,), torch.int32, positions)
    if rows:
        with current_device(positions.device):
            own_slots_kernel[(rows,)](
                positions,
                request_of_row,
                block_table,
                slots,
                kept,
                k,
                *_table_facts(block_table, page_size),
                rank,
                world,
                interleave,
                *_strides(positions, request_of_row, block_table),
                BLOCK=BLOCK,
            )
    return slots, kept


def _table_facts(block_table: Tensor, page_size: int) -> tuple[int, int, int, int]:
    """requests, width, page_size, and the largest page whose slots the dtype holds."""
    largest_page = (torch.iinfo(block_table.dtype).max - page_size + 1) // page_size
    return *block_table.shape, page_size, largest_page


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride())


def signatures() -> tuple[Compilation, ...]:
    """What is compiled: int32 throughout, contiguous rows, a block table of any width."""
    pointers = ("positions", "request_of_row", "block_table", "slots")
    sizes = ("k", "requests", "width", "page_size", "largest_page")
    strides = ("row_stride", "table_stride")
    unit = dict.fromkeys(("entry_stride", "request_stride", "column_stride"), 1)
    aligned = (*pointers, "k", "page_size", "row_stride")
    plain = dict.fromkeys(pointers, "*i32")
    share = dict.fromkeys(("rank", "world", "interleave"), "i32")
    numbers = dict.fromkeys(sizes, "i32")
    ends = dict.fromkeys(strides, "i32")
    return (
        Compilation(
            name="convert/positions-to-slots",
            fn=positions_to_slots_kernel,
            signature=plain | numbers | ends,
            constexprs=unit | {"BLOCK": BLOCK},
            aligned=aligned,
        ),
        Compilation(
            name="convert/own-slots",
            fn=own_slots_kernel,
            signature=plain | {"counts": "*i32"} | numbers | share | ends,
            constexprs=unit | {"BLOCK": BLOCK},
            aligned=(*aligned, "counts"),
        ),
    )
