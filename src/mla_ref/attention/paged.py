"""Rung 4: a ragged batch over pages. Checked against rung 3.

Nothing changes but where a key is found: a tile is a page, and the block table says which. Requests
of any length lie one after the other in one tensor of new tokens.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention.masking import causal_lens, grouped, require_heads, visible_mask
from mla_ref.attention.online_softmax import OnlineSoftmax
from mla_ref.cache.pages import require_batch, require_page_size, require_pages
from mla_ref.checks import (
    describe,
    require_float,
    require_same_device,
    require_scale,
    require_size,
)
from mla_ref.numerics import AttentionResult, compute_dtype


def paged_attention(
    q: Float[Tensor, "num_tokens h_q d_qk"],
    k_cache: Float[Tensor, "pages page_size h_kv d_qk"],
    v_cache: Float[Tensor, "pages page_size h_kv d_v"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
) -> AttentionResult:
    """Causal attention of every request's new tokens over its own pages.

    The new tokens' keys and values must lie in the cache already: write first, attend second. Row j
    of a request then sees seq_len - q_len + j + 1 keys, whatever comes after it.

    Args:
        q: New tokens of all requests, one request after the other.
        k_cache: Keys; page_size is the second dimension, any strides.
        v_cache: Values in the same slots.
        query_start_loc: Offsets of each request's rows in q, from 0 to num_tokens.
        seq_lens: Length of each request with its new tokens; 0 for a padded request.
        block_table: Pages of each request in order. Entries past its length are never read.
        softmax_scale: Factor on q·k.

    Returns:
        `out` [num_tokens, h_q, d_v] in q's dtype and `lse` [num_tokens, h_q].

    Raises:
        ValueError: A length is negative, the block table is too narrow or names a page outside
            the cache, or shapes do not fit.
    """
    require_float("q", q, "num_tokens h_q d_qk")
    require_float("k_cache", k_cache, "pages page_size h_kv d_qk")
    require_float("v_cache", v_cache, "pages page_size h_kv d_v")
    require_same_device({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    require_page_size("k_cache", k_cache)
    require_size("k_cache", k_cache, -1, q.shape[-1], "as q")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache must have the pages and heads of k_cache, got "
            f"{describe(v_cache)} beside {describe(k_cache)}"
        )
    dtype = compute_dtype(q, k_cache, v_cache)

    def page(number: int, rows: int) -> tuple[Tensor, Tensor]:
        return k_cache[number, :rows].to(dtype), v_cache[number, :rows].to(dtype)

    return attend_pages(
        q,
        page,
        k_cache.shape,
        v_cache.shape[-1],
        dtype,
        query_start_loc,
        seq_lens,
        block_table,
        softmax_scale,
    )


def attend_pages(
    q: Float[Tensor, "num_tokens h_q d_qk"],
    page: Callable[[int, int], tuple[Tensor, Tensor]],
    cache_shape: torch.Size,
    d_v: int,
    dtype: torch.dtype,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    softmax_scale: float,
) -> AttentionResult:
    """The loop over requests and pages that rungs 4 and 6 share.

    Args:
        q: As in `paged_attention`.
        page: Gives keys [rows, h_kv, d_qk] and values [rows, h_kv, d_v] of a page's first rows,
            in `dtype`. Rows past a request's length are never asked for.
        cache_shape: (pages, page_size, h_kv, ...).
        d_v: Width of a value.
        dtype: What to compute in.
        query_start_loc: As in `paged_attention`.
        seq_lens: As in `paged_attention`.
        block_table: As in `paged_attention`.
        softmax_scale: Factor on q·k.
    """
    require_scale("softmax_scale", softmax_scale)
    num_pages, page_size, h_kv = cache_shape[:3]
    require_heads(q.shape[1], h_kv)
    require_batch(query_start_loc, seq_lens, block_table, page_size)
    require_pages(block_table, seq_lens, num_pages, page_size)
    require_size("q", q, 0, int(query_start_loc[-1]), "the end of query_start_loc")
    out = torch.zeros(*q.shape[:2], d_v, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        queries = grouped(q[rows].to(dtype) * softmax_scale, h_kv)
        lens = causal_lens(queries.shape[0], seq_len, q.device)
        state = OnlineSoftmax.empty(queries, d_v)
        for first, number, count in _pages_of(block_table[request], seq_len, page_size):
            keys, values = page(number, count)
            state = state.add(queries, keys, values, visible_mask(lens, first, count))
        out[rows], lse[rows] = state.result()
    return AttentionResult(out.to(q.dtype), lse)


def _pages_of(
    block_table_row: Int[Tensor, " max_pages"], seq_len: int, page_size: int
) -> Iterator[tuple[int, int, int]]:
    """(position of the page's first token, page number, rows in use) of each page in order."""
    for index, first in enumerate(range(0, seq_len, page_size)):
        yield first, int(block_table_row[index]), min(page_size, seq_len - first)
