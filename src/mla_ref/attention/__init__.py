"""The rungs of attention: one result, written many times, each checked against the one before."""

from mla_ref.attention.causal import causal_attention
from mla_ref.attention.fp8_latent import fp8_latent_attention
from mla_ref.attention.masking import causal_lens
from mla_ref.attention.mla_absorbed import (
    absorb_query,
    latent_attention,
    mla_absorbed_attention,
    project_values,
)
from mla_ref.attention.mla_expanded import expand_kv, mla_expanded_attention
from mla_ref.attention.online import online_attention
from mla_ref.attention.online_softmax import OnlineSoftmax
from mla_ref.attention.paged import paged_attention
from mla_ref.attention.sparse_decode import plan_splits, sparse_decode
from mla_ref.attention.sparse_extend import sparse_extend
from mla_ref.attention.vectorised import vectorised_attention

__all__ = [
    "OnlineSoftmax",
    "absorb_query",
    "causal_attention",
    "causal_lens",
    "expand_kv",
    "fp8_latent_attention",
    "latent_attention",
    "mla_absorbed_attention",
    "mla_expanded_attention",
    "online_attention",
    "paged_attention",
    "plan_splits",
    "project_values",
    "sparse_decode",
    "sparse_extend",
    "vectorised_attention",
]
