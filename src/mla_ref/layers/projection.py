"""A linear map without bias that does not slow down where few rows come."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Up to here the product is memory-bound and its two sides may be exchanged.
FEW_ROWS = 16


class Projection(nn.Linear):
    """As `nn.Linear`, for a step of few rows as (W x^T)^T.

    A decode step of 4 rows reads each weight once whichever way the product is written, but CPU
    libraries are tuned for many rows on the left, and x W^T can take much longer than W x^T.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        super().__init__(in_features, out_features, bias=False, dtype=dtype, device=device)

    def forward(self, input: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Map each row."""
        if input.ndim == 2 and 1 < input.shape[0] <= FEW_ROWS:
            return (self.weight @ input.T).T
        return super().forward(input)
