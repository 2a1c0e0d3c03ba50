"""Bugs that published libraries had, planted on purpose: each lesson shows its symptom and cure.

Nothing here is to be used. Every function keeps the interface of the right one, so that a lesson, a
test or a reader's own check can put it in its place and see whether anybody notices.
"""

from mla_ref.teaching.planted.absorbed import latent_attention_scaled_by_its_row
from mla_ref.teaching.planted.addresses import row_addresses_in_32_bits
from mla_ref.teaching.planted.checking import lengths_to_check, no_difference_above
from mla_ref.teaching.planted.clocks import LaunchClock
from mla_ref.teaching.planted.fp8 import (
    pack_fp8_rows_without_floor,
    unpack_fp8_rows_by_exponent,
)
from mla_ref.teaching.planted.indexing import (
    index_scores_without_relu,
    select_topk_unchecked,
)
from mla_ref.teaching.planted.masks import finite_mask_attention, top_left_causal_attention
from mla_ref.teaching.planted.merging import (
    backward_tiles_without_guard,
    merge_in_base_2,
    merge_without_guard,
)
from mla_ref.teaching.planted.paging import neighbouring_pages_attention, whole_page_attention
from mla_ref.teaching.planted.parallel import Base2Backend, local_lens_counted_down
from mla_ref.teaching.planted.rope import rope_in_halves, rope_table_in_bfloat16
from mla_ref.teaching.planted.scale import scale_from_mscale, scale_without_mscale
from mla_ref.teaching.planted.sizing import bytes_without_index_keys
from mla_ref.teaching.planted.sparse import (
    sparse_decode_with_a_sink_a_split,
    sparse_extend_reading_before_the_cache,
)
from mla_ref.teaching.planted.speculative import (
    rejection_sample_counting_all,
    rejection_sample_residual_at_the_draft,
)
from mla_ref.teaching.planted.table import PLANTED, PlantedBug
from mla_ref.teaching.planted.verifier import (
    causal_attention_hiding_candidates,
    is_verifier_batch_with_padding,
)
from mla_ref.teaching.planted.warps import ImpatientRing

__all__ = [
    "PLANTED",
    "Base2Backend",
    "ImpatientRing",
    "LaunchClock",
    "PlantedBug",
    "backward_tiles_without_guard",
    "bytes_without_index_keys",
    "causal_attention_hiding_candidates",
    "finite_mask_attention",
    "index_scores_without_relu",
    "is_verifier_batch_with_padding",
    "latent_attention_scaled_by_its_row",
    "lengths_to_check",
    "local_lens_counted_down",
    "merge_in_base_2",
    "merge_without_guard",
    "neighbouring_pages_attention",
    "no_difference_above",
    "pack_fp8_rows_without_floor",
    "rejection_sample_counting_all",
    "rejection_sample_residual_at_the_draft",
    "rope_in_halves",
    "rope_table_in_bfloat16",
    "row_addresses_in_32_bits",
    "scale_from_mscale",
    "scale_without_mscale",
    "select_topk_unchecked",
    "sparse_decode_with_a_sink_a_split",
    "sparse_extend_reading_before_the_cache",
    "top_left_causal_attention",
    "unpack_fp8_rows_by_exponent",
    "whole_page_attention",
]
