"""Cache write: a token's 576 numbers become the 656 bytes of its slot.

    bytes    0 .. 511   E4M3: latent / scale, four groups of 128
    bytes  512 .. 527   four float32 scales
    bytes  528 .. 655   64 bfloat16, the rotary key

One program a token. It reads 1,152 bytes (in bfloat16) and writes 656, so the kernel is as fast as
memory, and all else is about where it must not write: a slot of -1 is a padded row of the batch,
one outside the cache a fault of the caller. Both programs end before they store anything.

Everything is stored byte by byte. A cache that interleaves layers may have any page stride, so a
scale need not lie at a multiple of 4 bytes, and a 4-byte store there would be a fault of the GPU.
Neighbouring threads store neighbouring bytes, which the memory system joins.
"""

import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_kernels.triton_kernels.outputs import require_runnable
from mla_kernels.triton_kernels.rounding import power_of_two_at_least, to_bfloat16_bits, to_e4m3
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.cache.fp8_rows import LATENT, require_fp8_write
from mla_ref.cache.pages import require_slots
from mla_ref.numerics.float8 import SCALE_RULES
from mla_ref.platform.stream import current_device


@triton.jit
def _group_scale(amax, RULE: tl.constexpr):
    """`mla_ref.numerics.float8.group_scale`: each rule keeps a group of zeros from 0 / 0."""
    # div_rn: Triton's own `/` may be off by two steps, and a scale one step off moves bytes.
    if RULE == "fp32":
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    elif RULE == "fp32-one":
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
        scale = tl.where(amax == 0.0, 1.0, scale)
    elif RULE == "fp32-floor":
        scale = tl.div_rn(tl.maximum(amax, 1e-4), 448.0)
    elif RULE == "pow2":
        scale = power_of_two_at_least(tl.maximum(tl.div_rn(amax, 448.0), 1e-4))
    else:
        scale = power_of_two_at_least(tl.div_rn(tl.maximum(amax, 1e-4), 448.0))
    # A maximum drops NaN. Here it stays: a NaN scale makes a NaN group, and nothing is hidden.
    return tl.where(amax == amax, scale, amax)


@triton.jit
def write_fp8_rows_kernel(
    cache,
    kv_rows,
    slots,
    capacity,
    page_size,
    page_stride,
    token_stride,
    byte_stride,
    row_stride,
    number_stride,
    slot_stride,
    RULE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """One program a token; strides in elements of their tensor."""
    token = tl.program_id(0).to(tl.int64)
    # Compared in 64 bits: 2^40 + 17 narrowed first would be slot 17 (b12x#40).
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    if (slot < 0) | (slot >= capacity):
        return
    # slot * 656 passes 2^31 at slot 3,273,604, so the address is made in 64 bits too.
    row = cache + slot // page_size * page_stride + slot % page_size * token_stride
    numbers = kv_rows + token * row_stride

    group = tl.arange(0, 4)[:, None]
    column = group * 128 + tl.arange(0, 128)[None, :]
    latent = tl.load(numbers + column * number_stride).to(tl.float32)
    amax = tl.max(tl.abs(latent), axis=1)
    has_nan = tl.max((latent != latent).to(tl.int32), axis=1) != 0
    scale = _group_scale(tl.where(has_nan, float("nan"), amax), RULE)
    tl.store(row + column * byte_stride, to_e4m3(tl.div_rn(latent, scale[:, None])))

    part = tl.arange(0, 4)[None, :]
    scale_bytes = (scale.to(tl.uint32, bitcast=True)[:, None] >> (8 * part)) & 0xFF
    tl.store(row + (512 + 4 * group + part) * byte_stride, scale_bytes.to(tl.uint8))

    i = tl.arange(0, 64)
    if HAS_ROPE:
        k_pe = to_bfloat16_bits(tl.load(numbers + (512 + i) * number_stride).to(tl.float32))
    else:
        k_pe = tl.zeros([64], tl.uint32)
    half = tl.arange(0, 2)[None, :]
    k_pe_bytes = (k_pe[:, None] >> (8 * half)) & 0xFF
    tl.store(row + (528 + 2 * i[:, None] + half) * byte_stride, k_pe_bytes.to(tl.uint8))


def write_fp8_rows(
    cache: UInt8[Tensor, "pages page_size 656"],
    kv_rows: Float[Tensor, "num_tokens d_row"],
    slots: Int[Tensor, " num_tokens"],
    *,
    scale_rule: str = "fp32",
    validate: bool = True,
) -> None:
    """`mla_ref.cache.write_fp8_rows` as a kernel, the same bytes.

    Args:
        cache: Pages of 656-byte rows, any strides.
        kv_rows: One row [latent | rotary key] a token, any strides.
        slots: Target of each row; -1 is not written.
        scale_rule: See `mla_ref.numerics.float8.group_scale`.
        validate: Raise on a slot outside the cache and on two rows for one slot, for which the
            slots are read back to the host: not in a captured step. Without it a slot outside the
            cache is not written.
    """
    require_fp8_write(cache, kv_rows, slots, scale_rule)
    require_runnable("cache", cache)
    pages, page_size = cache.shape[:2]
    if validate:
        require_slots(slots, pages * page_size)
    if not slots.shape[0] or not pages * page_size:
        return
    with current_device(cache.device):
        write_fp8_rows_kernel[(slots.shape[0],)](
            cache,
            kv_rows,
            slots,
            pages * page_size,
            page_size,
            *cache.stride(),
            *kv_rows.stride(),
            slots.stride(0),
            RULE=scale_rule,
            HAS_ROPE=kv_rows.shape[1] > LATENT,
        )


def signatures() -> tuple[Compilation, ...]:
    """What is compiled: each scale rule, for a contiguous cache, bfloat16 rows and int64 slots."""
    sizes = ("capacity", "page_size", "page_stride", "token_stride", "row_stride")
    return tuple(
        Compilation(
            name=f"cache_write/{rule}",
            fn=write_fp8_rows_kernel,
            signature={"cache": "*u8", "kv_rows": "*bf16", "slots": "*i64"}
            | dict.fromkeys(sizes, "i32"),
            constexprs={
                "byte_stride": 1,
                "number_stride": 1,
                "slot_stride": 1,
                "RULE": rule,
                "HAS_ROPE": True,
            },
            aligned=("cache", "kv_rows", "slots", *sizes),
        )
        for rule in SCALE_RULES
    )
