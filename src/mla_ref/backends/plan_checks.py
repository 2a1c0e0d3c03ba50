"""Whether a run fits its plan: the checks that all backends share, on shapes and dtypes alone."""

import torch
from torch import Tensor

from mla_ref.backends.protocol import AttnSpec, require_planned_kind
from mla_ref.checks import describe, require_float, require_size, require_tensor


def require_planned(
    spec: AttnSpec,
    max_rows: int,
    kinds: tuple[str, ...],
    kind: str,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
) -> None:
    """Raise a ValueError that names both numbers where a run does not fit its plan.

    Args:
        spec: What was planned for.
        max_rows: Rows at most.
        kinds: The kinds of run that it was planned for.
        kind: The one that is asked for.
        q: The queries.
        kv_cache: The cache.
        indices: The lists.
    """
    require_planned_kind(kind, kinds)
    require_float("q", q, "rows h d_row")
    require_tensor("kv_cache", kv_cache, "pages page_size row")
    require_tensor("indices", indices, "rows topk")
    if q.shape[0] > max_rows:
        raise ValueError(f"q has {q.shape[0]} rows, but the plan is for {max_rows} at most")
    if q.dtype != spec.q_dtype:
        raise ValueError(f"q is {q.dtype}, but the plan is for q_dtype {spec.q_dtype}")
    require_size("q", q, 1, spec.num_heads, "the heads of the plan")
    require_size("q", q, 2, spec.row_dim, "the row of the plan")
    require_size("kv_cache", kv_cache, 1, spec.page_size, "the page_size of the plan")
    # A buffer of 2,176 columns under an index_topk of 2,048 is read to its end or refused,
    # never cut silently (vllm#55277).
    if indices.shape[1] > spec.topk:
        raise ValueError(
            f"indices has {indices.shape[1]} columns, but the plan is for topk {spec.topk}"
        )
    if (kv_cache.dtype == torch.uint8) != (spec.cache_format == "fp8"):
        raise ValueError(
            f"kv_cache must hold rows of the plan's cache_format {spec.cache_format!r}, got "
            f"{describe(kv_cache)}"
        )
    # The computation would be in float64 and the partial results are not.
    if kv_cache.dtype == torch.float64 != spec.q_dtype:
        raise ValueError(
            f"kv_cache is float64, but the plan is for q_dtype {spec.q_dtype}: plan for float64"
        )


def require_outputs(
    spec: AttnSpec,
    q: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    out_dtype: torch.dtype | None,
    lse_dtype: torch.dtype,
) -> torch.dtype:
    """The dtype of the output; raises where it or a buffer is not one that results go to."""
    dtype = q.dtype if out_dtype is None else out_dtype
    if dtype not in (q.dtype, torch.float32):
        raise ValueError(f"out_dtype must be {q.dtype}, as q, or float32, got {out_dtype}")
    shape = (*q.shape[:2], spec.kv_lora_rank)
    wanted = {"out": (out, shape, dtype), "lse": (lse, shape[:2], lse_dtype)}
    for name, (buffer, size, kind) in wanted.items():
        if buffer is None:
            continue
        if not isinstance(buffer, Tensor) or buffer.dtype != kind:
            raise TypeError(f"{name} must be a {kind} tensor, got {describe(buffer)}")
        if buffer.shape != size or buffer.device != q.device:
            raise ValueError(
                f"{name} must have the shape {list(size)} on {q.device}, got "
                f"{describe(buffer)} on {buffer.device}"
            )
    return dtype
