"""Rung 10: sparse MLA, *decode*: each row's list in splits, partial results merged by their LSE.

Checked against rung 9. With few rows a GPU has nothing to do if a row is one unit of work: 4 rows
of 8 heads are 4 units on 188 multiprocessors. Cut each list into splits and there are 4 * splits.
A row is a unit by itself, whichever request it belongs to and whatever its neighbours are: a
verifier batch is just more rows.
"""

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.selected import attend_selected, gather_slots, require_sparse
from mla_ref.checks import describe, require_choice, require_count
from mla_ref.numerics import AttentionResult, apply_sink, compute_dtype, merge_many
from mla_ref.numerics.float8 import SCALE_READERS

HEADS_PER_BLOCK = 16
KEYS_PER_BLOCK = 64


def plan_splits(rows: int, heads: int, k: int, multiprocessors: int) -> int:
    """How many splits fill a GPU: one unit of work is one row, 16 heads and one split.

    Enough splits that every multiprocessor gets a unit, but none of fewer than 64 entries. It
    depends on capacities only, never on live lengths, so a captured graph keeps its split count
    (vllm#51119).
    """
    for name, value in (("rows", rows), ("heads", heads), ("k", k)):
        require_count(name, value)
    require_count("multiprocessors", multiprocessors, at_least=1)
    units = max(rows, 1) * max(-(-heads // HEADS_PER_BLOCK), 1)
    most = max(-(-k // KEYS_PER_BLOCK), 1)
    return min(max(-(-multiprocessors // units), 1), most)


def sparse_decode(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows k"],
    counts: Int[Tensor, " rows"] | None = None,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int = 4,
    sink: Float[Tensor, " h"] | None = None,
    scale_reader: str = "stored",
    partials: AttentionResult | None = None,
) -> AttentionResult:
    """The same arguments and result as `sparse_extend`, in `num_splits` pieces.

    Args:
        q: As in `sparse_extend`.
        kv_cache: As in `sparse_extend`.
        indices: As in `sparse_extend`.
        counts: As in `sparse_extend`.
        softmax_scale: As in `sparse_extend`.
        kv_lora_rank: As in `sparse_extend`.
        num_splits: Pieces of each list, 1 or more; more than entries leaves some empty. The same
            number gives the same bits.
        sink: As in `sparse_extend`; applied once, after the merge.
        scale_reader: As in `sparse_extend`.
        partials: Buffers for the splits' results, `out` [num_splits, rows or more, h, kv_lora_rank]
            and `lse` likewise, in the dtype of the computation; None: new ones. A plan brings its
            own, so that a step allocates none.
    """
    require_sparse(q, kv_cache, indices, counts, softmax_scale, kv_lora_rank)
    require_count("num_splits", num_splits, at_least=1)
    require_choice("scale_reader", scale_reader, SCALE_READERS)
    dtype = compute_dtype(q, kv_cache)
    queries, k = q.to(dtype), indices.shape[1]
    length = -(-k // num_splits)
    if partials is None:
        partials = _new_partials(num_splits, queries, kv_lora_rank)
    _require_partials(partials, num_splits, queries, kv_lora_rank)
    outs, lses = partials
    outs, lses = outs[:, : q.shape[0]], lses[:, : q.shape[0]]
    for split in range(num_splits):
        first = min(split * length, k)
        entries = indices[:, first : first + length]
        left = None if counts is None else (counts - first).clamp(min=0)
        kv, valid = gather_slots(kv_cache, entries, left, dtype, scale_reader=scale_reader)
        outs[split], lses[split] = attend_selected(
            queries, kv, valid, softmax_scale=softmax_scale, kv_lora_rank=kv_lora_rank
        )
    merged = merge_many(outs, lses, validate=False)
    out = merged.out if sink is None else apply_sink(merged, sink)
    return AttentionResult(out.to(q.dtype), merged.lse)


def _new_partials(
    num_splits: int, q: Float[Tensor, "rows h d_row"], kv_lora_rank: int
) -> AttentionResult:
    return AttentionResult(
        q.new_empty(num_splits, *q.shape[:2], kv_lora_rank), q.new_empty(num_splits, *q.shape[:2])
    )


def _require_partials(
    partials: AttentionResult, num_splits: int, q: Float[Tensor, "rows h d_row"], kv_lora_rank: int
) -> None:
    """Raise a ValueError unless the buffers hold every split of every row, in q's dtype."""
    (rows, heads), one_row = q.shape[:2], (q.shape[1], kv_lora_rank)
    for buffer, rest in ((partials.out, one_row), (partials.lse, (heads,))):
        if (
            buffer.ndim != 2 + len(rest)
            or buffer.shape[0] != num_splits
            or buffer.shape[1] < rows
            or buffer.shape[2:] != rest
            or buffer.dtype != q.dtype
            or buffer.device != q.device
        ):
            raise ValueError(
                f"partials must hold [num_splits, rows or more, {', '.join(map(str, rest))}] with "
                f"num_splits {num_splits} and {rows} rows in {q.dtype}, got {describe(buffer)}"
            )
