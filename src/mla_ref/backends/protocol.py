"""The contract between this library and a sparse-MLA implementation: torch, Triton, CuPy, yours.

Three objects. `AttnSpec` says what a layer needs. `Backend` says whether it can do that on a
machine, and makes a `Plan`: buffers for at most so many rows and requests, allocated once. A plan
runs `decode` and `extend`, which mean the same and differ in how the work is cut; it may be made
for one of them alone, and then holds no buffers for the other.

The rules that conformance cases hold a backend to (`mla-ref check`):

- A run reads nothing back to the host and may be captured in a CUDA graph. A plan never grows: more
  rows than planned, or wider lists, are a ValueError that names both numbers; a kind that it was
  not planned for is one that names the kind and what it was planned for.
- An index outside the cache counts as -1, and -1 may stand anywhere in a row. Entries at or beyond
  `counts` are never read. A slot listed twice counts twice.
- NaN or infinity in a row that is not listed never reaches a result.
- A row without a valid entry gives output 0 and LSE -inf.
- The LSE is natural, float32, without the sink.
- The same input gives the same bits; permuting rows permutes the results bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mla_ref.checks import describe, require_choice, require_count
from mla_ref.numerics import AttentionResult

CACHE_FORMATS = ("bf16", "fp8")
# The two ways in which a plan runs. Partial results of splits are kept by decode alone.
KINDS = ("decode", "extend")
# The optional parts of a backend, each with the signature of its torch twin.
PARTS = ("merge", "cache_write", "convert", "index_scores", "topk", "sampler")


@dataclass(frozen=True)
class AttnSpec:
    """What one layer's sparse attention needs.

    Attributes:
        num_heads: Query heads on this rank.
        kv_lora_rank: Numbers of a cached row that are its value, 512 in the served models.
        qk_rope_head_dim: Numbers of the rotary key behind them, 64.
        topk: Width of the index lists.
        page_size: Tokens a page of the cache.
        cache_format: "bf16": rows of kv_lora_rank + qk_rope_head_dim numbers in a float dtype of 16
            bits or more; "fp8": rows of 656 bytes.
        q_dtype: Dtype of queries and outputs.
    """

    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    topk: int = 2048
    page_size: int = 64
    cache_format: str = "fp8"
    q_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Raise a ValueError that names the field."""
        for name in ("num_heads", "kv_lora_rank", "topk", "page_size"):
            require_count(name, getattr(self, name), at_least=1)
        require_count("qk_rope_head_dim", self.qk_rope_head_dim)
        require_choice("cache_format", self.cache_format, CACHE_FORMATS)
        if not isinstance(self.q_dtype, torch.dtype):
            raise TypeError(f"q_dtype must be a torch.dtype, got {describe(self.q_dtype)}")

    @property
    def row_dim(self) -> int:
        """Numbers in a query and a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@runtime_checkable
class Plan(Protocol):
    """Buffers for a number of rows, and the two ways to run on them.

    A way that the plan was not made for is there too, and raises a ValueError that says so.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that the plan has allocated."""

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
        """Each row's list in splits that are merged: for few rows.

        Args:
            q: Absorbed queries, [latent | rotary] as the cached row.
            kv_cache: Any page stride.
            indices: Physical slots of each row.
            counts: Entries of each row that count.
            softmax_scale: The un-absorbed scale; it is never derived from the row's width.
            sink: Score of an extra key of value 0 for each head.
            out: Where to write; a new tensor if None.
            lse: Where to write; a new tensor if None.
            out_dtype: float32 for partial results that are merged later; default q's dtype.
        """

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
        """One pass of each row over its list: for many rows. Arguments as in `decode`."""


@runtime_checkable
class Backend(Protocol):
    """An implementation of sparse MLA."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """The optional parts that the backend has, by their names in `PARTS`; possibly none.

        "merge" is `numerics.merge_many`, "cache_write" is `cache.write_fp8_rows`, "convert" is
        `indexer.positions_to_slots`, "index_scores" is `indexer.index_scores`, "topk" is
        `indexer.select_topk`, "sampler" is `speculative.rejection_sample`: the same arguments and
        results.
        """

    def supports(self, spec: AttnSpec, device: torch.device) -> str | None:
        """None if the backend can serve the spec on this device, else the reason why not."""

    def plan(
        self,
        spec: AttnSpec,
        *,
        max_rows: int,
        max_requests: int,
        device: torch.device,
        kinds: tuple[str, ...] = KINDS,
    ) -> Plan:
        """Allocate, on the host and once.

        Args:
            spec: What a layer needs.
            max_rows: Query rows of a run at most.
            max_requests: Requests of a run at most.
            device: Where.
            kinds: Which of `KINDS` the plan will run. A plan for extend alone needs no partial
                results of splits: 134 MB less for 8,192 rows of 8 heads.

        Raises:
            ValueError: With the reason of `supports`.
        """


def require_kinds(kinds: object) -> tuple[str, ...]:
    """Return `kinds` if it is a tuple of one or more of `KINDS`."""
    if not isinstance(kinds, tuple):
        raise TypeError(f"kinds must be a tuple of {', '.join(KINDS)}, got {describe(kinds)}")
    if not kinds:
        raise ValueError(f"kinds must hold at least one of {', '.join(KINDS)}, got ()")
    for kind in kinds:
        require_choice("kinds", kind, KINDS)
    return kinds


def require_planned_kind(kind: str, planned: tuple[str, ...]) -> None:
    """Raise a ValueError unless a plan that is asked to run `kind` was made for it."""
    if kind not in planned:
        raise ValueError(f"this plan is for {' and '.join(planned)}, it cannot run {kind}")
