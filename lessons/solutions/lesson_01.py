"""Answers to the exercises of lesson 01. Write your own first."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def offset_mask(s_q: int, s_kv: int) -> Bool[Tensor, "s_q s_kv"]:
    """True where query row i may see key j, when the last row is the newest token."""
    positions = torch.arange(s_q) + (s_kv - s_q)
    return torch.arange(s_kv) <= positions[:, None]


def ragged_lens(
    query_start_loc: Int[Tensor, " b_plus_1"], seq_lens: Int[Tensor, " b"]
) -> Int[Tensor, " num_tokens"]:
    """How many keys of its own request each row of a ragged batch sees."""
    q_lens = query_start_loc.diff()
    # Row t of the batch is row t - start of its request, which is s_kv - s_q + 1 keys behind.
    first_seen = seq_lens - q_lens + 1 - query_start_loc[:-1]
    return torch.arange(int(query_start_loc[-1])) + first_seen.repeat_interleave(q_lens)
