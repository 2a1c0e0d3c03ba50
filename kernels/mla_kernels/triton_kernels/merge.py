"""Merging partial results by their LSE: the splits of a decode step, or the shares of ranks.

A program takes one row and head, and `BD` of its numbers. The parts are weighted by
exp(lse - largest lse), in base 2 inside. An empty part has LSE -inf: its weight is 0 and what it
holds, perhaps memory that nobody wrote, is replaced before it is multiplied.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mla_kernels.triton_kernels.outputs import require_runnable
from mla_kernels.triton_kernels.sink import kept_beside_sink
from mla_ref.checks import describe
from mla_ref.numerics import AttentionResult
from mla_ref.numerics.merge import require_parts
from mla_ref.platform.stream import current_device

LOG2E = tl.constexpr(1.4426950408889634)
BD = 128
PIECE = 2**28  # numbers of a piece where a merge is cut in pieces: 0.5 GiB in bfloat16


@triton.jit
def merge_kernel(
    outs_ptr, lses_ptr, sink_ptr, out_ptr, lse_ptr,
    parts, heads, width,
    outs_part, outs_row, outs_head, lses_part, lses_row, lses_head, sink_head,
    out_row, out_head, lse_row, lse_head,
    PARTS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """One row and head, BD numbers of it; grid (rows * heads, numbers / BD).

    Args:
        outs_ptr: [parts, rows, heads, width], strides `outs_part`, `outs_row`, `outs_head`, 1.
        lses_ptr: [parts, rows, heads], natural.
        sink_ptr: [heads] or None: applied here, once, after the last merge.
        out_ptr: [rows, heads, width].
        lse_ptr: [rows, heads], without the sink.
        PARTS: `parts` rounded up to a power of two.
    """
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    part = tl.arange(0, PARTS)
    lses = tl.load(
        lses_ptr + part * lses_part + row * lses_row + head * lses_head,
        mask=part < parts,
        other=float("-inf"),
    )
    highest = tl.max(lses, 0)
    # -inf minus -inf is NaN: where all parts are empty subtract 0.
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2((lses - anchor) * LOG2E)
    total = tl.sum(weights, 0)
    nothing = total == 0.0
    shares = weights / tl.where(nothing, 1.0, total)

    d = tl.program_id(1) * BD + tl.arange(0, BD)
    seen = (lses > float("-inf"))[:, None] & (d < width)[None, :]
    outs_at = outs_ptr + row * outs_row + head * outs_head
    # -0.0 changes nothing when it is added, not even the sign of a zero.
    outs = tl.load(outs_at + part[:, None] * outs_part + d[None, :], mask=seen, other=-0.0)
    out = tl.sum(shares[:, None] * outs.to(tl.float32), 0)
    out = tl.where(nothing, 0.0, out)
    lse = anchor + tl.log(tl.where(nothing, 1.0, total))
    if sink_ptr is not None:
        out *= kept_beside_sink(lse, tl.load(sink_ptr + head * sink_head).to(tl.float32))
    out_at = out_ptr + row * out_row + head * out_head + d
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=d < width)
    if tl.program_id(1) == 0:
        lse = tl.where(nothing, float("-inf"), lse)
        tl.store(lse_ptr + row * lse_row + head * lse_head, lse)


def launch_merge(
    outs: Float[Tensor, "parts rows h d"],
    lses: Float[Tensor, "parts rows h"],
    out: Float[Tensor, "rows h d"],
    lse: Float[Tensor, "rows h"],
    sink: Float[Tensor, " h"] | None = None,
) -> None:
    """Merge into `out` and `lse`; the last dimension of `outs` and `out` is contiguous."""
    parts, rows, heads, width = outs.shape
    if rows * heads == 0 or width == 0:
        return
    if outs.stride(0) < 2**31 <= (parts - 1) * outs.stride(0):
        # 8 shares of 8,192 rows and 128 heads, say. The kernel multiplies the number of a part by a
        # stride that fits 32 bits, in 32 bits: pieces of rows are laid side by side for it.
        piece = max(PIECE // (parts * heads * width), 1)
        for first in range(0, rows, piece):
            some = slice(first, first + piece)
            launch_merge(outs[:, some].contiguous(), lses[:, some], out[some], lse[some], sink)
        return
    with current_device(outs.device):
        merge_kernel[(rows * heads, triton.cdiv(width, BD))](
            outs, lses, sink, out, lse,
            parts, heads, width,
            *outs.stride()[:3], *lses.stride(), 0 if sink is None else sink.stride(0),
            *out.stride()[:2], *lse.stride(),
            PARTS=triton.next_power_of_2(parts),
            BD=BD,
            num_warps=1,
        )  # fmt: skip


def merge_many(
    outs: Float[Tensor, "parts *rows d"],
    lses: Float[Tensor, "parts *rows"],
    *,
    validate: bool = True,
) -> AttentionResult:
    """The part "merge" of the backend: arguments and result as `mla_ref.numerics.merge_many`.

    Raises:
        TypeError: float64, which the kernel does not compute in.
    """
    require_parts(("outs", "lses"), outs, lses, validate)
    require_runnable("outs", outs)
    if torch.float64 in (outs.dtype, lses.dtype):
        raise TypeError(
            f"outs and lses must be float32 or narrower here, got {describe(outs)} and "
            f"{describe(lses)}"
        )
    out = torch.zeros(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.full(lses.shape[1:], -torch.inf, dtype=lses.dtype, device=lses.device)
    if outs.shape[0]:
        # Heads or not, a row is a row: one head each.
        flat: dict[str, Any] = {
            "outs": outs.reshape(outs.shape[0], -1, 1, outs.shape[-1]).contiguous(),
            "lses": lses.reshape(lses.shape[0], -1, 1),
        }
        launch_merge(**flat, out=out.view(-1, 1, outs.shape[-1]), lse=lse.view(-1, 1))
    return AttentionResult(out, lse)
