"""Bugs in reading a paged cache, as published libraries had them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention import causal_lens, paged_attention
from mla_ref.attention.masking import grouped, visible_mask
from mla_ref.cache import pages_needed
from mla_ref.numerics import AttentionResult


def whole_page_attention(
    q: Float[Tensor, "num_tokens h_q d_qk"],
    k_cache: Float[Tensor, "pages page_size h_kv d_qk"],
    v_cache: Float[Tensor, "pages page_size h_kv d_v"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
) -> AttentionResult:
    """BUG: reads whole pages, hides the scores of unused slots and multiplies all values.

    Right while every slot holds a finite number, as in a cache that begins as zeros. The weight of
    an unused slot is 0, and 0 times NaN is NaN: one slot spoils every row of its request.
    """
    page_size, h_kv = k_cache.shape[1:3]
    out, lse = q.new_zeros(*q.shape[:2], v_cache.shape[-1]), q.new_zeros(q.shape[:2])
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(int(query_start_loc[request]), int(query_start_loc[request + 1]))
        pages = block_table[request, : pages_needed(seq_len, page_size)].long()
        keys, values = k_cache[pages].flatten(0, 1), v_cache[pages].flatten(0, 1)
        queries = grouped(q[rows] * softmax_scale, h_kv)
        visible = visible_mask(causal_lens(queries.shape[0], seq_len), 0, keys.shape[0])
        scores = torch.einsum("shgd,thd->shgt", queries, keys)
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        weights = scores.softmax(dim=-1)  # exactly 0 where the slot is unused
        out[rows] = torch.einsum("shgt,thd->shgd", weights, values).flatten(1, 2)
        lse[rows] = scores.logsumexp(dim=-1).flatten(1, 2)
    return AttentionResult(out, lse)


def neighbouring_pages_attention(
    q: Float[Tensor, "num_tokens h_q d_qk"],
    k_cache: Float[Tensor, "pages page_size h_kv d_qk"],
    v_cache: Float[Tensor, "pages page_size h_kv d_v"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
) -> AttentionResult:
    """BUG: looks up a request's first page and takes the others for its neighbours in memory.

    Right on a fresh server, which hands out the pages 0, 1, 2 and so on. Once pages have come back
    and gone out again, a request reads what belongs to others.
    """
    steps = torch.arange(block_table.shape[1])
    neighbours = (block_table[:, :1].long() + steps) % k_cache.shape[0]
    return paged_attention(
        q,
        k_cache,
        v_cache,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=neighbours,
        softmax_scale=softmax_scale,
    )
