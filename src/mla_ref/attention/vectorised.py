"""Rung 2: all rows at once, with a mask. Checked against rung 1.

One matrix product replaces the loop, and the price is memory: the scores of every row and key,
s_q * s_kv * h_q numbers. At 4,096 tokens and 9 heads that is 604 MB in float32, and three times
that at the peak, where scores, masked scores and weights exist side by side.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention.masking import (
    grouped,
    require_qkv,
    require_visible_lens,
    visible_mask,
    weighted_values,
)
from mla_ref.numerics import AttentionResult, compute_dtype


def vectorised_attention(
    q: Float[Tensor, "b s_q h_q d_qk"],
    k: Float[Tensor, "b s_kv h_kv d_qk"],
    v: Float[Tensor, "b s_kv h_kv d_v"],
    *,
    softmax_scale: float,
    visible_lens: Int[Tensor, "b s_q"] | None = None,
) -> AttentionResult:
    """Batched causal attention, mask aligned at the bottom right.

    Args:
        q: Queries of the newest s_q tokens of each sequence.
        k: Keys of all s_kv tokens.
        v: Values of all s_kv tokens.
        softmax_scale: Factor on q·k.
        visible_lens: Keys that each row sees, from the first on. Default: row i sees
            s_kv - s_q + i + 1.

    Returns:
        As `causal_attention`, with the batch in front.
    """
    require_qkv(q, k, v, softmax_scale, batch="b")
    b, s_q, h_q, _ = q.shape
    s_kv, h_kv = k.shape[1:3]
    lens = require_visible_lens(visible_lens, (b, s_q), s_kv, q.device)
    dtype = compute_dtype(q, k, v)
    if s_kv == 0:
        return AttentionResult(
            q.new_zeros(b, s_q, h_q, v.shape[-1]),
            torch.full((b, s_q, h_q), -torch.inf, dtype=dtype, device=q.device),
        )
    visible = visible_mask(lens, 0, s_kv)  # [b, s_q, s_kv]
    queries = grouped(q.to(dtype) * softmax_scale, h_kv)
    scores = torch.einsum("bshgd,bthd->bshgt", queries, k.to(dtype))
    # -inf and not a large negative number: with -1e6 a row that sees nothing would average V.
    scores = scores.masked_fill(~visible[:, :, None, None, :], -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True)
    anchor = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(scores - anchor)
    total = weights.sum(dim=-1, keepdim=True)
    out = weighted_values(weights, v.to(dtype), visible) / torch.where(total == 0, 1.0, total)
    lse = (torch.log(total) + anchor).squeeze(-1)
    return AttentionResult(out.flatten(2, 3).to(q.dtype), lse.flatten(2, 3))
