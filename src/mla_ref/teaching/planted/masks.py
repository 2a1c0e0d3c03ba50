"""Bugs in who sees whom, as published libraries had them."""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.attention import causal_attention, causal_lens
from mla_ref.attention.masking import grouped, visible_mask
from mla_ref.numerics import AttentionResult


def top_left_causal_attention(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    *,
    softmax_scale: float,
) -> AttentionResult:
    """BUG: row i sees the keys 0 .. i, whatever came before this call.

    Right while s_q equals s_kv, so a test of whole prompts passes. A one-token decode sees key 0
    alone and returns v[0].
    """
    s_q, s_kv = q.shape[0], k.shape[0]
    top_left = torch.arange(1, s_q + 1).clamp(max=s_kv)
    return causal_attention(q, k, v, softmax_scale=softmax_scale, visible_lens=top_left)


def finite_mask_attention(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    *,
    softmax_scale: float,
) -> AttentionResult:
    """BUG: hidden scores become -1e6 and not -inf.

    Right for every row that sees a key. A row that sees none gets equal scores everywhere, so its
    softmax is uniform: it returns the average of values it may not see, and an LSE of about -1e6
    that passes for a number.
    """
    visible = visible_mask(causal_lens(q.shape[0], k.shape[0]), 0, k.shape[0])
    scores = torch.einsum("shgd,thd->shgt", grouped(q * softmax_scale, k.shape[1]), k)
    scores = scores.masked_fill(~visible[:, None, None, :], -1e6)
    out = torch.einsum("shgt,thd->shgd", scores.softmax(dim=-1), v)
    return AttentionResult(out.flatten(1, 2), scores.logsumexp(dim=-1).flatten(1, 2))
