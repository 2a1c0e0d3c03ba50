"""Cases of the part "topk": the best keys of each row, the same list every time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_ref.testing.one_tensor_case import OneTensorCase


@dataclass(frozen=True, kw_only=True)
class TopkCase(OneTensorCase):
    """The k best positions of each row; exact, ties to the lower position.

    Attributes:
        rows: Query rows.
        s_kv: Keys.
        k: Width of the result.
        scores: "normal"; "ties" (few different numbers), "zeros" (all equal), "signed zeros" (0.0
            and -0.0 are equal), "nan" (strewn in), "minus inf" (most of them) or "all nan".
        visible: "all"; "ragged" (0, 1, k - 1, ...) with the highest scores behind the end.
    """

    kind: str = "topk"
    rows: int = 5
    s_kv: int = 300
    k: int = 64
    scores: str = "normal"
    visible: str = "all"

    def build(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """scores, visible_lens, k."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.s_kv)
        scores = torch.randn(shape, generator=generator)
        chosen = torch.rand(shape, generator=generator)
        if self.scores == "ties":
            scores = torch.relu(scores * 2).round()
        elif self.scores == "zeros":
            scores = torch.zeros(shape)
        elif self.scores == "signed zeros":
            scores = torch.where(chosen < 0.5, -0.0, 0.0)
        elif self.scores == "nan":
            scores[chosen < 0.4] = math.nan
        elif self.scores == "minus inf":
            scores[chosen < 0.9] = -math.inf
        elif self.scores == "all nan":
            scores[:] = math.nan
        lens = torch.full((self.rows,), self.s_kv)
        if self.visible == "ragged":
            some = torch.tensor([0, 1, self.k - 1, self.k, self.s_kv - 1])
            lens = some.clamp(0, self.s_kv)[torch.arange(self.rows) % 5]
            scores[torch.arange(self.s_kv) >= lens[:, None]] = 1e30
        return {
            "scores": scores.to(device),
            "visible_lens": lens.to(torch.int32).to(device),
            "k": self.k,
        }

    def expect(self) -> Tensor:
        """By Python's sort, row after row."""
        return self._best(lambda score, position: (-score, position))

    def _best(self, key: Callable[[float, int], Any], nan_wins: bool = False) -> Tensor:
        scores, lens, k = self.build().values()
        result = torch.full((self.rows, k), -1)
        for row, (line, end) in enumerate(zip(scores.tolist(), lens.tolist(), strict=True)):
            seen = [(math.inf if nan_wins and math.isnan(s) else s, p) for p, s in enumerate(line)]
            able = [(s, p) for s, p in seen[:end] if not math.isnan(s) and s != -math.inf]
            best = sorted(able, key=lambda pair: key(*pair))[:k]
            result[row, : len(best)] = torch.tensor([p for _, p in best], dtype=torch.int64)
        return result

    def guesses(self) -> dict[str, Tensor]:
        """Other orders."""
        return {
            "ties go to the higher position": self._best(lambda s, p: (-s, -p)),
            "NaN ranks as the greatest number": self._best(lambda s, p: (-s, p), nan_wins=True),
            "the lowest scores are selected": self._best(lambda s, p: (s, p)),
            "-0.0 ranks below 0.0": self._best(lambda s, p: (-s, math.copysign(1, s) < 0, p)),
        }
