"""Rounding to E4M3 and bfloat16 in integer arithmetic, so that the bits are the same everywhere.

A cast would do on a GPU. Triton's interpreter, though, cuts bfloat16 off instead of rounding it,
rounds E4M3 in another way than hardware, and reads the NaN of E4M3 as 480; and above 448 what a
cast gives depends on who casts (triton#7327). Beside the loads these integers cost little.
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x):
    """The nearest E4M3 numbers of float32 `x`, ties to even, as bytes: beyond ±448 saturates."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Floats without sign are ordered as their bits are.
    held = tl.minimum(size, 0x43E00000)  # 448
    # 20 of 23 mantissa bits go. Half a step less 1 is added, and 1 more if the kept part is odd.
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the step is 2^-9. Next to 2^23 the step of float32 is 1: the sum rounds to a count
    # of steps, and that count is the byte.
    steps = (held.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True)
    byte = tl.where(held < 0x3C800000, steps - 0x4B000000, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(byte):
    """The float32 numbers that E4M3 bytes stand for."""
    wide = byte.to(tl.uint32)
    size = wide & 0x7F
    # Below 8 the byte counts steps of 2^-9; else it is exponent and mantissa, with another bias.
    steps = (size.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True)
    bits = tl.where(size < 8, steps, (size << 20) + ((127 - 7) << 23))
    bits = tl.where(size == 0x7F, 0x7FC00000, bits)
    # The sign as a bit: Triton's -x is 0 - x, which makes 0.0 of 0.0.
    return (bits | ((wide & 0x80) << 24)).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16_bits(x):
    """The nearest bfloat16 numbers of float32 `x`, ties to even, as uint32 of 16 bits."""
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, nearest)


@triton.jit
def power_of_two_at_least(x):
    """2^ceil(log2 x) of normal float32 `x`, from the bits; infinity stays infinity."""
    bits = x.to(tl.uint32, bitcast=True)
    up = tl.where((bits & 0x7FFFFF) != 0, 0x800000, 0).to(tl.uint32)
    return ((bits & 0x7F800000) + up).to(tl.float32, bitcast=True)
