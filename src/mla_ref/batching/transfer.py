"""From the host to the device in one copy, however many lists of integers a step consists of.

A copy of a few hundred bytes costs what its launch costs, so the tensors of a step travel as one.
From pinned memory the host does not wait for it (and must not: from memory that is not pinned, a
copy waits for all that the device still has to do).
"""

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Int
from torch import Tensor


def joined(tensors: Sequence[Tensor], *, pinned: bool) -> Int[Tensor, " numbers"]:
    """All numbers one after the other, int64, on the host."""
    flat = torch.cat([tensor.reshape(-1).long() for tensor in tensors])
    return flat.pin_memory() if pinned else flat


def views(flat: Int[Tensor, " numbers"], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes that share the memory of `flat`, in order."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Integer tensors of the host on a device, int64; on the CPU they stay as they are."""
    if device.type == "cpu":
        return list(tensors)
    flat = joined(tensors, pinned=device.type == "cuda").to(device, non_blocking=True)
    return views(flat, [tensor.shape for tensor in tensors])
