"""Bugs and wrong beliefs about verifier batches, as published libraries had them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.attention import causal_attention
from mla_ref.numerics import AttentionResult


def causal_attention_hiding_candidates(
    q: Float[Tensor, "s_q h_q d_qk"],
    k: Float[Tensor, "s_kv h_kv d_qk"],
    v: Float[Tensor, "s_kv h_kv d_v"],
    *,
    softmax_scale: float,
) -> AttentionResult:
    """BUG: a row sees what was cached before this step, and itself, but no earlier new row.

    What decode was believed to do with several rows of a request. Right with a single row.
    """
    cached = k.shape[0] - q.shape[0]
    parts = []
    for row in range(q.shape[0]):
        keys = [*range(cached), cached + row]
        parts.append(
            causal_attention(q[row : row + 1], k[keys], v[keys], softmax_scale=softmax_scale)
        )
    return AttentionResult(*(torch.cat(part) for part in zip(*parts, strict=True)))


def is_verifier_batch_with_padding(
    query_lens: Sequence[int],
    is_prefilling: Sequence[bool] | None,
    num_speculative_tokens: int,
    *,
    num_reqs: int | None = None,
) -> bool:
    """BUG: asks the padded requests, too, whether they are prefilling.

    A row that a finished request has left may keep its flag. `num_reqs` does not help where it is
    the padded count, as it is in a replayed graph.
    """
    longest = max(query_lens, default=0)
    return (
        num_speculative_tokens > 0
        and 1 < longest <= num_speculative_tokens + 1
        and is_prefilling is not None
        and not any(is_prefilling)
    )
