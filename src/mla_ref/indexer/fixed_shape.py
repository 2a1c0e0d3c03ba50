"""Which keys a row attends to, in shapes that depend on the size of a step and on no length in it.

What a CUDA graph can replay: nothing is read back to the host, every request has the width of its
row in the block table, and what lies behind its length is masked. More is computed than is needed,
which a GPU does in less time than the host takes to ask how much that is.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.cache import index_keys_of_pages
from mla_ref.cache.index_keys import quantise_index_keys
from mla_ref.checks import require_count, require_integer, require_same_device, require_size
from mla_ref.indexer.scores import index_scores
from mla_ref.indexer.select import require_index_inputs
from mla_ref.indexer.topk import select_topk
from mla_ref.numerics.float8 import from_e4m3


def all_positions(visible_lens: Int[Tensor, " rows"], width: int) -> Int[Tensor, "rows width"]:
    """Positions 0 .. visible_lens[row] - 1, then -1: the list that names every key."""
    require_integer("visible_lens", visible_lens, "rows")
    positions = torch.arange(require_count("width", width), device=visible_lens.device)
    return torch.where(positions < visible_lens[:, None], positions, -1)


def select_positions_fixed(
    q: Float[Tensor, "rows index_heads d_i"],
    weights: Float[Tensor, "rows index_heads"],
    index_cache: Shaped[Tensor, "pages *page"],
    *,
    visible_lens: Int[Tensor, " rows"],
    request_of_row: Int[Tensor, " rows"],
    block_table: Int[Tensor, "b max_pages"],
    topk: int,
    scale_rule: str = "pow2-floor",
    score: Callable[..., Tensor] = index_scores,
    select: Callable[..., Tensor] = select_topk,
) -> Int[Tensor, "rows topk"]:
    """The lists of `select_positions`, one a row of a padded step.

    Every row is scored against the keys of every request and keeps the scores of its own: requests
    are few, and which rows are whose is known on the device alone.

    Args:
        q: Index queries, turned by RoPE.
        weights: Factors of the index heads, see `index_scores`.
        index_cache: From `new_index_cache`.
        visible_lens: Keys that each row may see; 0 for padding, whose list is then empty.
        request_of_row: Request of each row; -1 for padding.
        block_table: Pages of each request; -1 or anything else past its length.
        topk: Width of the result.
        scale_rule: Of the queries' FP8 scales.
        score: As `index_scores`.
        select: As `select_topk`.

    Returns:
        int32 positions; -1 where there are fewer keys than `topk`.
    """
    page_size = require_index_inputs(q, weights, index_cache, topk, scale_rule)
    require_integer("block_table", block_table, "b max_pages")
    tensors = {"q": q, "block_table": block_table}
    for name, value in (("visible_lens", visible_lens), ("request_of_row", request_of_row)):
        require_size(name, require_integer(name, value, "rows"), 0, q.shape[0], "as q")
        tensors[name] = value
    require_same_device(tensors)
    if index_cache.dtype == torch.uint8:
        data, scale = quantise_index_keys(q, scale_rule)
        q = from_e4m3(data) * scale[..., None]
    scores = weights.new_zeros(q.shape[0], block_table.shape[1] * page_size)
    for request, pages in enumerate(block_table):
        found = score(q, index_keys_of_pages(index_cache, pages), weights)
        # Never added: where a page is not there, the keys may be NaN.
        scores = torch.where((request_of_row == request)[:, None], found, scores)
    return select(scores, visible_lens, topk)
