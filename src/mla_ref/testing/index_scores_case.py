"""Cases of the part "index_scores": the lightning indexer's guess at each key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.numerics.precision import ulp
from mla_ref.testing.one_tensor_case import OneTensorCase
from mla_ref.testing.tolerance import FLOAT32_EPS


@dataclass(frozen=True, kw_only=True)
class IndexScoresCase(OneTensorCase):
    """sum over heads of weight * ReLU(q . k), held to the precision rule.

    Attributes:
        rows: Query rows.
        heads: Index heads.
        s_kv: Keys.
        negative: Whether weights may be negative; then the ReLU decides who wins.
        dtype: Of q and k.
    """

    kind: str = "index_scores"
    rows: int = 3
    heads: int = 32
    s_kv: int = 100
    negative: bool = True
    dtype: str = "bfloat16"

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """q, k, weights."""
        generator = torch.Generator().manual_seed(self.seed)
        q = torch.randn(self.rows, self.heads, 128, generator=generator)
        k = torch.randn(self.s_kv, 128, generator=generator)
        weights = torch.randn(self.rows, self.heads, generator=generator)
        weights = (weights if self.negative else weights.abs()) * (self.heads * 128) ** -0.5
        dtype = getattr(torch, self.dtype)
        return {
            "q": q.to(dtype).to(device),
            "k": k.to(dtype).to(device),
            "weights": weights.to(device),
        }

    def expect(self) -> Tensor:
        """In float64."""
        return self._scores(torch.relu)

    def _scores(self, relu: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, weights = (x.double() for x in self.build().values())
        return (relu(q @ k.T) * weights[..., None]).sum(dim=1)

    def tolerance(self, maths: str = "float32") -> Tensor:
        """Twice the float32 twin's error, one ulp, and the noise of summing 128 products."""
        q, k, weights = (x.float() for x in self.build().values())
        low = (torch.relu(q @ k.T) * weights[..., None]).sum(dim=1).double()
        expected = self.expect()
        noise = (weights.abs() * q.norm(dim=-1)).sum(dim=1, keepdim=True) * k.norm(dim=-1)
        return (
            2 * (low - expected).abs()
            + ulp(expected, torch.float32)
            + (128**0.5 * FLOAT32_EPS * noise).double()
        )

    def guesses(self) -> dict[str, Tensor]:
        """Formulas that are near."""
        q, k, weights = (x.double() for x in self.build().values())
        late = torch.relu(((q @ k.T) * weights[..., None]).sum(dim=1))
        return {
            "the ReLU is missing": self._scores(lambda x: x),
            "the ReLU stands after the sum over heads": late,
            "the weights are not applied": torch.relu(q @ k.T).sum(dim=1),
        }
