"""Which kernel computes a call, and how its work is cut."""

import torch
from torch import Tensor

from mla_kernels.cuda_kernels.arguments import Call, number_of, sink_fields
from mla_kernels.cuda_kernels.launch import Kernel
from mla_ref.checks import describe
from mla_ref.numerics import AttentionResult

NARROW = Kernel("decode.cu", "decode", threads=128, shared_bytes=93_536)
WIDE = Kernel("decode_wide.cu", "decode_wide", threads=512, shared_bytes=91_352)
WIDE64 = Kernel("decode_wide64.cu", "decode_wide64", threads=256, shared_bytes=101_280)
# The step from SIMPLE to NARROW, to be read: no plan chooses it.
MMA = Kernel("decode_mma.cu", "decode_mma", threads=128, shared_bytes=25_344)
FAST = {"narrow": NARROW, "wide": WIDE, "wide64": WIDE64, "mma": MMA}
SIMPLE = {
    torch.uint8: Kernel("decode_simple.cu", "simple_fp8", threads=128),
    torch.bfloat16: Kernel("decode_simple.cu", "simple_bf16", threads=128),
    torch.float16: Kernel("decode_simple.cu", "simple_fp16", threads=128),
    torch.float32: Kernel("decode_simple.cu", "simple_fp32", threads=128),
}
# Heads of a block.
BLOCK_HEADS = {"simple": 4, "mma": 8, "narrow": 8, "wide": 32, "wide64": 64}
# From so many heads on the wide kernel is the faster one, or as fast with few rows.
WIDE_HEADS = 25
# Above 32 heads, and from so many blocks of 64 heads on, the kernel for 64 is the faster one.
WIDE64_BLOCKS = 16
# decode_wide64.cu counts pieces of 16 bytes in 32 bits.
FP8_LIMIT = 2**36
# Entries of a split at least: 4 warps with 2 tiles of 16 each.
SPLIT_ENTRIES = 128
MOST_SPLITS = 16


def plan_splits(rows: int, heads: int, topk: int, multiprocessors: int) -> int:
    """How many splits a decode step cuts each list into: one block a multiprocessor, or fewer.

    Measured on an H200 with 132 of them: 16, 8, 2 and 1 splits are best at 4, 16, 64 and 256 rows
    of 8 heads and of 64; more blocks lose, since each split's part is written and
    read again. It depends on what a plan knows, so a row has the same bits alone and in a full
    batch.
    """
    most = min(MOST_SPLITS, max(topk // SPLIT_ENTRIES, 1))
    blocks = rows * -(-heads // BLOCK_HEADS[fast_kind(rows, heads)])
    splits = 1
    while splits * 2 <= most and splits * 2 * blocks <= multiprocessors:
        splits *= 2
    return splits


def is_fast(q: Tensor, kv_cache: Tensor) -> bool:
    """Whether decode.cu can read these: FP8 rows, and bfloat16 queries in aligned runs.

    Anything else is computed by decode_simple.cu, in fp32 and a warp to a head.
    """
    aligned = all(stride % 8 == 0 for stride in q.stride()[:2]) and q.data_ptr() % 16 == 0
    return (
        kv_cache.dtype == torch.uint8 and q.dtype == torch.bfloat16 and q.stride(2) == 1 and aligned
    )


def fast_kind(rows: int, heads: int) -> str:
    """Which tensor-core kernel serves a plan for so many rows and heads."""
    if heads < WIDE_HEADS:
        return "narrow"
    whole = heads > BLOCK_HEADS["wide"] and rows * -(-heads // 64) >= WIDE64_BLOCKS
    return "wide64" if whole else "wide"


def launch_attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    counts: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    parts: AttentionResult,
    max_rows: int,
) -> None:
    """Attend into `parts`: `out` [splits, rows, heads, 512] and `lse` [splits, rows, heads].

    The plan's `max_rows` choose the kernel, so that a row has the same bits in any batch.
    """
    call = make_call(q, kv_cache, indices, counts, sink, softmax_scale, parts)
    kind = fast_kind(max_rows, call.heads) if is_fast(q, kv_cache) else "simple"
    kernel = {**FAST, "simple": SIMPLE[kv_cache.dtype]}[kind]
    kernel.launch(q.device, (call.rows * call.splits, -(-call.heads // BLOCK_HEADS[kind])), call)


def make_call(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    counts: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    parts: AttentionResult,
) -> Call:
    """What the kernels are handed."""
    splits, (rows, heads, _), topk = parts.out.shape[0], q.shape, indices.shape[1]
    return Call(
        q=q.data_ptr(),
        cache=kv_cache.data_ptr(),
        indices=indices.data_ptr(),
        counts=None if counts is None else counts.data_ptr(),
        out=parts.out.data_ptr(),
        lse=parts.lse.data_ptr(),
        q_row=q.stride(0),
        q_head=q.stride(1),
        q_dim=q.stride(2),
        page_stride=kv_cache.stride(0) * kv_cache.itemsize,
        row_stride=kv_cache.stride(1) * kv_cache.itemsize,
        list_row=indices.stride(0),
        count_row=0 if counts is None else counts.stride(0),
        out_split=parts.out.stride(0),
        out_row=parts.out.stride(1),
        out_head=parts.out.stride(2),
        lse_split=parts.lse.stride(0),
        lse_row=parts.lse.stride(1),
        lse_head=parts.lse.stride(2),
        slots=kv_cache.shape[0] * kv_cache.shape[1],
        rows=rows,
        heads=heads,
        topk=topk,
        splits=splits,
        split_length=-(-topk // splits),
        page_size=kv_cache.shape[1],
        one_piece=kv_cache.stride(0) == kv_cache.shape[1] * kv_cache.stride(1),
        q_number=number_of("q", q),
        out_number=number_of("out", parts.out),
        scale=softmax_scale,
        **sink_fields(sink),
    )


def require_readable(
    kv_cache: Tensor, indices: Tensor, counts: Tensor | None, sink: Tensor | None
) -> None:
    """Raise where a kernel would read the bytes of a tensor as something that they are not."""
    if kv_cache.dtype not in SIMPLE:
        raise ValueError(
            f"kv_cache must hold bytes, bfloat16, float16 or float32, got {describe(kv_cache)}"
        )
    packed = kv_cache.dtype == torch.uint8
    if kv_cache.stride(2) != 1 or (
        packed and (kv_cache.data_ptr() % 16 or kv_cache.stride(0) % 16 or kv_cache.stride(1) % 16)
    ):
        raise ValueError(
            "kv_cache must have rows without gaps, FP8 rows at multiples of 16 bytes, got the "
            f"strides {list(kv_cache.stride())}"
        )
    if packed and kv_cache.shape[0] * kv_cache.stride(0) > FP8_LIMIT:
        raise ValueError(
            f"kv_cache must end within {FP8_LIMIT} bytes if it holds FP8 rows, got "
            f"{describe(kv_cache)} with the strides {list(kv_cache.stride())}"
        )
    for name, tensor in (("indices", indices), ("counts", counts)):
        if tensor is not None and tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {describe(tensor)}")
    if indices.stride(1) != 1:
        raise ValueError(
            f"indices must have lists without gaps, got the strides {list(indices.stride())}"
        )
    if sink is not None:
        number_of("sink", sink)
