"""E4M3 bytes and the scales beside them.

E4M3 (OCP 8-bit floating point, "fn" variant): 1 sign, 4 exponent, 3 mantissa bits, largest number
448, no infinity, NaN 0x7F and 0xFF. What a cast does above 448 depends on library, version and
device: some saturate, some give NaN (ml_dtypes#400, pytorch#178817). So values are clamped here,
and the bytes depend on nothing but the numbers.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mla_ref.checks import describe, require_choice

E4M3_MAX = 448.0
FLOAT32_TINY = 2.0**-126

# How a writer turns the largest magnitude of a group (amax) into the scale that it stores.
SCALE_RULES = ("fp32", "fp32-one", "fp32-floor", "pow2", "pow2-floor")
# How a reader takes the stored scale.
SCALE_READERS = ("stored", "truncated")


def to_e4m3(x: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Nearest E4M3 numbers (ties to even) as bytes; beyond ±448 saturates, NaN stays NaN."""
    _require_floats("x", x)
    clamped = x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(data: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The float32 numbers that E4M3 bytes stand for, exactly."""
    if not isinstance(data, Tensor) or data.dtype != torch.uint8:
        raise TypeError(f"data must be a uint8 tensor, got {describe(data)}")
    # All 256 numbers and a look-up: on a CPU torch's own cast takes longer.
    every = torch.arange(256, device=data.device, dtype=torch.uint8)
    numbers = every.view(torch.float8_e4m3fn).to(torch.float32)
    return numbers.index_select(0, data.reshape(-1).to(torch.int32)).view(data.shape)


def power_of_two_at_least(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """2^ceil(log2 x) for x > 0, taken from the exponent; infinity and NaN stay what they are.

    log2 in floating point rounds numbers just above a power of two down to it.
    """
    mantissa, exponent = torch.frexp(x)
    # frexp gives x = mantissa * 2^exponent with the mantissa in [0.5, 1).
    power = torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return _where_finite(x, power)


def power_of_two_at_most(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """2^floor(log2 x) for x > 0: what is left when only the exponent of a scale is read.

    Infinity and NaN stay what they are.
    """
    return _where_finite(x, torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1))


def _where_finite(x: Tensor, power: Tensor) -> Tensor:
    """`power`, and x itself where that is not finite: frexp gives infinity and NaN the exponent 0.

    A scale of 1 for a group that holds infinity would cut its other numbers at 448 unseen.
    """
    return torch.where(x.isfinite(), power, x)


def group_scale(amax: Float[Tensor, "*groups"], rule: str = "fp32") -> Float[Tensor, "*groups"]:
    """The float32 scale to store for a group whose largest magnitude is `amax`.

    Args:
        amax: Largest magnitude of each group. NaN gives a NaN scale and infinity an infinite one,
            under which the group reads as NaN: nothing is hidden.
        rule: One of
            "fp32": amax / 448, at least the smallest normal float32 (vLLM's cache writer, GLM);
            "fp32-one": amax / 448, and 1 for a group of zeros (b12x);
            "fp32-floor": max(amax, 1e-4) / 448 (FlashInfer for GLM, DeepGEMM's index keys);
            "pow2": 2^ceil(log2(max(amax / 448, 1e-4))), so at least 2^-13 (FlashMLA's writer);
            "pow2-floor": 2^ceil(log2(max(amax, 1e-4) / 448)) (DeepSeek's act_quant, V3.2).
            A group of zeros dequantises to 0 under each.
    """
    require_choice("rule", rule, SCALE_RULES)
    _require_floats("amax", amax)
    amax = amax.to(torch.float32)
    if rule == "fp32":
        return (amax / E4M3_MAX).clamp(min=FLOAT32_TINY)
    if rule == "fp32-one":
        # A subnormal quotient may be flushed to 0 by a device; 0 as a scale is 0 / 0 later.
        return torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=FLOAT32_TINY))
    if rule == "fp32-floor":
        return amax.clamp(min=1e-4) / E4M3_MAX
    if rule == "pow2":
        return power_of_two_at_least((amax / E4M3_MAX).clamp(min=1e-4))
    return power_of_two_at_least(amax.clamp(min=1e-4) / E4M3_MAX)


def read_scale(
    stored: Float[Tensor, "*groups"], reader: str = "stored"
) -> Float[Tensor, "*groups"]:
    """The scale a reader uses.

    Args:
        stored: The float32 scales in the cache.
        reader: "stored" uses them as they are; "truncated" keeps the exponent alone, as kernels do
            that hand the scale to the hardware as E8M0 (FlashMLA on SM100). That halves a value at
            worst where a writer stored an arbitrary scale (vllm#49435). Infinity and NaN stay.
    """
    require_choice("reader", reader, SCALE_READERS)
    _require_floats("stored", stored)
    return stored if reader == "stored" else power_of_two_at_most(stored)


def _require_floats(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {describe(x)}")
