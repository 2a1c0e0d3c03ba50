"""The part "cache_write" of the backend."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.cuda_kernels.arguments import Write, number_of
from mla_kernels.cuda_kernels.launch import Kernel
from mla_ref.cache.fp8_rows import require_fp8_write
from mla_ref.cache.pages import require_slots
from mla_ref.checks import describe
from mla_ref.numerics.float8 import SCALE_RULES

KERNEL = Kernel("cache_write.cu", "cache_write", threads=128)
TOKENS = 4  # a warp each


def write_fp8_rows(
    cache: UInt8[Tensor, "pages page_size 656"],
    kv_rows: Float[Tensor, "num_tokens d_row"],
    slots: Int[Tensor, " num_tokens"],
    *,
    scale_rule: str = "fp32",
    validate: bool = True,
) -> None:
    """Arguments as `mla_ref.cache.write_fp8_rows`.

    Raises:
        ValueError: With `validate`, which reads the slots back to the host: one is out of range or
            listed twice.
    """
    require_fp8_write(cache, kv_rows, slots, scale_rule)
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slots must be int32 or int64, got {describe(slots)}")
    if cache.stride(2) != 1 or any(n % 16 for n in (cache.data_ptr(), *cache.stride()[:2])):
        raise ValueError(
            "cache must have rows without gaps at multiples of 16 bytes, got the strides "
            f"{list(cache.stride())}"
        )
    pages, page_size = cache.shape[:2]
    if validate:
        require_slots(slots, pages * page_size)
    call = Write(
        cache=cache.data_ptr(),
        rows=kv_rows.data_ptr(),
        slots=slots.data_ptr(),
        page_stride=cache.stride(0),
        row_stride=cache.stride(1),
        from_row=kv_rows.stride(0),
        from_dim=kv_rows.stride(1),
        slot_stride=slots.stride(0),
        capacity=pages * page_size,
        tokens=kv_rows.shape[0],
        width=kv_rows.shape[1],
        page_size=page_size,
        number=number_of("kv_rows", kv_rows),
        rule=SCALE_RULES.index(scale_rule),
        slots_are_64_bit=slots.dtype == torch.int64,
    )
    KERNEL.launch(cache.device, (-(-kv_rows.shape[0] // TOKENS), 1), call)
