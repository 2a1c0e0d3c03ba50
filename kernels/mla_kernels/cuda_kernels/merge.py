"""Merging partial results: of splits behind decode.cu, and the part "merge" of the backend."""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_kernels.cuda_kernels.arguments import Merge, number_of, sink_fields
from mla_kernels.cuda_kernels.launch import Kernel
from mla_ref.checks import describe
from mla_ref.numerics import AttentionResult
from mla_ref.numerics.merge import require_parts

ALONE = Kernel("merge.cu", "merge", threads=128)
BEHIND_DECODE = Kernel("merge.cu", "merge", threads=128, early=True)


def launch_merge(
    parts: AttentionResult, result: AttentionResult, sink: Tensor | None, kernel: Kernel
) -> None:
    """Merge `out` [parts, rows, heads, d] and `lse` [parts, rows, heads] into `result`."""
    number, rows, heads, width = parts.out.shape
    call = Merge(
        outs=parts.out.data_ptr(),
        lses=parts.lse.data_ptr(),
        out=result.out.data_ptr(),
        lse=result.lse.data_ptr(),
        part_out=parts.out.stride(0),
        part_row=parts.out.stride(1),
        part_head=parts.out.stride(2),
        part_lse=parts.lse.stride(0),
        part_lse_row=parts.lse.stride(1),
        part_lse_head=parts.lse.stride(2),
        out_row=result.out.stride(0),
        out_head=result.out.stride(1),
        lse_row=result.lse.stride(0),
        lse_head=result.lse.stride(1),
        parts=number,
        heads=heads,
        width=width,
        part_number=number_of("outs", parts.out),
        out_number=number_of("out", result.out),
        **sink_fields(sink),
    )
    kernel.launch(parts.out.device, (rows * heads, 1), call)


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
    if lses.dtype != torch.float32 or outs.dtype == torch.float64:
        raise TypeError(
            f"lses must be float32, and outs that or narrower, got {describe(lses)} and "
            f"{describe(outs)}"
        )
    out = torch.zeros(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.full(lses.shape[1:], -torch.inf, dtype=lses.dtype, device=lses.device)
    if outs.shape[0] and lse.numel():
        # A row is a row, whether of heads or not: one head each.
        rows = outs.reshape(outs.shape[0], -1, 1, outs.shape[-1]).contiguous()
        if rows.data_ptr() % 16:  # the kernel reads 16 bytes at a time
            rows = rows.clone()
        flat = AttentionResult(rows, lses.reshape(lses.shape[0], -1, 1))
        result = AttentionResult(out.view(-1, 1, outs.shape[-1]), lse.view(-1, 1))
        launch_merge(flat, result, None, ALONE)
    return AttentionResult(out, lse)
