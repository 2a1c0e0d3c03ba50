"""A plan whose partial results can be merged: found out when it is made, not when it runs.

A share's output is of no use without its LSE. A backend that gave none used to fail at the first
request (local-inference-lab/vllm#56), one that gave it in base 2 did not fail at all
(flashinfer#4485). Both show on keys that all have the score 1: n of them have the LSE 1 + ln n.
"""

import math

import torch
from torch import Tensor

from mla_ref.backends import KINDS, AttnSpec, Backend, Plan
from mla_ref.backends.protocol import require_kinds
from mla_ref.cache import pack_fp8_rows
from mla_ref.checks import describe, require_count
from mla_ref.numerics import AttentionResult, lse_dtype

KEYS = 3


def plan_for_ranks(
    backend: Backend,
    spec: AttnSpec,
    *,
    max_rows: int,
    max_requests: int,
    device: torch.device,
    kinds: tuple[str, ...] = KINDS,
) -> Plan:
    """Plan as `backend.plan` does, and refuse a plan whose results cannot be merged over ranks.

    The plan runs a row over three keys and a row over none, in each of its kinds; this reads back
    to the host, once.

    Args:
        backend: Who computes a rank's share.
        spec: What one layer needs; `num_heads` are the heads that a rank attends with, which are
            those of all ranks where `attend_on_rank` gathers own heads.
        max_rows: As in `Backend.plan`, and at least 1.
        max_requests: As in `Backend.plan`.
        device: As in `Backend.plan`.
        kinds: As in `Backend.plan`.

    Raises:
        ValueError: The backend does not serve the spec, or a run gives no LSE, a narrow one, one
            of another base, one that is not -inf for a row without keys, or no float32 output.
    """
    require_count("max_rows", max_rows, at_least=1)
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must have name, parts, supports, plan, got {describe(backend)}")
    plan = backend.plan(
        spec, max_rows=max_rows, max_requests=max_requests, device=device, kinds=kinds
    )
    for route in require_kinds(kinds):
        for listed in (min(spec.topk, KEYS), 0):
            if fault := _fault(_probe(plan, route, spec, listed, device), spec, listed):
                raise ValueError(
                    f"backend {backend.name!r} cannot serve ranks that each hold a share: its "
                    f"{route} {fault}"
                )
    return plan


def _probe(
    plan: Plan, route: str, spec: AttnSpec, listed: int, device: torch.device
) -> AttentionResult:
    """One row of ones over `listed` rows of ones, scaled so that each score is 1."""
    rows = torch.ones(-(-KEYS // spec.page_size) * spec.page_size, spec.row_dim, dtype=spec.q_dtype)
    packed = pack_fp8_rows(rows) if spec.cache_format == "fp8" else rows
    cache = packed.unflatten(0, (-1, spec.page_size)).to(device)
    q = torch.ones(1, spec.num_heads, spec.row_dim, dtype=spec.q_dtype, device=device)
    indices = torch.full((1, spec.topk), -1, dtype=torch.int32, device=device)
    indices[0, :listed] = torch.arange(listed, device=device)
    counts = torch.tensor([listed], dtype=torch.int32, device=device)
    return getattr(plan, route)(
        q,
        cache,
        indices,
        counts,
        softmax_scale=1 / spec.row_dim,
        out_dtype=lse_dtype(spec.q_dtype),
    )


def _fault(result: object, spec: AttnSpec, listed: int) -> str | None:
    """What is wrong with the result of a probe, or None."""
    out, lse = (getattr(result, name, None) for name in ("out", "lse"))
    wide = lse_dtype(spec.q_dtype)
    if not isinstance(lse, Tensor):
        return "gives no LSE, without which partial results cannot be merged"
    if lse.dtype not in (torch.float32, torch.float64):
        return f"gives an LSE of {lse.dtype}, which is too coarse to merge with"
    if not isinstance(out, Tensor) or out.dtype != wide:
        return f"must give partial results in {wide}, got {describe(out)}"
    if listed == 0:
        empty = bool((lse == -torch.inf).all() and (out == 0).all())
        return None if empty else "must give output 0 and LSE -inf for a row without keys"
    expected = 1 + math.log(listed)
    # No rounding makes 0.01 of ones; in base 2 the number would be larger by 0.44 at least.
    off = (lse.double() - expected).abs()
    if not (off < 0.01).all():
        return (
            f"gives the LSE {lse.flatten()[0].item():.3f} for {listed} keys of score 1, where the "
            f"natural one is {expected:.3f}: convert it with to_natural_lse(lse, base=...)"
        )
    return None
