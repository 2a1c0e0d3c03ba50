"""The part "cache_write" of the backend."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.cuda_kernels.arguments import Write, number_of
from mla_kernels.cuda_kernels.launch import Kernel
from mla_ref.cache.fp8_rows import LATENT, ROPE, ROW_BYTES
from mla_ref.checks import (
    describe,
    require_choice,
    require_float,
    require_integer,
    require_same_device,
    require_size,
)
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
    require_choice("scale_rule", scale_rule, SCALE_RULES)
    require_float("kv_rows", kv_rows, "num_tokens d_row")
    require_integer("slots", slots, "num_tokens")
    require_size("slots", slots, 0, kv_rows.shape[0], "one slot a row")
    if kv_rows.shape[1] not in (LATENT, LATENT + ROPE):
        raise ValueError(f"kv_rows must be [n, 576] or [n, 512], got {describe(kv_rows)}")
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slots must be int32 or int64, got {describe(slots)}")
    if not isinstance(cache, Tensor) or cache.dtype != torch.uint8 or cache.ndim != 3:
        raise TypeError(f"cache must be uint8 [pages, page_size, 656], got {describe(cache)}")
    require_size("cache", cache, 2, ROW_BYTES, "the bytes of an FP8 row")
    if cache.stride(2) != 1 or any(n % 16 for n in (cache.data_ptr(), *cache.stride()[:2])):
        raise ValueError(
            "cache must have rows without gaps at multiples of 16 bytes, got the strides "
            f"{list(cache.stride())}"
        )
    require_same_device({"cache": cache, "kv_rows": kv_rows, "slots": slots})
    pages, page_size = cache.shape[:2]
    if validate:
        _require_slots(slots, pages * page_size)
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


def _require_slots(slots: Tensor, capacity: int) -> None:
    listed = [slot for slot in slots.tolist() if slot != -1]
    for slot in listed:
        if not 0 <= slot < capacity:
            raise ValueError(
                f"slots holds {slot}, but the cache has slots 0 to {capacity - 1} (-1: do not "
                "write)"
            )
    if len(set(listed)) < len(listed):
        raise ValueError("slots must not list a slot twice: which row would win is undefined")
