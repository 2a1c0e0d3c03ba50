"""Answers to the exercises of lesson 11. Write your own first."""

from jaxtyping import Bool, Float, Int
from torch import Tensor


def accept_length(accepted: Bool[Tensor, "b n"]) -> Int[Tensor, " b"]:
    """Drafts of each request before its first that failed."""
    # A running product is 1 up to the first 0 and 0 from there on.
    return accepted.long().cumprod(dim=1).sum(dim=1)


def accept_or_recover(
    p: Float[Tensor, " vocab"],
    q: Float[Tensor, " vocab"],
    draft: int,
    u: float,
    e: Float[Tensor, " vocab"],
) -> tuple[int, bool]:
    """The draft or a token in its place, so that the result has the law p."""
    if q[draft] > 0 and p[draft] / q[draft] >= u:
        return draft, True
    weights = (p - q).clamp(min=0)
    if not weights.any():
        weights = p
    return int((weights / e).argmax()), False
