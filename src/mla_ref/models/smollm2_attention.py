"""One attention layer of SmolLM2 as it was trained: grouped-query attention (GQA).

Neighbouring query heads share a key and value head (arXiv:2305.13245): SmolLM2-135M has 9 query
heads of 64 numbers and caches 3 keys and 3 values, 384 numbers a token and layer. `gqa_as_mla`
writes the same layer in MLA's shape.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.attention import paged_attention
from mla_ref.batching import Step
from mla_ref.cache import write_rows
from mla_ref.checks import can_look
from mla_ref.layers import apply_rope, project
from mla_ref.models.projections import padded_rows


@dataclass(frozen=True)
class GQAProjections:
    """The linear maps and rotary positions of one grouped-query attention layer.

    Attributes:
        w_q: Query projection, heads one after the other.
        w_k: Key projection.
        w_v: Value projection.
        w_o: Back to the residual stream.
        cos: From `rope_table`, one row for each position there can be.
        sin: As cos.
        head_dim: Width d of a head.
    """

    w_q: Float[Tensor, "q_width hidden"]
    w_k: Float[Tensor, "kv_width hidden"]
    w_v: Float[Tensor, "kv_width hidden"]
    w_o: Float[Tensor, "hidden q_width"]
    cos: Float[Tensor, "max_positions half_dim"]
    sin: Float[Tensor, "max_positions half_dim"]
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Query heads h_q."""
        return self.w_q.shape[0] // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Heads h_kv of keys and values."""
        return self.w_k.shape[0] // self.head_dim

    @property
    def softmax_scale(self) -> float:
        """d^-0.5, also where the layer is written as MLA and a row is wider."""
        return self.head_dim**-0.5

    def queries(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s h_q d"]:
        """Queries, turned to their positions."""
        return self._turn(self._heads(x, self.w_q), positions)

    def keys(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s h_kv d"]:
        """Keys, turned to their positions."""
        return self._turn(self._heads(x, self.w_k), positions)

    def values(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s h_kv d"]:
        """Values."""
        return self._heads(x, self.w_v)

    def qkv(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, "s h_q d"], Float[Tensor, "s h_kv d"], Float[Tensor, "s h_kv d"]]:
        """Queries, keys and values."""
        return self.queries(x, positions), self.keys(x, positions), self.values(x)

    def output(self, heads: Float[Tensor, "s h_q d"]) -> Float[Tensor, "s hidden"]:
        """Back to the residual stream."""
        return project(heads.flatten(1), self.w_o)

    def cache_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache: keys and values, each in pages."""
        return (2, num_pages, page_size, self.num_kv_heads, self.head_dim)

    def to(self, dtype: torch.dtype) -> "GQAProjections":
        """The same layer with its weights in another dtype."""
        names = ("w_q", "w_k", "w_v", "w_o")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return project(x, weight).unflatten(-1, (-1, self.head_dim))

    def _turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        # A negative position would read the table from its end.
        last = self.cos.shape[0] - 1
        looks = can_look(positions) and positions.numel()
        if looks and not 0 <= int(positions.min()) <= int(positions.max()) <= last:
            raise ValueError(
                f"positions must lie in 0 .. {last}, got {int(positions.min())} .. "
                f"{int(positions.max())}"
            )
        return apply_rope(heads, self.cos[positions], self.sin[positions], interleaved=True)


def attend_grouped(
    layer: GQAProjections,
    x: Float[Tensor, "num_tokens hidden"],
    kv_cache: Float[Tensor, "two pages page_size h_kv d"],
    step: Step,
) -> Float[Tensor, "num_tokens hidden"]:
    """One layer's grouped-query attention over a step: write keys and values, then attend.

    Args:
        layer: The layer's linear maps.
        x: Input of the attention (after its norm), one row a new token.
        kv_cache: Keys and values of this layer; the step's slots are overwritten in place.
        step: The batch.
    """
    k_cache, v_cache = kv_cache
    q, k, v = layer.qkv(x, step.positions)
    write_rows(k_cache, k, step.slot_mapping, validate=step.validates)
    write_rows(v_cache, v, step.slot_mapping, validate=step.validates)
    result = paged_attention(
        q[: step.num_tokens],
        k_cache,
        v_cache,
        **step.batch,
        softmax_scale=layer.softmax_scale,
    )
    return layer.output(padded_rows(result.out, step))
