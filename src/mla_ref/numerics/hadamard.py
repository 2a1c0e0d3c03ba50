"""The Hadamard matrix: an orthogonal mixing of numbers, whose entries are all of one size."""

import torch
from jaxtyping import Float
from torch import Tensor

from mla_ref.checks import require_count


def hadamard(size: int) -> Float[Tensor, "size size"]:
    """The normalised Hadamard matrix of a power of two, float64: entries +-size^-0.5, H H^T = 1."""
    if require_count("size", size, at_least=1) & (size - 1):
        raise ValueError(f"size must be a power of two, got {size}")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], dim=1)
    return matrix * size**-0.5
