"""Answers to the exercises of lesson 06. Write your own first."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def up_project(
    kv_rows: Float[Tensor, "s d_row"],
    kv_b: Float[Tensor, "h_times_nope_and_v d_c"],
    num_heads: int,
    nope_dim: int,
) -> tuple[Float[Tensor, "s h d_qk"], Float[Tensor, "s h d_v"]]:
    """Keys and values of every head from the cached rows."""
    d_c = kv_b.shape[1]
    latent, k_pe = kv_rows[:, :d_c], kv_rows[:, d_c:]
    both = torch.einsum("sc,hdc->shd", latent, kv_b.unflatten(0, (num_heads, -1)))
    k_nope, v = both[..., :nope_dim], both[..., nope_dim:]
    return torch.cat([k_nope, k_pe[:, None].expand(-1, num_heads, -1)], dim=-1), v


def softmax_scale(nope_dim: int, rope_dim: int, factor: float, mscale_all_dim: float) -> float:
    """The factor on q·k of a model whose context is stretched by `factor`."""
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1 if factor > 1 else 1.0
    return (nope_dim + rope_dim) ** -0.5 * mscale**2
