"""Which keys are worth attending to: index scores, top-k, and from positions to slots."""

from mla_ref.indexer.convert import own_positions, positions_to_slots
from mla_ref.indexer.fixed_shape import all_positions, select_positions_fixed
from mla_ref.indexer.scores import index_scores
from mla_ref.indexer.select import select_positions
from mla_ref.indexer.topk import select_topk, select_topk_chunked

__all__ = [
    "all_positions",
    "index_scores",
    "own_positions",
    "positions_to_slots",
    "select_positions",
    "select_positions_fixed",
    "select_topk",
    "select_topk_chunked",
]
