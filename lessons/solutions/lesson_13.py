"""Answers to the exercises of lesson 13. Write your own first."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def my_local_lens(
    lens: Int[Tensor, " rows"],
    rank: int,
    world: int,
    interleave: int,
) -> Int[Tensor, " rows"]:
    """How many of the first tokens of a request a rank holds, for each length."""
    dealt = world * interleave  # tokens of a full round
    # In the last round the ranks before this one are served first.
    rest = lens % dealt - rank * interleave
    return lens // dealt * interleave + rest.clamp(0, interleave)


def merge_ranks(
    outs: Float[Tensor, "world rows h d_c"],
    lses: Float[Tensor, "world rows h"],
    sink: Float[Tensor, " h"] | None,
) -> tuple[Float[Tensor, "rows h d_c"], Float[Tensor, "rows h"]]:
    """Attention over the keys of all ranks; the sink counts once."""
    heaviest = lses.amax(dim=0)
    anchor = torch.where(heaviest == -torch.inf, 0.0, heaviest)
    weights = torch.exp(lses - anchor)
    total, out = torch.zeros_like(anchor), torch.zeros_like(outs[0])
    for weight, part in zip(weights, outs, strict=True):
        used = torch.where((weight == 0)[..., None], 0.0, part)
        total, out = total + weight, out + weight[..., None] * used
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    lse = torch.log(total) + anchor
    if sink is not None:
        # The sink's share is exp(sink) of exp(lse) + exp(sink).
        out = out * torch.sigmoid(lse - sink)[..., None]
    return out, lse
