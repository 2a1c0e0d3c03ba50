"""Answer to the exercise of lesson 10. Write your own first."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sparse(
    q: Float[Tensor, "rows h d_row"],
    kv: Float[Tensor, "slots d_row"],
    indices: Int[Tensor, "rows k"],
    softmax_scale: float,
    d_v: int,
) -> tuple[Float[Tensor, "rows h d_v"], Float[Tensor, "rows h"]]:
    """Attention of each row over the slots that its list names."""
    if kv.shape[0] == 0 or indices.shape[1] == 0:
        return q.new_zeros(*q.shape[:2], d_v), q.new_full(q.shape[:2], -torch.inf)
    valid = (indices >= 0) & (indices < kv.shape[0])
    rows = kv[torch.where(valid, indices, 0).long()]
    # What an invalid entry fetched is not used at all: 0 * NaN would be NaN.
    rows = torch.where(valid[..., None], rows, 0.0)
    scores = torch.einsum("rhd,rkd->rhk", q, rows) * softmax_scale
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    weights = torch.exp(scores - anchor[..., None])
    return torch.einsum("rhk,rkd->rhd", weights, rows[..., :d_v]), lse
