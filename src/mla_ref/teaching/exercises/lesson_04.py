"""Exercises of lesson 04: where a token is written, and how a batch's rows are found again."""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_same_bits, expect_tensor

# What stands in a table past a request's pages: nothing may look it up.
_GARBAGE = 10**6


def _table(rows: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.int32) -> Tensor:
    """A block table from rows of any length, filled up with garbage."""
    width = max((len(row) for row in rows), default=0) + 1
    filled = [[*row, *[_GARBAGE] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype).reshape(len(rows), width)


def _slots_case(
    name: str,
    requests: tuple[tuple[int, int, tuple[int, ...]], ...],
    page_size: int,
    why: str,
) -> Case:
    """A batch of (new tokens, length, pages) per request."""

    def check(new_slots: Function) -> None:
        query_start_loc = torch.tensor([0, *(q_len for q_len, _, _ in requests)]).cumsum(0)
        seq_lens = torch.tensor([length for _, length, _ in requests], dtype=torch.int64)
        block_table = _table(tuple(pages for _, _, pages in requests))
        # Token by token, so that nothing here gives the formula away to the reader.
        expected = []
        for q_len, length, pages in requests:
            places = [page * page_size + offset for page in pages for offset in range(page_size)]
            expected += places[length - q_len : length]
        result = new_slots(block_table, query_start_loc, seq_lens, page_size)
        slots = expect_tensor(result, torch.int64, (len(expected),), "the result")
        if slots.tolist() != expected:
            pages_of = [list(pages) for _, _, pages in requests]
            raise Complaint(
                f"for the pages {pages_of} of {page_size}, query_start_loc "
                f"{query_start_loc.tolist()} and seq_lens {seq_lens.tolist()} the result is "
                f"{slots.tolist()}, expected {expected}"
            )

    return Case(name, why, check)


NEW_SLOTS = Exercise(
    id="04-new-slots",
    title="Where to write",
    task=(
        "Write `new_slots(block_table, query_start_loc, seq_lens, page_size)`: the slot of each "
        "new token of a batch, as int64. Request `r` owns the rows `query_start_loc[r]` to "
        "`query_start_loc[r + 1] - 1` of the batch; they are the last of its `seq_lens[r]` tokens. "
        "`block_table[r]` lists its pages in order, as int32; what stands in it past those that "
        "the request needs means nothing. A request may have no new tokens. Try to do without a "
        "Python loop."
    ),
    signature=(
        'def new_slots(\n    block_table: Int[Tensor, "b max_pages"],\n'
        '    query_start_loc: Int[Tensor, " b_plus_1"],\n    seq_lens: Int[Tensor, " b"],\n'
        '    page_size: int,\n) -> Int[Tensor, " num_tokens"]:'
    ),
    cases=(
        _slots_case(
            "a prompt in page 0", ((3, 3, (0,)),), 4, "A fresh server: slot and position agree."
        ),
        _slots_case(
            "a prompt over two pages",
            ((6, 6, (3, 1)),),
            4,
            "The second page lies before the first in memory. Only the table knows.",
        ),
        _slots_case(
            "one decode step",
            ((1, 7, (3, 1)),),
            4,
            "The new token is the last of its request, not the first of the page.",
        ),
        _slots_case(
            "decode, chunk, verifier",
            ((1, 6, (5, 2)), (4, 9, (0, 7, 3)), (3, 8, (6, 4))),
            4,
            "Requests of all kinds share a call, each with a row of the table to itself.",
        ),
        _slots_case(
            "a request without new tokens",
            ((2, 5, (1, 4)), (0, 7, (0, 2)), (1, 3, (3,))),
            4,
            "It owns no row of the batch, and must not shift those of its neighbours.",
        ),
        _slots_case(
            "pages of one token",
            ((3, 4, (9, 2, 7, 5)),),
            1,
            "A page size of 1 is a legal one (sglang-jax#1074): the table is the list of slots.",
        ),
        _slots_case(
            "a slot beyond 2 to the 31",
            ((2, 65, (7, 40_000_000)),),
            64,
            "The table is int32, and 40,000,000 pages of 64 are more slots than int32 counts. The "
            "product wraps round without a word (vllm#47671).",
        ),
        _slots_case("no requests", (), 4, "Warm-up and capture call with nothing."),
    ),
)


def _cache(pages: int, page_size: int, *row: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A cache in which every number says where it stands."""
    numbers = torch.arange(pages * page_size * torch.Size(row).numel())
    return (numbers % 251).to(dtype).reshape(pages, page_size, *row)


def _gather_case(
    name: str,
    make_cache: Callable[[], Tensor],
    requests: tuple[tuple[int, tuple[int, ...]], ...],
    why: str,
) -> Case:
    """A batch of (length, pages) per request."""

    def check(gather_batch: Function) -> None:
        cache = make_cache()
        page_size = cache.shape[1]
        seq_lens = torch.tensor([length for length, _ in requests], dtype=torch.int64)
        block_table = _table(tuple(pages for _, pages in requests))
        rows = [
            cache[pages[position // page_size], position % page_size]
            for length, pages in requests
            for position in range(length)
        ]
        expected = torch.stack(rows) if rows else cache.new_zeros(0, *cache.shape[2:])
        result = gather_batch(cache, block_table, seq_lens)
        found = expect_tensor(result, cache.dtype, tuple(expected.shape), "the result")
        for row, (one, other) in enumerate(zip(found, expected, strict=True)):
            expect_same_bits(one.double(), other.double(), f"row {row}")

    return Case(name, why, check)


GATHER_BATCH = Exercise(
    id="04-gather-batch",
    title="Gather through a block table",
    task=(
        "Write `gather_batch(cache, block_table, seq_lens)`: the rows of all requests, one request "
        "after the other, each in the order of its tokens. `cache` is `[pages, page_size, *row]`, "
        "of any dtype, and need not be contiguous. The result is a new tensor "
        "`[sum of seq_lens, *row]`. Entries of the table past the pages that a request needs mean "
        "nothing and must not be looked up; a length may be 0. Try to do without a Python loop: "
        "`torch.repeat_interleave` helps."
    ),
    signature=(
        'def gather_batch(\n    cache: Shaped[Tensor, "pages page_size *row"],\n'
        '    block_table: Int[Tensor, "b max_pages"],\n    seq_lens: Int[Tensor, " b"],\n'
        ') -> Shaped[Tensor, "num_rows *row"]:'
    ),
    cases=(
        _gather_case(
            "one full page",
            lambda: _cache(3, 4, 2),
            ((4, (2,)),),
            "The table says which page, and the page holds the rows in order.",
        ),
        _gather_case(
            "a page used in part",
            lambda: _cache(4, 4, 2),
            ((6, (3, 1)),),
            "What lies behind the last token is not the request's.",
        ),
        _gather_case(
            "three lengths",
            lambda: _cache(8, 4, 2),
            ((10, (5, 2, 7)), (7, (0, 6)), (3, (3,))),
            "The table is as wide as its longest request; the others fill it up with anything.",
        ),
        _gather_case(
            "a length of 0",
            lambda: _cache(8, 4, 2),
            ((5, (5, 2)), (0, ()), (4, (6,))),
            "A padded request owns no page. It must not shift its neighbours.",
        ),
        _gather_case(
            "a page that two requests share",
            lambda: _cache(8, 4, 2),
            ((6, (1, 4)), (7, (1, 3))),
            "Both begin with the same words, which are stored once.",
        ),
        _gather_case(
            "rows of heads, in bytes",
            lambda: _cache(5, 2, 3, 8, dtype=torch.uint8),
            ((3, (4, 0)), (2, (2,))),
            "A row may have several dimensions and any dtype; nothing is computed with it.",
        ),
        _gather_case(
            "a page that stores its heads first",
            lambda: _cache(6, 3, 4, 2).transpose(1, 2),  # [pages, heads, page_size, d] in memory
            ((5, (4, 1)), (4, (0, 5))),
            "Some kernels want [pages, heads, page_size, d]. Seen as [pages, page_size, heads, d] "
            "it is not contiguous, and slot * row is not an address. Nor is it where a cache "
            "interleaves its layers (vllm#54465).",
        ),
    ),
)
