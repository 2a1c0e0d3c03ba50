"""The launch of the attention kernel: views of the cache, strides, and the grid."""

import torch
import triton
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_kernels.triton_kernels.configs import Config, constants, kernel_of, operand_dtypes
from mla_ref.platform.stream import current_device

LATENT = 512
SCALES_AT, ROPE_AT, ROW_BYTES = 512, 528, 656  # of an FP8 row


def require_readable(q: Tensor, kv_cache: Tensor, indices: Tensor) -> None:
    """Raise unless the kernel can address these: rows without gaps, FP8 rows at fours."""
    for name, tensor in (("q", q), ("kv_cache", kv_cache), ("indices", indices)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got the strides "
                f"{list(tensor.stride())}"
            )
    if kv_cache.dtype == torch.uint8:
        places = (kv_cache.data_ptr(), *kv_cache.stride()[:2])
        if any(place % 4 for place in places):
            raise ValueError(
                "kv_cache must hold FP8 rows at multiples of 4 bytes, where their scales can be "
                f"read, got address and strides {places}"
            )


def cache_views(kv_cache: Shaped[Tensor, "pages page_size row"]) -> tuple[Tensor, Tensor, Tensor]:
    """Latent numbers, scales and rotary keys: the same memory, from where each begins."""
    if kv_cache.dtype != torch.uint8:
        return kv_cache, kv_cache, kv_cache[..., LATENT:]
    if kv_cache.numel() == 0:  # no slot is read, but pointers have a dtype
        kv_cache = kv_cache.new_empty(1, 1, ROW_BYTES)
    scales = kv_cache[..., SCALES_AT:ROPE_AT].view(torch.float32)
    return kv_cache.view(torch.float8_e4m3fn), scales, kv_cache[..., ROPE_AT:].view(torch.bfloat16)


def launch_attention(
    q: Float[Tensor, "rows h d_row"],
    kv_cache: Shaped[Tensor, "pages page_size row"],
    indices: Int[Tensor, "rows topk"],
    counts: Int[Tensor, " rows"] | None,
    sink: Float[Tensor, " h"] | None,
    softmax_scale: float,
    outs: Float[Tensor, "splits rows h d_c"],
    lses: Float[Tensor, "splits rows h"],
    config: Config,
    *,
    interpreted: bool,
) -> None:
    """Attention of each row over each split of its list, into `outs` and `lses`.

    Args:
        q: Queries.
        kv_cache: Rows of numbers or of 656 bytes.
        indices: Slots.
        counts: Entries of each row that count, or None.
        sink: Given with one split only.
        softmax_scale: As the caller passed it.
        outs: One output for each split.
        lses: One LSE for each split.
        config: How the work is cut.
        interpreted: Triton's interpreter runs the kernel.
    """
    rows, heads, _ = q.shape
    splits, topk = outs.shape[0], indices.shape[1]
    if rows == 0:
        return
    cache_format = "fp8" if kv_cache.dtype == torch.uint8 else "bf16"
    cache_dtype = q.dtype if cache_format == "fp8" else kv_cache.dtype
    latent, rope = operand_dtypes(cache_format, q.dtype, cache_dtype, interpreted=interpreted)
    numbers, scales, rotary = cache_views(kv_cache)
    tiles = triton.cdiv(triton.cdiv(topk, splits), config.tokens)
    page_size, page_stride, slot_stride = kv_cache.shape[1], *kv_cache.stride()[:2]
    if page_stride == page_size * slot_stride:
        # Pages follow one another: pages of one slot need no division, and are the same memory.
        page_size, page_stride = 1, slot_stride
    if counts is not None:
        counts = counts.contiguous()  # the kernel reads counts_ptr + row
    kernel = kernel_of(config)[(rows * triton.cdiv(heads, config.heads), splits)]
    with current_device(q.device):
        kernel(
            q, numbers, scales, rotary, indices, counts, sink, outs, lses,
            heads, topk, tiles * config.tokens, kv_cache.shape[0] * kv_cache.shape[1],
            softmax_scale,
            *q.stride()[:2], page_stride, slot_stride, indices.stride(0),
            0 if sink is None else sink.stride(0),
            *outs.stride()[:3], *lses.stride(),
            **constants(
                config,
                cache_format,
                latent,
                rope,
                page_size=page_size,
                interpreted=interpreted,
                aligned=all(n % 16 == 0 for n in (kv_cache.data_ptr(), *kv_cache.stride()[:2])),
            ),
            num_warps=config.warps,
            num_stages=config.stages,
        )  # fmt: skip
