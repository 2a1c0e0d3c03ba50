"""Answers to the exercises of lesson 05. Write your own first."""

import torch
from jaxtyping import Float
from torch import Tensor


def to_halves(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
    """First the first number of every pair, then the second number of every pair."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def convert_weight(
    weight: Float[Tensor, "out hidden"], num_heads: int, nope_dim: int
) -> Float[Tensor, "out hidden"]:
    """The weight whose output can be turned in halves."""
    heads = weight.unflatten(0, (num_heads, -1))
    nope, rope = heads[:, :nope_dim], heads[:, nope_dim:]
    # Each head for itself; a row of the weight makes one number of the output.
    return torch.cat([nope, rope[:, 0::2], rope[:, 1::2]], dim=1).flatten(0, 1)
