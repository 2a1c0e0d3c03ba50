"""Bugs of indexers and of top-k, as published libraries had them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def index_scores_without_relu(
    q: Float[Tensor, "rows index_heads d_i"],
    k: Float[Tensor, "s_kv d_i"],
    weights: Float[Tensor, "rows index_heads"],
) -> Float[Tensor, "rows s_kv"]:
    """BUG: sums the heads' products as they are. Right for keys that no head dislikes."""
    return torch.einsum("rhs,rh->rs", q @ k.T, weights)


def select_topk_unchecked(
    scores: Float[Tensor, "rows s_kv"], visible_lens: Int[Tensor, " rows"], k: int
) -> Int[Tensor, "rows k"]:
    """BUG: takes whatever `torch.topk` returns for a selection.

    NaN ranks as the greatest number; a row with fewer than k keys is filled up with keys that it
    may not see; among equal scores any may come. Right for long rows of different finite scores.
    """
    hidden = torch.arange(scores.shape[1]) >= visible_lens[:, None]
    best = scores.masked_fill(hidden, -torch.inf).topk(min(k, scores.shape[1]), dim=1)
    missing = best.indices.new_full((scores.shape[0], k - best.indices.shape[1]), -1)
    return torch.cat([best.indices, missing], dim=1).to(torch.int32)
