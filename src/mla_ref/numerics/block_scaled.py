"""What the block-scaled formats share: groups of neighbours, each with a scale of its own."""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import describe


def split_groups(x: Float[Tensor, "*rows n"], group: int) -> Float[Tensor, "*rows groups group"]:
    """The last dimension as groups of `group` neighbours, in float32.

    Raises:
        TypeError: `x` does not hold floating-point numbers.
        ValueError: The last dimension is not a whole number of groups. It is not padded: a
            padded row has another width, and other bytes, than its reader expects.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor [..., n], got {describe(x)}")
    if x.ndim == 0 or x.shape[-1] % group:
        raise ValueError(
            f"x must have a multiple of {group} numbers in the last dimension, got {describe(x)}"
        )
    return x.to(torch.float32).unflatten(-1, (x.shape[-1] // group, group))


def require_block_scaled(data: Tensor, scales: Tensor, bytes_per_scale: int) -> None:
    """Raise unless both are bytes, with one scale for each `bytes_per_scale` bytes of data."""
    for name, part in (("data", data), ("scales", scales)):
        if not isinstance(part, Tensor) or part.dtype != torch.uint8:
            raise TypeError(f"{name} must be a uint8 tensor [..., n], got {describe(part)}")
        if part.ndim == 0:
            raise ValueError(f"{name} must have the shape [..., n], got {describe(part)}")
    if data.shape != (*scales.shape[:-1], scales.shape[-1] * bytes_per_scale):
        raise ValueError(
            f"scales must have one byte for each {bytes_per_scale} bytes of data, got "
            f"{describe(scales)} and data {list(data.shape)}"
        )


def require_wide(dtype: torch.dtype) -> None:
    """Raise a ValueError unless `dtype` is float32 or float64, which hold the numbers exactly."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
