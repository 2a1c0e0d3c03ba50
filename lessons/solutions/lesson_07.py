"""Answers to the exercises of lesson 07. Write your own first."""

import torch
from jaxtyping import Float
from torch import Tensor


def absorb(
    q_nope: Float[Tensor, "s h d_n"],
    q_pe: Float[Tensor, "s h d_r"],
    w_uk: Float[Tensor, "h d_n d_c"],
) -> Float[Tensor, "s h d_row"]:
    """The queries in the space of the cached row."""
    return torch.cat([torch.einsum("shn,hnc->shc", q_nope, w_uk), q_pe], dim=-1)


def absorbed(
    q_nope: Float[Tensor, "s_q h d_n"],
    q_pe: Float[Tensor, "s_q h d_r"],
    kv_rows: Float[Tensor, "s_kv d_row"],
    w_uk: Float[Tensor, "h d_n d_c"],
    w_uv: Float[Tensor, "h d_v d_c"],
    softmax_scale: float,
) -> Float[Tensor, "s_q h d_v"]:
    """Attention of one request's last rows over its cached rows."""
    s_q, s_kv = q_nope.shape[0], kv_rows.shape[0]
    scores = absorb(q_nope, q_pe, w_uk) @ kv_rows.T * softmax_scale  # [s_q, h, s_kv]
    positions = torch.arange(s_q) + (s_kv - s_q)
    visible = torch.arange(s_kv) <= positions[:, None]
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
    latents = weights @ kv_rows[:, : w_uk.shape[-1]]  # [s_q, h, d_c]
    return torch.einsum("shc,hvc->shv", latents, w_uv)
