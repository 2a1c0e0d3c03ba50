"""Answers to the exercises of lesson 04. Write your own first."""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


def new_slots(
    block_table: Int[Tensor, "b max_pages"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    page_size: int,
) -> Int[Tensor, " num_tokens"]:
    """The slot of each new token of a ragged batch."""
    q_lens = query_start_loc.diff()
    request = torch.arange(len(seq_lens)).repeat_interleave(q_lens)
    # The last row of a request is its token seq_len - 1.
    last_row, last_position = query_start_loc[1:] - 1, seq_lens - 1
    rows = torch.arange(len(request))
    positions = rows + (last_position - last_row)[request]
    # int64 before the product: page * page_size may pass 2**31.
    pages = block_table[request, positions // page_size].long()
    return pages * page_size + positions % page_size


def gather_batch(
    cache: Shaped[Tensor, "pages page_size *row"],
    block_table: Int[Tensor, "b max_pages"],
    seq_lens: Int[Tensor, " b"],
) -> Shaped[Tensor, "num_rows *row"]:
    """The rows of all requests, one request after the other."""
    page_size = cache.shape[1]
    request = torch.arange(len(seq_lens)).repeat_interleave(seq_lens)
    first_row = seq_lens.cumsum(0) - seq_lens
    positions = torch.arange(len(request)) - first_row[request]
    pages = block_table[request, positions // page_size].long()
    return cache[pages, positions % page_size]
