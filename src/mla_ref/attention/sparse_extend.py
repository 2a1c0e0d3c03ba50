"""Rung 9: sparse MLA, *extend*: one pass of each query row over its selected slots.

Checked against rungs 6 and 7 with a mask, and equal to dense attention where the list covers all.
This is the form that serves prefill chunks: many rows, so that a row may be one unit of work.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.selected import attend_selected, gather_slots, require_sparse
from mla_ref.checks import require_choice, require_count
from mla_ref.numerics import AttentionResult, apply_sink, compute_dtype
from mla_ref.numerics.float8 import SCALE_READERS


def sparse_extend(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows k"],
    counts: Int[Tensor, " rows"] | None = None,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    sink: Float[Tensor, " h"] | None = None,
    scale_reader: str = "stored",
    rows_at_once: int = 16,
) -> AttentionResult:
    """Attention of each row over the slots that its list names.

    Args:
        q: Absorbed queries, likewise of 16 bits or more.
        kv_cache: Rows of numbers in a float dtype of 16 bits or more, or of 656 bytes; any page
            stride.
        indices: Physical slots; -1 anywhere means none. A slot listed twice counts twice.
        counts: Entries of each row that count; None for all.
        softmax_scale: The un-absorbed scale.
        kv_lora_rank: How many numbers of a row are its value.
        sink: Score of an extra key of value 0 for each head, or None. It is not in the LSE.
        scale_reader: How the scales of 656-byte rows are read.
        rows_at_once: Rows gathered together: 2048 entries of 576 float32 numbers are 4.7 MB a row.

    Returns:
        `out` [rows, h, kv_lora_rank] in q's dtype and natural-log `lse` [rows, h]; 0 and -inf for a
        row without a valid entry.
    """
    require_sparse(q, kv_cache, indices, counts, softmax_scale, kv_lora_rank)
    require_count("rows_at_once", rows_at_once, at_least=1)
    require_choice("scale_reader", scale_reader, SCALE_READERS)
    dtype = compute_dtype(q, kv_cache)
    out = q.new_empty(*q.shape[:2], kv_lora_rank)
    lse = torch.empty(q.shape[:2], dtype=dtype, device=q.device)
    for first in range(0, q.shape[0], rows_at_once):
        rows = slice(first, first + rows_at_once)
        kv, valid = gather_slots(
            kv_cache,
            indices[rows],
            None if counts is None else counts[rows],
            dtype,
            scale_reader=scale_reader,
        )
        result = attend_selected(
            q[rows].to(dtype), kv, valid, softmax_scale=softmax_scale, kv_lora_rank=kv_lora_rank
        )
        lse[rows] = result.lse
        out[rows] = result.out if sink is None else apply_sink(result, sink)
    return AttentionResult(out, lse)
