"""The float64 oracle: attention from a visibility mask, written for trust and nothing else.

It shares no code with the rungs. Where they subtract a running maximum, it takes
`torch.logsumexp`; where they slice or tile, it multiplies by a mask of who sees whom. So an error
in the rungs' common parts shows as a difference.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mla_ref.checks import (
    describe,
    require_float,
    require_same_device,
    require_scale,
    require_size,
    require_tensor,
)
from mla_ref.numerics.result import AttentionResult


def oracle_attention(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    visible: Bool[Tensor, "s_q s_kv"],
    *,
    softmax_scale: float,
) -> AttentionResult:
    """Attention of every query row over the keys its row of `visible` marks, in float64.

    Args:
        q: Queries. `h_q` must be a multiple of `h_kv`; head h reads KV head h // (h_q / h_kv).
        k: Keys.
        v: Values. A value that a row may not see never reaches that row, NaN and inf included.
        visible: True where the row may see the key.
        softmax_scale: Factor on q·k before the softmax.

    Returns:
        `out` [s_q, h_q, d_v] and natural-log `lse` [s_q, h_q], both float64. A row that sees a
        score of +inf or NaN has no softmax: both are NaN there.

    Raises:
        TypeError: An argument is no tensor of the kind it should be.
        ValueError: Shapes do not fit; the message names the argument.
    """
    require_float("q", q, "s_q h_q d_qk")
    require_float("k", k, "s_kv h_kv d_qk")
    require_float("v", v, "s_kv h_kv d_v")
    if require_tensor("visible", visible, "s_q s_kv").dtype != torch.bool:
        raise TypeError(f"visible must be a bool tensor, got {describe(visible)}")
    require_same_device({"q": q, "k": k, "v": v, "visible": visible})
    require_scale("softmax_scale", softmax_scale)
    (s_q, h_q, _), (s_kv, h_kv, _) = q.shape, k.shape
    require_size("k", k, 2, q.shape[2], "as q")
    require_size("v", v, 0, s_kv, "the keys of k")
    require_size("v", v, 1, h_kv, "the heads of k")
    require_size("visible", visible, 0, s_q, "one row a query")
    require_size("visible", visible, 1, s_kv, "one column a key")
    if h_kv == 0 or h_q % h_kv:
        raise ValueError(f"q has {h_q} heads, which must be a multiple of the {h_kv} heads of k")

    out = torch.zeros(s_q, h_q, v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((s_q, h_q), -torch.inf, dtype=torch.float64, device=q.device)
    for head in range(h_q):
        keys, values = k[:, head * h_kv // h_q].double(), v[:, head * h_kv // h_q].double()
        scores = (q[:, head].double() @ keys.T * softmax_scale).masked_fill(~visible, -torch.inf)
        lse[:, head] = torch.logsumexp(scores, dim=-1)
        lse[lse[:, head] == torch.inf, head] = torch.nan
        # logsumexp of nothing is -inf; -inf minus -inf would be NaN, so such rows use 0 instead.
        anchor = torch.where(lse[:, head] == -torch.inf, 0.0, lse[:, head])
        weights = torch.exp(scores - anchor[:, None])
        # 0 * NaN is NaN: clean values go through one product, others only to rows that see them.
        clean = values.isfinite().all(dim=-1)
        out[:, head] = weights @ torch.where(clean[:, None], values, 0.0)
        for key in (~clean).nonzero().flatten().tolist():
            seen = visible[:, key]
            out[seen, head] += weights[seen, key, None] * values[key]
    return AttentionResult(out, lse)
