"""NVFP4: 16 E2M1 numbers and an E4M3 scale, 9 bytes, 4.5 bits a number, and one float32 a tensor.

    value = e2m1 * e4m3 of its group of 16 * float32 of the tensor

A group is 16 neighbours along the last dimension. E4M3 reaches from 2^-9 to 448, too little for
the scales of arbitrary tensors; the float32 moves them there, so that the tensor's largest number
gets the scale 448 and the code 6. This is the format as NVIDIA's ModelOpt stores it (weight,
weight_scale, weight_scale_2), with the scales in plain row-major order: tensor-core kernels want
them shuffled into tiles of 128 x 4, which is a matter of loading.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mla_ref.checks import describe, require_choice, require_scale
from mla_ref.numerics.block_scaled import require_block_scaled, require_wide, split_groups
from mla_ref.numerics.float4 import E2M1_MAX, from_e2m1, pack_e2m1, to_e2m1, unpack_e2m1
from mla_ref.numerics.float8 import E4M3_MAX, FLOAT32_TINY, from_e4m3, to_e4m3

NVFP4_GROUP = 16
# How a checkpoint stores the float32 of the tensor: as the factor itself (ModelOpt), or as one over
# it (compressed-tensors, format nvfp4-pack-quantized).
GLOBAL_SCALE_READERS = ("factor", "reciprocal")
_E4M3_NAN = 0x7F


class NVFP4Tensor(NamedTuple):
    """A tensor in NVFP4.

    Attributes:
        data: Two E2M1 codes a byte, the even element in the low half.
        scales: E4M3 bytes, one for each 16 numbers of the last dimension.
        global_scale: float32, a factor on every number. compressed-tensors stores its reciprocal.
    """

    data: UInt8[Tensor, "*rows half"]
    scales: UInt8[Tensor, "*rows groups"]
    global_scale: Float[Tensor, ""]

    @property
    def nbytes(self) -> int:
        """9 bytes for every 16 numbers, and 4."""
        return self.data.numel() + self.scales.numel() + 4


def read_global_scale(
    stored: Float[Tensor, ""], reader: str = "factor", *, name: str = "stored"
) -> Float[Tensor, ""]:
    """The factor of a tensor, from what a checkpoint stores.

    Args:
        stored: The number in the file.
        reader: "factor" takes it as it is (ModelOpt's weight_scale_2), "reciprocal" takes one over
            it (compressed-tensors' weight_global_scale). Taking one for the other is no small
            error: weights of magnitude 1 have a factor near 1/2688.
        name: What an error calls the number.

    Raises:
        ValueError: The number is negative, NaN or infinite, or one over it is where that is the
            factor. A factor of 0 is that of a tensor of zeros.
    """
    require_choice("reader", reader, GLOBAL_SCALE_READERS)
    factor = stored if reader == "factor" else stored.reciprocal()
    # On "meta" the number is nowhere.
    if stored.device.type != "meta" and not (
        stored >= 0 and stored.isfinite() and factor.isfinite()
    ):
        wanted = "at least 0" if reader == "factor" else "greater than 0, and one over it finite"
        raise ValueError(f"{name} must be finite and {wanted}, got {stored.item()}")
    return factor


def nvfp4_global_scale(x: Float[Tensor, "*rows n"]) -> Float[Tensor, ""]:
    """The factor amax / (6 * 448) over the finite numbers, at least the smallest normal float32.

    A tensor of zeros, or an empty one, gets that smallest scale; its group scales are 0.
    """
    magnitudes = x.to(torch.float32).abs()
    magnitudes = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    amax = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    return (amax / (E2M1_MAX * E4M3_MAX)).clamp(min=FLOAT32_TINY)


def quantise_nvfp4(
    x: Float[Tensor, "*rows n"], *, global_scale: float | None = None
) -> NVFP4Tensor:
    """Round to NVFP4: a scale for each group to the nearest E4M3, then codes under that scale.

    The group's scale is E4M3(amax / (6 * global_scale)). Its rounding (up to 2^-4, more below
    2^-6) comes first and the codes are made with the rounded scale, as a reader will have it;
    where it was rounded down, the group's largest number may saturate at 6.

    A group of zeros gets scale byte 0 and codes 0, so it reads as exactly 0. So does a group
    whose scale rounds to 0: up to 2^-10 * 6 * global_scale, or 2e-6 of the tensor's largest number.
    A group that holds NaN or infinity gets the scale NaN and reads as NaN; it has no part in the
    global scale, so the other groups do not change.

    Args:
        x: Numbers in any float dtype, read as float32; n must be a multiple of 16.
        global_scale: A given factor in place of `nvfp4_global_scale(x)`. Kernels that fuse
            matrices (gate and up of an expert) want one factor for both. A group with numbers above
            2688 times the factor saturates.

    Raises:
        ValueError: n is no multiple of 16, or the given factor is not positive, or 6 times it is
            not finite in float32.
    """
    groups = split_groups(x, NVFP4_GROUP)
    if global_scale is None:
        factor = nvfp4_global_scale(groups)
    else:
        given = torch.tensor(require_scale("global_scale", global_scale), dtype=torch.float32)
        if not (E2M1_MAX * given).isfinite():  # every group's scale would be amax / inf, 0
            raise ValueError(
                f"global_scale must be so small that {E2M1_MAX:g} times it is finite in float32, "
                f"got {global_scale!r}"
            )
        factor = given.to(groups.device)
    amax = groups.abs().amax(dim=-1)
    scales = to_e4m3(amax / (E2M1_MAX * factor))
    step = (from_e4m3(scales) * factor)[..., None]
    codes = to_e2m1(torch.where(step == 0, 0.0, groups / step))
    hidden = ~amax.isfinite()
    return NVFP4Tensor(
        pack_e2m1(codes.masked_fill(hidden[..., None], 0).flatten(-2)),
        scales.masked_fill(hidden, _E4M3_NAN),
        factor,
    )


def dequantise_nvfp4(
    tensor: NVFP4Tensor, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows n"]:
    """The numbers that an NVFP4 tensor stands for: exact in float64, rounded once in float32.

    A code has 2 significant bits and a scale 4, so their product is exact even in bfloat16; only
    the global factor, with 24 bits, makes it round. That is why W4A16 kernels multiply bfloat16
    tiles first and apply the factor to the float32 sum.

    Args:
        tensor: Packed codes, scales and the factor.
        dtype: float32 or float64.

    Raises:
        TypeError: A part is of another kind.
        ValueError: The parts do not fit each other, or the dtype is another.
    """
    require_wide(dtype)
    require_nvfp4(tensor)
    data, scales, factor = tensor
    codes = from_e2m1(unpack_e2m1(data)).unflatten(-1, (scales.shape[-1], NVFP4_GROUP))
    unscaled = codes * from_e4m3(scales.contiguous())[..., None]
    return (unscaled.to(dtype) * factor.to(dtype)).flatten(-2)


def require_nvfp4(tensor: NVFP4Tensor) -> None:
    """Raise unless the parts of an NVFP4 tensor are of their kinds and fit each other."""
    require_block_scaled(tensor.data, tensor.scales, bytes_per_scale=NVFP4_GROUP // 2)
    factor = tensor.global_scale
    if not isinstance(factor, Tensor) or factor.dtype != torch.float32:
        raise TypeError(f"global_scale must be a float32 tensor, got {describe(factor)}")
    if factor.ndim != 0:
        raise ValueError(f"global_scale must be one number, got {describe(factor)}")
