"""Paged storage (PagedAttention, arXiv:2309.06180): a token's row lives in a slot of a page.

A cache is one tensor [pages, page_size, ...row]. A request's *block table* lists its pages in the
order of its tokens, so position p lies in page block_table[p // page_size] at offset
p % page_size, and slot = page * page_size + offset is its place in the whole cache. Pages need not
be neighbours in memory: a cache that interleaves layers is a strided view, and everything here
addresses it by (page, offset), never by slot * row (vllm#54465).
"""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_count,
    require_integer,
    require_same_device,
    require_size,
)


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` rows, the last one possibly in part."""
    require_count("num_tokens", num_tokens)
    require_count("page_size", page_size, at_least=1)
    return -(-num_tokens // page_size)


def slot_mapping(
    block_table: Int[Tensor, "b max_pages"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    page_size: int,
) -> Int[Tensor, " num_tokens"]:
    """The slot of every new token of a ragged batch.

    Request r brings tokens query_start_loc[r] to query_start_loc[r + 1], the last ones of its
    seq_lens[r]. int64, since slot * 656 bytes passes 2^31 at slot 3,273,604.

    Args:
        block_table: Pages of each request, in order; entries past its length may be anything.
        query_start_loc: Offsets of each request's new tokens, from 0 to num_tokens.
        seq_lens: Length of each request with its new tokens.
        page_size: Tokens a page.

    Raises:
        ValueError: A length is negative, a request has more new tokens than length, or the block
            table is too narrow for it or names a negative page for a new token: page -1 would give
            slot -1 at its last offset, which a writer takes for "do not write".
    """
    require_batch(query_start_loc, seq_lens, block_table, page_size)
    slots = []
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        q_len = starts[request + 1] - starts[request]
        positions = torch.arange(length - q_len, length, device=block_table.device)
        pages = block_table[request, positions // page_size].long()
        if (pages < 0).any():
            raise ValueError(
                f"block_table[{request}] names page {int(pages.min())} for a new token; pages "
                "count from 0"
            )
        slots.append(pages * page_size + positions % page_size)
    return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)


def require_batch(
    query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int
) -> None:
    """Raise unless the four describe one ragged batch: see `slot_mapping` for what each means."""
    require_integer("query_start_loc", query_start_loc, "b_plus_1")
    require_integer("seq_lens", seq_lens, "b")
    require_integer("block_table", block_table, "b max_pages")
    require_count("page_size", page_size, at_least=1)
    requests = seq_lens.shape[0]
    require_size("query_start_loc", query_start_loc, 0, requests + 1, "one more than seq_lens")
    require_size("block_table", block_table, 0, requests, "one row a request of seq_lens")
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    if starts[0] != 0:
        raise ValueError(f"query_start_loc must start at 0, got {starts[0]}")
    for request, length in enumerate(lengths):
        q_len = starts[request + 1] - starts[request]
        if q_len < 0:
            raise ValueError(f"query_start_loc must not fall, got {starts}")
        if length < q_len:
            raise ValueError(
                f"seq_lens[{request}] is {length}, fewer than the request's {q_len} new tokens"
            )
        if pages_needed(length, page_size) > block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} pages of {page_size} a request, too few "
                f"for seq_lens[{request}] = {length}"
            )


def require_page_size(name: str, cache: Tensor) -> None:
    """Raise a ValueError that names the cache if its pages hold no row."""
    if cache.shape[1] == 0:
        raise ValueError(f"{name} must have pages of one row at least, got {describe(cache)}")


def require_pages(block_table: Tensor, seq_lens: Tensor, num_pages: int, page_size: int) -> None:
    """Raise a ValueError if a page that a request uses lies outside the cache."""
    for request, length in enumerate(seq_lens.tolist()):
        used = block_table[request, : pages_needed(length, page_size)]
        wrong = used[(used < 0) | (used >= num_pages)]
        if wrong.numel():
            raise ValueError(
                f"block_table[{request}] names page {int(wrong[0])}, but the cache has pages 0 to "
                f"{num_pages - 1}"
            )


def write_rows(
    cache: Shaped[Tensor, "pages page_size *row"],
    rows: Shaped[Tensor, "num_tokens *row"],
    slots: Int[Tensor, " num_tokens"],
    *,
    validate: bool = True,
) -> None:
    """Write one row a token into its slot, in place.

    Args:
        cache: Any strides. Slot s is (page s // page_size, offset s % page_size).
        rows: New rows, in the cache's dtype, or floating-point for a floating-point cache, which
            are cast. Floats are never cast to the bytes of a packed cache: 1.5 would become 1.
        slots: Target of each row. -1 means: do not write this row (padding).
        validate: Raise on a slot outside the cache and on two rows for one slot. Without it, a
            slot outside the cache is not written; nothing is read back to the host.

    Raises:
        TypeError: The dtype of `rows` is neither the cache's nor one to cast from.
        ValueError: Shapes differ, or, with `validate`, a slot is out of range or listed twice.
    """
    if not isinstance(cache, Tensor) or cache.ndim < 2:
        raise ValueError(f"cache must be a tensor [pages, page_size, ...], got {describe(cache)}")
    require_integer("slots", slots, "num_tokens")
    if not isinstance(rows, Tensor) or rows.shape != (slots.shape[0], *cache.shape[2:]):
        raise ValueError(
            f"rows must have the shape {[slots.shape[0], *cache.shape[2:]]}: one row of the cache "
            f"a slot; got {describe(rows)}"
        )
    castable = rows.is_floating_point() and cache.is_floating_point()
    if rows.dtype != cache.dtype and not castable:
        raise TypeError(f"rows must hold {cache.dtype} as cache does, got {describe(rows)}")
    require_same_device({"cache": cache, "rows": rows, "slots": slots})
    pages, page_size = cache.shape[:2]
    capacity = pages * page_size
    slots = slots.long()
    if validate:
        listed = require_slots(slots, capacity)
        if 0 < len(listed) == len(slots):  # as in every step without padding
            cache[slots // page_size, slots % page_size] = rows.to(cache.dtype)
            return
    if slots.numel() == 0 or capacity == 0:
        return
    valid = (slots >= 0) & (slots < capacity)
    # A skipped row repeats the write of the first valid one, which changes nothing. A boolean mask
    # would have to read its count back to the host. With no valid row, slot 0 is written with what
    # it holds. `first` has one dimension, since torch reads an index without any back to the host.
    first = valid.to(torch.int8).argmax(dim=0, keepdim=True)
    any_valid = valid[first]
    target = torch.where(valid, slots, torch.where(any_valid, slots[first], 0))
    shape = (-1,) + (1,) * (rows.ndim - 1)
    fallback = torch.where(any_valid.view(shape), rows[first].to(cache.dtype), cache[:1, 0])
    content = torch.where(valid.view(shape), rows.to(cache.dtype), fallback)
    cache[target // page_size, target % page_size] = content


def require_slots(slots: Int[Tensor, " num_tokens"], capacity: int) -> list[int]:
    """The slots that are not -1, read back to the host, if a cache of `capacity` slots has each.

    Raises:
        ValueError: A slot is out of range or listed twice.
    """
    listed = [slot for slot in slots.tolist() if slot != -1]
    for slot in listed:
        if not 0 <= slot < capacity:
            raise ValueError(
                f"slots holds {slot}, but the cache has slots 0 to {capacity - 1} (-1: do not "
                "write)"
            )
    if len(set(listed)) < len(listed):
        raise ValueError("slots must not list a slot twice: which row would win is undefined")
    return listed


def gather_rows(
    cache: Shaped[Tensor, "pages page_size *row"],
    block_table_row: Int[Tensor, " max_pages"],
    seq_len: int,
) -> Shaped[Tensor, "seq_len *row"]:
    """The first `seq_len` rows of one request, in the order of its positions (a copy)."""
    if not isinstance(cache, Tensor) or cache.ndim < 2:
        raise ValueError(f"cache must be a tensor [pages, page_size, ...], got {describe(cache)}")
    require_page_size("cache", cache)
    require_count("seq_len", seq_len)
    page_size = cache.shape[1]
    require_integer("block_table_row", block_table_row, "max_pages")
    used = pages_needed(seq_len, page_size)
    if used > block_table_row.shape[0]:
        raise ValueError(
            f"block_table_row has {block_table_row.shape[0]} pages of {page_size}, "
            f"too few for seq_len {seq_len}"
        )
    require_pages(block_table_row[None], torch.tensor([seq_len]), cache.shape[0], page_size)
    return cache[block_table_row[:used].long()].flatten(0, 1)[:seq_len]
