"""Bugs in taking attention apart and putting it together, as published libraries had them."""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.attention import causal_lens
from mla_ref.attention.masking import grouped, visible_mask
from mla_ref.numerics import AttentionResult


def merge_without_guard(
    out_a: Float[Tensor, "*rows d"],
    lse_a: Float[Tensor, "*rows"],
    out_b: Float[Tensor, "*rows d"],
    lse_b: Float[Tensor, "*rows"],
) -> AttentionResult:
    """BUG: subtracts the larger LSE without asking whether it is -inf.

    Right unless both parts are empty. Then -inf minus -inf is NaN, in the output and in the LSE,
    and every later merge keeps it.
    """
    heaviest = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - heaviest), torch.exp(lse_b - heaviest)
    total = weight_a + weight_b
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    return AttentionResult(share_a * out_a + share_b * out_b, heaviest + torch.log(total))


def merge_in_base_2(
    out_a: Float[Tensor, "*rows d"],
    lse_a: Float[Tensor, "*rows"],
    out_b: Float[Tensor, "*rows d"],
    lse_b: Float[Tensor, "*rows"],
) -> AttentionResult:
    """BUG: reads natural-log LSEs as base 2.

    Right where one part is empty or both weigh the same. Elsewhere the lighter part gets too much:
    2**x falls more slowly than e**x.
    """
    heaviest = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp2(lse_a - heaviest), torch.exp2(lse_b - heaviest)
    total = weight_a + weight_b
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    return AttentionResult(share_a * out_a + share_b * out_b, heaviest + torch.log2(total))


def backward_tiles_without_guard(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    *,
    softmax_scale: float,
    block_size: int,
) -> AttentionResult:
    """BUG: online softmax from the last tile to the first, without a guard for hidden tiles.

    Right for a row that sees a key of the last tile. For a row that comes before it, the first tile
    visited is hidden: the running maximum is still -inf, and -inf minus -inf is NaN for ever after.
    Front to back the same code passes, because every row sees key 0.
    """
    s_kv, d_v = k.shape[0], v.shape[-1]
    lens = causal_lens(q.shape[0], s_kv)
    queries = grouped(q * softmax_scale, k.shape[1])
    m = queries.new_full(queries.shape[:3], -torch.inf)
    total = queries.new_zeros(queries.shape[:3])
    acc = queries.new_zeros(*queries.shape[:3], d_v)
    for first in reversed(range(0, s_kv, block_size)):
        keys, values = k[first : first + block_size], v[first : first + block_size]
        visible = visible_mask(lens, first, keys.shape[0])
        scores = torch.einsum("shgd,thd->shgt", queries, keys)
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        new_m = torch.maximum(m, scores.amax(dim=-1))
        weights = torch.exp(scores - new_m[..., None])
        shrink = torch.exp(m - new_m)
        total = total * shrink + weights.sum(dim=-1)
        acc = acc * shrink[..., None] + torch.einsum("shgt,thd->shgd", weights, values)
        m = new_m
    return AttentionResult(
        (acc / total[..., None]).flatten(1, 2), (m + torch.log(total)).flatten(1, 2)
    )
