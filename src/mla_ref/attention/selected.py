"""The inner step of sparse attention: each row attends to its own list of slots.

Rungs 9 and 10 are this function, called once for a row's whole list or once for each split of it.
A list is a row of `indices`: physical slots in any order, -1 where there is none. Whatever lies in
a slot that is not on the list, and in slot 0 that a -1 might alias, is never part of a result.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mla_ref.cache.fp8_rows import ROW_BYTES, unpack_fp8_rows
from mla_ref.checks import (
    describe,
    require_count,
    require_float,
    require_integer,
    require_same_device,
    require_scale,
    require_size,
)
from mla_ref.numerics import AttentionResult


def gather_stored(
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows k"],
    counts: Int[Tensor, " rows"] | None,
) -> tuple[Shaped[Tensor, "rows k row"], Bool[Tensor, "rows k"]]:
    """The listed rows as they are stored, and which entries are valid; arguments as `gather_slots`.

    An invalid entry gives zeros: 656 zero bytes are 576 zeros too.
    """
    pages, page_size = kv_cache.shape[:2]
    capacity = pages * page_size
    slots = indices.long()
    valid = (slots >= 0) & (slots < capacity)
    if counts is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    if capacity == 0:
        kv_cache = kv_cache.new_zeros(1, 1, kv_cache.shape[2])
        page_size = 1
    slots = torch.where(valid, slots, 0)
    picked = kv_cache[slots // page_size, slots % page_size]
    # Zero and not only masked: 0 * NaN is NaN, and slot 0 may hold anything. In place, in a copy.
    return picked.masked_fill_(~valid[..., None], 0), valid


def gather_slots(
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows k"],
    counts: Int[Tensor, " rows"] | None,
    dtype: torch.dtype,
    *,
    scale_reader: str = "stored",
) -> tuple[Float[Tensor, "rows k d_row"], Bool[Tensor, "rows k"]]:
    """The listed rows as numbers, and which entries are valid; an invalid entry gives zeros.

    Args:
        kv_cache: Rows of 576 numbers in a float dtype of 16 bits or more, or of 656 bytes. Any page
            stride.
        indices: Slots. An entry outside the cache is invalid like -1: in Python kv[-1] is the last
            row, silently (miles#2079).
        counts: Entries of each row that count; those at and beyond are never read. None: all.
        dtype: float32 or float64, of the result.
        scale_reader: As in `unpack_fp8_rows`; for 656-byte rows.
    """
    picked, valid = gather_stored(kv_cache, indices, counts)
    if kv_cache.dtype == torch.uint8:
        picked = unpack_fp8_rows(picked, scale_reader=scale_reader)
    return picked.to(dtype), valid


def attend_selected(
    q: Float[Tensor, "rows h d_row"],
    kv: Float[Tensor, "rows k d_row"],
    valid: Bool[Tensor, "rows k"],
    *,
    softmax_scale: float,
    kv_lora_rank: int,
) -> AttentionResult:
    """Softmax attention of each row over the entries gathered for it, in q's dtype.

    2 * h * (576 + 512) operations and one read of the gathered row for each entry.
    """
    if kv.shape[1] == 0:
        return AttentionResult(
            q.new_zeros(*q.shape[:2], kv_lora_rank), q.new_full(q.shape[:2], -torch.inf)
        )
    scores = (q * softmax_scale) @ kv.mT
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    highest = scores.amax(dim=-1)
    anchor = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(scores - anchor[..., None])
    total = weights.sum(dim=-1)
    out = weights @ kv[..., :kv_lora_rank] / torch.where(total == 0, 1.0, total)[..., None]
    return AttentionResult(out, torch.log(total) + anchor)


def require_sparse(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    counts: Tensor | None,
    softmax_scale: float,
    kv_lora_rank: int,
) -> None:
    """Raise unless the shapes and kinds fit; reads no values."""
    require_float("q", q, "rows h d_row")
    _require_16_bits("q", q)
    require_integer("indices", indices, "rows k")
    require_size("indices", indices, 0, q.shape[0], "one list a row of q")
    require_scale("softmax_scale", softmax_scale)
    if counts is not None:
        require_integer("counts", counts, "rows")
        require_size("counts", counts, 0, q.shape[0], "one count a row of q")
    if not isinstance(kv_cache, Tensor) or kv_cache.ndim != 3:
        raise ValueError(
            f"kv_cache must have the shape [pages, page_size, row], got {describe(kv_cache)}"
        )
    if kv_cache.dtype == torch.uint8:
        require_size("kv_cache", kv_cache, 2, ROW_BYTES, "the bytes of an FP8 row")
        require_size("q", q, 2, 576, "the numbers of an FP8 row")
    else:
        require_float("kv_cache", kv_cache, "pages page_size d_row")
        _require_16_bits("kv_cache", kv_cache)
        require_size("kv_cache", kv_cache, 2, q.shape[2], "as q")
    tensors = {"q": q, "kv_cache": kv_cache, "indices": indices}
    require_same_device(tensors if counts is None else tensors | {"counts": counts})
    if require_count("kv_lora_rank", kv_lora_rank, at_least=1) > q.shape[2]:
        raise ValueError(
            f"kv_lora_rank must lie in 1 .. {q.shape[2]}, the row of q, got {kv_lora_rank}"
        )


def _require_16_bits(name: str, tensor: Tensor) -> None:
    """Raise a TypeError for numbers of 8 bits: without a scale beside them they say little."""
    if tensor.element_size() < 2:
        raise TypeError(
            f"{name} must be of a float dtype of 16 bits or more, got {describe(tensor)}"
        )


def validate_inputs(
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows k"],
    counts: Int[Tensor, " rows"] | None = None,
) -> None:
    """Raise a ValueError on a slot or count that a run would treat as -1.

    It reads values back to the host, so it is for lessons, tests and the command line, not for a
    step that is captured in a graph.
    """
    if not isinstance(kv_cache, Tensor) or kv_cache.ndim != 3:
        raise ValueError(
            f"kv_cache must have the shape [pages, page_size, row], got {describe(kv_cache)}"
        )
    require_integer("indices", indices, "rows k")
    capacity = kv_cache.shape[0] * kv_cache.shape[1]
    used = indices
    if counts is not None:
        require_integer("counts", counts, "rows")
        require_size("counts", counts, 0, indices.shape[0], "one count a row of indices")
        if counts.numel() and (counts.min() < 0 or counts.max() > indices.shape[1]):
            raise ValueError(f"counts must lie in 0 .. {indices.shape[1]}, got {counts.tolist()}")
        beyond = torch.arange(indices.shape[1], device=indices.device) >= counts[:, None]
        used = indices.masked_fill(beyond, -1)
    wrong = used[(used < -1) | (used >= capacity)]
    if wrong.numel():
        raise ValueError(
            f"indices holds slot {int(wrong[0])}, but the cache has slots 0 to "
            f"{capacity - 1} (-1: none)"
        )
