"""Rung 3: attention in tiles, with a running maximum and sum. Checked against rung 2.

The scores of one tile are all that is ever held: s_q * h_q * block_size numbers in place of
s_q * h_q * s_kv (FlashAttention, arXiv:2205.14135).
"""

from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention.masking import grouped, require_qkv, require_visible_lens, visible_mask
from mla_ref.attention.online_softmax import OnlineSoftmax
from mla_ref.checks import require_count
from mla_ref.numerics import AttentionResult, compute_dtype


def online_attention(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    *,
    softmax_scale: float,
    visible_lens: Int[Tensor, " s_q"] | None = None,
    block_size: int = 64,
) -> AttentionResult:
    """Causal attention over tiles of `block_size` keys.

    Args:
        q: As in `causal_attention`.
        k: As in `causal_attention`.
        v: As in `causal_attention`.
        softmax_scale: Factor on q·k.
        visible_lens: As in `causal_attention`.
        block_size: Keys a tile; any number from 1.

    Returns:
        As `causal_attention`; results of different block sizes differ by rounding.
    """
    require_qkv(q, k, v, softmax_scale)
    require_count("block_size", block_size, at_least=1)
    lens = require_visible_lens(visible_lens, (q.shape[0],), k.shape[0], q.device)
    dtype = compute_dtype(q, k, v)
    queries = grouped(q.to(dtype) * softmax_scale, k.shape[1])
    state = OnlineSoftmax.empty(queries, v.shape[-1])
    for first in range(0, k.shape[0], block_size):
        keys = k[first : first + block_size].to(dtype)
        values = v[first : first + block_size].to(dtype)
        state = state.add(queries, keys, values, visible_mask(lens, first, keys.shape[0]))
    out, lse = state.result()
    return AttentionResult(out.to(q.dtype), lse)
