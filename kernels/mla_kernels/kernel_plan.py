"""What the plans of both kernel backends share: checks, buffers, and decode as splits with a merge.

A backend's own plan says how its kernels are launched and which memory they can address.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.selected import require_sparse
from mla_ref.backends import AttnSpec
from mla_ref.backends.plan_checks import require_outputs, require_planned
from mla_ref.checks import require_float, require_same_device, require_size
from mla_ref.numerics import AttentionResult


@dataclass(frozen=True)
class KernelPlan(ABC):
    """Buffers for the partial results of a decode step.

    Attributes:
        spec: What it was planned for.
        max_rows: Rows at most.
        num_splits: Pieces of each list in `decode`; one writes the result itself.
        partials: `out` [num_splits, max_rows, heads, 512] and `lse` in float32; empty where one
            split or none is planned.
        kinds: Which of "decode" and "extend" it runs.
    """

    spec: AttnSpec
    max_rows: int
    num_splits: int
    partials: AttentionResult
    kinds: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the partial results."""
        return self.partials.out.nbytes + self.partials.lse.nbytes

    def decode(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        counts: Int[Tensor, " rows"] | None = None,
        *,
        softmax_scale: float,
        sink: Float[Tensor, " h"] | None = None,
        out: Float[Tensor, "rows h d_c"] | None = None,
        lse: Float[Tensor, "rows h"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionResult:
        """Each list in the plan's splits, merged by a second kernel. See `Plan.decode`."""
        self._require("decode", q, kv_cache, indices, counts, softmax_scale, sink)
        result = self._result(q, out, lse, out_dtype)
        if self.num_splits == 1:
            self._attend(q, kv_cache, indices, counts, sink, softmax_scale, _as_one_split(result))
            return result
        rows = q.shape[0]
        parts = AttentionResult(self.partials.out[:, :rows], self.partials.lse[:, :rows])
        # The sink belongs to all splits together, so it waits for the merge.
        self._attend(q, kv_cache, indices, counts, None, softmax_scale, parts)
        self._merge(parts, result, sink)
        return result

    def extend(
        self,
        q: Float[Tensor, "rows h d_row"],
        kv_cache: Shaped[Tensor, "pages page_size row"],
        indices: Int[Tensor, "rows topk"],
        counts: Int[Tensor, " rows"] | None = None,
        *,
        softmax_scale: float,
        sink: Float[Tensor, " h"] | None = None,
        out: Float[Tensor, "rows h d_c"] | None = None,
        lse: Float[Tensor, "rows h"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionResult:
        """One pass of each row over its list: the same kernel with one split. See `Plan.extend`."""
        self._require("extend", q, kv_cache, indices, counts, softmax_scale, sink)
        result = self._result(q, out, lse, out_dtype)
        self._attend(q, kv_cache, indices, counts, sink, softmax_scale, _as_one_split(result))
        return result

    @abstractmethod
    def _attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        sink: Tensor | None,
        softmax_scale: float,
        results: AttentionResult,
    ) -> None:
        """Launch attention into `results`, whose first dimension is the split."""

    @abstractmethod
    def _merge(self, parts: AttentionResult, result: AttentionResult, sink: Tensor | None) -> None:
        """Launch the merge of the splits."""

    @abstractmethod
    def _require_readable(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        sink: Tensor | None,
    ) -> None:
        """Raise where the kernels cannot address an input."""

    @abstractmethod
    def _require_writable(self, out: Tensor) -> None:
        """Raise where the kernels cannot address the caller's output."""

    def _require(
        self,
        kind: str,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        softmax_scale: float,
        sink: Tensor | None,
    ) -> None:
        """Raise unless a run fits its plan and the kernels; reads no values."""
        require_planned(self.spec, self.max_rows, self.kinds, kind, q, kv_cache, indices)
        require_sparse(q, kv_cache, indices, counts, softmax_scale, self.spec.kv_lora_rank)
        if kv_cache.dtype not in (torch.uint8, q.dtype):
            # What fits SM120 was compiled for both alike; with two kinds products are in float32.
            raise ValueError(
                f"kv_cache must hold FP8 rows or numbers of the plan's q_dtype {q.dtype}, got "
                f"{kv_cache.dtype}"
            )
        if sink is not None:
            require_float("sink", sink, "h")
            require_size("sink", sink, 0, q.shape[1], "one sink a head")
            require_same_device({"q": q, "sink": sink})
        self._require_readable(q, kv_cache, indices, counts, sink)

    def _result(
        self, q: Tensor, out: Tensor | None, lse: Tensor | None, out_dtype: torch.dtype | None
    ) -> AttentionResult:
        """The caller's buffers, or new ones."""
        dtype = require_outputs(self.spec, q, out, lse, out_dtype, torch.float32)
        if out is None:
            out = q.new_empty(*q.shape[:2], self.spec.kv_lora_rank, dtype=dtype)
        else:
            self._require_writable(out)
        if lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return AttentionResult(out, lse)


def new_partials(
    spec: AttnSpec, max_rows: int, splits: int, device: torch.device
) -> AttentionResult:
    """Buffers for the partial results; empty where there is nothing to merge."""
    shape = (splits if splits > 1 else 0, max_rows, spec.num_heads)
    return AttentionResult(
        torch.empty(*shape, spec.kv_lora_rank, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def _as_one_split(result: AttentionResult) -> AttentionResult:
    return AttentionResult(result.out[None], result.lse[None])
