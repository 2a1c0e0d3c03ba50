"""E2M1, a number of 4 bits, two of them in a byte.

1 sign, 2 exponent bits, 1 mantissa bit: the 16 codes are the magnitudes below and their negatives.
There is no infinity and no NaN. The even element of a pair lies in the low half of its byte, as in
NVIDIA's tools and the OCP Microscaling specification's examples.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mla_ref.checks import describe

E2M1_MAX = 6.0
# Code c stands for E2M1_MAGNITUDES[c], code c + 8 for its negative.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
# The midpoint between codes c and c + 1 belongs to the even one: to c for these, to c + 1 below.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def to_e2m1(x: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Codes 0 .. 15 of the nearest E2M1 numbers, ties to the even code; beyond ±6 saturates.

    `x` is read as float32. NaN has no code and becomes +6: whoever calls marks it elsewhere, as
    NVFP4 does in the scale. Rounding ties upwards, or always down, are other writers' rules and
    differ from this one in the codes of midpoints.
    """
    x = x.to(torch.float32).contiguous()  # bucketize warns of strides
    magnitude = x.abs()
    # A code is the number of midpoints that lie below the magnitude.
    code = torch.bucketize(magnitude, magnitude.new_tensor(_TIES_DOWN), right=False)
    code = code + torch.bucketize(magnitude, magnitude.new_tensor(_TIES_UP), right=True)
    return torch.where(x.signbit() & ~x.isnan(), code + _SIGN, code).to(torch.uint8)


def from_e2m1(codes: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 numbers that E2M1 codes stand for; only the low 4 bits are read."""
    table = torch.tensor(E2M1_MAGNITUDES, device=codes.device)
    magnitude = table[(codes & 7).long()]
    return torch.where(codes & _SIGN == _SIGN, -magnitude, magnitude)


def pack_e2m1(codes: UInt8[Tensor, "*rows n"]) -> UInt8[Tensor, "*rows half"]:
    """Two codes a byte along the last dimension, the even element in the low half."""
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes must have an even number in the last dimension, got {describe(codes)}"
        )
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: UInt8[Tensor, "*rows half"]) -> UInt8[Tensor, "*rows n"]:
    """The codes of each byte, low half first: the reverse of `pack_e2m1`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
