"""Figures of the lessons. Each takes the reader's own data and returns a matplotlib Figure."""

from mla_ref.teaching.figures.bank_turns import bank_turns
from mla_ref.teaching.figures.block_tables import block_tables
from mla_ref.teaching.figures.copy_timeline import copy_timeline
from mla_ref.teaching.figures.error_histogram import error_histogram
from mla_ref.teaching.figures.errors import error_by_row
from mla_ref.teaching.figures.forms import forms_by_rows
from mla_ref.teaching.figures.fp8_rows import byte_maps, scale_errors
from mla_ref.teaching.figures.fragment_map import fragment_map
from mla_ref.teaching.figures.latent_rank import latent_rank
from mla_ref.teaching.figures.masks import mask_alignment, masks
from mla_ref.teaching.figures.merge_tree import merge_tree
from mla_ref.teaching.figures.mla_flow import mla_flow
from mla_ref.teaching.figures.online_softmax import running_softmax
from mla_ref.teaching.figures.operand_tiles import operand_tiles
from mla_ref.teaching.figures.page_map import page_map
from mla_ref.teaching.figures.ranks import dealt_positions, rank_staircases
from mla_ref.teaching.figures.receipt_times import receipt_times
from mla_ref.teaching.figures.roofline import roofline
from mla_ref.teaching.figures.rope import error_by_position, rope_layouts
from mla_ref.teaching.figures.samples import timed_samples
from mla_ref.teaching.figures.score_maps import score_maps, selection_quality
from mla_ref.teaching.figures.shared_memory import shared_memory_budget
from mla_ref.teaching.figures.sparse import list_splits, sparse_cliff
from mla_ref.teaching.figures.speculative import acceptance, draft_steps
from mla_ref.teaching.figures.token_bytes import token_bytes
from mla_ref.teaching.figures.verifier import blocks_on_multiprocessors, verifier_rows

__all__ = [
    "acceptance",
    "bank_turns",
    "block_tables",
    "blocks_on_multiprocessors",
    "byte_maps",
    "copy_timeline",
    "dealt_positions",
    "draft_steps",
    "error_by_position",
    "error_by_row",
    "error_histogram",
    "forms_by_rows",
    "fragment_map",
    "latent_rank",
    "list_splits",
    "mask_alignment",
    "masks",
    "merge_tree",
    "mla_flow",
    "operand_tiles",
    "page_map",
    "rank_staircases",
    "receipt_times",
    "roofline",
    "rope_layouts",
    "running_softmax",
    "scale_errors",
    "score_maps",
    "selection_quality",
    "shared_memory_budget",
    "sparse_cliff",
    "timed_samples",
    "token_bytes",
    "verifier_rows",
]
