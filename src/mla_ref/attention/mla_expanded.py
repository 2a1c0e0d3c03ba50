"""Rung 5: multi-head latent attention, expanded. Checked against rung 4.

The cache holds one row a token for all heads together: a latent c of d_c numbers and one rotary
key k_pe of d_r numbers (DeepSeek-V2, arXiv:2405.04434). Keys and values are rebuilt from it:

    k[h] = [W_UK[h] c ; k_pe],    v[h] = W_UV[h] c.

576 numbers are cached in place of 128 heads * (192 + 128) = 40,960, 71 times fewer. But every
step expands every cached row again: rung 6 removes that.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention.vectorised import vectorised_attention
from mla_ref.cache.pages import gather_rows, require_batch, require_page_size, require_pages
from mla_ref.checks import (
    require_float,
    require_same_device,
    require_same_dtype,
    require_scale,
    require_size,
)
from mla_ref.numerics import AttentionResult, compute_dtype


def expand_kv(
    kv_rows: Float[Tensor, "s_kv d_row"],
    w_uk: Float[Tensor, "h d_n d_c"],
    w_uv: Float[Tensor, "h d_v d_c"],
) -> tuple[Float[Tensor, "s_kv h d_qk"], Float[Tensor, "s_kv h d_v"]]:
    """Keys and values of every head from the cached rows.

    Args:
        kv_rows: [latent d_c | rotary key d_r] of each token, the rotary key already turned.
        w_uk: Up-projection of each head's key.
        w_uv: Up-projection of each head's value.

    Returns:
        k with d_qk = d_n + d_r, the part without positions first, and v.
    """
    require_float("kv_rows", kv_rows, "s_kv d_row")
    require_mla_weights(kv_rows.shape[-1], w_uk, w_uv)
    require_same_dtype({"kv_rows": kv_rows, "w_uk": w_uk, "w_uv": w_uv})
    require_same_device({"kv_rows": kv_rows, "w_uk": w_uk})
    d_c, heads = w_uk.shape[-1], w_uk.shape[0]
    latent, k_pe = kv_rows[:, :d_c], kv_rows[:, d_c:]
    k_nope = torch.einsum("tc,hnc->thn", latent, w_uk)
    v = torch.einsum("tc,hvc->thv", latent, w_uv)
    return torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1)], dim=-1), v


def mla_expanded_attention(
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
    """Ordinary multi-head attention over keys and values rebuilt from the latent cache.

    2 * h * (d_n + d_r + d_v) operations for each pair of query and key, and 2 * h * d_c *
    (d_n + d_v) for each cached row to expand it.

    Args:
        q_nope: Part of the queries without positions.
        q_pe: Part of the queries that has been turned by RoPE.
        kv_cache: Rows [latent d_c | rotary key d_r] in pages.
        w_uk: Up-projection of each head's key.
        w_uv: Up-projection of each head's value.
        query_start_loc: As in `paged_attention`.
        seq_lens: As in `paged_attention`.
        block_table: As in `paged_attention`.
        softmax_scale: (d_n + d_r)^-0.5 times what YaRN adds; never (d_c + d_r)^-0.5.

    Returns:
        `out` [num_tokens, h, d_v] in q_nope's dtype and `lse` [num_tokens, h].
    """
    require_mla_inputs(q_nope, q_pe, kv_cache, w_uk, w_uv, softmax_scale)
    require_batch(query_start_loc, seq_lens, block_table, kv_cache.shape[1])
    require_pages(block_table, seq_lens, *kv_cache.shape[:2])
    require_size("q_nope", q_nope, 0, int(query_start_loc[-1]), "the end of query_start_loc")
    dtype = compute_dtype(q_nope, q_pe, kv_cache, w_uk, w_uv)
    out = q_nope.new_zeros(*q_nope.shape[:2], w_uv.shape[1])
    lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=dtype, device=q_nope.device)
    q = torch.cat([q_nope, q_pe], dim=-1)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        kv_rows = gather_rows(kv_cache, block_table[request], seq_len)
        k, v = expand_kv(kv_rows.to(dtype), w_uk.to(dtype), w_uv.to(dtype))
        result = vectorised_attention(q[None, rows], k[None], v[None], softmax_scale=softmax_scale)
        out[rows], lse[rows] = result.out[0], result.lse[0]
    return AttentionResult(out, lse)


def require_mla_inputs(
    q_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, w_uk: Tensor, w_uv: Tensor, softmax_scale: float
) -> None:
    """Raise unless queries, cached rows and up-projections fit together."""
    require_float("q_nope", q_nope, "num_tokens h d_n")
    require_float("q_pe", q_pe, "num_tokens h d_r")
    require_float("kv_cache", kv_cache, "pages page_size d_row")
    require_page_size("kv_cache", kv_cache)
    require_scale("softmax_scale", softmax_scale)
    require_mla_weights(kv_cache.shape[-1], w_uk, w_uv)
    require_same_device({"q_nope": q_nope, "q_pe": q_pe, "kv_cache": kv_cache, "w_uk": w_uk})
    require_size("q_nope", q_nope, 1, w_uk.shape[0], "the heads of w_uk")
    require_size("q_nope", q_nope, 2, w_uk.shape[1], "d_n of w_uk")
    for dim in (0, 1):
        require_size("q_pe", q_pe, dim, q_nope.shape[dim], "as q_nope")
    d_r = kv_cache.shape[-1] - w_uk.shape[-1]
    require_size("q_pe", q_pe, 2, d_r, "the row of kv_cache less d_c of w_uk")


def require_mla_weights(d_row: int, w_uk: Tensor, w_uv: Tensor) -> None:
    """Raise unless both up-projections read the same latent, and it fits into a cached row."""
    require_float("w_uk", w_uk, "h d_n d_c")
    require_float("w_uv", w_uv, "h d_v d_c")
    require_same_device({"w_uk": w_uk, "w_uv": w_uv})
    require_size("w_uv", w_uv, 0, w_uk.shape[0], "the heads of w_uk")
    require_size("w_uv", w_uv, 2, w_uk.shape[2], "d_c of w_uk")
    if d_row < w_uk.shape[2]:
        raise ValueError(
            f"a cached row has {d_row} numbers, too few for the latent of {w_uk.shape[2]} that "
            "w_uk reads"
        )
