"""Rung 6: multi-head latent attention, absorbed. Checked against rung 5.

q · (W_UK c) = (W_UK^T q) · c. So the up-projection of the keys moves into the query, once a query
row, and the up-projection of the values moves behind the sum, since it is linear:

    q~[h] = W_UK[h]^T q_nope[h],    o[h] = W_UV[h] (sum of p * c).

What is left is multi-query attention: every head reads the same cached row as its key (d_c + d_r =
576 numbers) and the first d_c = 512 of it as its value. No key or value is ever rebuilt, so a row
is read once for all heads: 1,152 bytes in bfloat16. The price is 2 * h * (2 d_c + d_r) operations
a pair, 3.4 times those of rung 5 for DeepSeek's sizes: right for decode, where bytes are short,
wrong for a long prefill, where operations are.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention.mla_expanded import require_mla_inputs
from mla_ref.attention.paged import attend_pages
from mla_ref.cache.pages import require_batch, require_page_size
from mla_ref.checks import (
    require_count,
    require_float,
    require_same_device,
    require_same_dtype,
    require_size,
)
from mla_ref.numerics import AttentionResult, compute_dtype


def absorb_query(
    q_nope: Float[Tensor, "num_tokens h d_n"],
    q_pe: Float[Tensor, "num_tokens h d_r"],
    w_uk: Float[Tensor, "h d_n d_c"],
) -> Float[Tensor, "num_tokens h d_row"]:
    """Queries in the space of the cached row: [W_UK^T q_nope (d_c) | q_pe (d_r)]."""
    require_float("q_nope", q_nope, "num_tokens h d_n")
    require_float("q_pe", q_pe, "num_tokens h d_r")
    require_float("w_uk", w_uk, "h d_n d_c")
    require_same_dtype({"q_nope": q_nope, "q_pe": q_pe, "w_uk": w_uk})
    require_same_device({"q_nope": q_nope, "q_pe": q_pe, "w_uk": w_uk})
    for dim in (0, 1):
        require_size("q_pe", q_pe, dim, q_nope.shape[dim], "as q_nope")
        require_size("w_uk", w_uk, dim, q_nope.shape[dim + 1], "heads and d_n of q_nope")
    return torch.cat([torch.einsum("shn,hnc->shc", q_nope, w_uk), q_pe], dim=-1)


def project_values(
    latent_out: Float[Tensor, "num_tokens h d_c"], w_uv: Float[Tensor, "h d_v d_c"]
) -> Float[Tensor, "num_tokens h d_v"]:
    """Each head's output from its weighted sum of latents."""
    require_float("latent_out", latent_out, "num_tokens h d_c")
    require_float("w_uv", w_uv, "h d_v d_c")
    require_same_dtype({"latent_out": latent_out, "w_uv": w_uv})
    require_same_device({"latent_out": latent_out, "w_uv": w_uv})
    require_size("w_uv", w_uv, 0, latent_out.shape[1], "the heads of latent_out")
    require_size("w_uv", w_uv, 2, latent_out.shape[2], "d_c of latent_out")
    return torch.einsum("shc,hvc->shv", latent_out, w_uv)


def latent_attention(
    q: Float[Tensor, "num_tokens h d_row"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
    kv_lora_rank: int,
) -> AttentionResult:
    """Multi-query attention over latent rows: what the serving kernels compute.

    Args:
        q: Absorbed queries, from `absorb_query`.
        kv_cache: Rows [latent d_c | rotary key d_r] in pages: the key of every head is the whole
            row, its value the first `kv_lora_rank` numbers of it.
        query_start_loc: As in `paged_attention`.
        seq_lens: As in `paged_attention`.
        block_table: As in `paged_attention`.
        softmax_scale: The un-absorbed scale; it has nothing to do with the row's width.
        kv_lora_rank: d_c.

    Returns:
        `out` [num_tokens, h, d_c] in q's dtype, still in latent space, and `lse` [num_tokens, h].
    """
    require_float("q", q, "num_tokens h d_row")
    require_float("kv_cache", kv_cache, "pages page_size d_row")
    require_same_device({"q": q, "kv_cache": kv_cache})
    require_page_size("kv_cache", kv_cache)
    require_size("kv_cache", kv_cache, -1, q.shape[-1], "as q")
    if require_count("kv_lora_rank", kv_lora_rank, at_least=1) > q.shape[-1]:
        raise ValueError(
            f"kv_lora_rank must be at most the row's {q.shape[-1]} numbers, got {kv_lora_rank}"
        )
    dtype = compute_dtype(q, kv_cache)

    def page(number: int, rows: int) -> tuple[Tensor, Tensor]:
        keys = kv_cache[number, :rows, None].to(dtype)
        return keys, keys[..., :kv_lora_rank]

    one_head = torch.Size((*kv_cache.shape[:2], 1))
    return attend_pages(
        q,
        page,
        one_head,
        kv_lora_rank,
        dtype,
        query_start_loc,
        seq_lens,
        block_table,
        softmax_scale,
    )


def mla_absorbed_attention(
    q_nope: Float[Tensor, "num_tokens h d_n"],
    q_pe: Float[Tensor, "num_tokens h d_r"],
    kv_cache: Float[Tensor, "pages page_size d_row"],
    w_uk: Float[Tensor, "h d_n d_c"],
    w_uv: Float[Tensor, "h d_v d_c"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
) -> AttentionResult:
    """The same arguments and result as `mla_expanded_attention`, by way of the latent space."""
    require_mla_inputs(q_nope, q_pe, kv_cache, w_uk, w_uv, softmax_scale)
    require_batch(query_start_loc, seq_lens, block_table, kv_cache.shape[1])
    require_size("q_nope", q_nope, 0, int(query_start_loc[-1]), "the end of query_start_loc")
    dtype = compute_dtype(q_nope, q_pe, kv_cache, w_uk, w_uv)
    latent = latent_attention(
        absorb_query(q_nope.to(dtype), q_pe.to(dtype), w_uk.to(dtype)),
        kv_cache,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        kv_lora_rank=w_uk.shape[-1],
    )
    out = project_values(latent.out, w_uv.to(dtype))
    return AttentionResult(out.to(q_nope.dtype), latent.lse)
