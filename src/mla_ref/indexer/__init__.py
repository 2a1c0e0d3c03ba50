"""Which keys are worth attending to: index scores, top-k, and from positions to slots."""

from mla_ref.indexer.convert import own_positions, positions_to_slots
from mla_ref.indexer.schedule import full_layers, index_source, is_full_layer
from mla_ref.indexer.scores import index_scores
from mla_ref.indexer.topk import select_topk, select_topk_chunked

__all__ = [
    "full_layers",
    "index_scores",
    "index_source",
    "is_full_layer",
    "own_positions",
    "positions_to_slots",
    "select_topk",
    "select_topk_chunked",
]
