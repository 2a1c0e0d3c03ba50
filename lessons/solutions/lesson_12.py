"""Answers to the exercises of lesson 12. Write your own first."""

import torch
from jaxtyping import Int
from torch import Tensor


def is_verifier(
    query_lens: list[int],
    is_prefilling: list[bool] | Tensor | None,
    num_reqs: int,
    n: int,
) -> bool:
    """Whether the batch verifies drafts, from facts of the scheduler on the host."""
    if isinstance(is_prefilling, Tensor):
        if is_prefilling.device.type != "cpu":
            raise TypeError(f"is_prefilling must be on the host, not on {is_prefilling.device}")
        is_prefilling = is_prefilling.tolist()
    real = query_lens[:num_reqs]
    if n == 0 or not 1 < max(real, default=0) <= 1 + n or is_prefilling is None:
        return False
    flags = is_prefilling[:num_reqs]
    # Who has no token to run prefills nothing, whatever a vacated row still says.
    return not any(flag and tokens > 0 for flag, tokens in zip(flags, real, strict=True))


def row_lens(
    computed_lens: Int[Tensor, " b"],
    query_lens: Int[Tensor, " b"],
    num_rows: int,
) -> Int[Tensor, " rows"]:
    """Keys that each row of a step may see; 0 for padding."""
    starts = query_lens.cumsum(0) - query_lens
    # What to add to a row's number in the batch, the same for all rows of a request.
    shift = (computed_lens - starts + 1).repeat_interleave(query_lens)
    lens = torch.zeros(num_rows, dtype=torch.int64)
    lens[: len(shift)] = torch.arange(len(shift)) + shift
    return lens
