"""What every attention in this library returns, and the precision it computes in."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class AttentionResult(NamedTuple):
    """The output of an attention and the weight it carries in a later merge.

    Attributes:
        out: The normalised output. A row that may see nothing is exactly 0.
        lse: Natural logarithm of the sum of exp(score) over the keys that the row saw, without
            any sink; -inf for a row that may see nothing. float32, or float64 where the inputs
            are float64: bfloat16 would err by 0.03 at 8.7 and bend every merge (aiter#3542).
    """

    out: Float[Tensor, "*rows d_v"]
    lse: Float[Tensor, "*rows"]


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is float64, else float32: references never compute lower than that."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def lse_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """The dtype of an LSE beside an output of `out_dtype`: float64 beside float64, else float32."""
    return torch.float64 if out_dtype == torch.float64 else torch.float32
