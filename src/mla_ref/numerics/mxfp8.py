"""MXFP8: 32 E4M3 numbers and one power of two, 33 bytes, 8.25 bits a number.

The format of the OCP Microscaling specification, version 1.0. A group is 32 neighbours along the
last dimension, which is the one that a product sums over. Its scale is one E8M0 byte: a byte b is
2^(b - 127), 255 is NaN, and there is neither a sign nor a zero. That is the exponent field of a
float32, so a decoder shifts it into place.

Against the float32 scales of the 656-byte cache row, a power of two costs up to one bit of range
and gains exact arithmetic: an E4M3 number times a power of two needs no rounding.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mla_ref.checks import describe, require_choice
from mla_ref.numerics.block_scaled import require_block_scaled, require_wide, split_groups
from mla_ref.numerics.float8 import from_e4m3, to_e4m3

MXFP8_GROUP = 32
# How a writer turns the largest magnitude of a group (amax) into the power of two that it stores.
MXFP8_SCALE_RULES = ("ceil", "floor")
E8M0_BIAS = 127
E8M0_NAN = 255
_E4M3_NAN = 0x7F


class MXFP8Tensor(NamedTuple):
    """A tensor in MXFP8.

    Attributes:
        data: E4M3 bytes.
        scales: E8M0 bytes, one for each 32 numbers of the last dimension.
    """

    data: UInt8[Tensor, "*rows n"]
    scales: UInt8[Tensor, "*rows groups"]

    @property
    def nbytes(self) -> int:
        """33 bytes for every 32 numbers."""
        return self.data.numel() + self.scales.numel()


def from_e8m0(scales: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 powers of two that E8M0 bytes stand for, exactly; 255 is NaN."""
    exponent_field = scales.to(torch.int32) << 23
    # A float32 with exponent field 0 is subnormal: 2^-127 is half of the smallest normal number.
    bits = torch.where(scales == 0, 1 << 22, exponent_field)
    return torch.where(scales == E8M0_NAN, torch.nan, bits.view(torch.float32))


def mxfp8_scale(amax: Float[Tensor, "*groups"], rule: str = "ceil") -> UInt8[Tensor, "*groups"]:
    """The E8M0 byte to store for a group whose largest magnitude is `amax`, read as float32.

    Zero gives byte 0, the smallest scale: there is no zero to store, and none is needed, since the
    group's numbers are 0 and 0 times any finite scale is exactly 0. NaN or infinity gives byte 255,
    NaN: the whole group reads as NaN and nothing is hidden. Below 2^-119 the wanted scale is under
    E8M0's smallest, 2^-127, which is stored instead; such a group loses precision (its steps are
    2^-136) and nothing overflows. No float32 reaches the upper end: the largest wants 2^120.

    Args:
        amax: Largest magnitude of each group, at least 0.
        rule: One of
            "ceil": 2^ceil(log2(amax / 448)), the smallest power of two under which nothing
            saturates (NVIDIA's recipe, and DeepSeek's scale_fmt "ue8m0");
            "floor": 2^(floor(log2 amax) - 8), OCP's own rule; 8 is the exponent of E4M3's largest
            power of two. A number that it scales to more than 448, and that can be up to 512,
            saturates: its error is up to 1/8 of itself.
    """
    require_choice("rule", rule, MXFP8_SCALE_RULES)
    if not isinstance(amax, Tensor) or not amax.is_floating_point():
        raise TypeError(f"amax must be a floating-point tensor, got {describe(amax)}")
    amax = amax.to(torch.float32)
    # From the exponent, since log2 rounds numbers just above a power of two down to it:
    # amax = mantissa * 2^exponent with the mantissa in [0.5, 1), and 448 = 0.875 * 2^9.
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 9
    if rule == "ceil":
        exponent = exponent + (mantissa > 0.875).to(exponent.dtype)
    byte = torch.where(amax == 0, 0, (exponent + E8M0_BIAS).clamp(min=0))
    return torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8)


def quantise_mxfp8(x: Float[Tensor, "*rows n"], *, scale_rule: str = "ceil") -> MXFP8Tensor:
    """Round to MXFP8: to the nearest E4M3 number, ties to even, under the scale of the group.

    The error is at most 2^-4 of a number, or 2^-10 of the scale where that is more, unless rule
    "floor" saturates. Zeros keep their sign.

    Args:
        x: Numbers in any float dtype, read as float32; n must be a multiple of 32. A group that
            holds NaN or infinity becomes NaN (E4M3 has no infinity), the others do not change.
        scale_rule: See `mxfp8_scale`.
    """
    require_choice("scale_rule", scale_rule, MXFP8_SCALE_RULES)
    groups = split_groups(x, MXFP8_GROUP)
    scales = mxfp8_scale(groups.abs().amax(dim=-1), scale_rule)
    # Times the reciprocal: exact, and 2^127 is a normal number where 2^-127 is a subnormal one that
    # a device may take for 0. Reciprocals of E8M0 are E8M0: byte 254 - b.
    reciprocal = from_e8m0(2 * E8M0_BIAS - scales.clamp(max=2 * E8M0_BIAS))
    data = to_e4m3(groups * reciprocal[..., None])
    data = data.masked_fill((scales == E8M0_NAN)[..., None], _E4M3_NAN)
    return MXFP8Tensor(data.flatten(-2), scales)


def dequantise_mxfp8(
    tensor: MXFP8Tensor, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows n"]:
    """The numbers that an MXFP8 tensor stands for.

    Exact in float64, and in float32 wherever the number is in its range. One that rounds up to
    2^128 is not, and becomes infinity: it was within 3 % of float32's largest.

    Args:
        tensor: Bytes and scales.
        dtype: float32 or float64.

    Raises:
        TypeError: Data or scales are not bytes.
        ValueError: The scales do not fit the data, or the dtype is another.
    """
    require_wide(dtype)
    require_mxfp8(tensor)
    data, scales = tensor
    groups = from_e4m3(data.contiguous()).unflatten(-1, (scales.shape[-1], MXFP8_GROUP))
    return (groups.to(dtype) * from_e8m0(scales).to(dtype)[..., None]).flatten(-2)


def require_mxfp8(tensor: MXFP8Tensor) -> None:
    """Raise unless the parts of an MXFP8 tensor are bytes and fit each other."""
    require_block_scaled(tensor.data, tensor.scales, bytes_per_scale=MXFP8_GROUP)
