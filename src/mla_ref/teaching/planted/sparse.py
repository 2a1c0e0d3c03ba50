"""Bugs of sparse attention, as published libraries had them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention import sparse_extend
from mla_ref.numerics import AttentionResult, apply_sink, merge_many


def sparse_extend_reading_before_the_cache(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    indices: Int[Tensor, "rows k"],
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
) -> AttentionResult:
    """BUG: reads a row for -1 too, the one before the cache; in Python that is the last one.

    The entry's score is masked, so its weight is 0, and all is well as long as that row holds
    finite numbers. 0 * NaN is NaN.
    """
    rows = kv_cache.flatten(0, 1)[indices.long()]  # [rows, k, d_row], and [-1] is the last row
    scores = (q * softmax_scale) @ rows.mT
    scores = scores.masked_fill((indices < 0)[:, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    weights = torch.exp(scores - anchor[..., None])
    return AttentionResult(weights @ rows[..., :kv_lora_rank], lse)


def sparse_decode_with_a_sink_a_split(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    indices: Int[Tensor, "rows k"],
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int = 4,
    sink: Float[Tensor, " h"],
) -> AttentionResult:
    """BUG: applies the sink in every split, before the merge. Right with a single split."""
    length = -(-indices.shape[1] // num_splits)
    parts = [
        sparse_extend(q, kv_cache, part, softmax_scale=softmax_scale, kv_lora_rank=kv_lora_rank)
        for part in indices.split(length, dim=1)
    ]
    outs = torch.stack([apply_sink(part, sink) for part in parts])
    return merge_many(outs, torch.stack([part.lse for part in parts]))
