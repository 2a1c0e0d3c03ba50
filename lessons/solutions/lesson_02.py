"""Answers to the exercises of lesson 02. Write your own first."""

import torch
from jaxtyping import Float
from torch import Tensor


def my_merge(
    out_a: Float[Tensor, "*rows d_v"],
    lse_a: Float[Tensor, "*rows"],
    out_b: Float[Tensor, "*rows d_v"],
    lse_b: Float[Tensor, "*rows"],
) -> tuple[Float[Tensor, "*rows d_v"], Float[Tensor, "*rows"]]:
    """Attention over the union of two disjoint sets of keys."""
    heaviest = torch.maximum(lse_a, lse_b)
    # Where both are empty, -inf - -inf would be NaN: measure against 0 instead.
    anchor = torch.where(heaviest == -torch.inf, 0.0, heaviest)
    weight_a, weight_b = torch.exp(lse_a - anchor), torch.exp(lse_b - anchor)
    total = weight_a + weight_b
    safe_total = torch.where(total == 0, 1.0, total)
    # What an empty part holds is not used: 0 * NaN would be NaN.
    part_a = torch.where(lse_a[..., None] == -torch.inf, 0.0, out_a)
    part_b = torch.where(lse_b[..., None] == -torch.inf, 0.0, out_b)
    share_a, share_b = (weight_a / safe_total)[..., None], (weight_b / safe_total)[..., None]
    out = (share_a * part_a + share_b * part_b).to(out_a.dtype)
    return out, anchor + torch.log(total)


def add_tile(
    m: Float[Tensor, " rows"],
    total: Float[Tensor, " rows"],
    acc: Float[Tensor, "rows d_v"],
    scores: Float[Tensor, "rows t"],
    values: Float[Tensor, "t d_v"],
) -> tuple[Tensor, Tensor, Tensor]:
    """The state of the online softmax after one more tile."""
    new_m = torch.maximum(m, scores.amax(dim=-1))
    # A row that has seen nothing yet measures against 0: exp(-inf - 0) is the 0 that it needs.
    anchor = torch.where(new_m == -torch.inf, 0.0, new_m)
    weights = torch.exp(scores - anchor[:, None])
    shrink = torch.exp(m - anchor)
    return new_m, total * shrink + weights.sum(dim=-1), acc * shrink[:, None] + weights @ values
