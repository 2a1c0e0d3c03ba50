"""The 656-byte row: an FP8 latent, its four scales, and the rotary key in bfloat16.

    bytes    0 .. 511   512 E4M3 numbers, the latent in 4 groups of 128
    bytes  512 .. 527   4 float32 scales, little-endian, one a group
    bytes  528 .. 655   64 bfloat16 numbers, the rotary key, not quantised

The layout of DeepSeek-V3.2's sparse attention (deepseek-ai/FlashMLA, tests/quant.py and README;
vLLM calls it fp8_ds_mla). 1,152 bytes become 656. Another FP8 layout puts all scales of a page
behind its data; both have rows of like size and no tag, so reading one as the other fails silently
(vllm#40991), which is why each reader here checks the width.
"""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mla_ref.cache.pages import write_rows
from mla_ref.checks import (
    describe,
    require_choice,
    require_integer,
    require_same_device,
    require_size,
    require_tensor,
)
from mla_ref.numerics.float8 import (
    SCALE_READERS,
    SCALE_RULES,
    from_e4m3,
    group_scale,
    read_scale,
    to_e4m3,
)

LATENT = 512
ROPE = 64
GROUP = 128
GROUPS = LATENT // GROUP
ROW_BYTES = LATENT + 4 * GROUPS + 2 * ROPE
_SCALES = slice(LATENT, LATENT + 4 * GROUPS)
_ROPE = slice(LATENT + 4 * GROUPS, ROW_BYTES)


def pack_fp8_rows(
    kv_rows: Float[Tensor, "n d_row"], *, scale_rule: str = "fp32"
) -> UInt8[Tensor, "n 656"]:
    """Quantise cached rows [latent 512 | rotary key 64] to their 656 bytes.

    Args:
        kv_rows: One row a token. A row of 512 (a model without rotary key) gets 128 zero bytes.
        scale_rule: How a group's scale is made, see `group_scale`.
    """
    require_kv_rows(kv_rows, scale_rule)
    n = kv_rows.shape[0]
    latent = kv_rows[:, :LATENT].to(torch.float32).unflatten(1, (GROUPS, GROUP))
    scales = group_scale(latent.abs().amax(dim=-1), scale_rule)
    k_pe = kv_rows.new_zeros(n, ROPE, dtype=torch.bfloat16)
    k_pe[:, : kv_rows.shape[1] - LATENT] = kv_rows[:, LATENT:].to(torch.bfloat16)
    return torch.cat(
        [
            to_e4m3(latent / scales[..., None]).flatten(1),
            scales.contiguous().view(torch.uint8),
            k_pe.view(torch.uint8),
        ],
        dim=1,
    )


def unpack_fp8_rows(
    rows: UInt8[Tensor, "*shape 656"], *, scale_reader: str = "stored"
) -> Float[Tensor, "*shape 576"]:
    """The numbers that 656-byte rows stand for, in float32.

    An E4M3 number has 4 significant bits and a scale 24, so their product is rounded to float32
    once and otherwise exact.

    Args:
        rows: Bytes; any number of dimensions before the last.
        scale_reader: How the stored scale is taken, see `read_scale`.
    """
    require_choice("scale_reader", scale_reader, SCALE_READERS)
    if not isinstance(rows, Tensor) or rows.dtype != torch.uint8:
        raise TypeError(f"rows must be a uint8 tensor, got {describe(rows)}")
    if rows.ndim == 0 or rows.shape[-1] != ROW_BYTES:
        raise ValueError(
            f"rows must have {ROW_BYTES} bytes in the last dimension, got {describe(rows)}"
        )
    scales = read_scale(_aligned(rows[..., _SCALES]).view(torch.float32), scale_reader)
    numbers = rows.new_empty(*rows.shape[:-1], LATENT + ROPE, dtype=torch.float32)
    latent = from_e4m3(rows[..., :LATENT]).unflatten(-1, (GROUPS, GROUP))
    numbers[..., :LATENT] = latent.mul_(scales[..., None]).flatten(-2)
    numbers[..., LATENT:] = _aligned(rows[..., _ROPE]).view(torch.bfloat16)
    return numbers


def _aligned(part: UInt8[Tensor, "*shape n"]) -> UInt8[Tensor, "*shape n"]:
    """A copy, whose bytes may be read as wider numbers.

    `contiguous` makes none of a slice that has no gaps and may begin at any byte.
    """
    return part.clone(memory_format=torch.contiguous_format)


def write_fp8_rows(
    cache: UInt8[Tensor, "pages page_size 656"],
    kv_rows: Float[Tensor, "num_tokens d_row"],
    slots: Int[Tensor, " num_tokens"],
    *,
    scale_rule: str = "fp32",
    validate: bool = True,
) -> None:
    """Quantise rows and write each into its slot, in place; slot -1 is not written.

    Args:
        cache: Pages of 656-byte rows, any page stride.
        kv_rows: One row [latent | rotary key] a token.
        slots: As in `write_rows`.
        scale_rule: As in `pack_fp8_rows`.
        validate: As in `write_rows`.
    """
    require_fp8_write(cache, kv_rows, slots, scale_rule)
    write_rows(cache, pack_fp8_rows(kv_rows, scale_rule=scale_rule), slots, validate=validate)


def require_fp8_write(cache: object, kv_rows: object, slots: object, scale_rule: object) -> None:
    """Raise unless rows of numbers and their slots fit a cache of 656-byte rows."""
    rows = require_kv_rows(kv_rows, scale_rule)
    pages = require_tensor("cache", cache, "pages page_size 656")
    if pages.dtype != torch.uint8:
        raise TypeError(f"cache must hold uint8 bytes, got {describe(cache)}")
    require_size("cache", pages, 2, ROW_BYTES, "bytes of a row")
    named = require_integer("slots", slots, "num_tokens")
    require_size("slots", named, 0, rows.shape[0], "one a row of kv_rows")
    require_same_device({"cache": pages, "kv_rows": rows, "slots": named})


def require_kv_rows(kv_rows: object, scale_rule: object) -> Tensor:
    """Return `kv_rows` if it can be quantised to 656-byte rows by that rule."""
    require_choice("scale_rule", scale_rule, SCALE_RULES)
    rows = require_tensor("kv_rows", kv_rows, "n d_row")
    if not rows.is_floating_point() or rows.shape[1] not in (LATENT, LATENT + ROPE):
        raise ValueError(
            f"kv_rows must be floating point [n, {LATENT + ROPE}] or [n, {LATENT}], got "
            f"{describe(rows)}"
        )
    return rows
