"""Errors of each layer by itself: every kernel gets the same input there.

Logits show what all layers' errors have grown to. Here a layer's input is decode's in all three, so
an error is this layer's own. Each shard of the heads is counted apart, as the ranks of a server
are: 30 layers on 3 ranks are 90 comparisons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.models.sparse import Attend
from mla_ref.numerics import AttentionResult
from mla_ref.validation.measure import Summary, rounded


@dataclass(frozen=True)
class LayerError:
    """Two kernels in one layer and shard, over all measured rows.

    Attributes:
        layer: From 0.
        shard: From 0.
        max_abs: The largest absolute difference of an output; NaN if one is NaN.
        rel_l2: ||a - b|| / ||b||, the plain norm of the difference where b is all zero.
    """

    layer: int
    shard: int
    max_abs: float
    rel_l2: float


@dataclass
class LayerErrors:
    """Attention by several kernels, which keeps their differences and hands on the first's result.

    Attributes:
        ways: The kernels by name; all see the input that the first one's results lead to.
        num_layers: Calls that make up one pass through the model.
        num_shards: Shards of the heads, in order.
    """

    ways: Mapping[str, Attend]
    num_layers: int
    num_shards: int = 1
    _calls: int = field(default=0, init=False)
    # By pair, layer and shard: largest difference, squares of the difference, of the second.
    _sums: dict[tuple[str, str, int, int], tuple[float, float, float]] = field(
        default_factory=dict, init=False
    )

    def __call__(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        *,
        softmax_scale: float,
    ) -> AttentionResult:
        """See `Attend`. Call by call, layer by layer."""
        results = {
            name: attend(q, kv_cache, indices, softmax_scale=softmax_scale)
            for name, attend in self.ways.items()
        }
        layer = self._calls % self.num_layers
        self._calls += 1
        for a, b in combinations(results, 2):
            pairs = zip(
                results[a].out.double().chunk(self.num_shards, dim=1),
                results[b].out.double().chunk(self.num_shards, dim=1),
                strict=True,
            )
            for shard, (x, y) in enumerate(pairs):
                self._add((a, b, layer, shard), x - y, y)
        return next(iter(results.values()))

    def _add(self, key: tuple[str, str, int, int], difference: Tensor, reference: Tensor) -> None:
        most, squares, norm = self._sums.get(key, (0.0, 0.0, 0.0))
        # torch's maximum and not Python's max: that drops a NaN if it comes second.
        largest = torch.maximum(difference.abs().max(), difference.new_tensor(most))
        self._sums[key] = (
            float(largest),
            squares + float(difference.square().sum()),
            norm + float(reference.square().sum()),
        )

    def of(self, a: str, b: str) -> tuple[LayerError, ...]:
        """Every layer's and shard's error between two of the ways, in the order of `ways`."""
        return tuple(
            LayerError(layer, shard, most, sqrt(squares / norm) if norm else sqrt(squares))
            for (first, second, layer, shard), (most, squares, norm) in self._sums.items()
            if (first, second) == (a, b)
        )

    def to_json(self) -> list[dict[str, Any]]:
        """One object a pair."""
        return [
            {
                "pair": [a, b],
                "comparisons": len(errors),
                "max_abs": Summary.of(error.max_abs for error in errors).to_json(),
                "rel_l2": Summary.of(error.rel_l2 for error in errors).to_json(),
                "max_abs_of_layers": [rounded(error.max_abs, 4) for error in errors],
                "rel_l2_of_layers": [rounded(error.rel_l2, 4) for error in errors],
            }
            for a, b in combinations(self.ways, 2)
            if (errors := self.of(a, b))
        ]
