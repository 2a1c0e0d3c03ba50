"""A batch of unequal drafts as rows, and the walk along each request's rows.

Request r has the rows query_start_loc[r] .. query_start_loc[r + 1] - 1: one for each draft and one
more. What a step adds to it are the tokens of its leading accepted rows and of the row after them.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Verified(NamedTuple):
    """What a step adds to each request.

    Attributes:
        token_ids: Accepted drafts, then one recovered or bonus token, then -1.
        num_accepted: Accepted drafts; the token after them is not counted.
    """

    token_ids: Int[Tensor, "b columns"]
    num_accepted: Int[Tensor, " b"]


def judged_drafts(
    draft_ids: Int[Tensor, " rows"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    max_drafts: int,
    vocab: int,
) -> Int[Tensor, " rows"]:
    """The draft of each row as int64, and -1 where the row has none that may be judged."""
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    rows = torch.arange(draft_ids.shape[0], device=draft_ids.device)
    if not starts.numel():
        return torch.full_like(rows, -1)
    # As many requests end at or before a row as come before it; padding belongs to none.
    request = torch.searchsorted(ends, rows, right=True).clamp(max=starts.shape[0] - 1)
    judges = (rows < ends[request] - 1) & (rows - starts[request] < max_drafts)
    ids = draft_ids.long()
    return torch.where(judges & (ids >= 0) & (ids < vocab), ids, -1)


def walk(
    accepted: Bool[Tensor, " rows"],
    tokens: Int[Tensor, " rows"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    max_drafts: int,
) -> Verified:
    """Lay the rows out by request and end each at its first row that was not accepted.

    The count is of the leading accepted rows, not of all: after a rejection nothing counts
    (vllm#2658).
    """
    leading = by_request(accepted.long(), query_start_loc, max_drafts, 0).cumprod(dim=1)
    num_accepted = leading.sum(dim=1)
    return Verified(
        first_tokens(tokens, num_accepted + 1, query_start_loc, max_drafts), num_accepted
    )


def first_tokens(
    tokens: Int[Tensor, " rows"],
    counts: Int[Tensor, " b"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    max_drafts: int,
) -> Int[Tensor, "b columns"]:
    """The first counts[r] tokens of request r, then -1; never more than it has rows."""
    grid = by_request(tokens, query_start_loc, max_drafts, -1)
    columns = torch.arange(max_drafts + 1, device=tokens.device)
    return grid.masked_fill(columns >= counts[:, None], -1)


def by_request(
    values: Shaped[Tensor, " rows"],
    query_start_loc: Int[Tensor, " b_plus_1"],
    max_drafts: int,
    fill: int,
) -> Shaped[Tensor, "b columns"]:
    """Values of the rows as [b, max_drafts + 1], `fill` where a request has no row."""
    columns = torch.arange(max_drafts + 1, device=values.device)
    rows = query_start_loc[:-1, None].long() + columns
    if not values.numel():
        return values.new_full(rows.shape, fill)
    exists = rows < query_start_loc[1:, None]
    return values[rows.clamp(max=values.shape[0] - 1)].masked_fill(~exists, fill)
