"""Rung 7: latent attention over the FP8 cache. Checked against rung 6 on the dequantised rows.

The same multi-query attention as rung 6, but a page's rows are 656 bytes each and become numbers
when the page is read, never before: the cache stays as small as it is stored. What is lost was lost
when the row was written. The bytes of a row determine its numbers exactly, so this rung and rung 6
on those numbers may differ by rounding of the sums only.
"""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_ref.attention.paged import attend_pages
from mla_ref.cache.fp8_rows import LATENT, ROPE, ROW_BYTES, unpack_fp8_rows
from mla_ref.cache.pages import require_page_size
from mla_ref.checks import (
    describe,
    require_choice,
    require_float,
    require_same_device,
    require_size,
)
from mla_ref.numerics import AttentionResult, compute_dtype
from mla_ref.numerics.float8 import SCALE_READERS


def fp8_latent_attention(
    q: Float[Tensor, "num_tokens h 576"],
    kv_cache: UInt8[Tensor, "pages page_size 656"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
    scale_reader: str = "stored",
) -> AttentionResult:
    """Dense causal attention over 656-byte rows.

    Args:
        q: Absorbed queries, from `absorb_query`.
        kv_cache: Rows from `write_fp8_rows`, in pages.
        query_start_loc: As in `paged_attention`.
        seq_lens: As in `paged_attention`.
        block_table: As in `paged_attention`.
        softmax_scale: The un-absorbed scale.
        scale_reader: How a row's scales are read, see `unpack_fp8_rows`.

    Returns:
        As `latent_attention`.
    """
    require_float("q", q, "num_tokens h 576")
    require_size("q", q, 2, LATENT + ROPE, "the numbers of an FP8 row")
    if not isinstance(kv_cache, Tensor) or kv_cache.ndim != 3 or kv_cache.shape[2] != ROW_BYTES:
        raise ValueError(
            f"kv_cache must have the shape [pages, page_size, {ROW_BYTES}], got "
            f"{describe(kv_cache)}"
        )
    if kv_cache.dtype != torch.uint8:
        raise TypeError(f"kv_cache must hold uint8 bytes, got {describe(kv_cache)}")
    require_choice("scale_reader", scale_reader, SCALE_READERS)
    require_same_device({"q": q, "kv_cache": kv_cache})
    require_page_size("kv_cache", kv_cache)
    dtype = compute_dtype(q)

    def page(number: int, rows: int) -> tuple[Tensor, Tensor]:
        unpacked = unpack_fp8_rows(kv_cache[number, :rows, None], scale_reader=scale_reader)
        keys = unpacked.to(dtype)
        return keys, keys[..., :LATENT]

    return attend_pages(
        q,
        page,
        kv_cache.unsqueeze(2).shape,
        LATENT,
        dtype,
        query_start_loc,
        seq_lens,
        block_table,
        softmax_scale,
    )
