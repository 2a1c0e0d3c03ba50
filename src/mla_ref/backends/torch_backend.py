"""The torch backend: rungs 9 and 10 behind the contract, on any device that torch knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.attention.sparse_decode import plan_splits, sparse_decode
from mla_ref.attention.sparse_extend import sparse_extend
from mla_ref.backends.plan_checks import require_outputs, require_planned
from mla_ref.backends.protocol import KINDS, AttnSpec, require_kinds
from mla_ref.cache import write_fp8_rows
from mla_ref.checks import describe, require_count
from mla_ref.indexer import index_scores, positions_to_slots, select_topk
from mla_ref.numerics import AttentionResult, merge_many

# Units of work that a decode step is cut into where no GPU says otherwise. A fixed number, so that
# a result has the same bits on every computer; more than one row, so that merging is exercised.
UNITS = 16


@dataclass(frozen=True)
class TorchPlan:
    """Buffers for the partial results of a decode step; none in a plan for extend alone.

    torch itself allocates more while it runs; what a kernel would keep in registers is not counted.

    Attributes:
        spec: What it was planned for.
        max_rows: Rows at most.
        num_splits: Pieces of each list in `decode`; fixed, so the same row has the same bits
            whatever stands beside it. 0 in a plan for extend alone.
        partials: `out` [num_splits, max_rows, heads, kv_lora_rank] and `lse`.
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
        """Rung 10 with the plan's number of splits. See `Plan.decode`."""
        require_planned(self.spec, self.max_rows, self.kinds, "decode", q, kv_cache, indices)
        out_dtype = require_outputs(self.spec, q, out, lse, out_dtype, self.partials.lse.dtype)
        result = sparse_decode(
            _wide(q, out_dtype),
            kv_cache,
            indices,
            counts,
            softmax_scale=softmax_scale,
            kv_lora_rank=self.spec.kv_lora_rank,
            num_splits=self.num_splits,
            sink=sink,
            partials=self.partials,
        )
        return _handed_over(result, out, lse, out_dtype)

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
        """Rung 9. See `Plan.extend`."""
        require_planned(self.spec, self.max_rows, self.kinds, "extend", q, kv_cache, indices)
        out_dtype = require_outputs(self.spec, q, out, lse, out_dtype, self.partials.lse.dtype)
        result = sparse_extend(
            _wide(q, out_dtype),
            kv_cache,
            indices,
            counts,
            softmax_scale=softmax_scale,
            kv_lora_rank=self.spec.kv_lora_rank,
            sink=sink,
        )
        return _handed_over(result, out, lse, out_dtype)


@dataclass(frozen=True)
class TorchBackend:
    """Rungs 9 and 10.

    Attributes:
        multiprocessors: Units of work to cut a decode step into.
    """

    multiprocessors: int = UNITS

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        require_count("multiprocessors", self.multiprocessors, at_least=1)

    @property
    def name(self) -> str:
        """The name is "torch"."""
        return "torch"

    @property
    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """All but the sampler: the library's own functions."""
        return MappingProxyType(
            {
                "merge": merge_many,
                "cache_write": write_fp8_rows,
                "convert": positions_to_slots,
                "index_scores": index_scores,
                "topk": select_topk,
            }
        )

    def supports(self, spec: AttnSpec, device: torch.device) -> str | None:
        """Everything but a 656-byte row for other dimensions than those it is made for.

        Queries are of a float dtype of 16 bits or more.
        """
        dims = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        if spec.cache_format == "fp8" and dims != (512, 64):
            return (
                f"a 656-byte row holds 512 + 64 numbers, the spec has kv_lora_rank {dims[0]} and "
                f"qk_rope_head_dim {dims[1]}"
            )
        if not spec.q_dtype.is_floating_point or spec.q_dtype.itemsize < 2:
            return f"q_dtype must be a float dtype of 16 bits or more, got {spec.q_dtype}"
        return None

    def plan(
        self,
        spec: AttnSpec,
        *,
        max_rows: int,
        max_requests: int,
        device: torch.device,
        kinds: tuple[str, ...] = KINDS,
    ) -> TorchPlan:
        """Buffers for `max_rows` rows; `max_requests` changes nothing here, a row is a unit."""
        if not isinstance(spec, AttnSpec):
            raise TypeError(f"spec must be an AttnSpec, got {describe(spec)}")
        require_count("max_rows", max_rows)
        require_count("max_requests", max_requests)
        if reason := self.supports(spec, device):
            raise ValueError(f"the torch backend does not serve this spec: {reason}")
        splits = 0
        if "decode" in require_kinds(kinds):
            splits = plan_splits(max_rows, spec.num_heads, spec.topk, self.multiprocessors)
        dtype = torch.float64 if spec.q_dtype == torch.float64 else torch.float32
        shape = (splits, max_rows, spec.num_heads)
        partials = AttentionResult(
            torch.empty(*shape, spec.kv_lora_rank, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
        )
        return TorchPlan(spec, max_rows, splits, partials, kinds)


def _wide(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The result has q's dtype, so a wider result is asked for with a wider q: it is exact."""
    return q.to(torch.promote_types(q.dtype, out_dtype))


def _handed_over(
    result: AttentionResult, out: Tensor | None, lse: Tensor | None, out_dtype: torch.dtype
) -> AttentionResult:
    """The result in its dtype, in the caller's buffers where there are any."""
    found = result.out.to(out_dtype)
    return AttentionResult(
        found if out is None else out.copy_(found),
        result.lse if lse is None else lse.copy_(result.lse),
    )
