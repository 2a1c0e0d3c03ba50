"""Rung 8: the lightning indexer over a ragged batch on pages: from queries and keys to positions.

Its scores are checked against float64, its lists against the scores.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.cache.index_keys import (
    INDEX_HEAD_DIM,
    page_size_of,
    quantise_index_keys,
    read_index_keys,
)
from mla_ref.cache.pages import require_batch, require_pages
from mla_ref.checks import (
    require_choice,
    require_count,
    require_float,
    require_same_device,
    require_size,
)
from mla_ref.indexer.scores import index_scores
from mla_ref.indexer.topk import select_topk, select_topk_chunked
from mla_ref.numerics.float8 import SCALE_RULES, from_e4m3


def select_positions(
    q: Float[Tensor, "num_tokens index_heads d_i"],
    weights: Float[Tensor, "num_tokens index_heads"],
    index_cache: Shaped[Tensor, "pages *page"],
    *,
    query_start_loc: Int[Tensor, " b_plus_1"],
    seq_lens: Int[Tensor, " b"],
    block_table: Int[Tensor, "b max_pages"],
    topk: int,
    scale_rule: str = "pow2-floor",
    chunk: int = 8192,
    score: Callable[..., Tensor] = index_scores,
    select: Callable[..., Tensor] = select_topk,
) -> Int[Tensor, "num_tokens topk"]:
    """The keys that each new token will attend to, best first.

    Row i of a request's q_len new tokens chooses among its first seq_len - q_len + i + 1 keys: the
    bound is the whole context, never the chunk that runs (a resumed prefill must choose as one
    shot does). Keys are scored `chunk` at a time, so 128k keys need no 128k-wide score matrix.

    Lengths and block table are looked at and must lie on the host; queries and cache may be
    anywhere.

    Args:
        q: Index queries, turned by RoPE.
        weights: Factors of the index heads, see `index_scores`.
        index_cache: From `new_index_cache`. Where it holds FP8 keys, queries are quantised too.
        query_start_loc: As in `paged_attention`.
        seq_lens: As in `paged_attention`.
        block_table: As in `paged_attention`.
        topk: Width of the result.
        scale_rule: Of the queries' FP8 scales.
        chunk: Keys at a time.
        score: Who makes the scores, as `index_scores` does.
        select: Who chooses among them where one chunk holds all keys, as `select_topk` does.

    Returns:
        int32 positions in the token's own request; -1 where there are fewer keys than `topk`.
    """
    page_size = require_index_inputs(q, weights, index_cache, topk, scale_rule)
    require_batch(query_start_loc, seq_lens, block_table, page_size)
    require_pages(block_table, seq_lens, index_cache.shape[0], page_size)
    require_size("q", q, 0, int(query_start_loc[-1]), "the end of query_start_loc")
    require_count("chunk", chunk, at_least=1)
    if index_cache.dtype == torch.uint8:
        data, scale = quantise_index_keys(q, scale_rule)
        q = from_e4m3(data) * scale[..., None]
    starts, parts = query_start_loc.tolist(), []
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        visible_lens = torch.arange(
            seq_len - (rows.stop - rows.start) + 1, seq_len + 1, device=q.device
        )
        score_chunk = partial(
            _score_chunk, score, q[rows], weights[rows], index_cache, block_table[request]
        )
        if seq_len <= chunk:
            parts.append(select(score_chunk(0, seq_len), visible_lens, topk))
        else:
            parts.append(select_topk_chunked(score_chunk, seq_len, visible_lens, topk, chunk=chunk))
    if not parts:
        return torch.empty(0, topk, dtype=torch.int32, device=q.device)
    return torch.cat(parts)


def require_index_inputs(
    q: Tensor, weights: Tensor, index_cache: Tensor, topk: int, scale_rule: str
) -> int:
    """Return the cache's page size if queries, weights and cache fit; reads no values."""
    require_float("q", q, "num_tokens index_heads d_i")
    require_float("weights", weights, "num_tokens index_heads")
    page_size = page_size_of(index_cache, "index_cache")
    for dim in (0, 1):
        require_size("weights", weights, dim, q.shape[dim], "as q")
    width = INDEX_HEAD_DIM if index_cache.dtype == torch.uint8 else index_cache.shape[2]
    require_size("q", q, 2, width, "the width of an index key")
    require_same_device({"q": q, "weights": weights, "index_cache": index_cache})
    require_choice("scale_rule", scale_rule, SCALE_RULES)
    require_count("topk", topk)
    return page_size


def _score_chunk(
    score: Callable[..., Tensor],
    q: Float[Tensor, "rows index_heads d_i"],
    weights: Float[Tensor, "rows index_heads"],
    index_cache: Shaped[Tensor, "pages *page"],
    block_table_row: Int[Tensor, " max_pages"],
    first: int,
    count: int,
) -> Float[Tensor, "rows count"]:
    """Scores of some keys of one request."""
    return score(q, read_index_keys(index_cache, block_table_row, first, count), weights)
