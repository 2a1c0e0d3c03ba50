"""Rung 1: causal attention, one query row at a time. Checked against numbers worked out by hand.

This is the definition. A row takes the keys that it may see, as a slice, so that no mask is needed
and nothing else is ever touched. Every later rung computes the same in another order.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention.masking import require_qkv, require_visible_lens
from mla_ref.numerics import AttentionResult, compute_dtype


def causal_attention(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    *,
    softmax_scale: float,
    visible_lens: Int[Tensor, " s_q"] | None = None,
) -> AttentionResult:
    """Attention of each query row over the keys before and at its own position.

    Reads 2 * (d_qk + d_v) * h_kv bytes a key and row in bfloat16: all keys again for every row.

    Args:
        q: Queries of the newest s_q tokens.
        k: Keys of all s_kv tokens. Query head h reads KV head h // (h_q / h_kv).
        v: Values of all s_kv tokens.
        softmax_scale: Factor on q·k.
        visible_lens: Keys that each row sees, from the first on. Default: row i sees
            s_kv - s_q + i + 1.

    Returns:
        `out` in q's dtype and the natural-log `lse`; 0 and -inf for a row that sees nothing.
        Computed in float32, or in float64 if an input is float64.

    Raises:
        TypeError: An argument is no floating-point tensor.
        ValueError: Shapes do not fit; the message names the argument.
    """
    require_qkv(q, k, v, softmax_scale)
    (s_q, h_q, _), s_kv = q.shape, k.shape[0]
    lens = require_visible_lens(visible_lens, (s_q,), s_kv, q.device)
    dtype = compute_dtype(q, k, v)
    out = torch.zeros(s_q, h_q, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((s_q, h_q), -torch.inf, dtype=dtype, device=q.device)
    for row, seen in enumerate(lens.tolist()):
        out[row], lse[row] = _attend(
            q[row].to(dtype) * softmax_scale, k[:seen].to(dtype), v[:seen].to(dtype)
        )
    return AttentionResult(out.to(q.dtype), lse)


def _attend(
    q: Float[Tensor, "h_q d_qk"],
    keys: Float[Tensor, "seen h_kv d_qk"],
    values: Float[Tensor, "seen h_kv d_v"],
) -> AttentionResult:
    """One row over all the keys it is given; q carries the softmax scale."""
    h_q, (seen, h_kv, d_v) = q.shape[0], values.shape
    if seen == 0:
        return AttentionResult(q.new_zeros(h_q, d_v), q.new_full((h_q,), -torch.inf))
    # Grouped-query attention: neighbouring query heads share one KV head.
    keys = keys.repeat_interleave(h_q // h_kv, dim=1)
    values = values.repeat_interleave(h_q // h_kv, dim=1)
    scores = torch.einsum("hd,thd->ht", q, keys)
    highest = scores.amax(dim=-1)
    # If every score is -inf, -inf minus -inf would be NaN; such keys weigh nothing.
    anchor = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(scores - anchor[:, None])
    total = weights.sum(dim=-1)
    out = torch.einsum("ht,thd->hd", weights, values) / torch.where(total == 0, 1.0, total)[:, None]
    return AttentionResult(out, torch.log(total) + anchor)
